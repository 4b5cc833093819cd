//! The question of every connection and of every flow of datagrams: may this destination be reached on this port, and
//! what may be spoken?

use std::{borrow::Cow, fmt, net::IpAddr};

use super::{
    Action, AddressClass, CompiledPolicy, DefaultAction, L7,
    addresses::unmapped,
    classify,
    compile::{CompiledRule, Layer},
};

/// Where a connection goes.
#[derive(Clone, Copy, Debug)]
pub enum Destination<'a> {
    /// A name that was not resolved yet: judged as well as it can be; ask again with the address.
    Name(&'a str),
    /// A name and the address it will be dialled at.
    Resolved(&'a str, IpAddr),
    /// An address the guest used by itself.
    Address(IpAddr),
}

/// Why a connection is allowed or refused.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Reason {
    /// A rule says so.
    Rule,
    /// No rule matches.
    Default,
    /// The address is private or special.
    PrivateAddress,
    /// The address serves cloud metadata.
    MetadataAddress,
    /// The address is the host's own.
    HostAddress,
    /// The operator closed it, in the floor or by a bound.
    Operator,
    /// The layers allow nothing in common.
    NothingInCommon,
    /// Requests to the host are looked at, which datagrams would evade.
    RequestsAreRead,
}

impl Reason {
    /// A stable word for records.
    pub fn code(self) -> &'static str {
        match self {
            Self::Rule => "rule",
            Self::Default => "default",
            Self::PrivateAddress => "private_address",
            Self::MetadataAddress => "metadata_address",
            Self::HostAddress => "host_address",
            Self::Operator => "operator",
            Self::NothingInCommon => "layers_disagree",
            Self::RequestsAreRead => "requests_are_read",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rule => "a rule of the policy says so",
            Self::Default => "no rule of the policy allows it",
            Self::PrivateAddress => "private and special addresses are closed",
            Self::MetadataAddress => "metadata addresses are always closed",
            Self::HostAddress => "the host's own addresses are closed",
            Self::Operator => "the operator closed it",
            Self::NothingInCommon => "the layers of the policy allow no protocol in common",
            Self::RequestsAreRead => "requests to this host are looked at, so that HTTP/3 is not let past",
        })
    }
}

/// The answer.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Decision {
    /// Whether the connection may be made.
    pub allowed: bool,
    /// What may be spoken on it.
    pub l7: L7,
    /// The rule that decided, if one did.
    pub rule: Option<String>,
    /// Why.
    pub reason: Reason,
}

impl Decision {
    fn deny(reason: Reason) -> Self {
        Self { allowed: false, l7: L7::Web, rule: None, reason }
    }
}

/// How a guest speaks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Transport {
    Tcp,
    Udp,
}

/// What one layer is asked.
#[derive(Clone, Copy)]
struct Asked<'a> {
    transport: Transport,
    name: Option<&'a str>,
    address: Option<IpAddr>,
    port: u16,
    /// The address is none of the public ones: the operator opened it.
    is_opened: bool,
}

impl CompiledPolicy {
    /// Judges a destination. `host` are the host's own addresses.
    pub fn connect(&self, destination: Destination<'_>, port: u16, host: &[IpAddr]) -> Decision {
        self.judge_under(&self.layers, None, Transport::Tcp, destination, port, host)
    }

    /// Judges a destination of UDP datagrams.
    pub fn datagrams(&self, destination: Destination<'_>, port: u16, host: &[IpAddr]) -> Decision {
        if let Destination::Name(name) | Destination::Resolved(name, _) = destination
            && self.intercepts(name, port)
        {
            return Decision::deny(Reason::RequestsAreRead);
        }
        self.judge_under(&self.layers, None, Transport::Udp, destination, port, host)
    }

    /// Judges where a rule forwards requests to: one of the sandbox's own as a connection to the open internet under
    /// what stands above the sandbox; one of the operator's may lead anywhere but to metadata.
    pub(crate) fn forward(
        &self,
        is_operators: bool,
        destination: Destination<'_>,
        port: u16,
        host: &[IpAddr],
    ) -> Decision {
        let open = Decision { allowed: true, l7: L7::Raw, rule: None, reason: Reason::Default };
        let address = match destination {
            Destination::Name(_) => None,
            Destination::Resolved(_, address) | Destination::Address(address) => Some(unmapped(address)),
        };
        if is_operators {
            let metadata = address.is_some_and(|address| classify(address) == AddressClass::Metadata);
            return if metadata { Decision::deny(Reason::MetadataAddress) } else { open };
        }
        let above = self.layers.split_last().map_or(&[][..], |(_, above)| above);
        let is_private = address.is_some_and(|address| classify(address) != AddressClass::Public);
        // Without anybody above who could have named it.
        if is_private && above.is_empty() {
            return Decision::deny(Reason::PrivateAddress);
        }
        self.judge_under(above, Some(open), Transport::Tcp, destination, port, host)
    }

