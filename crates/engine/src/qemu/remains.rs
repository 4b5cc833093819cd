//! Ends a machine and removes what is left of it, whatever state it was left in.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::PathBuf,
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
    pub(crate) cgroup: Cgroup,
    pub(crate) processes: Vec<ProcessId>,
    pub(crate) unfinished_template: Option<PathBuf>,
}

impl Remains {
    /// What a record names; processes of another boot of the host are long gone.
    pub(crate) fn of_record(directory: MachineDir, record: &Record, boot_id: &str) -> Self {
        let processes = match &record.processes {
            Some(processes) if record.boot_id == boot_id => vec![processes.emulator, processes.bubblewrap],
            _ => Vec::new(),
        };
        let unfinished_template = record.unfinished_template.clone();
        Self { directory, cgroup: record.cgroup.clone(), processes, unfinished_template }
    }

    /// Ends and removes all of it. Repeatable. The directory goes last: it is what a sweep finds the rest by.
    pub(crate) async fn remove(&self) -> Result<(), EngineError> {
        let ended = async {
            for process in &self.processes {
                process.kill()?;
            }
            self.cgroup.destroy(END_PATIENCE).await?;
            for process in &self.processes {
                if let Some(descriptor) = process.open()? {
                    tokio::time::timeout(END_PATIENCE, descriptor.wait()).await??;
                }
            }
            Ok::<(), io::Error>(())
        };
        ended.await.map_err(EngineError::host("end the machine's processes"))?;
        if let Some(path) = &self.unfinished_template {
            remove_tree(path).map_err(EngineError::host(format!("remove {}", path.display())))?;
        }
        self.directory.remove().map_err(EngineError::host(format!("remove {:?}", self.directory)))
    }
}

/// Removes a half-started machine unless told that it is whole; also when the start is cancelled.
#[derive(Debug)]
pub(crate) struct Undo(Option<Remains>);

impl Undo {
    pub(crate) fn new(remains: Remains) -> Self {
        Self(Some(remains))
    }

    /// Names more that has to be removed.
    pub(crate) fn update(&mut self, change: impl FnOnce(&mut Remains)) {
        if let Some(remains) = &mut self.0 {
            change(remains);
        }
    }

    /// The machine is whole.
    pub(crate) fn disarm(mut self) {
        self.0.take();
    }

    /// Removes it now.
    pub(crate) async fn run(mut self) {
        if let Some(remains) = &self.0
            && let Err(error) = remains.remove().await
        {
            tracing::warn!(%error, "a failed start left something behind; the next sweep removes it");
        }
        self.0.take();
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        let Some(remains) = self.0.take() else { return };
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(Undo(Some(remains)).run());
        }
    }
}

/// Everything of this data directory that is not in `keep`: by directory, by control group, and by the
/// name an emulator was started with.
pub(crate) fn find(host: &Host, keep: &BTreeSet<MachineId>) -> Result<BTreeMap<MachineId, Remains>, EngineError> {
    let mut found = BTreeMap::new();
    let unknown = |id: &MachineId| Remains {
        directory: MachineDir::of(&host.machines_dir, id),
        cgroup: host.cgroups.name(id.as_str()),
        processes: Vec::new(),
        unfinished_template: None,
    };
    let is_wanted = |name: &str| name.parse::<MachineId>().ok().filter(|id| !keep.contains(id));

    let directory = &host.machines_dir;
    let entries = fs::read_dir(directory).map_err(EngineError::host(format!("list {}", directory.display())))?;
    for entry in entries.flatten() {
        let Some(id) = is_wanted(&entry.file_name().to_string_lossy()) else { continue };
        let machine_dir = MachineDir::of(&host.machines_dir, &id);
        let remains = match machine_dir.read_record() {
            Ok(Some(record)) => Remains::of_record(machine_dir, &record, &host.boot_id),
            // A record that cannot be read: its group and its emulator's name remain to find it by.
            Ok(None) | Err(_) => unknown(&id),
        };
        found.insert(id, remains);
    }
    for (name, group) in host.cgroups.leftovers() {
        let Some(id) = is_wanted(&name) else { continue };
        found.entry(id.clone()).or_insert_with(|| unknown(&id)).cgroup = group;
    }
    let processes = processes_with_arguments().map_err(EngineError::host("list processes"))?;
    for (pid, arguments) in processes {
        let name = arguments.iter().find_map(|word| word.strip_prefix("guest=")?.strip_prefix(host.prefix.as_str()));
        let Some(id) = name.and_then(is_wanted) else { continue };
        if !is_of_ours(pid) {
            continue;
        }
        if let Ok(process) = ProcessId::of(pid) {
            found.entry(id.clone()).or_insert_with(|| unknown(&id)).processes.push(process);
        }
    }
    Ok(found)
}

/// Anybody can start a process with any arguments; only the emulator's user and ours count.
fn is_of_ours(pid: i32) -> bool {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(format!("/proc/{pid}"))
        .is_ok_and(|metadata| metadata.uid() == NOBODY || metadata.uid() == nix::unistd::geteuid().as_raw())
}
