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
    policy::{CompiledForward, CompiledPolicy, Decision, Destination, HttpQuestion, L7, OnDeny},
    proxy,
    upstream::{BoxIo, ResolveError},
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

/// Why nothing was reached.
#[derive(Debug)]
pub(crate) enum DialError {
    Denied(Decision, Option<IpAddr>),
    Resolve(ResolveError),
    Connect(String),
}

impl DialError {
    pub(crate) fn code(&self) -> &'static str {
        match self {
            Self::Denied(decision, _) => decision.reason.code(),
            Self::Resolve(ResolveError::NotFound) => "name_not_found",
            Self::Resolve(ResolveError::Failed(_)) => "name_not_resolved",
            Self::Connect(_) => "connect_failed",
        }
    }

    pub(crate) fn is_denied(&self) -> bool {
        matches!(self, Self::Denied(..))
    }

    pub(crate) fn message(&self) -> String {
        match self {
            Self::Denied(decision, Some(address)) => format!("it resolves to {address}: {}", decision.reason),
            Self::Denied(decision, None) => decision.reason.to_string(),
            Self::Resolve(error) => error.to_string(),
            Self::Connect(problem) => format!("it cannot be reached: {problem}"),
        }
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
        self.policy.store(Arc::new(policy));
        self.audit(AuditKind::Policy, Verdict::Allow, "in_force", Facts::default());
        let Some(link) = self.link.get().and_then(Weak::upgrade) else { return 0 };
        let mut ended = 0;
        for flow in link.flows() {
            if !self.allows_flow(&flow) {
                ended += 1;
                self.audit(AuditKind::Connect, Verdict::Deny, "policy_changed", facts_of(&flow));
                flow.abort();
            }
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
        let destination = match (&target.name, upstream) {
            // Where the operator leads a name is not judged.
            (Some(name), Some(_)) if self.route(target).is_some() => Destination::Name(name),
            (Some(name), Some(address)) => Destination::Resolved(name, address),
            (Some(name), None) => Destination::Name(name),
            (None, _) => Destination::Address(target.address.into()),
        };
        policy.connect(destination, target.port, &self.shared.out.host_addresses.get())
    }

    /// Resolves, judges and connects as one step: only an address that was judged is dialled, and if the policy
    /// changed meanwhile it is judged again.
    pub(crate) async fn dial(&self, target: &Target) -> Result<(BoxIo, SocketAddr), DialError> {
        let route = self.route(target);
        let addresses = match &target.name {
            Some(_) if route.is_some() => route.map(|route| route.ip()).into_iter().collect(),
            Some(name) => self.resolve(name).await.map_err(DialError::Resolve)?,
            None => vec![target.address.into()],
        };
        let judge = |address| self.judge(&self.policy(), target, Some(address));
        let is_named = target.name.is_some();
        self.dial_first(addresses, route, target.port, is_named, judge).await
    }

    /// The same for the proxy of a rule.
    pub(crate) async fn dial_forward(&self, proxy: &CompiledForward) -> Result<(BoxIo, SocketAddr), DialError> {
        let CompiledForward { host, port, is_operators, .. } = proxy;
        let route = self.shared.out.routes.get(host, *port);
        let addresses = match route {
            Some(route) => vec![route.ip()],
            None => self.resolve(host).await.map_err(DialError::Resolve)?,
        };
        let judge = |address| {
            let destination = match route {
                Some(_) => Destination::Name(host),
                None => Destination::Resolved(host, address),
            };
            self.policy().forward(*is_operators, destination, *port, &self.shared.out.host_addresses.get())
        };
        self.dial_first(addresses, route, *port, true, judge).await
    }

    async fn dial_first(
        &self,
        addresses: Vec<IpAddr>,
        route: Option<SocketAddr>,
        port: u16,
        is_named: bool,
        judge: impl Fn(IpAddr) -> Decision,
    ) -> Result<(BoxIo, SocketAddr), DialError> {
        let mut problem = None;
        for address in addresses {
            let decision = judge(address);
            if !decision.allowed {
                let denied = DialError::Denied(decision, is_named.then_some(address));
                problem.get_or_insert(denied);
                continue;
            }
            let upstream = route.unwrap_or_else(|| SocketAddr::new(address, port));
            let out = &self.shared.out;
            let dial =
                async { if route.is_some() { out.dial_route(upstream).await } else { out.dial(upstream).await } };
            match tokio::time::timeout(self.limits.dial_timeout(), dial).await {
                Ok(Ok(stream)) => {
                    let decision = judge(address);
                    if !decision.allowed {
                        return Err(DialError::Denied(decision, Some(address)));
                    }
                    return Ok((stream, upstream));
                }
                Ok(Err(error)) => problem = Some(DialError::Connect(error.to_string())),
                Err(_) => problem = Some(DialError::Connect("it did not answer in time".to_owned())),
            }
        }
        Err(problem.unwrap_or(DialError::Resolve(ResolveError::NotFound)))
    }

    /// Where the operator leads it.
    fn route(&self, target: &Target) -> Option<SocketAddr> {
        target.name.as_deref().and_then(|name| self.shared.out.routes.get(name, target.port))
    }

    async fn resolve(&self, name: &str) -> Result<Vec<IpAddr>, ResolveError> {
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

    fn udp_refused(&self, to: Ipv4Addr, port: u16) {
        let name = self.names.name(to).map(|name| name.to_string());
        let facts = Facts { address: Some(to.into()), port: Some(port), name, ..Facts::default() };
        self.audit(AuditKind::Udp, Verdict::Deny, "udp_closed", facts);
    }

    fn echo(&self, to: Ipv4Addr) -> bool {
        to == GATEWAY_ADDRESS || self.names.name(to).is_some_and(|name| self.policy.load().may_reach(&name))
    }

    fn link_ended(&self, error: Option<&io::Error>) {
        let verdict = if error.is_some() { Verdict::Error } else { Verdict::Allow };
        let facts = Facts { detail: error.map(ToString::to_string), ..Facts::default() };
        self.audit(AuditKind::Link, verdict, "link_ended", facts);
        self.auditor.flush();
    }
}
