//! Servers and clients at both ends of what is measured.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection, StreamOwned, pki_types::ServerName};

const BLOCK: usize = 128 << 10;
/// Thousands of these wait for a byte.
const STACK: usize = 64 << 10;

/// In the place of a kind: see [`hold`].
const FORGET: u8 = b'f';

/// What a plain server does with a connection: its first byte says.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    Down,
    Up,
    Echo,
}

impl Kind {
    fn byte(self) -> u8 {
        match self {
            Self::Down => b'd',
            Self::Up => b'u',
            Self::Echo => b'e',
        }
    }
}

/// A server that sends, takes or returns bytes; its port.
pub(super) fn serve() -> io::Result<u16> {
    listen(serve_one)
}

/// An HTTPS server that answers `/N` with N bytes; its port.
pub(super) fn serve_tls(config: Arc<ServerConfig>) -> io::Result<u16> {
    listen(move |stream| serve_one_tls(stream, Arc::clone(&config)))
}

fn listen(serve: impl Fn(TcpStream) -> io::Result<()> + Clone + Send + 'static) -> io::Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let serve = serve.clone();
            // A client that ends its measurement breaks off.
            drop(thread::Builder::new().stack_size(4 * STACK).spawn(move || drop(serve(stream))));
        }
    });
    Ok(port)
}

/// A server that returns a connection's first byte and keeps it, with no thread for each, until it is told to forget them;
/// its port.
pub(super) fn hold() -> io::Result<u16> {
    let (bound, port) = mpsc::channel();
    thread::spawn(move || {
        let listen = || {
            own_descriptors()?;
            let listener = TcpListener::bind("127.0.0.1:0")?;
            Ok((listener.local_addr()?.port(), listener))
        };
        match listen() {
            Ok((port, listener)) => {
                drop(bound.send(Ok(port)));
                hold_all(&listener);
            }
            Err(error) => drop(bound.send(Err(error))),
        }
    });
    port.recv().map_err(io::Error::other)?
}

fn hold_all(listener: &TcpListener) {
    let mut held = Vec::new();
    for mut stream in listener.incoming().flatten() {
        let mut kind = [0];
        if stream.read_exact(&mut kind).and_then(|()| stream.write_all(&kind)).is_err() {
            continue;
        }
        held.push(stream);
        if kind[0] == FORGET {
            held.clear();
        }
    }
}

