//! Processes: what to start, what runs, how it ended.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What to run.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Command {
    /// A program, looked up in the process's own `PATH`, and its arguments. Never empty.
    Argv(Vec<String>),
    /// A command line for `/bin/bash -l -c` (`/bin/sh -c` where there is no bash), passed exactly as given.
    Shell(String),
    /// Something the agent's own program does, as a process of the user's, whatever the image has in it.
    Tool(Tool),
}

/// What the agent's program can do as a process of its own.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Tool {
    /// Speaks SFTP, version 3, on its standard input and output.
    Sftp,
    /// Joins its standard input and output with the Unix socket at a path. Once it is connected it writes one line
    /// to its standard error; what is there otherwise says why it is not.
    Connect(String),
}

impl Tool {
    /// The arguments of its process.
    pub fn argv(&self) -> Vec<String> {
        let (verb, path) = match self {
            Self::Sftp => ("sftp", None),
            Self::Connect(path) => ("connect", Some(path)),
        };
        [TOOL_NAME, verb].into_iter().map(str::to_owned).chain(path.cloned()).collect()
    }
}

/// What the process of a [`Tool`] calls itself.
pub const TOOL_NAME: &str = "stockade-tool";

/// Starts a process.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct StartRequest {
    /// What to run.
    pub command: Command,
    /// The user's name; absent: the sandbox's default user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Absolute, `~`, or relative to the user's home; absent: the default directory, else home.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// Added to (and winning over) the sandbox's environment.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// True: a pipe that stays open until closed. False: the null device.
    #[serde(default)]
    pub stdin: bool,
    /// A terminal of this size in place of the three pipes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<PtySize>,
    /// After this many milliseconds the whole group is killed. Absent: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// A name to find the process by, unique among those that run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

impl StartRequest {
    /// A command as the default user, where the defaults say, without input, for as long as it takes.
    pub fn new(command: Command) -> Self {
        Self {
            command,
            user: None,
            cwd: None,
            env: BTreeMap::new(),
            stdin: false,
            pty: None,
            timeout_ms: None,
            tag: None,
        }
    }
}

/// Size of a terminal, in characters.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct PtySize {
    /// Columns.
    pub cols: u16,
    /// Rows.
    pub rows: u16,
}

/// A process is there.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Started {
    /// Process id in the guest.
    pub pid: u32,
    /// Bytes of output (all streams together) that come before the first this stream will carry.
    /// A reader that counts what it gets can attach again with `after` = this + its count.
    pub offset: u64,
}

/// How a process ended. Exactly one of `code` and `signal` is set, unless it never ran.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Exit {
    /// Exit code, 0 to 255.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<i32>,
    /// The signal that ended it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// It was killed because its time was up.
    #[serde(default)]
    pub timed_out: bool,
    /// The guest's kernel killed it, or one of its children, for lack of memory.
    #[serde(default)]
    pub out_of_memory: bool,
}

/// A process the agent knows.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ProcessInfo {
    /// Process id in the guest.
    pub pid: u32,
    /// Its name, if it was given one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// What was asked to run.
    pub command: Command,
    /// The user it runs as.
    pub user: String,
    /// Where it started.
    pub cwd: String,
    /// The environment asked for with the request (not the sandbox's).
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// It has a terminal.
    #[serde(default)]
    pub pty: bool,
    /// Milliseconds since the epoch, guest clock.
    pub started_unix_ms: u64,
    /// Set once it has ended. Ended processes are kept for a while, for late readers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<Exit>,
}

/// All processes the agent knows, oldest first.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct ProcessList {
    /// Running ones and those ended lately.
    pub processes: Vec<ProcessInfo>,
}

/// Sends a signal.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct SignalRequest {
    /// Signal number of Linux on x86-64.
    pub signal: i32,
    /// True: only the main process. False: its whole process group; with SIGKILL also descendants
    /// that left the group.
    #[serde(default)]
    pub main_only: bool,
}
