//! Conditions on requests: who, what, where. A host's rules are ordered; the first that matches decides.
//!
//! Paths are compared undecoded. A path that servers read in several ways (`..`, `//`, `%2e`, `%2f`, an escaped
//! letter) matches no rule that allows or adds something, and every rule on paths that denies.

use std::collections::BTreeMap;

use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use regex::bytes::Regex;
use stockade_model::quoted;

use super::{
    CompiledPolicy, Forward, HttpAction, HttpRule, Matcher, NamedMatcher, OtherHost, Places, PolicyError, Scheme,
    Substitution,
    compile::name_set,
    names::{NameSet, whole_regex},
};
use crate::broker::Template;

const MAX_HEADERS: usize = 64;
const MAX_VALUE: usize = 8 << 10;
const MAX_BODY: usize = 256 << 10;
const MIN_PLACEHOLDER: usize = 24;
const MAX_PLACEHOLDER: usize = 256;

/// Headers that frame a message or belong to one hop: never set by a rule.
const FRAMING: &[&str] = &[
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// A request as far as rules can see it.
#[derive(Clone, Copy, Debug)]
pub struct HttpQuestion<'a> {
    /// How it travels.
    pub scheme: Scheme,
    /// The host, as resolved.
    pub host: &'a str,
    /// The port.
    pub port: u16,
    /// The method.
    pub method: &'a Method,
    /// The path as sent.
    pub path: &'a str,
    /// The query as sent.
    pub query: Option<&'a str>,
    /// The headers.
    pub headers: &'a HeaderMap,
}

/// What happens to the request.
#[derive(Debug)]
pub struct HttpDecision<'a> {
    /// The deciding rule, if one matched.
    pub rule: Option<&'a str>,
    /// What it says; an allow when none matched.
    pub(crate) action: &'a CompiledAction,
    /// Headers that are set, those of outer layers last.
    sets: Vec<HeaderSet<'a>>,
    /// Refused by what stands above the sandbox.
    pub(crate) is_operators: bool,
}

/// What one rule puts into a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeaderSet<'a> {
    pub(crate) headers: &'a [(HeaderName, Template)],
    /// Whether echoes of its secrets are taken out of the answer.
    pub(crate) mask_echo: bool,
}

impl HttpDecision<'_> {
    /// Whether the request is sent to its host.
    pub fn is_forwarded(&self) -> bool {
        matches!(self.action, CompiledAction::Allow | CompiledAction::SetHeaders(_) | CompiledAction::Forward(_))
    }

    /// The secrets whose values the rules put into headers.
    pub fn secret_names(&self) -> impl Iterator<Item = &str> {
        self.sets.iter().flat_map(|set| set.headers).flat_map(|(_, template)| template.secret_names())
    }

    /// What is set, the later over the earlier.
    pub(crate) fn header_sets(&self) -> impl Iterator<Item = HeaderSet<'_>> {
        self.sets.iter().copied()
    }

    /// A word for records.
    pub fn verdict(&self) -> &'static str {
        match self.action {
            CompiledAction::Allow => "allow",
            CompiledAction::SetHeaders(_) => "set_headers",
            CompiledAction::Deny => "deny",
            CompiledAction::Respond { .. } => "respond",
            CompiledAction::Forward(_) => "forward",
        }
    }
}

#[derive(Debug)]
pub(crate) enum CompiledAction {
    Allow,
    Deny,
    SetHeaders(Vec<(HeaderName, Template)>),
    Respond { status: StatusCode, headers: Vec<(HeaderName, HeaderValue)>, body: String },
    Forward(CompiledForward),
}

/// A proxy of a rule's author.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct CompiledForward {
    pub(crate) host: String,
    pub(crate) port: u16,
    /// Without a slash at its end.
    pub(crate) path: String,
    headers: Vec<(HeaderName, Template)>,
    /// Whether the operator wrote it; the proxy may be anywhere then.
    pub(crate) is_operators: bool,
}

