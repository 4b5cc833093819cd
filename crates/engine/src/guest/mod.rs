//! The host's side of the guest link.
//!
//! Requests whose answer is one piece have a time limit of their own; streams have none, but pings tell a
//! guest that no longer answers from one that has nothing to say. Everything a guest says is bounded.

mod greeting;
mod session;
mod streams;

use std::{collections::BTreeMap, fmt, pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{Stream, StreamExt};
use http::{Method, Request, Response};
use http_body_util::{BodyExt, Empty, Full};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::{Serialize, de::DeserializeOwned};
use stockade_wire::{
    ErrorBody, MAX_JSON_BYTES, MAX_LIST_BYTES,
    event::Event,
    files,
    machine::{self, Introduction},
    process, route,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::{Mutex, mpsc},
};
use tokio_util::sync::PollSender;

use crate::EngineError;
use session::{RequestBody, Session, broken, within};
use streams::{Answer, ChannelBody, EventReader, Port, StreamBody};

/// How long the agent may take to answer at all. An emulated guest that starts fifty commands at once was seen
/// to need more than ten seconds.
const ANSWER_PATIENCE: Duration = Duration::from_secs(30);
/// After this silence the agent is asked for a sign of life before a process is started, so that "not
/// started" can be said for certain when there is none.
const SILENCE: Duration = Duration::from_secs(2);
const LIFE_PATIENCE: Duration = Duration::from_secs(8);
/// Pieces of a port's input on their way into the link.
const PORT_PIECES: usize = 8;

/// What stands unencoded in paths and queries.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'/');

/// A link session with one guest's agent. Cheap to clone; all clones share the session.
#[derive(Clone)]
pub struct GuestClient {
    session: Arc<Session>,
    told: Told,
    hold: Option<Hold>,
}

/// Who a machine was last told to be; held by whoever tells it. It is in the machine's memory: sessions may come and go,
/// but what is restored from that memory is another machine and has been told nothing.
pub(crate) type Told = Arc<Mutex<Option<machine::Identity>>>;

/// Something that lives as long as a client, or a stream opened with it, is in use.
pub type Hold = Arc<dyn std::any::Any + Send + Sync>;

impl fmt::Debug for GuestClient {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("GuestClient").field("is_open", &self.is_open()).finish()
    }
}

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
impl GuestClient {
    /// Opens a session over a fresh connection to the guest's link port.
    pub async fn open<S>(stream: S, patience: Duration) -> Result<Self, EngineError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        Ok(Self { session: Arc::new(Session::open(stream, patience).await?), told: Told::default(), hold: None })
    }

    /// The same session, with a machine that was told so before.
    #[must_use]
    pub(crate) fn of_machine(self, told: Told) -> Self {
        Self { told, ..self }
    }

    /// The same session; what is given is dropped with the last clone of this client, and of what it opens.
    #[must_use]
    pub fn holding(&self, hold: Hold) -> Self {
        Self { hold: Some(hold), ..self.clone() }
    }

    /// Whether the session still stands.
    pub fn is_open(&self) -> bool {
        self.session.is_open()
    }

    /// Ends the session and every stream in it.
    pub fn close(&self) {
        self.session.close();
    }

    /// What the agent says of itself.
    pub async fn health(&self) -> Result<machine::AgentInfo, EngineError> {
        self.get(route::HEALTH).await
    }

    /// Makes the machine one of its own. As the first thing said in a session it costs the guest least; a machine that was
    /// told the same before is told the time.
    pub async fn set_identity(&self, identity: &machine::Identity) -> Result<(), EngineError> {
        let mut told = self.told.lock().await;
        let introduction = match told.take() {
            Some(before) if identity.is_that_of(&before) => Introduction::Time(identity.unix_time_ns),
            _ => Introduction::Identity(identity),
        };
        let json = json_bytes(&introduction)?;
        match within(ANSWER_PATIENCE, true, self.session.ask_first(&json)).await? {
            Some(answer) if answer.is_empty() => {}
            Some(refused) => return Err(EngineError::Guest(serde_json::from_slice(&refused).map_err(broken(true))?)),
            None => self.post_json(route::IDENTITY, json).await.map(drop_empty)?,
        }
        *told = Some(identity.clone());
        Ok(())
    }

    /// Writes the guest's file systems to its disk. Takes as long as the disk does.
    pub async fn sync(&self) -> Result<(), EngineError> {
        let answer = self.exchange(Method::POST, route::SYNC, empty()).await?;
        parse(answer, MAX_JSON_BYTES).await.map(drop_empty)
    }

    /// Has the agent go through all a command goes through, with one that does nothing, up to its end.
    pub async fn rehearse(&self) -> Result<(), EngineError> {
        let answer = within(ANSWER_PATIENCE, true, self.exchange(Method::POST, route::REHEARSAL, empty())).await?;
        let mut events = process_events(answer).await?.events;
        while let Some(event) = events.next().await {
            event?;
        }
        Ok(())
    }

    /// How the machine does.
    pub async fn stats(&self) -> Result<machine::Stats, EngineError> {
        self.get(route::STATS).await
    }

    /// Starts a process. Dropping the events leaves it running.
    pub async fn start(&self, request: &process::StartRequest) -> Result<Events, EngineError> {
        if self.session.silence() > SILENCE {
            let sign = self.exchange(Method::GET, route::HEALTH, empty());
            within(LIFE_PATIENCE, false, sign).await.map_err(not_started)?;
        }
        let body = json_body(request)?;
        let answer = within(ANSWER_PATIENCE, true, self.exchange(Method::POST, route::PROCESSES, body)).await?;
        process_events(answer).await
    }

    /// Attaches to a process. `after`: bytes of output already seen; `None`: only what comes from now on.
    pub async fn attach(&self, process: &Selector, after: Option<u64>) -> Result<Events, EngineError> {
        let query = after.map(|after| format!("?after={after}")).unwrap_or_default();
        let path = format!("{}{query}", process.path(route::EVENTS));
        let answer = within(ANSWER_PATIENCE, true, self.exchange(Method::GET, &path, empty())).await?;
        process_events(answer).await
    }

    /// Processes the agent knows.
    pub async fn processes(&self) -> Result<process::ProcessList, EngineError> {
        self.get(route::PROCESSES).await
    }

    /// Writes to a process's input; with `close` it then sees the end of it. Returns when the process's pipe
    /// has taken all of it.
    pub async fn write_stdin(&self, process: &Selector, body: ByteStream, close: bool) -> Result<(), EngineError> {
        let path = format!("{}?close={close}", process.path(route::STDIN));
        let answer = self.exchange(Method::POST, &path, StreamBody(body).boxed_unsync()).await?;
        parse(answer, MAX_JSON_BYTES).await.map(drop_empty)
    }

    /// Sends a signal.
    pub async fn signal(&self, process: &Selector, request: process::SignalRequest) -> Result<(), EngineError> {
        self.post(&process.path(route::SIGNAL), &request).await.map(drop_empty)
    }

    /// Changes the size of a process's terminal.
    pub async fn resize(&self, process: &Selector, size: process::PtySize) -> Result<(), EngineError> {
        self.post(&process.path(route::RESIZE), &size).await.map(drop_empty)
    }

    /// Opens a file for reading.
    pub async fn read_file(&self, request: &ReadFile) -> Result<FileBody, EngineError> {
        let mut query = Query::new(&request.path, request.user.as_deref());
        query.put("offset", Some(request.offset).filter(|offset| *offset > 0));
        query.put("length", request.length);
        let answer = within(ANSWER_PATIENCE, true, self.exchange(Method::GET, &query.0, empty())).await?;
        let (info, body) = within(ANSWER_PATIENCE, true, streams::split_entry(answer.into_body())).await?;
        Ok(FileBody { info, body })
    }

    /// Writes a file. A body that fails leaves the old file (atomic) or what had come (in place).
    pub async fn write_file(&self, request: &WriteFile, body: ByteStream) -> Result<files::EntryInfo, EngineError> {
        let mut query = Query::new(&request.path, request.user.as_deref());
        query.put("atomic", Some(true).filter(|_| request.atomic));
        query.put("mode", request.mode);
        if let Some(attributes) = &request.attributes {
            query.put("attributes", serde_json::to_string(attributes).ok());
        }
        let answer = self.exchange(Method::PUT, &query.0, StreamBody(body).boxed_unsync()).await?;
        parse(answer, MAX_JSON_BYTES).await
    }

    /// Describes a path.
    pub async fn stat(&self, request: &files::PathRequest) -> Result<files::EntryInfo, EngineError> {
        self.post(route::STAT, request).await
    }

    /// Lists a directory.
    pub async fn list(&self, request: &files::ListRequest) -> Result<files::EntryList, EngineError> {
        let exchange = async {
            let answer = self.exchange(Method::POST, route::LIST, json_body(request)?).await?;
            parse(answer, MAX_LIST_BYTES).await
        };
        within(4 * ANSWER_PATIENCE, true, exchange).await
    }

    /// Makes a directory.
    pub async fn make_dir(&self, request: &files::MakeDirRequest) -> Result<files::EntryInfo, EngineError> {
        self.post(route::MKDIR, request).await
    }

    /// Renames or moves.
    pub async fn rename(&self, request: &files::RenameRequest) -> Result<files::EntryInfo, EngineError> {
        let answer = self.exchange(Method::POST, route::RENAME, json_body(request)?).await?;
        parse(answer, MAX_JSON_BYTES).await
    }

    /// Removes. A large tree takes its time.
    pub async fn remove(&self, request: &files::RemoveRequest) -> Result<(), EngineError> {
        let answer = self.exchange(Method::POST, route::REMOVE, json_body(request)?).await?;
        parse(answer, MAX_JSON_BYTES).await.map(drop_empty)
    }

    /// Makes a symbolic link.
    pub async fn symlink(&self, request: &files::SymlinkRequest) -> Result<files::EntryInfo, EngineError> {
        self.post(route::SYMLINK, request).await
    }

    /// Changes permissions and owner.
    pub async fn set_attributes(&self, request: &files::SetAttributesRequest) -> Result<files::EntryInfo, EngineError> {
        self.post(route::ATTRIBUTES, request).await
    }

    /// Watches a directory. It is watched when this returns.
    pub async fn watch(&self, request: &files::WatchRequest) -> Result<Events, EngineError> {
        let exchange = async {
            let answer = self.exchange(Method::POST, route::WATCH, json_body(request)?).await?;
            let mut reader = EventReader::new(answer.into_body(), false);
            match reader.next().await {
                Some(Ok(Event::Watching)) => Ok(Events { started: None, events: reader.into_stream() }),
                Some(Err(error)) => Err(error),
                _ => Err(broken(true)("the guest's watch did not begin as it must")),
            }
        };
        within(4 * ANSWER_PATIENCE, true, exchange).await
    }

    /// Connects to a port on the guest's loopback.
    pub async fn connect_port(&self, port: u16) -> Result<Box<dyn PortStream>, EngineError> {
        let (sender, receiver) = mpsc::channel(PORT_PIECES);
        let path = format!("{}/{port}", route::PORTS);
        let exchange = self.exchange(Method::POST, &path, ChannelBody(receiver).boxed_unsync());
        let answer = within(ANSWER_PATIENCE, true, exchange).await?;
        Ok(Box::new(Port { sender: PollSender::new(sender), body: answer.into_body(), ahead: Bytes::new() }))
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, EngineError> {
        let exchange = async {
            let answer = self.exchange(Method::GET, path, empty()).await?;
            parse(answer, MAX_JSON_BYTES).await
        };
        within(ANSWER_PATIENCE, true, exchange).await
    }

    async fn post<T: DeserializeOwned>(&self, path: &str, request: &impl Serialize) -> Result<T, EngineError> {
        self.post_json(path, json_bytes(request)?).await
    }

    async fn post_json<T: DeserializeOwned>(&self, path: &str, json: Vec<u8>) -> Result<T, EngineError> {
        let exchange = async {
            let answer = self.exchange(Method::POST, path, whole(json)).await?;
            parse(answer, MAX_JSON_BYTES).await
        };
        within(ANSWER_PATIENCE, true, exchange).await
    }

    /// Sends one request; an answer that is not a success becomes an error.
    async fn exchange(&self, method: Method, path: &str, body: RequestBody) -> Result<Response<Answer>, EngineError> {
        // HTTP/2 wants a whole URI; the agent looks at its path alone.
        let request = Request::builder().method(method).uri(format!("http://guest{path}"));
        let request = request.body(body).map_err(broken(false))?;
        let answer = self.session.send(request).await?.map(|body| Answer::new(body, self.hold.clone()));
        if answer.status().is_success() {
            return Ok(answer);
        }
        let bytes = within(ANSWER_PATIENCE, true, streams::collect(answer.into_body(), MAX_JSON_BYTES)).await?;
        let error: ErrorBody = serde_json::from_slice(&bytes).map_err(broken(true))?;
        Err(EngineError::Guest(error))
    }
}

