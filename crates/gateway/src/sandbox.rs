//! One attached sandbox: its policy in force, its names, and the answers to what its link asks.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, OnceLock, PoisonError, Weak, atomic::Ordering},
    time::{Duration, Instant},
};

use arc_swap::ArcSwap;
use stockade_model::SandboxId;
use tokio::sync::Semaphore;

use crate::{
    audit::{AuditKind, Auditor, Facts, Verdict},
    broker::{SecretProvider, SecretRequest},
    dns::{self, Answer, Ask, NameTable},
    gateway::Shared,
    limits::{Bucket, Limits},
    net::{Flow, FlowFacts, FlowKey, FlowStream, GATEWAY_ADDRESS, Guard, Link, Mode, Syn, frame::Datagram},
    policy::{CompiledPolicy, Decision, Destination, HttpQuestion, L7, OnDeny},
    proxy,
    udp::UdpFlows,
    upstream::ResolveError,
};

const CACHED_NAMES: usize = 2_048;
const CACHE_AT_MOST: Duration = Duration::from_secs(60);
const ABSENT_FOR: Duration = Duration::from_secs(5);

type CachedAddresses = (Instant, Result<Vec<IpAddr>, ResolveError>);

pub(crate) struct Sandbox {
    pub(crate) id: SandboxId,
    pub(crate) owner: Arc<BTreeMap<String, String>>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) limits: Limits,
    pub(crate) names: NameTable,
    pub(crate) auditor: Auditor,
    pub(crate) udp: UdpFlows,
    policy: ArcSwap<CompiledPolicy>,
    link: OnceLock<Weak<Link>>,
    syns: Bucket,
    questions: Bucket,
    lookups: Arc<Semaphore>,
    cache: Mutex<HashMap<String, CachedAddresses>>,
    itself: Weak<Sandbox>,
}

/// Where a flow goes, as the guest sees it.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) name: Option<Arc<str>>,
    pub(crate) address: Ipv4Addr,
    pub(crate) port: u16,
}

impl Target {
    pub(crate) fn host(&self) -> String {
        self.name.as_ref().map_or_else(|| self.address.to_string(), ToString::to_string)
    }
}

impl Sandbox {
    pub(crate) fn new(
        id: SandboxId,
        owner: BTreeMap<String, String>,
        shared: Arc<Shared>,
        limits: Limits,
        names: NameTable,
        policy: CompiledPolicy,
    ) -> Arc<Self> {
        let owner = Arc::new(owner);
        Arc::new_cyclic(|itself| Self {
            auditor: Auditor::new(Arc::clone(&shared.audit), id.clone(), Arc::clone(&owner)),
            id,
            owner,
            shared,
            names,
            udp: UdpFlows::default(),
            policy: ArcSwap::from_pointee(policy),
            link: OnceLock::new(),
            syns: Bucket::new(limits.new_flows_per_second),
            questions: Bucket::new(limits.dns_queries_per_second),
            lookups: Arc::new(Semaphore::new(limits.dns_lookups)),
            limits,
            cache: Mutex::default(),
            itself: Weak::clone(itself),
        })
    }

    pub(crate) fn set_link(&self, link: &Arc<Link>) {
        // Set once, by the attachment that made both.
        let _ = self.link.set(Arc::downgrade(link));
    }

    pub(crate) fn policy(&self) -> Arc<CompiledPolicy> {
        self.policy.load_full()
    }

    pub(crate) fn secrets(&self) -> &dyn SecretProvider {
        self.shared.secrets.as_ref()
    }

    pub(crate) fn secret_request(&self, host: &str) -> SecretRequest {
        SecretRequest {
            sandbox: self.id.clone(),
            owner: Arc::clone(&self.owner),
            secret: String::new(),
            host: host.to_owned(),
        }
    }

    pub(crate) fn audit(&self, kind: AuditKind, verdict: Verdict, reason: &'static str, facts: Facts) {
        self.auditor.record(self.policy.load().revision(), kind, verdict, reason, facts);
    }

