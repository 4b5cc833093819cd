//! A small client of QEMU's control channel (QMP): one JSON object a line, each way.
//!
//! The emulator may be under the guest's control, so what it says is bounded (length of a line, number
//! of kept events) and every command has a deadline.
//!
//! ```text
//! emulator: {"QMP": {...}}                                   greeting
//! we:       {"execute": "qmp_capabilities", "id": 0}
//! emulator: {"return": {}, "id": 0}
//! emulator: {"event": "STOP", ...}                           any time
//! ```

use std::{
    collections::HashMap,
    fs::File,
    io::{self, IoSlice},
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Interest},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{Mutex as AsyncMutex, broadcast, oneshot},
    task::AbortHandle,
};

use crate::EngineError;

const MAX_LINE_BYTES: u64 = 1 << 20;
const KEPT_EVENTS: usize = 64;

/// Name of the event this client adds when the channel has closed; nothing follows it.
pub(crate) const CLOSED: &str = "CLOSED";

/// Something the emulator reported.
#[derive(Clone, Debug)]
pub(crate) struct QmpEvent {
    /// Its name, such as `SHUTDOWN`.
    pub(crate) name: String,
    /// What it carries.
    pub(crate) data: Value,
}

/// A control channel. It closes when dropped.
#[derive(Debug)]
pub(crate) struct Qmp {
    writer: AsyncMutex<Writer>,
    shared: Arc<Shared>,
    reader: AbortHandle,
}

#[derive(Debug)]
struct Writer {
    half: OwnedWriteHalf,
    next_id: u64,
}

/// A command's result, or the emulator's words of refusal.
type Answer = Result<Value, String>;

#[derive(Debug)]
struct Shared {
    /// Who waits for which answer; `None` once the channel is closed.
    pending: Mutex<Option<HashMap<u64, oneshot::Sender<Answer>>>>,
    events: broadcast::Sender<QmpEvent>,
}

#[derive(Deserialize)]
struct Line {
    event: Option<String>,
    #[serde(default)]
    data: Value,
    id: Option<u64>,
    #[serde(rename = "return")]
    result: Option<Value>,
    error: Option<ErrorReply>,
}

#[derive(Deserialize)]
struct ErrorReply {
    desc: String,
}

impl Qmp {
    /// Takes the greeting and opens the channel for commands.
    pub(crate) async fn open(stream: UnixStream, patience: Duration) -> Result<Self, EngineError> {
        let (read_half, half) = stream.into_split();
        let mut reader = BufReader::new(read_half);
        let greeting = tokio::time::timeout(patience, next_line(&mut reader)).await;
        match greeting {
            Ok(Ok(Some(line))) if line.contains("\"QMP\"") => {}
            Ok(Ok(Some(_))) => return Err(failed("greeting", "it does not speak QMP")),
            Ok(Ok(None)) => return Err(failed("greeting", "it closed the control channel")),
            Ok(Err(error)) => return Err(failed("greeting", error)),
            Err(_) => return Err(failed("greeting", format!("nothing came within {patience:?}"))),
        }
        let shared =
            Arc::new(Shared { pending: Mutex::new(Some(HashMap::new())), events: broadcast::channel(KEPT_EVENTS).0 });
        let task = tokio::spawn(read_lines(reader, shared.clone()));
        let qmp = Self { writer: AsyncMutex::new(Writer { half, next_id: 0 }), shared, reader: task.abort_handle() };
        qmp.run("qmp_capabilities", json!({}), patience).await?;
        Ok(qmp)
    }

    /// What is reported from now on.
    pub(crate) fn events(&self) -> broadcast::Receiver<QmpEvent> {
        self.shared.events.subscribe()
    }

    /// Whether the emulator still holds its end.
    pub(crate) fn is_open(&self) -> bool {
        lock(&self.shared.pending).is_some()
    }

    /// Runs a command and returns its result.
    pub(crate) async fn run(
        &self,
        command: &'static str,
        arguments: Value,
        patience: Duration,
    ) -> Result<Value, EngineError> {
        self.run_with(command, arguments, None, patience).await
    }

    /// Hands the emulator a descriptor, under a name for a later command.
    pub(crate) async fn give(&self, file: &File, name: &str, patience: Duration) -> Result<(), EngineError> {
        self.run_with("getfd", json!({ "fdname": name }), Some(file.as_fd()), patience).await.map(drop)
    }

    /// Runs a command that takes a descriptor.
    pub(crate) async fn run_with_file(
        &self,
        command: &'static str,
        arguments: Value,
        file: &File,
        patience: Duration,
    ) -> Result<Value, EngineError> {
        self.run_with(command, arguments, Some(file.as_fd()), patience).await
    }

    async fn run_with(
        &self,
        command: &'static str,
        arguments: Value,
        descriptor: Option<BorrowedFd<'_>>,
        patience: Duration,
    ) -> Result<Value, EngineError> {
        match tokio::time::timeout(patience, self.exchange(command, arguments, descriptor)).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(detail)) => Err(failed(command, detail)),
            Err(_) => Err(failed(command, format!("no answer within {patience:?}"))),
        }
    }

    async fn exchange(
        &self,
        command: &str,
        arguments: Value,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<Value, String> {
        let closed = || "the emulator closed the control channel".to_owned();
        let answer = {
            let mut writer = self.writer.lock().await;
            let id = writer.next_id;
            writer.next_id += 1;
            let (sender, answer) = oneshot::channel();
            {
                let mut pending = lock(&self.shared.pending);
                let pending = pending.as_mut().ok_or_else(closed)?;
                // Callers that gave up leave their entry behind when no answer ever comes.
                pending.retain(|_, sender| !sender.is_closed());
                pending.insert(id, sender);
            }
            let mut line = json!({ "execute": command, "arguments": arguments, "id": id }).to_string();
            line.push('\n');
            let sent = match descriptor {
                Some(descriptor) => send_first_byte(&writer.half, line.as_bytes(), descriptor).await,
                None => Ok(0),
            };
            let sent = sent.map_err(|error| error.to_string())?;
            writer.half.write_all(&line.as_bytes()[sent..]).await.map_err(|_| closed())?;
            answer
        };
        answer.await.unwrap_or_else(|_| Err(closed()))
    }
}

