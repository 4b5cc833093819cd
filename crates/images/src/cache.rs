//! Where built things are kept, so that they are built once.
//!
//! ```text
//! <cache>/lock                 flock of whoever builds
//! <cache>/building-XXXXXX/     unfinished; worthless without its builder
//! <cache>/<kind>-<digest>/     whole and never changed again
//! ```
//!
//! An entry is built under a temporary name and renamed when whole. Its name says all it depends on, so
//! an entry that is there is right. Several servers and data directories may use one cache at once: they
//! take hard links of what they need, so that an entry may be removed at any time.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use nix::fcntl::{Flock, FlockArg};
use tempfile::TempDir;

use crate::{
    ImageError,
    progress::{Progress, Step, Unit},
};

const UNFINISHED: &str = "building-";
/// Entries of a kind that stay: the one in use and what a change of mind may want back.
const KEPT: usize = 3;
const LOCK_RETRY: Duration = Duration::from_millis(100);

#[derive(Clone, Debug)]
pub(crate) struct Cache {
    root: PathBuf,
}

/// Held while something is built.
pub(crate) struct Lock {
    _file: Flock<File>,
}

impl Cache {
    pub(crate) fn open(root: &Path) -> Result<Self, ImageError> {
        fs::create_dir_all(root).map_err(ImageError::host(format!("create the cache {}", root.display())))?;
        // Absolute, since programs run in other directories get paths of it.
        let root = root.canonicalize().map_err(ImageError::host(format!("find the cache {}", root.display())))?;
        Ok(Self { root })
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The entry, if it is there.
    pub(crate) fn find(&self, name: &str) -> Option<PathBuf> {
        let path = self.root.join(name);
        // The time tells `prune` what is in use. A cache that cannot be written to is still good to read.
        let now = fs::FileTimes::new().set_modified(SystemTime::now());
        File::open(&path).ok()?.set_times(now).ok();
        Some(path)
    }

    /// The entry; `build` fills an empty directory if it is not there. Two processes that want it at
    /// once build it once. Whatever fails, or is dropped half-way, leaves nothing.
    pub(crate) async fn ensure<B>(&self, name: &str, progress: &dyn Progress, build: B) -> Result<PathBuf, ImageError>
    where
        B: AsyncFnOnce(&Path) -> Result<(), ImageError>,
    {
        if let Some(path) = self.find(name) {
            return Ok(path);
        }
        let lock = self.lock(progress).await?;
        if let Some(path) = self.find(name) {
            return Ok(path);
        }
        let staging = self.staging(&lock)?;
        build(staging.path()).await?;
        let path = self.root.join(name);
        fs::rename(staging.path(), &path).map_err(ImageError::host(format!("create {}", path.display())))?;
        // There is nothing left under the temporary name.
        let _ = staging.keep();
        self.prune(name, &lock);
        Ok(path)
    }

    /// Waits for the right to build.
    pub(crate) async fn lock(&self, progress: &dyn Progress) -> Result<Lock, ImageError> {
        let path = self.root.join("lock");
        let action = || format!("lock {}", path.display());
        let mut file = File::create(&path).map_err(ImageError::host(action()))?;
        let mut waiting = None;
        loop {
            file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(file) => return Ok(Lock { _file: file }),
                Err((file, nix::Error::EWOULDBLOCK)) => file,
                Err((_, error)) => return Err(ImageError::host(action())(error.into())),
            };
            waiting.get_or_insert_with(|| Step::begin(progress, "waiting for another build", Unit::Items)).tell("");
            tokio::time::sleep(LOCK_RETRY).await;
        }
    }

