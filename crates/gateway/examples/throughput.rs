//! What the gateway costs: bytes per second, round trips, new connections and many flows, from a Linux network
//! namespace behind a TAP device, each beside the same client and server without a gateway between them.
//!
//! ```text
//! cargo run --release -p stockade-gateway --example throughput [seconds]      (as root: makes a namespace)
//!
//! client threads ── kernel TCP ── TAP ══ gateway ── loopback ── server threads      "gateway"
//! client threads ───────────────────── loopback ─────────────── server threads      "direct"
//! ```
#![allow(clippy::unwrap_used, reason = "a measuring tool stops at the first error")]

use std::{
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    os::fd::OwnedFd,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use stockade_gateway::{
    AttachSpec, Attachment, BoxIo, CertificateAuthority, Dialer, Framing, Gateway, GatewayConfig,
    net::{GATEWAY_ADDRESS, GUEST_ADDRESS, GUEST_MAC, MTU, PREFIX_LENGTH, tap},
};
use stockade_model::SandboxId;

const PUBLIC: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 34);
const BLOCK: usize = 128 << 10;
const DOWN: u8 = b'd';
const UP: u8 = b'u';
const ECHO: u8 = b'e';

struct ToLoopback(u16);

#[async_trait]
impl Dialer for ToLoopback {
    async fn dial(&self, _address: SocketAddr) -> io::Result<BoxIo> {
        let stream = tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, self.0)).await?;
        stream.set_nodelay(true)?;
        Ok(Box::new(stream))
    }
}

/// Moves the calling thread (and those it starts) into a namespace of its own and makes its only way out.
fn enter_namespace() -> OwnedFd {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    let tap = tap::open("eth0").unwrap();
    let mac: Vec<String> = GUEST_MAC.iter().map(|byte| format!("{byte:02x}")).collect();
    for line in [
        format!("link set eth0 address {} mtu {MTU} up", mac.join(":")),
        format!("address add {GUEST_ADDRESS}/{PREFIX_LENGTH} dev eth0"),
        format!("route add default via {GATEWAY_ADDRESS}"),
        "link set lo up".to_owned(),
    ] {
        assert!(Command::new("ip").args(line.split(' ')).status().unwrap().success(), "ip {line}");
    }
    tap
}

/// A server that sends, takes or returns bytes, as the first byte says.
fn serve() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let builder = thread::Builder::new().stack_size(64 << 10);
            builder.spawn(move || drop(serve_one(stream.unwrap()))).unwrap();
        }
    });
    port
}

fn serve_one(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut kind = [0];
    stream.read_exact(&mut kind)?;
    match kind[0] {
        DOWN => {
            let block = vec![7; BLOCK];
            loop {
                stream.write_all(&block)?;
            }
        }
        UP => {
            let mut block = vec![0; BLOCK];
            while stream.read(&mut block)? > 0 {}
            Ok(())
        }
        _ => {
            let mut block = [0; 1_024];
            loop {
                let count = stream.read(&mut block)?;
                if count == 0 {
                    return Ok(());
                }
                stream.write_all(&block[..count])?;
            }
        }
    }
}

fn open(to: SocketAddr, kind: u8) -> TcpStream {
    let mut stream = TcpStream::connect(to).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.write_all(&[kind]).unwrap();
    stream
}

/// Gbit/s over some flows, after a warm-up of a fifth of the time.
fn bulk(to: SocketAddr, kind: u8, flows: usize, time: Duration) -> f64 {
    let (count, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let threads: Vec<_> = (0..flows)
        .map(|_| {
            let (count, stop) = (Arc::clone(&count), Arc::clone(&stop));
            thread::spawn(move || {
                let mut stream = open(to, kind);
                let mut block = vec![7; BLOCK];
                while !stop.load(Ordering::Relaxed) {
                    let moved = if kind == DOWN { stream.read(&mut block) } else { stream.write(&block) };
                    count.fetch_add(moved.unwrap() as u64, Ordering::Relaxed);
                }
            })
        })
        .collect();
    thread::sleep(time / 5);
    let (before, start) = (count.load(Ordering::Relaxed), Instant::now());
    thread::sleep(time);
    let bytes = count.load(Ordering::Relaxed) - before;
    let rate = bytes as f64 * 8.0 / start.elapsed().as_secs_f64() / 1e9;
    stop.store(true, Ordering::Relaxed);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    rate
}

fn median(mut samples: Vec<Duration>) -> f64 {
    samples.sort();
    samples[samples.len() / 2].as_secs_f64() * 1e6
}

/// Microseconds for 64 bytes there and back.
fn round_trip(to: SocketAddr) -> f64 {
    let mut stream = open(to, ECHO);
    let mut block = [1; 64];
    let sample = |_| {
        let start = Instant::now();
        stream.write_all(&block).unwrap();
        stream.read_exact(&mut block).unwrap();
        start.elapsed()
    };
    median((0..3_000).map(sample).collect())
}

/// Microseconds to connect and get one byte back.
fn connect(to: SocketAddr) -> f64 {
    let sample = |_| {
        let start = Instant::now();
        let mut stream = open(to, ECHO);
        stream.write_all(&[1]).unwrap();
        stream.read_exact(&mut [0]).unwrap();
        start.elapsed()
    };
    median((0..500).map(sample).collect())
}

fn resident_mib() -> f64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<f64>().unwrap() * 4_096.0 / (1 << 20) as f64
}

