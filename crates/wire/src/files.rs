//! Files: paths are absolute, `~`, `~/x`, or relative to the user's home; every access happens with
//! the rights of the user named (absent: the default user) and inside the guest alone.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What an entry is.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A device, pipe or socket.
    Other,
}

/// One entry, described by itself: a link is a link, whatever it points to.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct EntryInfo {
    /// Last component of the path. Bytes that are not UTF-8 show as U+FFFD; see `lossy`.
    pub name: String,
    /// The name or path is not valid UTF-8, so `name` and `path` only show it: no request can name the
    /// entry (a process in the guest can).
    #[serde(default, skip_serializing_if = "is_false")]
    pub lossy: bool,
    /// Absolute path in the guest.
    pub path: String,
    /// What it is.
    pub kind: EntryKind,
    /// Bytes.
    pub size: u64,
    /// Permission bits with set-id and sticky (07777).
    pub mode: u32,
    /// Owner's id and name (the id in digits if it has no name).
    pub uid: u32,
    /// Owner's name.
    pub owner: String,
    /// Group's id.
    pub gid: u32,
    /// Group's name.
    pub group: String,
    /// Milliseconds since the epoch.
    pub modified_unix_ms: i64,
    /// Where a link points, as written in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_target: Option<String>,
    /// For a link that leads somewhere: the path, kind, mode and size of what it leads to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resolved: Option<Resolved>,
    /// Extended attributes of the `user.` namespace that are valid UTF-8, without the prefix.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub attributes: BTreeMap<String, String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature serde asks for")]
fn is_false(value: &bool) -> bool {
    !value
}

/// What a link leads to in the end.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Resolved {
    /// Absolute path without links.
    pub path: String,
    /// What is there.
    pub kind: EntryKind,
    /// Permission bits.
    pub mode: u32,
    /// Bytes.
    pub size: u64,
}

/// A directory's entries, in the order of their names; with depth, parents before children.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct EntryList {
    /// The entries; links are not entered.
    pub entries: Vec<EntryInfo>,
}

/// Names one path.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct PathRequest {
    /// The path.
    pub path: String,
    /// With whose rights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// Lists a directory.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ListRequest {
    /// The directory.
    pub path: String,
    /// With whose rights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// How many levels; 0 counts as 1.
    #[serde(default)]
    pub depth: u32,
}

/// Makes a directory.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct MakeDirRequest {
    /// The directory.
    pub path: String,
    /// Owner of all that is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Make missing parents (0755, owned by the user); an existing directory is an error either way.
    #[serde(default)]
    pub parents: bool,
    /// Permission bits; absent: 0755.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
}

/// Renames or moves.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct RenameRequest {
    /// What is there now.
    pub from: String,
    /// What it is to be called. Missing parents are made.
    pub to: String,
    /// With whose rights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// Removes.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct RemoveRequest {
    /// What to remove; a link is removed itself.
    pub path: String,
    /// With whose rights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// A directory with all it holds. False: only a file, a link or an empty directory.
    #[serde(default)]
    pub recursive: bool,
    /// A path that does not exist is no error.
    #[serde(default)]
    pub missing_ok: bool,
}

/// Makes a symbolic link.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct SymlinkRequest {
    /// What the link says.
    pub target: String,
    /// Where the link is.
    pub path: String,
    /// With whose rights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// Changes permissions and owner; absent fields stay.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct SetAttributesRequest {
    /// What to change; a link is followed.
    pub path: String,
    /// With whose rights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Permission bits (07777).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// New owner, by name or decimal id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// New group, by name or decimal id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

/// Watches a directory.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct WatchRequest {
    /// The directory.
    pub path: String,
    /// With whose rights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Also all directories below it, those made later included.
    #[serde(default)]
    pub recursive: bool,
    /// Describe the entry with each create, write and chmod.
    #[serde(default)]
    pub entry: bool,
}

/// What happened to a file.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FileChange {
    /// It appeared (made, or moved in).
    Create,
    /// Its content changed.
    Write,
    /// It went away.
    Remove,
    /// It got another name (reported under the old one).
    Rename,
    /// Its mode, owner or attributes changed.
    Chmod,
}

/// One change under a watched path.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct FileEvent {
    /// Relative to the watched path.
    pub name: String,
    /// What happened.
    pub change: FileChange,
    /// The entry as it was just after, where asked for and still there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entry: Option<EntryInfo>,
}
