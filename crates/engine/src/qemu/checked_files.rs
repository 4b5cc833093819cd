//! Files whose contents this process has written and read back, or compared with their checksum.
//!
//! Snapshots and what a paused sandbox is kept in are mostly started from soon after they were written. A file is the
//! same as long as nobody has written to it, and that shows without reading it.

use std::{
    collections::HashMap,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::{layers::FrozenLayer, snapshot_dir::SnapshotManifest};
use crate::EngineError;

/// Layers up to this size are checked before a machine starts from them.
const SMALL_LAYER_BYTES: u64 = 32 << 20;
const MOST: usize = 4096;

/// What is known, by device and inode: all names of a file are one.
#[derive(Debug, Default)]
pub(crate) struct CheckedFiles {
    known: Mutex<HashMap<(u64, u64), (String, Stamp)>>,
}

/// What changes when somebody writes to a file.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(crate) struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    changed: (i64, i64),
}

impl CheckedFiles {
    /// Notes that a file has the contents a checksum stands for.
    pub(crate) fn note(&self, path: &Path, digest: &str) {
        let Some(stamp) = stamp(path) else { return };
        let mut known = self.lock();
        if known.len() >= MOST {
            known.clear();
        }
        known.insert((stamp.device, stamp.inode), (digest.to_owned(), stamp));
    }

    /// Whether it still has them for certain.
    pub(crate) fn knows(&self, path: &Path, digest: &str) -> bool {
        let Some(stamp) = stamp(path) else { return false };
        let known = self.lock();
        known.get(&(stamp.device, stamp.inode)).is_some_and(|(known, noted)| known == digest && *noted == stamp)
    }

    /// Compares the contents of the layers of a snapshot that are small and not known yet.
    pub(crate) fn check_layers(&self, directory: &Path, layers: &[FrozenLayer]) -> Result<(), EngineError> {
        for layer in layers.iter().filter(|layer| layer.bytes <= SMALL_LAYER_BYTES) {
            let path = directory.join(layer.id.file_name());
            if !self.knows(&path, &layer.digest) {
                SnapshotManifest::check_layer(directory, layer)?;
                self.note(&path, &layer.digest);
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(u64, u64), (String, Stamp)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `None`: there is no such file.
pub(crate) fn stamp(path: &Path) -> Option<Stamp> {
    let metadata = std::fs::symlink_metadata(path).ok()?;
    Some(Stamp {
        device: metadata.dev(),
        inode: metadata.ino(),
        bytes: metadata.len(),
        changed: (metadata.mtime(), metadata.mtime_nsec()),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_is_known_until_somebody_writes_to_it_whatever_its_name() {
        let directory = tempfile::tempdir().expect("a directory");
        let [path, link, copy] = ["file", "link", "copy"].map(|name| directory.path().join(name));
        fs::write(&path, b"whole").expect("written");
        let files = CheckedFiles::default();
        assert!(!files.knows(&path, "digest"));
        files.note(&path, "digest");
        assert!(files.knows(&path, "digest") && !files.knows(&path, "another"));
        fs::hard_link(&path, &link).expect("linked");
        fs::copy(&path, &copy).expect("copied");
        assert!(files.knows(&link, "digest") && !files.knows(&copy, "digest"));
        let file = fs::File::options().write(true).open(&path).expect("opened");
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).expect("set");
        assert!(!files.knows(&link, "digest"));
    }
}
