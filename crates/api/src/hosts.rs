//! Which router a request's host name leads to. Pure: names in, destination out.
//!
//! ```text
//! api.e2b.<base>                     E2B control
//! <port>-<id>.e2b.<base>             E2B sandbox
//! sandbox.e2b.<base>                 E2B sandbox, named by the headers E2b-Sandbox-Id and -Port
//! <port>-<id>.<base>                 preview
//! <base>, localhost, IPs, all else   native; beside it E2B's single-origin mode:
//!    E2b-Sandbox-Id                     -> E2B sandbox
//!    X-API-Key, path not under /v1      -> E2B control
//! other names below <base>           nobody
//! ```
//!
//! A name below the base domain always decides by itself; headers count only where the name says nothing.

use std::net::{IpAddr, Ipv6Addr};

use axum::http::{HeaderMap, Uri, header};

/// The sandbox and port a host name (or a pair of headers) names. In the extensions of each request
/// that reaches a sandbox router; neither part has been looked up yet.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SandboxHost {
    /// The port in the guest.
    pub port: u16,
    /// The sandbox's id as written: one or more of `[a-z0-9]`.
    pub sandbox: String,
}

/// Where a request goes.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Destination {
    /// The native `/v1` API.
    Native,
    /// E2B's control API.
    E2bControl,
    /// E2B's side of a sandbox.
    E2bSandbox(SandboxHost),
    /// A port of a sandbox, by the native edge.
    Preview(SandboxHost),
}

/// Why a request goes nowhere.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub(crate) enum HostError {
    /// No host at all.
    #[error("the request names no host")]
    Missing,
    /// Not a host name, or several.
    #[error("Invalid host")]
    Invalid,
    /// The port before the dash is none. (E2B's words, also for the next.)
    #[error("Invalid sandbox port")]
    SandboxPort,
    /// The id behind the dash is none.
    #[error("Invalid sandbox ID")]
    SandboxId,
    /// `sandbox.e2b.<base>` without the header that says which.
    #[error("Missing header E2b-Sandbox-Id")]
    MissingSandboxHeader,
    /// The same with no port.
    #[error("Missing header E2b-Sandbox-Port")]
    MissingPortHeader,
    /// A name below the base domain that nobody answers for.
    #[error("no service has this host name")]
    Unknown,
}

/// Decides for one request.
pub(crate) fn destination(base: &str, uri: &Uri, headers: &HeaderMap) -> Result<Destination, HostError> {
    let host = host_name(uri, headers)?;
    let Some(name) = below(&host, base) else {
        return plain_origin(uri, headers);
    };
    match name.strip_suffix(".e2b") {
        Some("api") => Ok(Destination::E2bControl),
        Some("sandbox") => sandbox_by_headers(headers)?.ok_or(HostError::MissingSandboxHeader),
        Some(label) => Ok(Destination::E2bSandbox(sandbox_label(label)?)),
        None if name == "e2b" || !starts_with_digit(name) => Err(HostError::Unknown),
        None => Ok(Destination::Preview(sandbox_label(name)?)),
    }
}

/// What comes before `.base`, if the host is below it.
fn below<'a>(host: &'a str, base: &str) -> Option<&'a str> {
    host.strip_suffix(base)?.strip_suffix('.')
}

fn starts_with_digit(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_digit())
}

/// A host that belongs to no peer: ours, unless the request carries a peer's marks.
fn plain_origin(uri: &Uri, headers: &HeaderMap) -> Result<Destination, HostError> {
    if let Some(sandbox) = sandbox_by_headers(headers)? {
        return Ok(sandbox);
    }
    let is_native = uri.path() == "/" || uri.path() == "/v1" || uri.path().starts_with("/v1/");
    Ok(if !is_native && headers.contains_key("x-api-key") { Destination::E2bControl } else { Destination::Native })
}

fn sandbox_by_headers(headers: &HeaderMap) -> Result<Option<Destination>, HostError> {
    let Some(sandbox) = headers.get("e2b-sandbox-id") else {
        return Ok(None);
    };
    let sandbox = sandbox_id(sandbox.to_str().map_err(|_| HostError::SandboxId)?)?;
    let port = match headers.get("e2b-sandbox-port") {
        None => return Err(HostError::MissingPortHeader),
        Some(port) => sandbox_port(port.to_str().map_err(|_| HostError::SandboxPort)?)?,
    };
    Ok(Some(Destination::E2bSandbox(SandboxHost { port, sandbox })))
}

/// `<port>-<id>`, one label.
fn sandbox_label(label: &str) -> Result<SandboxHost, HostError> {
    let (port, sandbox) = label.split_once('-').ok_or(HostError::Invalid)?;
    Ok(SandboxHost { port: sandbox_port(port)?, sandbox: sandbox_id(sandbox)? })
}

