//! Stands between a running command and our own standard streams until it ends.
//!
//! ```text
//! standard input --thread--> channel --> WebSocket --> command
//! command --> WebSocket --> this loop --channel--> thread --> standard output and error
//! signals, terminal size ----^
//! ```
//!
//! Reading and writing our streams blocks, so each has a thread: a full pipe behind us must not keep us from
//! hearing a Ctrl-C. Both channels are short, so a slow reader slows the command down and nothing piles up.

use std::{
    io::{self, Read as _},
    thread,
    time::Duration,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::{mpsc, oneshot},
    time,
};

use crate::{
    client::{Client, ExecEvent, ExecInput, ExecSession, Exit},
    failure::{Failure, OWN_FAILURE, TIMED_OUT},
    terminal,
    ui::Ui,
};

const READ_BYTES: usize = 32 << 10;
const QUEUED_WRITES: usize = 16;
/// Ctrl-D, twice.
const END_OF_INPUT_KEYS: &[u8] = &[4, 4];
const END_OF_INPUT_EVERY: Duration = Duration::from_millis(500);
/// So many signals are passed on; the next one ends us.
const FORWARDED_SIGNALS: u32 = 2;

/// Whose command it is: what a signal to us means, and what becomes of it when nobody takes its output.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Role {
    /// It has a sandbox of its own: we leave, and the caller ends the sandbox.
    Run,
    /// It was started for us: signals go to it, the third one gives up waiting. It ends with its output.
    Exec,
    /// It is somebody else's: Ctrl-C goes to it, all else detaches.
    Attach,
}

/// What a command gets when its output is lost, and how long it may then take to end.
const HANG_UP: [(i32, Duration); 2] =
    [(libc::SIGHUP, Duration::from_secs(1)), (libc::SIGKILL, Duration::from_secs(10))];

/// How the attendance ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Attended {
    /// The command ended.
    Exited(Exit),
    /// This signal told us to leave.
    Signalled(i32),
    /// Nobody reads our output any more.
    OutputClosed,
}

/// Why our output takes nothing more.
#[derive(Debug)]
pub(super) struct OutputLost {
    stream: Stream,
    error: io::Error,
}

impl OutputLost {
    /// A reader that left has what it wanted; everything else is a failure.
    fn attended(self) -> Result<Attended, Failure> {
        let Self { stream, error } = self;
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Ok(Attended::OutputClosed);
        }
        let name = if stream == Stream::Out { "output" } else { "error" };
        Err(Failure::host(format!("write to standard {name}"), error))
    }

    /// The exit code or failure of a command whose output this was.
    pub(super) fn exit_code(self) -> Result<u8, Failure> {
        self.attended().map(Attended::exit_code)
    }
}

impl Attended {
    /// The exit code that stands for this end.
    pub(super) fn exit_code(self) -> u8 {
        match self {
            Self::Exited(Exit { timed_out: true, .. }) => TIMED_OUT,
            Self::Exited(Exit { signal: Some(signal), .. }) | Self::Signalled(signal) => code_of_signal(signal),
            Self::Exited(Exit { code: Some(code), .. }) => u8::try_from(code).unwrap_or(OWN_FAILURE),
            Self::Exited(_) => OWN_FAILURE,
            Self::OutputClosed => code_of_signal(libc::SIGPIPE),
        }
    }
}

/// The exit code that stands for death by a signal.
pub(super) fn code_of_signal(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(OWN_FAILURE)
}

/// The signals that end programs, heard from now on.
pub(super) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
    quit: Signal,
}

impl Signals {
    pub(super) fn listen() -> Result<Self, Failure> {
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
            hang_up: listen(SignalKind::hangup())?,
            quit: listen(SignalKind::quit())?,
        })
    }

    /// The next one's number. Cancel-safe.
    pub(super) async fn next(&mut self) -> i32 {
        tokio::select! {
            _ = self.interrupt.recv() => libc::SIGINT,
            _ = self.terminate.recv() => libc::SIGTERM,
            _ = self.hang_up.recv() => libc::SIGHUP,
            _ = self.quit.recv() => libc::SIGQUIT,
        }
    }
}

fn listen(kind: SignalKind) -> Result<Signal, Failure> {
    signal(kind).map_err(|error| Failure::host("listen for signals", error))
}

