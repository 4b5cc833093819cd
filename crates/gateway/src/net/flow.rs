//! One TCP connection with the guest.
//!
//! ```text
//!            SYN allowed               handshake done             handler drops its stream
//! (nothing) ────────────> half open ──────────────────> served ─────────────────────────────> lingering ──> gone
//!                             │ held: SYN-ACK waits for the handler to reach the other side        │
//!                             └── HANDSHAKE_SECONDS ──> gone       SILENCE_, LINGER_SECONDS ───────┘
//! ```
//!
//! A flow whose stream was closed in order lingers until the guest has everything, as long as it takes something now
//! and then; one whose stream was dropped is reset. Segments of flows that are gone are answered with resets.

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use smoltcp::{
    iface::{Config, Interface, PollResult, SocketHandle, SocketSet},
    phy::{Checksum, ChecksumCapabilities, Device, DeviceCapabilities, Medium, RxToken, TxToken},
    socket::tcp::{self, State},
    time::{Duration, Instant},
    wire::{HardwareAddress, IpAddress, IpCidr},
};

use super::{GUEST_ADDRESS, MTU, buffer::Rings, frame::ETHERNET, link::Link, outbox::Frame};
use crate::Traffic;

const HANDSHAKE_SECONDS: u64 = 10;
/// For the end of a connection to be answered.
const LINGER_SECONDS: u64 = 30;
/// A guest that has not answered data for so long is gone (or paused; a resumed one finds its flows reset anyway), and
/// so is one that leaves untaken what a closed stream left behind.
const SILENCE_SECONDS: u64 = 300;
/// smoltcp asks to be called "now" in states where nothing can be done yet; do not spin.
const SHORTEST_TIMER: Duration = Duration::from_millis(10);

/// Names a flow on its link.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(crate) struct FlowKey {
    pub(crate) guest_port: u16,
    pub(crate) address: Ipv4Addr,
    pub(crate) port: u16,
}

/// How a flow's bytes are treated.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Mode {
    /// Not known yet.
    Sniff,
    /// TLS passed through untouched.
    Pass,
    /// Any bytes.
    Raw,
    /// Bytes that are neither TLS nor HTTP, where both would be read.
    Opaque,
    /// HTTP requests judged one by one.
    Requests,
    /// A refusal is being explained.
    Explain,
    /// Opened from outside.
    Inbound,
}

impl Mode {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Sniff => "sniff",
            Self::Pass => "pass",
            Self::Raw | Self::Opaque => "raw",
            Self::Requests => "requests",
            Self::Explain => "explain",
            Self::Inbound => "inbound",
        }
    }
}

/// What a flow is, for judging it again when the policy changes.
#[derive(Clone, Debug)]
pub(crate) struct FlowFacts {
    pub(crate) name: Option<Arc<str>>,
    pub(crate) upstream: Option<IpAddr>,
    pub(crate) mode: Mode,
    /// The request that turned the flow into a WebSocket, as the guest sent it.
    pub(crate) upgrade: Option<Arc<Upgraded>>,
}

/// A request that turned a connection into something else.
#[derive(Clone, Debug)]
pub(crate) struct Upgraded {
    pub(crate) host: String,
    pub(crate) method: http::Method,
    pub(crate) uri: http::Uri,
    pub(crate) headers: http::HeaderMap,
    pub(crate) scheme: crate::policy::Scheme,
}

impl FlowFacts {
    pub(crate) fn new(name: Option<Arc<str>>, mode: Mode) -> Self {
        Self { name, upstream: None, mode, upgrade: None }
    }
}

pub(crate) struct Flow {
    pub(crate) id: u64,
    pub(crate) key: FlowKey,
    pub(crate) opened: std::time::Instant,
    pub(crate) bytes_out: AtomicU64,
    pub(crate) bytes_in: AtomicU64,
    pub(crate) facts: Mutex<FlowFacts>,
    /// It was let out: what it sends is the sandbox's traffic.
    leads_out: AtomicBool,
    traffic: Arc<Traffic>,
    link: Weak<Link>,
    tcp: Mutex<Tcp>,
}

