//! What runs a machine. The service knows this page; everything below it belongs to one driver.
//!
//! ```text
//! TemplateBoot --boot_template--> template directory (disk + warm memory + device state)
//!                                        |
//!                     start(machine id)  v
//!               paused machine --resume--> running machine <--connect-- GuestClient (link session)
//!                     ^                        |
//!                     +--------pause-----------+--kill or its own end--> Exited
//! ```
//!
//! A machine is a process of its own with a directory of its own (`machines/<id>/`): it outlives this
//! process, and [`Engine::adopt`] finds it again. Whoever wants a machine writes its record first;
//! [`Engine::sweep`] removes every machine that has none.

use std::{collections::BTreeSet, path::PathBuf, sync::Arc, time::Duration};

use async_trait::async_trait;
use stockade_model::{Accelerator, IsolationClass, MachineId, MachineShape};
use stockade_wire::{machine::Identity, process::StartRequest};

mod error;
#[cfg(feature = "fake")]
pub mod fake;
pub mod guest;
pub mod qemu;

pub use error::EngineError;
pub use guest::GuestClient;

/// What an engine is and what it promises.
#[derive(Clone, Debug)]
pub struct EngineInfo {
    /// The driver's name: `qemu`, `fake`.
    pub name: &'static str,
    /// What makes the guest's instructions run.
    pub accelerator: Accelerator,
    /// How strong the wall around the guest is.
    pub isolation: IsolationClass,
    /// The emulator's version, as it prints it.
    pub version: String,
}

/// What a template is booted from.
#[derive(Clone, Debug)]
pub struct TemplateBoot {
    /// The root file system, an ext4 image. It is moved or copied sparsely into `directory`.
    pub root_disk: PathBuf,
    /// Processors, memory and disk of every machine made from the template.
    pub shape: MachineShape,
    /// Whom the guest is told to be before its memory is kept. What all its machines have in common (the authority they
    /// trust, the files programs look for) is then there and need not be made again in each of them.
    pub introduction: Option<Identity>,
    /// What is to run in it when its memory is kept; every machine made from it has that running.
    pub startup: Option<Startup>,
    /// Where the template is kept. Must not exist; appears whole or not at all.
    pub directory: PathBuf,
}

/// A program that belongs to a template's memory.
#[derive(Clone, Debug)]
pub struct Startup {
    /// It runs on; nobody reads what it writes.
    pub start: StartRequest,
    /// Ends with code 0 once the program is ready; tried again until it does.
    pub ready: StartRequest,
    /// How long that may take.
    pub patience: Duration,
}

/// Who waits for a machine that is started.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Urgency {
    /// Somebody does: it may take what was got ready for that.
    Awaited,
    /// Nobody yet: it is itself being got ready.
    Ahead,
}

/// How far a long step has come; called often, must return at once.
pub type Progress<'a> = &'a (dyn Fn(&str) + Send + Sync);

