//! Directories of saved state. The service owns their names and times, the engine what is in them.
//!
//! ```text
//! <data directory>/snapshots/<snapshot id>/   one per snapshot record
//! <data directory>/paused/<snapshot id>/      one per hibernated or stopped sandbox, named in its record
//! ```
//!
//! Each pause has a directory of a new name, so that what an interrupted one left is in nobody's way. What has
//! no record is swept at start. A directory that is being started from is leased; it is removed after that.

use std::{
    collections::{BTreeSet, HashMap},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use stockade_engine::EngineError;
use stockade_model::SnapshotId;
use tokio::sync::Notify;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    Snapshot,
    Paused,
}

pub(crate) struct StateDirs {
    root: PathBuf,
    leases: Arc<Leases>,
}

#[derive(Default)]
struct Leases {
    held: Mutex<HashMap<SnapshotId, usize>>,
    released: Notify,
}

/// Keeps a snapshot's directory, until dropped.
pub(crate) struct Lease {
    id: SnapshotId,
    leases: Arc<Leases>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut held = self.leases.lock();
        if let Some(count) = held.get_mut(&self.id) {
            *count -= 1;
            if *count == 0 {
                held.remove(&self.id);
                self.leases.released.notify_waiters();
            }
        }
    }
}

impl Leases {
    fn lock(&self) -> MutexGuard<'_, HashMap<SnapshotId, usize>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StateDirs {
    pub(crate) fn new(root: PathBuf) -> Self {
        Self { root, leases: Arc::default() }
    }

    fn parent(&self, kind: Kind) -> PathBuf {
        self.root.join(match kind {
            Kind::Snapshot => "snapshots",
            Kind::Paused => "paused",
        })
    }

    pub(crate) fn path(&self, kind: Kind, id: &SnapshotId) -> PathBuf {
        self.parent(kind).join(id.as_str())
    }

    /// Makes the two directories.
    pub(crate) async fn prepare(&self) -> Result<(), EngineError> {
        for kind in [Kind::Snapshot, Kind::Paused] {
            let path = self.parent(kind);
            let made = tokio::fs::create_dir_all(&path).await;
            made.map_err(EngineError::host(format!("make {}", path.display())))?;
        }
        Ok(())
    }

    /// Removes a directory and whatever of it is half there. Repeatable.
    pub(crate) async fn remove(&self, kind: Kind, id: &SnapshotId) -> Result<(), EngineError> {
        let parent = self.parent(kind);
        let id = id.clone();
        // Ids are all of one length: none is the beginning of another.
        let wanted = move |name: &str| name.trim_start_matches('.').starts_with(id.as_str());
        remove_entries(parent, wanted).await.map(drop)
    }

    /// Removes every directory that has no place in `keep`; returns how many.
    pub(crate) async fn sweep(&self, kind: Kind, keep: BTreeSet<SnapshotId>) -> Result<usize, EngineError> {
        remove_entries(self.parent(kind), move |name| !keep.iter().any(|id| id.as_str() == name)).await
    }

    /// Keeps a snapshot's directory until the lease is dropped. To be taken before its record is read.
    pub(crate) fn lease(&self, id: &SnapshotId) -> Lease {
        *self.leases.lock().entry(id.clone()).or_default() += 1;
        Lease { id: id.clone(), leases: Arc::clone(&self.leases) }
    }

    pub(crate) fn is_leased(&self, id: &SnapshotId) -> bool {
        self.leases.lock().contains_key(id)
    }

    /// Waits until nobody starts from it.
    pub(crate) async fn unleased(&self, id: &SnapshotId) {
        loop {
            let released = self.leases.released.notified();
            let mut released = std::pin::pin!(released);
            released.as_mut().enable();
            if !self.is_leased(id) {
                return;
            }
            released.await;
        }
    }
}

async fn remove_entries(parent: PathBuf, wanted: impl Fn(&str) -> bool + Send + 'static) -> Result<usize, EngineError> {
    let action = format!("remove saved state from {}", parent.display());
    let work = move || {
        let mut removed = 0;
        for entry in std::fs::read_dir(&parent)? {
            let entry = entry?;
            if wanted(&entry.file_name().to_string_lossy()) {
                removed += 1;
                let gone = if entry.file_type()?.is_dir() {
                    std::fs::remove_dir_all(entry.path())
                } else {
                    std::fs::remove_file(entry.path())
                };
                match gone {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    gone => gone?,
                }
            }
        }
        Ok(removed)
    };
    let done = tokio::task::spawn_blocking(work).await.map_err(io::Error::other);
    done.and_then(|done: io::Result<usize>| done).map_err(EngineError::host(action))
}

/// Bytes a directory takes on the host; files with several names are shared among them.
pub(crate) fn bytes_of(directory: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(directory) else { return 0 };
    let of = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => bytes_of(&entry.path()),
        Ok(metadata) => metadata.blocks() * 512 / metadata.nlink().max(1),
        Err(_) => 0,
    };
    entries.flatten().map(of).sum()
}
