//! Requests of one connection, judged one by one. What the guest sent is parsed, judged, and written anew by another
//! HTTP stack; no byte of it is passed on as it came, so that there is nothing to smuggle.
//!
//! ```text
//! request ─> CONNECT? ─> one authority, the connection's? ─> policy still allows? ─> HTTP rules ─> tokens ─> upstream
//!             405          400 / 421                            403                    403 / answer   403
//! ```

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version, header, request, uri::Authority};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, upgrade::OnUpgrade};
use hyper_util::rt::TokioIo;

use super::{
    BoxBody,
    client::{Client, ClientError, Way},
    refuse::Refusal,
};
use crate::{
    audit::{AuditKind, Facts, Verdict},
    broker::{EchoMask, Refused, Sent, Substituter, TokenWatch, read_at_most},
    limits::Limits,
    net::{Flow, Upgraded},
    policy::{CompiledAction, CompiledForward, CompiledPolicy, Destination, HttpQuestion, Scheme, normalize_name},
    sandbox::{Sandbox, Target, facts_of},
};

/// Proxies of rules that a connection keeps clients of.
const MOST_FORWARDS: usize = 8;

/// One connection of the guest.
pub(super) struct Session {
    sandbox: Arc<Sandbox>,
    target: Target,
    scheme: Scheme,
    flow: Arc<Flow>,
    client: Arc<Client>,
    /// To the proxies of rules.
    forwards: Mutex<Vec<(CompiledForward, Arc<Client>)>>,
}

/// What is put into the record of a request.
struct Outcome {
    response: Response<BoxBody>,
    verdict: Verdict,
    reason: &'static str,
    more: Facts,
}

impl Session {
    pub(super) fn new(sandbox: Arc<Sandbox>, target: Target, scheme: Scheme, flow: Arc<Flow>) -> Arc<Self> {
        let client = Arc::new(Client::new(Arc::clone(&sandbox), Way::Host(target.clone()), scheme));
        Arc::new(Self { sandbox, target, scheme, flow, client, forwards: Mutex::default() })
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.sandbox.limits
    }

    /// Answers one request and records it.
    pub(super) async fn answer(&self, request: Request<Incoming>) -> Response<BoxBody> {
        let asked = Facts {
            method: Some(request.method().as_str().chars().take(32).collect()),
            path: Some(request.uri().path().chars().take(1_024).collect()),
            ..facts_of(&self.flow)
        };
        let outcome = match self.judge(request).await {
            Ok(outcome) => outcome,
            Err(refusal) => self.refused(&refusal),
        };
        let facts = Facts {
            status: Some(outcome.response.status().as_u16()),
            authority: outcome.more.authority,
            rule: outcome.more.rule,
            secrets: outcome.more.secrets,
            upstream: outcome.more.upstream,
            ..asked
        };
        self.sandbox.audit(AuditKind::Http, outcome.verdict, outcome.reason, facts);
        outcome.response
    }

    fn refused(&self, refusal: &Refusal) -> Outcome {
        let verdict = if refusal.status.is_server_error() { Verdict::Error } else { Verdict::Deny };
        Outcome { response: refusal.response(), verdict, reason: refusal.code, more: Facts::default() }
    }

