//! Snapshots that machines are started from: checked once, their memory shared where that is cheaper.
//!
//! A machine's memory is made of the template's (or of nothing) and the snapshot's pages. The pages can be
//! written into each machine, which then has them for itself; or they are put into an image of all the
//! memory once, and every machine maps that. The first costs pages × machines, the second base + pages:
//! as soon as the machines alive would hold more than the image does, further ones get the image.

use std::{
    collections::HashMap,
    fs::File,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use tokio::sync::OnceCell;

use super::{
    checked_files::{CheckedFiles, Stamp, stamp},
    config::joined,
    launch::millis,
    memory::SealedMemory,
    pages::Run,
    snapshot_dir::{MAP, PAGES, SnapshotManifest},
};
use crate::EngineError;

/// With so many snapshots known, those without a machine are forgotten.
const MOST_IDLE: usize = 32;

/// Snapshots in use.
#[derive(Debug, Default)]
pub(crate) struct Images {
    loaded: Mutex<HashMap<Key, Loading>>,
}

/// A snapshot as it was when it was checked.
#[derive(Debug, Eq, Hash, PartialEq)]
struct Key {
    directory: PathBuf,
    manifest: String,
    stamps: [Option<Stamp>; 2],
}

type Loading = Arc<OnceCell<Arc<SnapshotImage>>>;

/// A snapshot's memory, checked.
#[derive(Debug)]
pub(crate) struct SnapshotImage {
    pub(crate) manifest: SnapshotManifest,
    pub(crate) runs: Vec<Run>,
    pub(crate) pages: File,
    whole: OnceCell<Arc<SealedMemory>>,
    /// One more holder for each machine.
    machines: Arc<()>,
}

/// Held by a machine that was started from a snapshot.
#[derive(Clone, Debug)]
pub(crate) struct ImageUse {
    _image: Arc<SnapshotImage>,
    _counted: Arc<()>,
}

/// How a machine gets a snapshot's pages.
pub(crate) enum Supply {
    /// They are written into it.
    Injected,
    /// It maps an image that has them.
    Whole(Arc<SealedMemory>),
}

impl Images {
    /// A snapshot's memory, checked if need be. Callers of the same snapshot share one check.
    pub(crate) async fn get(
        &self,
        directory: &Path,
        manifest: &SnapshotManifest,
        checked: &CheckedFiles,
    ) -> Result<Arc<SnapshotImage>, EngineError> {
        let stamps = [MAP, PAGES].map(|name| stamp(&directory.join(name)));
        let cell = {
            let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
            loaded.retain(|key, _| key.directory.exists());
            if loaded.len() >= MOST_IDLE {
                let is_used = |image: &Arc<SnapshotImage>| Arc::strong_count(image) > 1;
                loaded.retain(|_, loading| Arc::strong_count(loading) > 1 || loading.get().is_some_and(is_used));
            }
            let key = Key { directory: directory.to_owned(), manifest: manifest.identity(), stamps };
            loaded.entry(key).or_default().clone()
        };
        let image = cell.get_or_try_init(|| load(directory.to_owned(), manifest.clone(), checked)).await?;
        Ok(image.clone())
    }
}

async fn load(
    directory: PathBuf,
    manifest: SnapshotManifest,
    checked: &CheckedFiles,
) -> Result<Arc<SnapshotImage>, EngineError> {
    let begin = Instant::now();
    let is_known = manifest.digest(PAGES).is_some_and(|digest| checked.knows(&directory.join(PAGES), digest));
    let work = move || {
        let runs = manifest.read_map(&directory)?;
        let path = directory.join(PAGES);
        let pages = File::open(&path).map_err(EngineError::host(format!("open {}", path.display())))?;
        if !is_known {
            manifest.check_file(&directory, PAGES)?;
        }
        tracing::debug!(snapshot = %directory.display(), ms = millis(begin.elapsed()), "snapshot's memory checked");
        Ok(Arc::new(SnapshotImage { manifest, runs, pages, whole: OnceCell::new(), machines: Arc::new(()) }))
    };
    let result = tokio::task::spawn_blocking(work).await;
    result.map_err(|error| EngineError::host("check the snapshot")(std::io::Error::other(error)))?
}

impl SnapshotImage {
    /// Decides how one more machine gets the pages, and counts it.
    pub(crate) async fn supply(self: &Arc<Self>, base: &Arc<SealedMemory>) -> Result<(Supply, ImageUse), EngineError> {
        let used = ImageUse { _image: self.clone(), _counted: self.machines.clone() };
        // Those before this one: it is counted already, and one holder is the image itself.
        let machines = Arc::strong_count(&self.machines).saturating_sub(2) as u64;
        if self.whole.get().is_none() && machines * self.manifest.memory_bytes() <= base.used_bytes() {
            return Ok((Supply::Injected, used));
        }
        let whole = self.whole.get_or_try_init(|| self.make_whole(base.clone())).await?;
        Ok((Supply::Whole(whole.clone()), used))
    }

    async fn make_whole(self: &Arc<Self>, base: Arc<SealedMemory>) -> Result<Arc<SealedMemory>, EngineError> {
        let (image, begin) = (self.clone(), Instant::now());
        let work = tokio::task::spawn_blocking(move || base.with_pages(&image.runs, &image.pages));
        let memory = joined(work.await).map_err(EngineError::host("make an image of the snapshot's memory"))?;
        tracing::debug!(ms = millis(begin.elapsed()), "image of a snapshot's memory made");
        Ok(Arc::new(memory))
    }
}
