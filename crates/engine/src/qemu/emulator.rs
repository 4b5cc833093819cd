//! An emulator that waits for its machine: in its jail and control group, with memory mapped and disk opened, and
//! nothing run or loaded yet.
//!
//! ```text
//! Emulator::start ──> jail, control group, memory, disk layers ──> load (restore.rs) or boot
//!        │                                    ^
//!        └──> waits (spares.rs) ──> assume ───┘   another machine's id; a snapshot's layers below its own
//! ```

use std::{
    io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use stockade_model::MachineId;

use super::{
    Host, clock, command_line,
    command_line::{Origin, RootDisk},
    disk,
    images::SnapshotImage,
    jail::Mount,
    launch::{Launch, Launched, millis},
    layers::{DiskChain, Frozen, FrozenLayer},
    machine_dir::{LINK, MachineDir, MemoryBase, Record},
    manifest::{DEVICE_STATE, MACHINE_LAYER, Manifest},
    memory::SealedMemory,
    remains::{Own, Remains, Undo},
    snapshot_dir::{DEVICES, MAP, SnapshotManifest},
    template::set_capabilities,
};
use crate::EngineError;

/// What a machine is made from.
pub(crate) struct Source<'a> {
    pub(crate) template: &'a Path,
    pub(crate) manifest: &'a Manifest,
    pub(crate) memory: Arc<SealedMemory>,
    pub(crate) base: MemoryBase,
    /// The snapshot, and the directory it is in.
    pub(crate) snapshot: Option<(&'a SnapshotManifest, &'a Path)>,
    /// Its pages, where they are not in `memory`.
    pub(crate) pages: Option<Arc<SnapshotImage>>,
}

impl<'a> Source<'a> {
    /// The template itself.
    pub(crate) fn template(template: &'a Path, manifest: &'a Manifest, memory: Arc<SealedMemory>) -> Self {
        Self { template, manifest, memory, base: MemoryBase::Template, snapshot: None, pages: None }
    }

    /// The file its devices' state is in; `None`: it boots.
    pub(crate) fn state(&self) -> Option<PathBuf> {
        match self.snapshot {
            None => Some(self.template.join(DEVICE_STATE)),
            Some((manifest, directory)) => manifest.has_memory().then(|| directory.join(DEVICES)),
        }
    }

    /// What lies between the template's disk and a machine's own layer.
    fn layers(&self) -> &[FrozenLayer] {
        self.snapshot.map_or(&[][..], |(snapshot, _)| &snapshot.layers)
    }

    fn chain(&self) -> Result<DiskChain, EngineError> {
        DiskChain::new(self.layers()).map_err(EngineError::host("name a disk layer"))
    }

    /// Puts its disk's layers into a machine's directory; and the list of its image's pages, for the machine's own
    /// snapshots.
    fn link_files(&self, directory: &MachineDir) -> io::Result<()> {
        let Some((snapshot, from)) = self.snapshot else { return Ok(()) };
        for layer in &snapshot.layers {
            std::fs::hard_link(from.join(layer.id.file_name()), directory.layer(&layer.id))?;
        }
        if self.base.has_map() { std::fs::hard_link(from.join(MAP), directory.memory_map()) } else { Ok(()) }
    }
}

/// An emulator without a machine. What there is of it is removed when it is dropped.
#[derive(Debug)]
pub(crate) struct Emulator {
    pub(crate) record: Record,
    pub(crate) directory: MachineDir,
    pub(crate) launched: Launched,
    undo: Undo,
    _own: Own,
}

impl Emulator {
    /// Starts one for a machine. On failure nothing of it is left.
    pub(crate) async fn start(host: &Arc<Host>, machine: &MachineId, source: &Source<'_>) -> Result<Self, EngineError> {
        let directory = MachineDir::of(&host.machines_dir, machine);
        let mut record = Record {
            memory_fd: source.memory.file().as_raw_fd(),
            disk: Some(source.chain()?),
            memory: source.base,
            ..Record::new(host, machine, source.template.to_owned())
        };
        let own = Own::new(host, machine);
        directory.create().map_err(EngineError::host(format!("make the directory of {machine}")))?;
        let mut undo = Undo::new(Remains::of_record(host, directory.clone(), &record));
        match (Start { host, source, directory: &directory, record: &mut record, undo: &mut undo }).run().await {
            Ok(launched) => Ok(Self { record, directory, launched, undo, _own: own }),
            Err(error) => {
                undo.run().await;
                Err(error)
            }
        }
    }

    /// Makes it this machine's. On failure nothing of it is left.
    pub(crate) async fn assume(
        mut self,
        host: &Host,
        machine: &MachineId,
        source: &Source<'_>,
    ) -> Result<Self, EngineError> {
        match self.take_over(host, machine, source).await {
            Ok(()) => Ok(self),
            Err(error) => {
                self.remove().await;
                Err(error)
            }
        }
    }