impl CompiledAction {
    fn headers(&self) -> Option<&[(HeaderName, Template)]> {
        match self {
            Self::SetHeaders(headers) | Self::Forward(CompiledForward { headers, .. }) => Some(headers),
            Self::Allow | Self::Deny | Self::Respond { .. } => None,
        }
    }
}

#[derive(Debug)]
pub(super) struct CompiledHttpRule {
    id: String,
    hosts: NameSet,
    scheme: Option<Scheme>,
    port: Option<u16>,
    methods: Vec<Method>,
    path: Option<Text>,
    query: Vec<(String, Text)>,
    headers: Vec<(HeaderName, Text)>,
    action: CompiledAction,
    mask_echo: bool,
}

#[derive(Debug)]
pub(crate) struct CompiledSubstitution {
    pub(crate) placeholder: String,
    pub(crate) secret: String,
    pub(crate) hosts: NameSet,
    pub(crate) places: Places,
    pub(crate) header_names: Vec<HeaderName>,
    pub(crate) other_host: OtherHost,
    pub(crate) mask_echo: bool,
}

#[derive(Debug)]
enum Text {
    Exact(String),
    Prefix(String),
    Suffix(String),
    Regex(Regex),
}

impl Text {
    fn compile(field: &str, matcher: &Matcher) -> Result<Self, PolicyError> {
        Ok(match matcher {
            Matcher::Exact(text) => Self::Exact(text.clone()),
            Matcher::Prefix(text) => Self::Prefix(text.clone()),
            Matcher::Suffix(text) => Self::Suffix(text.clone()),
            Matcher::Regex(text) => {
                Self::Regex(whole_regex(text).map_err(|error| PolicyError::new(format!("{field}.regex"), error))?)
            }
        })
    }

    fn matches(&self, text: &str) -> bool {
        match self {
            Self::Exact(want) => text == want,
            Self::Prefix(want) => text.starts_with(want.as_str()),
            Self::Suffix(want) => text.ends_with(want.as_str()),
            Self::Regex(want) => want.is_match(text.as_bytes()),
        }
    }
}

/// Whether all servers read a path alike.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct CanonicalPath(bool);

impl CanonicalPath {
    /// Looks at a path as sent, without the query.
    pub fn of(path: &str) -> Self {
        if path == "*" {
            return Self(true);
        }
        let Some(rest) = path.strip_prefix('/') else { return Self(false) };
        let inner = rest.strip_suffix('/').unwrap_or(rest);
        // Segment parameters (`/a;x=1/..;/b`) are cut off by some servers before they resolve dots.
        let odd_segment = |segment: &str| {
            let bare = segment.split(';').next().unwrap_or(segment);
            matches!(bare, "" | "." | "..")
        };
        let odd_segments = !inner.is_empty() && inner.split('/').any(odd_segment) || rest == "/";
        let odd_bytes = path.bytes().any(|byte| byte == b'\\' || byte <= b' ' || byte >= 0x7f);
        Self(!odd_segments && !odd_bytes && escapes_are_needed(path))
    }

    /// The answer.
    pub fn is_canonical(self) -> bool {
        self.0
    }
}

/// Whether every `%xx` stands for a byte that has to be escaped, other than slashes, backslashes and controls.
fn escapes_are_needed(path: &str) -> bool {
    path.split('%').skip(1).all(|part| {
        let Some(byte) = part.get(..2).and_then(|hex| u8::from_str_radix(hex, 16).ok()) else { return false };
        let unreserved = byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~');
        !unreserved && !matches!(byte, b'/' | b'\\' | b'%' | 0..=0x1f | 0x7f)
    })
}

