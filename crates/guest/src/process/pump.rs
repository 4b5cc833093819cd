//! Carries a process's output from its pipes or terminal into its log, enforces its time, and sees its end.
//!
//! Order at the end: the main process exits; what is in the pipes at that moment (the kernel says how much)
//! is read; the exit is told. Descendants that still hold the pipes go on writing into a pump that drops
//! what they write, so that they neither block nor die of SIGPIPE.

use std::{
    cell::RefCell,
    future::poll_fn,
    io,
    os::fd::{AsRawFd, OwnedFd},
    sync::Arc,
    task::Poll,
    time::Duration,
};

use stockade_wire::{
    event::{HEADER_BYTES, Output},
    process::Exit,
};
use tokio::{
    io::unix::AsyncFd,
    sync::oneshot,
    time::{Instant, sleep, sleep_until, timeout},
};

use super::Process;

const PIECE: usize = 32 << 10;
/// How long a terminal may take to hand over its last bytes: they travel through a kernel work queue.
const TERMINAL_PATIENCE: Duration = Duration::from_millis(250);
/// Pause of the pump that only drops: bounds what a chatty leftover can make us do to about 6 MB/s a pipe.
const DROP_PAUSE: Duration = Duration::from_millis(10);

thread_local! {
    /// One buffer for all pumps of a thread: filled and copied out without an await between.
    static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; HEADER_BYTES + PIECE]);
}

/// How a child ended, as `waitpid` tells it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Ended {
    Code(i32),
    Signal(i32),
}

/// One descriptor a process writes to.
pub(super) struct Source {
    pub(super) output: Output,
    pub(super) fd: Arc<AsyncFd<OwnedFd>>,
}

/// What one attempt to read gave.
enum Read {
    Bytes(usize),
    Nothing,
    End,
}

/// Runs until the process has ended and nobody writes to its pipes any more.
pub(super) async fn run(
    process: Arc<Process>,
    mut sources: Vec<Source>,
    mut ended: oneshot::Receiver<Ended>,
    time: Option<Duration>,
    on_exit: impl FnOnce() + Send,
) {
    let mut timed_out = false;
    let deadline = sleep_until(time.map_or_else(Instant::now, |time| Instant::now() + time));
    tokio::pin!(deadline);
    let ended = loop {
        let has_room = process.log.has_room();
        tokio::select! {
            biased;
            ended = &mut ended => break ended.unwrap_or(Ended::Signal(libc::SIGKILL)),
            () = &mut deadline, if time.is_some() && !timed_out => {
                timed_out = true;
                process.kill_everything();
            }
            () = process.log.room(), if !has_room => {}
            () = any_readable(&sources), if has_room && !sources.is_empty() => {
                sources.retain(|source| !matches!(read(source, PIECE, &process), Ok(Read::End) | Err(_)));
            }
        }
    };
    for source in &sources {
        read_rest(source, &process).await;
    }
    let exit = match ended {
        Ended::Code(code) => Exit { code: Some(code), ..Exit::default() },
        Ended::Signal(signal) => Exit { signal: Some(signal), ..Exit::default() },
    };
    let is_clean = exit.code == Some(0);
    let out_of_memory = !is_clean && process.was_out_of_memory();
    process.end(Exit { timed_out, out_of_memory, ..exit });
    on_exit();
    sources.retain(|source| source.output != Output::Pty);
    drop_output(sources).await;
}

async fn any_readable(sources: &[Source]) {
    poll_fn(|context| {
        let mut is_any = false;
        for source in sources {
            is_any |= source.fd.poll_read_ready(context).is_ready();
        }
        if is_any { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// Reads once, at most `limit` bytes, into the log.
fn read(source: &Source, limit: usize, process: &Process) -> io::Result<Read> {
    BUFFER.with_borrow_mut(|buffer| {
        let read = read_into(source, &mut buffer[HEADER_BYTES..HEADER_BYTES + limit.min(PIECE)])?;
        if let Read::Bytes(length) = read {
            process.log.append(source.output, &mut buffer[..HEADER_BYTES + length]);
        }
        Ok(read)
    })
}

fn read_into(source: &Source, space: &mut [u8]) -> io::Result<Read> {
    let mut idle = std::task::Context::from_waker(std::task::Waker::noop());
    // SAFETY: pointer and length are those of a live slice.
    let length = unsafe { libc::read(source.fd.as_raw_fd(), space.as_mut_ptr().cast(), space.len()) };
    if length > 0 {
        return Ok(Read::Bytes(length as usize));
    }
    if length == 0 {
        return Ok(Read::End);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN) => {
            if let Poll::Ready(Ok(mut guard)) = source.fd.poll_read_ready(&mut idle) {
                guard.clear_ready();
            }
            Ok(Read::Nothing)
        }
        Some(libc::EINTR) => Ok(Read::Nothing),
        // A terminal nobody has open any more.
        Some(libc::EIO) => Ok(Read::End),
        _ => Err(error),
    }
}

/// After the exit: reads what is there already. The log takes it even if no reader is ready for it.
async fn read_rest(source: &Source, process: &Process) {
    if source.output == Output::Pty {
        let _ = timeout(TERMINAL_PATIENCE, async {
            loop {
                match read(source, PIECE, process) {
                    Ok(Read::Bytes(_)) => {}
                    Ok(Read::Nothing) => {
                        let _ = source.fd.readable().await;
                    }
                    Ok(Read::End) | Err(_) => break,
                }
            }
        })
        .await;
        return;
    }
    let mut waiting: libc::c_int = 0;
    // SAFETY: FIONREAD stores one int.
    unsafe { libc::ioctl(source.fd.as_raw_fd(), libc::FIONREAD, &raw mut waiting) };
    let mut left = waiting.max(0) as usize;
    while left > 0 {
        match read(source, left, process) {
            Ok(Read::Bytes(length)) => left -= length.min(left),
            Ok(Read::Nothing | Read::End) | Err(_) => break,
        }
    }
}

async fn drop_output(mut sources: Vec<Source>) {
    while !sources.is_empty() {
        any_readable(&sources).await;
        let mut is_busy = false;
        sources.retain(|source| {
            BUFFER.with_borrow_mut(|buffer| match read_into(source, buffer) {
                Ok(Read::Bytes(length)) => {
                    is_busy |= length >= PIECE;
                    true
                }
                Ok(Read::Nothing) => true,
                Ok(Read::End) | Err(_) => false,
            })
        });
        if is_busy {
            sleep(DROP_PAUSE).await;
        }
    }
}
