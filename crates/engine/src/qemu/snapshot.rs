//! Takes a snapshot of a machine that goes on.
//!
//! ```text
//! before   the agent writes its file systems (disk only); a long chain is shortened; the next layer is made,
//!          recorded and opened; written blocks go to disk; the guest's own pages are counted, room is made
//! halted   stop; the link stands still; device state; own pages copied while the disk is switched to the next
//!          layer; cont
//! after    the switch is recorded; the old layer is frozen and its checksum taken; files are written, read
//!          back, forced to disk and, with the layers, get their place under the snapshot's name
//! ```
//!
//! What can fail does so before the machine is halted or after it runs again: `cont` is always tried. A
//! switch of layers is kept even when the snapshot fails, since going back would cost another halt; the
//! chain is one longer then, until it is shortened. A server that ends at any point leaves a machine
//! whose emulator says what happened ([`recover`]); whether it should run is known to those who adopt it.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::unix::fs::{DirBuilderExt, FileExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use serde_json::json;
use tokio::sync::OwnedSemaphorePermit;

use super::{
    disk,
    launch::millis,
    layers::{FrozenLayer, LayerId},
    link_gate::{Closed, InSocket},
    machine::Inner,
    machine_dir::{MachineDir, remove_tree},
    manifest::{MACHINE_LAYER, Manifest},
    memory, page_map,
    pages::{GuestMemory, PAGE, Run, page_count, union},
    snapshot_dir::{Base, DEVICES, FileEntry, Keeping, MAP, PAGES, SnapshotManifest},
    usage,
};
use crate::{EngineError, SnapshotReport, SnapshotScope};

/// Up to so many pages are copied by the task itself: handing them to another thread would take longer.
const COPIED_IN_PLACE: u64 = (16 << 20) / PAGE;
/// More than the state of any machine's devices.
const DEVICE_BYTES: u64 = 64 << 20;
const READ_BACK_BYTES: usize = 256 << 10;
/// Own pages that may come up between counting and halting, besides an eighth.
const SPARE_PAGES: u64 = 1024;

/// Fewer bytes than this are not worth a thread of their own.
const HASHED_ASIDE: usize = 1 << 20;

/// Takes a snapshot. Must not be dropped half-way: the machine could stay halted.
pub(crate) async fn take(
    inner: &Arc<Inner>,
    directory: &Path,
    scope: SnapshotScope,
    keeping: Keeping,
) -> Result<SnapshotReport, EngineError> {
    let _one = inner.snapshotting.lock().await;
    let place = Place::find(&inner.directory, directory)?;
    let template = Manifest::read(&inner.record().template)?;
    if scope == SnapshotScope::DiskOnly {
        if !is_running(inner).await? {
            return Err(EngineError::Unsupported {
                missing: "a disk-only snapshot of a paused machine".to_owned(),
                why: "its agent cannot write its file systems out; resume it first, or take memory and disk".to_owned(),
            });
        }
        inner.guest().await?.sync().await?;
    }
    let host_error = || EngineError::host(format!("make {}", place.unfinished.display()));
    remove_tree(&place.unfinished).map_err(host_error())?;
    fs::DirBuilder::new().mode(0o700).create(&place.unfinished).map_err(host_error())?;
    let taking = Taking { inner, template: &template, place: &place, keeping };
    let taken = taking.run(scope).await;
    if taken.is_err()
        && let Err(error) = remove_tree(&place.unfinished)
    {
        tracing::warn!(%error, "cannot remove a snapshot that failed; it goes with its machine");
    }
    taken
}

/// Where a snapshot is put together and where it will be.
struct Place {
    unfinished: PathBuf,
    directory: PathBuf,
    parent: PathBuf,
}