impl CompiledHttpRule {
    pub(super) fn compile(at: usize, rule: &HttpRule, is_operators: bool) -> Result<Self, PolicyError> {
        let field = |name: &str| format!("http[{at}].{name}");
        if rule.hosts.is_empty() {
            return Err(PolicyError::new(field("hosts"), "is empty; name the hosts, or \"*\" for all"));
        }
        let action = compile_action(&field("action"), &rule.action, is_operators)?;
        let adds = matches!(action, CompiledAction::SetHeaders(_));
        let has_secret = action.headers().is_some_and(|headers| headers.iter().any(|(_, value)| value.has_secret()));
        if rule.mask_echo && action.headers().is_none_or(<[_]>::is_empty) {
            return Err(PolicyError::new(field("mask_echo"), "has nothing to mask: the action sets no headers"));
        }
        // Those of a forward go to the proxy, and that over TLS.
        if adds && has_secret && rule.scheme == Some(Scheme::Http) {
            return Err(PolicyError::new(field("scheme"), "a secret is never sent in clear text; use https"));
        }
        let methods = rule.methods.iter().enumerate().map(|(index, method)| {
            let wrong = || PolicyError::new(field(&format!("methods[{index}]")), "is no method in upper case");
            let upper = method.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'-');
            Method::from_bytes(method.as_bytes()).ok().filter(|_| upper).ok_or_else(wrong)
        });
        let named = |list: &'static str, matchers: &[NamedMatcher]| {
            let one = |(index, matcher): (usize, &NamedMatcher)| {
                let place = field(&format!("{list}[{index}].value"));
                Ok((matcher.name.clone(), Text::compile(&place, &matcher.value)?))
            };
            matchers.iter().enumerate().map(one).collect::<Result<Vec<_>, PolicyError>>()
        };
        let headers = named("headers", &rule.headers)?
            .into_iter()
            .enumerate()
            .map(|(index, (name, text))| Ok((header_name(&field(&format!("headers[{index}].name")), &name)?, text)));
        Ok(Self {
            id: if rule.id.is_empty() { format!("http-{at}") } else { rule.id.clone() },
            hosts: name_set(&field("hosts"), &rule.hosts)?,
            scheme: rule.scheme.or(adds.then_some(Scheme::Https)),
            port: rule.port,
            methods: methods.collect::<Result<_, _>>()?,
            path: rule.path.as_ref().map(|path| Text::compile(&field("path"), path)).transpose()?,
            query: named("query", &rule.query)?,
            headers: headers.collect::<Result<_, PolicyError>>()?,
            action,
            mask_echo: rule.mask_echo,
        })
    }

    pub(super) fn may_need_tls_open(&self, host: &str, port: u16) -> bool {
        self.scheme != Some(Scheme::Http) && self.port.is_none_or(|want| want == port) && self.hosts.matches(host)
    }

    pub(super) fn names_port(&self, host: &str, port: u16) -> bool {
        self.port == Some(port) && self.may_need_tls_open(host, port)
    }

    fn matches(&self, question: &HttpQuestion<'_>, canonical: bool) -> bool {
        let denies = matches!(self.action, CompiledAction::Deny);
        let path_matches = match &self.path {
            // What servers may read as another path is taken for the worst.
            _ if !canonical => denies,
            Some(path) => path.matches(question.path),
            None => true,
        };
        self.hosts.matches(question.host)
            && self.scheme.is_none_or(|want| want == question.scheme)
            && self.port.is_none_or(|want| want == question.port)
            && (self.methods.is_empty() || self.methods.contains(question.method))
            && path_matches
            && self.headers.iter().all(|(name, want)| {
                let values: Vec<&str> =
                    question.headers.get_all(name).iter().map(|value| value.to_str().unwrap_or("")).collect();
                repeated_matches(&values, want, denies)
            })
            && self.query.iter().all(|(name, want)| {
                let values = query_values(question.query.unwrap_or(""), name);
                let values: Vec<&str> = values.iter().map(String::as_str).collect();
                repeated_matches(&values, want, denies)
            })
    }
}

/// A field that is sent twice is read by some as the first and by others as the last: to allow, all have to match; to
/// deny, one is enough.
fn repeated_matches(values: &[&str], want: &Text, denies: bool) -> bool {
    if denies {
        values.iter().any(|value| want.matches(value))
    } else {
        !values.is_empty() && values.iter().all(|value| want.matches(value))
    }
}

fn query_values(query: &str, name: &str) -> Vec<String> {
    let decode = |text: &str| {
        let spaced = text.replace('+', " ");
        percent_encoding::percent_decode_str(&spaced).decode_utf8_lossy().into_owned()
    };
    let pairs = query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    pairs.filter(|(key, _)| decode(key) == name).map(|(_, value)| decode(value)).collect()
}

