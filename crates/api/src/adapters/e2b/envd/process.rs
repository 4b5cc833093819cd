//! `process.Process`: commands and terminals.
//!
//! A stream is `start`, then `data` as it was written, then `end`. A process outlives its stream; a
//! command's own time limit (`Connect-Timeout-Ms` of `Start`) is kept by the guest, which kills the
//! group, whether or not anyone still listens.

use std::{collections::BTreeMap, time::Duration};

use axum::response::Response;
use futures::{Stream, StreamExt, stream};
use serde::{Deserialize, Serialize};
use stockade_engine::{
    EngineError,
    guest::{Events, Selector},
};
use stockade_model::Sandbox;
use stockade_wire::{ErrorCode, event::Event, process};
use tokio::time::{Instant, Interval, MissedTickBehavior};

use super::{
    super::connect::{self, ClientStream, Code, ConnectError, Item, Reply, ServerStream, Unary},
    Caller,
    guest_error::Asked,
};

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct ProcessConfig {
    cmd: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    args: Vec<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    envs: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cwd: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Pty {
    size: Option<PtySize>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PtySize {
    cols: u32,
    rows: u32,
}

impl Pty {
    fn wire(&self) -> Result<process::PtySize, ConnectError> {
        let size = self.size.as_ref().ok_or_else(|| invalid("pty.size is missing"))?;
        let side = |name: &str, value: u32| {
            u16::try_from(value).map_err(|_| invalid(format!("pty.size.{name} is {value}; at most 65535 is possible")))
        };
        Ok(process::PtySize { cols: side("cols", size.cols)?, rows: side("rows", size.rows)? })
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ProcessSelector {
    Pid(u32),
    Tag(String),
}

fn select(selector: Option<ProcessSelector>) -> Result<Selector, ConnectError> {
    match selector {
        Some(ProcessSelector::Pid(pid)) => Ok(Selector::Pid(pid)),
        Some(ProcessSelector::Tag(tag)) => Ok(Selector::Tag(tag)),
        None => Err(invalid("process is missing: name one by pid or tag")),
    }
}

fn invalid(message: impl Into<String>) -> ConnectError {
    ConnectError::new(Code::InvalidArgument, message)
}

/// A request that has nothing but a process.
#[derive(Debug, Deserialize)]
pub(super) struct ProcessRequest {
    process: Option<ProcessSelector>,
}

#[derive(Deserialize)]
pub(super) struct StartRequest {
    process: Option<ProcessConfig>,
    pty: Option<Pty>,
    tag: Option<String>,
    stdin: Option<bool>,
}

impl StartRequest {
    fn wire(self, user: Option<String>, timeout: Option<Duration>) -> Result<process::StartRequest, ConnectError> {
        let config = self.process.ok_or_else(|| invalid("process is missing"))?;
        if config.cmd.is_empty() {
            return Err(invalid("process.cmd is empty"));
        }
        let pty = self.pty.as_ref().map(Pty::wire).transpose()?;
        let mut argv = config.args;
        argv.insert(0, config.cmd);
        Ok(process::StartRequest {
            command: process::Command::Argv(argv),
            user,
            cwd: config.cwd.filter(|cwd| !cwd.is_empty()),
            env: config.envs,
            stdin: pty.is_none() && self.stdin.unwrap_or(true),
            pty,
            timeout_ms: timeout.map(|timeout| timeout.as_millis().try_into().unwrap_or(u64::MAX)),
            tag: self.tag,
        })
    }
}

pub(super) async fn start(call: ServerStream<StartRequest>) -> Response {
    connect::stream(start_items(call.caller, call.message).await)
}

async fn start_items(caller: Caller, message: StartRequest) -> Result<impl Stream<Item = Item>, ConnectError> {
    let mut request = message.wire(caller.user.clone(), caller.timeout)?;
    for (name, value) in identity(&caller.sandbox) {
        if !caller.sandbox.env.contains_key(name) {
            request.env.entry(name.to_owned()).or_insert(value);
        }
    }
    let asked = Asked { user: request.user.as_deref(), cwd: request.cwd.as_deref(), path: None };
    let events = caller.guest.start(&request).await.map_err(|error| asked.connect_error(error))?;
    // The guest keeps the deadline; this is for a guest that no longer can.
    let patience = caller.timeout.map(|timeout| timeout + Duration::from_secs(5));
    items(events, caller.keep_alive, caller.timeout, patience)
}

/// What every process is told of its sandbox.
fn identity(sandbox: &Sandbox) -> [(&'static str, String); 3] {
    [
        ("E2B_SANDBOX", "true".to_owned()),
        ("E2B_SANDBOX_ID", sandbox.id.to_string()),
        ("E2B_TEMPLATE_ID", sandbox.template.to_string()),
    ]
}

pub(super) async fn connect(call: ServerStream<ProcessRequest>) -> Response {
    connect::stream(connect_items(call.caller, call.message).await)
}

async fn connect_items(caller: Caller, message: ProcessRequest) -> Result<impl Stream<Item = Item>, ConnectError> {
    let selector = select(message.process)?;
    let events = caller.guest.attach(&selector, None).await.map_err(|error| process_error(error, &selector))?;
    items(events, caller.keep_alive, None, caller.timeout)
}

/// State of one event stream.
struct Running {
    events: Events,
    keep_alive: Interval,
    /// The process's own limit, for the text.
    limit: Option<Duration>,
    /// When this stream ends, whatever the process does.
    until: Option<Instant>,
    done: bool,
}

fn items(
    events: Events,
    keep_alive: Duration,
    limit: Option<Duration>,
    patience: Option<Duration>,
) -> Result<impl Stream<Item = Item>, ConnectError> {
    let started = events
        .started
        .as_ref()
        .ok_or_else(|| ConnectError::new(Code::Internal, "the guest did not say which process it started"))?;
    let first = Item::Frame(connect::message_frame(&event(EventJson::Start { pid: started.pid })).freeze());
    let mut keep_alive = tokio::time::interval_at(Instant::now() + keep_alive, keep_alive);
    keep_alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let until = patience.map(|patience| Instant::now() + patience);
    let running = Running { events, keep_alive, limit, until, done: false };
    let rest = stream::unfold(running, |mut running| async move {
        let items = running.next().await?;
        Some((stream::iter(items), running))
    });
    Ok(stream::once(std::future::ready(first)).chain(rest.flatten()))
}

impl Running {
    async fn next(&mut self) -> Option<Vec<Item>> {
        while !self.done {
            let event = tokio::select! {
                biased;
                event = self.events.events.next() => event,
                () = sleep_until(self.until) => {
                    self.done = true;
                    return Some(vec![Item::End(Some(self.late()))]);
                }
                _ = self.keep_alive.tick() => {
                    return Some(vec![Item::Frame(connect::message_frame(&event(EventJson::Keepalive {})).freeze())]);
                }
            };
            if let Some(items) = self.translate(event) {
                return Some(items);
            }
        }
        None
    }

    fn translate(&mut self, event: Option<Result<Event, EngineError>>) -> Option<Vec<Item>> {
        let data = |field: &str, bytes: &[u8]| {
            let prefix = format!(r#"{{"event":{{"data":{{"{field}":""#);
            Some(vec![Item::Frame(connect::base64_frame(&prefix, bytes, r#""}}}"#))])
        };
        match event {
            Some(Ok(Event::Stdout(bytes))) => data("stdout", &bytes),
            Some(Ok(Event::Stderr(bytes))) => data("stderr", &bytes),
            Some(Ok(Event::Pty(bytes))) => data("pty", &bytes),
            Some(Ok(Event::Exit(exit))) => {
                self.done = true;
                if exit.timed_out {
                    return Some(vec![Item::End(Some(self.late()))]);
                }
                let end = connect::message_frame(&self::event(end_of(&exit))).freeze();
                Some(vec![Item::Frame(end), Item::End(None)])
            }
            Some(Ok(Event::Missed(missed))) => {
                self.done = true;
                let message = format!("this reader fell behind and {} bytes of output were dropped", missed.bytes);
                Some(vec![Item::End(Some(ConnectError::new(Code::DataLoss, message)))])
            }
            Some(Ok(_)) => None,
            Some(Err(error)) => {
                self.done = true;
                Some(vec![match error {
                    EngineError::Guest(_) => Item::End(Some(Asked::default().connect_error(error))),
                    broken => Item::Break(std::io::Error::other(broken)),
                }])
            }
            None => {
                self.done = true;
                let error = std::io::Error::new(std::io::ErrorKind::UnexpectedEof, "the guest's event stream was cut");
                Some(vec![Item::Break(error)])
            }
        }
    }

    fn late(&self) -> ConnectError {
        let message = match self.limit {
            Some(limit) => format!("the process was killed: its time limit of {} ms passed", limit.as_millis()),
            None => "the time limit of this connection passed; the process goes on".to_owned(),
        };
        ConnectError::new(Code::DeadlineExceeded, message)
    }
}

async fn sleep_until(until: Option<Instant>) {
    match until {
        Some(until) => tokio::time::sleep_until(until).await,
        None => std::future::pending().await,
    }
}

#[derive(Serialize)]
struct EventMessage {
    event: EventJson,
}

fn event(event: EventJson) -> EventMessage {
    EventMessage { event }
}

/// `ProcessEvent` without its data, which is written by hand.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
enum EventJson {
    Start {
        pid: u32,
    },
    Keepalive {},
    End {
        #[serde(rename = "exitCode", skip_serializing_if = "is_zero")]
        exit_code: i32,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        exited: bool,
        status: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
}

fn is_zero(value: &i32) -> bool {
    *value == 0
}

fn end_of(exit: &process::Exit) -> EventJson {
    let (exit_code, exited, status) = match (exit.code, exit.signal) {
        (Some(code), _) => (code, true, format!("exit status {code}")),
        (None, Some(signal)) => (-1, false, format!("signal: {}", signal_words(signal))),
        (None, None) => (-1, false, "the process never ran".to_owned()),
    };
    let failed = exit_code != 0;
    let error = failed.then(|| match exit.out_of_memory {
        true => format!("{status} (the sandbox ran out of memory)"),
        false => status.clone(),
    });
    EventJson::End { exit_code, exited, status, error }
}

/// What Go's runtime calls the signals of Linux on x86-64; clients compare these texts.
fn signal_words(signal: i32) -> String {
    const WORDS: [&str; 31] = [
        "hangup",
        "interrupt",
        "quit",
        "illegal instruction",
        "trace/breakpoint trap",
        "aborted",
        "bus error",
        "floating point exception",
        "killed",
        "user defined signal 1",
        "segmentation fault",
        "user defined signal 2",
        "broken pipe",
        "alarm clock",
        "terminated",
        "stack fault",
        "child exited",
        "continued",
        "stopped (signal)",
        "stopped",
        "stopped (tty input)",
        "stopped (tty output)",
        "urgent I/O condition",
        "CPU time limit exceeded",
        "file size limit exceeded",
        "virtual timer expired",
        "profiling timer expired",
        "window changed",
        "I/O possible",
        "power failure",
        "bad system call",
    ];
    let index = usize::try_from(signal).ok().and_then(|number| number.checked_sub(1));
    index.and_then(|index| WORDS.get(index)).map_or_else(|| format!("signal {signal}"), |word| (*word).to_owned())
}

#[derive(Deserialize)]
pub(super) struct Empty {}

#[derive(Serialize)]
pub(super) struct Done {}

#[derive(Serialize)]
pub(super) struct ListResponse {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    processes: Vec<ProcessInfo>,
}

#[derive(Serialize)]
struct ProcessInfo {
    config: ProcessConfig,
    pid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    tag: Option<String>,
}

pub(super) async fn list(call: Unary<Empty>) -> Result<Reply<ListResponse>, ConnectError> {
    let list = call.caller.guest.processes().await.map_err(|error| Asked::default().connect_error(error))?;
    let running = list.processes.into_iter().filter(|process| process.exit.is_none());
    let ours = identity(&call.caller.sandbox);
    Ok(Reply(ListResponse { processes: running.map(|process| describe(process, &ours)).collect() }))
}

/// A process as it was asked for: without `ours`, which every process has.
fn describe(mut process: process::ProcessInfo, ours: &[(&'static str, String)]) -> ProcessInfo {
    process.env.retain(|name, value| !ours.iter().any(|(our, text)| our == name && text == value));
    let mut argv = match process.command {
        process::Command::Argv(argv) => argv,
        process::Command::Shell(line) => vec!["/bin/bash".to_owned(), "-l".to_owned(), "-c".to_owned(), line],
        process::Command::Tool(tool) => tool.argv(),
    };
    let args = argv.split_off(argv.len().min(1));
    let cmd = argv.pop().unwrap_or_default();
    let config = ProcessConfig { cmd, args, envs: process.env, cwd: Some(process.cwd) };
    ProcessInfo { config, pid: process.pid, tag: process.tag }
}

#[derive(Deserialize)]
pub(super) struct UpdateRequest {
    process: Option<ProcessSelector>,
    pty: Option<Pty>,
}

pub(super) async fn update(call: Unary<UpdateRequest>) -> Result<Reply<Done>, ConnectError> {
    let selector = select(call.message.process)?;
    if let Some(pty) = &call.message.pty {
        let size = pty.wire()?;
        call.caller.guest.resize(&selector, size).await.map_err(|error| process_error(error, &selector))?;
    }
    Ok(Reply(Done {}))
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum ProcessInput {
    Stdin(String),
    Pty(String),
}

impl ProcessInput {
    fn bytes(self) -> Result<bytes::Bytes, ConnectError> {
        let (Self::Stdin(text) | Self::Pty(text)) = self;
        decode_base64(&text).map(Into::into).ok_or_else(|| invalid("input is not valid base64"))
    }
}

/// Both alphabets, with or without padding: all are legal in proto3 JSON.
fn decode_base64(text: &str) -> Option<Vec<u8>> {
    use base64::{
        Engine as _,
        alphabet::{STANDARD, URL_SAFE},
        engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
    };
    const LENIENT: GeneralPurposeConfig =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let plain = GeneralPurpose::new(&STANDARD, LENIENT).decode(text);
    plain.or_else(|_| GeneralPurpose::new(&URL_SAFE, LENIENT).decode(text)).ok()
}

#[derive(Deserialize)]
pub(super) struct SendInputRequest {
    process: Option<ProcessSelector>,
    input: Option<ProcessInput>,
}

pub(super) async fn send_input(call: Unary<SendInputRequest>) -> Result<Reply<Done>, ConnectError> {
    let selector = select(call.message.process)?;
    let input = call.message.input.ok_or_else(|| invalid("input is missing"))?.bytes()?;
    write(&call.caller, &selector, input, false).await?;
    Ok(Reply(Done {}))
}

async fn write(caller: &Caller, selector: &Selector, input: bytes::Bytes, close: bool) -> Result<(), ConnectError> {
    let body = Box::pin(stream::once(std::future::ready(Ok(input))));
    match caller.guest.write_stdin(selector, body, close).await {
        Ok(()) => Ok(()),
        Err(error) => Err(input_error(caller, selector, error).await),
    }
}

/// E2B's server forgets a process with its end, and its clients expect to be told so. The agent remembers it for a
/// while, and says that its input is closed.
async fn input_error(caller: &Caller, selector: &Selector, error: EngineError) -> ConnectError {
    let is_closed = matches!(&error, EngineError::Guest(body) if body.code == ErrorCode::StdinClosed);
    match find(caller, selector).await {
        Ok(found) if is_closed && found.as_ref().is_none_or(|process| process.exit.is_some()) => {
            no_such_process(selector)
        }
        _ => process_error(error, selector),
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum StreamInputEvent {
    Start(ProcessRequest),
    Data { input: Option<ProcessInput> },
    Keepalive {},
}

pub(super) async fn stream_input(call: ClientStream) -> Response {
    connect::client_stream_response(take_input(call).await)
}

async fn take_input(call: ClientStream) -> Result<Done, ConnectError> {
    let (caller, mut messages) = call.split::<StreamInputEvent>();
    let Some(StreamInputEvent::Start(start)) = messages.next().await? else {
        return Err(invalid("the first message of an input stream must be start"));
    };
    let selector = select(start.process)?;
    // A write per message, so that each is in the process's pipe before the next is asked for.
    while let Some(message) = messages.next().await? {
        match message {
            StreamInputEvent::Data { input: Some(input) } => write(&caller, &selector, input.bytes()?, false).await?,
            StreamInputEvent::Data { input: None } | StreamInputEvent::Keepalive {} => {}
            StreamInputEvent::Start(_) => return Err(invalid("an input stream has one start only")),
        }
    }
    require_process(&caller, &selector).await?;
    Ok(Done {})
}

/// An input stream without a byte still has to name a process that exists.
async fn require_process(caller: &Caller, selector: &Selector) -> Result<(), ConnectError> {
    find(caller, selector).await?.map(|_| ()).ok_or_else(|| no_such_process(selector))
}

async fn find(caller: &Caller, selector: &Selector) -> Result<Option<process::ProcessInfo>, ConnectError> {
    let list = caller.guest.processes().await.map_err(|error| Asked::default().connect_error(error))?;
    Ok(list.processes.into_iter().find(|process| match selector {
        Selector::Pid(pid) => process.pid == *pid,
        Selector::Tag(tag) => process.tag.as_ref() == Some(tag),
    }))
}

pub(super) async fn close_stdin(call: Unary<ProcessRequest>) -> Result<Reply<Done>, ConnectError> {
    let selector = select(call.message.process)?;
    if find(&call.caller, &selector).await?.is_some_and(|process| process.pty) {
        let message = "a terminal has no stdin to close; send it Ctrl-D (0x04)";
        return Err(ConnectError::new(Code::FailedPrecondition, message));
    }
    let nothing = Box::pin(stream::empty());
    match call.caller.guest.write_stdin(&selector, nothing, true).await {
        Ok(()) => Ok(Reply(Done {})),
        Err(error) => Err(input_error(&call.caller, &selector, error).await),
    }
}

#[derive(Deserialize)]
pub(super) struct SendSignalRequest {
    process: Option<ProcessSelector>,
    #[serde(default)]
    signal: Signal,
}

/// An enum of proto3 JSON: by name or number.
#[derive(Default, Deserialize)]
#[serde(untagged)]
enum Signal {
    #[default]
    Unset,
    Number(i32),
    Name(String),
}

impl Signal {
    fn number(&self) -> Result<i32, ConnectError> {
        match self {
            Self::Number(9) => Ok(9),
            Self::Number(15) => Ok(15),
            Self::Name(name) if name == "SIGNAL_SIGKILL" => Ok(9),
            Self::Name(name) if name == "SIGNAL_SIGTERM" => Ok(15),
            Self::Name(name) => Err(invalid(format!("signal {name} is not one of SIGNAL_SIGTERM, SIGNAL_SIGKILL"))),
            Self::Unset | Self::Number(_) => Err(invalid("signal must be SIGNAL_SIGTERM or SIGNAL_SIGKILL")),
        }
    }
}

pub(super) async fn send_signal(call: Unary<SendSignalRequest>) -> Result<Reply<Done>, ConnectError> {
    let selector = select(call.message.process)?;
    let request = process::SignalRequest { signal: call.message.signal.number()?, main_only: false };
    call.caller.guest.signal(&selector, request).await.map_err(|error| process_error(error, &selector))?;
    Ok(Reply(Done {}))
}

fn no_such_process(selector: &Selector) -> ConnectError {
    let message = match selector {
        Selector::Pid(pid) => format!("process with pid {pid} not found"),
        Selector::Tag(tag) => format!("process with tag {tag} not found"),
    };
    ConnectError::new(Code::NotFound, message)
}

fn process_error(error: EngineError, selector: &Selector) -> ConnectError {
    match error {
        EngineError::Guest(body) if body.code == ErrorCode::NoSuchProcess => no_such_process(selector),
        other => Asked::default().connect_error(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exit(code: Option<i32>, signal: Option<i32>) -> process::Exit {
        process::Exit { code, signal, ..process::Exit::default() }
    }

    fn json(exit: &process::Exit) -> String {
        serde_json::to_string(&event(end_of(exit))).expect("plain data")
    }

    #[test]
    fn ends_have_the_fields_and_texts_of_proto3_json_and_go() {
        assert_eq!(json(&exit(Some(0), None)), r#"{"event":{"end":{"exited":true,"status":"exit status 0"}}}"#);
        assert_eq!(
            json(&exit(Some(3), None)),
            r#"{"event":{"end":{"exitCode":3,"exited":true,"status":"exit status 3","error":"exit status 3"}}}"#
        );
        assert_eq!(
            json(&exit(None, Some(9))),
            r#"{"event":{"end":{"exitCode":-1,"status":"signal: killed","error":"signal: killed"}}}"#
        );
        assert_eq!(signal_words(15), "terminated");
        assert_eq!(signal_words(11), "segmentation fault");
        assert_eq!(signal_words(40), "signal 40");
    }

    #[test]
    fn a_start_request_of_the_sdk_reads_as_it_was_meant() {
        let text = r#"{"process":{"cmd":"/bin/bash","args":["-l","-c","echo"],"envs":{"A":"1"}},"stdin":false}"#;
        let request: StartRequest = serde_json::from_str(text).expect("an SDK sent this");
        let wire = request.wire(Some("root".to_owned()), Some(Duration::from_secs(60))).expect("valid");
        let argv = ["/bin/bash", "-l", "-c", "echo"].map(str::to_owned).to_vec();
        assert_eq!(wire.command, process::Command::Argv(argv));
        assert_eq!((wire.stdin, wire.timeout_ms, wire.user.as_deref()), (false, Some(60_000), Some("root")));
    }

    #[test]
    fn stdin_is_open_unless_refused_and_never_beside_a_terminal() {
        let start = |text: &str| {
            let request: StartRequest = serde_json::from_str(text).expect("valid JSON");
            request.wire(None, None).expect("valid")
        };
        assert!(start(r#"{"process":{"cmd":"cat"}}"#).stdin);
        assert!(start(r#"{"process":{"cmd":"cat"},"stdin":true}"#).stdin);
        let pty = start(r#"{"process":{"cmd":"bash"},"pty":{"size":{"rows":24,"cols":80}}}"#);
        assert!(!pty.stdin);
        assert_eq!(pty.pty, Some(process::PtySize { cols: 80, rows: 24 }));
    }

    #[test]
    fn signals_are_known_by_name_and_number() {
        let number = |text: &str| serde_json::from_str::<SendSignalRequest>(text).expect("valid JSON").signal.number();
        assert_eq!(number(r#"{"signal":"SIGNAL_SIGKILL"}"#), Ok(9));
        assert_eq!(number(r#"{"signal":15}"#), Ok(15));
        for bad in ["{}", r#"{"signal":1}"#, r#"{"signal":"SIGNAL_UNSPECIFIED"}"#, r#"{"signal":"HUP"}"#] {
            assert!(number(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn base64_is_read_in_every_form_proto3_json_allows() {
        for text in ["+/8=", "+/8", "-_8=", "-_8"] {
            assert_eq!(decode_base64(text), Some(vec![0xfb, 0xff]), "{text}");
        }
        assert_eq!(decode_base64("*"), None);
    }
}