    async fn take_over(&mut self, host: &Host, machine: &MachineId, source: &Source<'_>) -> Result<(), EngineError> {
        let begin = Instant::now();
        self.record.emulator = Some(std::mem::replace(&mut self.record.machine, machine.clone()));
        self.write_record()?;
        let directory = MachineDir::of(&host.machines_dir, machine);
        self.directory.rename(&directory).map_err(EngineError::host(format!("make the directory of {machine}")))?;
        self.directory = directory.clone();
        self.undo.update(|remains| remains.directory = directory);
        if let Some(disk) = &mut self.record.disk {
            disk.frozen = source.layers().iter().map(Frozen::from).collect();
            let linked = source.link_files(&self.directory).and_then(|()| self.directory.name_below(disk));
            linked.map_err(EngineError::host("make the machine's disk"))?;
            disk::put_below(&self.launched.qmp, disk, host.limits.command_patience).await?;
        }
        tracing::debug!(%machine, ms = millis(begin.elapsed()), "waiting emulator taken");
        Ok(())
    }

    /// Whether it can still become a machine.
    pub(crate) fn is_alive(&self) -> bool {
        self.launched.processes.emulator.is_alive() && self.launched.qmp.is_open()
    }

    pub(crate) fn write_record(&self) -> Result<(), EngineError> {
        self.directory.write_record(&self.record).map_err(EngineError::host("write the machine's record"))
    }

    /// Removes all of it.
    pub(crate) async fn remove(self) {
        self.undo.run().await;
    }

    /// It has become a machine.
    pub(crate) fn into_parts(self) -> (Record, MachineDir, Launched) {
        self.undo.disarm();
        (self.record, self.directory, self.launched)
    }
}

/// One that is being started.
struct Start<'a> {
    host: &'a Arc<Host>,
    source: &'a Source<'a>,
    directory: &'a MachineDir,
    record: &'a mut Record,
    undo: &'a mut Undo,
}

impl Start<'_> {
    async fn run(&mut self) -> Result<Launched, EngineError> {
        let host = self.host;
        let begin = Instant::now();
        self.directory.write_record(self.record).map_err(EngineError::host("write the machine's record"))?;
        self.add_layers().map_err(EngineError::host("make the machine's disk"))?;
        let limits = host.limits.of_group(&self.source.manifest.shape);
        self.record.cgroup = host
            .cgroups
            .create(self.record.emulator().as_str(), &limits)
            .map_err(EngineError::host("make the machine's control group"))?;
        let boots = self.source.state().is_none();
        if boots {
            let added = self.directory.add_kernel(&host.kernel, &host.initramfs);
            added.map_err(EngineError::host("copy the kernel"))?;
        }
        let prepared = begin.elapsed();
        let mut launched = self.launch(boots).await?;
        if !boots {
            set_capabilities(&launched.qmp, host.limits.command_patience).await?;
            // Before any state is loaded: its guest was connected when it was saved, and goes on without being told.
            let link = self.directory.connect(LINK).map_err(EngineError::host("connect to the guest's link"))?;
            launched.link = Some(link);
        }
        tracing::debug!(
            emulator = %self.record.emulator(),
            prepare_ms = millis(prepared),
            launch_ms = millis(begin.elapsed() - prepared),
            "emulator ready"
        );
        Ok(launched)
    }

    fn add_layers(&self) -> io::Result<()> {
        let disk = self.record.disk.as_ref().ok_or(io::ErrorKind::InvalidInput)?;
        self.source.link_files(self.directory)?;
        let below = disk.frozen.last().map(|layer| &layer.id);
        self.directory.add_layer(&self.source.template.join(MACHINE_LAYER), &disk.own, below)
    }

    async fn launch(&mut self, boots: bool) -> Result<Launched, EngineError> {
        let host = self.host;
        let mut mounts = vec![
            Mount::new(self.source.template.to_owned(), command_line::TEMPLATE_DIR, false),
            Mount::new(self.directory.layers_dir(), command_line::LAYERS_DIR, false),
            Mount::new(self.directory.disk_dir(), command_line::MACHINE_DIR, true),
        ];
        let kernel_command_line = command_line::kernel_command_line(host.accelerator, clock::tsc_khz());
        let origin = if boots {
            mounts.push(Mount::new(self.directory.disk_dir(), command_line::BOOT_DIR, false));
            Origin::Boot { kernel_command_line: &kernel_command_line, keeps_memory: false }
        } else {
            Origin::Saved
        };
        let disk = self.record.disk.as_ref().map(RootDisk::of_machine);
        let disk = disk.ok_or_else(|| EngineError::host("find the machine's disk")(io::ErrorKind::NotFound.into()))?;
        let launch = Launch {
            directory: self.directory,
            shape: self.source.manifest.shape,
            accelerator: host.accelerator,
            origin,
            disk: &disk,
            mounts,
            memory: self.source.memory.file(),
            patience: host.limits.restore_patience,
        };
        launch.run(host, self.record, self.undo).await
    }
}
