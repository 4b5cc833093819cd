//! Makes a machine from a template or a snapshot, and finds one again that another process made.
//!
//! From a template: its memory is mapped, its device state loaded. From a snapshot: the same with the
//! snapshot's pages put into the memory (images.rs) and its layers below the machine's own. From a snapshot
//! of a disk alone: the kernel is booted on memory in which nothing is written.

use std::{
    collections::HashMap,
    fs::File,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use serde_json::json;
use stockade_model::MachineId;
use tokio::sync::OnceCell;

use super::{
    Host, clock, command_line,
    command_line::{Origin, RootDisk},
    config::joined,
    disk,
    images::{ImageUse, Images, SnapshotImage, Supply},
    jail::Mount,
    launch::{Launch, Launched, SHOWN_LINES, millis, with_complaints},
    layers::DiskChain,
    machine::QemuMachine,
    machine_dir::{CONSOLE, CONTROL, LINK, MachineDir, MemoryBase, Record},
    manifest::{DEVICE_STATE, MACHINE_LAYER, MEMORY, Manifest},
    memory::SealedMemory,
    pages::GuestMemory,
    qmp::Qmp,
    remains::{Remains, Undo},
    snapshot_dir::{Base, DEVICES, MAP, SnapshotManifest},
    tail::Tail,
    template::{explain_boot, migrate, set_capabilities, wait_until_booted},
    usage,
};
use crate::EngineError;

const CONSOLE_BYTES: usize = 64 << 10;
/// With so many templates loaded, those without a machine are let go.
const MOST_IDLE_MEMORIES: usize = 4;

/// Memory of templates in use, by directory and checksum. Loaded once, shared by all their machines.
#[derive(Debug, Default)]
pub(crate) struct Memories {
    loaded: Mutex<HashMap<(PathBuf, String), Loading>>,
}

/// Memory that is loaded, or is being loaded for whoever came first.
type Loading = Arc<OnceCell<Arc<SealedMemory>>>;

impl Memories {
    /// The memory of a template, loaded if need be. Callers of the same template share one load.
    pub(crate) async fn get(
        &self,
        host: &Host,
        template: &Path,
        manifest: &Manifest,
    ) -> Result<Arc<SealedMemory>, EngineError> {
        let cell = {
            let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
            // Templates that were removed need no memory for further machines.
            loaded.retain(|(directory, _), _| directory.exists());
            if loaded.len() >= MOST_IDLE_MEMORIES {
                let is_used = |memory: &Arc<SealedMemory>| Arc::strong_count(memory) > 1;
                loaded.retain(|_, loading| Arc::strong_count(loading) > 1 || loading.get().is_some_and(is_used));
            }
            let key = (template.to_owned(), manifest.digest(MEMORY).to_owned());
            loaded.entry(key).or_default().clone()
        };
        let memory = cell.get_or_try_init(|| load(host, template, manifest)).await?;
        Ok(memory.clone())
    }
}

/// From a machine that maps it already (this server was restarted), or from the template's file.
async fn load(host: &Host, template: &Path, manifest: &Manifest) -> Result<Arc<SealedMemory>, EngineError> {
    manifest.check_contents(template)?;
    let path = template.join(MEMORY);
    let holders = holders(host, template);
    let (expected, bytes) = (manifest.digest(MEMORY).to_owned(), manifest.shape.memory_mib << 20);
    let source = path.clone();
    let begin = Instant::now();
    let work = tokio::task::spawn_blocking(move || {
        for (pid, fd) in holders {
            if let Ok(Some(memory)) = SealedMemory::take_over(pid, fd, bytes, &expected) {
                return Ok((memory, expected));
            }
        }
        SealedMemory::load(&source)
    });
    let (memory, digest) =
        joined(work.await).map_err(EngineError::host(format!("load {} into memory", path.display())))?;
    manifest.expect(template, MEMORY, &digest)?;
    tracing::debug!(template = %template.display(), ms = millis(begin.elapsed()), "template memory loaded");
    Ok(Arc::new(memory))
}

/// Running machines of a template, by emulator and the descriptor it holds the memory under.
fn holders(host: &Host, template: &Path) -> Vec<(i32, i32)> {
    let Ok(entries) = std::fs::read_dir(&host.machines_dir) else { return Vec::new() };
    let record = |name: String| MachineDir::of(&host.machines_dir, &name.parse().ok()?).read_record().ok()?;
    entries
        .flatten()
        .filter_map(|entry| record(entry.file_name().to_string_lossy().into_owned()))
        .filter(|record| record.is_complete && record.template == template && record.boot_id == host.boot_id)
        .filter(|record| record.memory == MemoryBase::Template)
        .filter_map(|record| Some((record.processes?.emulator, record.memory_fd)))
        .filter(|(emulator, _)| emulator.is_alive())
        .map(|(emulator, fd)| (emulator.pid, fd))
        .collect()
}

/// What a machine is made from.
struct Source<'a> {
    template: &'a Path,
    manifest: &'a Manifest,
    memory: Arc<SealedMemory>,
    base: MemoryBase,
    /// The snapshot, and the directory it is in.
    snapshot: Option<(&'a SnapshotManifest, &'a Path)>,
    /// Its pages, where they are not in `memory`.
    pages: Option<Arc<SnapshotImage>>,
}