impl Place {
    fn find(machine: &MachineDir, directory: &Path) -> Result<Self, EngineError> {
        let refuse = |error: io::Error| EngineError::host(format!("make {}", directory.display()))(error);
        let parent = directory.parent().ok_or_else(|| refuse(io::ErrorKind::InvalidInput.into()))?;
        let parent = fs::canonicalize(parent).map_err(refuse)?;
        let name = directory.file_name().ok_or_else(|| refuse(io::ErrorKind::InvalidInput.into()))?;
        let directory = parent.join(name);
        if fs::symlink_metadata(&directory).is_ok() {
            return Err(refuse(io::ErrorKind::AlreadyExists.into()));
        }
        let device = |path: &Path| fs::metadata(path).map(|metadata| metadata.dev());
        if device(&parent).map_err(refuse)? != device(machine.path()).map_err(refuse)? {
            // Layers are linked.
            let why = "it must be on the file system of the machines' directory";
            return Err(refuse(io::Error::new(io::ErrorKind::CrossesDevices, why)));
        }
        Ok(Self { unfinished: machine.unfinished_snapshot(), directory, parent })
    }
}

struct Taking<'a> {
    inner: &'a Arc<Inner>,
    template: &'a Manifest,
    place: &'a Place,
    keeping: Keeping,
}

/// Room for the guest's own pages.
enum Room {
    /// In memory, there already.
    Memory(Vec<u8>, OwnedSemaphorePermit),
    /// In the snapshot's file: slower, but they need no memory.
    File(File),
}

/// What was made ready for copying memory.
struct MemoryPlan {
    guest: GuestMemory,
    /// Pages of the image the machine lives on.
    image: Vec<Run>,
    room: Room,
    devices: File,
    descriptor_set: i64,
}

/// What was copied while the machine was halted.
struct Captured {
    runs: Vec<Run>,
    room: Room,
}

