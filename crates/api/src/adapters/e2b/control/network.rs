//! E2B's network settings as a policy of ours, and back.
//!
//! ```text
//! allowOut names, allowOut networks, denyOut networks, else: allow (0.0.0.0/0 in denyOut or no internet: deny)
//! ```
//!
//! As there, what is allowed beats what is denied, a list of allowed names needs everything else denied, and a rule on
//! a host's headers opens nothing. UDP is open where TCP is by a network or by default, unless headers are set: HTTP/3
//! would go past those. Names that are denied do not exist: clients written for E2B expect a failure, not an
//! explanation.

use std::collections::BTreeMap;

use axum::{
    Extension,
    extract::{Path, State},
};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use stockade_service::{
    NetworkChange, NetworkSpec, Previews, Principal,
    policy::{
        Action, DefaultAction, DnsPolicy, EgressProxy, HttpAction, HttpRule, L7, NamePattern, OnDeny, Policy, Rule,
        Scheme,
    },
};

use super::{super::error::HttpError, Body, parse, sandbox_id, sandboxes::live};
use crate::AppState;

const ALL: &str = "0.0.0.0/0";
/// Tells rules that came this way.
const ORIGIN: &str = "e2b";
const MOST_DOMAINS: usize = 10;
const MOST_HEADERS: usize = 20;
const LONGEST_DOMAIN: usize = 128;
const LONGEST_NAME: usize = 64;
const LONGEST_VALUE: usize = 2048;

/// `network` of a create.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct Network {
    allow_out: Option<Vec<String>>,
    deny_out: Option<Vec<String>>,
    rules: Option<BTreeMap<String, Vec<DomainRule>>>,
    allow_public_traffic: Option<bool>,
    egress_proxy: Option<Proxy>,
    mask_request_host: Option<String>,
    dns_servers: Option<Vec<String>>,
    https_ports: Option<Vec<u16>>,
}

impl Network {
    /// Whether its ports take a token.
    pub(super) fn is_closed(&self) -> bool {
        self.allow_public_traffic == Some(false)
    }

    /// What rules put into headers.
    pub(super) fn header_values(&mut self) -> impl Iterator<Item = &mut String> {
        let rules = self.rules.iter_mut().flatten().flat_map(|(_, rules)| rules);
        rules.flat_map(|rule| rule.transform.headers.values_mut())
    }
}

/// A SOCKS5 proxy of the sandbox's owner.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Proxy {
    address: String,
    username: Option<String>,
    password: Option<String>,
    tls: Option<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DomainRule {
    transform: Transform,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Transform {
    #[serde(default)]
    headers: BTreeMap<String, String>,
}

/// The body of an update: all there is, what is left out is cleared.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Update {
    #[serde(rename = "allow_internet_access", alias = "allowInternetAccess")]
    allow_internet_access: Option<bool>,
    #[serde(flatten)]
    network: BTreeMap<String, Value>,
}

/// `network` of a sandbox's detail.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NetworkView {
    allow_out: Vec<String>,
    deny_out: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    allow_public_traffic: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mask_request_host: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    egress_proxy: Option<ProxyView>,
}

/// A proxy as it is shown: without its password.
#[derive(Debug, Serialize)]
struct ProxyView {
    address: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    username: Option<String>,
}

/// What E2B's fields ask for; `None`: nothing is said.
pub(super) fn spec(internet: Option<bool>, network: Option<Network>) -> Result<Option<NetworkSpec>, HttpError> {
    if internet.is_none() && network.is_none() {
        return Ok(None);
    }
    let network = network.unwrap_or_default();
    refuse_unsupported(&network)?;
    if let Some(host) = network.mask_request_host.as_ref().filter(|host| !is_maskable(host)) {
        return Err(HttpError::bad_request(format!("mask request host is not valid: {host}")));
    }
    let previews = if network.is_closed() { Previews::Token } else { Previews::default() };
    let deny_out = network.deny_out.unwrap_or_default();
    let allow_out = network.allow_out.unwrap_or_default();
    if let Some(bad) = deny_out.iter().find(|entry| !is_network(entry)) {
        return Err(HttpError::bad_request(format!("invalid denied CIDR {bad}")));
    }
    let closed = internet == Some(false) || deny_out.iter().any(|entry| entry == ALL);
    let (cidrs, names): (Vec<_>, Vec<_>) = allow_out.into_iter().partition(|entry| is_network(entry));
    if let Some(name) = names.first().filter(|_| !closed) {
        let message =
            format!("allowOut has the domain {name}: domains need {ALL} in denyOut, or everything is allowed");
        return Err(HttpError::bad_request(message));
    }
    if let Some(bad) = names.iter().find(|name| name.starts_with('~') || NamePattern::parse(name).is_err()) {
        return Err(HttpError::bad_request(format!("invalid allowed address {bad}: use a domain, *.domain or a CIDR")));
    }
    let rule = |id: &str, action, names: Vec<String>, cidrs: Vec<String>, l7| Rule {
        id: id.to_owned(),
        action,
        names,
        cidrs,
        ports: Vec::new(),
        l7,
        origin: Some(ORIGIN.to_owned()),
    };
    let rules = [
        rule("allowOut domains", Action::Allow, names, Vec::new(), None),
        rule("allowOut networks", Action::Allow, Vec::new(), cidrs.clone(), None),
        rule("allowOut networks, UDP", Action::Allow, Vec::new(), cidrs, Some(L7::Udp)),
        rule("denyOut", Action::Deny, Vec::new(), deny_out, None),
    ];
    let policy = Policy {
        default: if closed { DefaultAction::Deny } else { DefaultAction::AllowPublicUdp },
        rules: rules.into_iter().filter(|rule| !rule.names.is_empty() || !rule.cidrs.is_empty()).collect(),
        http: header_rules(network.rules.unwrap_or_default())?,
        egress_proxy: network.egress_proxy.map(egress_proxy).transpose()?,
        dns: DnsPolicy { on_deny: OnDeny::Nxdomain, ..DnsPolicy::default() },
        ..Policy::default()
    };
    let mask_request_host = network.mask_request_host;
    Ok(Some(NetworkSpec { policy: Some(policy), previews, mask_request_host, ..NetworkSpec::default() }))
}

