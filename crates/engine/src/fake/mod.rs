//! An engine for tests: machines are guest agents in this very process, without any wall.
//!
//! ```text
//! FakeHost (outlives the server)        FakeEngine (one per server)
//!   machines: id -> process    <------    start, adopt, sweep
//!   script: what fails or hangs           FakeMachine: link session of this server
//! ```
//!
//! A [`FakeHost`] stands for what a crash of the server leaves behind: give it to the next
//! [`FakeEngine`] and the machines are found again. Faults are scripted per step, before or after its
//! effect, so that a test can stop a verb at each of its points.
//!
//! A snapshot is a marker and a copy of the guest's files. Processes are not in it: a machine started from one
//! has the files and nothing that ran. Within one machine, halted and resumed, they do live on.

mod host;
mod link;
mod machine;
mod script;
mod snapshot;

pub use host::FakeHost;
pub use script::{Hang, Moment, Step};

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering},
};

use async_trait::async_trait;
use stockade_model::{Accelerator, IsolationClass, MachineId, MachineShape};

use crate::{Engine, EngineError, EngineInfo, Machine, Progress, SnapshotReport, SnapshotScope, TemplateBoot, Urgency};
use machine::FakeMachine;

const MARKER: &str = "fake-template";

/// The engine of one server.
pub struct FakeEngine {
    host: FakeHost,
}

impl FakeEngine {
    /// An engine on a host that may have machines of an earlier server.
    pub fn new(host: FakeHost) -> Self {
        Self { host }
    }
}

#[async_trait]
impl Engine for FakeEngine {
    fn info(&self) -> EngineInfo {
        EngineInfo {
            name: "fake",
            accelerator: Accelerator::None,
            isolation: IsolationClass::None,
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    async fn check_template(&self, directory: &Path) -> Result<(), EngineError> {
        let marker = directory.join(MARKER);
        match tokio::fs::try_exists(&marker).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(EngineError::Damaged { path: marker, reason: "it is missing".to_owned() }),
            Err(source) => Err(EngineError::host(format!("read {}", marker.display()))(source)),
        }
    }

    async fn boot_template(&self, boot: &TemplateBoot, progress: Progress<'_>) -> Result<(), EngineError> {
        progress("booting");
        self.host.script().pass(Step::Boot, Moment::Before).await?;
        let action = || format!("make {}", boot.directory.display());
        tokio::fs::create_dir(&boot.directory).await.map_err(EngineError::host(action()))?;
        tokio::fs::write(boot.directory.join(MARKER), "").await.map_err(EngineError::host(action()))
    }

    async fn start(
        &self,
        machine: &MachineId,
        template: &Path,
        _urgency: Urgency,
    ) -> Result<Arc<dyn Machine>, EngineError> {
        self.check_template(template).await?;
        self.host.script().pass(Step::Start, Moment::Before).await?;
        let process = self.host.spawn(machine)?;
        if let Err(error) = self.host.script().pass(Step::Start, Moment::After).await {
            self.host.remove(machine);
            return Err(error);
        }
        Ok(Arc::new(FakeMachine::new(self.host.clone(), process)))
    }

    async fn adopt(&self, machine: &MachineId) -> Result<Option<Arc<dyn Machine>>, EngineError> {
        self.host.script().pass(Step::Adopt, Moment::Before).await?;
        let Some(process) = self.host.process(machine) else { return Ok(None) };
        if process.exit().is_some() {
            self.host.remove(machine);
            return Ok(None);
        }
        Ok(Some(Arc::new(FakeMachine::new(self.host.clone(), process))))
    }

    async fn sweep(&self, keep: &BTreeSet<MachineId>) -> Result<Vec<MachineId>, EngineError> {
        let stray: Vec<MachineId> = self.host.machines().into_iter().filter(|id| !keep.contains(id)).collect();
        for id in &stray {
            self.host.remove(id);
        }
        Ok(stray)
    }

    async fn start_from_snapshot(
        &self,
        machine: &MachineId,
        template: &Path,
        snapshot: &Path,
        _urgency: Urgency,
    ) -> Result<Arc<dyn Machine>, EngineError> {
        let report = self.check_snapshot(template, snapshot).await?;
        self.host.script().pass(Step::Restore, Moment::Before).await?;
        let process = self.host.spawn(machine)?;
        let started = async {
            snapshot::copy_home(snapshot, &self.host.guest_dir(machine)).await?;
            if report.scope == SnapshotScope::DiskOnly {
                process.is_running.store(true, Ordering::SeqCst);
            }
            self.host.script().pass(Step::Restore, Moment::After).await
        };
        if let Err(error) = started.await {
            self.host.remove(machine);
            return Err(error);
        }
        Ok(Arc::new(FakeMachine::new(self.host.clone(), process)))
    }

    async fn boot_from_snapshot(
        &self,
        machine: &MachineId,
        template: &Path,
        snapshot: &Path,
    ) -> Result<Arc<dyn Machine>, EngineError> {
        let machine = self.start_from_snapshot(machine, template, snapshot, Urgency::Awaited).await?;
        if let Some(process) = self.host.process(machine.id()) {
            process.is_running.store(true, Ordering::SeqCst);
        }
        Ok(machine)
    }

    async fn check_snapshot(&self, template: &Path, snapshot: &Path) -> Result<SnapshotReport, EngineError> {
        self.check_template(template).await?;
        snapshot::check(snapshot)
    }

    fn check_capacity(&self, _shape: &MachineShape) -> Result<(), EngineError> {
        self.host.check_capacity()
    }
}

/// Makes a template directory that this engine accepts, without booting anything.
///
/// # Errors
/// The directory cannot be written.
pub fn make_template(directory: PathBuf) -> std::io::Result<PathBuf> {
    std::fs::create_dir_all(&directory)?;
    std::fs::write(directory.join(MARKER), "")?;
    Ok(directory)
}
