//! Processes: started on request, kept in a table while they run and for a while after.
//!
//! ```text
//! start --> Starting (forked, not yet in its program) --> Running --> Ended --> forgotten
//!               \--> report says why not                     \ signals, input, resize
//! ```
//!
//! Nothing here belongs to a link session: a process runs on when the host goes away, and its output
//! waits in its [`log::Log`].

mod cgroup;
mod input;
mod log;
mod pump;
mod reaper;
mod spawn;
mod start;
mod table;

use std::{collections::BTreeMap, os::fd::AsRawFd, sync::Arc};

use hyper::body::Incoming;
use stockade_wire::{
    ErrorBody, ErrorCode,
    process::{Exit, ProcessInfo, PtySize, SignalRequest},
};
use tokio::sync::watch;

pub(crate) use cgroup::{AGENT_GROUP, Cgroups, USER_GROUP};
pub(crate) use log::Reader;
pub(crate) use table::{Processes, Selector};

use crate::{
    Agent,
    failure::{Result, check, failed, invalid},
};
use cgroup::Cgroup;
use input::Input;
use log::Log;

/// One process the agent has started.
pub(crate) struct Process {
    info: ProcessInfo,
    log: Log,
    input: Input,
    cgroup: Option<Cgroup>,
    has_ended: watch::Sender<bool>,
    /// It is kept for late readers when it has ended.
    is_remembered: bool,
    agent: Agent,
}

impl Process {
    /// A reader of its output; `after` as in the protocol.
    pub(crate) fn attach(&self, after: Option<u64>) -> Reader {
        self.log.attach(self.info.pid, after)
    }

    /// Writes to its input.
    pub(crate) async fn write_input(&self, body: Incoming, close: bool) -> Result<()> {
        self.input.write(body, close, self.has_ended.subscribe()).await
    }

    /// Sends a signal.
    pub(crate) fn signal(&self, request: SignalRequest) -> Result<()> {
        if !(1..=64).contains(&request.signal) {
            return Err(ErrorBody::new(ErrorCode::UnknownSignal, format!("{} is not a signal", request.signal)));
        }
        if self.log.exit().is_some() {
            return Err(self.gone());
        }
        if request.signal == libc::SIGKILL && !request.main_only {
            self.kill_everything();
            return Ok(());
        }
        let pid = self.info.pid as i32;
        let target = if request.main_only { pid } else { -pid };
        // SAFETY: kill has no preconditions. The process is ours and not reaped, so the id is its own.
        match check(unsafe { libc::kill(target, request.signal) }.into()) {
            Ok(_) => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Err(self.gone()),
            Err(error) => Err(failed(format_args!("send signal {} to process {pid}", request.signal))(error)),
        }
    }

    /// Changes the size of its terminal; the kernel raises SIGWINCH.
    pub(crate) fn resize(&self, size: PtySize) -> Result<()> {
        let Some(terminal) = self.input.terminal() else {
            let message = format!("process {} has no terminal", self.info.pid);
            return Err(ErrorBody::new(ErrorCode::NotATerminal, message));
        };
        start::set_size(terminal.as_raw_fd(), size).map_err(failed("resize the terminal"))
    }

    /// SIGKILL to the group, and with a cgroup to all descendants.
    fn kill_everything(&self) {
        if let Some(cgroup) = &self.cgroup
            && cgroup.kill().is_ok()
        {
            return;
        }
        // SAFETY: kill has no preconditions; as in `signal`.
        unsafe { libc::kill(-(self.info.pid as i32), libc::SIGKILL) };
    }

    fn was_out_of_memory(&self) -> bool {
        self.cgroup.as_ref().is_some_and(Cgroup::was_out_of_memory)
    }

    /// Tells readers, writers and the table that it has ended.
    fn end(&self, exit: Exit) {
        self.log.finish(exit);
        self.has_ended.send_replace(true);
        self.input.close();
        let agent = self.agent.clone();
        let Some(group) = self.cgroup.as_ref().map(Cgroup::path) else { return };
        // On another thread: whoever waits for this end need not wait for the kernel's housekeeping.
        tokio::task::spawn_blocking(move || {
            if let Some(cgroups) = agent.cgroups() {
                cgroups.discard(group);
                cgroups.make_spare();
            }
        });
    }

    fn gone(&self) -> ErrorBody {
        ErrorBody::new(ErrorCode::NoSuchProcess, format!("process {} has ended", self.info.pid))
    }

    fn describe(&self) -> ProcessInfo {
        ProcessInfo { exit: self.log.exit(), ..self.info.clone() }
    }
}

/// Refuses what no environment can hold.
pub(crate) fn check_env(env: &BTreeMap<String, String>) -> Result<()> {
    for (key, value) in env {
        if key.is_empty() || key.contains(['=', '\0']) {
            return Err(invalid(format!("'{}' cannot be the name of a variable", key.escape_default())));
        }
        if value.contains('\0') {
            return Err(invalid(format!("the value of variable {key} contains a NUL byte")));
        }
    }
    Ok(())
}

impl Agent {
    /// All processes known, oldest first.
    pub(crate) fn list_processes(&self) -> stockade_wire::process::ProcessList {
        self.shared().processes.list()
    }

    /// The process a request names.
    pub(crate) fn find_process(&self, selector: &Selector) -> Result<Arc<Process>> {
        self.shared().processes.find(selector)
    }
}