    /// Puts a policy in force and ends what it does not allow. Who asks from now on gets the new answers; flows that
    /// were being judged ask again before they carry anything (see [`Sandbox::dial`] and [`Sandbox::allows_flow`]).
    pub(crate) fn set_policy(&self, policy: CompiledPolicy) -> usize {
        let policy = Arc::new(policy);
        let before = self.policy.swap(Arc::clone(&policy));
        // What is under way goes another way than it should.
        let rerouted = before.egress_proxy() != policy.egress_proxy();
        self.audit(AuditKind::Policy, Verdict::Allow, "in_force", Facts::default());
        let Some(link) = self.link.get().and_then(Weak::upgrade) else { return 0 };
        let mut ended = 0;
        for flow in link.flows() {
            let is_outbound = flow.key.port != 53 && !matches!(flow.facts().mode, Mode::Inbound | Mode::Explain);
            if rerouted && is_outbound || !self.allows_flow(&flow) {
                ended += 1;
                self.audit(AuditKind::Connect, Verdict::Deny, "policy_changed", facts_of(&flow));
                flow.abort();
            }
        }
        for target in self.udp.keep(|target, upstream| !rerouted && self.allows_udp(target, upstream)) {
            ended += 1;
            self.audit(AuditKind::Udp, Verdict::Deny, "policy_changed", target_facts(&target));
        }
        ended
    }

    /// Whether the policy in force still allows an open flow to go on as it is.
    pub(crate) fn allows_flow(&self, flow: &Flow) -> bool {
        let facts = flow.facts();
        if matches!(facts.mode, Mode::Inbound | Mode::Explain) || flow.key.port == 53 {
            return true;
        }
        let policy = self.policy();
        let target = Target { name: facts.name.clone(), address: flow.key.address, port: flow.key.port };
        let decision = self.judge(&policy, &target, facts.upstream);
        let reads = facts.name.as_deref().is_some_and(|name| policy.reads(name, flow.key.port, &decision));
        let request_allowed = facts.upgrade.as_deref().is_none_or(|upgrade| {
            let question = HttpQuestion {
                scheme: upgrade.scheme,
                host: &upgrade.host,
                port: flow.key.port,
                method: &upgrade.method,
                path: upgrade.uri.path(),
                query: upgrade.uri.query(),
                headers: &upgrade.headers,
            };
            policy.http(&question).is_forwarded()
        });
        decision.allowed
            && request_allowed
            && match facts.mode {
                Mode::Raw => decision.l7 == L7::Raw && !reads,
                Mode::Opaque => decision.l7 == L7::Raw,
                Mode::Pass => matches!(decision.l7, L7::Tls | L7::Web | L7::Raw) && !reads,
                Mode::Sniff | Mode::Requests | Mode::Explain | Mode::Inbound => true,
            }
    }

    pub(crate) fn judge(&self, policy: &CompiledPolicy, target: &Target, upstream: Option<IpAddr>) -> Decision {
        policy.connect(self.destination(target, upstream), target.port, &self.shared.out.host_addresses.get())
    }

    pub(crate) fn judge_udp(&self, policy: &CompiledPolicy, target: &Target, upstream: Option<IpAddr>) -> Decision {
        policy.datagrams(self.destination(target, upstream), target.port, &self.shared.out.host_addresses.get())
    }