    /// An empty directory for a build. What dead builders left is removed: whoever holds the lock is
    /// the only living one.
    fn staging(&self, _: &Lock) -> Result<TempDir, ImageError> {
        for (name, path) in self.entries() {
            if name.starts_with(UNFINISHED) {
                remove_unfinished(&path)?;
            }
        }
        let mut builder = tempfile::Builder::new();
        builder.prefix(UNFINISHED).permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755));
        builder
            .tempdir_in(&self.root)
            .map_err(ImageError::host(format!("create a directory in {}", self.root.display())))
    }

    /// Removes all but the newest entries of a kind.
    pub(crate) fn prune(&self, name: &str, _: &Lock) {
        let Some((kind, _)) = name.split_once('-') else { return };
        let mut entries: Vec<_> = self
            .entries()
            .into_iter()
            .filter(|(other, _)| other.split_once('-').is_some_and(|(other, _)| other == kind))
            .filter_map(|(other, path)| Some((other != name, path.metadata().ok()?.modified().ok()?, path)))
            .collect();
        entries.sort_by_key(|(is_other, modified, _)| (*is_other, std::cmp::Reverse(*modified)));
        for (_, _, path) in entries.into_iter().skip(KEPT) {
            if let Err(error) = fs::remove_dir_all(&path) {
                tracing::warn!(path = %path.display(), %error, "cannot remove an old cache entry");
            }
        }
    }

    fn entries(&self) -> Vec<(String, PathBuf)> {
        let entries = fs::read_dir(&self.root).into_iter().flatten().flatten();
        entries.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path()))).collect()
    }
}

/// Removes a dead build, unless something is still mounted in it: that would be removed as well.
fn remove_unfinished(path: &Path) -> Result<(), ImageError> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    if mounts.contains(&*path.to_string_lossy()) {
        let source = io::Error::other("something is mounted below it; unmount it");
        return Err(ImageError::Host { action: format!("remove {}", path.display()), source });
    }
    fs::remove_dir_all(path).map_err(ImageError::host(format!("remove {}", path.display())))
}

/// Makes `target` a tree of hard links to the files of `source`; sparse copies where the two lie on
/// different file systems. Appears whole or not at all.
pub(crate) async fn link_tree(source: &Path, target: &Path) -> Result<(), ImageError> {
    let parent = target.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(ImageError::host(format!("create {}", parent.display())))?;
    let staging = tempfile::Builder::new()
        .prefix(".linking-")
        .tempdir_in(parent)
        .map_err(ImageError::host(format!("create a directory in {}", parent.display())))?;
    link_directory(source, staging.path()).await?;
    let mode = source.metadata().map_err(ImageError::host(format!("read {}", source.display())))?.permissions();
    fs::set_permissions(staging.path(), mode).map_err(ImageError::host(format!("create {}", target.display())))?;
    fs::rename(staging.path(), target).map_err(ImageError::host(format!("create {}", target.display())))?;
    let _ = staging.keep();
    Ok(())
}

async fn link_directory(source: &Path, target: &Path) -> Result<(), ImageError> {
    let mut pending = vec![(source.to_owned(), target.to_owned())];
    while let Some((from, to)) = pending.pop() {
        let action = || format!("link {} to {}", from.display(), to.display());
        for entry in fs::read_dir(&from).map_err(ImageError::host(action()))? {
            let entry = entry.map_err(ImageError::host(action()))?;
            let to = to.join(entry.file_name());
            if entry.file_type().map_err(ImageError::host(action()))?.is_dir() {
                fs::create_dir(&to).map_err(ImageError::host(action()))?;
                pending.push((entry.path(), to));
            } else {
                link_file(&entry.path(), &to).await?;
            }
        }
    }
    Ok(())
}

pub(crate) async fn link_file(from: &Path, to: &Path) -> Result<(), ImageError> {
    let action = || format!("link {} to {}", from.display(), to.display());
    match fs::hard_link(from, to) {
        // Refused also where the file is another user's (`fs.protected_hardlinks`).
        Err(error) if matches!(error.kind(), io::ErrorKind::CrossesDevices | io::ErrorKind::PermissionDenied) => {}
        done => return done.map_err(ImageError::host(action())),
    }
    let copy =
        crate::program::Program::new("cp", "coreutils", action()).args(["--sparse=always", "--preserve=mode", "--"]);
    copy.args([from, to]).output().await.map(drop)
}