fn sandbox_port(text: &str) -> Result<u16, HostError> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
    text.parse().ok().filter(|_| is_plain).ok_or(HostError::SandboxPort)
}

fn sandbox_id(text: &str) -> Result<String, HostError> {
    let is_id = (1..=63).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    if is_id { Ok(text.to_owned()) } else { Err(HostError::SandboxId) }
}

/// The host a request is for, in lower case, without port and trailing dot. HTTP/2 and absolute
/// requests carry it in the URI, others in the Host header; where both are there they must agree.
fn host_name(uri: &Uri, headers: &HeaderMap) -> Result<String, HostError> {
    let mut host = uri.authority().map(|authority| parse_authority(authority.as_str())).transpose()?;
    let mut values = headers.get_all(header::HOST).iter();
    if let Some(value) = values.next() {
        let named = parse_authority(value.to_str().map_err(|_| HostError::Invalid)?)?;
        if values.next().is_some() || host.as_ref().is_some_and(|host| *host != named) {
            return Err(HostError::Invalid);
        }
        host = Some(named);
    }
    host.ok_or(HostError::Missing)
}

/// `host`, `host:port`, `[v6]:port`; the host normalised. IPv6 comes back without brackets.
pub(crate) fn parse_authority(authority: &str) -> Result<String, HostError> {
    if let Some(rest) = authority.strip_prefix('[') {
        let (address, port) = rest.split_once(']').ok_or(HostError::Invalid)?;
        let address: Ipv6Addr = address.parse().map_err(|_| HostError::Invalid)?;
        check_port(port)?;
        return Ok(address.to_string());
    }
    let (name, port) = match authority.find(':') {
        Some(colon) => authority.split_at(colon),
        None => (authority, ""),
    };
    check_port(port)?;
    let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    if is_host_name(&name) { Ok(name) } else { Err(HostError::Invalid) }
}

/// Nothing, `:`, or `:` and a port.
fn check_port(port: &str) -> Result<(), HostError> {
    match port.strip_prefix(':') {
        None if port.is_empty() => Ok(()),
        Some("") => Ok(()),
        Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) && digits.parse::<u16>().is_ok() => Ok(()),
        _ => Err(HostError::Invalid),
    }
}

/// Whether a name can be the base domain or a host: labels of `[a-z0-9_-]`, in the lengths of the DNS.
pub(crate) fn is_host_name(name: &str) -> bool {
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(&byte))
    };
    name.len() <= 253 && name.split('.').all(is_label)
}