    async fn judge(&self, request: Request<Incoming>) -> Result<Outcome, Refusal> {
        if request.method() == Method::CONNECT {
            return Err(Refusal::connect());
        }
        let host = self.host_of(&request)?;
        let policy = self.sandbox.policy();
        self.still_allowed(&policy, &host)?;
        let (mut head, body) = request.into_parts();
        let mut upgrade = take_upgrade(&mut head);
        strip_hop_headers(&mut head.headers);
        if let Some(upgrade) = &mut upgrade {
            upgrade.asked = Some(Upgraded {
                host: host.clone(),
                method: head.method.clone(),
                uri: head.uri.clone(),
                headers: head.headers.clone(),
                scheme: self.scheme,
            });
        }
        let decision = policy.http(&HttpQuestion {
            scheme: self.scheme,
            host: &host,
            port: self.target.port,
            method: &head.method,
            path: head.uri.path(),
            query: head.uri.query(),
            headers: &head.headers,
        });
        let rule = decision.rule.map(str::to_owned);
        match decision.action {
            CompiledAction::Deny => {
                let refusal = Refusal::rule(&host, rule.as_deref().unwrap_or("unnamed"));
                return Ok(Outcome { more: Facts { rule, ..Facts::default() }, ..self.refused(&refusal) });
            }
            CompiledAction::Respond { status, headers, body } => {
                let mut response = Response::new(full(body.clone()));
                *response.status_mut() = *status;
                response.headers_mut().extend(headers.iter().cloned());
                let more = Facts { rule, authority: Some(host), ..Facts::default() };
                return Ok(Outcome { response, verdict: Verdict::Allow, reason: "answered_by_rule", more });
            }
            CompiledAction::Allow | CompiledAction::SetHeaders(_) | CompiledAction::Forward(_) => {}
        }
        let proxy = match decision.action {
            CompiledAction::Forward(proxy) => Some(proxy),
            _ => None,
        };
        let (client, scheme) = match proxy {
            Some(proxy) => {
                self.mark_forwarded(&mut head, proxy, &host)?;
                (self.client_of(proxy), Scheme::Https)
            }
            None => (Arc::clone(&self.client), self.scheme),
        };
        // Values and tokens are for whom the request is really sent to.
        let receiver = proxy.map_or(host.as_str(), |proxy| proxy.host.as_str());
        let substituter = Substituter {
            policy: &policy,
            provider: self.sandbox.secrets(),
            request: self.sandbox.secret_request(receiver),
            scheme,
        };
        let sent = match substituter.apply(&decision, &mut head).await {
            Ok(sent) => sent,
            Err(refused) => {
                self.report_secret(&refused, &host);
                return Err(Refusal::secret(&refused, &host));
            }
        };
        let misplaced = Arc::new(Mutex::new(None));
        let body = self.watch_body(body, substituter.watched_in_bodies(), &misplaced);
        let (body, used_in_body) = self.substitute_body(&mut head, body, &sent).await?;
        let mut secrets = sent.secrets;
        secrets.extend(used_in_body);
        let request = Request::from_parts(head, body);
        let more = Facts { rule, authority: Some(host.clone()), secrets, ..Facts::default() };
        self.forward(&client, request, upgrade, sent.masks, receiver, more, &misplaced).await
    }

