//! What a sandbox may reach: the types people write, the form the gateway runs, and the questions it answers.
//!
//! ```text
//! floor (operator) ──┐
//! bounds (workspace, │  compile   ┌──────────────┐  connect(name or address, port) -> Decision
//!   template) ───────┼──────────> │ CompiledPolicy│  http(request parts)            -> HttpDecision
//! policy (sandbox) ──┘            └──────────────┘  explain(url)                   -> Explanation
//! ```
//!
//! Every layer has to agree, so that a sandbox's policy can narrow what stands above it and never widen it. Within a
//! layer the rules are ordered and the first match wins; `default` decides when none matches.
//!
//! Evaluation is pure: no clock, no I/O, no lock. A destination known by name only (before it is resolved) is judged
//! by its name; the same question is asked again with each resolved address before it is dialled, and that answer
//! counts. A field that cannot be honoured is an error when the policy is compiled, never ignored.

mod addresses;
mod closed;
mod compile;
mod connect;
mod egress_proxy;
mod explain;
mod http;
mod names;
mod simple;

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

pub use self::{
    addresses::{AddressClass, classify, host_addresses},
    compile::{CompiledPolicy, PolicyError},
    connect::{Decision, Destination, Reason},
    explain::Explanation,
    http::{CanonicalPath, HttpDecision, HttpQuestion},
    names::{NameError, NamePattern, any_covers, any_matches, normalize_name},
    simple::SimplePolicy,
};

pub(crate) use self::{
    egress_proxy::CompiledEgressProxy,
    http::{CompiledAction, CompiledForward, CompiledSubstitution},
};

/// The policy of one layer, as it is written and stored.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// Counts up with each change; written into every audit record.
    pub revision: u64,
    /// The outcome when no rule matches.
    pub default: DefaultAction,
    /// Ordered; the first match wins.
    pub rules: Vec<Rule>,
    /// Ordered conditions on requests the gateway can read; the first match of a host wins.
    pub http: Vec<HttpRule>,
    /// Tokens in the guest that become secrets on the wire.
    pub substitutions: Vec<Substitution>,
    /// Which TLS hosts are opened, beyond those a rule needs open.
    pub intercept: InterceptPolicy,
    /// Literal `X-` headers added to every request the gateway can read.
    pub attribution: BTreeMap<String, String>,
    /// How names are answered.
    pub dns: DnsPolicy,
    /// Refuse TLS hellos that carry an encrypted inner name (also the harmless decoys browsers send).
    pub deny_encrypted_client_hello: bool,
    /// A proxy that all allowed TCP goes through. A sandbox's own policy alone can have one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub egress_proxy: Option<EgressProxy>,
}

/// A proxy of a sandbox's owner between the gateway and the world. It is asked for addresses that were resolved and judged
/// before, and reached like the open internet. When it fails nothing is dialled past it; UDP is refused.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EgressProxy {
    /// `socks5://proxy.example:1080`, or `http://` or `https://` for CONNECT.
    pub url: String,
    /// Needs a password.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
    /// `${secrets.NAME}`, a secret that may go to the proxy's host, or the password itself, which is kept sealed and not
    /// shown again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password: Option<String>,
}

/// The outcome when no rule matches.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DefaultAction {
    /// Nothing.
    Deny,
    /// HTTP on port 80 and TLS on port 443 of public addresses.
    #[default]
    AllowWeb,
    /// All TCP to public addresses.
    AllowPublic,
    /// All TCP and UDP to public addresses. With conditions on requests in the policy, or hosts that are always opened,
    /// no UDP: HTTP/3 would carry requests past them. Rules may open it then.
    AllowPublicUdp,
}

/// Allow or deny.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// The connection may be made.
    Allow,
    /// The connection is refused.
    Deny,
}

