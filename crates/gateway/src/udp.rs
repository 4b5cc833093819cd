//! UDP for policies that allow it: one socket of the host's per flow, connected to the one address that was judged.
//!
//! ```text
//! guest :5000 ──> 198.18.0.7:443   a name's own address ──judged by name──> resolved ──judged by address──> socket
//!             <── 198.18.0.7:443 <── what this very address and port answers, and nothing else <────────────┘
//! ```
//!
//! A flow is a port of the guest and a destination. It is there from its first datagram until nothing came either way
//! for a while, the policy no longer allows it, or the link ends. Datagrams wait in a short queue while a flow is being
//! opened or its socket is full, and are lost when that is full, as UDP may; so are answers when the link is full. There
//! are so many flows per sandbox and so many per gateway. Nothing is sent twice and nothing is sent to all.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use bytes::Bytes;
use futures::FutureExt as _;
use tokio::{
    io::Interest,
    net::UdpSocket,
    sync::{
        OwnedSemaphorePermit,
        mpsc::{self, error::TrySendError},
    },
    time::Instant,
};

use crate::{
    audit::{AuditKind, Facts, Verdict},
    dial::DialError,
    net::{
        FlowKey, Link, MTU,
        frame::{Datagram, UDP_OVERHEAD},
    },
    policy::Reason,
    sandbox::{Sandbox, Target, target_facts},
};

/// Sockets of the host's for flows of all sandboxes.
pub(crate) const MOST_SOCKETS: usize = 16_384;
/// Datagrams that wait for a flow's socket.
const QUEUE: usize = 32;
/// Answers that are taken from a socket before other flows have their turn.
const ANSWERS_AT_ONCE: usize = 16;
/// The longest answer that fits into a packet for the guest.
const LONGEST_ANSWER: usize = MTU as usize - UDP_OVERHEAD;

/// A sandbox's flows.
#[derive(Default)]
pub(crate) struct UdpFlows {
    inner: Mutex<Inner>,
    next_id: AtomicU64,
}

#[derive(Default)]
struct Inner {
    by_key: HashMap<FlowKey, Entry>,
    ended: bool,
}

/// A flow as others see it; it ends when this goes.
struct Entry {
    id: u64,
    datagrams: mpsc::Sender<Bytes>,
    target: Target,
    state: Arc<State>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        *self.state.open() = false;
    }
}

struct State {
    upstream: OnceLock<IpAddr>,
    /// Held while a datagram is let out or in: once it says no, none is.
    is_open: Mutex<bool>,
}

impl State {
    fn open(&self) -> MutexGuard<'_, bool> {
        self.is_open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A flow, for the task that carries it.
pub(crate) struct UdpFlow {
    id: u64,
    key: FlowKey,
    datagrams: mpsc::Receiver<Bytes>,
    target: Target,
    state: Arc<State>,
    /// The first packet's headers, to tell the guest that nobody listens there.
    headers: Vec<u8>,
    _slot: OwnedSemaphorePermit,
}

fn key_of(datagram: &Datagram<'_>) -> FlowKey {
    FlowKey { guest_port: datagram.from_port, address: datagram.to, port: datagram.to_port }
}

impl UdpFlows {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn count(&self) -> usize {
        self.lock().by_key.len()
    }

    /// Gives a datagram to its flow; false: there is none.
    pub(crate) fn pass_on(&self, key: FlowKey, data: &[u8]) -> bool {
        let mut inner = self.lock();
        let Some(entry) = inner.by_key.get(&key) else { return false };
        match entry.datagrams.try_send(Bytes::copy_from_slice(data)) {
            Ok(()) | Err(TrySendError::Full(_)) => true,
            // Its task failed.
            Err(TrySendError::Closed(_)) => {
                inner.by_key.remove(&key);
                false
            }
        }
    }

