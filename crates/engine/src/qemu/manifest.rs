//! A template's directory and what it says of itself.
//!
//! ```text
//! <template>/
//!   root.ext4       the root file system as it was given, raw and sparse
//!   disk.qcow2      what the first boot wrote, over root.ext4
//!   machine.qcow2   an empty layer over disk.qcow2; each machine gets a copy
//!   memory          the booted machine's memory, sparse
//!   device-state    the rest of the machine
//!   manifest.json   what all of it needs, sizes and checksums; written last
//! ```
//!
//! The directory appears under its name when it is whole and on disk, and never changes afterwards.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use stockade_model::{Accelerator, MachineShape};

use super::memory;
use crate::EngineError;

/// The format of the directory.
const VERSION: u32 = 1;
/// How far two hosts' time stamp counters may differ for an emulated guest to keep time.
const TSC_TOLERANCE_PERCENT: u64 = 1;

pub(crate) const ROOT: &str = "root.ext4";
pub(crate) const DISK: &str = "disk.qcow2";
pub(crate) const MACHINE_LAYER: &str = "machine.qcow2";
pub(crate) const MEMORY: &str = "memory";
pub(crate) const DEVICE_STATE: &str = "device-state";
const MANIFEST: &str = "manifest.json";
const FILES: [&str; 5] = [ROOT, DISK, MACHINE_LAYER, MEMORY, DEVICE_STATE];
/// Small enough to be read whole at every check.
const CHECKED_AT_ONCE: [&str; 2] = [MACHINE_LAYER, DEVICE_STATE];

/// What makes a machine; a snapshot works only where all of it is the same.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct Needs {
    pub(crate) emulator: String,
    pub(crate) machine_type: String,
    pub(crate) accelerator: Accelerator,
    pub(crate) cpu_model: String,
    /// Over its devices and what its kernel is told ([`hardware_digest`](super::command_line::hardware_digest)).
    #[serde(default)]
    pub(crate) hardware_digest: String,
    /// The host's processor, where guests see it.
    pub(crate) host_cpu: Option<String>,
    pub(crate) kernel_digest: String,
    pub(crate) initramfs_digest: String,
    /// Speed of the time stamp counter, where guests were told.
    pub(crate) tsc_khz: Option<u64>,
}

/// What a template says of itself.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Manifest {
    version: u32,
    pub(crate) needs: Needs,
    pub(crate) shape: MachineShape,
    files: BTreeMap<String, FileEntry>,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct FileEntry {
    bytes: u64,
    /// Checksum of the contents, holes or not.
    digest: String,
}

impl Manifest {
    /// Describes the files of a finished template and writes the manifest. `root_digest` was taken while copying.
    pub(crate) fn write(directory: &Path, needs: Needs, shape: MachineShape, root_digest: String) -> io::Result<()> {
        let mut files = BTreeMap::new();
        for name in FILES {
            let path = directory.join(name);
            let file = fs::File::open(&path)?;
            file.sync_all()?;
            let digest = if name == ROOT { root_digest.clone() } else { memory::sparse_digest(&path)? };
            files.insert(name.to_owned(), FileEntry { bytes: file.metadata()?.len(), digest });
        }
        let manifest = Self { version: VERSION, needs, shape, files };
        memory::write_atomically(&directory.join(MANIFEST), &serde_json::to_vec_pretty(&manifest)?)?;
        memory::sync_directory(directory)
    }

    /// Reads a manifest and sees whether its files are there and this host is like the one it was made on.
    pub(crate) fn check(directory: &Path, here: &Needs) -> Result<Self, EngineError> {
        let manifest = Self::read(directory)?;
        manifest.needs.compare(here)?;
        Ok(manifest)
    }

    /// Reads a manifest and sees whether its files are there.
    pub(crate) fn read(directory: &Path) -> Result<Self, EngineError> {
        let path = directory.join(MANIFEST);
        let damaged = |path: PathBuf, reason: String| EngineError::Damaged { path, reason };
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) => return Err(damaged(path, format!("it cannot be read: {error}"))),
        };
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let Version { version } = serde_json::from_slice(&bytes)
            .map_err(|error| damaged(path.clone(), format!("it is not a template's manifest: {error}")))?;
        if version != VERSION {
            let (made_with, here) = (format!("version {version}"), format!("version {VERSION}"));
            return Err(EngineError::Mismatch { what: "template format", made_with, here });
        }
        let manifest: Self = serde_json::from_slice(&bytes)
            .map_err(|error| damaged(path.clone(), format!("it is not a template's manifest: {error}")))?;
        for name in FILES {
            let path = directory.join(name);
            let Some(entry) = manifest.files.get(name) else {
                return Err(damaged(path, "the manifest does not name it".to_owned()));
            };
            match fs::metadata(&path) {
                Ok(metadata) if metadata.len() == entry.bytes => {}
                Ok(metadata) => {
                    let reason = format!("it has {} bytes, {} were written", metadata.len(), entry.bytes);
                    return Err(damaged(path, reason));
                }
                Err(error) => return Err(damaged(path, format!("it cannot be read: {error}"))),
            }
        }
        Ok(manifest)
    }

    /// Compares the contents of the small files; those of memory are compared when it is loaded.
    pub(crate) fn check_contents(&self, directory: &Path) -> Result<(), EngineError> {
        for name in CHECKED_AT_ONCE {
            let path = directory.join(name);
            let digest = memory::sparse_digest(&path).map_err(EngineError::host(format!("read {}", path.display())))?;
            self.expect(directory, name, &digest)?;
        }
        Ok(())
    }

    /// Whether a file has the contents it was written with.
    pub(crate) fn expect(&self, directory: &Path, name: &str, digest: &str) -> Result<(), EngineError> {
        if self.digest(name) == digest {
            return Ok(());
        }
        let reason = "its contents are not those that were written; build the template again".to_owned();
        Err(EngineError::Damaged { path: directory.join(name), reason })
    }

    /// The checksum of a file.
    pub(crate) fn digest(&self, name: &str) -> &str {
        self.files.get(name).map_or("", |entry| &entry.digest)
    }

    /// Tells this template from every other one: the checksum of its files' checksums.
    pub(crate) fn identity(&self) -> String {
        let lines = self.files.iter().map(|(name, entry)| format!("{name} {} {}\n", entry.bytes, entry.digest));
        memory::bytes_digest(lines.collect::<String>().as_bytes())
    }
}

