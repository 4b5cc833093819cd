//! The link's end in the guest: a named virtio-serial port.
//!
//! While no host is connected the kernel reports a hang-up that never ends, and reads give nothing. A
//! runtime that sees it once takes it for the end of the file and would spin. So the port sits
//! edge-triggered in an epoll instance of its own, and the runtime watches that: it becomes readable once for each change
//! (data, room, connect, disconnect) and a machine nobody talks to does not run at all.

use std::{
    fs, io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    path::Path,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf, unix::AsyncFd};

use crate::{failure::check, fd::watched};

const PORTS: &str = "/sys/class/virtio-ports";

/// An open port.
pub(crate) struct Port {
    port: OwnedFd,
    changes: AsyncFd<OwnedFd>,
}

impl Port {
    /// Opens the port of a name; `None` if the machine has none (yet).
    pub(crate) fn find(name: &str) -> io::Result<Option<Self>> {
        let Ok(ports) = fs::read_dir(PORTS) else { return Ok(None) };
        for port in ports {
            let port = port?;
            let is_ours = fs::read_to_string(port.path().join("name")).is_ok_and(|found| found.trim() == name);
            if is_ours {
                return Self::open(&Path::new("/dev").join(port.file_name())).map(Some);
            }
        }
        Ok(None)
    }

    fn open(path: &Path) -> io::Result<Self> {
        use std::os::unix::fs::OpenOptionsExt;
        let port = fs::OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        let port = OwnedFd::from(port);
        // SAFETY: the descriptor is new and owned by nothing else.
        let epoll = unsafe {
            let epoll = check(libc::epoll_create1(libc::EPOLL_CLOEXEC).into())?;
            OwnedFd::from_raw_fd(epoll as RawFd)
        };
        let mut event = libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLET) as u32, u64: 0 };
        // SAFETY: both descriptors are open and `event` lives over the call.
        let added =
            unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, port.as_raw_fd(), &raw mut event) };
        check(added.into())?;
        Ok(Self { port, changes: watched(epoll, Interest::READABLE)? })
    }

    /// Waits until a host is connected.
    pub(crate) async fn connected(&self) -> io::Result<()> {
        loop {
            let mut state = libc::pollfd { fd: self.port.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one live element.
            check(unsafe { libc::poll(&raw mut state, 1, 0) }.into())?;
            if state.revents & libc::POLLHUP == 0 {
                return Ok(());
            }
            let mut guard = self.changes.readable().await?;
            self.take_changes();
            guard.clear_ready();
        }
    }

    /// Makes the epoll instance quiet until the next change.
    fn take_changes(&self) {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: room for one event; a timeout of 0 never waits.
        unsafe { libc::epoll_wait(self.changes.as_raw_fd(), &raw mut event, 1, 0) };
    }

    /// Tries until it works or there is nothing to do before the next change. A change between the attempt
    /// and the wait leaves the epoll instance readable, so it is not missed. Reader and writer are one task (the session),
    /// which tries both whenever it is woken; so one registration serves both.
    fn poll(&self, context: &mut Context<'_>, mut attempt: impl FnMut(RawFd) -> isize) -> Poll<io::Result<usize>> {
        loop {
            let result = attempt(self.port.as_raw_fd());
            if result >= 0 {
                return Poll::Ready(Ok(result as usize));
            }
            let error = io::Error::last_os_error();
            match error.kind() {
                io::ErrorKind::Interrupted => continue,
                io::ErrorKind::WouldBlock => {}
                _ => return Poll::Ready(Err(error)),
            }
            let mut guard = ready!(self.changes.poll_read_ready(context))?;
            self.take_changes();
            guard.clear_ready();
        }
    }
}

impl AsyncRead for Port {
    /// The driver gives at most a page at a time; more of them are taken at once.
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let space = buffer.initialize_unfilled();
        // SAFETY: pointer and length are those of a live slice.
        let read = |fd, space: &mut [u8]| unsafe { libc::read(fd, space.as_mut_ptr().cast(), space.len()) };
        let mut filled = ready!(self.poll(context, |fd| read(fd, space)))?;
        while filled > 0 && filled < space.len() {
            let more = read(self.port.as_raw_fd(), &mut space[filled..]);
            if more <= 0 {
                break;
            }
            filled += more as usize;
        }
        buffer.advance(filled);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Port {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        // SAFETY: pointer and length are those of a live slice.
        self.poll(context, |fd| unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) })
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
