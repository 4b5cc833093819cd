//! Lists directories.

use std::{ffi::OsString, fs, path::Path};

use hyper::Response;
use stockade_wire::{
    ErrorBody, ErrorCode, MAX_LIST_BYTES,
    files::{EntryInfo, EntryKind, EntryList},
};

use super::{absolute, entry};
use crate::{
    Agent,
    account::Names,
    bulk,
    failure::{Result, failed},
    http,
    http::Reply,
};

/// Entries of one answer.
const MAX_ENTRIES: usize = 50_000;
/// What JSON adds to an entry's texts, on the large side.
const ENTRY_COST: usize = 320;

pub(super) async fn answer(agent: &Agent, user: Option<&str>, path: &str, depth: u32) -> Result<Response<Reply>> {
    let account = agent.account(user)?;
    let path = absolute(path, &account.home)?;
    http::json(&bulk::run_as(&account, move || list(&path, depth.max(1))).await?)
}

/// Everything down to a depth, parents before children, by name. Links are not entered.
fn list(path: &str, depth: u32) -> Result<EntryList> {
    let root = Path::new(path);
    let metadata = fs::metadata(root).map_err(entry::missing(root))?;
    if !metadata.is_dir() {
        return Err(ErrorBody::new(ErrorCode::NotADirectory, format!("path '{path}' is not a directory")));
    }
    let mut listing = Listing { root: path, names: Names::load(), entries: Vec::new(), cost: 0 };
    let names = names_in(root).map_err(failed(format_args!("list '{path}'")))?;
    // A stack of directories still to finish, each with its names in reverse: no recursion however deep
    // the tree is.
    let mut stack = vec![(root.to_path_buf(), names)];
    while let Some((directory, names)) = stack.last_mut() {
        let Some(name) = names.pop() else {
            stack.pop();
            continue;
        };
        let path = directory.join(name);
        // What has vanished meanwhile is no longer there.
        let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
        let entry = entry::entry(&path, &metadata, &listing.names);
        let is_directory = entry.kind == EntryKind::Directory;
        listing.add(entry)?;
        if is_directory && stack.len() < depth as usize {
            // One that may not be read is listed itself, without what it holds.
            stack.push((path.clone(), names_in(&path).unwrap_or_default()));
        }
    }
    Ok(EntryList { entries: listing.entries })
}

struct Listing<'a> {
    root: &'a str,
    names: Names,
    entries: Vec<EntryInfo>,
    cost: usize,
}

impl Listing<'_> {
    fn add(&mut self, entry: EntryInfo) -> Result<()> {
        let attributes: usize = entry.attributes.iter().map(|(key, value)| key.len() + value.len() + 6).sum();
        let links = entry.link_target.as_ref().map_or(0, String::len)
            + entry.resolved.as_ref().map_or(0, |resolved| resolved.path.len());
        self.cost += ENTRY_COST + entry.name.len() + entry.path.len() + attributes + links;
        if self.entries.len() >= MAX_ENTRIES || self.cost > MAX_LIST_BYTES {
            return Err(ErrorBody::new(
                ErrorCode::TooLarge,
                format!("more than {} entries in '{}'", self.entries.len(), self.root),
            ));
        }
        self.entries.push(entry);
        Ok(())
    }
}

/// The names in a directory, last first.
fn names_in(directory: &Path) -> std::io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        names.push(entry?.file_name());
        if names.len() > MAX_ENTRIES {
            break;
        }
    }
    names.sort_unstable_by(|a, b| b.cmp(a));
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_answer_can_hold_is_refused_as_too_large() {
        let place = tempfile::tempdir().expect("a directory");
        let metadata = fs::symlink_metadata(place.path()).expect("metadata");
        let mut listing = Listing { root: "/data", names: Names::load(), entries: Vec::new(), cost: 0 };
        let entry = entry::entry(place.path(), &metadata, &listing.names);
        listing.entries = vec![entry.clone(); MAX_ENTRIES - 1];
        listing.add(entry.clone()).expect("the last one");
        let refused = listing.add(entry.clone()).expect_err("one too many");
        assert_eq!(
            (refused.code, refused.message.as_str()),
            (ErrorCode::TooLarge, "more than 50000 entries in '/data'")
        );
        let mut listing = Listing { entries: Vec::new(), cost: MAX_LIST_BYTES, ..listing };
        assert_eq!(listing.add(entry).expect_err("too many bytes").code, ErrorCode::TooLarge);
    }
}
