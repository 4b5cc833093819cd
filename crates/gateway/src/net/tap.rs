//! TAP devices as links, for guests that share the host's kernel: made inside the guest's network namespace, handed
//! out as a descriptor, attached with [`super::Framing::OnePerCallWithVnetHeader`].

use std::{
    fs::{File, OpenOptions},
    io::{self, IoSlice, Read, Write},
    os::fd::{AsRawFd, OwnedFd},
    pin::Pin,
    process::Command,
    sync::Arc,
    task::{Context, Poll, ready},
};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, unix::AsyncFd};

use super::{GATEWAY_ADDRESS, GUEST_ADDRESS, GUEST_MAC, MTU, PREFIX_LENGTH};

/// Makes a TAP device in the network namespace of the calling thread. Its kernel may leave checksums undone, since
/// the gateway does not look at them.
pub fn open(name: &str) -> io::Result<OwnedFd> {
    const IFREQ: usize = 40;
    const FLAGS_AT: usize = 16;
    const TUN_F_CSUM: libc::c_ulong = 1;
    let bytes = name.as_bytes();
    if bytes.is_empty() || bytes.len() >= FLAGS_AT {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{name:?} is no name for a device")));
    }
    let tap = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    let mut request = [0_u8; IFREQ];
    request[..bytes.len()].copy_from_slice(bytes);
    let flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as u16;
    request[FLAGS_AT..FLAGS_AT + 2].copy_from_slice(&flags.to_ne_bytes());
    // SAFETY: TUNSETIFF reads and writes one `ifreq`, which is 40 bytes long.
    if unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETIFF as _, request.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: TUNSETOFFLOAD takes its argument by value.
    if unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETOFFLOAD as _, TUN_F_CSUM) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(tap.into())
}

/// Makes a TAP device `eth0` in the network namespace of the calling thread and gives the namespace what a guest has:
/// the guest's addresses, and the gateway as the only way out. Needs the program `ip`.
pub fn open_as_guest() -> io::Result<OwnedFd> {
    let device = open("eth0")?;
    let mac: Vec<String> = GUEST_MAC.iter().map(|byte| format!("{byte:02x}")).collect();
    for line in [
        format!("link set eth0 address {} mtu {MTU} up", mac.join(":")),
        format!("address add {GUEST_ADDRESS}/{PREFIX_LENGTH} dev eth0"),
        format!("route add default via {GATEWAY_ADDRESS}"),
        "link set lo up".to_owned(),
    ] {
        let status = Command::new("ip").args(line.split(' ')).status()?;
        if !status.success() {
            return Err(io::Error::other(format!("ip {line}: {status}")));
        }
    }
    Ok(device)
}

/// One half of a TAP device.
#[derive(Debug)]
pub struct Tap(Arc<AsyncFd<File>>);

/// Both halves of a TAP device, to be called within a runtime.
pub fn split(tap: OwnedFd) -> io::Result<(Tap, Tap)> {
    fcntl(&tap, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    // SAFETY: the file owns its descriptor and keeps it for as long as it is registered.
    let tap = Arc::new(unsafe { AsyncFd::register(File::from(tap)) }?);
    Ok((Tap(Arc::clone(&tap)), Tap(tap)))
}

impl AsyncRead for Tap {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            let mut guard = ready!(self.0.poll_read_ready(cx))?;
            if let Ok(read) = guard.try_io(|tap| tap.get_ref().read(buf.initialize_unfilled())) {
                return Poll::Ready(read.map(|count| buf.advance(count)));
            }
        }
    }
}

impl AsyncWrite for Tap {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = ready!(self.0.poll_write_ready(cx))?;
            if let Ok(written) = guard.try_io(|tap| tap.get_ref().write_vectored(parts)) {
                return Poll::Ready(written);
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
