//! A snapshot's directory and what it says of itself.
//!
//! ```text
//! <snapshot>/
//!   <layer>.qcow2 ...  the layers of the disk, linked (layers.rs)
//!   devices.state      the machine but for memory and disk; not in a disk-only snapshot
//!   memory.map         which pages the machine had of its own (page_map.rs); likewise
//!   memory.pages       these pages, one after the other; likewise
//!   manifest.json      what all of it needs, sizes and checksums; written last
//! ```
//!
//! The pages are those that differ from the *template's* memory (or from empty memory, for a machine that was
//! booted from a disk), whatever snapshots lie between: memory never has more than one level.
//!
//! Manifest and device state are checked whenever a machine is started; the pages and their list when the
//! first one is, or when a file has changed since; a disk layer, unless this server has frozen or checked it before, if it is small. All of
//! it is checked by `check_snapshot`.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use stockade_model::MachineShape;

use super::{
    layers::{FrozenLayer, MOST_LAYERS},
    manifest::{Manifest, Needs},
    memory, page_map,
    pages::{PAGE, Run, page_count},
};
use crate::{EngineError, SnapshotReport, SnapshotScope};

/// The format of the directory.
const VERSION: u32 = 1;

pub(crate) const DEVICES: &str = "devices.state";
pub(crate) const MAP: &str = "memory.map";
pub(crate) const PAGES: &str = "memory.pages";
const MANIFEST: &str = "manifest.json";
const MEMORY_FILES: [&str; 3] = [DEVICES, MAP, PAGES];
/// More than any manifest has.
const MANIFEST_BYTES: u64 = 1 << 20;

/// How well a snapshot is kept.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Keeping {
    /// The host's disk has it, and has given back what was written.
    Durable,
    /// It need not outlive this boot of the host.
    Passing,
}

/// What a snapshot says of itself.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct SnapshotManifest {
    version: u32,
    pub(crate) scope: Scope,
    pub(crate) needs: Needs,
    /// The template it lies over ([`Manifest::identity`]).
    pub(crate) template: String,
    pub(crate) shape: MachineShape,
    pub(crate) base: Base,
    /// The lowest first.
    pub(crate) layers: Vec<FrozenLayer>,
    files: BTreeMap<String, FileEntry>,
    paused_micros: u64,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Scope {
    MemoryAndDisk,
    DiskOnly,
}

/// What memory the pages differ from.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Base {
    Template,
    Zero,
}

#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct FileEntry {
    pub(crate) bytes: u64,
    pub(crate) digest: String,
}

impl SnapshotManifest {
    #[expect(clippy::too_many_arguments, reason = "all that a manifest holds, put together in one place")]
    pub(crate) fn new(
        scope: SnapshotScope,
        needs: Needs,
        template: String,
        shape: MachineShape,
        base: Base,
        layers: Vec<FrozenLayer>,
        files: BTreeMap<String, FileEntry>,
        paused: Duration,
    ) -> Self {
        let scope = match scope {
            SnapshotScope::MemoryAndDisk => Scope::MemoryAndDisk,
            SnapshotScope::DiskOnly => Scope::DiskOnly,
        };
        let paused_micros = u64::try_from(paused.as_micros()).unwrap_or(u64::MAX);
        Self { version: VERSION, scope, needs, template, shape, base, layers, files, paused_micros }
    }

    pub(crate) fn write(&self, directory: &Path, keeping: Keeping) -> std::io::Result<()> {
        let (path, text) = (directory.join(MANIFEST), serde_json::to_vec_pretty(self)?);
        match keeping {
            Keeping::Durable => {
                memory::write_atomically(&path, &text)?;
                memory::sync_directory(directory)
            }
            Keeping::Passing => fs::write(path, text),
        }
    }

    /// Sees whether its files are there, and whether this host and the template are those it needs.
    pub(crate) fn check(&self, directory: &Path, template: &Manifest, here: &Needs) -> Result<(), EngineError> {
        if self.template != template.identity() {
            let short = |text: &str| text.chars().take(16).collect();
            let (made_with, here) = (short(&self.template), short(&template.identity()));
            return Err(EngineError::Mismatch { what: "template", made_with, here });
        }
        // Another emulator can boot from the disk all the same.
        if self.scope == Scope::MemoryAndDisk {
            self.needs.compare(here)?;
        }
        for (name, bytes) in self.sizes() {
            let path = directory.join(name);
            match fs::symlink_metadata(&path) {
                Ok(metadata) if !metadata.is_file() => return Err(damaged(path, "it is not a file")),
                Ok(metadata) if metadata.len() != bytes => {
                    return Err(damaged(path, format!("it has {} bytes, {bytes} were written", metadata.len())));
                }
                Ok(_) => {}
                Err(error) => return Err(damaged(path, format!("it cannot be read: {error}"))),
            }
        }
        Ok(())
    }

    /// From here on it is one of the disk alone.
    pub(crate) fn forget_memory(&mut self) {
        self.scope = Scope::DiskOnly;
        self.files.clear();
    }

