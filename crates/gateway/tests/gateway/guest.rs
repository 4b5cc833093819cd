//! A guest without a machine: frames over a socket pair, TCP by a smoltcp of its own.

use std::{
    collections::VecDeque,
    io,
    net::Ipv4Addr,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Instant as StdInstant,
};

use hickory_proto::{
    op::{Message, OpCode, Query, ResponseCode},
    rr::{DNSClass, Name, RData, RecordType},
};
use smoltcp::{
    iface::{Config, Interface, SocketHandle, SocketSet},
    phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken},
    socket::tcp,
    time::Instant,
    wire::{HardwareAddress, IpAddress, IpCidr},
};
use stockade_gateway::net::{GATEWAY_ADDRESS, GATEWAY_MAC, GUEST_ADDRESS, GUEST_MAC, frame};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf},
    net::UnixStream,
    sync::{broadcast, mpsc},
    task::JoinHandle,
};

#[derive(Default)]
struct Queues {
    rx: VecDeque<Vec<u8>>,
    tx: Vec<Vec<u8>>,
}

struct Rx(Vec<u8>);

impl RxToken for Rx {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

struct Tx<'a>(&'a mut Vec<Vec<u8>>);

impl TxToken for Tx<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut packet = vec![0; len];
        let result = f(&mut packet);
        self.0.push(packet);
        result
    }
}

impl Device for Queues {
    type RxToken<'a> = Rx;
    type TxToken<'a> = Tx<'a>;

