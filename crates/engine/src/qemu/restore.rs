//! Makes a machine from a template or a snapshot, and finds one again that another process made.
//!
//! From a template: its memory is mapped, its device state loaded. From a snapshot: the same with the
//! snapshot's pages put into the memory (images.rs) and its layers below the machine's own. From a snapshot
//! of a disk alone: the kernel is booted on memory in which nothing is written.

use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use stockade_model::MachineId;

use super::{
    Host, disk,
    emulator::{Emulator, Source},
    images::{ImageUse, Images, Supply},
    launch::{Launched, SHOWN_LINES, millis, with_complaints},
    machine::QemuMachine,
    machine_dir::{CONSOLE, CONTROL, MachineDir, MemoryBase},
    manifest::Manifest,
    memories::Memories,
    memory::SealedMemory,
    pages::GuestMemory,
    qmp::Qmp,
    remains::Remains,
    snapshot_dir::{Base, DEVICES, SnapshotManifest},
    spares::Spares,
    tail::Tail,
    template::{explain_boot, migrate, wait_until_booted},
    usage,
};
use crate::{EngineError, Urgency};

const CONSOLE_BYTES: usize = 64 << 10;
/// What machines are started with, and what is kept for the next ones.
#[derive(Clone, Copy)]
pub(crate) struct Stock<'a> {
    pub(crate) host: &'a Arc<Host>,
    pub(crate) memories: &'a Memories,
    pub(crate) images: &'a Images,
    pub(crate) spares: &'a Spares,
}

/// Restores a machine from a template; it is paused.
pub(crate) async fn start(
    stock: Stock<'_>,
    machine: &MachineId,
    template: &Path,
    urgency: Urgency,
) -> Result<QemuMachine, EngineError> {
    let Stock { host, memories, .. } = stock;
    let template = find(template)?;
    let manifest = Manifest::check(&template, &host.needs)?;
    usage::check_capacity(&manifest.shape, 0, &host.limits, &host.machines_dir)?;
    let memory = memories.get(host, &template, &manifest).await?;
    make(stock, machine, Source::template(&template, &manifest, memory), None, urgency).await
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
    stock: Stock<'_>,
    machine: &MachineId,
    (template, snapshot): (&Path, &Path),
    take: Take,
    urgency: Urgency,
) -> Result<QemuMachine, EngineError> {
    let Stock { host, memories, images, .. } = stock;
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
    make(stock, machine, source, image, urgency).await
}

fn find(path: &Path) -> Result<PathBuf, EngineError> {
    std::fs::canonicalize(path)
        .map_err(|error| EngineError::Damaged { path: path.to_owned(), reason: format!("it cannot be found: {error}") })
}

async fn make(
    stock: Stock<'_>,
    machine: &MachineId,
    source: Source<'_>,
    image: Option<ImageUse>,
    urgency: Urgency,
) -> Result<QemuMachine, EngineError> {
    let (host, begin) = (stock.host, Instant::now());
    let mut emulator = match assume_spare(stock, machine, &source, urgency).await {
        Some(emulator) => emulator,
        None => Emulator::start(host, machine, &source).await?,
    };
    let ready = begin.elapsed();
    if let Err(error) = bring_up(host, &mut emulator, &source).await {
        emulator.remove().await;
        return Err(error);
    }
    let loaded = begin.elapsed() - ready;
    tracing::debug!(%machine, emulator_ms = millis(ready), load_ms = millis(loaded), "machine restored");
    let (record, directory, launched) = emulator.into_parts();
    Ok(QemuMachine::new(host.clone(), record, directory, launched, source.memory, image))
}

/// The emulator that waited for this, if one did.
async fn assume_spare(
    stock: Stock<'_>,
    machine: &MachineId,
    source: &Source<'_>,
    urgency: Urgency,
) -> Option<Emulator> {
    let spare = if urgency == Urgency::Awaited { stock.spares.take(source) } else { None };
    match spare?.assume(stock.host, machine, source).await {
        Ok(emulator) => Some(emulator),
        Err(error) => {
            tracing::warn!(%machine, %error, "an emulator that waited was of no use");
            None
        }
    }
}

/// Loads what a machine is made from, or boots it.
async fn bring_up(host: &Host, emulator: &mut Emulator, source: &Source<'_>) -> Result<(), EngineError> {
    let Emulator { directory, launched, .. } = &*emulator;
    match source.state() {
        Some(state) => {
            let loaded = load(host, launched, source, &state).await;
            loaded.map_err(|error| explain(error, launched))?;
        }
        None => {
            if let Err(error) = wait_until_booted(host, directory, launched).await {
                return Err(explain_boot(error, launched).await);
            }
            directory.remove_kernel().map_err(EngineError::host("remove the kernel's copy"))?;
        }
    }
    emulator.record.is_complete = true;
    emulator.write_record()
}

/// Puts the pages of a snapshot and the state of its devices in place.
async fn load(host: &Host, launched: &Launched, source: &Source<'_>, state: &Path) -> Result<(), EngineError> {
    let state = File::open(state).map_err(EngineError::host(format!("open {}", state.display())))?;
    if let Some(image) = source.pages.clone() {
        let (pid, bytes) = (launched.processes.emulator.pid, source.manifest.shape.memory_mib << 20);
        let begin = Instant::now();
        let work = move || GuestMemory::find(pid, bytes)?.write_from_file(&image.runs, &image.pages);
        let written = tokio::task::spawn_blocking(work).await;
        written.map_err(|error| EngineError::host("write the guest's memory")(std::io::Error::other(error)))??;
        tracing::debug!(ms = millis(begin.elapsed()), "pages written");
    }
    migrate(&launched.qmp, "migrate-incoming", &state, &host.limits).await
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
            remains.remove_half_started().await?;
        }
        return Ok(None);
    };
    let mut remains = Remains::of_record(host, directory.clone(), &record);
    let alive = record
        .processes
        .filter(|processes| record.is_complete && record.boot_id == host.boot_id && processes.emulator.is_alive());
    let Some(processes) = alive else {
        remains.remove_half_started().await?;
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