/// `host` or `host:port`, where the port may be `${PORT}`.
fn is_maskable(host: &str) -> bool {
    let spec = NetworkSpec { mask_request_host: Some(host.to_owned()), ..NetworkSpec::default() };
    spec.check().is_ok()
}

fn is_network(entry: &str) -> bool {
    let (address, length) = entry.split_once('/').unwrap_or((entry, "0"));
    address.parse::<std::net::IpAddr>().is_ok() && length.parse::<u8>().is_ok_and(|length| length <= 128)
}

fn refuse_unsupported(network: &Network) -> Result<(), HttpError> {
    let asked = [
        (
            network.dns_servers.as_ref().is_some_and(|list| !list.is_empty()),
            "dnsServers",
            "names are resolved outside of the sandbox, whichever server it asks",
        ),
        (
            network.https_ports.as_ref().is_some_and(|list| !list.is_empty()),
            "httpsPorts",
            "ports of a sandbox are reached with plain HTTP",
        ),
    ];
    match asked.into_iter().find(|(asked, ..)| *asked) {
        Some((_, field, why)) => Err(HttpError::bad_request(format!(
            "network.{field} is not supported by this release of Stockade: {why}; leave it out"
        ))),
        None => Ok(()),
    }
}

/// `host:port`, spoken to with SOCKS5.
fn egress_proxy(proxy: Proxy) -> Result<EgressProxy, HttpError> {
    let Proxy { address, username, password, tls } = proxy;
    let has_tls = tls.is_some_and(|tls| !tls.is_null() && tls["enabled"] != false);
    if has_tls {
        let message = "network.egressProxy.tls is not supported by this release of Stockade: a SOCKS5 proxy is spoken to \
                       without TLS; leave it out";
        return Err(HttpError::bad_request(message));
    }
    let malformed = |problem| HttpError::bad_request(format!("network.egressProxy.password: {problem}"));
    let password = password.map(|text| template(&text).map_err(malformed)).transpose()?;
    if address.rsplit_once(':').is_none_or(|(_, port)| port.parse::<u16>().is_err()) {
        return Err(HttpError::bad_request(format!("network.egressProxy.address is not host:port: {address}")));
    }
    Ok(EgressProxy { url: format!("socks5://{address}"), username, password })
}

/// Exact domains before wildcards, longer ones before shorter.
fn header_rules(rules: BTreeMap<String, Vec<DomainRule>>) -> Result<Vec<HttpRule>, HttpError> {
    let invalid = |problem: String| Err(HttpError::bad_request(problem));
    if rules.len() > MOST_DOMAINS {
        return invalid(format!("rules has {} domains, at most {MOST_DOMAINS} are possible", rules.len()));
    }
    let mut list = Vec::new();
    for (domain, transforms) in rules {
        if domain.len() > LONGEST_DOMAIN || domain.starts_with('~') || NamePattern::parse(&domain).is_err() {
            return invalid(format!("rules: {domain} is no domain"));
        }
        let mut transforms = transforms.into_iter();
        let (Some(DomainRule { transform }), None) = (transforms.next(), transforms.next()) else {
            return invalid(format!("rules.{domain}: one transform per domain is possible"));
        };
        if transform.headers.len() > MOST_HEADERS {
            return invalid(format!("rules.{domain}: at most {MOST_HEADERS} headers are possible"));
        }
        let headers = transform.headers.into_iter().map(|(name, value)| {
            if name.len() > LONGEST_NAME || value.len() > LONGEST_VALUE {
                let problem = format!(
                    "rules.{domain}: a header's name has at most {LONGEST_NAME} and its value at most \
                                       {LONGEST_VALUE} characters"
                );
                return Err(HttpError::bad_request(problem));
            }
            let problem = |problem| HttpError::bad_request(format!("rules.{domain}.{name}: {problem}"));
            let value = template(&value).map_err(problem)?;
            Ok((name, value))
        });
        let headers = headers.collect::<Result<_, _>>()?;
        list.push(HttpRule {
            id: format!("rules {domain}"),
            enabled: true,
            hosts: vec![domain],
            scheme: Some(Scheme::Https),
            port: None,
            methods: Vec::new(),
            path: None,
            query: Vec::new(),
            headers: Vec::new(),
            mask_echo: false,
            action: HttpAction::SetHeaders(headers),
        });
    }
    list.sort_by_key(|rule| (rule.hosts[0].starts_with('*'), std::cmp::Reverse(rule.hosts[0].len())));
    Ok(list)
}