/// One rule on destinations. It matches when a name or an address matches (no names and no addresses: any
/// destination) and the port does.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Shown in audit records and refusals; `rule-N` when empty.
    #[serde(default)]
    pub id: String,
    /// What a match means.
    pub action: Action,
    /// `a.example`, `*.a.example` (below, any depth), `.a.example` (below and itself), `*`, `~regex`.
    #[serde(default)]
    pub names: Vec<String>,
    /// Addresses or networks: `203.0.114.7`, `203.0.114.0/24`, `2600:1f00::/24`.
    #[serde(default)]
    pub cidrs: Vec<String>,
    /// Empty: 80 and 443 where the rule has names, else all.
    #[serde(default)]
    pub ports: Vec<Ports>,
    /// What may be spoken. Left out: web on ports 80 and 443, anything on other ports.
    #[serde(default)]
    pub l7: Option<L7>,
    /// Where the rule came from, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
}

/// A port or a range, written `443` or `"8000-8999"`.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(untagged, expecting = "expected a port such as 443, or a range such as \"8000-8999\"")]
pub enum Ports {
    /// One port.
    One(u16),
    /// `"first-last"`, or one port as text.
    Range(String),
}

impl Ports {
    /// The first and the last, if they are ports in order.
    pub(crate) fn range(&self) -> Option<(u16, u16)> {
        let (first, last) = match self {
            Self::One(port) => (*port, *port),
            Self::Range(text) => {
                let (first, last) = text.split_once('-').unwrap_or((text, text));
                (first.trim().parse().ok()?, last.trim().parse().ok()?)
            }
        };
        (first > 0 && first <= last).then_some((first, last))
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(port) => port.fmt(f),
            Self::Range(text) => text.fmt(f),
        }
    }
}

/// What may be spoken on a connection.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum L7 {
    /// HTTP/1.1 in clear text.
    Http,
    /// TLS whose server name is the destination's.
    Tls,
    /// Either of the two.
    Web,
    /// Any bytes.
    Raw,
    /// UDP, and nothing else. Rules without it open TCP alone; what they deny is denied to both.
    Udp,
}

/// How names are answered.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DnsPolicy {
    /// The answer for a name no rule allows.
    pub on_deny: OnDeny,
    /// Let address rules allow names: such names have to be resolved upstream to be judged, so that any name a guest
    /// makes up leaves as a query. Off, address rules allow literal addresses only.
    pub resolve_unlisted: bool,
    /// Do not ask upstream when a guest resolves a name, only when it connects: a name under an allowed wildcard then
    /// carries nothing out by itself.
    pub resolve_on_connect: bool,
}

/// The answer for a name no rule allows. No query leaves in either case.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnDeny {
    /// An address of ours, so that HTTP and TLS clients are told the reason.
    #[default]
    Explain,
    /// The name does not exist.
    Nxdomain,
}

/// Which TLS hosts are opened, beyond those a rule needs open.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct InterceptPolicy {
    /// Opened although no rule needs it (for example to refuse domain fronting on a shared CDN).
    pub always: Vec<String>,
    /// Never opened; a rule that needs one of these open is refused.
    pub never: Vec<String>,
}

/// One condition on requests to a host. Hosts of such rules are intercepted; the rule itself grants no access.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HttpRule {
    /// Shown in audit records and refusals; `http-N` when empty.
    #[serde(default)]
    pub id: String,
    /// Off: kept, but as if it were not there.
    #[serde(default = "yes")]
    pub enabled: bool,
    /// Name patterns as in [`Rule::names`].
    pub hosts: Vec<String>,
    /// `http` or `https`; left out: both for allow and deny, `https` for everything that adds a header.
    #[serde(default)]
    pub scheme: Option<Scheme>,
    /// Left out: any.
    #[serde(default)]
    pub port: Option<u16>,
    /// Upper case; empty: any.
    #[serde(default)]
    pub methods: Vec<String>,
    /// Compared with the undecoded path, without the query.
    #[serde(default)]
    pub path: Option<Matcher>,
    /// All have to match.
    #[serde(default)]
    pub query: Vec<NamedMatcher>,
    /// All have to match.
    #[serde(default)]
    pub headers: Vec<NamedMatcher>,
    /// Take the values that the action puts in out of what is answered (headers, trailers and uncompressed bodies).
    #[serde(default)]
    pub mask_echo: bool,
    /// What a match means.
    pub action: HttpAction,
}

