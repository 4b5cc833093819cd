//! What host and guest say to each other over the guest link.
//!
//! ```text
//! host                                     guest agent
//!  | ---- Hello { protocol, epoch } ------->  |   raw bytes, one per link session
//!  | <--- Hello { protocol, epoch } --------  |   the same epoch, echoed
//!  | ---- message: Introduction --------->    |   once or never, answered by a message
//!  | ==== HTTP/2, host is the client ======>  |   routes below, bodies stream both ways
//! ```
//!
//! The link is a virtio-serial port: it has no notion of a connection, and after a restore or a fork
//! it may still hold half a frame of the session the snapshot was taken in. [`hello`] says how both
//! sides find the start of the new session. Everything above it is ordinary HTTP/2: one library
//! gives us streams, flow control in both directions, and cancellation.
//!
//! Bodies are JSON unless a route says otherwise; event streams are [`event`] frames. Each side
//! treats the other as hostile: sizes are bounded before anything is allocated.

pub mod event;
pub mod files;
pub mod hello;
pub mod machine;
pub mod network;
pub mod process;

mod error;

pub use error::{ErrorBody, ErrorCode};

/// The protocol this build speaks. A host refuses an agent of another number.
pub const PROTOCOL: u32 = 3;

/// Largest JSON body either side accepts, in bytes.
pub const MAX_JSON_BYTES: usize = 4 << 20;

/// Largest answer to a list request, in bytes.
pub const MAX_LIST_BYTES: usize = 16 << 20;

/// The routes of the agent, in one place for client and server.
///
/// `{selector}` is a decimal process id or a percent-encoded tag behind `tag:`.
pub mod route {
    /// `GET` → [`AgentInfo`](crate::machine::AgentInfo).
    pub const HEALTH: &str = "/v1/health";
    /// `POST` [`Introduction`](crate::machine::Introduction) → `{}`; repeatable.
    pub const IDENTITY: &str = "/v1/identity";
    /// `POST` → event frames of a command that does nothing, run as the default user and forgotten when it ends.
    pub const REHEARSAL: &str = "/v1/rehearsal";
    /// `POST` → `{}` once the guest's file systems are written to its disk.
    pub const SYNC: &str = "/v1/sync";
    /// `GET` → [`Stats`](crate::machine::Stats).
    pub const STATS: &str = "/v1/stats";
    /// `POST` [`StartRequest`](crate::process::StartRequest) → event frames; `GET` →
    /// [`ProcessList`](crate::process::ProcessList).
    pub const PROCESSES: &str = "/v1/processes";
    /// `GET /v1/processes/{selector}/events?after=N` → event frames.
    pub const EVENTS: &str = "events";
    /// `POST /v1/processes/{selector}/stdin?close=BOOL`, body: the bytes.
    pub const STDIN: &str = "stdin";
    /// `POST /v1/processes/{selector}/signal` [`SignalRequest`](crate::process::SignalRequest).
    pub const SIGNAL: &str = "signal";
    /// `POST /v1/processes/{selector}/resize` [`PtySize`](crate::process::PtySize).
    pub const RESIZE: &str = "resize";
    /// `GET ?path&user&offset&length` → the length of what follows as u32 big-endian, an
    /// [`EntryInfo`](crate::files::EntryInfo) as JSON, then the file's bytes to the end of the body;
    /// `PUT ?path&user&atomic&mode&attributes` bytes → `EntryInfo`. `mode` is decimal, `attributes` a
    /// JSON object of strings.
    pub const FILES: &str = "/v1/files";
    /// `POST` [`PathRequest`](crate::files::PathRequest) → `EntryInfo`.
    pub const STAT: &str = "/v1/fs/stat";
    /// `POST` [`ListRequest`](crate::files::ListRequest) → [`EntryList`](crate::files::EntryList).
    pub const LIST: &str = "/v1/fs/list";
    /// `POST` [`MakeDirRequest`](crate::files::MakeDirRequest) → `EntryInfo`.
    pub const MKDIR: &str = "/v1/fs/mkdir";
    /// `POST` [`RenameRequest`](crate::files::RenameRequest) → `EntryInfo`.
    pub const RENAME: &str = "/v1/fs/rename";
    /// `POST` [`RemoveRequest`](crate::files::RemoveRequest) → `{}`.
    pub const REMOVE: &str = "/v1/fs/remove";
    /// `POST` [`SymlinkRequest`](crate::files::SymlinkRequest) → `EntryInfo`.
    pub const SYMLINK: &str = "/v1/fs/symlink";
    /// `POST` [`SetAttributesRequest`](crate::files::SetAttributesRequest) → `EntryInfo`.
    pub const ATTRIBUTES: &str = "/v1/fs/attributes";
    /// `POST` [`WatchRequest`](crate::files::WatchRequest) → event frames.
    pub const WATCH: &str = "/v1/fs/watch";
    /// `POST /v1/ports/{port}`: the request body goes to 127.0.0.1:port in the guest, the response
    /// body comes from it. A refused connection is 502 with code `port_closed`.
    pub const PORTS: &str = "/v1/ports";
}