/// Dropped in this order: the sockets use the rings.
pub(super) struct Tcp {
    interface: Interface,
    sockets: SocketSet<'static>,
    handle: SocketHandle,
    #[expect(dead_code, reason = "keeps the sockets' memory")]
    rings: Rings,
    timer: Option<Instant>,
    deadline: Option<Instant>,
    waits_for_room: bool,
    half_open: bool,
    served: bool,
    /// To be closed when everything is sent.
    closing: bool,
    released: bool,
    /// How many bytes the guest had not taken when a released flow last looked.
    untaken: Option<usize>,
    gone: bool,
}

impl Tcp {
    /// Ends what we send. In LAST-ACK smoltcp (0.14) drops window updates: a guest that closed its half first and reads
    /// slowly would never get the rest. So that state begins when there is no rest.
    pub(super) fn close(&mut self) {
        let socket = self.socket();
        if socket.state() == State::CloseWait && socket.send_queue() > 0 {
            self.closing = true;
        } else {
            socket.close();
        }
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing
    }

    /// How long a released flow is kept: until the guest has taken nothing for a while.
    fn linger(&mut self, now: Instant) {
        let left = self.socket().send_queue();
        if self.untaken != Some(left) {
            self.untaken = Some(left);
            let seconds = if left > 0 { SILENCE_SECONDS } else { LINGER_SECONDS };
            self.deadline = Some(now + Duration::from_secs(seconds));
        }
    }

    pub(super) fn socket(&mut self) -> &mut tcp::Socket<'static> {
        self.sockets.get_mut(self.handle)
    }
}

/// What came of driving a flow.
#[derive(Default)]
pub(super) struct Driven {
    /// The handshake is done: start the handler.
    pub(super) serve: bool,
    /// It is no longer half open.
    pub(super) opened: bool,
    /// Nothing more will come of it.
    pub(super) gone: bool,
}

/// How a flow starts.
pub(super) enum Start {
    /// By the guest's SYN.
    Listen { hold: bool },
    /// By us.
    Connect,
}