fn yes() -> bool {
    true
}

/// A scheme.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Scheme {
    /// Clear text.
    Http,
    /// TLS.
    Https,
}

/// How a text is compared. Regular expressions take linear time and have to match the whole text.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Matcher {
    /// The same text.
    Exact(String),
    /// Starts with it.
    Prefix(String),
    /// Ends with it.
    Suffix(String),
    /// Matches as a whole.
    Regex(String),
}

/// A matcher on a header or query field.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NamedMatcher {
    /// The field.
    pub name: String,
    /// How its value is compared.
    pub value: Matcher,
}

/// What a matching request gets.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum HttpAction {
    /// Sent on as it is.
    Allow,
    /// Refused with the rule's id.
    Deny,
    /// Headers replaced; values may hold `${secrets.NAME}` (`$$` is a dollar sign).
    SetHeaders(BTreeMap<String, String>),
    /// Answered by the gateway; nothing is sent.
    Respond(Answer),
    /// Sent to a proxy of the rule's author instead of the host.
    Forward(Forward),
}

/// Where a request is sent instead of its host. The proxy gets it below the URL's path, with the headers
/// `X-Stockade-Forwarded-Scheme`, `-Host`, `-Port` and `X-Stockade-Sandbox`. Tokens count for the proxy: those that may
/// not go there are not sent.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Forward {
    /// `https://proxy.example/path`, without a query.
    pub url: String,
    /// Set as with `set_headers`; secrets have to be allowed for the proxy's host.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
}

/// An answer of the gateway's own.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Answer {
    /// 200 to 599.
    pub status: u16,
    /// Not those that frame the message.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    /// The body.
    #[serde(default)]
    pub body: String,
}

/// A token in the guest that becomes a secret in requests to the secret's hosts.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Substitution {
    /// The token: at least 24 characters of `A-Z a-z 0-9 _ -`; see [`crate::broker::placeholder`].
    pub placeholder: String,
    /// The secret's name at the provider.
    pub secret: String,
    /// Where it may go; name patterns, or `*`.
    pub hosts: Vec<String>,
    /// In which parts of a request.
    #[serde(rename = "in", default)]
    pub places: Places,
    /// Only in these headers; empty: all but those that servers are known to echo.
    #[serde(default)]
    pub header_names: Vec<String>,
    /// What happens to a request that carries the token to another host.
    #[serde(default)]
    pub other_host: OtherHost,
    /// Replace the value by the token in what the host answers (headers, trailers and uncompressed bodies), whichever way
    /// the value was put in.
    #[serde(default)]
    pub mask_echo: bool,
}

/// In which parts of a request a token is replaced.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Places {
    /// Header values.
    pub headers: bool,
    /// Inside `Authorization: Basic`.
    pub basic: bool,
    /// The query.
    pub query: bool,
    /// The body, if it is not compressed and within the limit.
    pub body: bool,
}

impl Default for Places {
    fn default() -> Self {
        Self { headers: true, basic: true, query: false, body: false }
    }
}

/// What happens to a request that carries a token where it may not go.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OtherHost {
    /// Refused and reported.
    #[default]
    Block,
    /// Sent on unchanged: the token is worthless outside.
    Pass,
}

/// What the operator sets under all policies. Tenants cannot widen it.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Floor {
    /// Networks opened although they are private. Metadata addresses cannot be.
    pub open_cidrs: Vec<String>,
    /// Networks closed.
    pub deny_cidrs: Vec<String>,
    /// Names closed; the control plane's belong here.
    pub deny_names: Vec<String>,
    /// Ports closed.
    pub deny_ports: Vec<Ports>,
}

impl Default for Floor {
    fn default() -> Self {
        Self {
            open_cidrs: Vec::new(),
            deny_cidrs: Vec::new(),
            deny_names: Vec::new(),
            deny_ports: vec![Ports::One(25)],
        }
    }
}
