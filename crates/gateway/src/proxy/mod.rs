//! What happens to a flow once its handshake is done.
//!
//! ```text
//! flow ─> first bytes ─┬─ TLS hello ── name = resolved name? ─┬─ intercepted: TLS ends here, requests one by one
//!                      │                                      └─ else: passed through untouched
//!                      ├─ HTTP head ──> requests one by one
//!                      └─ other ──> reset, unless the rule says raw
//! not allowed: 403 with the reason over HTTP, or over TLS with the deployment's CA; elsewhere reset
//! ```
//!
//! The first bytes are looked at in the flow's ring and stay there, so that whoever takes over reads them again.

mod authority;
mod bulk;
mod client;
pub mod hello;
mod lingering;
mod refuse;
mod requests;
mod server;
pub mod sniff;

use std::{io, sync::Arc};

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, BufReader},
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

pub use self::authority::{AuthorityError, CertificateAuthority};
use self::{
    bulk::Joined,
    hello::Hello,
    refuse::Refusal,
    requests::Session,
    sniff::{Sniffed, sniff},
};
use crate::{
    audit::{AuditKind, Facts, Verdict},
    dial::DialError,
    net::{FlowStream, Mode, splice},
    policy::{CompiledPolicy, Decision, Destination, L7, Scheme},
    sandbox::{Sandbox, Target, facts_of},
};

/// Why a body ends early.
pub(crate) type BodyError = Box<dyn std::error::Error + Send + Sync>;
/// A body of any origin.
pub(crate) type BoxBody = UnsyncBoxBody<Bytes, BodyError>;

/// Who waits long enough must not get past being looked at.
const SILENCE: &str = "nothing was said in time";
const LONGEST_QUESTION: usize = 4_096;

/// Serves a flow to its end.
pub(crate) async fn serve(sandbox: Arc<Sandbox>, stream: FlowStream) {
    let key = stream.flow().key;
    if key.port == 53 {
        // A broken connection is the guest's affair.
        let _ = serve_dns(&sandbox, stream).await;
        return;
    }
    let facts = stream.flow().facts();
    let target = Target { name: facts.name, address: key.address, port: key.port };
    let handler = Handler { sandbox, target };
    // An error here is a connection that broke; the flow's end is recorded with its bytes.
    let _ = handler.run(stream).await;
}

async fn serve_dns(sandbox: &Sandbox, mut stream: FlowStream) -> io::Result<()> {
    loop {
        let length = timeout(sandbox.limits.head_timeout(), stream.read_u16()).await??;
        let length = usize::from(length);
        if length > LONGEST_QUESTION || !sandbox.may_ask() {
            return Ok(());
        }
        let mut question = vec![0; length];
        timeout(sandbox.limits.head_timeout(), stream.read_exact(&mut question)).await??;
        let Some(answer) = sandbox.answer(&question).await else { return Ok(()) };
        stream.write_u16(answer.len() as u16).await?;
        stream.write_all(&answer).await?;
    }
}

struct Handler {
    sandbox: Arc<Sandbox>,
    target: Target,
}

