//! One guest's link: its frames, its flows, and the tasks that move them.

use std::{
    collections::HashMap,
    io::{self, IoSlice},
    net::Ipv4Addr,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use smoltcp::{phy::Checksum, time::Instant};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    task::JoinSet,
};

use super::{
    Drops, FlowKey, FlowStream, GATEWAY_ADDRESS, GUEST_MAC,
    clock::Clock,
    flow::{Driven, Flow, FlowFacts, Mode, Start},
    frame::{self, Datagram, ETHERNET, Frame, Segment, flags},
    outbox::{self, Outbox},
};
use crate::{Traffic, limits::Pace};

/// The longest frame QEMU sends.
const MAX_FRAME: usize = 68 << 10;
const READ_BYTES: usize = 256 << 10;
const WRITE_FRAMES: usize = 32;
const FIRST_INBOUND_PORT: u16 = 49_152;

/// How frames are told apart on a link.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Framing {
    /// QEMU's `-netdev stream`: each frame after its length in four bytes, most significant first.
    LengthPrefixed,
    /// Each read gives one frame and each write takes one, like a TAP device or a datagram socket.
    OnePerCall,
    /// As [`Framing::OnePerCall`] with a `virtio_net_hdr` of ten bytes before each frame (a TAP device with
    /// `IFF_VNET_HDR`): checksums to the guest are left to the device.
    OnePerCallWithVnetHeader,
}

/// The answer to a SYN.
pub(crate) enum Syn {
    /// RST.
    Refuse,
    /// No answer: the guest tries again later.
    Ignore,
    /// A flow; `hold` keeps the SYN-ACK back until the handler calls [`Flow::answer`].
    Accept { hold: bool, facts: FlowFacts },
}