impl Source<'_> {
    /// The file its devices' state is in; `None`: it boots.
    fn state(&self) -> Option<PathBuf> {
        match self.snapshot {
            None => Some(self.template.join(DEVICE_STATE)),
            Some((manifest, directory)) => manifest.has_memory().then(|| directory.join(DEVICES)),
        }
    }
}

/// Restores a machine from a template; it is paused.
pub(crate) async fn start(
    host: &Arc<Host>,
    memories: &Memories,
    machine: &MachineId,
    template: &Path,
) -> Result<QemuMachine, EngineError> {
    let template = find(template)?;
    let manifest = Manifest::check(&template, &host.needs)?;
    usage::check_capacity(&manifest.shape, 0, &host.limits, &host.machines_dir)?;
    let memory = memories.get(host, &template, &manifest).await?;
    let base = MemoryBase::Template;
    let source = Source { template: &template, manifest: &manifest, memory, base, snapshot: None, pages: None };
    make(host, machine, source, None).await
}

/// What a machine takes from a snapshot.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Take {
    /// All there is: with memory it is restored and paused, else it boots and runs.
    All,
    /// The disk; it boots and runs.
    Disk,
}

/// Starts a machine from a snapshot.
pub(crate) async fn start_from_snapshot(
    host: &Arc<Host>,
    memories: &Memories,
    images: &Images,
    machine: &MachineId,
    (template, snapshot): (&Path, &Path),
    take: Take,
) -> Result<QemuMachine, EngineError> {
    let (template, directory) = (find(template)?, find(snapshot)?);
    let manifest = Manifest::read(&template)?;
    let mut snapshot = SnapshotManifest::read(&directory)?;
    if take == Take::Disk {
        snapshot.forget_memory();
    }
    snapshot.check(&directory, &manifest, &host.needs)?;
    usage::check_capacity(&manifest.shape, snapshot.memory_bytes(), &host.limits, &host.machines_dir)?;
    host.checked_files.check_layers(&directory, &snapshot.layers)?;
    let empty = || {
        let memory = SealedMemory::zero(manifest.shape.memory_mib << 20);
        memory.map(Arc::new).map_err(EngineError::host("make memory"))
    };
    let (mut memory, mut base, mut pages, mut image) = (empty()?, MemoryBase::Zero, None, None);
    if snapshot.has_memory() {
        if snapshot.base == Base::Template {
            manifest.needs.compare(&host.needs)?;
            (memory, base) = (memories.get(host, &template, &manifest).await?, MemoryBase::Template);
        }
        let loaded = images.get(&directory, &snapshot, &host.checked_files).await?;
        snapshot.check_file(&directory, DEVICES)?;
        let (supply, used) = loaded.supply(&memory).await?;
        match supply {
            Supply::Injected => pages = Some(loaded),
            Supply::Whole(whole) => {
                memory = whole;
                base = if base == MemoryBase::Zero { MemoryBase::ZeroImage } else { MemoryBase::Image };
            }
        }
        image = Some(used);
    }
    let source = Source {
        template: &template,
        manifest: &manifest,
        memory,
        base,
        snapshot: Some((&snapshot, &directory)),
        pages,
    };
    make(host, machine, source, image).await
}

fn find(path: &Path) -> Result<PathBuf, EngineError> {
    std::fs::canonicalize(path)
        .map_err(|error| EngineError::Damaged { path: path.to_owned(), reason: format!("it cannot be found: {error}") })
}