/// `${e2b.secrets.NAME}` in our words; a dollar sign that starts nothing stays one.
///
/// # Errors
/// A placeholder that is none, or of a kind we have not.
fn template(value: &str) -> Result<String, String> {
    let mut text = String::with_capacity(value.len());
    let mut rest = value;
    while let Some(at) = rest.find('$') {
        text.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        match rest.strip_prefix("{e2b.") {
            Some(inner) => {
                let (name, after) = inner.split_once('}').ok_or("a placeholder has no closing brace")?;
                let secret = name.strip_prefix("secrets.").ok_or_else(|| {
                    format!("${{e2b.{name}}} is not supported by this release of Stockade; ${{e2b.secrets.NAME}} is")
                })?;
                text.push_str(&format!("${{secrets.{secret}}}"));
                rest = after;
            }
            None => text.push_str("$$"),
        }
    }
    text.push_str(rest);
    Ok(text)
}

/// What is shown of a network: whether there is an internet, and the lists.
pub(super) fn view(spec: &NetworkSpec) -> (bool, Option<NetworkView>) {
    let Some(policy) = &spec.policy else { return (spec.internet != Some(false), None) };
    let entries = |action: Action| -> Vec<String> {
        let rules = policy.rules.iter().filter(|rule| rule.action == action && rule.l7 != Some(L7::Udp));
        rules.flat_map(|rule| rule.names.iter().chain(&rule.cidrs)).cloned().collect()
    };
    let view = NetworkView {
        allow_out: entries(Action::Allow),
        deny_out: entries(Action::Deny),
        allow_public_traffic: (spec.previews == Previews::Token).then_some(false),
        mask_request_host: spec.mask_request_host.clone(),
        egress_proxy: policy.egress_proxy.as_ref().map(|proxy| ProxyView {
            address: proxy.url.trim_start_matches("socks5://").to_owned(),
            username: proxy.username.clone(),
        }),
    };
    let is_plain = view.allow_out.is_empty()
        && view.deny_out.is_empty()
        && view.allow_public_traffic.is_none()
        && view.mask_request_host.is_none()
        && view.egress_proxy.is_none();
    (policy.default != DefaultAction::Deny || !view.deny_out.is_empty(), (!is_plain).then_some(view))
}

