//! Removes entries and trees without ever following a link: each directory is opened relative to its parent
//! with `O_NOFOLLOW`, so that whatever is swapped in meanwhile, nothing outside of the tree is touched.

use std::{ffi::CString, fs, io, os::fd::AsRawFd, path::Path};

use nix::{
    dir::Dir,
    errno::Errno,
    fcntl::OFlag,
    sys::stat::Mode,
    unistd::{UnlinkatFlags, unlinkat},
};
use stockade_wire::{ErrorBody, ErrorCode};

use super::entry;
use crate::failure::{Result, failed, invalid};

/// Directories inside one another: each holds a descriptor open.
const MAX_DEPTH: usize = 2000;

pub(super) fn remove(path: &str, recursive: bool, missing_ok: bool) -> Result<()> {
    let at = Path::new(path);
    let metadata = match fs::symlink_metadata(at) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && missing_ok => return Ok(()),
        other => other.map_err(entry::missing(at))?,
    };
    let (Some(parent), Some(name)) = (at.parent(), at.file_name()) else {
        return Err(invalid("the root directory cannot be removed"));
    };
    if !metadata.is_dir() {
        return fs::remove_file(at).map_err(failed(format_args!("remove '{path}'")));
    }
    if !recursive {
        return fs::remove_dir(at).map_err(failed(format_args!("remove '{path}'")));
    }
    let to_error = |errno: Errno| failed(format_args!("remove '{path}'"))(errno.into());
    let parent = Dir::open(parent, flags() & !OFlag::O_NOFOLLOW, Mode::empty()).map_err(to_error)?;
    let name = c_name(name)?;
    remove_tree(parent, name).map_err(|errno| match errno {
        Errno::E2BIG => {
            ErrorBody::new(ErrorCode::TooLarge, format!("'{path}' is more than {MAX_DEPTH} directories deep"))
        }
        errno => to_error(errno),
    })
}

fn flags() -> OFlag {
    OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC
}

fn c_name(name: &std::ffi::OsStr) -> Result<CString> {
    use std::os::unix::ffi::OsStrExt;
    CString::new(name.as_bytes()).map_err(|_| invalid("the path contains a NUL byte"))
}

/// One open directory of the tree: its name in its parent and what it still holds.
struct Level {
    directory: Dir,
    name: CString,
    left: Vec<CString>,
}

fn remove_tree(parent: Dir, name: CString) -> nix::Result<()> {
    let mut levels = vec![Level { directory: parent, name: CString::default(), left: vec![name] }];
    while let Some(level) = levels.last_mut() {
        let Some(name) = level.left.pop() else {
            let done = levels.pop();
            let (Some(done), Some(above)) = (done, levels.last()) else { break };
            ignore_missing(unlinkat(&above.directory, done.name.as_c_str(), UnlinkatFlags::RemoveDir))?;
            continue;
        };
        match unlinkat(&level.directory, name.as_c_str(), UnlinkatFlags::NoRemoveDir) {
            Err(Errno::EISDIR) => {}
            other => {
                ignore_missing(other)?;
                continue;
            }
        }
        if levels.len() > MAX_DEPTH {
            return Err(Errno::E2BIG);
        }
        let level = enter(&levels[levels.len() - 1].directory, name)?;
        levels.extend(level);
    }
    Ok(())
}

/// Opens a directory below another and reads what it holds. `None`: it is no longer there.
fn enter(above: &Dir, name: CString) -> nix::Result<Option<Level>> {
    // SAFETY of the descriptor: `above` is open over the call.
    let opened = Dir::openat(above, name.as_c_str(), flags(), Mode::empty());
    let mut directory = match opened {
        Err(Errno::ENOENT) => return Ok(None),
        other => other?,
    };
    debug_assert!(directory.as_raw_fd() >= 0);
    let mut left = Vec::new();
    for entry in directory.iter() {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            left.push(entry.file_name().to_owned());
        }
    }
    Ok(Some(Level { directory, name, left }))
}

fn ignore_missing(result: nix::Result<()>) -> nix::Result<()> {
    match result {
        Err(Errno::ENOENT) => Ok(()),
        other => other,
    }
}