impl Selector {
    fn path(&self, verb: &str) -> String {
        match self {
            Self::Pid(pid) => format!("{}/{pid}/{verb}", route::PROCESSES),
            Self::Tag(tag) => {
                // A slash in a tag is no border.
                let tag = utf8_percent_encode(tag, NON_ALPHANUMERIC);
                format!("{}/tag:{tag}/{verb}", route::PROCESSES)
            }
        }
    }
}

/// The route of files with a query.
struct Query(String);

impl Query {
    fn new(path: &str, user: Option<&str>) -> Self {
        let mut query = Self(format!("{}?path={}", route::FILES, utf8_percent_encode(path, ENCODED)));
        query.put("user", user);
        query
    }

    fn put(&mut self, key: &str, value: Option<impl ToString>) {
        if let Some(value) = value {
            let value = value.to_string();
            self.0.push_str(&format!("&{key}={}", utf8_percent_encode(&value, ENCODED)));
        }
    }
}

fn empty() -> RequestBody {
    Empty::new().map_err(|never| match never {}).boxed_unsync()
}

fn whole(bytes: Vec<u8>) -> RequestBody {
    Full::new(Bytes::from(bytes)).map_err(|never| match never {}).boxed_unsync()
}

fn json_body(request: &impl Serialize) -> Result<RequestBody, EngineError> {
    json_bytes(request).map(whole)
}

