//! Waits for children, in one place: a status can be collected only once.
//!
//! As process 1 the agent also inherits every orphan. It looks at who is waiting (`WNOWAIT`) before it
//! collects, so that a child of ours is always told to its owner and an orphan to nobody.

use std::{io, sync::Weak};

use tokio::signal::unix::{SignalKind, signal};

use super::{Processes, pump::Ended};
use crate::{Agent, agent::Shared, failure::check};

impl Agent {
    /// Starts reaping if nobody does yet.
    pub(crate) fn start_reaper(&self) -> io::Result<()> {
        let Some(token) = self.shared().processes.reaper_token() else { return Ok(()) };
        let mut signals = signal(SignalKind::child())?;
        let shared = std::sync::Arc::downgrade(self.shared());
        tokio::spawn(async move {
            let _token = token;
            while signals.recv().await.is_some() {
                if !sweep(&shared) {
                    break;
                }
            }
        });
        Ok(())
    }
}

/// `false` once the agent is gone.
fn sweep(shared: &Weak<Shared>) -> bool {
    let Some(shared) = shared.upgrade() else { return false };
    let processes = &shared.processes;
    if std::process::id() == 1 {
        while let Some(pid) = waiting_child() {
            processes.reap_any(pid, || wait(pid));
        }
    } else {
        // The program around a hosted agent may have other children.
        for pid in processes.children() {
            sweep_one(processes, pid);
        }
    }
    true
}

/// Reaps one of the agent's own children if it has ended.
pub(super) fn sweep_one(processes: &Processes, pid: i32) {
    processes.reap(pid, || wait(pid));
}

/// A child that has ended, left unreaped.
fn waiting_child() -> Option<i32> {
    // SAFETY: all zero is a valid value, and the call fills it.
    let info = unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        check(libc::waitid(libc::P_ALL, 0, &raw mut info, flags).into()).ok()?;
        info.si_pid()
    };
    (info > 0).then_some(info)
}

fn wait(pid: i32) -> Option<Ended> {
    let mut status = 0;
    // SAFETY: `status` is a place for the answer.
    let result = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
    if result == 0 {
        return None;
    }
    Some(if result > 0 && libc::WIFEXITED(status) {
        Ended::Code(libc::WEXITSTATUS(status))
    } else if result > 0 {
        Ended::Signal(libc::WTERMSIG(status))
    } else {
        // Somebody else collected it: what it was cannot be known, and it must not look like success.
        Ended::Signal(libc::SIGKILL)
    })
}