/// Who attends to what.
pub(super) struct Attendance<'a> {
    pub(super) client: &'a Client,
    pub(super) ui: Ui,
    pub(super) sandbox: &'a str,
    /// Pass our standard input on.
    pub(super) stdin: bool,
    /// The command has a terminal of our terminal's size.
    pub(super) tty: bool,
    pub(super) role: Role,
}

impl Attendance<'_> {
    /// Passes everything on until the command ends.
    pub(super) async fn attend(&self, mut session: ExecSession, signals: &mut Signals) -> Result<Attended, Failure> {
        let output = Output::start(self.ui.json);
        let mut resized = listen(SignalKind::window_change())?;
        let mut pid = None;
        let mut signals_heard = 0;
        let exit = loop {
            tokio::select! {
                event = session.next() => match event? {
                    ExecEvent::Started { pid: started } => {
                        pid = Some(started);
                        output.tell(json!({"type": "started", "pid": started})).await;
                        if let (true, Role::Attach, Some(size)) = (self.tty, self.role, terminal::size()) {
                            let _ = session.input().try_send(ExecInput::Resize(size));
                        }
                        if self.stdin {
                            start_reader(session.input(), self.tty);
                        }
                    }
                    ExecEvent::Stdout(data) => output.put(Stream::Out, data).await,
                    ExecEvent::Stderr(data) => output.put(Stream::Err, data).await,
                    ExecEvent::Missed { bytes } => {
                        self.ui.note(&format!("warning: {bytes} bytes of output were lost: the reader was too slow"));
                        output.tell(json!({"type": "missed", "bytes": bytes})).await;
                    }
                    ExecEvent::Exit(exit) => break exit,
                },
                () = output.closed() => {
                    if let (Role::Exec, Some(pid)) = (self.role, pid) {
                        self.hang_up(pid, &mut session).await;
                    }
                    return output.finish().await.map_or_else(OutputLost::attended, |()| Ok(Attended::OutputClosed));
                }
                _ = resized.recv(), if self.tty => if let Some(size) = terminal::size() {
                    // A full queue means that the server is behind; the next change will tell it.
                    let _ = session.input().try_send(ExecInput::Resize(size));
                },
                number = signals.next() => {
                    signals_heard += 1;
                    match pid {
                        Some(pid) if self.passes_on(number) && signals_heard <= FORWARDED_SIGNALS => {
                            self.forward(pid, number).await;
                        }
                        _ => return Ok(Attended::Signalled(number)),
                    }
                }
            }
        };
        let Exit { code, signal, timed_out, out_of_memory } = exit;
        let event = json!({"type": "exit", "code": code, "signal": signal, "timed_out": timed_out,
            "out_of_memory": out_of_memory});
        output.tell(event).await;
        tokio::select! {
            // All output is written before we say how it ended.
            written = output.finish() => written.map_or_else(OutputLost::attended, |()| Ok(Attended::Exited(exit))),
            number = signals.next() => Ok(Attended::Signalled(number)),
        }
    }

    fn passes_on(&self, number: i32) -> bool {
        match self.role {
            Role::Run => false,
            Role::Exec => true,
            Role::Attach => number == libc::SIGINT,
        }
    }

    /// What nobody hears any more must not run on.
    async fn hang_up(&self, pid: u32, session: &mut ExecSession) {
        for (number, patience) in HANG_UP {
            match self.client.signal(self.sandbox, pid, number).await {
                Err(failure) if failure.code == "no_such_process" => return,
                Err(failure) => self.ui.note(&format!("warning: the command may still run: {failure}")),
                Ok(()) => {}
            }
            let end = async { while !matches!(session.next().await, Ok(ExecEvent::Exit(_)) | Err(_)) {} };
            if time::timeout(patience, end).await.is_ok() {
                return;
            }
        }
    }

    async fn forward(&self, pid: u32, number: i32) {
        if let Err(failure) = self.client.signal(self.sandbox, pid, number).await {
            self.ui.note(&format!("warning: the signal did not reach the command: {failure}"));
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Stream {
    Out,
    Err,
}

/// Our standard output and error, written by a thread in order of arrival.
pub(super) struct Output {
    queue: mpsc::Sender<(Stream, Bytes)>,
    /// Resolves once the thread has ended: all is written, or nothing more can be.
    ended: oneshot::Receiver<Result<(), OutputLost>>,
    /// One JSON event a line in place of the bytes.
    json: bool,
}

impl Output {
    pub(super) fn start(json: bool) -> Self {
        let (queue, mut writes) = mpsc::channel::<(Stream, Bytes)>(QUEUED_WRITES);
        let (done, ended) = oneshot::channel();
        thread::spawn(move || {
            let mut result = Ok(());
            while let (true, Some((stream, data))) = (result.is_ok(), writes.blocking_recv()) {
                let written = match stream {
                    Stream::Out => write_now(&mut io::stdout().lock(), &data),
                    Stream::Err => write_now(&mut io::stderr().lock(), &data),
                };
                result = written.map_err(|error| OutputLost { stream, error });
            }
            // The other side may have left already.
            let _ = done.send(result);
        });
        Self { queue, ended, json }
    }

    pub(super) async fn put(&self, stream: Stream, data: Bytes) {
        if self.json {
            let name = if stream == Stream::Out { "stdout" } else { "stderr" };
            self.tell(json!({"type": name, "data": BASE64_STANDARD.encode(&data)})).await;
        } else {
            // Output that is closed shows in `closed`.
            let _ = self.queue.send((stream, data)).await;
        }
    }

    pub(super) async fn tell(&self, event: Value) {
        if self.json {
            let _ = self.queue.send((Stream::Out, Bytes::from(format!("{event}\n")))).await;
        }
    }

    /// An event that is made only where somebody wants it.
    pub(super) async fn tell_with(&self, event: impl FnOnce() -> Value) {
        if self.json {
            self.tell(event()).await;
        }
    }

    /// Bytes for people; nothing with `--json`.
    pub(super) async fn print(&self, stream: Stream, data: Bytes) {
        if !self.json && !data.is_empty() {
            let _ = self.queue.send((stream, data)).await;
        }
    }

    /// Resolves when nothing more can be written; `finish` tells why. Cancel-safe.
    pub(super) async fn closed(&self) {
        self.queue.closed().await;
    }

    /// Waits until everything is written.
    pub(super) async fn finish(self) -> Result<(), OutputLost> {
        drop(self.queue);
        // The thread says how it went, whatever happens.
        self.ended.await.unwrap_or(Ok(()))
    }
}

fn write_now(out: &mut impl io::Write, data: &[u8]) -> io::Result<()> {
    out.write_all(data)?;
    out.flush()
}

/// A thread that reads our standard input to its end. It is left behind when the command ends first.
fn start_reader(input: mpsc::Sender<ExecInput>, tty: bool) {
    thread::spawn(move || {
        let mut buffer = vec![0; READ_BYTES];
        let mut at_line_start = true;
        let mut stdin = io::stdin().lock();
        loop {
            let sent = match stdin.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => {
                    at_line_start = buffer[length - 1] == b'\n';
                    input.blocking_send(ExecInput::Stdin(Bytes::copy_from_slice(&buffer[..length])))
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // A directory or a terminal that is gone: the command gets the end of its input.
                Err(_) => break,
            };
            if sent.is_err() {
                return;
            }
        }
        if !tty {
            // The session may have ended.
            let _ = input.blocking_send(ExecInput::CloseStdin);
            return;
        }
        // A terminal cannot be closed: it takes the key for it, after an unfinished line once more. A shell that is
        // just setting its terminal up loses a key, so it is pressed until the session has ended.
        let mut keys = if at_line_start { &END_OF_INPUT_KEYS[..1] } else { END_OF_INPUT_KEYS };
        while input.blocking_send(ExecInput::Stdin(Bytes::from_static(keys))).is_ok() {
            keys = &END_OF_INPUT_KEYS[..1];
            thread::sleep(END_OF_INPUT_EVERY);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_those_a_shell_would_give() {
        let code = |exit: Exit| Attended::Exited(exit).exit_code();
        assert_eq!(code(Exit { code: Some(3), ..Exit::default() }), 3);
        assert_eq!(code(Exit { signal: Some(9), ..Exit::default() }), 137);
        assert_eq!(code(Exit { signal: Some(9), timed_out: true, ..Exit::default() }), 124);
        assert_eq!(code(Exit::default()), 125, "an end without a cause is never a success");
        assert_eq!(Attended::Signalled(2).exit_code(), 130);
    }
}