fn json_bytes(request: &impl Serialize) -> Result<Vec<u8>, EngineError> {
    let bytes = serde_json::to_vec(request).map_err(broken(false))?;
    if bytes.len() > MAX_JSON_BYTES {
        let message = format!("the request is over the limit of {MAX_JSON_BYTES} bytes");
        return Err(EngineError::Guest(ErrorBody::new(stockade_wire::ErrorCode::TooLong, message)));
    }
    Ok(bytes)
}

async fn parse<T: DeserializeOwned>(answer: Response<Answer>, limit: usize) -> Result<T, EngineError> {
    let bytes = streams::collect(answer.into_body(), limit).await?;
    serde_json::from_slice(&bytes).map_err(broken(true))
}

async fn process_events(answer: Response<Answer>) -> Result<Events, EngineError> {
    let mut reader = EventReader::new(answer.into_body(), true);
    match within(ANSWER_PATIENCE, true, async { reader.next().await.transpose() }).await? {
        Some(Event::Started(started)) => Ok(Events { started: Some(started), events: reader.into_stream() }),
        _ => Err(broken(true)("the guest's stream did not begin as it must")),
    }
}

/// A failed question before the start is no start.
fn not_started(error: EngineError) -> EngineError {
    match error {
        EngineError::LinkBroken { source, .. } => EngineError::LinkBroken { started: false, source },
        other => other,
    }
}

fn drop_empty(_: serde_json::Map<String, serde_json::Value>) {}
