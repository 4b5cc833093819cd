//! Snapshots of the fake engine.
//!
//! ```text
//! <directory>/fake-snapshot   "memory" or "disk"
//! <directory>/home/           copy of the guest's files
//! ```

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use super::script::{Moment, Script, Step};
use crate::{EngineError, SnapshotReport, SnapshotScope};

const MARKER: &str = "fake-snapshot";
const HOME: &str = "home";

/// Copies the guest's files; the directory appears whole or not at all.
pub(super) async fn take(
    home: &Path,
    directory: &Path,
    scope: SnapshotScope,
    script: &Script,
) -> Result<SnapshotReport, EngineError> {
    let partial = partial(directory);
    let made = async {
        let (from, to) = (home.to_owned(), partial.clone());
        blocking("take a snapshot", move || {
            fs::create_dir(&to)?;
            copy_tree(&from, &to.join(HOME))?;
            let word = if scope == SnapshotScope::DiskOnly { "disk" } else { "memory" };
            fs::write(to.join(MARKER), word)
        })
        .await?;
        script.pass(Step::Halted, Moment::Before).await?;
        if directory.exists() {
            let error = io::Error::from(io::ErrorKind::AlreadyExists);
            return Err(EngineError::host(format!("make {}", directory.display()))(error));
        }
        fs::rename(&partial, directory).map_err(EngineError::host(format!("make {}", directory.display())))?;
        check(directory)
    };
    let made = made.await;
    if made.is_err() {
        remove(&partial);
    }
    made
}

/// What a directory holds, if it is whole.
pub(super) fn check(directory: &Path) -> Result<SnapshotReport, EngineError> {
    let marker = directory.join(MARKER);
    let damaged = |path: &Path, reason: &str| EngineError::Damaged { path: path.to_owned(), reason: reason.to_owned() };
    let word = fs::read_to_string(&marker).map_err(|_| damaged(&marker, "it is missing"))?;
    if !directory.join(HOME).is_dir() {
        return Err(damaged(&directory.join(HOME), "it is missing"));
    }
    let scope = match word.as_str() {
        "memory" => SnapshotScope::MemoryAndDisk,
        "disk" => SnapshotScope::DiskOnly,
        _ => return Err(damaged(&marker, "it says neither memory nor disk")),
    };
    let memory_bytes = if scope == SnapshotScope::DiskOnly { 0 } else { 1 << 20 };
    Ok(SnapshotReport { scope, paused: Duration::from_millis(1), memory_bytes, disk_bytes: 4096 })
}

pub(super) async fn copy_home(snapshot: &Path, to: &Path) -> Result<(), EngineError> {
    let (from, to) = (snapshot.join(HOME), to.to_owned());
    blocking("restore a snapshot", move || copy_tree(&from, &to)).await
}

pub(super) fn remove(directory: &Path) {
    // It may not be there.
    fs::remove_dir_all(directory).ok();
}

fn partial(directory: &Path) -> PathBuf {
    let mut name = directory.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

async fn blocking(
    action: &'static str,
    work: impl FnOnce() -> io::Result<()> + Send + 'static,
) -> Result<(), EngineError> {
    let done = tokio::task::spawn_blocking(work).await.map_err(io::Error::other);
    done.and_then(|done| done).map_err(EngineError::host(action))
}

/// Files and links; what else there is, and what goes away meanwhile, is left out.
fn copy_tree(from: &Path, to: &Path) -> io::Result<()> {
    match fs::create_dir(to) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (kind, target) = (entry.file_type()?, to.join(entry.file_name()));
        let copied = if kind.is_dir() {
            copy_tree(&entry.path(), &target)
        } else if kind.is_symlink() {
            fs::read_link(entry.path()).and_then(|link| std::os::unix::fs::symlink(link, &target))
        } else if kind.is_file() {
            fs::copy(entry.path(), &target).map(drop)
        } else {
            Ok(())
        };
        match copied {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            copied => copied?,
        }
    }
    Ok(())
}
