//! Looks for tokens in one request and puts values in their place.
//!
//! Order: first every place is searched for tokens that may not be there (stop before anything is fetched), then
//! headers that rules set, then tokens in headers, Basic credentials and the query. Only parsed parts are looked at:
//! a token split over writes is found, one that is percent-, base64- or JSON-escaped is not replaced and stays
//! worthless.

use std::collections::BTreeMap;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{HeaderMap, HeaderName, HeaderValue, Uri, header, request};
use stockade_model::Secret;
use zeroize::Zeroizing;

use super::{Masks, Piece, SecretError, SecretProvider, SecretRequest, Template};
use crate::policy::{CompiledPolicy, CompiledSubstitution, HttpDecision, OtherHost, Scheme};

/// Headers that servers and proxies are known to repeat in answers and logs.
const ECHOED: &[&str] = &[
    "accept",
    "accept-charset",
    "accept-encoding",
    "accept-language",
    "cache-control",
    "correlation-id",
    "forwarded",
    "from",
    "if-match",
    "if-modified-since",
    "if-none-match",
    "if-range",
    "if-unmodified-since",
    "origin",
    "range",
    "referer",
    "request-id",
    "traceparent",
    "tracestate",
    "user-agent",
    "via",
];
const ECHOED_PREFIXES: &[&str] = &["sec-", "x-forwarded-", "x-b3-", "x-request-", "x-correlation-", "x-amzn-trace-"];

/// Shorter ones are in answers for other reasons, too.
const SHORTEST_LITERAL: usize = 8;

/// Why a request is not sent.
#[derive(Debug)]
pub(crate) enum Refused {
    /// It carries a token of this secret where it may not go.
    Misplaced { secret: String, place: String },
    /// A value cannot be had.
    Secret(SecretError),
}

/// What else was sent of a value, and what an answer shows instead.
type Forms = Vec<(String, Secret)>;

/// What was put into a request.
#[derive(Debug, Default)]
pub(crate) struct Sent {
    /// Names of the secrets.
    pub(crate) secrets: Vec<String>,
    /// What to look for in the answer.
    pub(crate) masks: Masks,
    /// Tokens, names and values for the body.
    pub(crate) body: Vec<(String, String, Secret)>,
}

pub(crate) struct Substituter<'a> {
    pub(crate) policy: &'a CompiledPolicy,
    pub(crate) provider: &'a dyn SecretProvider,
    pub(crate) request: SecretRequest,
    pub(crate) scheme: Scheme,
}