impl Taking<'_> {
    async fn run(&self, scope: SnapshotScope) -> Result<SnapshotReport, EngineError> {
        let begin = Instant::now();
        let inner = self.inner;
        disk::settle(inner).await?;
        let with_memory = scope == SnapshotScope::MemoryAndDisk;
        self.check_capacity(with_memory)?;
        disk::shorten(inner).await?;
        let next = disk::add_next(inner, &self.template_layer()).await?;
        let plan = if with_memory { self.plan_memory().await.map(Some) } else { Ok(None) };
        let plan = match plan {
            Ok(plan) => plan,
            Err(error) => {
                disk::settle(inner).await?;
                return Err(error);
            }
        };
        let devices = plan.as_ref().map(|plan| plan.devices.try_clone());
        let set = plan.as_ref().map(|plan| plan.descriptor_set);
        let prepared = begin.elapsed();

        let (captured, paused) = self.halted(&next, plan).await;
        let resumed = begin.elapsed();
        if let Some(set) = set {
            // It closes the descriptor; at the worst it stays until the emulator ends.
            let _ = inner.command("remove-fd", json!({ "fdset-id": set })).await;
        }
        // Whatever came of it, the emulator knows which layer is written to.
        let settled = disk::settle(inner).await;
        let captured = captured?;
        settled?;
        let devices = devices.transpose().map_err(EngineError::host("keep the device state"))?;
        let layers = disk::freeze(inner).await?;
        let frozen = begin.elapsed();
        let report = self.keep(scope, captured, devices, layers, paused).await?;
        tracing::debug!(
            machine = %inner.id,
            prepare_ms = millis(prepared),
            paused_ms = millis(paused),
            freeze_ms = millis(frozen - resumed),
            keep_ms = millis(begin.elapsed() - frozen),
            memory_bytes = report.memory_bytes,
            disk_bytes = report.disk_bytes,
            "snapshot taken"
        );
        Ok(report)
    }

    fn template_layer(&self) -> PathBuf {
        self.inner.record().template.join(MACHINE_LAYER)
    }

    /// What the snapshot takes must be there besides the reserve: its pages, and what the chain's
    /// shortening copies.
    fn check_capacity(&self, with_memory: bool) -> Result<(), EngineError> {
        let inner = self.inner;
        let mut bytes = disk::bytes_to_merge(inner);
        if with_memory {
            let record = inner.record();
            bytes += usage::read(&inner.processes.emulator, 0).map_or(0, |usage| usage.private_bytes);
            bytes += fs::metadata(inner.directory.memory_map())
                .map_or(0, |_| self.template.shape.memory_mib << 20)
                .min(if record.memory.has_map() { u64::MAX } else { 0 });
        }
        usage::check_disk(bytes, &inner.host.limits, &inner.host.machines_dir)
    }

    async fn plan_memory(&self) -> Result<MemoryPlan, EngineError> {
        let inner = self.inner;
        let bytes = self.template.shape.memory_mib << 20;
        let image = self.image_pages(bytes)?;
        let guest = GuestMemory::find(inner.processes.emulator.pid, bytes)?;
        let counted = page_count(&union(&guest.private_pages()?, &image));
        let room = self.make_room(counted + counted / 8 + SPARE_PAGES).await?;
        let (devices, for_emulator) = device_file().map_err(EngineError::host("make a file for the device state"))?;
        let patience = inner.host.limits.command_patience;
        let added = inner.qmp.run_with_file("add-fd", json!({}), &for_emulator, patience).await?;
        let descriptor_set = added["fdset-id"]
            .as_i64()
            .ok_or_else(|| EngineError::Emulator { step: "add-fd", detail: "it names no descriptor set".to_owned() })?;
        Ok(MemoryPlan { guest, image, room, devices, descriptor_set })
    }

    fn image_pages(&self, bytes: u64) -> Result<Vec<Run>, EngineError> {
        if !self.inner.record().memory.has_map() {
            return Ok(Vec::new());
        }
        let path = self.inner.directory.memory_map();
        let map = fs::read(&path).map_err(EngineError::host(format!("read {}", path.display())))?;
        page_map::decode(&map, bytes / PAGE).map_err(|reason| EngineError::Damaged { path, reason })
    }

    async fn make_room(&self, pages: u64) -> Result<Room, EngineError> {
        let mib = u32::try_from((pages * PAGE).div_ceil(1 << 20)).unwrap_or(u32::MAX);
        let permit = self.inner.host.snapshot_buffers.clone().try_acquire_many_owned(mib);
        if let (Ok(permit), true) = (permit, usage::has_memory(pages * PAGE, &self.inner.host.limits)) {
            let bytes = (pages * PAGE) as usize;
            let fill = tokio::task::spawn_blocking(move || {
                let mut buffer = vec![0_u8; bytes];
                // Touched now: the kernel's work of finding pages is not done while the machine is halted.
                buffer.iter_mut().step_by(PAGE as usize).for_each(|byte| *byte = 1);
                buffer
            });
            let buffer = fill.await.map_err(|error| EngineError::host("make room")(io::Error::other(error)))?;
            return Ok(Room::Memory(buffer, permit));
        }
        let path = self.place.unfinished.join(PAGES);
        let file = File::options().read(true).write(true).create_new(true).open(&path);
        file.map(Room::File).map_err(EngineError::host(format!("make {}", path.display())))
    }

    /// The part during which the machine stands still. It runs again afterwards if it ran before.
    async fn halted(
        &self,
        next: &LayerId,
        plan: Option<MemoryPlan>,
    ) -> (Result<Option<Captured>, EngineError>, Duration) {
        let inner = self.inner;
        // Neither paused nor resumed by others meanwhile.
        let _busy = inner.busy.lock().await;
        // Without memory the switch alone is an instant between two of the guest's writes.
        let halts = match (&plan, is_running(inner).await) {
            (None, _) => false,
            (Some(_), Ok(is_running)) => is_running,
            (Some(_), Err(error)) => return (Err(error), Duration::ZERO),
        };
        let closed = inner.gate.close();
        let begin = Instant::now();
        let result = async {
            if halts {
                inner.command("stop", json!({})).await?;
            }
            let stopped = begin.elapsed();
            let captured = self.capture(next, plan, &closed).await?;
            tracing::debug!(machine = %inner.id, stop_ms = millis(stopped), "machine was halted");
            Ok(captured)
        }
        .await;
        let captured = begin.elapsed();
        if !halts {
            return (result, Duration::ZERO);
        }
        let resumed = inner.command("cont", json!({})).await;
        let paused = begin.elapsed();
        tracing::debug!(machine = %inner.id, cont_ms = millis(paused - captured), "machine goes on");
        drop(closed);
        (result.and_then(|captured| resumed.map(|_| captured)), paused)
    }

    async fn capture(
        &self,
        next: &LayerId,
        plan: Option<MemoryPlan>,
        closed: &Closed<'_>,
    ) -> Result<Option<Captured>, EngineError> {
        let inner = self.inner;
        let Some(MemoryPlan { guest, image, room, descriptor_set, .. }) = plan else {
            disk::switch(inner, next).await?;
            return Ok(None);
        };
        let begin = Instant::now();
        let at_rest = settle_link(inner, closed).await?;
        let settled = begin.elapsed();
        let arguments = json!({ "filename": format!("/dev/fdset/{descriptor_set}"), "live": false });
        inner.command("xen-save-devices-state", arguments).await?;
        let devices = begin.elapsed();
        let mut switch = Box::pin(disk::switch(inner, next));
        // Sends the command: the emulator switches while pages are copied here.
        let early = match futures::poll!(&mut switch) {
            std::task::Poll::Ready(result) => Some(result),
            std::task::Poll::Pending => None,
        };
        let copied = copy(guest, &image, room).await;
        let pages = begin.elapsed();
        let switched = match early {
            Some(result) => result,
            None => switch.await,
        };
        let captured = copied?;
        switched?;
        if closed.bytes() != at_rest {
            // The pages would not be what the devices take them for.
            let detail = "the guest link moved while the machine's state was copied; try again".to_owned();
            return Err(EngineError::Emulator { step: "snapshot", detail });
        }
        tracing::debug!(
            machine = %inner.id,
            link_ms = millis(settled),
            devices_ms = millis(devices - settled),
            pages_ms = millis(pages - devices),
            disk_ms = millis(begin.elapsed() - pages),
            runs = captured.runs.len(),
            "state captured"
        );
        Ok(Some(captured))
    }

    /// Puts the snapshot's files together and gives it its name.
    async fn keep(
        &self,
        scope: SnapshotScope,
        captured: Option<Captured>,
        devices: Option<File>,
        layers: Vec<FrozenLayer>,
        paused: Duration,
    ) -> Result<SnapshotReport, EngineError> {
        let inner = self.inner.clone();
        let (needs, template, shape) = (inner.host.needs.clone(), self.template.identity(), self.template.shape);
        let base = if inner.record().memory.is_zero() { Base::Zero } else { Base::Template };
        let (unfinished, directory) = (self.place.unfinished.clone(), self.place.directory.clone());
        let (parent, keeping) = (self.place.parent.clone(), self.keeping);
        let work = move || {
            let mut files = BTreeMap::new();
            if let (Some(captured), Some(devices)) = (captured, devices) {
                let pages = (shape.memory_mib << 20) / PAGE;
                files = write_memory(&unfinished, captured, &devices, pages, keeping)?;
            }
            for layer in &layers {
                fs::hard_link(inner.directory.layer(&layer.id), unfinished.join(layer.id.file_name()))?;
            }
            let manifest = SnapshotManifest::new(scope, needs, template, shape, base, layers, files, paused);
            manifest.write(&unfinished, keeping)?;
            renameat2(AT_FDCWD, &unfinished, AT_FDCWD, &directory, RenameFlags::RENAME_NOREPLACE)?;
            if keeping == Keeping::Durable {
                memory::sync_directory(&parent)?;
            }
            if let Some(digest) = manifest.digest(PAGES) {
                inner.host.checked_files.note(&directory.join(PAGES), digest);
            }
            Ok(manifest.report(&directory))
        };
        let written: io::Result<SnapshotReport> = super::config::joined(tokio::task::spawn_blocking(work).await);
        written.map_err(EngineError::host(format!("write {}", self.place.directory.display())))
    }
}