/// Whether a host name is an address rather than a name.
pub(crate) fn is_address(name: &str) -> bool {
    name.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderName, HeaderValue};

    use super::*;

    const BASE: &str = "stockade.localhost";

    fn go(uri: &str, headers: &[(&'static str, &str)]) -> Result<Destination, HostError> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(HeaderName::from_static(name), HeaderValue::from_bytes(value.as_bytes()).expect("a value"));
        }
        destination(BASE, &uri.parse().expect("a URI"), &map)
    }

    fn host(host: &str) -> Result<Destination, HostError> {
        go("/x", &[("host", host)])
    }

    fn at(port: u16, sandbox: &str) -> SandboxHost {
        SandboxHost { port, sandbox: sandbox.to_owned() }
    }

    #[test]
    fn every_kind_of_name_finds_its_router() {
        let native = Ok(Destination::Native);
        for name in
            [BASE, "localhost", "127.0.0.1", "[::1]", "box.lan", "api.e2b.other.example", "notstockade.localhost"]
        {
            assert_eq!(host(name), native, "{name}");
        }
        assert_eq!(host("api.e2b.stockade.localhost"), Ok(Destination::E2bControl));
        assert_eq!(host("49983-sbx1.e2b.stockade.localhost"), Ok(Destination::E2bSandbox(at(49983, "sbx1"))));
        assert_eq!(host("8080-sbx1.stockade.localhost"), Ok(Destination::Preview(at(8080, "sbx1"))));
    }

    #[test]
    fn ports_case_and_a_trailing_dot_change_nothing() {
        for name in ["api.e2b.stockade.localhost:8443", "API.E2B.Stockade.LOCALHOST", "api.e2b.stockade.localhost.:1"] {
            assert_eq!(host(name), Ok(Destination::E2bControl), "{name}");
        }
        assert_eq!(host("80-SBX1.e2b.stockade.localhost.:443"), Ok(Destination::E2bSandbox(at(80, "sbx1"))));
        assert_eq!(host("stockade.localhost:"), Ok(Destination::Native));
        assert_eq!(host("[::1]:80"), Ok(Destination::Native));
    }

    #[test]
    fn hostile_names_are_refused() {
        let invalid = [
            "",
            ".",
            "..",
            "a..b",
            ".stockade.localhost",
            "stockade.localhost..",
            "user@stockade.localhost",
            "a b",
            "localhost:x",
            "localhost:80:80",
            "localhost:65536",
            "localhost:-1",
            "[::1",
            "[::1]x",
            "[zz]",
            "::1",
            "a/b",
            "localhost\\",
            "x%2ey",
            "caf\u{e9}.localhost",
        ];
        for name in invalid {
            assert_eq!(host(name), Err(HostError::Invalid), "{name:?}");
        }
        assert_eq!(host(&format!("{}.localhost", "a".repeat(64))), Err(HostError::Invalid));
        assert_eq!(host(&format!("{}localhost", "a.".repeat(130))), Err(HostError::Invalid));
    }

    #[test]
    fn sandbox_labels_are_checked_part_by_part() {
        for label in ["0-sbx1", "65536-sbx1", "-sbx1", "080-sbx1", "8_0-sbx1", "x-sbx1"] {
            assert_eq!(host(&format!("{label}.e2b.{BASE}")), Err(HostError::SandboxPort), "{label}");
        }
        for label in ["80-", "80-sbx_1", "80-sbx-1", "80-sbx1.more"] {
            assert_eq!(host(&format!("{label}.e2b.{BASE}")), Err(HostError::SandboxId), "{label}");
        }
        for name in ["e2b", "api", "sandbox", "www", "x-sbx1"] {
            assert_eq!(host(&format!("{name}.{BASE}")), Err(HostError::Unknown), "{name}");
        }
        assert_eq!(host(&format!("nodash.e2b.{BASE}")), Err(HostError::Invalid));
    }

    #[test]
    fn a_request_without_a_host_or_with_two_is_refused() {
        assert_eq!(go("/x", &[]), Err(HostError::Missing));
        assert_eq!(go("/x", &[("host", "localhost"), ("host", "localhost")]), Err(HostError::Invalid));
        assert_eq!(go("http://api.e2b.stockade.localhost/x", &[("host", "localhost")]), Err(HostError::Invalid));
        let same = go("http://api.e2b.stockade.localhost:80/x", &[("host", "API.e2b.stockade.localhost")]);
        assert_eq!(same, Ok(Destination::E2bControl));
        assert_eq!(go("https://api.e2b.stockade.localhost/x", &[]), Ok(Destination::E2bControl));
    }

    #[test]
    fn headers_name_a_sandbox_only_where_the_host_name_does_not() {
        let id = ("e2b-sandbox-id", "sbx2");
        let port = ("e2b-sandbox-port", "3000");
        for name in ["127.0.0.1:8080", "localhost", "sandbox.e2b.stockade.localhost"] {
            let found = go("/files", &[("host", name), id, port]);
            assert_eq!(found, Ok(Destination::E2bSandbox(at(3000, "sbx2"))), "{name}");
            assert_eq!(go("/files", &[("host", name), id]), Err(HostError::MissingPortHeader), "{name}");
        }
        let by_name = go("/files", &[("host", "49983-sbx1.e2b.stockade.localhost"), id, port]);
        assert_eq!(by_name, Ok(Destination::E2bSandbox(at(49983, "sbx1"))));
        assert_eq!(go("/", &[("host", "api.e2b.stockade.localhost"), id]), Ok(Destination::E2bControl));
        assert_eq!(host("sandbox.e2b.stockade.localhost"), Err(HostError::MissingSandboxHeader));
        assert_eq!(go("/", &[("host", "localhost"), ("e2b-sandbox-id", "../x")]), Err(HostError::SandboxId));
        assert_eq!(go("/", &[("host", "localhost"), id, ("e2b-sandbox-port", "x")]), Err(HostError::SandboxPort));
    }

    #[test]
    fn on_one_origin_the_path_tells_the_apis_apart() {
        let key = ("x-api-key", "e2b_1");
        let origin = ("host", "127.0.0.1:8080");
        for path in ["/sandboxes", "/v2/sandboxes", "/v2/sandboxes?x=/v1/", "/templates/x", "/v10/x"] {
            assert_eq!(go(path, &[origin, key]), Ok(Destination::E2bControl), "{path}");
            assert_eq!(go(path, &[origin]), Ok(Destination::Native), "{path}");
        }
        for path in ["/v1/sandboxes", "/v1", "/"] {
            assert_eq!(go(path, &[origin, key]), Ok(Destination::Native), "{path}");
        }
    }
}
