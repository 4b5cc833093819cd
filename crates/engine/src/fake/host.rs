use std::{
    collections::BTreeMap,
    io,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use stockade_guest::Agent;
use stockade_model::MachineId;
use tempfile::TempDir;
use tokio::sync::watch;

use super::script::{Hang, Moment, Script, Step};
use crate::{EngineError, MachineExit};

/// What outlives a server: machines and the script of faults. Cheap to clone.
#[derive(Clone)]
pub struct FakeHost(Arc<Inner>);

struct Inner {
    dir: TempDir,
    script: Script,
    full: AtomicBool,
    machines: Mutex<BTreeMap<MachineId, Arc<Process>>>,
    started: Mutex<Vec<MachineId>>,
}

/// A machine's process. Stays in the table after its end until somebody removes it, as a directory would.
pub(super) struct Process {
    pub(super) id: MachineId,
    pub(super) agent: Agent,
    pub(super) is_running: AtomicBool,
    pub(super) is_silent: Arc<AtomicBool>,
    pub(super) cpu_micros: AtomicU64,
    exit: watch::Sender<Option<MachineExit>>,
}

impl Process {
    pub(super) fn exit(&self) -> Option<MachineExit> {
        self.exit.borrow().clone()
    }

    pub(super) fn exits(&self) -> watch::Receiver<Option<MachineExit>> {
        self.exit.subscribe()
    }

    pub(super) fn end(&self, how: MachineExit) {
        self.agent.end();
        self.exit.send_if_modified(|exit| {
            let alive = exit.is_none();
            exit.get_or_insert(how);
            alive
        });
    }
}

impl FakeHost {
    /// A host without machines. Its guests' files are in a temporary directory; their commands run on this very
    /// host, with the rights of this process.
    ///
    /// # Errors
    /// The directory cannot be made.
    pub fn hosting() -> io::Result<Self> {
        let dir = TempDir::with_prefix("stockade-fake-")?;
        Ok(Self(Arc::new(Inner {
            dir,
            script: Script::default(),
            full: AtomicBool::new(false),
            machines: Mutex::default(),
            started: Mutex::default(),
        })))
    }

    /// Every machine that runs or has left something behind.
    pub fn machines(&self) -> Vec<MachineId> {
        self.lock().keys().cloned().collect()
    }

    /// Every machine that was ever started, in order.
    pub fn started(&self) -> Vec<MachineId> {
        self.0.started.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Where the guest files of a machine are.
    pub fn guest_dir(&self, machine: &MachineId) -> PathBuf {
        self.0.dir.path().join(machine.as_str())
    }

    /// Makes a step fail the next `times` times.
    pub fn fail(&self, step: Step, moment: Moment, times: usize) {
        self.0.script.fail(step, moment, times);
    }

    /// Makes a step hang the next time.
    pub fn hang(&self, step: Step, moment: Moment) -> Hang {
        self.0.script.hang(step, moment)
    }

    /// Forgets all faults that have not happened yet.
    pub fn clear_faults(&self) {
        self.0.script.clear();
    }

    /// Ends a machine's process, as a guest or the kernel would; its remains stay.
    pub fn end(&self, machine: &MachineId, how: MachineExit) {
        if let Some(process) = self.process(machine) {
            process.end(how);
        }
    }

    /// Lets a machine's guest answer nothing any more, as one that is overloaded for good.
    pub fn silence(&self, machine: &MachineId) {
        if let Some(process) = self.process(machine) {
            process.is_silent.store(true, Ordering::SeqCst);
        }
    }

    /// Lets a machine have used more processor time.
    pub fn use_cpu(&self, machine: &MachineId, micros: u64) {
        if let Some(process) = self.process(machine) {
            process.cpu_micros.fetch_add(micros, Ordering::SeqCst);
        }
    }

    /// Whether a machine's processors run.
    pub fn is_running(&self, machine: &MachineId) -> bool {
        self.process(machine).is_some_and(|process| process.is_running.load(Ordering::SeqCst))
    }

    /// Whether the host takes no more machines.
    pub fn set_full(&self, full: bool) {
        self.0.full.store(full, Ordering::SeqCst);
    }

    pub(super) fn script(&self) -> &Script {
        &self.0.script
    }

    pub(super) fn check_capacity(&self) -> Result<(), EngineError> {
        if self.0.full.load(Ordering::SeqCst) {
            let (needed, available) = ("512 MiB".to_owned(), "0 MiB".to_owned());
            return Err(EngineError::NoCapacity { resource: "memory", needed, available });
        }
        Ok(())
    }

    pub(super) fn spawn(&self, machine: &MachineId) -> Result<Arc<Process>, EngineError> {
        let dir = self.guest_dir(machine);
        std::fs::create_dir(&dir).map_err(EngineError::host(format!("make {}", dir.display())))?;
        let process = Arc::new(Process {
            id: machine.clone(),
            agent: Agent::hosted(dir),
            is_running: AtomicBool::new(false),
            is_silent: Arc::default(),
            cpu_micros: AtomicU64::new(0),
            exit: watch::Sender::new(None),
        });
        self.lock().insert(machine.clone(), Arc::clone(&process));
        self.0.started.lock().unwrap_or_else(PoisonError::into_inner).push(machine.clone());
        Ok(process)
    }

    pub(super) fn process(&self, machine: &MachineId) -> Option<Arc<Process>> {
        self.lock().get(machine).cloned()
    }

    pub(super) fn remove(&self, machine: &MachineId) {
        if let Some(process) = self.lock().remove(machine) {
            process.end(MachineExit::Killed);
        }
        // Gone already, or the temporary directory goes with the host.
        std::fs::remove_dir_all(self.guest_dir(machine)).ok();
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<MachineId, Arc<Process>>> {
        self.0.machines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