/// Waits until the emulator moves nothing more between the link's socket and the guest's memory, because nothing is
/// left or there is no room: a halted guest takes and gives only so much. What it has at rest stays so while the gate
/// is closed.
async fn settle_link(inner: &Inner, closed: &Closed<'_>) -> Result<InSocket, EngineError> {
    // A socket that is ready is served in one turn of the emulator's loop and what follows from that in the next; a
    // command takes at least one.
    const UNCHANGED: u32 = 3;
    let (mut before, mut unchanged) = (closed.bytes(), 0);
    while unchanged < UNCHANGED {
        inner.command("query-status", json!({})).await?;
        let now = closed.bytes();
        unchanged = if now == before { unchanged + 1 } else { 0 };
        before = now;
    }
    Ok(before)
}

async fn copy(guest: GuestMemory, image: &[Run], room: Room) -> Result<Captured, EngineError> {
    let runs = union(&guest.private_pages()?, image);
    let pages = page_count(&runs);
    let work = move || {
        let room = match room {
            Room::Memory(mut buffer, permit) => {
                buffer.resize((pages * PAGE) as usize, 0);
                guest.read(&runs, &mut buffer)?;
                Room::Memory(buffer, permit)
            }
            Room::File(file) => {
                guest.read_into_file(&runs, &file)?;
                Room::File(file)
            }
        };
        Ok(Captured { runs, room })
    };
    if pages <= COPIED_IN_PLACE {
        return work();
    }
    let result = tokio::task::spawn_blocking(work).await;
    result.map_err(|error| EngineError::host("copy the guest's memory")(io::Error::other(error)))?
}

