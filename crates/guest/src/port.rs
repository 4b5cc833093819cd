//! The link's end in the guest: a named virtio-serial port.
//!
//! While no host is connected the kernel reports a hang-up that never ends, and reads give nothing. A
//! runtime that sees it once takes it for the end of the file and would spin. So the port sits
//! edge-triggered in an epoll instance of its own, and the runtime watches that: it becomes readable once for each change
//! (data, room, connect, disconnect) and a machine nobody talks to does not run at all.
//!
//! Connects and disconnects come on another queue than data, and the kernel may take a while to look at it: in a
//! machine that was halted meanwhile, the new host's hello can be read and answered before the old host's hang-up is
//! seen. So a hang-up ends nothing by itself. It must last; a host that is back says so with a hello.

use std::{
    fs, io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    path::Path,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf, unix::AsyncFd},
    time::{Sleep, sleep},
};

use crate::{failure::check, fd::watched};

const PORTS: &str = "/sys/class/virtio-ports";
/// How long a hang-up must last to be the end of the input. Much longer than the kernel needs from one message on the
/// port's state to the next, also where the host takes the processor away in between.
const HANG_UP_LASTS: Duration = Duration::from_secs(5);

/// An open port.
pub(crate) struct Port {
    port: OwnedFd,
    changes: AsyncFd<OwnedFd>,
    hang_up_lasts: Duration,
    /// Runs while the port is hung up.
    end: Option<Pin<Box<Sleep>>>,
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
        Self::watch(OwnedFd::from(port), HANG_UP_LASTS)
    }

    fn watch(port: OwnedFd, hang_up_lasts: Duration) -> io::Result<Self> {
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
        Ok(Self { port, changes: watched(epoll, Interest::READABLE)?, hang_up_lasts, end: None })
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
            ready!(self.poll_change(context))?;
        }
    }

    fn poll_change(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut guard = ready!(self.changes.poll_read_ready(context))?;
        self.take_changes();
        guard.clear_ready();
        Poll::Ready(Ok(()))
    }

    /// The port is hung up: ready when it has been for so long that this is the end (`true`), or when something has
    /// changed.
    fn poll_hung_up(&mut self, context: &mut Context<'_>) -> Poll<io::Result<bool>> {
        let end = self.end.get_or_insert_with(|| Box::pin(sleep(self.hang_up_lasts)));
        if end.as_mut().poll(context).is_ready() {
            self.end = None;
            return Poll::Ready(Ok(true));
        }
        self.poll_change(context).map_ok(|()| false)
    }
}

impl AsyncRead for Port {
    /// The driver gives at most a page at a time; more of them are taken at once.
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let port = self.get_mut();
        let space = buffer.initialize_unfilled();
        // SAFETY: pointer and length are those of a live slice.
        let read = |fd, space: &mut [u8]| unsafe { libc::read(fd, space.as_mut_ptr().cast(), space.len()) };
        let mut filled = loop {
            let tried = port.poll(context, |fd| read(fd, space));
            if !matches!(tried, Poll::Ready(Ok(0))) {
                port.end = None;
                break ready!(tried)?;
            }
            if ready!(port.poll_hung_up(context))? {
                break 0;
            }
        };
        while filled > 0 && filled < space.len() {
            let more = read(port.port.as_raw_fd(), &mut space[filled..]);
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

#[cfg(test)]
mod tests {
    use std::{fs::File, os::unix::fs::OpenOptionsExt, path::PathBuf};

    use tokio::io::AsyncReadExt;

    use super::*;

    /// A named pipe hangs up and comes back as a port does: while nobody has it open for writing, reads give nothing.
    struct Pipe {
        path: PathBuf,
        _directory: tempfile::TempDir,
    }

    impl Pipe {
        fn new(hang_up_lasts: Duration) -> (Self, Port) {
            let directory = tempfile::tempdir().expect("a directory");
            let path = directory.path().join("port");
            nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).expect("made");
            let reader = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(&path).expect("opened");
            (Self { path, _directory: directory }, Port::watch(reader.into(), hang_up_lasts).expect("watched"))
        }

        fn connect(&self) -> File {
            File::options().write(true).open(&self.path).expect("opened")
        }
    }

    async fn say(host: &mut File, port: &mut Port, word: &[u8]) {
        io::Write::write_all(host, word).expect("written");
        let mut read = vec![0; word.len()];
        port.read_exact(&mut read).await.expect("read");
        assert_eq!(read, word);
    }

    /// Polled while it is hung up; nothing has come of it.
    async fn sees_nothing(port: &mut Port) {
        let mut byte = [0];
        let mut read = Box::pin(port.read(&mut byte));
        for _ in 0..10 {
            assert!(futures::poll!(&mut read).is_pending());
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_host_that_hangs_up_and_is_back_has_not_ended_the_input() {
        let (pipe, mut port) = Pipe::new(Duration::from_secs(3600));
        let mut host = pipe.connect();
        say(&mut host, &mut port, b"one").await;
        for _ in 0..3 {
            drop(host);
            sees_nothing(&mut port).await;
            assert!(port.end.is_some());
            host = pipe.connect();
            say(&mut host, &mut port, b"more").await;
            assert!(port.end.is_none(), "the next hang-up has its own time");
        }
    }

    #[tokio::test]
    async fn a_host_that_stays_away_has_ended_it() {
        let (pipe, mut port) = Pipe::new(Duration::from_millis(1));
        let mut host = pipe.connect();
        say(&mut host, &mut port, b"one").await;
        drop(host);
        assert_eq!(port.read(&mut [0]).await.expect("read"), 0);
        // The next host finds it open.
        let mut host = pipe.connect();
        say(&mut host, &mut port, b"two").await;
    }
}