pub(super) async fn update(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
    Body(Update { allow_internet_access, network }): Body<Update>,
) -> Result<StatusCode, HttpError> {
    let id = sandbox_id(&id)?;
    let sandbox = live(&state, &who, &id).await?;
    if super::lifecycle::is_paused(sandbox.state) {
        return Err(HttpError::new(StatusCode::CONFLICT, format!("sandbox '{id}' is not running")));
    }
    let network = Value::Object(network.into_iter().collect());
    let mut network: Network = parse(network.to_string().as_bytes())?;
    if network.allow_public_traffic.is_some() || network.mask_request_host.is_some() {
        let message = "allowPublicTraffic and maskRequestHost are set when the sandbox is made and cannot be changed";
        return Err(HttpError::bad_request(message));
    }
    super::secrets::spell(&state, &who, &mut network).await?;
    let spec = spec(Some(allow_internet_access.unwrap_or(true)), Some(network))?.unwrap_or_default();
    // Who may come in, and secrets that the native API gave it, are no part of what an update can say.
    state.service.change_network(&who, &id, NetworkChange::of_destinations(spec)).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(internet: Option<bool>, json: &str) -> Result<Policy, String> {
        let network: Network = serde_json::from_str(json).expect(json);
        let spec = spec(internet, Some(network)).map_err(|error| error.message)?;
        Ok(spec.expect("something is said").policy.expect("a policy"))
    }

    #[test]
    fn what_is_allowed_stands_before_what_is_denied() {
        let policy = read(None, r#"{"allowOut":["1.1.1.1","*.a.example"],"denyOut":["0.0.0.0/0"]}"#).expect("valid");
        let actions: Vec<_> = policy.rules.iter().map(|rule| rule.action).collect();
        assert_eq!(actions, [Action::Allow, Action::Allow, Action::Allow, Action::Deny]);
        assert_eq!((policy.rules[2].l7, &policy.rules[2].cidrs), (Some(L7::Udp), &policy.rules[1].cidrs));
        assert_eq!(policy.default, DefaultAction::Deny);
        assert_eq!(read(None, r#"{"denyOut":["8.8.8.8"]}"#).expect("valid").default, DefaultAction::AllowPublicUdp);
        assert_eq!(read(Some(false), "{}").expect("valid").default, DefaultAction::Deny);
        assert!(spec(None, None).expect("valid").is_none());
    }

    #[test]
    fn what_e2b_refuses_is_refused_in_its_words() {
        let refused = |json: &str| read(None, json).expect_err(json);
        assert_eq!(refused(r#"{"denyOut":["a.example"]}"#), "invalid denied CIDR a.example");
        assert!(refused(r#"{"allowOut":["a.example"]}"#).contains("0.0.0.0/0 in denyOut"));
        assert_eq!(refused(r#"{"maskRequestHost":"a b"}"#), "mask request host is not valid: a b");
        assert!(refused(r#"{"dnsServers":["8.8.8.8"]}"#).contains("network.dnsServers"));
        assert!(refused(r#"{"httpsPorts":[8443]}"#).contains("network.httpsPorts"));
        assert!(refused(r#"{"egressProxy":{"address":"x"}}"#).contains("network.egressProxy.address"));
        let tls = r#"{"egressProxy":{"address":"x.example:1","tls":{"enabled":true}}}"#;
        assert!(refused(tls).contains("network.egressProxy.tls"));
        assert!(
            refused(r#"{"rules":{"a.example":[{"transform":{"headers":{"x":"${e2b.identity.tokens.t}"}}}]}}"#)
                .contains("rules.a.example.x: ${e2b.identity.tokens.t} is not supported")
        );
        assert!(serde_json::from_str::<Network>(r#"{"allow_list":[]}"#).is_err());
    }

    #[test]
    fn who_comes_in_and_under_which_host_is_kept() {
        let network = r#"{"allowPublicTraffic":false,"maskRequestHost":"localhost:${PORT}"}"#;
        let network: Network = serde_json::from_str(network).expect("valid");
        let spec = spec(None, Some(network)).expect("valid").expect("something is said");
        assert_eq!((spec.previews, spec.mask_request_host.as_deref()), (Previews::Token, Some("localhost:${PORT}")));
        let (internet, view) = view(&spec);
        let view = serde_json::to_value(view.expect("not plain")).expect("JSON");
        assert!(internet && view["allowPublicTraffic"] == false && view["maskRequestHost"] == "localhost:${PORT}");
    }

    #[test]
    fn a_proxy_is_kept_and_shown_without_its_password() {
        let network = r#"{"egressProxy":{"address":"p.example:1080","username":"u","password":"a$b"}}"#;
        let network: Network = serde_json::from_str(network).expect("valid");
        let spec = spec(None, Some(network)).expect("valid").expect("something is said");
        let proxy = spec.policy.as_ref().and_then(|policy| policy.egress_proxy.clone()).expect("a proxy");
        assert_eq!((proxy.url.as_str(), proxy.password.as_deref()), ("socks5://p.example:1080", Some("a$$b")));
        assert_eq!(proxy.shown().password.as_deref(), Some(""));
        let (_, view) = view(&spec);
        let view = serde_json::to_value(view.expect("not plain")).expect("JSON");
        assert_eq!(view["egressProxy"], serde_json::json!({"address": "p.example:1080", "username": "u"}));
    }

    #[test]
    fn header_rules_are_in_order_and_secrets_in_our_words() {
        let rules = r#"{"rules":{"*.a.example":[{"transform":{"headers":{"x":"$5"}}}],
                                 "b.a.example":[{"transform":{"headers":{"y":"Bearer ${e2b.secrets.KEY}"}}}]}}"#;
        let policy = read(None, rules).expect("valid");
        let hosts: Vec<_> = policy.http.iter().map(|rule| rule.hosts[0].as_str()).collect();
        assert_eq!(hosts, ["b.a.example", "*.a.example"]);
        let HttpAction::SetHeaders(headers) = &policy.http[0].action else { panic!("sets headers") };
        assert_eq!(headers["y"], "Bearer ${secrets.KEY}");
        let HttpAction::SetHeaders(headers) = &policy.http[1].action else { panic!("sets headers") };
        assert_eq!(headers["x"], "$$5");
    }
}
