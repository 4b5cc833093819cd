//! `filesystem.Filesystem`: all but file contents, which go by [`super::files`].

use std::collections::BTreeMap;

use axum::response::Response;
use futures::{Stream, StreamExt, stream};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use stockade_engine::{EngineError, guest::Events};
use stockade_wire::{
    ErrorCode,
    event::Event,
    files::{self, EntryKind, FileChange},
};
use tokio::time::{Instant, MissedTickBehavior};

use super::{
    super::connect::{self, Code, ConnectError, Item, Reply, ServerStream, Unary},
    Caller,
    guest_error::Asked,
};

/// Prefix of the `user.` attributes that are E2B's file metadata.
pub(super) const METADATA_PREFIX: &str = "e2b.";

/// `EntryInfo`. A link has the type and mode of what it leads to, and is marked as a link.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct EntryInfo {
    name: String,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    path: String,
    /// A 64-bit number is a string in proto3 JSON.
    size: String,
    mode: u32,
    permissions: String,
    owner: String,
    group: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    modified_time: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    symlink_target: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    is_symlink: bool,
}

impl From<files::EntryInfo> for EntryInfo {
    fn from(entry: files::EntryInfo) -> Self {
        let is_symlink = entry.kind == EntryKind::Symlink;
        let resolved = entry.resolved.as_ref().filter(|_| is_symlink);
        let kind = resolved.map_or(entry.kind, |resolved| resolved.kind);
        let kind = match kind {
            EntryKind::File => Some("FILE_TYPE_FILE"),
            EntryKind::Directory => Some("FILE_TYPE_DIRECTORY"),
            // SDKs drop entries without a type, so a link that leads nowhere or to a device keeps its own.
            EntryKind::Symlink => Some("FILE_TYPE_SYMLINK"),
            EntryKind::Other if is_symlink => Some("FILE_TYPE_SYMLINK"),
            EntryKind::Other => None,
        };
        let symlink_target =
            is_symlink.then(|| resolved.map(|resolved| resolved.path.clone()).or(entry.link_target)).flatten();
        Self {
            kind,
            size: entry.size.to_string(),
            mode: resolved.map_or(entry.mode, |resolved| resolved.mode) & 0o777,
            permissions: permissions(entry.kind, entry.mode),
            modified_time: Timestamp::from_millisecond(entry.modified_unix_ms).ok(),
            symlink_target,
            metadata: metadata(entry.attributes),
            is_symlink,
            name: entry.name,
            path: entry.path,
            owner: entry.owner,
            group: entry.group,
        }
    }
}

fn metadata(attributes: BTreeMap<String, String>) -> BTreeMap<String, String> {
    let ours = attributes.into_iter().filter_map(|(name, value)| {
        let key = name.strip_prefix(METADATA_PREFIX)?.to_owned();
        Some((key, value))
    });
    ours.collect()
}

/// The mode as Go prints it: kind and set bits as letters, then three times `rwx`.
fn permissions(kind: EntryKind, mode: u32) -> String {
    let mut text = String::with_capacity(12);
    match kind {
        EntryKind::File => {}
        EntryKind::Directory => text.push('d'),
        EntryKind::Symlink => text.push('L'),
        EntryKind::Other => text.push('?'),
    }
    for (bit, letter) in [(0o4000, 'u'), (0o2000, 'g'), (0o1000, 't')] {
        if mode & bit != 0 {
            text.push(letter);
        }
    }
    if text.is_empty() {
        text.push('-');
    }
    for (index, letter) in "rwxrwxrwx".chars().enumerate() {
        text.push(if mode & (0o400 >> index) != 0 { letter } else { '-' });
    }
    text
}

#[derive(Serialize)]
pub(super) struct EntryResponse {
    entry: EntryInfo,
}

impl EntryResponse {
    fn of(entry: files::EntryInfo) -> Reply<Self> {
        Reply(Self { entry: entry.into() })
    }
}

