//! The NIC's link: one connection at a time between the emulator and whoever is the machine's gateway.
//!
//! The emulator listens, so that a machine outlives its gateway: while nobody is connected it drops what the guest
//! sends, and takes the next connection as soon as the last one has ended. Nothing moves before somebody connects,
//! and nobody connects before there is a policy.
//!
//! This QEMU writes to an accepted connection as if it could wait: a gateway that reads slowly would halt the
//! processors, the control channel and the guest link. It does cope with a connection that cannot take more, so the
//! connection is made one of those from here.

use std::{
    fs, io,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::net::UnixListener,
    },
    time::Duration,
};

use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::socket::{UnixAddr, getsockname, getsockopt, sockopt::AcceptConn},
};
use tokio::{net::UnixStream, time::Instant};

use super::{
    machine_dir::{MachineDir, NETWORK},
    process::ProcessId,
};
use crate::EngineError;

const INTERVAL: Duration = Duration::from_millis(2);

/// Connects to a machine's NIC.
pub(crate) async fn connect(directory: &MachineDir, emulator: ProcessId, patience: Duration) -> io::Result<UnixStream> {
    let deadline = Instant::now() + patience;
    let stream = loop {
        match directory.try_connect(NETWORK).await {
            // The last connection has just ended and another is in line.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {}
            other => break other?,
        }
        tokio::time::sleep(INTERVAL).await;
    };
    loop {
        let pid = emulator.pid;
        match tokio::task::spawn_blocking(move || never_wait(pid)).await.map_err(io::Error::other)? {
            Ok(true) => return Ok(stream),
            Ok(false) if Instant::now() < deadline => tokio::time::sleep(INTERVAL).await,
            Ok(false) => return Err(io::Error::new(io::ErrorKind::TimedOut, "the emulator does not take it")),
            Err(error) => {
                tracing::warn!(%error, "a slow gateway will slow this machine down");
                return Ok(stream);
            }
        }
    }
}

/// Waits until the emulator listens for the NIC's connection. It sees to that beside everything else; until then it takes
/// what the guest sends (first of all its own announcement of a restored machine) for something to be passed on, and
/// falls over for lack of a connection.
pub(crate) async fn listening(listener: &UnixListener, patience: Duration) -> Result<(), EngineError> {
    let deadline = Instant::now() + patience;
    loop {
        let flags = fcntl(listener, FcntlArg::F_GETFL)
            .map_err(|errno| EngineError::host("look at the NIC's socket")(errno.into()))?;
        // The flag belongs to what all copies of the descriptor stand for; it is the last thing the emulator sets.
        if OFlag::from_bits_retain(flags).contains(OFlag::O_NONBLOCK) {
            return Ok(());
        }
        if Instant::now() >= deadline {
            let detail = format!("it does not listen for its network's connection after {patience:?}");
            return Err(EngineError::Emulator { step: "start", detail });
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Finds the connection in the emulator and has writes to it return at once. `false`: it has not accepted it yet.
fn never_wait(emulator: i32) -> io::Result<bool> {
    // SAFETY: the call takes two integers and gives a descriptor or an error.
    let process = unsafe { libc::syscall(libc::SYS_pidfd_open, emulator, 0) };
    let process = owned(process)?;
    let mut found = false;
    for entry in fs::read_dir(format!("/proc/{emulator}/fd"))? {
        let entry = entry?;
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        // Others may be closed while we look.
        let is_socket = fs::read_link(entry.path()).is_ok_and(|target| target.to_string_lossy().starts_with("socket:"));
        if !is_socket {
            continue;
        }
        // SAFETY: the call takes three integers and gives a descriptor or an error.
        let copy = owned(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) })?;
        if is_network(&copy) {
            // The flag belongs to what both descriptors stand for.
            let flags = OFlag::from_bits_retain(fcntl(&copy, FcntlArg::F_GETFL)?);
            fcntl(&copy, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
            found = true;
        }
    }
    Ok(found)
}

fn owned(descriptor: libc::c_long) -> io::Result<OwnedFd> {
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given it to us.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor as i32) })
}

/// An accepted connection has the name its listener was bound to.
fn is_network(socket: &OwnedFd) -> bool {
    let named = getsockname::<UnixAddr>(socket.as_raw_fd())
        .is_ok_and(|name| name.path().is_some_and(|path| path.file_name().is_some_and(|name| name == NETWORK)));
    named && getsockopt(socket, AcceptConn).is_ok_and(|listens| !listens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_emulator_listens_once_it_has_said_so_and_is_not_waited_for_for_ever() {
        let directory = tempfile::tempdir().expect("a directory");
        let ours = UnixListener::bind(directory.path().join(NETWORK)).expect("bound");
        let late = listening(&ours, Duration::from_millis(20)).await.expect_err("it does not");
        assert!(late.to_string().contains("does not listen"), "{late}");
        let emulators = ours.try_clone().expect("copied");
        let (ready, set) = tokio::join!(listening(&ours, Duration::from_secs(20)), async move {
            tokio::time::sleep(INTERVAL).await;
            emulators.set_nonblocking(true)
        });
        set.expect("set");
        ready.expect("it listens");
    }
}