    /// The client of a rule's proxy.
    fn client_of(&self, proxy: &CompiledForward) -> Arc<Client> {
        let mut known = self.forwards.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, client)) = known.iter().find(|(one, _)| one == proxy) {
            return Arc::clone(client);
        }
        if known.len() >= MOST_FORWARDS {
            known.clear();
        }
        let client = Arc::new(Client::new(Arc::clone(&self.sandbox), Way::Forward(proxy.clone()), Scheme::Https));
        known.push((proxy.clone(), Arc::clone(&client)));
        client
    }

    /// Makes a request one for a rule's proxy. What it says about where it comes from is ours alone.
    fn mark_forwarded(&self, head: &mut request::Parts, proxy: &CompiledForward, host: &str) -> Result<(), Refusal> {
        let ours: Vec<_> =
            head.headers.keys().filter(|name| name.as_str().starts_with("x-stockade-")).cloned().collect();
        for name in ours {
            head.headers.remove(name);
        }
        let scheme = if self.scheme == Scheme::Http { "http" } else { "https" };
        for (name, value) in [
            ("x-stockade-forwarded-scheme", scheme),
            ("x-stockade-forwarded-host", host),
            ("x-stockade-forwarded-port", &self.target.port.to_string()),
            ("x-stockade-sandbox", self.sandbox.id.as_str()),
        ] {
            let value = HeaderValue::from_str(value).map_err(|_| Refusal::bad_request("a host that is no text"))?;
            head.headers.insert(name, value);
        }
        let target = head.uri.path_and_query().map_or("/", |target| target.as_str());
        let target = if target == "*" { "/" } else { target };
        let target = format!("{}{target}", proxy.path);
        head.uri = target.parse().map_err(|_| Refusal::bad_request("a target that is none below the proxy's path"))?;
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "the pieces of one request, taken apart by its only caller")]
    async fn forward(
        &self,
        client: &Arc<Client>,
        mut request: Request<BoxBody>,
        upgrade: Option<Upgrade>,
        masks: Vec<(String, stockade_model::Secret)>,
        host: &str,
        mut more: Facts,
        misplaced: &Mutex<Option<String>>,
    ) -> Result<Outcome, Refusal> {
        if !masks.is_empty() {
            // What is compressed cannot be looked at.
            request.headers_mut().insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        }
        if let Some(upgrade) = &upgrade {
            request.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
            request.headers_mut().insert(header::UPGRADE, upgrade.protocol.clone());
        }
        let sent = client.send(request, upgrade.is_some()).await;
        let secret = misplaced.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(secret) = secret {
            return Err(Refusal::misplaced(&secret, "the body", host));
        }
        let (mut response, upstream) = sent.map_err(|error| match error {
            ClientError::Dial(error) => {
                let verdict = if error.is_denied() { Verdict::Deny } else { Verdict::Error };
                let facts = Facts { detail: Some(error.message()), ..facts_of(&self.flow) };
                self.sandbox.audit(AuditKind::Dial, verdict, error.code(), facts);
                Refusal::dial(&error, host)
            }
            ClientError::Failed(problem) => Refusal::upstream(host, &problem),
        })?;
        more.upstream = Some(upstream);
        let switched = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        let protocol = response.headers().get(header::UPGRADE).cloned();
        strip_hop_headers(response.headers_mut());
        // HTTP/3 is UDP, which is closed.
        response.headers_mut().remove(header::ALT_SVC);
        if switched {
            let (Some(upgrade), Some(protocol)) = (upgrade, protocol) else {
                return Err(Refusal::upstream(host, "it switched to another protocol unasked"));
            };
            self.flow.set_facts(|facts| facts.upgrade = upgrade.asked.map(Arc::new));
            // As for every flow whose bytes are no longer looked at: from here on a change of policy finds it.
            if !self.sandbox.allows_flow(&self.flow) {
                return Err(Refusal::policy("policy_changed", host, "its policy changed meanwhile"));
            }
            tokio::spawn(relay(upgrade.guest, hyper::upgrade::on(&mut response)));
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
            response.headers_mut().insert(header::UPGRADE, protocol);
        }
        let response = mask_answer(response.map(|body| body.map_err(Into::into).boxed_unsync()), masks);
        Ok(Outcome { response, verdict: Verdict::Allow, reason: "forwarded", more })
    }

    /// The host of a request, which has to be the connection's: what it says twice has to agree.
    fn host_of(&self, request: &Request<Incoming>) -> Result<String, Refusal> {
        let mut hosts = request.headers().get_all(header::HOST).iter();
        let (first, more) = (hosts.next(), hosts.next());
        if more.is_some() {
            return Err(Refusal::bad_request("more than one Host header"));
        }
        let header = match first {
            Some(value) => Some(value.to_str().map_err(|_| Refusal::bad_request("a Host header that is no text"))?),
            None if request.version() == Version::HTTP_2 || request.version() == Version::HTTP_10 => None,
            None => return Err(Refusal::bad_request("no Host header")),
        };
        let in_target = request.uri().authority().map(Authority::as_str);
        let mut said = header.into_iter().chain(in_target).peekable();
        if said.peek().is_none() && self.target.name.is_none() {
            return Ok(self.target.host());
        }
        if said.peek().is_none() {
            return Err(Refusal::bad_request("no Host header"));
        }
        let mut host = None;
        for text in said {
            let here = self.authority_here(text).ok_or_else(|| Refusal::misdirected(&self.target.host(), text))?;
            if host.as_ref().is_some_and(|before| *before != here) {
                return Err(Refusal::misdirected(&self.target.host(), text));
            }
            host = Some(here);
        }
        host.ok_or_else(|| Refusal::bad_request("no Host header"))
    }

    /// The host in `text` if this connection leads to it.
    fn authority_here(&self, text: &str) -> Option<String> {
        let authority: Authority = text.parse().ok()?;
        let default = if self.scheme == Scheme::Http { 80 } else { 443 };
        let port = match authority.port() {
            Some(port) => port.as_str().parse().ok()?,
            None if authority.as_str().ends_with(':') => return None,
            None => default,
        };
        // `user@host` is for people.
        if port != self.target.port || authority.as_str().contains('@') {
            return None;
        }
        match (&self.target.name, normalize_name(authority.host())) {
            (Some(name), Some(said)) => (**name == *said).then_some(said),
            (Some(_), None) => None,
            // To an address the guest used by itself, a name can only be said, never proven.
            (None, Some(said)) => Some(said),
            (None, None) => (authority.host() == self.target.host()).then(|| self.target.host()),
        }
    }

    fn still_allowed(&self, policy: &CompiledPolicy, host: &str) -> Result<(), Refusal> {
        let decision = self.sandbox.judge(policy, &self.target, None);
        if !decision.allowed {
            return Err(Refusal::policy(decision.reason.code(), host, &decision.reason.to_string()));
        }
        if self.target.name.is_none() && normalize_name(host).is_some() && decision.rule.is_none() {
            let own = self.sandbox.shared.out.host_addresses.get();
            let destination = Destination::Resolved(host, self.target.address.into());
            let by_name = policy.connect(destination, self.target.port, &own);
            if !by_name.allowed {
                return Err(Refusal::policy(by_name.reason.code(), host, &by_name.reason.to_string()));
            }
        }
        Ok(())
    }

    /// One record more than the request's: which secret it is about.
    fn report_secret(&self, refused: &Refused, host: &str) {
        let (kind, verdict, reason, secret, detail) = match refused {
            Refused::Misplaced { secret, place } => {
                (AuditKind::Token, Verdict::Deny, "token_misplaced", secret.clone(), format!("found in {place}"))
            }
            Refused::Secret(error) => {
                let verdict = if error.is_refusal() { Verdict::Deny } else { Verdict::Error };
                (AuditKind::Secret, verdict, error.code(), error.name().to_owned(), error.to_string())
            }
        };
        let (authority, secrets, detail) = (Some(host.to_owned()), vec![secret], Some(detail));
        self.sandbox.audit(kind, verdict, reason, Facts { authority, secrets, detail, ..facts_of(&self.flow) });
    }

    fn watch_body(
        &self,
        body: Incoming,
        tokens: Vec<(String, String)>,
        misplaced: &Arc<Mutex<Option<String>>>,
    ) -> BoxBody {
        let body = body.map_err(Into::into).boxed_unsync();
        if tokens.is_empty() {
            return body;
        }
        let (sandbox, flow, told) = (Arc::clone(&self.sandbox), Arc::clone(&self.flow), Arc::clone(misplaced));
        let report = move |secret: &str| {
            *told.lock().unwrap_or_else(PoisonError::into_inner) = Some(secret.to_owned());
            let facts = Facts {
                secrets: vec![secret.to_owned()],
                detail: Some("found in the body".to_owned()),
                ..facts_of(&flow)
            };
            sandbox.audit(AuditKind::Token, Verdict::Deny, "token_misplaced", facts);
        };
        TokenWatch::new(body, tokens, Box::new(report)).boxed_unsync()
    }

    /// Replaces tokens in a body, which is read whole for it, and says which secrets were used.
    async fn substitute_body(
        &self,
        head: &mut request::Parts,
        body: BoxBody,
        sent: &Sent,
    ) -> Result<(BoxBody, Vec<String>), Refusal> {
        let plain = head.headers.get(header::CONTENT_ENCODING).is_none_or(|coding| coding == "identity");
        if sent.body.is_empty() || !plain || http_body::Body::is_end_stream(&body) {
            return Ok((body, Vec::new()));
        }
        let limit = self.limits().substituted_body_bytes;
        let whole = read_at_most(body, limit).await.map_err(|_| Refusal::bad_request("the body broke off"))?;
        let whole = whole.ok_or_else(|| Refusal::too_large(limit))?;
        let mut changed = whole.to_vec();
        let mut used = Vec::new();
        for (token, name, value) in &sent.body {
            let (next, count) = replace_all(&changed, token.as_bytes(), value.expose().as_bytes());
            if count > 0 {
                used.push(name.clone());
                changed = next;
            }
        }
        head.headers.insert(header::CONTENT_LENGTH, HeaderValue::from(changed.len()));
        Ok((full(changed), used))
    }
}