#[derive(Serialize)]
pub(super) struct Done {}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct PathRequest {
    path: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct MoveRequest {
    source: String,
    destination: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct ListDirRequest {
    path: String,
    depth: u32,
}

#[derive(Serialize)]
pub(super) struct ListDirResponse {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    entries: Vec<EntryInfo>,
}

fn asked<'a>(caller: &'a Caller, path: &'a str) -> Asked<'a> {
    Asked { user: caller.user.as_deref(), cwd: None, path: Some(path) }
}

/// To look at no path is to look at the home directory.
fn looked_at(path: &str) -> String {
    if path.is_empty() { "~".to_owned() } else { path.to_owned() }
}

pub(super) async fn stat(call: Unary<PathRequest>) -> Result<Reply<EntryResponse>, ConnectError> {
    let Unary { caller, message: PathRequest { path } } = call;
    let request = files::PathRequest { path: looked_at(&path), user: caller.user.clone() };
    let entry = caller.guest.stat(&request).await.map_err(|error| asked(&caller, &path).connect_error(error))?;
    Ok(EntryResponse::of(entry))
}

pub(super) async fn make_dir(call: Unary<PathRequest>) -> Result<Reply<EntryResponse>, ConnectError> {
    let Unary { caller, message: PathRequest { path } } = call;
    let request =
        files::MakeDirRequest { path: path.clone(), user: caller.user.clone(), parents: true, mode: Some(0o755) };
    let error = match caller.guest.make_dir(&request).await {
        Ok(entry) => return Ok(EntryResponse::of(entry)),
        Err(error) => error,
    };
    // "Already a directory" is how the SDKs' `make_dir` returns false; anything else there is a mistake.
    if matches!(&error, EngineError::Guest(body) if body.code == ErrorCode::AlreadyExists) {
        let request = files::PathRequest { path: path.clone(), user: caller.user.clone() };
        let there = caller.guest.stat(&request).await.map_err(|error| asked(&caller, &path).connect_error(error))?;
        if there.resolved.as_ref().map_or(there.kind, |resolved| resolved.kind) != EntryKind::Directory {
            let message = format!("path '{path}' already exists but it is not a directory");
            return Err(ConnectError::new(Code::InvalidArgument, message));
        }
        return Err(ConnectError::new(Code::AlreadyExists, format!("directory '{path}' already exists")));
    }
    Err(asked(&caller, &path).connect_error(error))
}

pub(super) async fn rename(call: Unary<MoveRequest>) -> Result<Reply<EntryResponse>, ConnectError> {
    let Unary { caller, message: MoveRequest { source, destination } } = call;
    let request = files::RenameRequest { from: source.clone(), to: destination, user: caller.user.clone() };
    let entry = caller.guest.rename(&request).await.map_err(|error| asked(&caller, &source).connect_error(error))?;
    Ok(EntryResponse::of(entry))
}

pub(super) async fn list_dir(call: Unary<ListDirRequest>) -> Result<Reply<ListDirResponse>, ConnectError> {
    let Unary { caller, message: ListDirRequest { path, depth } } = call;
    let request = files::ListRequest { path: looked_at(&path), user: caller.user.clone(), depth };
    let list = caller.guest.list(&request).await.map_err(|error| asked(&caller, &path).connect_error(error))?;
    Ok(Reply(ListDirResponse { entries: list.entries.into_iter().map(Into::into).collect() }))
}

pub(super) async fn remove(call: Unary<PathRequest>) -> Result<Reply<Done>, ConnectError> {
    let Unary { caller, message: PathRequest { path } } = call;
    let request =
        files::RemoveRequest { path: path.clone(), user: caller.user.clone(), recursive: true, missing_ok: true };
    caller.guest.remove(&request).await.map_err(|error| asked(&caller, &path).connect_error(error))?;
    Ok(Reply(Done {}))
}

/// Network mounts need no permission of their own: there are none but those the guest makes itself.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct WatchRequest {
    path: String,
    recursive: bool,
    #[serde(alias = "include_entry")]
    include_entry: bool,
}

impl WatchRequest {
    async fn open(&self, caller: &Caller) -> Result<Events, ConnectError> {
        let request = files::WatchRequest {
            path: looked_at(&self.path),
            user: caller.user.clone(),
            recursive: self.recursive,
            entry: self.include_entry,
        };
        caller.guest.watch(&request).await.map_err(|error| asked(caller, &self.path).connect_error(error))
    }
}

#[derive(Debug, Serialize)]
pub(super) struct FilesystemEvent {
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    entry: Option<Box<EntryInfo>>,
}

impl From<files::FileEvent> for FilesystemEvent {
    fn from(event: files::FileEvent) -> Self {
        let kind = match event.change {
            FileChange::Create => "EVENT_TYPE_CREATE",
            FileChange::Write => "EVENT_TYPE_WRITE",
            FileChange::Remove => "EVENT_TYPE_REMOVE",
            FileChange::Rename => "EVENT_TYPE_RENAME",
            FileChange::Chmod => "EVENT_TYPE_CHMOD",
        };
        Self { name: event.name, kind, entry: event.entry.map(|entry| Box::new(entry.into())) }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum WatchMessage {
    Start {},
    Filesystem(FilesystemEvent),
    Keepalive {},
}

fn frame(message: &WatchMessage) -> Item {
    Item::Frame(connect::message_frame(message).freeze())
}

pub(super) async fn watch_dir(call: ServerStream<WatchRequest>) -> Response {
    let ServerStream { caller, message } = call;
    connect::stream(message.open(&caller).await.map(|events| watch_items(events, &caller)))
}

/// What the events of a watch became: something to tell, nothing, or the end.
pub(super) enum Watched {
    Event(FilesystemEvent),
    Nothing,
    Ended(Result<ConnectError, EngineError>),
}

impl Watched {
    pub(super) fn of(event: Option<Result<Event, EngineError>>) -> Self {
        match event {
            Some(Ok(Event::File(event))) => Self::Event(event.into()),
            Some(Ok(Event::Overflow)) => {
                let message = "the guest's kernel dropped events; list the directory and watch it again";
                Self::Ended(Ok(ConnectError::new(Code::DataLoss, message)))
            }
            Some(Ok(_)) => Self::Nothing,
            Some(Err(EngineError::Guest(body))) => Self::Ended(Ok(Asked::default().connect_error(body.into()))),
            Some(Err(broken)) => Self::Ended(Err(broken)),
            None => {
                let message = "the watched directory is gone";
                Self::Ended(Ok(ConnectError::new(Code::NotFound, message)))
            }
        }
    }
}

fn watch_items(events: Events, caller: &Caller) -> impl Stream<Item = Item> + use<> {
    let mut keep_alive = tokio::time::interval_at(Instant::now() + caller.keep_alive, caller.keep_alive);
    keep_alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let deadline = caller.timeout.map(|timeout| Instant::now() + timeout);
    let state = (events.events, keep_alive, false);
    let rest = stream::unfold(state, move |(mut events, mut keep_alive, done)| async move {
        if done {
            return None;
        }
        let (item, done) = loop {
            let event = tokio::select! {
                biased;
                event = events.next() => event,
                () = sleep_until(deadline) => {
                    let error = ConnectError::new(Code::DeadlineExceeded, "the time limit of this watch passed");
                    break (Item::End(Some(error)), true);
                }
                _ = keep_alive.tick() => break (frame(&WatchMessage::Keepalive {}), false),
            };
            match Watched::of(event) {
                Watched::Event(event) => break (frame(&WatchMessage::Filesystem(event)), false),
                Watched::Nothing => {}
                Watched::Ended(Ok(error)) => break (Item::End(Some(error)), true),
                Watched::Ended(Err(broken)) => break (Item::Break(std::io::Error::other(broken)), true),
            }
        };
        Some((item, (events, keep_alive, done)))
    });
    stream::once(std::future::ready(frame(&WatchMessage::Start {}))).chain(rest)
}

async fn sleep_until(until: Option<Instant>) {
    match until {
        Some(until) => tokio::time::sleep_until(until).await,
        None => std::future::pending().await,
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CreateWatcherResponse {
    watcher_id: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct WatcherRequest {
    #[serde(rename = "watcherId", alias = "watcher_id")]
    watcher_id: String,
}

#[derive(Serialize)]
pub(super) struct WatcherEventsResponse {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    events: Vec<FilesystemEvent>,
}

pub(super) async fn create_watcher(call: Unary<WatchRequest>) -> Result<Reply<CreateWatcherResponse>, ConnectError> {
    let Unary { caller, message } = call;
    let events = message.open(&caller).await?;
    let watcher_id = caller.watchers.add(&caller.sandbox.id, events)?;
    Ok(Reply(CreateWatcherResponse { watcher_id }))
}

pub(super) async fn get_watcher_events(
    call: Unary<WatcherRequest>,
) -> Result<Reply<WatcherEventsResponse>, ConnectError> {
    let Unary { caller, message: WatcherRequest { watcher_id } } = call;
    let events = caller.watchers.drain(&caller.sandbox.id, &watcher_id, &caller.guest).await?;
    Ok(Reply(WatcherEventsResponse { events }))
}

pub(super) async fn remove_watcher(call: Unary<WatcherRequest>) -> Result<Reply<Done>, ConnectError> {
    let Unary { caller, message: WatcherRequest { watcher_id } } = call;
    caller.watchers.remove(&caller.sandbox.id, &watcher_id)?;
    Ok(Reply(Done {}))
}

#[cfg(test)]
mod tests {
    use stockade_wire::files::Resolved;

    use super::*;

    fn entry(kind: EntryKind, mode: u32) -> files::EntryInfo {
        files::EntryInfo {
            name: "n".to_owned(),
            path: "/n".to_owned(),
            kind,
            size: 5_000_000_000,
            mode,
            uid: 1000,
            owner: "user".to_owned(),
            gid: 1000,
            group: "user".to_owned(),
            modified_unix_ms: 1_700_000_000_123,
            link_target: None,
            lossy: false,
            resolved: None,
            attributes: BTreeMap::new(),
        }
    }

    #[test]
    fn permissions_read_as_go_prints_them() {
        assert_eq!(permissions(EntryKind::File, 0o644), "-rw-r--r--");
        assert_eq!(permissions(EntryKind::Directory, 0o755), "drwxr-xr-x");
        assert_eq!(permissions(EntryKind::Directory, 0o1777), "dtrwxrwxrwx");
        assert_eq!(permissions(EntryKind::Symlink, 0o777), "Lrwxrwxrwx");
        assert_eq!(permissions(EntryKind::File, 0o4755), "urwxr-xr-x");
    }

    #[test]
    fn an_entry_is_proto3_json() {
        let mut file = entry(EntryKind::File, 0o640);
        file.attributes =
            [("e2b.author", "me"), ("mime", "other")].map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let json = serde_json::to_value(EntryInfo::from(file)).expect("plain data");
        assert_eq!(
            json,
            serde_json::json!({
                "name": "n", "type": "FILE_TYPE_FILE", "path": "/n", "size": "5000000000", "mode": 0o640,
                "permissions": "-rw-r-----", "owner": "user", "group": "user",
                "modifiedTime": "2023-11-14T22:13:20.123Z", "metadata": {"author": "me"},
            })
        );
    }

    #[test]
    fn a_link_shows_its_targets_type_and_a_dangling_one_its_own() {
        let mut link = entry(EntryKind::Symlink, 0o777);
        link.link_target = Some("dir".to_owned());
        let dangling = EntryInfo::from(link.clone());
        assert_eq!((dangling.kind, dangling.symlink_target.as_deref()), (Some("FILE_TYPE_SYMLINK"), Some("dir")));
        let path = "/home/dir".to_owned();
        link.resolved = Some(Resolved { path, kind: EntryKind::Directory, mode: 0o700, size: 1 });
        let whole = EntryInfo::from(link);
        assert_eq!((whole.kind, whole.mode, whole.is_symlink), (Some("FILE_TYPE_DIRECTORY"), 0o700, true));
        assert_eq!((whole.permissions.as_str(), whole.symlink_target.as_deref()), ("Lrwxrwxrwx", Some("/home/dir")));
    }
}
