//! Ends a machine and removes what is left of it, whatever state it was left in.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::PathBuf,
    sync::{Arc, PoisonError},
    time::Duration,
};

use stockade_model::MachineId;

use super::{
    Host,
    cgroup::Cgroup,
    jail::NOBODY,
    machine_dir::{MachineDir, Record, remove_tree},
    process::{ProcessId, processes_with_arguments},
};
use crate::EngineError;

/// How long the kernel may take to end killed processes.
const END_PATIENCE: Duration = Duration::from_secs(20);

/// What has to be removed for one machine to be gone.
#[derive(Clone, Debug)]
pub(crate) struct Remains {
    pub(crate) directory: MachineDir,
    /// The name its processes carry.
    pub(crate) name: String,
    pub(crate) cgroup: Cgroup,
    pub(crate) processes: Vec<ProcessId>,
    pub(crate) unfinished_template: Option<PathBuf>,
}

impl Remains {
    /// What a record names; processes of another boot of the host are long gone.
    pub(crate) fn of_record(host: &Host, directory: MachineDir, record: &Record) -> Self {
        let processes = match &record.processes {
            Some(processes) if record.boot_id == host.boot_id => vec![processes.emulator, processes.bubblewrap],
            _ => Vec::new(),
        };
        let unfinished_template = record.unfinished_template.clone();
        let (name, cgroup) = (host.name_of(record.emulator()), record.cgroup.clone());
        Self { directory, name, cgroup, processes, unfinished_template }
    }

    /// Ends and removes all of it. Repeatable. The directory goes last: it is what a sweep finds the rest by.
    pub(crate) async fn remove(&self) -> Result<(), EngineError> {
        self.end_processes().await.map_err(EngineError::host("end the machine's processes"))?;
        if let Some(path) = &self.unfinished_template {
            remove_tree(path).map_err(EngineError::host(format!("remove {}", path.display())))?;
        }
        self.directory.remove().map_err(EngineError::host(format!("remove {:?}", self.directory)))
    }

    /// As `remove`, and what its processes may still be making: its jail's process makes the emulator's.
    /// For a machine that nobody saw start whole. Reads the arguments of all processes of the host.
    pub(crate) async fn remove_half_started(&mut self) -> Result<(), EngineError> {
        loop {
            let processes = named_processes(&self.name).map_err(EngineError::host("list processes"))?;
            if processes.is_empty() {
                return self.remove().await;
            }
            self.processes.extend(processes.into_iter().map(|(_, process)| process));
            self.end_processes().await.map_err(EngineError::host("end the machine's processes"))?;
        }
    }

    async fn end_processes(&self) -> io::Result<()> {
        let mut ending = Vec::new();
        for process in &self.processes {
            if let Some(descriptor) = process.open()? {
                descriptor.kill()?;
                ending.push(descriptor);
            }
        }
        self.cgroup.kill();
        for descriptor in ending {
            tokio::time::timeout(END_PATIENCE, descriptor.wait()).await??;
        }
        self.cgroup.destroy(END_PATIENCE).await
    }
}

/// Removes a half-started machine unless told that it is whole; also when the start is cancelled.
#[derive(Debug)]
pub(crate) struct Undo {
    remains: Option<Remains>,
}

impl Undo {
    pub(crate) fn new(remains: Remains) -> Self {
        Self { remains: Some(remains) }
    }

    /// Names more that has to be removed.
    pub(crate) fn update(&mut self, change: impl FnOnce(&mut Remains)) {
        if let Some(remains) = &mut self.remains {
            change(remains);
        }
    }

    /// The machine is whole.
    pub(crate) fn disarm(mut self) {
        self.remains.take();
    }

    /// Removes it now.
    pub(crate) async fn run(mut self) {
        if let Some(remains) = &mut self.remains
            && let Err(error) = remains.remove_half_started().await
        {
            tracing::warn!(%error, "a failed start left something behind; the next sweep removes it");
        }
        self.remains.take();
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        let Some(remains) = self.remains.take() else { return };
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(Self::new(remains).run());
        }
    }
}

/// Keeps a sweep from taking for a leftover what no record outside the engine names.
#[derive(Debug)]
pub(crate) struct Own {
    host: Arc<Host>,
    machine: MachineId,
}

impl Own {
    pub(crate) fn new(host: &Arc<Host>, machine: &MachineId) -> Self {
        host.own.lock().unwrap_or_else(PoisonError::into_inner).insert(machine.clone());
        Self { host: Arc::clone(host), machine: machine.clone() }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.host.own.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.machine);
    }
}

/// Processes of ours whose machine's name begins with `prefix`, by the rest of the name.
fn named_processes(prefix: &str) -> io::Result<Vec<(String, ProcessId)>> {
    let mut found = Vec::new();
    for (pid, arguments) in processes_with_arguments()? {
        let name = arguments.iter().find_map(|word| word.strip_prefix("guest=")?.strip_prefix(prefix));
        if let (Some(name), true) = (name, is_of_ours(pid))
            && let Ok(process) = ProcessId::of(pid)
        {
            found.push((name.to_owned(), process));
        }
    }
    Ok(found)
}

/// Everything of this data directory that is not in `keep`: by directory, by control group, and by the
/// name an emulator was started with.
pub(crate) fn find(host: &Host, keep: &BTreeSet<MachineId>) -> Result<BTreeMap<MachineId, Remains>, EngineError> {
    let mut found = BTreeMap::new();
    let unknown = |id: &MachineId| Remains {
        directory: MachineDir::of(&host.machines_dir, id),
        name: host.name_of(id),
        cgroup: host.cgroups.name(id.as_str()),
        processes: Vec::new(),
        unfinished_template: None,
    };
    let own = host.own.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let is_kept = |id: &MachineId| keep.contains(id) || own.contains(id);

    // Machines whose groups and processes carry another one's name, by that name.
    let mut carriers = BTreeMap::new();
    let directory = &host.machines_dir;
    let entries = fs::read_dir(directory).map_err(EngineError::host(format!("list {}", directory.display())))?;
    for entry in entries.flatten() {
        let Ok(id) = entry.file_name().to_string_lossy().parse::<MachineId>() else { continue };
        let machine_dir = MachineDir::of(&host.machines_dir, &id);
        let remains = match machine_dir.read_record() {
            Ok(Some(record)) => {
                carriers.insert(record.emulator().clone(), id.clone());
                Remains::of_record(host, machine_dir, &record)
            }
            // A record that cannot be read: its group and its emulator's name remain to find it by.
            Ok(None) | Err(_) => unknown(&id),
        };
        if !is_kept(&id) {
            found.insert(id, remains);
        }
    }
    let is_wanted = |name: &str| {
        let name = name.parse::<MachineId>().ok()?;
        Some(carriers.get(&name).unwrap_or(&name)).filter(|id| !is_kept(id)).cloned()
    };
    for (name, group) in host.cgroups.leftovers() {
        let Some(id) = is_wanted(&name) else { continue };
        found.entry(id.clone()).or_insert_with(|| unknown(&id)).cgroup = group;
    }
    let processes = named_processes(&host.prefix).map_err(EngineError::host("list processes"))?;
    for (name, process) in processes {
        let Some(id) = is_wanted(&name) else { continue };
        found.entry(id.clone()).or_insert_with(|| unknown(&id)).processes.push(process);
    }
    Ok(found)
}

/// Anybody can start a process with any arguments; only the emulator's user and ours count.
fn is_of_ours(pid: i32) -> bool {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(format!("/proc/{pid}"))
        .is_ok_and(|metadata| metadata.uid() == NOBODY || metadata.uid() == nix::unistd::geteuid().as_raw())
}