fn full(bytes: impl Into<Bytes>) -> BoxBody {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

fn replace_all(bytes: &[u8], from: &[u8], to: &[u8]) -> (Vec<u8>, usize) {
    let (mut out, mut count, mut at) = (Vec::with_capacity(bytes.len()), 0, 0);
    while at < bytes.len() {
        if bytes[at..].starts_with(from) {
            out.extend_from_slice(to);
            at += from.len();
            count += 1;
        } else {
            out.push(bytes[at]);
            at += 1;
        }
    }
    (out, count)
}

struct Upgrade {
    protocol: HeaderValue,
    guest: OnUpgrade,
    asked: Option<Upgraded>,
}

/// A WebSocket handshake; other upgrades are dropped, which the protocol allows.
fn take_upgrade(head: &mut request::Parts) -> Option<Upgrade> {
    let guest = head.extensions.remove::<OnUpgrade>()?;
    let protocol = head.headers.get(header::UPGRADE)?;
    let asked = head.headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    let mut asked = asked.flat_map(|value| value.split(',')).map(str::trim);
    let is_websocket = protocol.as_bytes().eq_ignore_ascii_case(b"websocket");
    (is_websocket && asked.any(|token| token.eq_ignore_ascii_case("upgrade"))).then(|| Upgrade {
        protocol: protocol.clone(),
        guest,
        asked: None,
    })
}

/// Removes what belongs to one hop.
fn strip_hop_headers(headers: &mut HeaderMap) {
    let named: Vec<header::HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    let keeps_trailers = headers.get(header::TE).is_some_and(|te| te.as_bytes().eq_ignore_ascii_case(b"trailers"));
    for name in named {
        // Not those that say what the message is, whatever the guest claims.
        if name != header::HOST && name != header::CONTENT_LENGTH && name != header::AUTHORIZATION {
            headers.remove(name);
        }
    }
    for name in [
        header::CONNECTION,
        header::PROXY_AUTHENTICATE,
        header::PROXY_AUTHORIZATION,
        header::TE,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
    ] {
        headers.remove(name);
    }
    headers.remove("keep-alive");
    headers.remove("proxy-connection");
    headers.remove("http2-settings");
    if keeps_trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
}

fn mask_answer(mut response: Response<BoxBody>, masks: Vec<(String, stockade_model::Secret)>) -> Response<BoxBody> {
    if masks.is_empty() {
        return response;
    }
    for value in response.headers_mut().values_mut() {
        for (token, secret) in &masks {
            let (changed, count) = replace_all(value.as_bytes(), secret.expose().as_bytes(), token.as_bytes());
            if count > 0
                && let Ok(changed) = HeaderValue::from_bytes(&changed)
            {
                *value = changed;
            }
        }
    }
    let plain = response.headers().get(header::CONTENT_ENCODING).is_none_or(|coding| coding == "identity");
    if plain && !http_body::Body::is_end_stream(response.body()) {
        response.headers_mut().remove(header::CONTENT_LENGTH);
        response = response.map(|body| EchoMask::new(body, masks).boxed_unsync());
    }
    response
}

/// Moves bytes between two upgraded connections until both are done.
async fn relay(guest: OnUpgrade, host: OnUpgrade) {
    let (Ok(guest), Ok(host)) = tokio::join!(guest, host) else { return };
    let (mut guest, mut host) = (TokioIo::new(guest), TokioIo::new(host));
    // Either end may break at any time; the flow's end is recorded.
    let _ = tokio::io::copy_bidirectional(&mut guest, &mut host).await;
}
