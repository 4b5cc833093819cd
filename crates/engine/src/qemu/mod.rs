//! Machines as microVMs under QEMU, each in a jail of its own.
//!
//! ```text
//! template.rs  boots a disk once, keeps disk + memory + device state      (manifest.rs: the directory)
//! restore.rs   makes a machine from it, adopts one that runs              (machine_dir.rs: its record)
//! snapshot.rs  keeps a running machine's memory (pages.rs, page_map.rs) and disk (disk.rs, layers.rs)
//!              (snapshot_dir.rs: the directory); images.rs holds what machines are started from,
//!              checked_files.rs what need not be checked again
//! machine.rs   one machine in our hands; link_gate.rs its link; network.rs its NIC; usage.rs what it holds; remains.rs ends it;
//!              no_room.rs a full host disk
//! emulator.rs  one that is ready for a machine; spares.rs those that wait for one
//! launch.rs    one emulator: command_line.rs inside jail.rs (runtime_root.rs: all it sees) in cgroup.rs
//! qmp.rs       its control channel; tail.rs its console; process.rs its process; memory.rs, memories.rs its memory
//! probe.rs     whether KVM really works here
//! ```

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use stockade_model::{Accelerator, IsolationClass, MachineId, MachineShape};
use tokio::sync::Semaphore;

mod agent;
mod bare;
mod cgroup;
mod checked_files;
mod clock;
mod command_line;
mod config;
mod disk;
mod emulator;
mod images;
mod jail;
#[cfg(test)]
mod jail_tests;
mod launch;
mod layers;
mod link_gate;
mod machine;
mod machine_dir;
mod manifest;
mod memories;
mod memory;
mod network;
mod no_room;
mod page_map;
mod pages;
mod probe;
mod process;
mod qemu_img;
mod qmp;
mod remains;
mod restore;
mod runtime_root;
mod snapshot;
mod snapshot_dir;
mod spares;
mod tail;
mod template;
mod usage;

pub use bare::{BareMachine, BareTimes};
pub use config::{AcceleratorChoice, Limits, QemuConfig};
pub use machine::QemuMachine;
pub use probe::KvmVerdict;

use self::{
    restore::{Stock, Take},
    snapshot_dir::SnapshotManifest,
};
use crate::{Engine, EngineError, EngineInfo, Machine, Progress, SnapshotReport, TemplateBoot, Urgency};

/// The QEMU engine.
pub struct QemuEngine {
    host: Arc<Host>,
    memories: memories::Memories,
    images: images::Images,
    spares: spares::Spares,
}

/// What all machines of this engine share.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) machines_dir: PathBuf,
    pub(crate) bubblewrap: PathBuf,
    pub(crate) qemu_img: PathBuf,
    /// The emulator on the host; machines run the copy in `root`.
    pub(crate) emulator: PathBuf,
    pub(crate) firmware: PathBuf,
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
    pub(crate) root: runtime_root::RuntimeRoot,
    pub(crate) accelerator: Accelerator,
    pub(crate) cgroups: cgroup::Cgroups,
    /// What the names of our emulators and groups begin with; tells data directories apart.
    pub(crate) prefix: String,
    pub(crate) boot_id: String,
    pub(crate) needs: manifest::Needs,
    pub(crate) limits: Limits,
    /// Machines that no record outside the engine names: those that templates are booted on, emulators that wait.
    pub(crate) own: Mutex<BTreeSet<MachineId>>,
    /// Memory, in MiB, that snapshots may take together while they are taken.
    pub(crate) snapshot_buffers: Arc<Semaphore>,
    pub(crate) checked_files: checked_files::CheckedFiles,
}

impl Host {
    /// The name a machine's processes and groups carry.
    pub(crate) fn name_of(&self, machine: &MachineId) -> String {
        format!("{}{machine}", self.prefix)
    }
}

impl QemuEngine {
    /// Looks at the host and gets ready. Warnings are logged for what works less well than it could.
    ///
    /// # Errors
    /// [`EngineError::Unsupported`] names what is missing and how to mend it.
    pub async fn new(config: QemuConfig) -> Result<Self, EngineError> {
        let host = config::prepare(config).await?;
        if let Some(reason) = host.cgroups.missing() {
            tracing::warn!(
                reason,
                "machines run without control groups: memory and processor time of one machine are limited per \
                 process only; run the server as root or delegate a control group to it"
            );
        }
        let host = Arc::new(host);
        let spares = spares::Spares::new(&host, host.limits.spare_emulators);
        Ok(Self { host, memories: memories::Memories::default(), images: images::Images::default(), spares })
    }

    /// Restores a machine as a bare emulator would: no jail, no control group, nothing of ours around it.
    /// For the benchmark's other side.
    ///
    /// # Errors
    /// As for [`Engine::start`].
    pub async fn start_bare(&self, template: &Path) -> Result<BareMachine, EngineError> {
        bare::start(&self.host, &self.memories, template).await
    }

    /// What such a restore takes until the agent's first answer, and what a halt and a snapshot's halt take.
    ///
    /// # Errors
    /// As for [`Engine::start`].
    pub async fn bare_times(&self, template: &Path) -> Result<BareTimes, EngineError> {
        let mut machine = self.start_bare(template).await?;
        let times = machine.times().await?;
        machine.end().await?;
        Ok(times)
    }

    /// What such a machine takes from the start of its process to the first output of a command in it.
    ///
    /// # Errors
    /// As for [`Engine::start`].
    pub async fn bare_first_output(&self, template: &Path) -> Result<Duration, EngineError> {
        self.start_bare(template).await?.first_output().await
    }