    fn judge_under(
        &self,
        layers: &[Layer],
        mut combined: Option<Decision>,
        transport: Transport,
        destination: Destination<'_>,
        port: u16,
        host: &[IpAddr],
    ) -> Decision {
        let (name, address) = match destination {
            Destination::Name(name) => (Some(name), None),
            Destination::Resolved(name, address) => (Some(name), Some(unmapped(address))),
            Destination::Address(address) => (None, Some(unmapped(address))),
        };
        if let Some(reason) = self.closed_by_floor(name, address, port, host) {
            return Decision::deny(reason);
        }
        let is_opened = address.is_some_and(|address| classify(address) != AddressClass::Public);
        let asked = Asked { transport, name, address, port, is_opened };
        let own = self.layers.len().saturating_sub(1);
        for (at, layer) in layers.iter().enumerate() {
            let decision = self.judge(layer, &asked);
            if !decision.allowed {
                let reason = if at < own { Reason::Operator } else { decision.reason };
                return Decision { reason, ..decision };
            }
            combined = match combined {
                None => Some(decision),
                Some(before) => match common(before.l7, decision.l7) {
                    Some(l7) => Some(Decision { l7, ..decision }),
                    None => return Decision::deny(Reason::NothingInCommon),
                },
            };
        }
        combined.unwrap_or_else(|| Decision::deny(Reason::Default))
    }

    /// Whether a name may be reached on any port at all: whether it is worth an answer.
    pub fn may_reach(&self, name: &str) -> bool {
        if self.floor.deny_names.matches(name) {
            return false;
        }
        self.layers.iter().all(|layer| {
            for rule in &layer.rules {
                let named = rule.any_destination() || rule.names.matches(name);
                match rule.action {
                    Action::Allow if named || self.dns.resolve_unlisted && !rule.networks.is_empty() => return true,
                    Action::Deny if named && rule.ports.is_all() && rule.l7 != Some(L7::Udp) => return false,
                    Action::Allow | Action::Deny => {}
                }
            }
            layer.default != DefaultAction::Deny
        })
    }

    fn closed_by_floor(
        &self,
        name: Option<&str>,
        address: Option<IpAddr>,
        port: u16,
        host: &[IpAddr],
    ) -> Option<Reason> {
        let floor = &self.floor;
        if port == 0 || floor.deny_ports.contains(port) || name.is_some_and(|name| floor.deny_names.matches(name)) {
            return Some(Reason::Operator);
        }
        let address = address?;
        let opened = floor.open.iter().any(|network| network.contains(&address));
        match classify(address) {
            AddressClass::Metadata => Some(Reason::MetadataAddress),
            _ if floor.deny.iter().any(|network| network.contains(&address)) => Some(Reason::Operator),
            AddressClass::Private if !opened => Some(Reason::PrivateAddress),
            _ if !opened && host.contains(&address) => Some(Reason::HostAddress),
            _ => None,
        }
    }

    fn judge(&self, layer: &Layer, asked: &Asked<'_>) -> Decision {
        let web = asked.port == 80 || asked.port == 443;
        let matching = layer.rules.iter().find(|rule| self.rule_matches(rule, asked));
        if let Some(rule) = matching {
            return Decision {
                allowed: rule.action == Action::Allow,
                l7: rule.l7.unwrap_or(if web { L7::Web } else { L7::Raw }),
                rule: Some(rule.id.clone()),
                reason: Reason::Rule,
            };
        }
        let (allowed, l7) = match (asked.transport, layer.default) {
            // What the operator opened is for those who name it, not for everybody with an open default.
            _ if asked.is_opened => (false, L7::Web),
            (Transport::Udp, default) => {
                (default == DefaultAction::AllowPublicUdp && !self.reads_some_requests(), L7::Udp)
            }
            (Transport::Tcp, DefaultAction::Deny) => (false, L7::Web),
            (Transport::Tcp, DefaultAction::AllowWeb) => (web, if asked.port == 80 { L7::Http } else { L7::Tls }),
            (Transport::Tcp, DefaultAction::AllowPublic | DefaultAction::AllowPublicUdp) => {
                (true, if web { L7::Web } else { L7::Raw })
            }
        };
        Decision { allowed, l7, rule: None, reason: Reason::Default }
    }

    /// Whether some host's requests are looked at for what they are. Its addresses are not known here, so that an open
    /// default cannot tell its HTTP/3 from other datagrams.
    fn reads_some_requests(&self) -> bool {
        self.layers.iter().any(|layer| !layer.http.is_empty() || !layer.always.is_empty())
    }

    fn rule_matches(&self, rule: &CompiledRule, asked: &Asked<'_>) -> bool {
        let Asked { transport, name, address, port, .. } = *asked;
        let is_about_it = match transport {
            Transport::Tcp => rule.l7 != Some(L7::Udp),
            Transport::Udp => rule.l7 == Some(L7::Udp) || rule.l7.is_none() && rule.action == Action::Deny,
        };
        if !is_about_it || !rule.ports.contains(port) {
            return false;
        }
        if rule.any_destination() || name.is_some_and(|name| rule.names.matches(name)) {
            return true;
        }
        if rule.networks.is_empty() {
            return false;
        }
        let by_address_alone = name.is_none() || rule.action == Action::Deny || self.dns.resolve_unlisted;
        match address {
            Some(address) => by_address_alone && rule.networks.iter().any(|network| network.contains(&address)),
            // Not resolved yet: hope for the best and ask again.
            None => rule.action == Action::Allow && self.dns.resolve_unlisted,
        }
    }
}

/// The protocols both allow.
fn common(one: L7, other: L7) -> Option<L7> {
    match (one, other) {
        (L7::Raw, other) => Some(other),
        (one, L7::Raw) => Some(one),
        (L7::Web, other) => Some(other),
        (one, L7::Web) => Some(one),
        (one, other) => (one == other).then_some(one),
    }
}

impl fmt::Display for Destination<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text: Cow<'_, str> = match self {
            Self::Name(name) => Cow::Borrowed(name),
            Self::Resolved(name, address) => format!("{name} ({address})").into(),
            Self::Address(address) => address.to_string().into(),
        };
        f.write_str(&text)
    }
}
