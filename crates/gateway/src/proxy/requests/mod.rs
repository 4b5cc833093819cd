//! Requests of one connection, judged one by one. What the guest sent is parsed, judged, and written anew by another
//! HTTP stack; no byte of it is passed on as it came, so that there is nothing to smuggle.
//!
//! ```text
//! request ─> CONNECT? ─> one authority, the connection's? ─> policy still allows? ─> HTTP rules ─> tokens ─> upstream
//!             405          400 / 421                            403                    403 / answer   403
//! ```

mod body;
mod forwards;
mod hop;
mod host;
mod send;

use std::sync::{Arc, Mutex};

use http::{Method, Request, Response};

use self::{
    body::full,
    forwards::Forwards,
    hop::{strip_hop_headers, take_upgrade},
    send::Leaving,
};
use super::{
    BoxBody,
    client::{Client, Way},
    refuse::Refusal,
};
use crate::{
    audit::{AuditKind, Facts, Verdict},
    broker::{Refused, Substituter},
    limits::Limits,
    net::{Flow, Upgraded},
    policy::{CompiledAction, CompiledPolicy, Destination, HttpQuestion, Scheme, normalize_name},
    sandbox::{Sandbox, Target, facts_of},
};

/// One connection of the guest.
pub(super) struct Session {
    sandbox: Arc<Sandbox>,
    target: Target,
    scheme: Scheme,
    flow: Arc<Flow>,
    client: Arc<Client>,
    forwards: Forwards,
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
        Arc::new(Self { sandbox, target, scheme, flow, client, forwards: Forwards::default() })
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.sandbox.limits
    }

    /// Answers one request and records it.
    pub(super) async fn answer(&self, request: Request<BoxBody>) -> Response<BoxBody> {
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

    async fn judge(&self, request: Request<BoxBody>) -> Result<Outcome, Refusal> {
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
                let refusal = Refusal::rule(&host, rule.as_deref().unwrap_or("unnamed"), decision.is_operators);
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
        let leaving = Leaving { client, request, upgrade, masks: sent.masks, host: receiver, more, misplaced };
        self.send(leaving).await
    }

    fn still_allowed(&self, policy: &CompiledPolicy, host: &str) -> Result<(), Refusal> {
        let decision = self.sandbox.judge(policy, &self.target, None);
        if !decision.allowed {
            return Err(Refusal::denied(&decision, host));
        }
        if self.target.name.is_none() && normalize_name(host).is_some() && decision.rule.is_none() {
            let own = self.sandbox.shared.out.host_addresses.get();
            let destination = Destination::Resolved(host, self.target.address.into());
            let by_name = policy.connect(destination, self.target.port, &own);
            if !by_name.allowed {
                return Err(Refusal::denied(&by_name, host));
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
}