/// Bytes a file takes on the disk.
pub(crate) fn allocated_bytes(path: &Path) -> io::Result<u64> {
    Ok(path.metadata()?.blocks() * 512)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::progress::Silent;

    fn names(cache: &Cache) -> Vec<String> {
        let mut names: Vec<_> =
            cache.entries().into_iter().map(|(name, _)| name).filter(|name| name != "lock").collect();
        names.sort();
        names
    }

    #[tokio::test]
    async fn two_that_want_the_same_entry_build_it_once() {
        let scratch = tempfile::tempdir().expect("a temporary directory");
        let cache = Cache::open(scratch.path()).expect("it can be created");
        let builds = AtomicU32::new(0);
        let want = || {
            cache.ensure("disk-1", &Silent, async |staging: &Path| {
                builds.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
                fs::write(staging.join("file"), "whole").map_err(ImageError::host("write"))
            })
        };
        let (one, two) = tokio::join!(want(), want());
        assert_eq!(one.expect("built"), two.expect("found"));
        assert_eq!(builds.load(Ordering::Relaxed), 1);
        assert_eq!(names(&cache), ["disk-1"]);
    }

    #[tokio::test]
    async fn a_failed_and_a_dropped_build_leave_nothing_and_the_next_one_works() {
        let scratch = tempfile::tempdir().expect("a temporary directory");
        let cache = Cache::open(scratch.path()).expect("it can be created");
        let fail = cache.ensure("disk-1", &Silent, async |staging: &Path| {
            fs::write(staging.join("half"), "").map_err(ImageError::host("write"))?;
            Err(ImageError::Answer { what: "nothing".into() })
        });
        assert!(fail.await.is_err());
        let never = cache.ensure("disk-1", &Silent, async |_: &Path| std::future::pending().await);
        assert!(futures_poll_once(never).await.is_none());
        // A builder that was killed could not clean up.
        fs::create_dir(scratch.path().join("building-dead")).expect("created");
        let works = cache.ensure("disk-1", &Silent, async |_: &Path| Ok(())).await;
        assert!(works.is_ok_and(|path| path.is_dir()));
        assert_eq!(names(&cache), ["disk-1"]);
    }

    async fn futures_poll_once<F: Future>(future: F) -> Option<F::Output> {
        tokio::select! {
            biased;
            output = future => Some(output),
            () = std::future::ready(()) => None,
        }
    }

    #[tokio::test]
    async fn old_entries_of_a_kind_go_and_other_kinds_stay() {
        let scratch = tempfile::tempdir().expect("a temporary directory");
        let cache = Cache::open(scratch.path()).expect("it can be created");
        for name in ["kernel-1", "disk-1", "disk-2", "disk-3", "disk-4", "disk-5"] {
            cache.ensure(name, &Silent, async |_: &Path| Ok(())).await.expect("built");
            let past = fs::FileTimes::new()
                .set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(name.as_bytes()[name.len() - 1].into()));
            File::open(scratch.path().join(name)).and_then(|file| file.set_times(past)).expect("it is ours");
        }
        assert_eq!(names(&cache), ["disk-3", "disk-4", "disk-5", "kernel-1"]);
    }

    #[tokio::test]
    async fn a_linked_tree_shares_its_files_and_outlives_the_original() {
        let scratch = tempfile::tempdir().expect("a temporary directory");
        let (source, target) = (scratch.path().join("source"), scratch.path().join("data/target"));
        fs::create_dir_all(source.join("deep")).expect("created");
        fs::write(source.join("deep/file"), "content").expect("written");
        link_tree(&source, &target).await.expect("linked");
        let inode = |root: &Path| root.join("deep/file").metadata().expect("it is there").ino();
        assert_eq!(inode(&source), inode(&target));
        fs::remove_dir_all(&source).expect("removed");
        assert_eq!(fs::read_to_string(target.join("deep/file")).expect("still there"), "content");
    }
}