    /// Reads a manifest.
    pub(crate) fn read(directory: &Path) -> Result<Self, EngineError> {
        let path = directory.join(MANIFEST);
        let read = File::open(&path).and_then(|file| {
            let mut bytes = Vec::new();
            std::io::Read::read_to_end(&mut std::io::Read::take(file, MANIFEST_BYTES), &mut bytes).map(|_| bytes)
        });
        let bytes = match read {
            Ok(bytes) => bytes,
            Err(error) => return Err(damaged(path, format!("it cannot be read: {error}"))),
        };
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let foreign = |error: serde_json::Error| damaged(path.clone(), format!("it is not a snapshot's: {error}"));
        let Version { version } = serde_json::from_slice(&bytes).map_err(foreign)?;
        if version != VERSION {
            let (made_with, here) = (format!("version {version}"), format!("version {VERSION}"));
            return Err(EngineError::Mismatch { what: "snapshot format", made_with, here });
        }
        let manifest: Self = serde_json::from_slice(&bytes).map_err(foreign)?;
        if manifest.layers.is_empty() || manifest.layers.len() > MOST_LAYERS {
            return Err(damaged(path, format!("it names {} disk layers", manifest.layers.len())));
        }
        let wanted: &[&str] = if manifest.scope == Scope::MemoryAndDisk { &MEMORY_FILES } else { &[] };
        if let Some(missing) = wanted.iter().find(|name| !manifest.files.contains_key(**name)) {
            return Err(damaged(directory.join(missing), "the manifest does not name it"));
        }
        if let Some(more) = manifest.files.keys().find(|name| !wanted.contains(&name.as_str())) {
            return Err(damaged(path, format!("it names an unknown file {more:?}")));
        }
        Ok(manifest)
    }

    fn sizes(&self) -> impl Iterator<Item = (String, u64)> {
        let layers = self.layers.iter().map(|layer| (layer.id.file_name(), layer.bytes));
        layers.chain(self.files.iter().map(|(name, entry)| (name.clone(), entry.bytes)))
    }

    /// Reads the small file that says which pages there are, and sees that they are all there.
    pub(crate) fn read_map(&self, directory: &Path) -> Result<Vec<Run>, EngineError> {
        let path = directory.join(MAP);
        let bytes = fs::read(&path).map_err(EngineError::host(format!("read {}", path.display())))?;
        self.expect(directory, MAP, &memory::bytes_digest(&bytes))?;
        let runs = page_map::decode(&bytes, (self.shape.memory_mib << 20) / PAGE)
            .map_err(|reason| damaged(path.clone(), reason))?;
        let pages = self.files.get(PAGES).map_or(0, |entry| entry.bytes);
        if page_count(&runs) * PAGE != pages {
            return Err(damaged(path, format!("it lists {} pages, there are {}", page_count(&runs), pages / PAGE)));
        }
        Ok(runs)
    }

    /// The checksum a file should have; `None`: there is no such file in it.
    pub(crate) fn digest(&self, name: &str) -> Option<&str> {
        self.files.get(name).map(|file| file.digest.as_str())
    }

    /// Compares the contents of a file.
    pub(crate) fn check_file(&self, directory: &Path, name: &str) -> Result<(), EngineError> {
        let path = directory.join(name);
        let digest = memory::file_digest(&path).map_err(EngineError::host(format!("read {}", path.display())))?;
        self.expect(directory, name, &digest)
    }

    fn expect(&self, directory: &Path, name: &str, digest: &str) -> Result<(), EngineError> {
        match self.files.get(name) {
            Some(entry) if entry.digest == digest => Ok(()),
            _ => Err(altered(directory.join(name))),
        }
    }

    /// Compares the contents of a layer.
    pub(crate) fn check_layer(directory: &Path, layer: &FrozenLayer) -> Result<(), EngineError> {
        let path = directory.join(layer.id.file_name());
        let digest = memory::sparse_digest(&path).map_err(EngineError::host(format!("read {}", path.display())))?;
        if digest == layer.digest { Ok(()) } else { Err(altered(path)) }
    }

    /// Compares the contents of everything.
    pub(crate) fn check_contents(&self, directory: &Path) -> Result<(), EngineError> {
        for layer in &self.layers {
            Self::check_layer(directory, layer)?;
        }
        if self.scope == Scope::MemoryAndDisk {
            self.read_map(directory)?;
            self.check_file(directory, DEVICES)?;
            self.check_file(directory, PAGES)?;
        }
        Ok(())
    }

    /// Tells it from every other one.
    pub(crate) fn identity(&self) -> String {
        memory::bytes_digest(&serde_json::to_vec(self).unwrap_or_default())
    }

    /// Whether machines start from it with memory.
    pub(crate) fn has_memory(&self) -> bool {
        self.scope == Scope::MemoryAndDisk
    }

    /// Bytes of the pages.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.files.get(PAGES).map_or(0, |entry| entry.bytes)
    }

    pub(crate) fn report(&self, directory: &Path) -> SnapshotReport {
        let blocks = |layer: &FrozenLayer| {
            fs::symlink_metadata(directory.join(layer.id.file_name())).map_or(0, |metadata| metadata.blocks() * 512)
        };
        SnapshotReport {
            scope: match self.scope {
                Scope::MemoryAndDisk => SnapshotScope::MemoryAndDisk,
                Scope::DiskOnly => SnapshotScope::DiskOnly,
            },
            paused: Duration::from_micros(self.paused_micros),
            memory_bytes: self.memory_bytes(),
            disk_bytes: self.layers.iter().map(blocks).sum(),
        }
    }
}

fn altered(path: PathBuf) -> EngineError {
    damaged(path, "its contents are not those that were written; start from another snapshot or the template")
}

fn damaged(path: PathBuf, reason: impl Into<String>) -> EngineError {
    EngineError::Damaged { path, reason: reason.into() }
}
