//! Describes entries.
//!
//! Names that are not UTF-8 are shown with U+FFFD and marked `lossy`: JSON cannot carry them, and a name
//! that silently means something else would be worse than one that can only be looked at.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::{self, Metadata},
    io,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::Path,
};

use stockade_wire::{
    ErrorBody, ErrorCode,
    files::{EntryInfo, EntryKind, Resolved},
};

use super::attributes;
use crate::{
    account::Names,
    failure::{Result, failed},
};

/// Describes a path; a link is a link.
pub(super) fn stat(path: &str) -> Result<EntryInfo> {
    describe(Path::new(path), &Names::load())
}

/// As [`stat`], with names read before.
pub(crate) fn describe(path: &Path, names: &Names) -> Result<EntryInfo> {
    let metadata = fs::symlink_metadata(path).map_err(missing(path))?;
    Ok(entry(path, &metadata, names))
}

/// An entry of which the metadata is known.
pub(super) fn entry(path: &Path, metadata: &Metadata, names: &Names) -> EntryInfo {
    let name = path.file_name().unwrap_or(OsStr::new("/"));
    let kind = kind(metadata);
    let is_link = kind == EntryKind::Symlink;
    EntryInfo {
        name: name.to_string_lossy().into_owned(),
        lossy: path.to_str().is_none(),
        path: path.to_string_lossy().into_owned(),
        kind,
        size: metadata.size(),
        mode: metadata.mode() & 0o7777,
        uid: metadata.uid(),
        owner: names.user(metadata.uid()),
        gid: metadata.gid(),
        group: names.group(metadata.gid()),
        modified_unix_ms: metadata.mtime() * 1000 + metadata.mtime_nsec() / 1_000_000,
        link_target: is_link.then(|| fs::read_link(path).ok()).flatten().map(|to| to.to_string_lossy().into_owned()),
        resolved: is_link.then(|| resolve(path)).flatten(),
        attributes: if is_link { BTreeMap::new() } else { attributes::of(path) },
    }
}

/// For `map_err`: names the path that is missing, else the path that could not be looked at.
pub(super) fn missing(path: &Path) -> impl FnOnce(io::Error) -> ErrorBody {
    let path = path.display().to_string();
    move |error| {
        if error.raw_os_error() == Some(libc::ENOENT) {
            return ErrorBody::new(ErrorCode::NotFound, format!("path '{path}' does not exist"));
        }
        failed(format_args!("look at '{path}'"))(error)
    }
}

fn kind(metadata: &Metadata) -> EntryKind {
    let kind = metadata.file_type();
    if kind.is_file() {
        EntryKind::File
    } else if kind.is_dir() {
        EntryKind::Directory
    } else if kind.is_symlink() {
        EntryKind::Symlink
    } else {
        debug_assert!(kind.is_fifo() || kind.is_socket() || kind.is_char_device() || kind.is_block_device());
        EntryKind::Other
    }
}

fn resolve(path: &Path) -> Option<Resolved> {
    let to = fs::canonicalize(path).ok()?;
    let metadata = fs::metadata(&to).ok()?;
    Some(Resolved {
        path: to.to_string_lossy().into_owned(),
        kind: kind(&metadata),
        mode: metadata.mode() & 0o7777,
        size: metadata.size(),
    })
}