async fn make(
    host: &Arc<Host>,
    machine: &MachineId,
    source: Source<'_>,
    image: Option<ImageUse>,
) -> Result<QemuMachine, EngineError> {
    let directory = MachineDir::of(&host.machines_dir, machine);
    let layers = source.snapshot.map_or(&[][..], |(snapshot, _)| &snapshot.layers);
    let record = Record {
        machine: machine.clone(),
        boot_id: host.boot_id.clone(),
        template: source.template.to_owned(),
        unfinished_template: None,
        cgroup: host.cgroups.name(machine.as_str()),
        processes: None,
        memory_fd: source.memory.file().as_raw_fd(),
        is_complete: false,
        disk: Some(DiskChain::new(layers).map_err(EngineError::host("name a disk layer"))?),
        memory: source.base,
    };
    directory.create().map_err(EngineError::host(format!("make the directory of {machine}")))?;
    let mut undo = Undo::new(Remains::of_record(directory.clone(), &record, &host.boot_id), host.name_of(machine));
    let memory = source.memory.clone();
    let mut restore = Restore { host, source, directory: &directory, record };
    match restore.run(&mut undo).await {
        Ok(launched) => {
            undo.disarm();
            Ok(QemuMachine::new(host.clone(), restore.record, directory, launched, memory, image))
        }
        Err(error) => {
            undo.run().await;
            Err(error)
        }
    }
}

struct Restore<'a> {
    host: &'a Arc<Host>,
    source: Source<'a>,
    directory: &'a MachineDir,
    record: Record,
}

impl Restore<'_> {
    async fn run(&mut self, undo: &mut Undo) -> Result<Launched, EngineError> {
        let host = self.host;
        let begin = Instant::now();
        self.write_record()?;
        self.add_layers().map_err(EngineError::host("make the machine's disk"))?;
        let limits = host.limits.of_group(&self.source.manifest.shape);
        self.record.cgroup = host
            .cgroups
            .create(self.record.machine.as_str(), &limits)
            .map_err(EngineError::host("make the machine's control group"))?;
        let state = match self.source.state() {
            Some(path) => Some(File::open(&path).map_err(EngineError::host(format!("open {}", path.display())))?),
            None => {
                let added = self.directory.add_kernel(&host.kernel, &host.initramfs);
                added.map_err(EngineError::host("copy the kernel"))?;
                None
            }
        };
        let prepared = begin.elapsed();

        let mut launched = self.launch(state.as_ref(), undo).await?;
        let answered = begin.elapsed();
        match &state {
            Some(state) => {
                // Before the state is loaded: its guest was connected when it was saved, and goes on without being told.
                let link = self.directory.connect(LINK).map_err(EngineError::host("connect to the guest's link"))?;
                launched.link = Some(link);
                let loaded = self.load(&launched, state).await;
                loaded.map_err(|error| explain(error, &launched))?;
            }
            None => {
                if let Err(error) = wait_until_booted(host, self.directory, &launched).await {
                    return Err(explain_boot(error, &launched).await);
                }
                self.directory.remove_kernel().map_err(EngineError::host("remove the kernel's copy"))?;
            }
        }
        self.record.is_complete = true;
        self.write_record()?;
        tracing::debug!(
            machine = %self.record.machine,
            prepare_ms = millis(prepared),
            launch_ms = millis(answered - prepared),
            load_ms = millis(begin.elapsed() - answered),
            "machine restored"
        );
        Ok(launched)
    }

    /// Its own empty layer over those of the snapshot; and the list of the pages of its image, for its
    /// own snapshots.
    fn add_layers(&self) -> std::io::Result<()> {
        let disk = self.record.disk.as_ref().ok_or(std::io::ErrorKind::InvalidInput)?;
        if let Some((snapshot, directory)) = self.source.snapshot {
            for layer in &snapshot.layers {
                std::fs::hard_link(directory.join(layer.id.file_name()), self.directory.layer(&layer.id))?;
            }
            if self.source.base.has_map() {
                std::fs::hard_link(directory.join(MAP), self.directory.memory_map())?;
            }
        }
        let below = disk.frozen.last().map(|layer| &layer.id);
        self.directory.add_layer(&self.source.template.join(MACHINE_LAYER), &disk.own, below)
    }

    fn write_record(&self) -> Result<(), EngineError> {
        self.directory.write_record(&self.record).map_err(EngineError::host("write the machine's record"))
    }

    async fn launch(&mut self, state: Option<&File>, undo: &mut Undo) -> Result<Launched, EngineError> {
        let host = self.host;
        let mount =
            |source: PathBuf, target: &str, is_writable| Mount { source, target: target.to_owned(), is_writable };
        let mut mounts = vec![
            mount(self.source.template.to_owned(), command_line::TEMPLATE_DIR, false),
            mount(self.directory.layers_dir(), command_line::LAYERS_DIR, false),
            mount(self.directory.disk_dir(), command_line::MACHINE_DIR, true),
        ];
        let kernel_command_line = command_line::kernel_command_line(host.accelerator, clock::tsc_khz());
        let origin = match (state, self.source.snapshot) {
            (None, _) => {
                mounts.push(mount(self.directory.disk_dir(), command_line::BOOT_DIR, false));
                Origin::Boot { kernel_command_line: &kernel_command_line, keeps_memory: false }
            }
            (Some(_), None) => Origin::Template,
            (Some(_), Some(_)) => Origin::Snapshot,
        };
        let cgroup = self.record.cgroup.clone();
        let disk = self.record.disk.as_ref().map(RootDisk::of_machine);
        let disk =
            disk.ok_or_else(|| EngineError::host("find the machine's disk")(std::io::ErrorKind::NotFound.into()))?;
        let launch = Launch {
            name: &host.name_of(&self.record.machine),
            directory: self.directory,
            shape: self.source.manifest.shape,
            accelerator: host.accelerator,
            origin,
            disk: &disk,
            mounts,
            memory: self.source.memory.file(),
            device_state: state,
            cgroup: &cgroup,
            patience: host.limits.restore_patience,
        };
        let (directory, record) = (self.directory, &mut self.record);
        launch
            .run(host, |processes| {
                undo.update(|remains| remains.processes = vec![processes.emulator, processes.bubblewrap]);
                record.processes = Some(processes);
                directory.write_record(record).map_err(EngineError::host("write the machine's record"))
            })
            .await
    }

    async fn load(&self, launched: &Launched, state: &File) -> Result<(), EngineError> {
        let limits = &self.host.limits;
        if let Some(image) = self.source.pages.clone() {
            let (pid, bytes) = (launched.processes.emulator.pid, self.source.manifest.shape.memory_mib << 20);
            let begin = Instant::now();
            let work = move || GuestMemory::find(pid, bytes)?.write_from_file(&image.runs, &image.pages);
            let written = tokio::task::spawn_blocking(work).await;
            written.map_err(|error| EngineError::host("write the guest's memory")(std::io::Error::other(error)))??;
            tracing::debug!(machine = %self.record.machine, ms = millis(begin.elapsed()), "pages written");
        }
        let qmp = &launched.qmp;
        set_capabilities(qmp, limits.command_patience).await?;
        let uri = format!("fd:{}", state.as_raw_fd());
        migrate(qmp, "migrate-incoming", json!({ "uri": uri }), limits.restore_patience).await
    }
}

