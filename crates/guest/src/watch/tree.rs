//! What a watch covers, and what the kernel's events mean.
//!
//! A directory that appears is watched first and scanned then; what the scan finds may also be reported by
//! the new watch. So the scan's findings are remembered until the queue has been empty once: a creation that
//! comes in the meantime for one of them is dropped, and each path is told once.

use std::{
    collections::{HashMap, HashSet},
    fs, io,
    os::fd::RawFd,
    path::{Path, PathBuf},
};

use stockade_wire::{
    ErrorBody, ErrorCode,
    event::Event,
    files::{FileChange, FileEvent},
};

use super::inotify::{self, Raw};
use crate::{
    account::Names,
    failure::{Result, failed},
    files,
};

/// Directories of one watch.
const MAX_DIRECTORIES: usize = 16_384;

/// All watched directories of one watch.
pub(super) struct Tree {
    inotify: RawFd,
    root: PathBuf,
    is_recursive: bool,
    with_entries: bool,
    /// Kernel's number → path relative to the root (empty: the root itself).
    directories: HashMap<i32, PathBuf>,
    scanned: HashSet<PathBuf>,
    names: Names,
    has_ended: bool,
}

impl Tree {
    /// Watches a directory and, recursively, what is below it. `inotify` must outlive the tree.
    pub(super) fn build(inotify: RawFd, root: &str, is_recursive: bool, with_entries: bool) -> Result<Self> {
        let path = Path::new(root);
        let metadata = fs::metadata(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => ErrorBody::new(ErrorCode::NotFound, format!("path '{root}' does not exist")),
            _ => failed(format_args!("look at '{root}'"))(error),
        })?;
        if !metadata.is_dir() {
            return Err(ErrorBody::new(ErrorCode::NotADirectory, format!("path '{root}' is not a directory")));
        }
        let names = if with_entries { Names::load() } else { Names::default() };
        let mut tree = Self {
            inotify,
            root: path.to_owned(),
            is_recursive,
            with_entries,
            directories: HashMap::new(),
            scanned: HashSet::new(),
            names,
            has_ended: false,
        };
        tree.cover(PathBuf::new(), &mut |_| {}).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOSPC) => {
                ErrorBody::new(ErrorCode::TooLarge, format!("'{root}' holds too many directories to watch"))
            }
            _ => failed(format_args!("watch '{root}'"))(error),
        })?;
        tree.scanned.clear();
        Ok(tree)
    }

    pub(super) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// The queue has been empty: what the scans found has nothing more to come.
    pub(super) fn settle(&mut self) {
        self.scanned.clear();
    }

    /// Turns the kernel's events into ours, watching and scanning what appears.
    pub(super) fn digest(&mut self, raw: &[Raw]) -> Vec<Event> {
        let mut events = Vec::new();
        for raw in raw {
            if raw.mask & libc::IN_Q_OVERFLOW != 0 {
                self.recover(&mut events);
                continue;
            }
            let Some(directory) = self.directories.get(&raw.watch).cloned() else { continue };
            if raw.mask & libc::IN_IGNORED != 0 {
                self.directories.remove(&raw.watch);
            } else if raw.name.is_empty() {
                // About the directory itself: its parent's watch tells the same, but the root has none.
                let is_gone = raw.mask & (libc::IN_DELETE_SELF | libc::IN_MOVE_SELF) != 0;
                if directory.as_os_str().is_empty() && is_gone {
                    self.tell(&mut events, PathBuf::from("."), FileChange::Remove);
                    self.has_ended = true;
                    break;
                }
            } else {
                self.digest_one(raw.mask, directory.join(&raw.name), &mut events);
            }
        }
        events
    }

    fn digest_one(&mut self, mask: u32, path: PathBuf, events: &mut Vec<Event>) {
        let is_directory = mask & libc::IN_ISDIR != 0;
        if mask & (libc::IN_CREATE | libc::IN_MOVED_TO) != 0 {
            if self.scanned.remove(&path) {
                return;
            }
            self.tell(events, path.clone(), FileChange::Create);
            if is_directory && self.is_recursive {
                self.appear(path.clone(), events);
            }
        }
        if mask & libc::IN_MOVED_FROM != 0 {
            self.forget(&path);
            self.tell(events, path.clone(), FileChange::Rename);
        } else if mask & libc::IN_DELETE != 0 {
            self.forget(&path);
            self.tell(events, path, FileChange::Remove);
        } else if mask & libc::IN_ATTRIB != 0 {
            self.tell(events, path, FileChange::Chmod);
        } else if mask & libc::IN_MODIFY != 0 {
            self.tell(events, path, FileChange::Write);
        }
    }

    /// A directory has appeared: everything in it is new.
    fn appear(&mut self, path: PathBuf, events: &mut Vec<Event>) {
        let mut found = Vec::new();
        let covered = self.cover(path, &mut |path| found.push(path));
        for path in found {
            let has_content = fs::symlink_metadata(self.root.join(&path)).is_ok_and(|it| it.is_file() && it.len() > 0);
            self.tell(events, path.clone(), FileChange::Create);
            if has_content {
                self.tell(events, path, FileChange::Write);
            }
        }
        if covered.is_err_and(|error| error.raw_os_error() == Some(libc::ENOSPC)) {
            events.push(Event::Overflow);
        }
    }

    /// Watches a directory, then looks what it holds, then those below it.
    fn cover(&mut self, path: PathBuf, found: &mut dyn FnMut(PathBuf)) -> io::Result<()> {
        let is_root = path.as_os_str().is_empty();
        let mut left = vec![path];
        while let Some(directory) = left.pop() {
            if self.directories.len() >= MAX_DIRECTORIES {
                return Err(io::Error::from_raw_os_error(libc::ENOSPC));
            }
            let at = self.root.join(&directory);
            // Only the root may be a link; below it one that takes a directory's place leads nowhere.
            let watch = match inotify::add(self.inotify, &at, directory.as_os_str().is_empty()) {
                Ok(watch) => watch,
                Err(error)
                    if error.raw_os_error() == Some(libc::ENOSPC) || (is_root && self.directories.is_empty()) =>
                {
                    return Err(error);
                }
                // Gone again, or not ours to read.
                Err(_) => continue,
            };
            self.directories.insert(watch, directory.clone());
            if !self.is_recursive {
                continue;
            }
            for entry in fs::read_dir(&at).into_iter().flatten().flatten() {
                let path = directory.join(entry.file_name());
                self.scanned.insert(path.clone());
                found(path.clone());
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    left.push(path);
                }
            }
        }
        Ok(())
    }

    /// A path is gone: so are the watches of what was below it.
    fn forget(&mut self, path: &Path) {
        self.scanned.retain(|scanned| !scanned.starts_with(path));
        let inotify = self.inotify;
        self.directories.retain(|watch, directory| {
            let is_below = directory.starts_with(path);
            if is_below {
                inotify::remove(inotify, *watch);
            }
            !is_below
        });
    }

    /// Events were lost, maybe those of new directories: the whole tree is looked at again.
    fn recover(&mut self, events: &mut Vec<Event>) {
        events.push(Event::Overflow);
        if self.is_recursive {
            let _ = self.cover(PathBuf::new(), &mut |_| {});
            self.scanned.clear();
        }
    }

    /// Adds an event; a write right after a write of the same file is the same write.
    fn tell(&self, events: &mut Vec<Event>, path: PathBuf, change: FileChange) {
        let name = path.to_string_lossy().into_owned();
        if change == FileChange::Write
            && let Some(Event::File(last)) = events.last_mut()
            && last.change == change
            && last.name == name
        {
            return;
        }
        let is_described =
            self.with_entries && matches!(change, FileChange::Create | FileChange::Write | FileChange::Chmod);
        let entry = is_described.then(|| files::describe(&self.root.join(&path), &self.names).ok()).flatten();
        events.push(Event::File(FileEvent { name, change, entry }));
    }
}
