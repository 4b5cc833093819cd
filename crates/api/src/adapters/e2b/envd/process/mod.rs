//! `process.Process`: commands and terminals.
//!
//! A stream is `start`, then `data` as it was written, then `end`. A process outlives its stream; a
//! command's own time limit (`Connect-Timeout-Ms` of `Start`) is kept by the guest, which kills the
//! group, whether or not anyone still listens.

use std::{collections::BTreeMap, time::Duration};

use axum::response::Response;
use futures::Stream;
use serde::{Deserialize, Serialize};
use stockade_engine::{EngineError, guest::Selector};
use stockade_model::Sandbox;
use stockade_wire::{ErrorCode, process};

use super::{
    super::connect::{self, Code, ConnectError, Item, Reply, ServerStream, Unary},
    Caller,
    guest_error::Asked,
};

mod input;
mod output;

pub(super) use input::{close_stdin, send_input, send_signal, stream_input};
use output::items;

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
        ("E2B_TEMPLATE_ID", sandbox.template_name.clone()),
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

async fn find(caller: &Caller, selector: &Selector) -> Result<Option<process::ProcessInfo>, ConnectError> {
    let list = caller.guest.processes().await.map_err(|error| Asked::default().connect_error(error))?;
    Ok(list.processes.into_iter().find(|process| match selector {
        Selector::Pid(pid) => process.pid == *pid,
        Selector::Tag(tag) => process.tag.as_ref() == Some(tag),
    }))
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
}