    fn destination<'t>(&self, target: &'t Target, upstream: Option<IpAddr>) -> Destination<'t> {
        match (&target.name, upstream) {
            // Where the operator leads a name is not judged.
            (Some(name), Some(_)) if self.route(target).is_some() => Destination::Name(name),
            (Some(name), Some(address)) => Destination::Resolved(name, address),
            (Some(name), None) => Destination::Name(name),
            (None, _) => Destination::Address(target.address.into()),
        }
    }

    pub(crate) async fn resolve(&self, name: &str) -> Result<Vec<IpAddr>, ResolveError> {
        {
            let cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((_, known)) = cache.get(name).filter(|(until, _)| *until > Instant::now()) {
                return known.clone();
            }
        }
        let answer = match self.shared.out.resolver.resolve(name).await {
            Ok((addresses, hold)) => (Instant::now() + hold.min(CACHE_AT_MOST), Ok(addresses)),
            Err(ResolveError::NotFound) => (Instant::now() + ABSENT_FOR, Err(ResolveError::NotFound)),
            Err(error) => return Err(error),
        };
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if cache.len() >= CACHED_NAMES {
            cache.clear();
        }
        cache.insert(name.to_owned(), answer.clone());
        answer.1
    }

    /// The answer to a packet for the name server.
    pub(crate) async fn answer(&self, packet: &[u8]) -> Option<Vec<u8>> {
        let question = match dns::read(packet) {
            Ok(question) => question,
            Err(refusal) => return refusal,
        };
        let answer = match &question.ask {
            Ask::Nothing => Answer::Nxdomain,
            Ask::NameOf(address) => {
                self.names.name(*address).map_or(Answer::Nxdomain, |name| Answer::Name(name.to_string()))
            }
            Ask::Address(name) | Ask::Ipv6Address(name) | Ask::Other(name) => {
                self.answer_for(name, &question.ask).await
            }
        };
        dns::answer(&question, &answer)
    }

    async fn answer_for(&self, name: &str, ask: &Ask) -> Answer {
        let policy = self.policy();
        if !policy.may_reach(name) {
            let facts = Facts { name: Some(name.to_owned()), ..Facts::default() };
            self.audit(AuditKind::Dns, Verdict::Deny, "default", facts);
            return match (policy.dns().on_deny, ask) {
                (OnDeny::Explain, Ask::Address(_)) => self.address_of(name),
                (OnDeny::Explain, Ask::Ipv6Address(_)) => Answer::Empty,
                _ => Answer::Nxdomain,
            };
        }
        match ask {
            Ask::Address(_) | Ask::Ipv6Address(_)
                if policy.dns().resolve_on_connect || self.shared.out.routes.knows(name) => {}
            Ask::Address(_) | Ask::Ipv6Address(_) => match self.resolve(name).await {
                Ok(_) => {}
                Err(ResolveError::NotFound) => return Answer::Nxdomain,
                Err(ResolveError::Failed(_)) => return Answer::Servfail,
            },
            _ => return Answer::Empty,
        }
        if matches!(ask, Ask::Address(_)) { self.address_of(name) } else { Answer::Empty }
    }

    fn address_of(&self, name: &str) -> Answer {
        self.names.address(name).map_or(Answer::Servfail, Answer::Address)
    }

    /// Whether one more flow may be opened now.
    pub(crate) fn may_open(&self) -> bool {
        self.syns.take()
    }

    pub(crate) fn this(&self) -> Option<Arc<Self>> {
        self.itself.upgrade()
    }

    pub(crate) fn may_ask(&self) -> bool {
        self.questions.take()
    }

    fn refuse_syn(&self, target: &Target, reason: &'static str, rule: Option<String>) -> Syn {
        let facts = Facts { rule, ..target_facts(target) };
        self.audit(AuditKind::Connect, Verdict::Deny, reason, facts);
        Syn::Refuse
    }
}

pub(crate) fn target_facts(target: &Target) -> Facts {
    Facts {
        address: Some(target.address.into()),
        port: Some(target.port),
        name: target.name.as_ref().map(ToString::to_string),
        ..Facts::default()
    }
}

pub(crate) fn facts_of(flow: &Flow) -> Facts {
    let facts = flow.facts();
    Facts {
        flow: Some(flow.id),
        address: Some(flow.key.address.into()),
        port: Some(flow.key.port),
        name: facts.name.as_ref().map(ToString::to_string),
        mode: Some(facts.mode.word()),
        ..Facts::default()
    }
}

