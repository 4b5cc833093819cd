//! From the written policy to the one that runs. What cannot be honoured is refused here, with the field's path.

use std::{collections::HashSet, fmt::Display, net::IpAddr};

use ipnet::IpNet;
use stockade_model::quoted;

use super::{
    Action, Decision, DefaultAction, DnsPolicy, Floor, HttpAction, L7, OnDeny, Policy, Ports, Rule, addresses,
    egress_proxy::CompiledEgressProxy,
    http::{CompiledHttpRule, CompiledSubstitution, compile_attribution},
    names::{NamePattern, NameSet, normalize_name},
};

const MAX_RULES: usize = 2_000;
const MAX_ENTRIES: usize = 20_000;

/// Why a policy is refused. `field` is its place in the JSON document.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct PolicyError {
    /// For example `rules[2].cidrs[0]`, or `bounds.rules[2].cidrs[0]` if it is not in the sandbox's own.
    pub field: String,
    /// What is wrong and what would do.
    pub problem: String,
}

impl PolicyError {
    pub(super) fn new(field: impl Into<String>, problem: impl Display) -> Self {
        Self { field: field.into(), problem: problem.to_string() }
    }
}

/// A policy that can be asked. Immutable; a change is a new object.
#[derive(Debug)]
pub struct CompiledPolicy {
    pub(super) revision: u64,
    pub(super) floor: CompiledFloor,
    /// From the outermost bound to the sandbox's own.
    pub(super) layers: Vec<Layer>,
    pub(super) dns: DnsPolicy,
    pub(super) deny_encrypted_client_hello: bool,
    pub(super) egress_proxy: Option<CompiledEgressProxy>,
}

#[derive(Debug)]
pub(super) struct CompiledFloor {
    pub(super) open: Vec<IpNet>,
    pub(super) deny: Vec<IpNet>,
    pub(super) deny_names: NameSet,
    pub(super) deny_ports: PortSet,
}

#[derive(Debug)]
pub(super) struct Layer {
    pub(super) default: DefaultAction,
    pub(super) rules: Vec<CompiledRule>,
    pub(super) http: Vec<CompiledHttpRule>,
    pub(super) substitutions: Vec<CompiledSubstitution>,
    pub(super) always: NameSet,
    pub(super) never: NameSet,
    pub(super) attribution: Vec<(http::HeaderName, http::HeaderValue)>,
}

#[derive(Debug)]
pub(super) struct CompiledRule {
    pub(super) id: String,
    pub(super) action: Action,
    pub(super) names: NameSet,
    pub(super) networks: Vec<IpNet>,
    pub(super) ports: PortSet,
    pub(super) l7: Option<L7>,
}

impl CompiledRule {
    pub(super) fn any_destination(&self) -> bool {
        self.names.is_empty() && self.networks.is_empty()
    }
}

#[derive(Debug, Default)]
pub(super) struct PortSet(Vec<(u16, u16)>);

impl PortSet {
    pub(super) fn contains(&self, port: u16) -> bool {
        self.0.iter().any(|(first, last)| (*first..=*last).contains(&port))
    }

    pub(super) fn is_all(&self) -> bool {
        self.0.iter().any(|(first, last)| *first <= 1 && *last == u16::MAX)
    }

    fn all() -> Self {
        Self(vec![(0, u16::MAX)])
    }
}

impl CompiledPolicy {
    /// Compiles one policy under the operator's floor.
    pub fn compile(floor: &Floor, policy: &Policy) -> Result<Self, PolicyError> {
        Self::compile_layers(floor, std::slice::from_ref(policy))
    }

    /// Compiles several layers, outermost first; the last is the sandbox's own.
    pub fn compile_layers(floor: &Floor, layers: &[Policy]) -> Result<Self, PolicyError> {
        let Some(own) = layers.last() else {
            return Err(PolicyError::new("policy", "at least the sandbox's own layer is needed"));
        };
        let mut dns = own.dns;
        if layers.iter().any(|layer| layer.dns.on_deny == OnDeny::Nxdomain) {
            dns.on_deny = OnDeny::Nxdomain;
        }
        if layers.iter().rev().skip(1).any(|layer| layer.egress_proxy.is_some()) {
            let problem = "is for a sandbox's own policy; the deployment's proxy is upstream_proxy";
            return Err(PolicyError::new("egress_proxy", problem));
        }
        dns.resolve_on_connect = layers.iter().any(|layer| layer.dns.resolve_on_connect);
        Ok(Self {
            revision: own.revision,
            floor: compile_floor(floor)?,
            egress_proxy: own.egress_proxy.as_ref().map(CompiledEgressProxy::compile).transpose()?,
            dns,
            deny_encrypted_client_hello: layers.iter().any(|layer| layer.deny_encrypted_client_hello),
            layers: {
                let never: Vec<String> = layers.iter().flat_map(|layer| layer.intercept.never.clone()).collect();
                let own = layers.len() - 1;
                let layers = layers.iter().enumerate();
                let compile = |(at, layer)| {
                    compile_layer(layer, &never, at < own).map_err(|error| match at < own {
                        true => PolicyError { field: format!("bounds.{}", error.field), ..error },
                        false => error,
                    })
                };
                layers.map(compile).collect::<Result<_, _>>()?
            },
        })
    }

