//! The host and the port of an authority, read once for everybody.
//!
//! `http` takes `a.example:99999` and `a.example:` for an authority without a port, so that whoever fills in a default
//! would go, or let go, elsewhere than what is written.

use std::net::IpAddr;

use http::uri::Authority;

use crate::policy::normalize_name;

/// A host and, where it is said, a port; `HostPort<u16>`: a host and the port of it that is meant.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct HostPort<P = Option<u16>> {
    /// A name as names are compared, or an address without brackets.
    pub host: String,
    /// From 1.
    pub port: P,
}

impl HostPort {
    /// Reads `host` or `host:port`.
    ///
    /// # Errors
    /// It holds credentials, or one of the two is none; the text begins with a verb.
    pub fn of(authority: &Authority) -> Result<Self, &'static str> {
        if authority.as_str().contains('@') {
            return Err("holds credentials");
        }
        let written = authority.host();
        let rest = authority.as_str().get(written.len()..).unwrap_or_default();
        let port = match rest.strip_prefix(':') {
            // `parse` would take a sign.
            Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => digits.parse().unwrap_or(0),
            None if rest.is_empty() => return Ok(Self { host: host(written)?, port: None }),
            _ => 0,
        };
        if port == 0 {
            return Err("has a port that is none; ports are from 1 to 65535");
        }
        Ok(Self { host: host(written)?, port: Some(port) })
    }

    /// The same for an authority that may name a user, who says nothing about where it leads.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn after_user(authority: &Authority) -> Result<Self, &'static str> {
        let rest = authority.as_str().rsplit('@').next().unwrap_or_default();
        Self::of(&rest.parse().map_err(|_| "names no host")?)
    }

    /// With the port that is meant where none is said.
    pub fn or(self, port: u16) -> HostPort<u16> {
        HostPort { host: self.host, port: self.port.unwrap_or(port) }
    }
}

impl<P> HostPort<P> {
    /// The address, if the host is one.
    pub fn address(&self) -> Option<IpAddr> {
        self.host.parse().ok()
    }
}

fn host(written: &str) -> Result<String, &'static str> {
    if written.is_empty() {
        return Err("names no host");
    }
    let bare = written.strip_prefix('[').and_then(|inside| inside.strip_suffix(']'));
    let address = match bare {
        Some(inside) => inside.parse().ok().filter(IpAddr::is_ipv6),
        None => written.parse().ok().filter(IpAddr::is_ipv4),
    };
    address.map(|address| address.to_string()).or_else(|| normalize_name(written)).ok_or("has a host that is no name")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<(String, Option<u16>), &'static str> {
        let authority: Authority = text.parse().map_err(|_| "is no authority")?;
        HostPort::of(&authority).map(|read| (read.host, read.port))
    }

    #[test]
    fn what_is_written_is_what_is_read() {
        for (text, host, port) in [
            ("A.Example", "a.example", None),
            ("a.example.:8443", "a.example", Some(8443)),
            ("1.1.1.1:65535", "1.1.1.1", Some(65535)),
            ("[2600:0::1]:1", "2600::1", Some(1)),
            ("[::1]", "::1", None),
            ("localhost:080", "localhost", Some(80)),
        ] {
            assert_eq!(read(text), Ok((host.to_owned(), port)), "{text}");
        }
    }

    #[test]
    fn a_user_is_passed_over_where_one_may_be() {
        let read = |text: &str| HostPort::after_user(&text.parse().expect("an authority"));
        let port = |port| Ok(HostPort { host: "a.example".to_owned(), port });
        assert_eq!(read("u@a.example"), port(None));
        assert_eq!(read("u:p@a.example:81"), port(Some(81)));
        assert!(read("u@a.example:0").is_err());
    }

    #[test]
    fn what_is_no_host_or_no_port_is_refused() {
        for text in [
            "a:99999",
            "a:65536",
            "a:0",
            "a:",
            "a:0x1",
            "a:-1",
            "a:+1",
            "u@a",
            "u:p@a:1",
            "@a",
            ":80",
            "",
            "a b",
            "127.1",
            "0x7f.1",
            "[::1]:",
            "[::1]80",
            "[1.1.1.1]",
            "[a]",
            "::1",
            "-a.example",
            "a..b",
            "a:1:2",
            "é.example",
        ] {
            assert!(read(text).is_err(), "{text}: {:?}", read(text));
        }
    }
}
