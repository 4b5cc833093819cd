//! A hosted agent and a client of it, joined by a socket pair.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test file uses its own part")]

use std::{path::PathBuf, time::Duration};

use bytes::Bytes;
use futures::StreamExt;
use stockade_engine::{
    EngineError, GuestClient,
    guest::{ByteStream, Events, FileBody, ReadFile, Selector, WriteFile},
};
use stockade_guest::Agent;
use stockade_wire::{
    ErrorCode,
    event::Event,
    files::EntryInfo,
    process::{Command, Exit, StartRequest},
};
use tempfile::TempDir;
use tokio::{net::UnixStream, task::JoinHandle};

pub struct Guest {
    pub client: GuestClient,
    pub home: TempDir,
    pub agent: Agent,
    pub server: JoinHandle<std::io::Result<()>>,
}

/// What a process did from its start to its end.
#[derive(Debug, Default)]
pub struct Outcome {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub pty: Vec<u8>,
    pub missed: u64,
    pub exit: Exit,
}

impl Outcome {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.stdout).expect("output is text")
    }
}

pub async fn connect(agent: &Agent) -> (GuestClient, JoinHandle<std::io::Result<()>>) {
    let (host, guest) = UnixStream::pair().expect("a socket pair");
    let server = tokio::spawn(stockade_guest::serve(guest, agent.clone()));
    let client = GuestClient::open(host, Duration::from_secs(10)).await.expect("the agent answers");
    (client, server)
}

impl Guest {
    pub async fn start() -> Self {
        let home = tempfile::tempdir().expect("a directory");
        let agent = Agent::hosted(home.path());
        let (client, server) = connect(&agent).await;
        Self { client, home, agent, server }
    }

    pub fn path(&self, name: &str) -> String {
        self.home.path().join(name).to_str().expect("a text path").to_owned()
    }

    /// A copy of a test input in the home.
    pub fn input(&self, name: &str) -> String {
        let from = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/inputs").join(name);
        std::fs::copy(from, self.home.path().join(name)).expect("copied");
        self.path(name)
    }

    pub async fn run(&self, request: StartRequest) -> Outcome {
        finish(self.client.start(&request).await.expect("the process starts")).await
    }

    pub async fn shell(&self, text: &str) -> Outcome {
        self.run(shell(text)).await
    }

    pub async fn write(&self, name: &str, content: impl Into<Bytes>) -> EntryInfo {
        let request = WriteFile { path: self.path(name), ..WriteFile::default() };
        self.client.write_file(&request, bytes(content)).await.expect("written")
    }

    pub async fn read(&self, name: &str) -> Vec<u8> {
        let request = ReadFile { path: self.path(name), ..ReadFile::default() };
        content(self.client.read_file(&request).await.expect("opened")).await
    }
}

pub fn start(command: Command) -> StartRequest {
    StartRequest::new(command)
}

pub fn shell(text: &str) -> StartRequest {
    start(Command::Shell(text.to_owned()))
}

pub fn argv<const N: usize>(argv: [&str; N]) -> StartRequest {
    start(Command::Argv(argv.map(str::to_owned).to_vec()))
}

pub async fn finish(mut events: Events) -> Outcome {
    let mut outcome = Outcome::default();
    while let Some(event) = events.events.next().await {
        match event.expect("the stream holds") {
            Event::Stdout(bytes) => outcome.stdout.extend_from_slice(&bytes),
            Event::Stderr(bytes) => outcome.stderr.extend_from_slice(&bytes),
            Event::Pty(bytes) => outcome.pty.extend_from_slice(&bytes),
            Event::Missed(missed) => outcome.missed += missed.bytes,
            Event::KeepAlive => {}
            Event::Exit(exit) => {
                outcome.exit = exit;
                return outcome;
            }
            other => panic!("unexpected event {other:?}"),
        }
    }
    panic!("the stream ended without an exit");
}

/// Reads events until the output seen holds a text.
pub async fn wait_for(events: &mut Events, text: &str) -> Vec<u8> {
    let mut seen = Vec::new();
    while let Some(event) = events.events.next().await {
        match event.expect("the stream holds") {
            Event::Stdout(bytes) | Event::Stderr(bytes) | Event::Pty(bytes) => seen.extend_from_slice(&bytes),
            Event::Exit(exit) => panic!("ended with {exit:?} before {text:?}: {}", String::from_utf8_lossy(&seen)),
            _ => {}
        }
        if String::from_utf8_lossy(&seen).contains(text) {
            return seen;
        }
    }
    panic!("the stream ended before {text:?}");
}

pub fn bytes(content: impl Into<Bytes>) -> ByteStream {
    let content = content.into();
    Box::pin(futures::stream::iter((!content.is_empty()).then_some(Ok(content))))
}

pub async fn content(mut file: FileBody) -> Vec<u8> {
    let mut whole = Vec::new();
    while let Some(piece) = file.body.next().await {
        whole.extend_from_slice(&piece.expect("the file is read to its end"));
    }
    whole
}

pub fn pid(events: &Events) -> Selector {
    Selector::Pid(events.started.as_ref().expect("started").pid)
}

/// The code and message of what the agent refused.
pub fn refusal<T: std::fmt::Debug>(result: Result<T, EngineError>) -> (ErrorCode, String) {
    match result {
        Err(EngineError::Guest(body)) => (body.code, body.message),
        other => panic!("expected a refusal, got {other:?}"),
    }
}
