//! Writing to a process: its standard input, or its terminal.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    sync::{Arc, Weak},
};

use http_body_util::BodyExt;
use hyper::body::Incoming;
use stockade_wire::{ErrorBody, ErrorCode};
use tokio::{
    io::unix::AsyncFd,
    sync::{Mutex, watch},
};

use crate::failure::{Result, failed, invalid};

/// The writing end; writers take turns, one request at a time.
pub(super) enum Input {
    /// There never was one.
    None,
    /// A pipe; empty once closed.
    Pipe(Mutex<Option<AsyncFd<OwnedFd>>>),
    /// The terminal's other side; gone with the process (the pump holds it).
    Terminal(Mutex<()>, Weak<AsyncFd<OwnedFd>>),
}

impl Input {
    /// Writes a body as the process takes it. Ends early when the process does.
    pub(super) async fn write(&self, body: Incoming, close: bool, ended: watch::Receiver<bool>) -> Result<()> {
        match self {
            Self::None => Err(closed()),
            Self::Pipe(pipe) => {
                let mut pipe = pipe.lock().await;
                let result = match pipe.as_ref() {
                    Some(fd) => write_body(fd, body, ended).await,
                    None => Err(closed()),
                };
                let is_broken = result.as_ref().is_err_and(|error| error.code == ErrorCode::StdinClosed);
                if close || is_broken {
                    *pipe = None;
                }
                result
            }
            Self::Terminal(..) if close => {
                Err(invalid("a terminal's input cannot be closed: write the end-of-file character (0x04) instead"))
            }
            Self::Terminal(turn, fd) => {
                let _turn = turn.lock().await;
                let fd = fd.upgrade().ok_or_else(closed)?;
                write_body(&fd, body, ended).await
            }
        }
    }

    /// The terminal, if there is one.
    pub(super) fn terminal(&self) -> Option<Arc<AsyncFd<OwnedFd>>> {
        match self {
            Self::Terminal(_, fd) => fd.upgrade(),
            _ => None,
        }
    }

    /// The process has ended: nobody will read what could still be written.
    pub(super) fn close(&self) {
        if let Self::Pipe(pipe) = self
            && let Ok(mut pipe) = pipe.try_lock()
        {
            *pipe = None;
        }
    }
}

fn closed() -> ErrorBody {
    ErrorBody::new(ErrorCode::StdinClosed, "the process has no open input")
}

async fn write_body(fd: &AsyncFd<OwnedFd>, mut body: Incoming, mut ended: watch::Receiver<bool>) -> Result<()> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| invalid(format!("input broke off: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        tokio::select! {
            biased;
            result = write_all(fd, &data) => result?,
            _ = ended.wait_for(|ended| *ended) => return Err(closed()),
        }
    }
    Ok(())
}

async fn write_all(fd: &AsyncFd<OwnedFd>, mut bytes: &[u8]) -> Result<()> {
    while !bytes.is_empty() {
        let mut guard = fd.writable().await.map_err(failed("wait for the process"))?;
        let attempt = guard.try_io(|fd| {
            // SAFETY: pointer and length are those of a live slice.
            let written = unsafe { libc::write(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len()) };
            if written < 0 { Err(io::Error::last_os_error()) } else { Ok(written as usize) }
        });
        match attempt {
            Ok(Ok(written)) => bytes = &bytes[written..],
            Ok(Err(error)) if matches!(error.raw_os_error(), Some(libc::EPIPE | libc::EIO)) => return Err(closed()),
            Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(Err(error)) => return Err(failed("write to the process")(error)),
            Err(_would_block) => {}
        }
    }
    Ok(())
}