impl Handler {
    async fn run(&self, stream: FlowStream) -> io::Result<()> {
        let policy = self.sandbox.policy();
        let decision = self.sandbox.judge(&policy, &self.target, None);
        if !decision.allowed {
            return self.refuse_by_policy(stream, &decision).await;
        }
        let reads = |name: &str| policy.reads(name, self.target.port, &decision);
        let intercepts = self.target.name.as_deref().is_some_and(reads);
        if decision.l7 == L7::Raw && !intercepts {
            return self.pass(stream, Mode::Raw, &decision, None).await;
        }
        let sniffed = match timeout(self.sandbox.limits.head_timeout(), stream.peek(sniff)).await {
            Ok(sniffed) => sniffed?,
            Err(_) => Sniffed::Other(SILENCE),
        };
        match sniffed {
            Sniffed::Tls(hello) if matches!(decision.l7, L7::Tls | L7::Web | L7::Raw) => {
                self.tls(stream, &policy, &decision, hello, intercepts).await
            }
            Sniffed::Http if matches!(decision.l7, L7::Http | L7::Web | L7::Raw) => {
                stream.flow().set_facts(|facts| facts.mode = Mode::Requests);
                self.requests(stream, Scheme::Http).await
            }
            Sniffed::Other(problem) if decision.l7 == L7::Raw && problem != SILENCE => {
                self.pass(stream, Mode::Opaque, &decision, None).await
            }
            Sniffed::Other(problem) => {
                self.record(&stream, AuditKind::Connect, Verdict::Deny, "not_web", |facts| {
                    facts.detail = Some(problem.to_owned());
                    facts.rule.clone_from(&decision.rule);
                });
                Ok(())
            }
            Sniffed::Tls(_) | Sniffed::Http => {
                let only =
                    if decision.l7 == L7::Http { "only HTTP is allowed there" } else { "only TLS is allowed there" };
                let refusal = Refusal::policy("wrong_protocol", &self.target.host(), only);
                self.explain(stream, refusal, decision.rule).await
            }
        }
    }

    fn record(
        &self,
        stream: &FlowStream,
        kind: AuditKind,
        verdict: Verdict,
        reason: &'static str,
        more: impl FnOnce(&mut Facts),
    ) {
        let mut facts = facts_of(stream.flow());
        more(&mut facts);
        self.sandbox.audit(kind, verdict, reason, facts);
    }

    async fn refuse_by_policy(&self, stream: FlowStream, decision: &Decision) -> io::Result<()> {
        let refusal = Refusal::denied(decision, &self.target.host());
        self.explain(stream, refusal, decision.rule.clone()).await
    }

    /// Tells the guest why, in the protocol it speaks; resets it when it speaks none we know.
    async fn explain(&self, stream: FlowStream, refusal: Refusal, rule: Option<String>) -> io::Result<()> {
        stream.flow().set_facts(|facts| facts.mode = Mode::Explain);
        self.record(&stream, AuditKind::Connect, Verdict::Deny, refusal.code, |facts| facts.rule = rule);
        if self.target.name.is_none() {
            return Ok(());
        }
        let limits = &self.sandbox.limits;
        let sniffed = timeout(limits.head_timeout(), stream.peek(sniff)).await??;
        match sniffed {
            Sniffed::Http => server::answer_all(stream, limits, refusal).await,
            Sniffed::Tls(hello) => {
                let name = hello.server_name.unwrap_or_else(|| self.target.host());
                let tls = self.accept(stream, &name).await?;
                server::answer_all_tls(tls, limits, refusal).await
            }
            Sniffed::Other(_) => Ok(()),
        }
    }

    async fn accept(&self, stream: FlowStream, name: &str) -> io::Result<TlsStream<BufReader<FlowStream>>> {
        let config = self.sandbox.shared.authority.server_config(name).map_err(io::Error::other)?;
        timeout(self.sandbox.limits.head_timeout(), TlsAcceptor::from(config).accept(bulk::below(stream))).await?
    }

    async fn tls(
        &self,
        stream: FlowStream,
        policy: &CompiledPolicy,
        decision: &Decision,
        hello: Hello,
        intercepts: bool,
    ) -> io::Result<()> {
        if let Some(reason) = self.judge_hello(policy, &hello) {
            self.record(&stream, AuditKind::Tls, Verdict::Deny, reason, |facts| {
                facts.server_name.clone_from(&hello.server_name);
                facts.encrypted_hello = hello.encrypted;
                facts.rule.clone_from(&decision.rule);
            });
            return alert_unrecognized_name(stream).await;
        }
        let Some(name) = self.target.name.as_deref().filter(|_| intercepts) else {
            return self.pass(stream, Mode::Pass, decision, Some(hello)).await;
        };
        stream.flow().set_facts(|facts| facts.mode = Mode::Requests);
        let flow = Arc::clone(stream.flow());
        match self.accept(stream, name).await {
            Ok(tls) => {
                let http2 = tls.get_ref().1.alpn_protocol() == Some(b"h2");
                let session = Session::new(Arc::clone(&self.sandbox), self.target.clone(), Scheme::Https, flow);
                server::serve_requests(Joined::new(tls), http2, session).await
            }
            Err(error) => {
                let hint = format!("the guest broke off the handshake ({error}); does it trust the deployment's CA?");
                let facts = Facts { detail: Some(hint), ..facts_of(&flow) };
                self.sandbox.audit(AuditKind::Tls, Verdict::Error, "handshake_failed", facts);
                Err(error)
            }
        }
    }