fn header_name(field: &str, name: &str) -> Result<HeaderName, PolicyError> {
    HeaderName::from_bytes(name.as_bytes())
        .map_err(|_| PolicyError::new(field, format!("{} is no header name", quoted(name))))
}

fn settable_header(field: &str, name: &str) -> Result<HeaderName, PolicyError> {
    let header = header_name(field, name)?;
    if FRAMING.contains(&header.as_str()) {
        return Err(PolicyError::new(field, format!("{name} frames the message or names its host and cannot be set")));
    }
    Ok(header)
}

fn compile_action(field: &str, action: &HttpAction, is_operators: bool) -> Result<CompiledAction, PolicyError> {
    Ok(match action {
        HttpAction::Allow => CompiledAction::Allow,
        HttpAction::Deny => CompiledAction::Deny,
        HttpAction::SetHeaders(headers) => {
            if headers.is_empty() {
                return Err(PolicyError::new(field, format!("set_headers takes 1 to {MAX_HEADERS} headers")));
            }
            CompiledAction::SetHeaders(compile_headers(&format!("{field}.set_headers"), headers)?)
        }
        HttpAction::Forward(forward) => {
            CompiledAction::Forward(compile_forward(&format!("{field}.forward"), forward, is_operators)?)
        }
        HttpAction::Respond(answer) => {
            let status =
                StatusCode::from_u16(answer.status).ok().filter(|status| (200..600).contains(&status.as_u16()));
            let status = status.ok_or_else(|| PolicyError::new(format!("{field}.respond.status"), "use 200 to 599"))?;
            let no_body = matches!(status.as_u16(), 204 | 205 | 304);
            if answer.body.len() > MAX_BODY || no_body && !answer.body.is_empty() {
                let problem = format!("at most {MAX_BODY} bytes, and none with 204, 205 and 304");
                return Err(PolicyError::new(format!("{field}.respond.body"), problem));
            }
            let one = |(name, value): (&String, &String)| {
                let place = format!("{field}.respond.headers.{name}");
                let header = settable_header(&place, name)?;
                let value = HeaderValue::from_str(value);
                Ok((header, value.map_err(|_| PolicyError::new(place, "is no header value"))?))
            };
            let headers = answer.headers.iter().map(one).collect::<Result<_, PolicyError>>()?;
            CompiledAction::Respond { status, headers, body: answer.body.clone() }
        }
    })
}

fn compile_headers(
    field: &str,
    headers: &BTreeMap<String, String>,
) -> Result<Vec<(HeaderName, Template)>, PolicyError> {
    if headers.len() > MAX_HEADERS {
        return Err(PolicyError::new(field, format!("takes at most {MAX_HEADERS} headers")));
    }
    let one = |(name, value): (&String, &String)| {
        let place = format!("{field}.{name}");
        let header = settable_header(&place, name)?;
        if value.len() > MAX_VALUE {
            return Err(PolicyError::new(place, format!("is longer than {MAX_VALUE} bytes")));
        }
        let template = Template::parse(value).map_err(|error| PolicyError::new(place, error))?;
        Ok((header, template))
    };
    headers.iter().map(one).collect()
}

fn compile_forward(field: &str, forward: &Forward, is_operators: bool) -> Result<CompiledForward, PolicyError> {
    let wrong = |problem: &str| PolicyError::new(format!("{field}.url"), problem);
    let (url, place) = crate::fetch::check_https_url(&forward.url).map_err(wrong)?;
    // Policies judge where it leads by name; what an address is meant to be cannot be told.
    if place.address().is_some() {
        return Err(wrong("needs a host name, not an address"));
    }
    if url.query().is_some() {
        return Err(wrong("takes no query: the request has its own"));
    }
    Ok(CompiledForward {
        host: place.host,
        port: place.port,
        path: url.path().trim_end_matches('/').to_owned(),
        headers: compile_headers(&format!("{field}.headers"), &forward.headers)?,
        is_operators,
    })
}

