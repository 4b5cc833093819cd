//! Makes a machine from a template, and finds one again that another process made.

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
    Host, command_line,
    command_line::Origin,
    config::joined,
    jail::Mount,
    launch::{Launch, Launched, SHOWN_LINES, millis, with_complaints},
    machine::QemuMachine,
    machine_dir::{CONSOLE, CONTROL, MachineDir, Record},
    manifest::{DEVICE_STATE, MACHINE_LAYER, MEMORY, Manifest},
    memory::SealedMemory,
    qmp::Qmp,
    remains::{Remains, Undo},
    tail::Tail,
    template::{migrate, set_capabilities},
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
        .filter_map(|record| Some((record.processes?.emulator, record.memory_fd)))
        .filter(|(emulator, _)| emulator.is_alive())
        .map(|(emulator, fd)| (emulator.pid, fd))
        .collect()
}

/// Restores a machine; it is paused.
pub(crate) async fn start(
    host: &Arc<Host>,
    memories: &Memories,
    machine: &MachineId,
    template: &Path,
) -> Result<QemuMachine, EngineError> {
    let template = std::fs::canonicalize(template).map_err(|error| EngineError::Damaged {
        path: template.to_owned(),
        reason: format!("it cannot be found: {error}"),
    })?;
    let manifest = Manifest::check(&template, &host.needs)?;
    usage::check_capacity(&manifest.shape, &host.limits, &host.machines_dir)?;
    let memory = memories.get(host, &template, &manifest).await?;

    let directory = MachineDir::of(&host.machines_dir, machine);
    let record = Record {
        machine: machine.clone(),
        boot_id: host.boot_id.clone(),
        template: template.clone(),
        unfinished_template: None,
        cgroup: host.cgroups.name(machine.as_str()),
        processes: None,
        memory_fd: memory.file().as_raw_fd(),
        is_complete: false,
    };
    directory.create().map_err(EngineError::host(format!("make the directory of {machine}")))?;
    let mut undo = Undo::new(Remains::of_record(directory.clone(), &record, &host.boot_id), host.name_of(machine));
    let mut restore = Restore { host, manifest: &manifest, template: &template, directory: &directory, record };
    match restore.run(&memory, &mut undo).await {
        Ok(launched) => {
            undo.disarm();
            Ok(QemuMachine::new(host.clone(), restore.record, directory, launched, Some(memory)))
        }
        Err(error) => {
            undo.run().await;
            Err(error)
        }
    }
}

struct Restore<'a> {
    host: &'a Arc<Host>,
    manifest: &'a Manifest,
    template: &'a Path,
    directory: &'a MachineDir,
    record: Record,
}

impl Restore<'_> {
    async fn run(&mut self, memory: &SealedMemory, undo: &mut Undo) -> Result<Launched, EngineError> {
        let host = self.host;
        let begin = Instant::now();
        self.write_record()?;
        self.directory
            .add_disk(&self.template.join(MACHINE_LAYER))
            .map_err(EngineError::host("make the machine's disk"))?;
        let limits = host.limits.of_group(&self.manifest.shape);
        self.record.cgroup = host
            .cgroups
            .create(self.record.machine.as_str(), &limits)
            .map_err(EngineError::host("make the machine's control group"))?;
        let state = self.template.join(DEVICE_STATE);
        let state = File::open(&state).map_err(EngineError::host(format!("open {}", state.display())))?;
        let prepared = begin.elapsed();

        let launched = self.launch(memory, &state, undo).await?;
        let answered = begin.elapsed();
        let loaded = self.load(&launched.qmp, &state).await;
        loaded.map_err(|error| explain(error, &launched))?;
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

    fn write_record(&self) -> Result<(), EngineError> {
        self.directory.write_record(&self.record).map_err(EngineError::host("write the machine's record"))
    }

    async fn launch(&mut self, memory: &SealedMemory, state: &File, undo: &mut Undo) -> Result<Launched, EngineError> {
        let host = self.host;
        let mount =
            |source: PathBuf, target: &str, is_writable| Mount { source, target: target.to_owned(), is_writable };
        let cgroup = self.record.cgroup.clone();
        let launch = Launch {
            name: &host.name_of(&self.record.machine),
            directory: self.directory,
            shape: self.manifest.shape,
            accelerator: host.accelerator,
            origin: Origin::Snapshot,
            disk: command_line::MACHINE_DISK,
            mounts: vec![
                mount(self.template.to_owned(), command_line::TEMPLATE_DIR, false),
                mount(self.directory.disk_dir(), "/machine", true),
            ],
            memory: memory.file(),
            device_state: Some(state),
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

    async fn load(&self, qmp: &Qmp, state: &File) -> Result<(), EngineError> {
        let limits = &self.host.limits;
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
    let Ok(Some(record)) = read else {
        // No record or one that cannot be read: nothing that could be controlled.
        let keep = super::remains::find(host, &std::collections::BTreeSet::new())?;
        if let Some(remains) = keep.get(machine) {
            remains.remove().await?;
        }
        return Ok(None);
    };
    let remains = Remains::of_record(directory.clone(), &record, &host.boot_id);
    let alive = record
        .processes
        .filter(|processes| record.is_complete && record.boot_id == host.boot_id && processes.emulator.is_alive());
    let Some(processes) = alive else {
        remains.remove().await?;
        return Ok(None);
    };
    let open = async {
        let stream = directory.connect(CONTROL).map_err(EngineError::host("connect to the emulator"))?;
        let qmp = Qmp::open(stream, host.limits.command_patience).await?;
        qmp.run("query-status", json!({}), host.limits.command_patience).await?;
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
    let machine =
        QemuMachine::with_parts(host.clone(), record, directory, processes, qmp, console, complaints, None, None);
    Ok(Some(machine))
}