    /// Why a hello is refused.
    fn judge_hello(&self, policy: &CompiledPolicy, hello: &Hello) -> Option<&'static str> {
        if hello.encrypted && policy.denies_encrypted_client_hello() {
            return Some("encrypted_hello");
        }
        match (&self.target.name, &hello.server_name) {
            (Some(_), None) => Some("no_server_name"),
            (Some(name), Some(said)) => (**name != *said).then_some("server_name_mismatch"),
            (None, None) => None,
            // An address the guest used by itself: a name in the hello grants nothing, and may only confirm.
            (None, Some(said)) => {
                let destination = Destination::Resolved(said, self.target.address.into());
                let host = self.sandbox.shared.out.host_addresses.get();
                if !policy.connect(destination, self.target.port, &host).allowed && !self.allowed_by_address(policy) {
                    return Some("name_denied");
                }
                // What is judged request by request has to be reached by name.
                policy.intercepts(said, self.target.port).then_some("use_the_name")
            }
        }
    }

    /// Whether a rule (not a default) opens the address.
    fn allowed_by_address(&self, policy: &CompiledPolicy) -> bool {
        self.sandbox.judge(policy, &self.target, None).rule.is_some()
    }

    async fn requests(&self, stream: FlowStream, scheme: Scheme) -> io::Result<()> {
        let flow = Arc::clone(stream.flow());
        let session = Session::new(Arc::clone(&self.sandbox), self.target.clone(), scheme, flow);
        server::serve_requests(stream, false, session).await
    }

    /// Moves bytes without looking at them.
    async fn pass(&self, stream: FlowStream, mode: Mode, decision: &Decision, hello: Option<Hello>) -> io::Result<()> {
        let (mut upstream, address) = match self.sandbox.dial(&self.target).await {
            Ok(dialled) => dialled,
            Err(error) => return self.pass_failed(stream, mode, decision, &error).await,
        };
        stream.flow().set_facts(|facts| {
            facts.mode = mode;
            facts.upstream = Some(address.ip());
        });
        // The policy may have changed since it was asked: from here on a change finds this flow by its facts.
        if !self.sandbox.allows_flow(stream.flow()) {
            self.record(&stream, AuditKind::Connect, Verdict::Deny, "policy_changed", |_| ());
            return Ok(());
        }
        self.record(&stream, AuditKind::Connect, Verdict::Allow, decision.reason.code(), |facts| {
            facts.rule.clone_from(&decision.rule);
            facts.upstream = Some(address);
            if let Some(hello) = hello {
                facts.server_name = hello.server_name;
                facts.encrypted_hello = hello.encrypted;
            }
        });
        stream.flow().answer();
        splice(&stream, &mut *upstream).await
    }

    async fn pass_failed(
        &self,
        stream: FlowStream,
        mode: Mode,
        decision: &Decision,
        error: &DialError,
    ) -> io::Result<()> {
        let verdict = if error.is_denied() { Verdict::Deny } else { Verdict::Error };
        self.record(&stream, AuditKind::Dial, verdict, error.code(), |facts| {
            facts.rule.clone_from(&decision.rule);
            facts.detail = Some(error.message());
        });
        if mode == Mode::Pass {
            return self.explain(stream, Refusal::dial(error, &self.target.host()), decision.rule.clone()).await;
        }
        Ok(())
    }
}

/// The alert that says "not under this name", and the end.
async fn alert_unrecognized_name(mut stream: FlowStream) -> io::Result<()> {
    const ALERT: [u8; 7] = [21, 3, 3, 0, 2, 2, 112];
    stream.write_all(&ALERT).await?;
    stream.shutdown().await
}
