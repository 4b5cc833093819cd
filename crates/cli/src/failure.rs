//! What the user sees when something goes wrong.
//!
//! ```text
//! error: sandbox "sbx…" not found
//!
//! hint: `stockade ls` shows the sandboxes there are
//! ```
//!
//! With `--json` it is the API's error object, `{"error":{"code","message","hint"}}`, on standard error; where a sandbox's
//! state is in the way, `sandbox` and `state` beside them.
//!
//! Exit codes: 0 success; 1 the command failed; 2 bad usage. `run`, `exec`, `shell` and `attach` end with the
//! command's own code, 128 + the signal that killed it, 124 when its time was up, 125 when Stockade itself
//! failed, 126 when the command could not be executed, 127 when it was not found.

use std::fmt::Display;

/// Exit code of commands whose exit code is their own.
pub(crate) const FAILED: u8 = 1;
/// Exit code of a command line that makes no sense.
pub(crate) const BAD_USAGE: u8 = 2;
/// Exit code of `run`, `exec` and `shell` when the command was killed because its time was up.
pub(crate) const TIMED_OUT: u8 = 124;
/// Exit code of `run`, `exec` and `shell` when Stockade failed and not the command.
pub(crate) const OWN_FAILURE: u8 = 125;
/// Exit code of `run`, `exec` and `shell` when the command could not be executed.
pub(crate) const CANNOT_EXECUTE: u8 = 126;
/// Exit code of `run`, `exec` and `shell` when the command was not found.
pub(crate) const COMMAND_NOT_FOUND: u8 = 127;

/// Why a command failed, in the form the user gets it.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Failure {
    /// For programs; the API's code if the API said it.
    pub(crate) code: String,
    /// What happened to which thing.
    pub(crate) message: String,
    /// What to do about it.
    pub(crate) hint: Option<String>,
    /// What is in the way, if the API named it.
    pub(crate) in_the_way: Option<Box<InTheWay>>,
    /// The process's exit code.
    pub(crate) exit: u8,
}

/// The sandbox whose state is in the way, and that state.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct InTheWay {
    pub(crate) sandbox: String,
    pub(crate) state: String,
}

impl Failure {
    pub(crate) fn new(code: impl Into<String>, message: impl Into<String>) -> Self {
        let (code, message) = (code.into(), message.into());
        Self { code, message, hint: None, in_the_way: None, exit: FAILED }
    }

    /// Something on this host: `cannot read /x: permission denied`.
    pub(crate) fn host(action: impl Display, error: impl Display) -> Self {
        Self::new("host_error", format!("cannot {action}: {error}"))
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds `hint` unless there is one: the server knows better.
    pub(crate) fn or_hint(self, hint: impl Into<String>) -> Self {
        if self.hint.is_some() { self } else { self.hint(hint) }
    }

    pub(crate) fn exit(mut self, exit: u8) -> Self {
        self.exit = exit;
        self
    }

    /// The exit code this failure gets where other codes are the command's own.
    pub(crate) fn of_exec(self) -> Self {
        let exit = match self.code.as_str() {
            "cannot_execute" if self.says_not_found() => COMMAND_NOT_FOUND,
            "cannot_execute" => CANNOT_EXECUTE,
            _ => OWN_FAILURE,
        };
        self.exit(exit)
    }

    fn says_not_found(&self) -> bool {
        let message = self.message.to_lowercase();
        message.contains("not found") || message.contains("no such file") || message.contains("does not exist")
    }
}

/// An error and its causes in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let part = next.to_string();
        // Some libraries repeat the cause in their own text.
        if !text.contains(&part) {
            text.push_str(": ");
            text.push_str(&part);
        }
        cause = next.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_is_missing_and_one_that_is_forbidden_have_the_codes_of_a_shell() {
        let exit = |code: &str, message: &str| Failure::new(code, message).of_exec().exit;
        assert_eq!(exit("cannot_execute", "cannot execute \"nope\": No such file or directory"), 127);
        assert_eq!(exit("cannot_execute", "cannot execute \"/etc/passwd\": Permission denied"), 126);
        assert_eq!(exit("sandbox_not_found", "sandbox not found"), 125);
    }
}