    /// A new flow with its first datagram; none: there are `most` already, or the link has ended.
    pub(crate) fn open(
        &self,
        most: usize,
        target: &Target,
        first: &Datagram<'_>,
        slot: OwnedSemaphorePermit,
    ) -> Option<UdpFlow> {
        let mut inner = self.lock();
        if inner.ended || inner.by_key.len() >= most {
            return None;
        }
        let key = key_of(first);
        let (sender, datagrams) = mpsc::channel(QUEUE);
        // There is room for it.
        let _ = sender.try_send(Bytes::copy_from_slice(first.data));
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let state = Arc::new(State { upstream: OnceLock::new(), is_open: Mutex::new(true) });
        let entry = Entry { id, datagrams: sender, target: target.clone(), state: Arc::clone(&state) };
        inner.by_key.insert(key, entry);
        let headers = first.packet[..first.packet.len().min(UDP_OVERHEAD)].to_vec();
        Some(UdpFlow { id, key, datagrams, target: target.clone(), state, headers, _slot: slot })
    }

    fn remove(&self, flow: &UdpFlow) {
        let mut inner = self.lock();
        if inner.by_key.get(&flow.key).is_some_and(|entry| entry.id == flow.id) {
            inner.by_key.remove(&flow.key);
        }
    }

    /// Ends the flows that are no longer allowed, and says which.
    pub(crate) fn keep(&self, allowed: impl Fn(&Target, Option<IpAddr>) -> bool) -> Vec<Target> {
        let mut ended = Vec::new();
        self.lock().by_key.retain(|_, entry| {
            let keep = allowed(&entry.target, entry.state.upstream.get().copied());
            if !keep {
                ended.push(entry.target.clone());
            }
            keep
        });
        ended
    }

    /// Ends all flows; none starts any more.
    pub(crate) fn end(&self) {
        let mut inner = self.lock();
        inner.ended = true;
        inner.by_key.clear();
    }
}

impl UdpFlow {
    /// Carries the flow until it ends, and records it.
    pub(crate) async fn run(mut self, sandbox: Arc<Sandbox>, link: Arc<Link>) {
        let opened = Instant::now();
        let facts = Facts { mode: Some("udp"), ..target_facts(&self.target) };
        match sandbox.dial_udp(&self.target).await {
            Ok((socket, upstream)) => {
                // Set once, here. Whoever changed the policy before did not see the address.
                let _ = self.state.upstream.set(upstream.ip());
                let (mut sent, mut answered) = (0, 0);
                if sandbox.allows_udp(&self.target, Some(upstream.ip())) {
                    (sent, answered) = self.carry(&sandbox, &link, &socket).await;
                }
                let facts = Facts {
                    bytes_out: Some(sent),
                    bytes_in: Some(answered),
                    duration_ms: Some(opened.elapsed().as_millis() as u64),
                    upstream: Some(upstream),
                    ..facts
                };
                sandbox.audit(AuditKind::Closed, Verdict::Allow, "closed", facts);
            }
            Err(error) => {
                let verdict = if error.is_denied() { Verdict::Deny } else { Verdict::Error };
                let facts = Facts { detail: Some(error.message()), ..facts };
                sandbox.audit(AuditKind::Udp, verdict, error.code(), facts);
                link.refuse_udp(self.key.address, &self.headers);
            }
        }
        sandbox.udp.remove(&self);
    }

    /// Returns how many bytes went out and came in.
    async fn carry(&mut self, sandbox: &Sandbox, link: &Link, socket: &UdpSocket) -> (u64, u64) {
        let idle = sandbox.limits.udp_idle_timeout();
        let (mut sent, mut answered) = (0, 0);
        let mut last = Instant::now();
        loop {
            tokio::select! {
                datagram = self.datagrams.recv() => {
                    let Some(datagram) = datagram else { return (sent, answered) };
                    match self.send(socket, &datagram).await {
                        Some(Ok(())) => {
                            sent += datagram.len() as u64;
                            link.count_sent(datagram.len() as u64);
                        }
                        // Lost, as on any network: too long for a way, no way, refused before.
                        Some(Err(_)) => link.refuse_udp(self.key.address, &self.headers),
                        None => return (sent, answered),
                    }
                }
                ready = socket.ready(Interest::READABLE | Interest::ERROR) => {
                    let Ok(ready) = ready else { return (sent, answered) };
                    // Nobody listens there (any more).
                    if ready.is_error() && was_refused(socket) {
                        link.refuse_udp(self.key.address, &self.headers);
                    }
                    answered += self.take_answers(link, socket);
                }
                () = tokio::time::sleep_until(last + idle) => return (sent, answered),
            }
            last = Instant::now();
        }
    }

