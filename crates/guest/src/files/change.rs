//! Makes, renames, links and changes entries.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, PermissionsExt, chown},
    path::Path,
};

use stockade_wire::files::{EntryInfo, SetAttributesRequest};

use super::{entry, write::make_parents};
use crate::{
    account,
    failure::{Result, failed, invalid},
};

const DEFAULT_MODE: u32 = 0o755;

/// Makes a directory.
pub(super) fn make_dir(path: &str, parents: bool, mode: Option<u32>) -> Result<EntryInfo> {
    let at = Path::new(path);
    if parents {
        make_parents(at)?;
    }
    let made = fs::DirBuilder::new().mode(mode.unwrap_or(DEFAULT_MODE)).create(at);
    made.map_err(failed(format_args!("make directory '{path}'")))?;
    if let Some(mode) = mode {
        // What was asked for is not subject to the umask.
        fs::set_permissions(at, fs::Permissions::from_mode(mode & 0o7777))
            .map_err(failed(format_args!("set the mode of '{path}'")))?;
    }
    entry::stat(path)
}

/// Renames or moves; between file systems too for anything but directories.
pub(super) fn rename(from: &str, to: &str) -> Result<EntryInfo> {
    fs::symlink_metadata(from).map_err(entry::missing(Path::new(from)))?;
    make_parents(Path::new(to))?;
    match fs::rename(from, to) {
        Ok(()) => entry::stat(to),
        Err(error) if error.raw_os_error() == Some(libc::EXDEV) => {
            move_across(from, to).map_err(failed(format_args!("move '{from}' to '{to}' on another file system")))?;
            entry::stat(to)
        }
        Err(error) => Err(failed(format_args!("rename '{from}' to '{to}'"))(error)),
    }
}

fn move_across(from: &str, to: &str) -> io::Result<()> {
    let metadata = fs::symlink_metadata(from)?;
    if metadata.is_symlink() {
        std::os::unix::fs::symlink(fs::read_link(from)?, to)?;
    } else if metadata.is_file() {
        fs::copy(from, to)?;
    } else {
        return Err(io::Error::from_raw_os_error(libc::EXDEV));
    }
    fs::remove_file(from)
}

/// Makes a symbolic link.
pub(super) fn symlink(target: &str, path: &str) -> Result<EntryInfo> {
    if target.is_empty() || target.contains('\0') {
        return Err(invalid("a link's target is a path without NUL bytes"));
    }
    std::os::unix::fs::symlink(target, path).map_err(failed(format_args!("make link '{path}'")))?;
    entry::stat(path)
}

/// Changes mode and owner.
pub(super) fn set_attributes(path: &str, request: &SetAttributesRequest) -> Result<EntryInfo> {
    let at = Path::new(path);
    let owner = request.owner.as_deref().map(account::user_id).transpose()?;
    let group = request.group.as_deref().map(account::group_id).transpose()?;
    if request.mode.is_some_and(|mode| mode > 0o7777) {
        return Err(invalid("the mode is over 07777"));
    }
    fs::metadata(at).map_err(entry::missing(at))?;
    if owner.is_some() || group.is_some() {
        chown(at, owner, group).map_err(failed(format_args!("change the owner of '{path}'")))?;
    }
    // After the owner: changing that clears the set-id bits.
    if let Some(mode) = request.mode {
        fs::set_permissions(at, fs::Permissions::from_mode(mode))
            .map_err(failed(format_args!("change the mode of '{path}'")))?;
    }
    entry::stat(path)
}