impl Substituter<'_> {
    /// Changes the head of a request that may be sent to `request.host`.
    pub(crate) async fn apply(&self, decision: &HttpDecision<'_>, head: &mut request::Parts) -> Result<Sent, Refused> {
        self.stop_misplaced(head)?;
        let mut sent = Sent::default();
        let mut values = BTreeMap::new();
        for (name, value) in self.policy.attribution() {
            head.headers.insert(name.clone(), value.clone());
        }
        self.replace_tokens(head, &mut sent, &mut values).await?;
        // After the tokens: a value that looks like a token is not looked at again.
        for set in decision.header_sets() {
            for (name, template) in set.headers {
                let value = self.fill(template, set.mask_echo, &mut sent, &mut values).await?;
                head.headers.insert(name.clone(), value);
            }
        }
        sent.secrets.sort();
        sent.secrets.dedup();
        Ok(sent)
    }

    /// The tokens whose presence in a body stops the request.
    pub(crate) fn watched_in_bodies(&self) -> Vec<(String, String)> {
        let stops = |one: &&CompiledSubstitution| one.other_host == OtherHost::Block && !self.may_go(one);
        self.policy.substitutions().filter(stops).map(|one| (one.placeholder.clone(), one.secret.clone())).collect()
    }

    fn may_go(&self, one: &CompiledSubstitution) -> bool {
        self.scheme == Scheme::Https && one.hosts.matches(&self.request.host)
    }

    /// The token shown instead of a secret whose echoes are to be masked, whichever way the value was put in.
    fn token_that_masks(&self, secret: &str) -> Option<&str> {
        let mut all = self.policy.substitutions().filter(|one| one.mask_echo && one.secret == secret);
        all.next().map(|one| one.placeholder.as_str())
    }

    fn stop_misplaced(&self, head: &request::Parts) -> Result<(), Refused> {
        for one in self.policy.substitutions().filter(|one| one.other_host == OtherHost::Block) {
            let found = find_token(&one.placeholder, head);
            if let Some(place) = found.filter(|_| !self.may_go(one)) {
                return Err(Refused::Misplaced { secret: one.secret.clone(), place });
            }
        }
        Ok(())
    }

    async fn replace_tokens(
        &self,
        head: &mut request::Parts,
        sent: &mut Sent,
        values: &mut BTreeMap<String, Secret>,
    ) -> Result<(), Refused> {
        for one in self.policy.substitutions().filter(|one| self.may_go(one)) {
            let in_body = one.places.body;
            if find_token(&one.placeholder, head).is_none() && !in_body {
                continue;
            }
            let in_head = replaceable(one, head);
            if !in_head && !in_body {
                continue;
            }
            let value = self.value(&one.secret, values).await?;
            let mut forms = vec![(one.placeholder.clone(), value.clone())];
            if in_head {
                let credentials = replace_in_headers(one, &value, &mut head.headers);
                forms.extend(credentials.map_err(|()| self.unusable(&one.secret))?);
                if one.places.query {
                    let escaped = replace_in_query(one, &value, &mut head.uri);
                    forms.extend(escaped.map_err(|()| self.unusable(&one.secret))?);
                }
                sent.secrets.push(one.secret.clone());
            }
            if in_body {
                sent.body.push((one.placeholder.clone(), one.secret.clone(), value.clone()));
            }
            if self.token_that_masks(&one.secret).is_some() {
                forms.iter().for_each(|(shown, form)| sent.masks.add(shown, form));
            }
        }
        Ok(())
    }

    async fn fill(
        &self,
        template: &Template,
        mask_echo: bool,
        sent: &mut Sent,
        values: &mut BTreeMap<String, Secret>,
    ) -> Result<HeaderValue, Refused> {
        let mut text = Zeroizing::new(String::new());
        let mut last = "";
        for piece in &template.0 {
            match piece {
                Piece::Text(literal) => text.push_str(literal),
                Piece::Secret(name) => {
                    let value = self.value(name, values).await?;
                    text.push_str(value.expose());
                    match self.token_that_masks(name) {
                        Some(token) => sent.masks.add(token, &value),
                        None if mask_echo => sent.masks.add(&format!("${{secrets.{name}}}"), &value),
                        None => {}
                    }
                    sent.secrets.push(name.clone());
                    last = name;
                }
            }
        }
        if mask_echo && !template.has_secret() {
            literals(&text).for_each(|literal| sent.masks.add("***", &Secret::new(literal)));
        }
        let mut value = HeaderValue::from_str(&text).map_err(|_| self.unusable(last))?;
        value.set_sensitive(template.has_secret());
        Ok(value)
    }

    async fn value(&self, name: &str, known: &mut BTreeMap<String, Secret>) -> Result<Secret, Refused> {
        if let Some(value) = known.get(name) {
            return Ok(value.clone());
        }
        let request = SecretRequest { secret: name.to_owned(), ..self.request.clone() };
        let value = self.provider.value(&request).await.map_err(Refused::Secret)?;
        if super::check_value(&value).is_err() {
            return Err(self.unusable(name));
        }
        known.insert(name.to_owned(), value.clone());
        Ok(value)
    }

    fn unusable(&self, name: &str) -> Refused {
        let problem = "its value holds bytes that cannot be sent there".to_owned();
        Refused::Secret(SecretError::Unavailable { name: name.to_owned(), problem })
    }
}

/// What of a header value that holds no reference may be a secret by itself: all of it, and what is behind a scheme.
fn literals(text: &str) -> impl Iterator<Item = &str> {
    let behind = text.split_once(' ').map(|(_, rest)| rest.trim());
    [Some(text), behind].into_iter().flatten().filter(|text| text.len() >= SHORTEST_LITERAL)
}