fn explain(error: EngineError, launched: &Launched) -> EngineError {
    let console = launched.console.last_lines(SHOWN_LINES);
    match with_complaints(error, &launched.complaints) {
        EngineError::Emulator { step, detail } if !console.is_empty() => {
            EngineError::Emulator { step, detail: format!("{detail}; last console lines: {console}") }
        }
        error => error,
    }
}

/// Takes charge of a machine another process started. What is no whole machine is removed.
pub(crate) async fn adopt(host: &Arc<Host>, machine: &MachineId) -> Result<Option<QemuMachine>, EngineError> {
    let directory = MachineDir::of(&host.machines_dir, machine);
    let read = directory.read_record();
    let Ok(Some(mut record)) = read else {
        // No record or one that cannot be read: nothing that could be controlled.
        let mut found = super::remains::find(host, &std::collections::BTreeSet::new())?;
        if let Some(remains) = found.get_mut(machine) {
            remains.remove_half_started(&host.name_of(machine)).await?;
        }
        return Ok(None);
    };
    let mut remains = Remains::of_record(directory.clone(), &record, &host.boot_id);
    let alive = record
        .processes
        .filter(|processes| record.is_complete && record.boot_id == host.boot_id && processes.emulator.is_alive());
    let Some(processes) = alive else {
        remains.remove_half_started(&host.name_of(machine)).await?;
        return Ok(None);
    };
    let open = async {
        let stream = directory.connect(CONTROL).map_err(EngineError::host("connect to the emulator"))?;
        let qmp = Qmp::open(stream, host.limits.command_patience).await?;
        disk::recover(host, &qmp, &directory, &mut record).await?;
        let console = directory.connect(CONSOLE).map_err(EngineError::host("connect to the console"))?;
        Ok((qmp, Tail::follow(console, CONSOLE_BYTES)))
    };
    let (qmp, console) = match open.await {
        Ok(parts) => parts,
        Err(error) => {
            remains.remove().await?;
            return if processes.emulator.is_alive() { Err(error) } else { Ok(None) };
        }
    };
    let complaints = Tail::empty();
    let host = host.clone();
    let parts =
        QemuMachine::with_parts(host, record, directory, processes, qmp, console, complaints, None, None, None, None);
    Ok(Some(parts))
}