/// A file in memory for the device state, and the same to be written to only, as the emulator wants it.
fn device_file() -> io::Result<(File, File)> {
    use std::os::fd::AsRawFd;
    let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
    let file = File::from(nix::sys::memfd::memfd_create(c"stockade-devices", flags)?);
    let writable = File::options().write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    Ok((file, writable))
}

fn write_memory(
    directory: &Path,
    captured: Captured,
    devices: &File,
    pages: u64,
    keeping: Keeping,
) -> io::Result<BTreeMap<String, FileEntry>> {
    let bytes = devices.metadata()?.len();
    if bytes == 0 || bytes > DEVICE_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("device state has {bytes} bytes")));
    }
    let mut state = vec![0; bytes as usize];
    devices.read_exact_at(&mut state, 0)?;
    let mut files = BTreeMap::new();
    let write = |name: &str, bytes: &[u8]| write_checked(&directory.join(name), bytes, keeping);
    files.insert(DEVICES.to_owned(), write(DEVICES, &state)?);
    files.insert(MAP.to_owned(), write(MAP, &page_map::encode(pages, &captured.runs))?);
    let entry = match captured.room {
        Room::Memory(buffer, _permit) => write(PAGES, &buffer)?,
        Room::File(file) => {
            file.set_len(page_count(&captured.runs) * PAGE)?;
            if keeping == Keeping::Durable {
                file.sync_all()?;
            }
            FileEntry { bytes: file.metadata()?.len(), digest: memory::file_digest(&directory.join(PAGES))? }
        }
    };
    files.insert(PAGES.to_owned(), entry);
    Ok(files)
}

/// Writes a file and, where it is to last, waits until the disk has it and reads it back.
fn write_checked(path: &Path, bytes: &[u8], keeping: Keeping) -> io::Result<FileEntry> {
    let write = || {
        let file = File::create_new(path)?;
        file.write_all_at(bytes, 0)?;
        if keeping == Keeping::Passing {
            return Ok(());
        }
        file.sync_all()?;
        if holds(&File::open(path)?, bytes)? {
            return Ok(());
        }
        let what = format!("{} does not hold what was written to it", path.display());
        Err(io::Error::new(io::ErrorKind::InvalidData, what))
    };
    let digest = if bytes.len() < HASHED_ASIDE {
        write()?;
        memory::bytes_digest(bytes)
    } else {
        std::thread::scope(|threads| {
            let digest = threads.spawn(|| memory::bytes_digest(bytes));
            write()?;
            digest.join().map_err(|_| io::Error::other("the checksum could not be taken"))
        })?
    };
    Ok(FileEntry { bytes: bytes.len() as u64, digest })
}

/// Whether a file holds these bytes and no others. Comparing takes a fraction of the time a checksum does.
fn holds(file: &File, bytes: &[u8]) -> io::Result<bool> {
    let mut buffer = vec![0; READ_BACK_BYTES.min(bytes.len())];
    for (index, piece) in bytes.chunks(READ_BACK_BYTES).enumerate() {
        let read = &mut buffer[..piece.len()];
        file.read_exact_at(read, (index * READ_BACK_BYTES) as u64)?;
        if read != piece {
            return Ok(false);
        }
    }
    Ok(file.metadata()?.len() == bytes.len() as u64)
}

async fn is_running(inner: &Inner) -> Result<bool, EngineError> {
    let status = inner.command("query-status", json!({})).await?;
    Ok(status["running"] == true)
}