    /// The revision of the sandbox's own layer.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// How names are answered.
    pub fn dns(&self) -> DnsPolicy {
        self.dns
    }

    /// Whether hellos with an encrypted inner name are refused.
    pub fn denies_encrypted_client_hello(&self) -> bool {
        self.deny_encrypted_client_hello
    }

    /// All tokens of the sandbox.
    pub(crate) fn substitutions(&self) -> impl Iterator<Item = &CompiledSubstitution> {
        self.layers.iter().flat_map(|layer| &layer.substitutions)
    }

    /// Whether a connection that `decision` allows is read, so that it has to be told what it is. A rule that says
    /// raw means it, except on the web's ports and where an HTTP rule names the port.
    pub(crate) fn reads(&self, name: &str, port: u16, decision: &Decision) -> bool {
        let said_raw = decision.l7 == L7::Raw && decision.rule.is_some() && port != 80 && port != 443;
        if !said_raw {
            return self.intercepts(name, port);
        }
        self.intercepts(name, port)
            && self.layers.iter().any(|layer| layer.http.iter().any(|rule| rule.names_port(name, port)))
    }

    /// Whether TLS to `name` is opened.
    pub fn intercepts(&self, name: &str, port: u16) -> bool {
        if self.layers.iter().any(|layer| layer.never.matches(name)) {
            return false;
        }
        self.layers.iter().any(|layer| {
            layer.always.matches(name)
                || layer.http.iter().any(|rule| rule.may_need_tls_open(name, port))
                || layer.substitutions.iter().any(|one| one.hosts.matches(name))
        })
    }
}

fn compile_floor(floor: &Floor) -> Result<CompiledFloor, PolicyError> {
    let open = networks("floor.open_cidrs", &floor.open_cidrs)?;
    if let Some(at) = open.iter().position(addresses::is_all_metadata) {
        let problem = "metadata addresses hand out the host's credentials and cannot be opened";
        return Err(PolicyError::new(format!("floor.open_cidrs[{at}]"), problem));
    }
    let mut deny_names = floor.deny_names.clone();
    deny_names.extend(addresses::METADATA_NAMES.iter().map(|name| (*name).to_owned()));
    Ok(CompiledFloor {
        open,
        deny: networks("floor.deny_cidrs", &floor.deny_cidrs)?,
        deny_names: name_set("floor.deny_names", &deny_names)?,
        deny_ports: ports("floor.deny_ports", &floor.deny_ports)?,
    })
}

/// `never` are the hosts no layer lets us open: a tenant must not get rid of a bound's rule by closing its host.
fn compile_layer(policy: &Policy, never: &[String], is_operators: bool) -> Result<Layer, PolicyError> {
    for (field, count) in
        [("rules", policy.rules.len()), ("http", policy.http.len()), ("substitutions", policy.substitutions.len())]
    {
        if count > MAX_RULES {
            return Err(PolicyError::new(field, format!("has {count} entries; at most {MAX_RULES} are taken")));
        }
    }
    let layer = Layer {
        default: policy.default,
        rules: policy.rules.iter().enumerate().map(|(at, rule)| compile_rule(at, rule)).collect::<Result<_, _>>()?,
        http: policy
            .http
            .iter()
            .enumerate()
            .filter(|(_, rule)| rule.enabled)
            .map(|(at, rule)| CompiledHttpRule::compile(at, rule, is_operators))
            .collect::<Result<_, _>>()?,
        substitutions: policy
            .substitutions
            .iter()
            .enumerate()
            .map(|(at, one)| CompiledSubstitution::compile(at, one))
            .collect::<Result<_, _>>()?,
        always: name_set("intercept.always", &policy.intercept.always)?,
        never: name_set("intercept.never", &policy.intercept.never)?,
        attribution: compile_attribution(&policy.attribution)?,
    };
    refuse_repeated_placeholders(policy)?;
    refuse_rules_on_closed_hosts(policy, never)?;
    Ok(layer)
}

fn refuse_repeated_placeholders(policy: &Policy) -> Result<(), PolicyError> {
    let mut seen = HashSet::new();
    for (at, one) in policy.substitutions.iter().enumerate() {
        if !seen.insert(&one.placeholder) {
            return Err(PolicyError::new(format!("substitutions[{at}].placeholder"), "is used twice"));
        }
    }
    Ok(())
}