    fn receive(&mut self, _: Instant) -> Option<(Rx, Tx<'_>)> {
        let packet = self.rx.pop_front()?;
        Some((Rx(packet), Tx(&mut self.tx)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Tx<'_>> {
        Some(Tx(&mut self.tx))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = 1_500;
        capabilities
    }
}

struct Stack {
    interface: Interface,
    sockets: SocketSet<'static>,
    queues: Queues,
    start: StdInstant,
    next_port: u16,
}

pub struct Guest {
    stack: Arc<Mutex<Stack>>,
    frames: mpsc::UnboundedSender<Vec<u8>>,
    others: broadcast::Sender<Vec<u8>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Guest {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// An Ethernet frame from the guest around an IPv4 packet.
pub fn ethernet(packet: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    frame.extend_from_slice(&GATEWAY_MAC);
    frame.extend_from_slice(&GUEST_MAC);
    frame.extend_from_slice(&[8, 0]);
    frame.extend_from_slice(packet);
    frame
}

/// An IPv4 packet from the guest.
pub fn ipv4(to: Ipv4Addr, protocol: u8, body: &[u8]) -> Vec<u8> {
    ipv4_from(GUEST_ADDRESS, to, protocol, 0, body)
}

pub fn ipv4_from(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, fragment: u16, body: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x45, 0];
    packet.extend_from_slice(&(20 + body.len() as u16).to_be_bytes());
    packet.extend_from_slice(&[0, 0]);
    packet.extend_from_slice(&fragment.to_be_bytes());
    packet.extend_from_slice(&[64, protocol, 0, 0]);
    packet.extend_from_slice(&from.octets());
    packet.extend_from_slice(&to.octets());
    let sum = frame::checksum(&packet, 0);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend_from_slice(body);
    packet
}

pub fn udp(from_port: u16, to: Ipv4Addr, port: u16, data: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    body.extend_from_slice(&from_port.to_be_bytes());
    body.extend_from_slice(&port.to_be_bytes());
    body.extend_from_slice(&(8 + data.len() as u16).to_be_bytes());
    body.extend_from_slice(&[0, 0]);
    body.extend_from_slice(data);
    ipv4(to, 17, &body)
}

/// A TCP segment from the guest, without a valid checksum (the gateway relies on the link).
pub fn tcp_segment(from_port: u16, to: Ipv4Addr, port: u16, flags: u8, options: &[u8], data: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    body.extend_from_slice(&from_port.to_be_bytes());
    body.extend_from_slice(&port.to_be_bytes());
    body.extend_from_slice(&[0, 0, 0, 7, 0, 0, 0, 0]);
    body.extend_from_slice(&[((20 + options.len()) / 4 * 16) as u8, flags, 0xff, 0xff, 0, 0, 0, 0]);
    body.extend_from_slice(options);
    body.extend_from_slice(data);
    ipv4(to, 6, &body)
}

impl Guest {
    pub fn start(link: UnixStream) -> Self {
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = std::process::id().into();
        let mut queues = Queues::default();
        let mut interface = Interface::new(config, &mut queues, Instant::ZERO);
        interface.update_ip_addrs(|list| list.push(IpCidr::new(IpAddress::Ipv4(GUEST_ADDRESS), 30)).unwrap());
        interface.routes_mut().add_default_ipv4_route(GATEWAY_ADDRESS).unwrap();
        let sockets = SocketSet::new(Vec::new());
        let stack = Stack { interface, sockets, queues, start: StdInstant::now(), next_port: 40_000 };
        let stack = Arc::new(Mutex::new(stack));
        let (mut reader, mut writer) = link.into_split();
        let (frames, mut outgoing) = mpsc::unbounded_channel::<Vec<u8>>();
        let (others, _) = broadcast::channel(1_024);
        let mut tasks = vec![tokio::spawn(async move {
            while let Some(frame) = outgoing.recv().await {
                let mut bytes = (frame.len() as u32).to_be_bytes().to_vec();
                bytes.extend_from_slice(&frame);
                if writer.write_all(&bytes).await.is_err() {
                    return;
                }
            }
        })];
        let guest = (Arc::clone(&stack), frames.clone(), others.clone());
        tasks.push(tokio::spawn(async move {
            let (stack, frames, others) = guest;
            while let Ok(length) = reader.read_u32().await {
                let mut frame = vec![0; length as usize];
                if reader.read_exact(&mut frame).await.is_err() {
                    return;
                }
                if frame[12..14] == [8, 0] && frame[14 + 9] == 6 {
                    stack.lock().unwrap().queues.rx.push_back(frame[14..].to_vec());
                    poll(&stack, &frames);
                }
                let _ = others.send(frame);
            }
        }));
        let ticking = (Arc::clone(&stack), frames.clone());
        tasks.push(tokio::spawn(async move {
            loop {
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
                poll(&ticking.0, &ticking.1);
            }
        }));
        Self { stack, frames, others, tasks }
    }

    pub fn send_frame(&self, frame: Vec<u8>) {
        self.frames.send(frame).unwrap();
    }

    pub fn send_packet(&self, packet: &[u8]) {
        self.send_frame(ethernet(packet));
    }

    /// All frames from now on.
    pub fn watch(&self) -> broadcast::Receiver<Vec<u8>> {
        self.others.subscribe()
    }

    /// Sends a frame and waits for one that `wanted` accepts.
    pub async fn exchange(&self, frame: Vec<u8>, wanted: impl Fn(&[u8]) -> bool) -> Vec<u8> {
        let mut seen = self.watch();
        self.send_frame(frame);
        loop {
            let frame = seen.recv().await.unwrap();
            if wanted(&frame) {
                return frame;
            }
        }
    }

    /// Waits until everything sent so far was looked at: pings are answered in order.
    pub async fn settle(&self) {
        static NEXT: std::sync::atomic::AtomicU16 = std::sync::atomic::AtomicU16::new(1);
        let id = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed).to_be_bytes();
        let mut echo = vec![8, 0, 0, 0, 0x7a, 0x7a, id[0], id[1]];
        let sum = frame::checksum(&echo, 0);
        echo[2..4].copy_from_slice(&sum.to_be_bytes());
        let ours =
            move |frame: &[u8]| frame.len() >= 42 && frame[23] == 1 && frame[38..42] == [0x7a, 0x7a, id[0], id[1]];
        self.exchange(ethernet(&ipv4(GATEWAY_ADDRESS, 1, &echo)), ours).await;
    }

    pub async fn ask_packet(&self, server: Ipv4Addr, packet: &[u8]) -> Message {
        let port = {
            let mut stack = self.stack.lock().unwrap();
            stack.take_port()
        };
        let wanted = move |frame: &[u8]| {
            frame.len() > 42
                && frame[23] == 17
                && frame[36..38] == port.to_be_bytes()
                && frame[26..30] == server.octets()
        };
        let frame = self.exchange(ethernet(&udp(port, server, 53, packet)), wanted).await;
        Message::from_vec(&frame[42..]).unwrap()
    }

    pub async fn ask(&self, server: Ipv4Addr, name: &str, kind: RecordType) -> Message {
        self.ask_packet(server, &question(name, kind)).await
    }

    pub async fn resolve(&self, name: &str) -> Result<Ipv4Addr, ResponseCode> {
        let answer = self.ask(GATEWAY_ADDRESS, name, RecordType::A).await;
        let address = answer.answers.iter().find_map(|record| match &record.data {
            RData::A(address) => Some(address.0),
            _ => None,
        });
        address.ok_or(answer.metadata.response_code)
    }

    fn open(&self, start: impl FnOnce(&mut tcp::Socket<'static>, &mut Interface, u16)) -> GuestStream {
        let mut stack = self.stack.lock().unwrap();
        let buffer = || tcp::SocketBuffer::new(vec![0; 64 << 10]);
        let mut socket = tcp::Socket::new(buffer(), buffer());
        socket.set_nagle_enabled(false);
        socket.set_ack_delay(None);
        let port = stack.take_port();
        start(&mut socket, &mut stack.interface, port);
        let handle = stack.sockets.add(socket);
        drop(stack);
        poll(&self.stack, &self.frames);
        GuestStream { stack: Arc::clone(&self.stack), frames: self.frames.clone(), handle }
    }

    /// Connects; an error is the reset a program would see.
    pub async fn connect(&self, to: Ipv4Addr, port: u16) -> io::Result<GuestStream> {
        let stream = self.open(|socket, interface, local| {
            socket.connect(interface.context(), (IpAddress::Ipv4(to), port), local).unwrap();
        });
        stream.established().await?;
        Ok(stream)
    }

    /// Resolves and connects.
    pub async fn connect_name(&self, name: &str, port: u16) -> io::Result<GuestStream> {
        let address = self.resolve(name).await.map_err(|code| io::Error::other(format!("DNS: {code}")))?;
        self.connect(address, port).await
    }

    /// Takes one connection on a port.
    pub fn listen(&self, port: u16) -> GuestStream {
        self.open(|socket, _, _| socket.listen(port).unwrap())
    }
}

pub fn question(name: &str, kind: RecordType) -> Vec<u8> {
    let mut message = Message::new(4_711, hickory_proto::op::MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    let mut query = Query::query(Name::from_ascii(format!("{}.", name.trim_end_matches('.'))).unwrap(), kind);
    query.set_query_class(DNSClass::IN);
    message.add_query(query);
    message.to_vec().unwrap()
}

impl Stack {
    fn take_port(&mut self) -> u16 {
        self.next_port = if self.next_port >= 65_000 { 40_000 } else { self.next_port + 1 };
        self.next_port
    }
}

fn poll(stack: &Mutex<Stack>, frames: &mpsc::UnboundedSender<Vec<u8>>) {
    let mut stack = stack.lock().unwrap();
    let now = Instant::from_micros(stack.start.elapsed().as_micros() as i64);
    let Stack { interface, sockets, queues, .. } = &mut *stack;
    interface.poll(now, queues, sockets);
    for packet in queues.tx.drain(..) {
        let _ = frames.send(ethernet(&packet));
    }
}

pub struct GuestStream {
    stack: Arc<Mutex<Stack>>,
    frames: mpsc::UnboundedSender<Vec<u8>>,
    handle: SocketHandle,
}

impl GuestStream {
    fn with<T>(&self, f: impl FnOnce(&mut tcp::Socket<'static>) -> T) -> T {
        let mut stack = self.stack.lock().unwrap();
        let result = f(stack.sockets.get_mut(self.handle));
        drop(stack);
        poll(&self.stack, &self.frames);
        result
    }

    pub async fn established(&self) -> io::Result<()> {
        std::future::poll_fn(|cx| {
            self.with(|socket| {
                if socket.may_send() {
                    return Poll::Ready(Ok(()));
                }
                if !socket.is_open() {
                    return Poll::Ready(Err(io::ErrorKind::ConnectionRefused.into()));
                }
                socket.register_send_waker(cx.waker());
                Poll::Pending
            })
        })
        .await
    }

    /// Ends it as a killed program's kernel would.
    pub fn reset(&self) {
        self.with(tcp::Socket::abort);
    }
}

impl Drop for GuestStream {
    fn drop(&mut self) {
        // Data in flight is still delivered; the socket stays in the set, which a test can afford.
        self.with(tcp::Socket::close);
    }
}

impl AsyncRead for GuestStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.with(|socket| {
            if socket.can_recv() {
                let read = socket.recv(|bytes| {
                    let count = bytes.len().min(buf.remaining());
                    buf.put_slice(&bytes[..count]);
                    (count, ())
                });
                return Poll::Ready(read.map_err(|_| io::ErrorKind::ConnectionReset.into()));
            }
            if socket.may_recv() {
                socket.register_recv_waker(cx.waker());
                return Poll::Pending;
            }
            match socket.recv(|_| (0, ())) {
                Err(tcp::RecvError::Finished) => Poll::Ready(Ok(())),
                _ => Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
            }
        })
    }
}

impl AsyncWrite for GuestStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.with(|socket| {
            if !socket.may_send() {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            match socket.send_slice(buf) {
                Ok(0) => {
                    socket.register_send_waker(cx.waker());
                    Poll::Pending
                }
                Ok(count) => Poll::Ready(Ok(count)),
                Err(_) => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
            }
        })
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.with(tcp::Socket::close);
        Poll::Ready(Ok(()))
    }
}
