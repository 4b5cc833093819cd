use serde::{Deserialize, Serialize};

/// Why the agent refused, as a word that never changes its meaning.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The request itself makes no sense: malformed JSON, NUL byte, negative number.
    InvalidArgument,
    /// The file or directory does not exist.
    NotFound,
    /// What was to be created exists.
    AlreadyExists,
    /// A directory where a file is needed.
    IsADirectory,
    /// A file where a directory is needed.
    NotADirectory,
    /// A directory that would have to be empty is not.
    NotEmpty,
    /// The user named may not do this.
    PermissionDenied,
    /// A path, an argument list or an environment is longer than the kernel takes.
    TooLong,
    /// The guest's disk is full.
    NoSpace,
    /// The guest has no memory or no process slots left.
    OutOfMemory,
    /// The user is not in the guest's `/etc/passwd`.
    UnknownUser,
    /// The working directory does not exist or is not a directory.
    BadCwd,
    /// The program does not exist or cannot be executed.
    CannotExecute,
    /// No process has this id or tag.
    NoSuchProcess,
    /// The process has no standard input to write to (not asked for, or closed).
    StdinClosed,
    /// Not a signal of this system.
    UnknownSignal,
    /// The process has no terminal.
    NotATerminal,
    /// Nothing listens on the port.
    PortClosed,
    /// Too many of something at the moment: processes kept, watches, open files.
    LimitReached,
    /// What was asked about is more than one request may be about, now and later: entries of a list, levels of a tree.
    TooLarge,
    /// Anything else the kernel said; the message carries its words.
    Internal,
}

impl ErrorCode {
    /// The HTTP status that goes with the code on the link.
    pub fn status(self) -> u16 {
        match self {
            Self::InvalidArgument | Self::UnknownSignal | Self::TooLong | Self::BadCwd => 400,
            Self::IsADirectory | Self::NotADirectory | Self::NotATerminal => 400,
            Self::CannotExecute | Self::UnknownUser => 400,
            Self::PermissionDenied => 403,
            Self::NotFound | Self::NoSuchProcess => 404,
            Self::AlreadyExists | Self::NotEmpty | Self::StdinClosed => 409,
            Self::TooLarge => 413,
            Self::LimitReached => 429,
            Self::PortClosed => 502,
            Self::OutOfMemory => 503,
            Self::NoSpace => 507,
            Self::Internal => 500,
        }
    }
}

/// The body of every answer that is not a success.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize, thiserror::Error)]
#[error("{message}")]
pub struct ErrorBody {
    /// What went wrong, for programs.
    pub code: ErrorCode,
    /// What went wrong, for people; names the path, user or process.
    pub message: String,
}

impl ErrorBody {
    /// An error with a message that names the thing it is about.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}
