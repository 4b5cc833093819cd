//! What a build tells.

use std::sync::{Mutex, PoisonError};

use jiff::Timestamp;

use super::BuildPlace;

/// Lines kept of one build, and bytes of one line.
const MOST_LINES: usize = 20_000;
const LONGEST_LINE: usize = 4096;

/// One line.
#[derive(Clone, Debug)]
pub struct LogEntry {
    /// When.
    pub at: Timestamp,
    /// How much it matters.
    pub level: LogLevel,
    /// About what.
    pub place: BuildPlace,
    /// The line.
    pub message: String,
}

/// How much a line matters.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum LogLevel {
    /// What commands write.
    Info,
    /// What commands write to standard error.
    Warn,
    /// Why the build failed.
    Error,
}

#[derive(Default)]
pub(super) struct Log(Mutex<Vec<LogEntry>>);

impl Log {
    pub(super) fn say(&self, level: LogLevel, place: BuildPlace, message: &str) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let message = match lines.len() {
            MOST_LINES => "(the log is full; the rest is left out)".to_owned(),
            // The reason of a failure is told whatever came before.
            count if count > MOST_LINES && level != LogLevel::Error => return,
            _ => message.chars().take(LONGEST_LINE).collect(),
        };
        lines.push(LogEntry { at: Timestamp::now(), level, place, message });
    }

    pub(super) fn read(&self, offset: usize, limit: usize) -> Vec<LogEntry> {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().skip(offset).take(limit).cloned().collect()
    }
}
