//! The host's side of the guest link.

use std::{collections::BTreeMap, pin::Pin, time::Duration};

use bytes::Bytes;
use futures::Stream;
use stockade_wire::{event::Event, files, machine, process};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::EngineError;

/// A link session with one guest's agent. Cheap to clone; all clones share the session.
#[derive(Clone, Debug)]
pub struct GuestClient {}

/// Names a process: by id or by tag.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Selector {
    /// Process id in the guest.
    Pid(u32),
    /// The tag it was started with.
    Tag(String),
}

/// Bytes in pieces, from or to somewhere that can fail.
pub type ByteStream = Pin<Box<dyn Stream<Item = Result<Bytes, std::io::Error>> + Send>>;

/// What a process or a watch reports, in order. A stream that ends without [`Event::Exit`] broke: the
/// last item is then an error.
pub struct Events {
    /// The first frame of a process's stream.
    pub started: Option<process::Started>,
    /// What follows.
    pub events: Pin<Box<dyn Stream<Item = Result<Event, EngineError>> + Send>>,
}

/// Which bytes of which file to read.
#[derive(Clone, Debug, Default)]
pub struct ReadFile {
    /// The path.
    pub path: String,
    /// With whose rights.
    pub user: Option<String>,
    /// First byte wanted.
    pub offset: u64,
    /// How many bytes; `None`: to the end.
    pub length: Option<u64>,
}

/// Where and how to write a file.
#[derive(Clone, Debug, Default)]
pub struct WriteFile {
    /// The path; missing parents are made and belong to the user.
    pub path: String,
    /// With whose rights.
    pub user: Option<String>,
    /// Write beside it and rename: readers see the old file or the whole new one. False: truncate in
    /// place (an existing file keeps its mode and owner, watchers see exactly one file).
    pub atomic: bool,
    /// Permission bits of a new file; `None`: 0666 less the umask.
    pub mode: Option<u32>,
    /// Replaces all `user.` attributes.
    pub attributes: Option<BTreeMap<String, String>>,
}

/// An open file.
pub struct FileBody {
    /// The file as it was when opened (links followed).
    pub info: files::EntryInfo,
    /// Its bytes.
    pub body: ByteStream,
}

/// A connection to a port in the guest.
pub trait PortStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> PortStream for T {}

#[expect(
    clippy::missing_errors_doc,
    reason = "all fail alike: `Guest` if the agent refuses, `LinkBroken` if the session breaks"
)]
#[expect(unused_variables, clippy::todo, reason = "replaced by the link client")]
impl GuestClient {
    /// Opens a session over a fresh connection to the guest's link port.
    pub async fn open<S>(stream: S, patience: Duration) -> Result<Self, EngineError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        todo!()
    }

    /// Whether the session still stands.
    pub fn is_open(&self) -> bool {
        todo!()
    }

    /// Ends the session and every stream in it.
    pub fn close(&self) {
        todo!()
    }

    /// What the agent says of itself.
    pub async fn health(&self) -> Result<machine::AgentInfo, EngineError> {
        todo!()
    }

    /// Makes the machine one of its own.
    pub async fn set_identity(&self, identity: &machine::Identity) -> Result<(), EngineError> {
        todo!()
    }

    /// Writes the guest's file systems to its disk.
    pub async fn sync(&self) -> Result<(), EngineError> {
        todo!()
    }

    /// How the machine does.
    pub async fn stats(&self) -> Result<machine::Stats, EngineError> {
        todo!()
    }

    /// Starts a process. Dropping the events leaves it running.
    pub async fn start(&self, request: &process::StartRequest) -> Result<Events, EngineError> {
        todo!()
    }

    /// Attaches to a process. `after`: bytes of output already seen; `None`: only what comes from now on.
    pub async fn attach(&self, process: &Selector, after: Option<u64>) -> Result<Events, EngineError> {
        todo!()
    }

    /// Processes the agent knows.
    pub async fn processes(&self) -> Result<process::ProcessList, EngineError> {
        todo!()
    }

    /// Writes to a process's input; with `close` it then sees the end of it.
    pub async fn write_stdin(&self, process: &Selector, body: ByteStream, close: bool) -> Result<(), EngineError> {
        todo!()
    }

    /// Sends a signal.
    pub async fn signal(&self, process: &Selector, request: process::SignalRequest) -> Result<(), EngineError> {
        todo!()
    }

    /// Changes the size of a process's terminal.
    pub async fn resize(&self, process: &Selector, size: process::PtySize) -> Result<(), EngineError> {
        todo!()
    }

    /// Opens a file for reading.
    pub async fn read_file(&self, request: &ReadFile) -> Result<FileBody, EngineError> {
        todo!()
    }

    /// Writes a file. A body that fails leaves the old file (atomic) or what had come (in place).
    pub async fn write_file(&self, request: &WriteFile, body: ByteStream) -> Result<files::EntryInfo, EngineError> {
        todo!()
    }

    /// Describes a path.
    pub async fn stat(&self, request: &files::PathRequest) -> Result<files::EntryInfo, EngineError> {
        todo!()
    }

    /// Lists a directory.
    pub async fn list(&self, request: &files::ListRequest) -> Result<files::EntryList, EngineError> {
        todo!()
    }

    /// Makes a directory.
    pub async fn make_dir(&self, request: &files::MakeDirRequest) -> Result<files::EntryInfo, EngineError> {
        todo!()
    }

    /// Renames or moves.
    pub async fn rename(&self, request: &files::RenameRequest) -> Result<files::EntryInfo, EngineError> {
        todo!()
    }

    /// Removes.
    pub async fn remove(&self, request: &files::RemoveRequest) -> Result<(), EngineError> {
        todo!()
    }

    /// Makes a symbolic link.
    pub async fn symlink(&self, request: &files::SymlinkRequest) -> Result<files::EntryInfo, EngineError> {
        todo!()
    }

    /// Changes permissions and owner.
    pub async fn set_attributes(&self, request: &files::SetAttributesRequest) -> Result<files::EntryInfo, EngineError> {
        todo!()
    }

    /// Watches a directory. It is watched when this returns.
    pub async fn watch(&self, request: &files::WatchRequest) -> Result<Events, EngineError> {
        todo!()
    }

    /// Connects to a port on the guest's loopback.
    pub async fn connect_port(&self, port: u16) -> Result<Box<dyn PortStream>, EngineError> {
        todo!()
    }
}