impl Drop for Qmp {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// Sends the first byte of a command with a descriptor attached; the emulator picks it up with the line.
async fn send_first_byte(half: &OwnedWriteHalf, line: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<usize> {
    let stream: &UnixStream = half.as_ref();
    stream
        .async_io(Interest::WRITABLE, || {
            let descriptors = [descriptor.as_raw_fd()];
            let control = [ControlMessage::ScmRights(&descriptors)];
            let bytes = [IoSlice::new(&line[..1])];
            Ok(sendmsg::<()>(stream.as_raw_fd(), &bytes, &control, MsgFlags::empty(), None)?)
        })
        .await
}

async fn read_lines(mut reader: BufReader<OwnedReadHalf>, shared: Arc<Shared>) {
    while let Ok(Some(line)) = next_line(&mut reader).await {
        let Ok(line) = serde_json::from_str::<Line>(&line) else { break };
        if let Some(name) = line.event {
            // Nobody listening is fine.
            let _ = shared.events.send(QmpEvent { name, data: line.data });
        } else if let Some(id) = line.id {
            let waiting = lock(&shared.pending).as_mut().and_then(|pending| pending.remove(&id));
            let result = match line.error {
                Some(error) => Err(error.desc),
                None => Ok(line.result.unwrap_or_default()),
            };
            if let Some(waiting) = waiting {
                let _ = waiting.send(result);
            }
        }
    }
    // Dropping the senders wakes all who wait.
    lock(&shared.pending).take();
    let _ = shared.events.send(QmpEvent { name: CLOSED.to_owned(), data: Value::Null });
}

/// The next line; `None` at the end of the channel, an error when the line is too long.
async fn next_line(reader: &mut BufReader<OwnedReadHalf>) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    (&mut *reader).take(MAX_LINE_BYTES).read_until(b'\n', &mut line).await?;
    if line.is_empty() {
        return Ok(None);
    }
    if line.last() != Some(&b'\n') {
        let reason = if line.len() as u64 == MAX_LINE_BYTES { "a line is too long" } else { "a line was cut off" };
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    String::from_utf8(line).map(Some).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

fn failed(step: &'static str, detail: impl ToString) -> EngineError {
    EngineError::Emulator { step, detail: detail.to_string() }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// Plays the emulator: says `script`'s lines, one before each line that is read.
    async fn emulator(stream: UnixStream, script: Vec<String>) {
        let (read_half, mut write_half) = stream.into_split();
        let mut lines = BufReader::new(read_half).lines();
        for line in script {
            write_half.write_all(line.as_bytes()).await.expect("written");
            if lines.next_line().await.expect("read").is_none() {
                return;
            }
        }
    }

    fn opening(rest: &[&str]) -> Vec<String> {
        let mut script = vec!["{\"QMP\": {}}\r\n".to_owned(), "{\"return\": {}, \"id\": 0}\r\n".to_owned()];
        script.extend(rest.iter().map(|line| (*line).to_owned()));
        script
    }

    async fn open(script: Vec<String>) -> Result<Qmp, EngineError> {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        tokio::spawn(emulator(theirs, script));
        Qmp::open(ours, PATIENCE).await
    }

    #[tokio::test]
    async fn a_command_gets_its_own_answer_past_events() {
        let lines = "{\"event\": \"STOP\"}\n{\"return\": 3, \"id\": 9}\n{\"return\": {\"a\": 1}, \"id\": 1}\n";
        let qmp = open(opening(&[lines])).await.expect("opens");
        let mut events = qmp.events();
        let answer = qmp.run("stop", json!({}), PATIENCE).await;
        assert_eq!(answer.expect("answered"), json!({ "a": 1 }));
        assert_eq!(events.recv().await.expect("an event").name, "STOP");
    }

    #[tokio::test]
    async fn a_refusal_names_the_command_and_what_was_said() {
        let qmp = open(opening(&["{\"error\": {\"class\": \"x\", \"desc\": \"not now\"}, \"id\": 1}\n"])).await;
        let error = qmp.expect("opens").run("cont", json!({}), PATIENCE).await.expect_err("refused");
        assert_eq!(error.to_string(), "emulator failed at cont: not now");
    }

    #[tokio::test]
    async fn an_emulator_that_dies_wakes_who_waits() {
        let qmp = open(opening(&[])).await.expect("opens");
        let error = qmp.run("cont", json!({}), PATIENCE).await.expect_err("gone");
        assert!(error.to_string().contains("closed the control channel"), "{error}");
        assert!(!qmp.is_open());
    }

    #[tokio::test]
    async fn a_line_without_end_is_not_read_for_ever() {
        let endless = "x".repeat(usize::try_from(MAX_LINE_BYTES).expect("small") + 10);
        let error = open(vec![endless]).await.expect_err("refused");
        assert!(error.to_string().contains("too long"), "{error}");
    }

    #[tokio::test]
    async fn a_silent_emulator_is_given_up() {
        let (ours, _theirs) = UnixStream::pair().expect("a pair");
        let error = Qmp::open(ours, Duration::from_millis(1)).await.expect_err("given up");
        assert!(error.to_string().contains("nothing came within"), "{error}");
    }
}