/// A rule on what is inside TLS cannot be honoured for a host that is never opened.
fn refuse_rules_on_closed_hosts(policy: &Policy, never_list: &[String]) -> Result<(), PolicyError> {
    let never = name_set("intercept.never", never_list)?;
    let check = |field: String, hosts: &[String], refuses: bool| {
        for (at, host) in hosts.iter().enumerate() {
            let clash = match NamePattern::parse(host) {
                Ok(NamePattern::Exact(name)) => never.matches(&name),
                Ok(NamePattern::Below { suffix, apex }) => {
                    never.matches(&format!("x.{suffix}"))
                        || apex && never.matches(&suffix)
                        || never_list.iter().any(|other| ends_below(other, &suffix))
                }
                // A header for "all hosts" is understood as all that can be opened; a refusal is not.
                _ => refuses && !never.is_empty(),
            };
            if clash {
                let problem = format!("{host} is in intercept.never, so that nothing inside its TLS can be judged");
                return Err(PolicyError::new(format!("{field}.hosts[{at}]"), problem));
            }
        }
        Ok(())
    };
    for (at, rule) in policy.http.iter().enumerate().filter(|(_, rule)| rule.enabled) {
        if rule.scheme != Some(super::Scheme::Http) {
            check(format!("http[{at}]"), &rule.hosts, matches!(rule.action, HttpAction::Deny))?;
        }
    }
    for (at, one) in policy.substitutions.iter().enumerate() {
        check(format!("substitutions[{at}]"), &one.hosts, false)?;
    }
    Ok(())
}

fn ends_below(pattern: &str, suffix: &str) -> bool {
    let name = pattern.trim_start_matches("*.").trim_start_matches('.');
    normalize_name(name).is_some_and(|name| name.ends_with(&format!(".{suffix}")))
}

fn compile_rule(at: usize, rule: &Rule) -> Result<CompiledRule, PolicyError> {
    let field = |name: &str| format!("rules[{at}].{name}");
    let web = || PortSet(vec![(80, 80), (443, 443)]);
    let is_udp = rule.l7 == Some(L7::Udp);
    if is_udp && rule.action == Action::Allow && rule.ports.is_empty() && !rule.names.is_empty() {
        return Err(PolicyError::new(field("ports"), "is empty; UDP has no ports of its own, so name them"));
    }
    let ports = match ports(&field("ports"), &rule.ports)? {
        PortSet(list) if !list.is_empty() => PortSet(list),
        _ if !rule.names.is_empty() && rule.action == Action::Allow => web(),
        _ => PortSet::all(),
    };
    Ok(CompiledRule {
        id: if rule.id.is_empty() { format!("rule-{at}") } else { rule.id.clone() },
        action: rule.action,
        names: name_set(&field("names"), &rule.names)?,
        networks: networks(&field("cidrs"), &rule.cidrs)?,
        ports,
        l7: rule.l7,
    })
}

pub(super) fn name_set(field: &str, patterns: &[String]) -> Result<NameSet, PolicyError> {
    if patterns.len() > MAX_ENTRIES {
        return Err(PolicyError::new(
            field,
            format!("has {} entries; at most {MAX_ENTRIES} are taken", patterns.len()),
        ));
    }
    for (at, pattern) in patterns.iter().enumerate() {
        NamePattern::parse(pattern).map_err(|error| PolicyError::new(format!("{field}[{at}]"), error))?;
    }
    NameSet::parse(patterns).map_err(|error| PolicyError::new(field, error))
}

fn networks(field: &str, list: &[String]) -> Result<Vec<IpNet>, PolicyError> {
    if list.len() > MAX_ENTRIES {
        return Err(PolicyError::new(field, format!("has {} entries; at most {MAX_ENTRIES} are taken", list.len())));
    }
    list.iter()
        .enumerate()
        .map(|(at, text)| {
            network(text).ok_or_else(|| {
                let problem =
                    format!("{} is no address or network; use 203.0.114.0/24 or 2600:1f00::/24", quoted(text));
                PolicyError::new(format!("{field}[{at}]"), problem)
            })
        })
        .collect()
}

/// An address or a network.
pub(super) fn network(text: &str) -> Option<IpNet> {
    let network = text.parse::<IpNet>().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from));
    network.map(|network| network.trunc())
}

fn ports(field: &str, list: &[Ports]) -> Result<PortSet, PolicyError> {
    let mut set = Vec::new();
    for (at, ports) in list.iter().enumerate() {
        match ports.range() {
            Some(range) => set.push(range),
            None => {
                let text = quoted(&ports.to_string()).to_string();
                let problem = format!("{text} is no port; use 1 to 65535, or a range such as \"8000-8999\"");
                return Err(PolicyError::new(format!("{field}[{at}]"), problem));
            }
        }
    }
    Ok(PortSet(set))
}
