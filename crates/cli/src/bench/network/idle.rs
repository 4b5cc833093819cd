//! What open flows that do nothing take of the gateway's process.
//!
//! Clients, gateway and server are one process here, but clients and server have tables of descriptors of their own, and
//! neither a thread nor a buffer per connection: what counts is the gateway's.

use std::{
    io::{self, Read as _},
    net::{SocketAddr, TcpStream},
    process,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use nix::sys::resource::{Resource, getrlimit, rlim_t, setrlimit};

use super::{
    super::{report::Measure, server::memory_of},
    ends::{Kind, forget, open, own_descriptors},
    lab::Lab,
};

/// For all that this process has open besides.
const OTHER_FILES: usize = 1_000;
const CLOSE_TIMEOUT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// To be measured before anything else has made the process grow: what it has once had, it would use again.
pub(super) fn memory(lab: &Lab, wanted: usize) -> io::Result<[Measure; 2]> {
    let files = FileLimit::raise(wanted + OTHER_FILES)?;
    let flows = wanted.min(files.allowed.saturating_sub(OTHER_FILES));
    // Whatever the first one needs is not the flows'.
    drop(held(lab, 1)?);
    closed(lab)?;
    let before = private_mib()?;
    let clients = held(lab, flows)?;
    let there = lab.flows();
    if there != flows {
        return Err(io::Error::other(format!("the gateway has {there} flows where {flows} were opened")));
    }
    let mib = private_mib()? - before;
    drop(clients);
    closed(lab)?;
    let name = |what: &str| format!("network, {flows} idle flows: {what}");
    Ok([
        Measure::single(name("private memory of the gateway"), "MiB", mib),
        Measure::single(name("private memory per flow"), "KiB", mib * 1024.0 / flows as f64),
    ])
}

/// Connections that are open as long as this is not dropped.
struct Held {
    _release: mpsc::Sender<()>,
}

fn held(lab: &Lab, count: usize) -> io::Result<Held> {
    let to = lab.idle;
    lab.inside.run(move || {
        let (tell, told) = mpsc::channel();
        let (release, released) = mpsc::channel();
        // It is in the namespace of who starts it.
        thread::spawn(move || match own_descriptors().and_then(|()| open_all(to, count)) {
            Ok(clients) => {
                drop(tell.send(Ok(())));
                // Nothing is ever sent.
                let _ = released.recv();
                drop(clients);
            }
            Err(error) => drop(tell.send(Err(error))),
        });
        told.recv().map_err(io::Error::other)??;
        Ok(Held { _release: release })
    })
}

fn open_all(to: SocketAddr, count: usize) -> io::Result<Vec<TcpStream>> {
    let mut clients = Vec::with_capacity(count);
    for _ in 0..count {
        let mut client = open(to, Kind::Echo)?;
        // It has come through to the server.
        client.read_exact(&mut [0])?;
        clients.push(client);
    }
    Ok(clients)
}

/// Closes the server's ends as well and waits until the gateway has let go of all.
fn closed(lab: &Lab) -> io::Result<()> {
    let to = lab.direct_idle;
    lab.host.run(move || forget(to))?;
    let deadline = Instant::now() + CLOSE_TIMEOUT;
    while lab.flows() > 0 {
        if Instant::now() > deadline {
            return Err(io::Error::other(format!("the gateway still has {} closed flows", lab.flows())));
        }
        thread::sleep(POLL);
    }
    Ok(())
}

fn private_mib() -> io::Result<f64> {
    let pid = i32::try_from(process::id()).map_err(io::Error::other)?;
    memory_of(pid).map(|(private, _)| private).map_err(io::Error::other)
}

/// How many files this process may open, until it is dropped.
struct FileLimit {
    before: (rlim_t, rlim_t),
    allowed: usize,
}

impl FileLimit {
    fn raise(wanted: usize) -> io::Result<Self> {
        let before = getrlimit(Resource::RLIMIT_NOFILE)?;
        let (soft, hard) = (before.0.max(wanted as rlim_t), before.1.max(wanted as rlim_t));
        // Who may not go beyond goes as far as may be.
        let raised = setrlimit(Resource::RLIMIT_NOFILE, soft, hard);
        let soft = if raised.is_ok() { soft } else { soft.min(before.1) };
        if raised.is_err() {
            setrlimit(Resource::RLIMIT_NOFILE, soft, before.1)?;
        }
        Ok(Self { before, allowed: usize::try_from(soft).unwrap_or(usize::MAX) })
    }
}

impl Drop for FileLimit {
    fn drop(&mut self) {
        // Servers and machines that are measured later get what they would have without us.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, self.before.0, self.before.1);
    }
}
