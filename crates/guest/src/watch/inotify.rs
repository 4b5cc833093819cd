//! The kernel's side of a watch.

use std::{
    ffi::{CString, OsStr, OsString},
    io,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
    task::Poll,
};

use tokio::io::{Interest, unix::AsyncFd};

use crate::{failure::check, fd::watched};

const BUFFER: usize = 32 << 10;
const HEADER: usize = 16;
/// What is asked for; links are not followed.
const MASK: u32 = libc::IN_CREATE
    | libc::IN_MODIFY
    | libc::IN_DELETE
    | libc::IN_ATTRIB
    | libc::IN_MOVED_FROM
    | libc::IN_MOVED_TO
    | libc::IN_DELETE_SELF
    | libc::IN_MOVE_SELF
    | libc::IN_ONLYDIR
    | libc::IN_EXCL_UNLINK;

/// One event as the kernel tells it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Raw {
    pub(super) watch: i32,
    pub(super) mask: u32,
    pub(super) name: OsString,
}

/// An inotify instance, before and after the runtime knows it.
pub(super) struct Inotify<F> {
    fd: F,
}

impl Inotify<OwnedFd> {
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: the descriptor is new and owned by nothing else.
        let fd = unsafe {
            let fd = check(libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC).into())?;
            OwnedFd::from_raw_fd(fd as RawFd)
        };
        Ok(Self { fd })
    }

    pub(super) fn raw(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    pub(super) fn watched(self) -> io::Result<Inotify<AsyncFd<OwnedFd>>> {
        Ok(Inotify { fd: watched(self.fd, Interest::READABLE)? })
    }
}

impl Inotify<AsyncFd<OwnedFd>> {
    pub(super) async fn readable(&self) {
        let _ = self.fd.readable().await;
    }

    /// What is queued, up to a buffer's worth; `None`: nothing.
    pub(super) fn read(&self) -> io::Result<Option<Vec<Raw>>> {
        let mut buffer = vec![0u8; BUFFER];
        // SAFETY: pointer and length are those of a live buffer.
        let read = unsafe { libc::read(self.fd.as_raw_fd(), buffer.as_mut_ptr().cast(), BUFFER) };
        if read > 0 {
            buffer.truncate(read as usize);
            return Ok(Some(parse(&buffer)));
        }
        let error = io::Error::last_os_error();
        if read < 0 && error.kind() == io::ErrorKind::WouldBlock {
            let mut idle = std::task::Context::from_waker(std::task::Waker::noop());
            if let Poll::Ready(Ok(mut guard)) = self.fd.poll_read_ready(&mut idle) {
                guard.clear_ready();
            }
            return Ok(None);
        }
        Err(error)
    }
}

/// `wd i32, mask u32, cookie u32, len u32, name[len]` with NULs behind the name.
fn parse(mut bytes: &[u8]) -> Vec<Raw> {
    let mut events = Vec::new();
    while bytes.len() >= HEADER {
        let word = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        let end = (HEADER + u32::from_ne_bytes(word(12)) as usize).min(bytes.len());
        let name = bytes[HEADER..end].split(|byte| *byte == 0).next().unwrap_or_default();
        events.push(Raw {
            watch: i32::from_ne_bytes(word(0)),
            mask: u32::from_ne_bytes(word(4)),
            name: OsStr::from_bytes(name).to_owned(),
        });
        bytes = &bytes[end..];
    }
    events
}

/// Watches a directory; watching it again gives the same number.
pub(super) fn add(inotify: RawFd, path: &Path, follow: bool) -> io::Result<i32> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mask = if follow { MASK } else { MASK | libc::IN_DONT_FOLLOW };
    // SAFETY: the path ends with NUL.
    check(unsafe { libc::inotify_add_watch(inotify, path.as_ptr(), mask) }.into()).map(|watch| watch as i32)
}

/// Ends a directory's watch, which may have ended by itself.
pub(super) fn remove(inotify: RawFd, watch: i32) {
    // SAFETY: no preconditions; a number that is no longer a watch is refused.
    unsafe { libc::inotify_rm_watch(inotify, watch) };
}