impl Flow {
    pub(super) fn new(
        id: u64,
        key: FlowKey,
        link: &Arc<Link>,
        facts: FlowFacts,
        start: &Start,
    ) -> std::io::Result<Self> {
        let mut rings = Rings::new(link.flow_count())?;
        // SAFETY: called once; the slices live in `Tcp::sockets`, which is dropped before `Tcp::rings`.
        let (receive, send) = unsafe { rings.split() };
        let mut socket = tcp::Socket::new(tcp::SocketBuffer::new(receive), tcp::SocketBuffer::new(send));
        socket.set_nagle_enabled(false);
        socket.set_ack_delay(None);
        socket.set_timeout(Some(Duration::from_secs(SILENCE_SECONDS)));
        let now = link.now();
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = random_seed();
        let mut interface = Interface::new(config, &mut FlowDevice::new(None, link), now);
        let local = IpAddress::Ipv4(key.address);
        let invalid = || std::io::Error::from(std::io::ErrorKind::InvalidInput);
        let mut has_room = false;
        interface.update_ip_addrs(|addresses| has_room = addresses.push(IpCidr::new(local, 32)).is_ok());
        debug_assert!(has_room);
        match start {
            Start::Listen { hold } => {
                socket.pause_synack(*hold);
                socket.listen((local, key.port)).map_err(|_| invalid())?;
            }
            Start::Connect => {
                let guest = (IpAddress::Ipv4(GUEST_ADDRESS), key.guest_port);
                socket.connect(interface.context(), guest, (local, key.port)).map_err(|_| invalid())?;
            }
        }
        let mut sockets = SocketSet::new(Vec::with_capacity(1));
        let handle = sockets.add(socket);
        let served = matches!(start, Start::Listen { hold: true } | Start::Connect);
        let tcp = Tcp {
            interface,
            sockets,
            handle,
            rings,
            timer: None,
            deadline: Some(now + Duration::from_secs(HANDSHAKE_SECONDS)),
            waits_for_room: false,
            half_open: true,
            served,
            closing: false,
            released: false,
            untaken: None,
            gone: false,
        };
        Ok(Self {
            id,
            key,
            opened: std::time::Instant::now(),
            bytes_out: AtomicU64::new(0),
            bytes_in: AtomicU64::new(0),
            facts: Mutex::new(facts),
            leads_out: AtomicBool::new(false),
            traffic: Arc::clone(link.traffic()),
            link: Arc::downgrade(link),
            tcp: Mutex::new(tcp),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Tcp> {
        self.tcp.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn link(&self) -> Option<Arc<Link>> {
        self.link.upgrade()
    }

    pub(crate) fn facts(&self) -> FlowFacts {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_facts(&self, change: impl FnOnce(&mut FlowFacts)) {
        let mut facts = self.facts.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut facts);
        let leads_out = matches!(facts.mode, Mode::Pass | Mode::Raw | Mode::Opaque | Mode::Requests);
        // What was read to find that out goes out as well.
        if leads_out && !self.leads_out.swap(true, Ordering::Relaxed) {
            self.traffic.add_sent(self.bytes_out.load(Ordering::Relaxed));
        }
    }

    /// Takes a segment; what it causes is sent by [`Flow::drive`].
    pub(super) fn take(&self, link: &Link, packet: &[u8]) {
        let mut tcp = self.lock();
        let now = link.now();
        let Tcp { interface, sockets, .. } = &mut *tcp;
        interface.poll_ingress_single(now, &mut FlowDevice::new(Some(packet), link), sockets);
    }

    /// Sends what can be sent and looks after timers and states.
    pub(crate) fn drive(self: &Arc<Self>) {
        if let Some(link) = self.link.upgrade() {
            let driven = self.drive_locked(&link, &mut self.lock());
            link.after(self, driven);
        }
    }

    pub(super) fn drive_locked(self: &Arc<Self>, link: &Link, tcp: &mut Tcp) -> Driven {
        if tcp.gone {
            return Driven::default();
        }
        let now = link.now();
        let mut full = self.send(link, tcp, now);
        if tcp.closing && tcp.socket().send_queue() == 0 {
            tcp.closing = false;
            tcp.socket().close();
            full = self.send(link, tcp, now);
        }
        if tcp.released {
            tcp.linger(now);
        }
        let mut driven = Driven::default();
        // It started with a SYN: listening again means that the guest took it back.
        if tcp.socket().state() == State::Listen {
            tcp.socket().abort();
        }
        let state = tcp.socket().state();
        if tcp.half_open && !matches!(state, State::SynReceived | State::SynSent) {
            tcp.half_open = false;
            tcp.deadline = None;
            driven.opened = true;
            if !tcp.served && state != State::Closed {
                tcp.served = true;
                driven.serve = true;
            }
        }
        let late = tcp.deadline.is_some_and(|deadline| deadline <= now);
        // TIME-WAIT waits for lost packets; this link loses none once they are out.
        let ended = matches!(state, State::Closed | State::TimeWait) && !full;
        if late || ended && (tcp.released || !tcp.served) {
            if late && state != State::Closed {
                tcp.socket().abort();
                let Tcp { interface, sockets, .. } = tcp;
                interface.poll_egress(now, &mut FlowDevice::new(None, link), sockets);
            }
            driven.opened |= std::mem::take(&mut tcp.half_open);
            tcp.gone = true;
            driven.gone = true;
            return driven;
        }
        self.set_timer(link, tcp, now, full);
        driven
    }

    /// Sends what can be sent. True: the link is full, and it is driven again when there is room.
    fn send(self: &Arc<Self>, link: &Link, tcp: &mut Tcp, now: Instant) -> bool {
        loop {
            let mut device = FlowDevice::new(None, link);
            let Tcp { interface, sockets, .. } = tcp;
            while let PollResult::SocketStateChanged = interface.poll_egress(now, &mut device, sockets) {}
            if device.full {
                tcp.waits_for_room = tcp.waits_for_room || link.outbox.wait_for_room(self);
            }
            if !device.full || tcp.waits_for_room {
                return device.full;
            }
        }
    }

    fn set_timer(&self, link: &Link, tcp: &mut Tcp, now: Instant, full: bool) {
        let Tcp { interface, sockets, .. } = tcp;
        let wanted = interface.poll_at(now, sockets).filter(|_| !full).map(|at| at.max(now + SHORTEST_TIMER));
        let wanted = [wanted, tcp.deadline].into_iter().flatten().min();
        if let Some(at) = wanted
            && tcp.timer.is_none_or(|timer| at < timer)
        {
            tcp.timer = Some(at);
            link.clock.set(at, self.key);
        }
    }

    /// A timer fired; stale ones do nothing.
    pub(super) fn tick(self: &Arc<Self>, at: Instant) {
        {
            let mut tcp = self.lock();
            if tcp.timer != Some(at) {
                return;
            }
            tcp.timer = None;
        }
        self.drive();
    }

    pub(super) fn has_room(self: &Arc<Self>) {
        self.lock().waits_for_room = false;
        self.drive();
    }

    /// Resets the connection; its handler sees an error.
    pub(crate) fn abort(self: &Arc<Self>) {
        self.lock().socket().abort();
        self.drive();
    }

    /// Lets a held handshake go on.
    pub(crate) fn answer(self: &Arc<Self>) {
        self.lock().socket().pause_synack(false);
        self.drive();
    }

    /// The handler is done with it.
    pub(super) fn release(self: &Arc<Self>) {
        {
            let mut tcp = self.lock();
            tcp.released = true;
            let in_order = matches!(
                tcp.socket().state(),
                State::FinWait1 | State::FinWait2 | State::Closing | State::LastAck | State::TimeWait
            );
            if !in_order && !tcp.closing {
                tcp.socket().abort();
            }
        }
        self.drive();
    }

    /// Gives it up without a word: a fault in the stack, or a guest that starts anew on the same ports.
    pub(super) fn forget(self: &Arc<Self>, link: &Arc<Link>) {
        let driven = {
            let mut tcp = self.lock();
            let first = !std::mem::replace(&mut tcp.gone, true);
            Driven { serve: false, opened: first && std::mem::take(&mut tcp.half_open), gone: first }
        };
        link.after(self, driven);
    }

    pub(super) fn is_lingering(&self) -> bool {
        let tcp = self.lock();
        tcp.released || tcp.gone
    }

    pub(super) fn count_out(&self, bytes: usize) {
        self.bytes_out.fetch_add(bytes as u64, Ordering::Relaxed);
        // Reads and changes of the facts are its handler's, one after the other.
        if self.leads_out.load(Ordering::Relaxed) {
            self.traffic.add_sent(bytes as u64);
        }
    }

    pub(super) fn count_in(&self, bytes: usize) {
        self.bytes_in.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

fn random_seed() -> u64 {
    let mut seed = [0; 8];
    getrandom::fill(&mut seed).expect("the kernel's random generator works once it is seeded");
    u64::from_ne_bytes(seed)
}

/// smoltcp's view of the link while one flow is driven.
struct FlowDevice<'a> {
    packet: Option<&'a [u8]>,
    link: &'a Link,
    full: bool,
}

impl<'a> FlowDevice<'a> {
    fn new(packet: Option<&'a [u8]>, link: &'a Link) -> Self {
        Self { packet, link, full: false }
    }
}

struct Packet<'a>(&'a [u8]);

impl RxToken for Packet<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(self.0)
    }
}

struct ToOutbox<'a>(&'a Link);

impl TxToken for ToOutbox<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut frame: Frame = self.0.outbox.frame(ETHERNET + len);
        let (header, packet) = frame.bytes_mut().split_at_mut(ETHERNET);
        header.copy_from_slice(&self.0.ethernet_header());
        let result = f(packet);
        self.0.outbox.push(frame);
        result
    }
}

impl Device for FlowDevice<'_> {
    type RxToken<'t>
        = Packet<'t>
    where
        Self: 't;
    type TxToken<'t>
        = ToOutbox<'t>
    where
        Self: 't;

    fn receive(&mut self, _now: Instant) -> Option<(Packet<'_>, ToOutbox<'_>)> {
        self.packet.take().map(|packet| (Packet(packet), ToOutbox(self.link)))
    }

    fn transmit(&mut self, _now: Instant) -> Option<ToOutbox<'_>> {
        if self.link.outbox.has_room() {
            return Some(ToOutbox(self.link));
        }
        self.full = true;
        None
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = usize::from(MTU);
        // Nothing is lost or changed between the guest's stack and ours: what it sent is not checked again. IPv4
        // headers were checked by the parser.
        capabilities.checksum = ChecksumCapabilities::ignored();
        capabilities.checksum.ipv4 = Checksum::Tx;
        capabilities.checksum.tcp = self.link.tcp_checksum();
        capabilities
    }
}