/// Gives this thread, and those it starts, a table of descriptors of their own with the standard ones alone in it. How
/// many may be open is counted in each table.
pub(super) fn own_descriptors() -> io::Result<()> {
    let (first, last) = (3 as libc::c_uint, libc::c_uint::MAX);
    // SAFETY: no pointers are involved, and what is closed are copies that nothing in the new table's threads knows of.
    let done = unsafe { libc::syscall(libc::SYS_close_range, first, last, libc::CLOSE_RANGE_UNSHARE) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Has a server that holds connections close them.
pub(super) fn forget(to: SocketAddr) -> io::Result<()> {
    let mut stream = TcpStream::connect(to)?;
    stream.write_all(&[FORGET])?;
    // It closes this one as well, after all the others.
    stream.read_to_end(&mut Vec::new()).map(drop)
}

fn serve_one(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut kind = [0];
    stream.read_exact(&mut kind)?;
    if kind[0] == Kind::Down.byte() {
        let block = vec![7; BLOCK];
        loop {
            stream.write_all(&block)?;
        }
    }
    if kind[0] == Kind::Up.byte() {
        let mut block = vec![0; BLOCK];
        while stream.read(&mut block)? > 0 {}
        return Ok(());
    }
    let mut block = [0; 1_024];
    loop {
        let count = stream.read(&mut block)?;
        if count == 0 {
            return Ok(());
        }
        stream.write_all(&block[..count])?;
    }
}

fn serve_one_tls(stream: TcpStream, config: Arc<ServerConfig>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let connection = ServerConnection::new(config).map_err(io::Error::other)?;
    let mut stream = BufReader::new(StreamOwned::new(connection, stream));
    loop {
        let (mut first, mut line) = (String::new(), String::new());
        stream.read_line(&mut first)?;
        while line != "\r\n" {
            line.clear();
            if stream.read_line(&mut line)? == 0 {
                return Ok(());
            }
        }
        let count = first.split(' ').nth(1).and_then(|path| path.trim_start_matches('/').parse::<usize>().ok());
        let count = count.ok_or_else(|| io::Error::other("the path is no number"))?;
        let out = stream.get_mut();
        write!(out, "HTTP/1.1 200 OK\r\ncontent-length: {count}\r\n\r\n")?;
        let block = vec![7; BLOCK];
        let mut left = count;
        while left > 0 {
            let now = left.min(BLOCK);
            out.write_all(&block[..now])?;
            left -= now;
        }
        out.flush()?;
    }
}

/// A connection to a plain server.
pub(super) fn open(to: SocketAddr, kind: Kind) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(to)?;
    stream.set_nodelay(true)?;
    stream.write_all(&[kind.byte()])?;
    Ok(stream)
}

/// Bytes there and back.
pub(super) fn ping(stream: &mut TcpStream, count: usize) -> io::Result<()> {
    let mut block = vec![1; count];
    stream.write_all(&block)?;
    stream.read_exact(&mut block)
}

/// Gbit/s over some flows, after a warm-up of a fifth of the time.
pub(super) fn bulk(to: SocketAddr, kind: Kind, flows: usize, time: Duration) -> io::Result<f64> {
    let (count, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let mut threads = Vec::with_capacity(flows);
    for _ in 0..flows {
        let mut stream = open(to, kind)?;
        let (count, stop) = (Arc::clone(&count), Arc::clone(&stop));
        threads.push(thread::spawn(move || -> io::Result<()> {
            let mut block = vec![7; BLOCK];
            while !stop.load(Ordering::Relaxed) {
                let moved = if kind == Kind::Down { stream.read(&mut block)? } else { stream.write(&block)? };
                count.fetch_add(moved as u64, Ordering::Relaxed);
            }
            Ok(())
        }));
    }
    thread::sleep(time / 5);
    let (before, start) = (count.load(Ordering::Relaxed), Instant::now());
    thread::sleep(time);
    let bytes = count.load(Ordering::Relaxed) - before;
    let rate = bytes as f64 * 8.0 / start.elapsed().as_secs_f64() / 1e9;
    stop.store(true, Ordering::Relaxed);
    for thread in threads {
        thread.join().map_err(|_| io::Error::other("a client thread panicked"))??;
    }
    Ok(rate)
}

/// Downloads over TLS: milliseconds from connecting to the first byte of the answer, and MB/s of the rest.
pub(super) fn fetch(to: SocketAddr, name: &str, tls: Arc<ClientConfig>, count: usize) -> io::Result<(f64, f64)> {
    let start = Instant::now();
    let stream = TcpStream::connect(to)?;
    stream.set_nodelay(true)?;
    let server = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
    let connection = ClientConnection::new(tls, server).map_err(io::Error::other)?;
    let mut stream = StreamOwned::new(connection, stream);
    write!(stream, "GET /{count} HTTP/1.1\r\nhost: {name}\r\n\r\n")?;
    stream.flush()?;
    let mut reader = BufReader::with_capacity(BLOCK, stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let first = start.elapsed().as_secs_f64() * 1e3;
    if !line.starts_with("HTTP/1.1 200") {
        return Err(io::Error::other(format!("answered with {}", line.trim())));
    }
    while line != "\r\n" {
        line.clear();
        reader.read_line(&mut line)?;
    }
    let start = Instant::now();
    let mut block = vec![0; BLOCK];
    let mut left = count;
    while left > 0 {
        let read = reader.read(&mut block)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        left = left.saturating_sub(read);
    }
    Ok((first, count as f64 / 1e6 / start.elapsed().as_secs_f64()))
}