fn contains(haystack: &[u8], token: &str) -> bool {
    haystack.windows(token.len()).any(|window| window == token.as_bytes())
}

/// Where a token is in the head, for the record.
fn find_token(token: &str, head: &request::Parts) -> Option<String> {
    if head.uri.path_and_query().is_some_and(|text| contains(text.as_str().as_bytes(), token)) {
        return Some("url".to_owned());
    }
    head.headers.iter().find_map(|(name, value)| {
        let found = contains(value.as_bytes(), token)
            || contains(name.as_str().as_bytes(), token)
            || basic(name, value).is_some_and(|decoded| contains(&decoded, token));
        found.then(|| format!("header {name}"))
    })
}

fn basic(name: &HeaderName, value: &HeaderValue) -> Option<Vec<u8>> {
    if name != header::AUTHORIZATION && name != header::PROXY_AUTHORIZATION {
        return None;
    }
    let (scheme, data) = value.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("basic").then(|| STANDARD.decode(data.trim()).ok()).flatten()
}

fn header_is_open(one: &CompiledSubstitution, name: &HeaderName) -> bool {
    if !one.header_names.is_empty() {
        return one.header_names.contains(name);
    }
    !ECHOED.contains(&name.as_str()) && !ECHOED_PREFIXES.iter().any(|prefix| name.as_str().starts_with(prefix))
}

fn replaceable(one: &CompiledSubstitution, head: &request::Parts) -> bool {
    let token = &one.placeholder;
    let in_header = |(name, value): (&HeaderName, &HeaderValue)| {
        header_is_open(one, name)
            && (one.places.headers && contains(value.as_bytes(), token)
                || one.places.basic && basic(name, value).is_some_and(|decoded| contains(&decoded, token)))
    };
    head.headers.iter().any(in_header)
        || one.places.query && head.uri.query().is_some_and(|query| contains(query.as_bytes(), token))
}

/// Returns what else to look for in the answer: credentials in base64, as the guest wrote them and as they were sent.
fn replace_in_headers(one: &CompiledSubstitution, secret: &Secret, headers: &mut HeaderMap) -> Result<Forms, ()> {
    let mut forms = Forms::new();
    let token = one.placeholder.as_str();
    for (name, value) in headers.iter_mut() {
        if !header_is_open(one, name) {
            continue;
        }
        let changed = if one.places.headers && contains(value.as_bytes(), token) {
            value.to_str().map_err(drop)?.replace(token, secret.expose())
        } else if let Some(decoded) = basic(name, value).filter(|bytes| one.places.basic && contains(bytes, token)) {
            let written = STANDARD.encode(&decoded);
            let text = Zeroizing::new(String::from_utf8(decoded).map_err(drop)?.replace(token, secret.expose()));
            let encoded = Zeroizing::new(STANDARD.encode(text.as_bytes()));
            forms.push((written, Secret::new(encoded.as_str())));
            format!("Basic {}", *encoded)
        } else {
            continue;
        };
        let changed = Zeroizing::new(changed);
        *value = HeaderValue::from_str(&changed).map_err(drop)?;
        value.set_sensitive(true);
    }
    Ok(forms)
}

/// Returns what else to look for in the answer: the value as it is escaped.
fn replace_in_query(one: &CompiledSubstitution, secret: &Secret, uri: &mut Uri) -> Result<Forms, ()> {
    let Some(query) = uri.query().filter(|query| contains(query.as_bytes(), &one.placeholder)) else {
        return Ok(Forms::new());
    };
    let escaped =
        percent_encoding::utf8_percent_encode(secret.expose(), percent_encoding::NON_ALPHANUMERIC).to_string();
    let changed = format!("{}?{}", uri.path(), query.replace(&one.placeholder, &escaped));
    let mut parts = std::mem::take(uri).into_parts();
    parts.path_and_query = Some(changed.parse().map_err(drop)?);
    *uri = Uri::from_parts(parts).map_err(drop)?;
    Ok(vec![(one.placeholder.clone(), Secret::new(escaped))])
}