pub(super) fn compile_attribution(
    headers: &BTreeMap<String, String>,
) -> Result<Vec<(HeaderName, HeaderValue)>, PolicyError> {
    if headers.len() > 16 {
        return Err(PolicyError::new("attribution", "takes at most 16 headers"));
    }
    let one = |(name, value): (&String, &String)| {
        let place = format!("attribution.{name}");
        let header = settable_header(&place, name)?;
        if !header.as_str().starts_with("x-") {
            return Err(PolicyError::new(place, "only X- headers can be added to every request"));
        }
        let value = HeaderValue::from_str(value).map_err(|_| PolicyError::new(place, "is no header value"))?;
        Ok((header, value))
    };
    headers.iter().map(one).collect()
}

impl CompiledSubstitution {
    pub(super) fn compile(at: usize, one: &Substitution) -> Result<Self, PolicyError> {
        let field = |name: &str| format!("substitutions[{at}].{name}");
        let token = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
        let length = one.placeholder.len();
        if !(MIN_PLACEHOLDER..=MAX_PLACEHOLDER).contains(&length) || !one.placeholder.bytes().all(token) {
            let problem = format!("use {MIN_PLACEHOLDER} to {MAX_PLACEHOLDER} characters of A-Z a-z 0-9 _ -");
            return Err(PolicyError::new(field("placeholder"), problem));
        }
        if one.secret.is_empty() {
            return Err(PolicyError::new(field("secret"), "is empty; name a secret"));
        }
        if one.hosts.is_empty() {
            return Err(PolicyError::new(field("hosts"), "is empty; name the hosts, or \"*\" for all"));
        }
        let places = one.places;
        if !(places.headers || places.basic || places.query || places.body) {
            return Err(PolicyError::new(field("in"), "names no place where the token is replaced"));
        }
        let names = one.header_names.iter().enumerate();
        let names = names.map(|(index, name)| settable_header(&field(&format!("header_names[{index}]")), name));
        Ok(Self {
            placeholder: one.placeholder.clone(),
            secret: one.secret.clone(),
            hosts: name_set(&field("hosts"), &one.hosts)?,
            places,
            header_names: names.collect::<Result<_, _>>()?,
            other_host: one.other_host,
            mask_echo: one.mask_echo,
        })
    }
}

impl CompiledPolicy {
    /// Judges one request that the gateway can read.
    pub fn http(&self, question: &HttpQuestion<'_>) -> HttpDecision<'_> {
        let canonical = CanonicalPath::of(question.path).is_canonical();
        let mut decision =
            HttpDecision { rule: None, action: &CompiledAction::Allow, sets: Vec::new(), is_operators: false };
        // The sandbox's own layer first: outer layers may refuse, and what they set wins.
        for (above, layer) in self.layers.iter().rev().enumerate() {
            let Some(rule) = layer.http.iter().find(|rule| rule.matches(question, canonical)) else { continue };
            match (&rule.action, decision.action) {
                (CompiledAction::Deny, _) => {
                    let (rule, action, is_operators) = (Some(&*rule.id), &rule.action, above > 0);
                    return HttpDecision { rule, action, sets: Vec::new(), is_operators };
                }
                // An answer of the sandbox's own reaches nobody; where a request goes is the outermost layer's word.
                (CompiledAction::Respond { .. }, _)
                | (_, CompiledAction::Allow)
                | (CompiledAction::Forward(_), CompiledAction::SetHeaders(_) | CompiledAction::Forward(_)) => {
                    decision.rule = Some(&rule.id);
                    decision.action = &rule.action;
                }
                (_, _) => {}
            }
            let set = |headers| HeaderSet { headers, mask_echo: rule.mask_echo };
            decision.sets.extend(rule.action.headers().map(set));
        }
        decision
    }

    /// Literal headers for every request the gateway can read.
    pub(crate) fn attribution(&self) -> impl Iterator<Item = &(HeaderName, HeaderValue)> {
        self.layers.iter().rev().flat_map(|layer| &layer.attribution)
    }
}