    /// Lets a datagram out; none: the flow has ended.
    async fn send(&self, socket: &UdpSocket, datagram: &[u8]) -> Option<io::Result<()>> {
        loop {
            {
                let open = self.state.open();
                match open.then(|| socket.try_send(datagram))? {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    sent => return Some(sent.map(drop)),
                }
            }
            if let Err(error) = socket.writable().await {
                return Some(Err(error));
            }
        }
    }

    /// Gives the guest what has arrived; returns how many bytes.
    fn take_answers(&self, link: &Link, socket: &UdpSocket) -> u64 {
        // One more than fits: what is longer shows, and is not cut to what fits. It is not cleared for each wake, and
        // a flow that waits holds none.
        let mut buffer = Vec::with_capacity(LONGEST_ANSWER + 1);
        let mut bytes = 0;
        let is_open = self.state.open();
        for _ in 0..ANSWERS_AT_ONCE {
            if !*is_open {
                break;
            }
            buffer.clear();
            match socket.try_recv_buf(&mut buffer) {
                Ok(length) if length <= LONGEST_ANSWER => {
                    bytes += length as u64;
                    link.answer_udp(self.key.address, self.key.port, self.key.guest_port, &buffer);
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => link.refuse_udp(self.key.address, &self.headers),
            }
        }
        bytes
    }
}

/// Takes what the kernel has to say about earlier datagrams; it wakes nobody who waits for answers alone.
fn was_refused(socket: &UdpSocket) -> bool {
    let error = || socket.take_error()?.map_or_else(|| Err(io::ErrorKind::WouldBlock.into()), Ok);
    socket.try_io(Interest::ERROR, error).is_ok()
}

impl Sandbox {
    /// Whether the policy in force lets datagrams go there.
    pub(crate) fn allows_udp(&self, target: &Target, upstream: Option<IpAddr>) -> bool {
        self.judge_udp(&self.policy(), target, upstream).allowed
    }

    /// Takes a datagram of the guest; false: it is refused.
    pub(crate) fn take_datagram(&self, link: &Arc<Link>, datagram: &Datagram<'_>) -> bool {
        let key = key_of(datagram);
        if self.udp.pass_on(key, datagram.data) {
            return true;
        }
        let target = Target { name: self.names.name(key.address), address: key.address, port: key.port };
        let refuse = |reason: &'static str, rule: Option<String>| {
            let facts = Facts { rule, ..target_facts(&target) };
            self.audit(AuditKind::Udp, Verdict::Deny, reason, facts);
            false
        };
        let decision = self.judge_udp(&self.policy(), &target, None);
        if !decision.allowed {
            let by_default = decision.reason == Reason::Default;
            return refuse(if by_default { "udp_closed" } else { decision.reason.code() }, decision.rule);
        }
        if key.guest_port == 0 || !self.may_open() {
            return true;
        }
        let slot = Arc::clone(&self.shared.udp_sockets).try_acquire_owned().ok();
        let flow = slot.and_then(|slot| self.udp.open(self.limits.udp_flows, &target, datagram, slot));
        match (flow, self.this()) {
            (Some(flow), Some(sandbox)) => {
                tokio::spawn(flow.run(sandbox, Arc::clone(link)));
                true
            }
            _ => refuse("too_many_flows", None),
        }
    }

    /// Resolves, judges and opens a socket as one step, as [`Sandbox::dial`] does.
    async fn dial_udp(&self, target: &Target) -> Result<(UdpSocket, SocketAddr), DialError> {
        let judge = |address| self.judge_udp(&self.policy(), target, Some(address));
        let out = &self.shared.out;
        let open = |address, is_route| async move {
            if is_route {
                return out.dial_udp_route(address).await;
            }
            if self.policy().egress_proxy().is_some() {
                return Err(io::Error::new(io::ErrorKind::Unsupported, "the sandbox's proxy takes no UDP"));
            }
            out.dial_udp(address).await
        };
        let open = |address, is_route| open(address, is_route).boxed();
        self.dial_target(target, judge, open).await
    }
}
