//! What would happen to a request, without making it.

use std::net::IpAddr;

use http::{HeaderMap, Method, Uri};
use serde::Serialize;

use super::{CompiledAction, CompiledPolicy, Destination, HttpQuestion, L7, Reason, Scheme};
use crate::HostPort;

/// The answer to `policy explain`.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, utoipa::ToSchema)]
pub struct Explanation {
    /// Whether the request would be sent.
    pub allowed: bool,
    /// `pass`, `intercept`, `mediate` (clear-text HTTP), `raw`, `udp` or `refuse`.
    pub mode: &'static str,
    /// The deciding rule, if one decided.
    pub rule: Option<String>,
    /// The HTTP rule that would match, if one would.
    pub http_rule: Option<String>,
    /// Why, in words.
    pub reason: String,
    /// The secrets that would be used.
    pub secrets: Vec<String>,
    /// The policy's revision.
    pub revision: u64,
    /// Who would get the request, where it is read.
    #[serde(skip)]
    pub receiver: Option<String>,
    /// The secrets without which it would not be sent, as rules put them into headers.
    #[serde(skip)]
    pub needed: Vec<String>,
}

impl CompiledPolicy {
    /// Explains `method url`. `addresses` are what the host resolves to, if the caller knows; without them a name is
    /// judged by name alone. `tcp://host:port` stands for plain TCP, `udp://host:port` for datagrams.
    pub fn explain(&self, method: &Method, url: &Uri, addresses: &[IpAddr], host: &[IpAddr]) -> Explanation {
        let refuse = |reason: String, rule: Option<String>| Explanation {
            allowed: false,
            mode: "refuse",
            rule,
            http_rule: None,
            reason,
            secrets: Vec::new(),
            revision: self.revision,
            receiver: None,
            needed: Vec::new(),
        };
        let scheme = match url.scheme_str() {
            Some("http") => Some(Scheme::Http),
            Some("https") => Some(Scheme::Https),
            Some("tcp" | "udp") => None,
            _ => return refuse("use http://, https://, tcp:// or udp://".to_owned(), None),
        };
        let is_udp = url.scheme_str() == Some("udp");
        let place = match url.authority().ok_or("names no host").and_then(HostPort::after_user) {
            Ok(place) => place,
            Err(problem) => return refuse(format!("the URL {problem}"), None),
        };
        let port = place.port.or(match scheme {
            Some(Scheme::Http) => Some(80),
            Some(Scheme::Https) => Some(443),
            None => None,
        });
        let Some(port) = port else { return refuse("tcp:// and udp:// need a port".to_owned(), None) };
        let literal = place.address();
        let judge = |destination: Destination<'_>| match is_udp {
            true => self.datagrams(destination, port, host),
            false => self.connect(destination, port, host),
        };
        let name = &place.host;
        let decision = match literal {
            Some(address) => judge(Destination::Address(address)),
            None => {
                let resolved = addresses.iter().map(|address| judge(Destination::Resolved(name, *address)));
                let by_name = judge(Destination::Name(name));
                let mut all: Vec<_> = resolved.collect();
                all.sort_by_key(|decision| !decision.allowed);
                if by_name.allowed { all.into_iter().next().unwrap_or(by_name) } else { by_name }
            }
        };
        if !decision.allowed {
            return refuse(decision.reason.to_string(), decision.rule);
        }
        let spoken = match scheme {
            Some(Scheme::Http) => matches!(decision.l7, L7::Http | L7::Web | L7::Raw),
            Some(Scheme::Https) => matches!(decision.l7, L7::Tls | L7::Web | L7::Raw),
            None => is_udp || decision.l7 == L7::Raw,
        };
        if !spoken {
            return refuse(format!("only {:?} may be spoken there", decision.l7).to_lowercase(), decision.rule);
        }
        let name = if literal.is_none() { place.host } else { String::new() };
        let mode = match scheme {
            _ if is_udp => "udp",
            _ if literal.is_some() && decision.l7 == L7::Raw => "raw",
            None => "raw",
            Some(_) if decision.l7 == L7::Raw && !self.reads(&name, port, &decision) => "raw",
            Some(Scheme::Http) if literal.is_none() => "mediate",
            Some(Scheme::Https) if self.intercepts(&name, port) => "intercept",
            Some(_) => "pass",
        };
        let by_default = decision.reason == Reason::Default;
        let base = Explanation {
            allowed: true,
            mode,
            rule: decision.rule,
            http_rule: None,
            reason: if by_default { "the policy's default allows it".to_owned() } else { decision.reason.to_string() },
            secrets: Vec::new(),
            revision: self.revision,
            receiver: None,
            needed: Vec::new(),
        };
        let Some(scheme) = scheme.filter(|_| matches!(mode, "mediate" | "intercept")) else { return base };
        self.explain_request(
            base,
            HttpQuestion {
                scheme,
                host: &name,
                port,
                method,
                path: url.path(),
                query: url.query(),
                headers: &HeaderMap::new(),
            },
        )
    }

    fn explain_request(&self, base: Explanation, question: HttpQuestion<'_>) -> Explanation {
        let decision = self.http(&question);
        let needed: Vec<String> = decision.secret_names().map(str::to_owned).collect();
        let receiver = match decision.action {
            CompiledAction::Forward(proxy) => proxy.host.as_str(),
            _ => question.host,
        };
        let mut secrets = needed.clone();
        if question.scheme == Scheme::Https {
            let there = self.substitutions().filter(|one| one.hosts.matches(receiver));
            secrets.extend(there.map(|one| one.secret.clone()));
        }
        secrets.sort();
        secrets.dedup();
        let allowed = decision.is_forwarded();
        let reason = match decision.rule {
            Some(rule) if !allowed => format!("rule {rule} says {}", decision.verdict()),
            _ => base.reason.clone(),
        };
        Explanation {
            allowed,
            mode: if allowed { base.mode } else { "refuse" },
            http_rule: decision.rule.map(str::to_owned),
            reason,
            secrets: if allowed { secrets } else { Vec::new() },
            receiver: Some(receiver.to_owned()),
            needed: if allowed { needed } else { Vec::new() },
            ..base
        }
    }
}