fn row(name: &str, direct: f64, gateway: f64, unit: &str) {
    println!("| {name} | {direct:.2} | {gateway:.2} | {unit} |");
}

fn measure(direct: SocketAddr, gateway: SocketAddr, time: Duration, into_direct: &dyn Fn(Job) -> f64) {
    println!("| measure | direct | gateway | unit |\n|---|---|---|---|");
    for (name, kind, flows) in
        [("1 flow down", DOWN, 1), ("1 flow up", UP, 1), ("8 flows down", DOWN, 8), ("8 flows up", UP, 8)]
    {
        let plain = into_direct(Box::new(move || bulk(direct, kind, flows, time)));
        row(name, plain, bulk(gateway, kind, flows, time), "Gbit/s");
    }
    row("64 B round trip, median", into_direct(Box::new(move || round_trip(direct))), round_trip(gateway), "us");
    row("connect + 1 B, median", into_direct(Box::new(move || connect(direct))), connect(gateway), "us");
    let before = resident_mib();
    let start = Instant::now();
    let mut idle: Vec<TcpStream> = (0..2_000).map(|_| open(gateway, ECHO)).collect();
    let opened = start.elapsed();
    for stream in &mut idle {
        stream.write_all(&[1]).unwrap();
        stream.read_exact(&mut [0]).unwrap();
    }
    println!("2,000 flows opened at {:.0} per second", 2_000.0 / opened.as_secs_f64());
    println!(
        "resident memory of gateway, 2,000 client and 2,000 server threads' ends: {before:.0} -> {:.0} MiB",
        resident_mib()
    );
    println!("with 2,000 idle flows: 1 flow down {:.2} Gbit/s", bulk(gateway, DOWN, 1, time));
    println!("with 2,000 idle flows: 64 B round trip {:.0} us", round_trip(gateway));
}

type Job = Box<dyn FnOnce() -> f64 + Send>;

fn main() {
    let seconds = std::env::args().nth(1).map_or(2.0, |text| text.parse().unwrap());
    let time = Duration::from_secs_f64(seconds);
    // Three descriptors per flow: the client's, the gateway's and the server's.
    let (_, most) = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap();
    nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE, most, most).unwrap();
    let port = serve();
    let (send_tap, tap) = mpsc::channel();
    let (send_ready, is_ready) = mpsc::channel::<()>();
    let (send_job, jobs) = mpsc::channel::<(Job, mpsc::Sender<f64>)>();
    // Threads inherit the namespace of the one that starts them: jobs on the host run in this one's children.
    thread::spawn(move || {
        for (job, answer) in jobs {
            answer.send(job()).unwrap();
        }
    });
    let client = thread::spawn(move || {
        send_tap.send(enter_namespace()).unwrap();
        is_ready.recv().unwrap();
        let on_host = |job: Job| {
            let (answer, answered) = mpsc::channel();
            send_job.send((job, answer)).unwrap();
            answered.recv().unwrap()
        };
        let direct = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
        measure(direct, SocketAddr::new(IpAddr::V4(PUBLIC), 9_000), time, &on_host);
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let _attachment: Attachment = runtime.block_on(async {
        let (certificate, key) = CertificateAuthority::generate("measured").unwrap();
        let authority = CertificateAuthority::from_pem(&certificate, &key).unwrap();
        let mut config = GatewayConfig::new(authority, rustls::RootCertStore::empty());
        config.dialer = Arc::new(ToLoopback(port));
        let gateway = Gateway::new(config).unwrap();
        let policy = serde_json::from_str(r#"{"default": "allow_public"}"#).unwrap();
        let mut spec = AttachSpec::new(SandboxId::random(), policy);
        spec.framing = Framing::OnePerCallWithVnetHeader;
        spec.limits.new_flows_per_second = 100_000;
        let (reader, writer) = tap::split(tap.recv().unwrap()).unwrap();
        gateway.attach_halves(reader, writer, spec).unwrap()
    });
    send_ready.send(()).unwrap();
    client.join().unwrap();
}