impl Needs {
    /// Names the first difference that keeps a machine made there from running here.
    pub(crate) fn compare(&self, here: &Self) -> Result<(), EngineError> {
        let theirs = self;
        let speed = |khz: Option<u64>| khz.map_or_else(|| "none".to_owned(), |khz| format!("{khz} kHz"));
        let cpu = |needs: &Needs| needs.host_cpu.clone().unwrap_or_default();
        let pairs = [
            ("emulator", theirs.emulator.clone(), here.emulator.clone()),
            ("machine type", theirs.machine_type.clone(), here.machine_type.clone()),
            ("accelerator", theirs.accelerator.to_string(), here.accelerator.to_string()),
            ("processor model", theirs.cpu_model.clone(), here.cpu_model.clone()),
            ("devices and kernel settings", theirs.hardware_digest.clone(), here.hardware_digest.clone()),
            ("host processor", cpu(theirs), cpu(here)),
            ("kernel", theirs.kernel_digest.clone(), here.kernel_digest.clone()),
            ("initial file system", theirs.initramfs_digest.clone(), here.initramfs_digest.clone()),
        ];
        for (what, made_with, here) in pairs {
            if made_with != here {
                return Err(EngineError::Mismatch { what, made_with, here });
            }
        }
        if !is_near(theirs.tsc_khz, here.tsc_khz) {
            let what = "speed of the time stamp counter";
            return Err(EngineError::Mismatch { what, made_with: speed(theirs.tsc_khz), here: speed(here.tsc_khz) });
        }
        Ok(())
    }
}

fn is_near(one: Option<u64>, other: Option<u64>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => one.abs_diff(other) * 100 <= one * TSC_TOLERANCE_PERCENT,
        (None, None) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needs() -> Needs {
        Needs {
            emulator: "7.2".to_owned(),
            machine_type: "microvm".to_owned(),
            accelerator: Accelerator::Tcg,
            cpu_model: "max".to_owned(),
            hardware_digest: "h".to_owned(),
            host_cpu: None,
            kernel_digest: "k".to_owned(),
            initramfs_digest: "i".to_owned(),
            tsc_khz: Some(2_100_000),
        }
    }

    fn template() -> tempfile::TempDir {
        let directory = tempfile::tempdir().expect("a directory");
        for name in FILES {
            fs::write(directory.path().join(name), name).expect("written");
        }
        let root_digest = memory::sparse_digest(&directory.path().join(ROOT)).expect("digest");
        let shape = MachineShape { vcpus: 1, memory_mib: 256, disk_mib: 512 };
        Manifest::write(directory.path(), needs(), shape, root_digest).expect("written");
        directory
    }

    #[test]
    fn a_whole_template_passes_and_each_difference_is_named() {
        let template = template();
        let manifest = Manifest::check(template.path(), &needs()).expect("is whole");
        manifest.check_contents(template.path()).expect("is whole");

        let other = Needs { emulator: "8.0".to_owned(), ..needs() };
        let error = Manifest::check(template.path(), &other).expect_err("differs");
        assert_eq!(error.to_string(), "made with emulator 7.2, this host has 8.0");
        let other = Needs { tsc_khz: Some(2_200_000), ..needs() };
        assert!(matches!(Manifest::check(template.path(), &other), Err(EngineError::Mismatch { .. })));
        let close = Needs { tsc_khz: Some(2_100_900), ..needs() };
        assert!(Manifest::check(template.path(), &close).is_ok());
    }

    #[test]
    fn a_missing_a_short_and_an_altered_file_are_named() {
        let template = template();
        let state = template.path().join(DEVICE_STATE);
        fs::write(&state, "device-stake").expect("written");
        let manifest = Manifest::check(template.path(), &needs()).expect("sizes are right");
        let error = manifest.check_contents(template.path()).expect_err("altered");
        assert!(error.to_string().contains("device-state is damaged"), "{error}");
        fs::write(&state, "x").expect("written");
        let error = Manifest::check(template.path(), &needs()).expect_err("short");
        assert!(error.to_string().contains("it has 1 bytes, 12 were written"), "{error}");
        fs::remove_file(&state).expect("removed");
        assert!(matches!(Manifest::check(template.path(), &needs()), Err(EngineError::Damaged { .. })));
    }
}