    /// As [`Engine::start`], with the driver's own type.
    ///
    /// # Errors
    /// As for [`Engine::start`].
    pub async fn start_machine(&self, machine: &MachineId, template: &Path) -> Result<QemuMachine, EngineError> {
        restore::start(self.stock(), machine, template, Urgency::Awaited).await
    }

    /// As [`Engine::start_from_snapshot`], with the driver's own type.
    ///
    /// # Errors
    /// As for [`Engine::start_from_snapshot`].
    pub async fn start_machine_from(
        &self,
        machine: &MachineId,
        template: &Path,
        snapshot: &Path,
    ) -> Result<QemuMachine, EngineError> {
        let from = (template, snapshot);
        restore::start_from_snapshot(self.stock(), machine, from, Take::All, Urgency::Awaited).await
    }

    /// As [`Engine::boot_from_snapshot`], with the driver's own type.
    ///
    /// # Errors
    /// As for [`Engine::boot_from_snapshot`].
    pub async fn boot_machine_from(
        &self,
        machine: &MachineId,
        template: &Path,
        snapshot: &Path,
    ) -> Result<QemuMachine, EngineError> {
        let from = (template, snapshot);
        restore::start_from_snapshot(self.stock(), machine, from, Take::Disk, Urgency::Awaited).await
    }

    /// How many emulators wait for a machine.
    pub fn spare_emulators(&self) -> usize {
        self.spares.waiting()
    }

    fn stock(&self) -> Stock<'_> {
        Stock { host: &self.host, memories: &self.memories, images: &self.images, spares: &self.spares }
    }
}

#[async_trait]
impl Engine for QemuEngine {
    fn info(&self) -> EngineInfo {
        let accelerator = self.host.accelerator;
        EngineInfo {
            name: "qemu",
            accelerator,
            isolation: match accelerator {
                Accelerator::Kvm => IsolationClass::HardwareVm,
                Accelerator::Tcg | Accelerator::None => IsolationClass::EmulatedVm,
            },
            version: self.host.needs.emulator.clone(),
        }
    }

    async fn check_template(&self, directory: &Path) -> Result<(), EngineError> {
        manifest::Manifest::check(directory, &self.host.needs)?.check_contents(directory)
    }

    async fn boot_template(&self, boot: &TemplateBoot, progress: Progress<'_>) -> Result<(), EngineError> {
        template::boot(&self.host, boot, progress).await
    }

    async fn start(
        &self,
        machine: &MachineId,
        template: &Path,
        urgency: Urgency,
    ) -> Result<Arc<dyn Machine>, EngineError> {
        Ok(Arc::new(restore::start(self.stock(), machine, template, urgency).await?))
    }

    async fn start_from_snapshot(
        &self,
        machine: &MachineId,
        template: &Path,
        snapshot: &Path,
        urgency: Urgency,
    ) -> Result<Arc<dyn Machine>, EngineError> {
        let from = (template, snapshot);
        let started = restore::start_from_snapshot(self.stock(), machine, from, Take::All, urgency).await?;
        Ok(Arc::new(started))
    }

    async fn boot_from_snapshot(
        &self,
        machine: &MachineId,
        template: &Path,
        snapshot: &Path,
    ) -> Result<Arc<dyn Machine>, EngineError> {
        Ok(Arc::new(self.boot_machine_from(machine, template, snapshot).await?))
    }

    async fn check_snapshot(&self, template: &Path, snapshot: &Path) -> Result<SnapshotReport, EngineError> {
        let (template, snapshot, needs) = (template.to_owned(), snapshot.to_owned(), self.host.needs.clone());
        let work = move || {
            let manifest = SnapshotManifest::read(&snapshot)?;
            manifest.check(&snapshot, &manifest::Manifest::read(&template)?, &needs)?;
            manifest.check_contents(&snapshot)?;
            Ok(manifest.report(&snapshot))
        };
        let result = tokio::task::spawn_blocking(work).await;
        result.map_err(|error| EngineError::host("check the snapshot")(std::io::Error::other(error)))?
    }

    async fn adopt(&self, machine: &MachineId) -> Result<Option<Arc<dyn Machine>>, EngineError> {
        let adopted = restore::adopt(&self.host, machine).await?;
        Ok(adopted.map(|machine| Arc::new(machine) as Arc<dyn Machine>))
    }

    async fn sweep(&self, keep: &BTreeSet<MachineId>) -> Result<Vec<MachineId>, EngineError> {
        let mut removed = Vec::new();
        let mut first_error = None;
        for (id, mut remains) in remains::find(&self.host, keep)? {
            match remains.remove_half_started().await {
                Ok(()) => removed.push(id),
                Err(error) => {
                    tracing::warn!(machine = %id, %error, "cannot remove what is left of a machine");
                    first_error.get_or_insert(error);
                }
            }
        }
        first_error.map_or(Ok(removed), Err)
    }

    async fn close(&self) {
        self.spares.close().await;
    }

    fn check_capacity(&self, shape: &MachineShape) -> Result<(), EngineError> {
        usage::check_capacity(shape, 0, &self.host.limits, &self.host.machines_dir)
    }

    fn check_fork_capacity(&self, shape: &MachineShape, count: u32, snapshot_bytes: u64) -> Result<(), EngineError> {
        usage::check_fork_capacity(shape, count, snapshot_bytes, &self.host.limits, &self.host.machines_dir)
    }
}