impl Guard for Sandbox {
    fn syn(&self, key: FlowKey) -> Syn {
        if !self.syns.take() {
            return Syn::Ignore;
        }
        if key.port == 53 {
            return Syn::Accept { hold: false, facts: FlowFacts::new(None, Mode::Sniff) };
        }
        let mut target = Target { name: None, address: key.address, port: key.port };
        if NameTable::is_ours(key.address) {
            target.name = self.names.name(key.address);
            if target.name.is_none() {
                return self.refuse_syn(&target, "unknown_address", None);
            }
        }
        let policy = self.policy.load();
        let decision = self.judge(&policy, &target, None);
        let web = key.port == 80 || key.port == 443;
        if !decision.allowed {
            if web && target.name.is_some() && policy.dns().on_deny == OnDeny::Explain {
                return Syn::Accept { hold: false, facts: FlowFacts::new(target.name, Mode::Explain) };
            }
            return self.refuse_syn(&target, decision.reason.code(), decision.rule);
        }
        // Where nothing has to be read first, the guest's connect succeeds only if ours does.
        let reads = target.name.as_deref().is_some_and(|name| policy.reads(name, key.port, &decision));
        let hold = decision.l7 == L7::Raw && !reads;
        Syn::Accept { hold, facts: FlowFacts::new(target.name, Mode::Sniff) }
    }

    fn full(&self, key: FlowKey) {
        let target = Target { name: None, address: key.address, port: key.port };
        self.refuse_syn(&target, "too_many_flows", None);
    }

    fn serve(&self, stream: FlowStream) {
        let Some(sandbox) = self.itself.upgrade() else { return };
        tokio::spawn(proxy::serve(sandbox, stream));
    }

    fn ended(&self, flow: &Flow) {
        let (bytes_out, bytes_in) = (flow.bytes_out.load(Ordering::Relaxed), flow.bytes_in.load(Ordering::Relaxed));
        let facts = flow.facts();
        if matches!(facts.mode, Mode::Explain | Mode::Sniff) {
            return;
        }
        let facts = Facts {
            bytes_out: Some(bytes_out),
            bytes_in: Some(bytes_in),
            duration_ms: Some(flow.opened.elapsed().as_millis() as u64),
            upstream: facts.upstream.map(|address| SocketAddr::new(address, flow.key.port)),
            ..facts_of(flow)
        };
        self.audit(AuditKind::Closed, Verdict::Allow, "closed", facts);
    }

    fn dns(&self, link: &Arc<Link>, question: &Datagram<'_>) {
        if !self.may_ask() {
            let facts = Facts { port: Some(53), ..Facts::default() };
            return self.audit(AuditKind::Dns, Verdict::Deny, "too_many_questions", facts);
        }
        let Ok(slot) = Arc::clone(&self.lookups).try_acquire_owned() else { return };
        let Some(sandbox) = self.itself.upgrade() else { return };
        let (link, packet) = (Arc::clone(link), question.data.to_vec());
        let (server, client) = (question.to, question.from_port);
        tokio::spawn(async move {
            if let Some(answer) = sandbox.answer(&packet).await {
                link.send_udp(server, 53, client, &answer);
            }
            drop(slot);
        });
    }

    fn udp(&self, link: &Arc<Link>, datagram: &Datagram<'_>) -> bool {
        self.take_datagram(link, datagram)
    }

    fn echo(&self, to: Ipv4Addr) -> bool {
        to == GATEWAY_ADDRESS || self.names.name(to).is_some_and(|name| self.policy.load().may_reach(&name))
    }

    fn link_ended(&self, error: Option<&io::Error>) {
        let verdict = if error.is_some() { Verdict::Error } else { Verdict::Allow };
        let facts = Facts { detail: error.map(ToString::to_string), ..Facts::default() };
        self.udp.end();
        self.audit(AuditKind::Link, verdict, "link_ended", facts);
        self.auditor.flush();
    }
}