/// Decides for a link. Called from its reader: must not block.
pub(crate) trait Guard: Send + Sync + 'static {
    /// A new connection.
    fn syn(&self, key: FlowKey) -> Syn;
    /// A connection that is refused because there are too many.
    fn full(&self, key: FlowKey);
    /// A flow that is ready for its handler.
    fn serve(&self, stream: FlowStream);
    /// A flow that ended.
    fn ended(&self, flow: &Flow);
    /// A question for the name server; the answer is sent with [`Link::send_udp`].
    fn dns(&self, link: &Arc<Link>, question: &Datagram<'_>);
    /// Another datagram; false: it is refused.
    fn udp(&self, link: &Arc<Link>, datagram: &Datagram<'_>) -> bool;
    /// Whether an address answers pings.
    fn echo(&self, to: Ipv4Addr) -> bool;
    /// The link ended.
    fn link_ended(&self, error: Option<&io::Error>);
}

pub(crate) struct LinkOptions {
    pub(crate) framing: Framing,
    pub(crate) traffic: Arc<Traffic>,
    pub(crate) max_flows: usize,
    pub(crate) max_half_open: usize,
    pub(crate) from_guest: Arc<Pace>,
    pub(crate) to_guest: Arc<Pace>,
}

pub(crate) struct Link {
    pub(super) outbox: Outbox,
    pub(super) clock: Clock,
    pub(crate) drops: Drops,
    pub(crate) bytes_from_guest: AtomicU64,
    pub(crate) bytes_to_guest: AtomicU64,
    options: LinkOptions,
    guard: Arc<dyn Guard>,
    flows: Mutex<Flows>,
    half_open: AtomicUsize,
    next_id: AtomicU64,
    guest_mac: AtomicU64,
}

#[derive(Default)]
struct Flows {
    by_key: HashMap<FlowKey, Arc<Flow>>,
    ended: bool,
}

fn mac_to_u64(mac: [u8; 6]) -> u64 {
    mac.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

impl Link {
    pub(crate) fn new(options: LinkOptions, guard: Arc<dyn Guard>) -> Arc<Self> {
        Arc::new(Self {
            outbox: Outbox::default(),
            clock: Clock::new(),
            drops: Drops::default(),
            bytes_from_guest: AtomicU64::new(0),
            bytes_to_guest: AtomicU64::new(0),
            options,
            guard,
            flows: Mutex::default(),
            half_open: AtomicUsize::new(0),
            next_id: AtomicU64::new(1),
            guest_mac: AtomicU64::new(mac_to_u64(GUEST_MAC)),
        })
    }

    pub(super) fn traffic(&self) -> &Arc<Traffic> {
        &self.options.traffic
    }

    pub(super) fn now(&self) -> Instant {
        self.clock.now()
    }

    pub(super) fn ethernet_header(&self) -> [u8; ETHERNET] {
        frame::ethernet_header(self.guest_mac())
    }

    pub(super) fn tcp_checksum(&self) -> Checksum {
        match self.options.framing {
            Framing::OnePerCallWithVnetHeader => Checksum::None,
            Framing::LengthPrefixed | Framing::OnePerCall => Checksum::Tx,
        }
    }

    fn guest_mac(&self) -> [u8; 6] {
        let [_, _, mac @ ..] = self.guest_mac.load(Ordering::Relaxed).to_be_bytes();
        mac
    }

    fn flows_lock(&self) -> MutexGuard<'_, Flows> {
        self.flows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All flows there are now.
    pub(crate) fn flows(&self) -> Vec<Arc<Flow>> {
        self.flows_lock().by_key.values().cloned().collect()
    }

    pub(crate) fn flow_count(&self) -> usize {
        self.flows_lock().by_key.len()
    }

    pub(crate) fn half_open_count(&self) -> usize {
        self.half_open.load(Ordering::Relaxed)
    }

    pub(crate) fn send_udp(&self, from: Ipv4Addr, from_port: u16, to_port: u16, data: &[u8]) {
        self.outbox.push_bytes(frame::udp(self.guest_mac(), from, from_port, to_port, data));
    }

    /// A datagram that came from outside; lost when the link is full.
    pub(crate) fn answer_udp(&self, from: Ipv4Addr, from_port: u16, to_port: u16, data: &[u8]) {
        if self.outbox.has_room() {
            self.send_udp(from, from_port, to_port, data);
        }
    }

    /// Tells the guest that a datagram did not arrive.
    pub(crate) fn refuse_udp(&self, to: Ipv4Addr, packet: &[u8]) {
        self.outbox.push_bytes(frame::port_unreachable(self.guest_mac(), to, packet));
    }

    /// What was sent to the outside beside TCP.
    pub(crate) fn count_sent(&self, bytes: u64) {
        self.options.traffic.add_sent(bytes);
    }

    /// Moves frames until the link ends.
    pub(crate) async fn run(
        self: Arc<Self>,
        reader: impl AsyncRead + Send + Unpin + 'static,
        writer: impl AsyncWrite + Send + Unpin + 'static,
    ) {
        let mut tasks = JoinSet::new();
        tasks.spawn(Arc::clone(&self).read(reader));
        tasks.spawn(Arc::clone(&self).write(writer));
        tasks.spawn(Arc::clone(&self).tick());
        let first = tasks.join_next().await;
        tasks.shutdown().await;
        let error = match first {
            Some(Ok(Err(error))) => Some(error),
            Some(Err(error)) => Some(io::Error::other(error.to_string())),
            _ => None,
        };
        self.end(error.as_ref());
    }

    /// Resets everything; no flow starts any more.
    pub(crate) fn end(&self, error: Option<&io::Error>) {
        self.flows_lock().ended = true;
        for flow in self.flows() {
            flow.abort();
        }
        self.outbox.clear();
        self.guard.link_ended(error);
    }

    async fn tick(self: Arc<Self>) -> io::Result<()> {
        loop {
            let (at, key) = self.clock.due().await;
            let flow = self.flows_lock().by_key.get(&key).cloned();
            if let Some(flow) = flow {
                self.contain(&flow, |flow| flow.tick(at));
            }
        }
    }

    async fn read(self: Arc<Self>, mut reader: impl AsyncRead + Unpin) -> io::Result<()> {
        let mut buffer = vec![0; READ_BYTES];
        let mut filled = 0;
        let mut touched = Vec::new();
        loop {
            let count = reader.read(&mut buffer[filled..]).await?;
            if count == 0 {
                return Ok(());
            }
            self.bytes_from_guest.fetch_add(count as u64, Ordering::Relaxed);
            self.options.from_guest.take(count as u64).await;
            filled += count;
            let used = match self.options.framing {
                Framing::LengthPrefixed => self.take_prefixed(&buffer[..filled], &mut touched)?,
                Framing::OnePerCall => {
                    self.take_frame(&buffer[..filled], &mut touched);
                    filled
                }
                Framing::OnePerCallWithVnetHeader => {
                    self.take_frame(buffer[..filled].get(VNET_HEADER..).unwrap_or(&[]), &mut touched);
                    filled
                }
            };
            buffer.copy_within(used..filled, 0);
            filled -= used;
            for flow in touched.drain(..) {
                self.contain(&flow, Flow::drive);
            }
        }
    }

    /// Takes all whole frames and returns their length.
    fn take_prefixed(self: &Arc<Self>, bytes: &[u8], touched: &mut Vec<Arc<Flow>>) -> io::Result<usize> {
        let mut used = 0;
        while let Some((prefix, rest)) = bytes[used..].split_first_chunk::<4>() {
            let length = u32::from_be_bytes(*prefix) as usize;
            if length > MAX_FRAME {
                let problem = format!("the guest's link sent a frame of {length} bytes; at most {MAX_FRAME} are taken");
                return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
            }
            let Some(frame) = rest.get(..length) else { break };
            self.take_frame(frame, touched);
            used += 4 + length;
        }
        Ok(used)
    }

    fn take_frame(self: &Arc<Self>, bytes: &[u8], touched: &mut Vec<Arc<Flow>>) {
        match frame::parse(bytes) {
            Frame::Tcp(segment) => {
                self.learn_mac(bytes);
                self.take_segment(&segment, touched);
            }
            Frame::Udp(datagram) if datagram.to_port == 53 => {
                self.learn_mac(bytes);
                self.guard.dns(self, &datagram);
            }
            Frame::Udp(datagram) => {
                self.learn_mac(bytes);
                if !self.guard.udp(self, &datagram) {
                    self.refuse_udp(datagram.to, datagram.packet);
                }
            }
            Frame::Echo { to, message } => {
                if to == GATEWAY_ADDRESS || self.guard.echo(to) {
                    self.outbox.push_bytes(frame::echo_reply(self.guest_mac(), to, message));
                }
            }
            Frame::ArpRequest { sender_mac, target } => {
                self.learn_mac(bytes);
                self.outbox.push_bytes(frame::arp_reply(sender_mac, target));
            }
            Frame::Dropped(cause) => self.drops.count(cause),
        }
    }

    fn learn_mac(&self, frame: &[u8]) {
        // Answers go to one station; a guest that claims a group address confuses itself only.
        if let Some(mac) = frame::source_mac(frame).filter(|mac| mac[0] & 1 == 0) {
            self.guest_mac.store(mac_to_u64(mac), Ordering::Relaxed);
        }
    }

    fn take_segment(self: &Arc<Self>, segment: &Segment<'_>, touched: &mut Vec<Arc<Flow>>) {
        let key = FlowKey { guest_port: segment.from_port, address: segment.to, port: segment.to_port };
        // Segments come in runs of one flow.
        let known = touched.last().filter(|flow| flow.key == key).cloned();
        let known = known.or_else(|| self.flows_lock().by_key.get(&key).cloned());
        let is_syn = segment.flags & (flags::SYN | flags::ACK | flags::RST) == flags::SYN;
        let flow = match known {
            Some(flow) if !(is_syn && flow.is_lingering()) => flow,
            Some(old) => {
                old.forget(self);
                match self.admit(key, segment) {
                    Some(flow) => flow,
                    None => return,
                }
            }
            None if is_syn => match self.admit(key, segment) {
                Some(flow) => flow,
                None => return,
            },
            None => return self.refuse(segment),
        };
        if !self.contain(&flow, |flow| flow.take(self, segment.packet)) {
            return self.refuse(segment);
        }
        if touched.last().is_none_or(|last| !Arc::ptr_eq(last, &flow)) {
            touched.push(flow);
        }
    }

    /// A fault in the stack ends the flow it happened in and no other.
    fn contain(self: &Arc<Self>, flow: &Arc<Flow>, work: impl FnOnce(&Arc<Flow>)) -> bool {
        let done = catch_unwind(AssertUnwindSafe(|| work(flow))).is_ok();
        if !done {
            tracing::error!(flow = flow.id, "the TCP stack failed on a flow of a guest; the flow is gone");
            flow.forget(self);
        }
        done
    }

    fn refuse(&self, segment: &Segment<'_>) {
        if let Some(reset) = frame::reset(self.guest_mac(), segment) {
            self.outbox.push_bytes(reset);
        }
    }

    /// Asks the guard about a SYN and answers it when there is no flow to come.
    fn admit(self: &Arc<Self>, key: FlowKey, segment: &Segment<'_>) -> Option<Arc<Flow>> {
        if self.half_open_count() >= self.options.max_half_open {
            return None;
        }
        if self.flow_count() >= self.options.max_flows {
            self.guard.full(key);
            self.refuse(segment);
            return None;
        }
        match self.guard.syn(key) {
            Syn::Ignore => None,
            Syn::Refuse => {
                self.refuse(segment);
                None
            }
            Syn::Accept { hold, facts } => self.open(key, facts, &Start::Listen { hold }).ok(),
        }
    }

    fn open(self: &Arc<Self>, key: FlowKey, facts: FlowFacts, start: &Start) -> io::Result<Arc<Flow>> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let flow = Arc::new(Flow::new(id, key, self, facts, start)?);
        {
            let mut flows = self.flows_lock();
            if flows.ended {
                return Err(io::ErrorKind::NotConnected.into());
            }
            self.half_open.fetch_add(1, Ordering::Relaxed);
            flows.by_key.insert(key, Arc::clone(&flow));
        }
        if matches!(start, Start::Listen { hold: true }) {
            self.guard.serve(FlowStream::new(Arc::clone(&flow)));
        }
        Ok(flow)
    }

    /// Opens a connection to a port of the guest.
    pub(crate) async fn connect(self: &Arc<Self>, port: u16) -> io::Result<FlowStream> {
        let stream = {
            let mut tries = 0..(u16::MAX - FIRST_INBOUND_PORT);
            let key = tries.find_map(|_| {
                let next = self.next_id.fetch_add(1, Ordering::Relaxed);
                let local = FIRST_INBOUND_PORT + (next % u64::from(u16::MAX - FIRST_INBOUND_PORT)) as u16;
                let key = FlowKey { guest_port: port, address: GATEWAY_ADDRESS, port: local };
                (!self.flows_lock().by_key.contains_key(&key)).then_some(key)
            });
            let key = key.ok_or_else(|| io::Error::from(io::ErrorKind::AddrInUse))?;
            let facts = FlowFacts::new(None, Mode::Inbound);
            FlowStream::new(self.open(key, facts, &Start::Connect)?)
        };
        stream.flow().drive();
        stream.established().await?;
        Ok(stream)
    }

    /// Does what driving a flow asked for. Not called with the flow's lock.
    pub(super) fn after(self: &Arc<Self>, flow: &Arc<Flow>, driven: Driven) {
        if driven.opened {
            self.half_open.fetch_sub(1, Ordering::Relaxed);
        }
        if driven.serve {
            self.guard.serve(FlowStream::new(Arc::clone(flow)));
        }
        if driven.gone {
            let mut flows = self.flows_lock();
            if flows.by_key.get(&flow.key).is_some_and(|current| Arc::ptr_eq(current, flow)) {
                flows.by_key.remove(&flow.key);
            }
            drop(flows);
            self.guard.ended(flow);
        }
    }

    async fn write(self: Arc<Self>, mut writer: impl AsyncWrite + Unpin) -> io::Result<()> {
        let mut taken = Vec::with_capacity(WRITE_FRAMES);
        loop {
            self.outbox.take(&mut taken, WRITE_FRAMES).await;
            let bytes = taken.iter().map(|frame| frame.bytes().len() as u64).sum();
            self.options.to_guest.take(bytes).await;
            self.bytes_to_guest.fetch_add(bytes, Ordering::Relaxed);
            match self.options.framing {
                Framing::LengthPrefixed => write_prefixed(&mut writer, &taken).await?,
                Framing::OnePerCall => {
                    for frame in &taken {
                        writer.write_all(frame.bytes()).await?;
                    }
                }
                Framing::OnePerCallWithVnetHeader => {
                    for frame in &taken {
                        let header = vnet_header(frame.bytes());
                        let parts = [IoSlice::new(&header), IoSlice::new(frame.bytes())];
                        // A device takes a frame as a whole.
                        let count = writer.write_vectored(&parts).await?;
                        debug_assert_eq!(count, VNET_HEADER + frame.bytes().len());
                    }
                }
            }
            self.outbox.written(&mut taken);
            while let Some(flow) = self.outbox.next_blocked() {
                self.contain(&flow, Flow::has_room);
            }
        }
    }
}

const VNET_HEADER: usize = 10;

/// Tells the device to fill in the checksum of TCP segments.
fn vnet_header(frame: &[u8]) -> [u8; VNET_HEADER] {
    let mut header = [0; VNET_HEADER];
    if frame.get(12..14) == Some(&[8, 0]) && frame.get(ETHERNET + 9) == Some(&6) {
        const NEEDS_CHECKSUM: u8 = 1;
        header[0] = NEEDS_CHECKSUM;
        header[6..8].copy_from_slice(&((ETHERNET + 20) as u16).to_ne_bytes());
        header[8..10].copy_from_slice(&16_u16.to_ne_bytes());
    }
    header
}

async fn write_prefixed(writer: &mut (impl AsyncWrite + Unpin), frames: &[outbox::Frame]) -> io::Result<()> {
    let lengths: Vec<[u8; 4]> = frames.iter().map(|frame| (frame.bytes().len() as u32).to_be_bytes()).collect();
    let pairs = lengths.iter().zip(frames);
    let mut slices: Vec<IoSlice<'_>> =
        pairs.flat_map(|(length, frame)| [IoSlice::new(length), IoSlice::new(frame.bytes())]).collect();
    let mut rest = slices.as_mut_slice();
    while !rest.is_empty() {
        let count = writer.write_vectored(rest).await?;
        if count == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        IoSlice::advance_slices(&mut rest, count);
    }
    Ok(())
}