/// Runs machines of one kind on this host.
#[async_trait]
pub trait Engine: Send + Sync + 'static {
    /// What this engine is.
    fn info(&self) -> EngineInfo;

    /// Whether a template directory was made by this very emulator, machine type and kernel.
    ///
    /// # Errors
    /// [`EngineError::Mismatch`] names the difference; [`EngineError::Damaged`] a missing or broken file.
    async fn check_template(&self, directory: &std::path::Path) -> Result<(), EngineError>;

    /// Boots a root disk once and keeps it as disk + warm memory + device state.
    ///
    /// # Errors
    /// A guest that does not come up gives [`EngineError::GuestSilent`] with the console's last lines.
    async fn boot_template(&self, boot: &TemplateBoot, progress: Progress<'_>) -> Result<(), EngineError>;

    /// Restores a machine from a template directory. It comes back paused and without an identity.
    /// On failure nothing of it is left.
    ///
    /// # Errors
    /// Everything that can be wrong with the template, the host's resources or the emulator.
    async fn start(
        &self,
        machine: &MachineId,
        template: &std::path::Path,
        urgency: Urgency,
    ) -> Result<Arc<dyn Machine>, EngineError>;

    /// Finds a machine that an earlier process started. `None`: it no longer runs; what it left is removed.
    ///
    /// # Errors
    /// The machine is there but cannot be controlled; it has been ended and removed.
    async fn adopt(&self, machine: &MachineId) -> Result<Option<Arc<dyn Machine>>, EngineError>;

    /// Ends and removes every machine of this data directory that is not in `keep`; returns their ids.
    ///
    /// # Errors
    /// What could not be removed is named; the rest has been.
    async fn sweep(&self, keep: &BTreeSet<MachineId>) -> Result<Vec<MachineId>, EngineError>;

    /// Starts a machine from a snapshot directory and the template directory below it. With memory it
    /// comes back paused, without an identity, just after the instant the snapshot was taken; a
    /// disk-only snapshot boots cold from its disk (and is then running). On failure nothing is left.
    /// Many machines may start from one snapshot at once: they share what they do not change.
    ///
    /// # Errors
    /// As for [`Engine::start`]; [`EngineError::Damaged`] names the file that is not what was written.
    async fn start_from_snapshot(
        &self,
        machine: &MachineId,
        template: &std::path::Path,
        snapshot: &std::path::Path,
        urgency: Urgency,
    ) -> Result<Arc<dyn Machine>, EngineError> {
        let _ = (machine, template, snapshot, urgency);
        Err(EngineError::no_snapshots(self.info().name))
    }

    /// Boots a machine cold from a snapshot's disk, whatever else the snapshot holds and whatever emulator and
    /// kernel it was taken with: the way out where [`Engine::start_from_snapshot`] finds a mismatch. The
    /// machine is running when this returns. A disk that was taken with memory is as after a power failure.
    ///
    /// # Errors
    /// As for [`Engine::start_from_snapshot`], but for what only memory needs.
    async fn boot_from_snapshot(
        &self,
        machine: &MachineId,
        template: &std::path::Path,
        snapshot: &std::path::Path,
    ) -> Result<Arc<dyn Machine>, EngineError> {
        let _ = (machine, template, snapshot);
        Err(EngineError::no_snapshots(self.info().name))
    }

    /// Whether a snapshot directory is whole and was made by this very emulator, machine type and kernel.
    ///
    /// # Errors
    /// [`EngineError::Mismatch`] names the difference; [`EngineError::Damaged`] the missing or broken file.
    async fn check_snapshot(
        &self,
        template: &std::path::Path,
        snapshot: &std::path::Path,
    ) -> Result<SnapshotReport, EngineError> {
        let _ = (template, snapshot);
        Err(EngineError::no_snapshots(self.info().name))
    }

    /// Ends what was started ahead of need and belongs to no machine. Machines run on.
    async fn close(&self) {}

    /// How many more machines of this shape the host's memory and disk hold, as far as can be told.
    ///
    /// # Errors
    /// [`EngineError::NoCapacity`] says what is short and by how much.
    fn check_capacity(&self, shape: &MachineShape) -> Result<(), EngineError>;

    /// Whether so many machines of this shape fit that start side by side from one snapshot and share its pages.
    /// `snapshot_bytes`: what the snapshot's memory holds beside its template's.
    ///
    /// # Errors
    /// As for [`Engine::check_capacity`].
    fn check_fork_capacity(&self, shape: &MachineShape, count: u32, snapshot_bytes: u64) -> Result<(), EngineError> {
        let _ = (count, snapshot_bytes);
        self.check_capacity(shape)
    }
}

/// One machine. Its owner alone calls `resume`, `pause` and `kill`.
#[async_trait]
pub trait Machine: Send + Sync + 'static {
    /// Its id.
    fn id(&self) -> &MachineId;

    /// Lets the processors run.
    ///
    /// # Errors
    /// The emulator is gone or does not answer.
    async fn resume(&self) -> Result<(), EngineError>;

    /// Halts the processors; memory stays.
    ///
    /// # Errors
    /// As for `resume`.
    async fn pause(&self) -> Result<(), EngineError>;

    /// Takes a snapshot into `directory`, which must not exist and appears whole, durable and verified,
    /// or not at all. A running machine is halted for as short as possible and runs on, its link
    /// session and all streams untouched; a paused one stays paused. Works without the agent's help
    /// unless `scope` is [`SnapshotScope::DiskOnly`], which has the agent write its file systems first.
    ///
    /// # Errors
    /// The machine is then as it was before.
    async fn snapshot(&self, directory: &std::path::Path, scope: SnapshotScope) -> Result<SnapshotReport, EngineError> {
        let _ = (directory, scope);
        Err(EngineError::no_snapshots("this"))
    }

    /// Takes a snapshot of memory and disk for machines that are started from it at once. It is whole, but nobody waited
    /// until the host's disk had it: after a power failure neither it nor they are there.
    ///
    /// # Errors
    /// As for [`Machine::snapshot`].
    async fn snapshot_for_forks(&self, directory: &std::path::Path) -> Result<SnapshotReport, EngineError> {
        self.snapshot(directory, SnapshotScope::MemoryAndDisk).await
    }

    /// A fresh connection to the machine's NIC, as QEMU's `-netdev stream` frames it; at most one is served at a time,
    /// and one that is dropped makes place for the next. While there is none the guest's packets lead nowhere.
    /// `None`: machines of this kind have no network.
    ///
    /// # Errors
    /// The emulator is gone or does not answer.
    async fn network(&self) -> Result<Option<tokio::net::UnixStream>, EngineError> {
        Ok(None)
    }

    /// A link session with the guest agent: the one there is, or a new one if there is none or the
    /// last one broke. Calls share one session.
    ///
    /// # Errors
    /// [`EngineError::GuestSilent`] when the agent does not answer in time.
    async fn guest(&self) -> Result<GuestClient, EngineError>;

    /// Ends the machine and removes all of it: processes, cgroup, sockets, disk. Repeatable.
    ///
    /// # Errors
    /// What could not be removed.
    async fn kill(&self) -> Result<(), EngineError>;

    /// Waits until the machine's process has ended, by whatever cause. Cancel-safe, many may wait.
    async fn exited(&self) -> MachineExit;

    /// What the kernel counts of the machine anyway. Cheap to read.
    ///
    /// # Errors
    /// The machine is gone.
    fn counters(&self) -> Result<MachineCounters, EngineError>;

    /// What the machine holds and has used, read now. The kernel looks at every page for it, which takes milliseconds:
    /// not for the path of a request that asks for something else.
    ///
    /// # Errors
    /// The machine is gone.
    fn usage(&self) -> Result<MachineUsage, EngineError>;

    /// The last lines of the guest's console, for error texts and logs.
    fn console_tail(&self) -> String;
}

/// What a snapshot keeps.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SnapshotScope {
    /// Memory, devices and disk, all of the same instant.
    MemoryAndDisk,
    /// The disk alone, its file systems written out first.
    DiskOnly,
}

/// What taking a snapshot cost and what it holds.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SnapshotReport {
    /// What it keeps.
    pub scope: SnapshotScope,
    /// How long the processors stood still.
    pub paused: Duration,
    /// Bytes of memory that differ from the template's.
    pub memory_bytes: u64,
    /// Bytes of disk layers, those shared with other snapshots included.
    pub disk_bytes: u64,
}

/// How a machine's process ended.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum MachineExit {
    /// [`Machine::kill`] ended it.
    Killed,
    /// The guest powered off, rebooted or panicked; the console's last lines.
    GuestEnded(String),
    /// The host's kernel killed it for lack of memory.
    OutOfMemory,
    /// The emulator ended otherwise: its exit status or signal as text.
    Crashed(String),
}

/// What is counted of one machine.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct MachineCounters {
    /// Processor time used so far, microseconds.
    pub cpu_micros: u64,
    /// Bytes of memory in pages that are no file's: what the guest has written and what the emulator holds for itself.
    pub anonymous_bytes: u64,
    /// Bytes its own disk layer takes on the host.
    pub disk_bytes: u64,
}

/// What one machine holds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MachineUsage {
    /// Bytes of memory nobody else shares.
    pub private_bytes: u64,
    /// Bytes of memory, shared pages divided among their holders.
    pub proportional_bytes: u64,
    /// Processor time used so far, microseconds.
    pub cpu_micros: u64,
    /// Bytes its own disk layer takes on the host.
    pub disk_bytes: u64,
}
