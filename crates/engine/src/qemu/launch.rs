//! Starts an emulator in its jail and opens its control channel.
//!
//! The sockets are bound here and listened to by the emulator: connecting needs no wait, and the
//! emulator never sees the directory they are in.

use std::{
    fs::File,
    os::fd::{AsRawFd, OwnedFd},
    process::Stdio,
    time::{Duration, Instant},
};

use nix::fcntl::OFlag;
use serde::Deserialize;
use stockade_model::{Accelerator, MachineShape};
use tokio::{
    io::AsyncReadExt,
    net::{UnixStream, unix::pipe},
    process::Child,
};

use super::{
    Host,
    command_line::{self, MachineArguments, Origin, RootDisk},
    config::joined,
    jail::{Jail, Mount, ProcessLimits},
    machine_dir::{CONSOLE, CONTROL, LINK, MachineDir, NETWORK, Processes, Record},
    network,
    process::ProcessId,
    qmp::Qmp,
    remains::Undo,
    tail::Tail,
};
use crate::EngineError;

/// How much of the console and of the emulator's complaints is kept.
const CONSOLE_BYTES: usize = 64 << 10;
const COMPLAINT_BYTES: usize = 4 << 10;
/// Lines of them that an error shows; a kernel's panic takes about fifty.
pub(crate) const SHOWN_LINES: usize = 60;
/// The emulator's own address space besides guest memory: code, translator, stacks, allocator arenas.
const ADDRESS_SPACE_MARGIN: u64 = 6 << 30;
/// Headers and tables of a disk layer besides its data.
const DISK_MARGIN: u64 = 256 << 20;
const OPEN_FILES: u64 = 256;

/// What to start.
#[derive(Debug)]
pub(crate) struct Launch<'a> {
    pub(crate) directory: &'a MachineDir,
    pub(crate) shape: MachineShape,
    pub(crate) accelerator: Accelerator,
    pub(crate) origin: Origin<'a>,
    /// The root disk, as seen in the jail.
    pub(crate) disk: &'a RootDisk,
    pub(crate) mounts: Vec<Mount>,
    /// Guest memory.
    pub(crate) memory: &'a File,
    /// How long the emulator may take until it answers.
    pub(crate) patience: Duration,
}

/// An emulator that answers.
#[derive(Debug)]
pub(crate) struct Launched {
    /// bubblewrap.
    pub(crate) child: Child,
    pub(crate) processes: Processes,
    pub(crate) qmp: Qmp,
    pub(crate) console: Tail,
    pub(crate) complaints: Tail,
    /// A connection to the guest's link that nobody has used.
    pub(crate) link: Option<UnixStream>,
}

impl Launch<'_> {
    /// Starts it in the record's control group, under the name that goes with it. Its processes are in the record, and
    /// among what is to be undone, before they do anything: on failure nothing of it runs once that has been.
    pub(crate) async fn run(&self, host: &Host, record: &mut Record, undo: &mut Undo) -> Result<Launched, EngineError> {
        let begin = Instant::now();
        let name = host.name_of(record.emulator());
        let bind = |name| self.directory.bind(name).map_err(EngineError::host(format!("bind {name}")));
        let (control, link, console, network) = (bind(CONTROL)?, bind(LINK)?, bind(CONSOLE)?, bind(NETWORK)?);
        let (info_read, info_write) =
            nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(|error| host_error("make a pipe", error))?;
        let arguments = command_line::arguments(&MachineArguments {
            name: &name,
            shape: self.shape,
            accelerator: self.accelerator,
            disk: self.disk,
            firmware: command_line::FIRMWARE_DIR,
            memory: self.memory.as_raw_fd(),
            control: control.as_raw_fd(),
            link: link.as_raw_fd(),
            console: console.as_raw_fd(),
            network: network.as_raw_fd(),
            origin: self.origin,
            seccomp: true,
        });
        let jail = Jail {
            bubblewrap: &host.bubblewrap,
            root: &host.root.path,
            mounts: self.mounts.clone(),
            with_kvm: self.accelerator == Accelerator::Kvm,
            info: info_write.as_raw_fd(),
            inherited: [&control, &link, &console, &network]
                .map(AsRawFd::as_raw_fd)
                .into_iter()
                .chain([self.memory.as_raw_fd()])
                .collect(),
            limits: ProcessLimits {
                address_space_bytes: (self.shape.memory_mib << 20) + ADDRESS_SPACE_MARGIN,
                // The memory file is written to while a template boots.
                file_bytes: (self.shape.disk_mib.max(self.shape.memory_mib) << 20) + DISK_MARGIN,
                open_files: OPEN_FILES,
            },
        };
        let mut command =
            jail.command(&host.root.program, &arguments).map_err(EngineError::host("prepare the jail"))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command
            .spawn()
            .map_err(EngineError::host(format!("start {} for the emulator", host.bubblewrap.display())))?;
        drop(info_write);
        let complaints = match child.stderr.take() {
            Some(stderr) => Tail::follow(stderr, COMPLAINT_BYTES),
            None => Tail::empty(),
        };
        let spawned = begin.elapsed();

        let attempt = async {
            let bubblewrap = child_id(&child)?;
            let console_stream =
                self.directory.connect(CONSOLE).map_err(EngineError::host("connect to the console"))?;
            let console_tail = Tail::follow(console_stream, CONSOLE_BYTES);
            let stream = self.directory.connect(CONTROL).map_err(EngineError::host("connect to the emulator"))?;
            // The last copies outside the emulator: when it ends, connections to them break.
            drop((control, link, console));
            let emulator = read_emulator_id(info_read, self.patience).await?;
            let processes = Processes { bubblewrap, emulator };
            undo.update(|remains| remains.processes = vec![processes.emulator, processes.bubblewrap]);
            record.processes = Some(processes);
            self.directory.write_record(record).map_err(EngineError::host("write the machine's record"))?;
            let jailed = begin.elapsed();
            // While the emulator gets ready: joining a group can take as long as that. No guest runs yet.
            let (group, pids) = (record.cgroup.clone(), [bubblewrap.pid, emulator.pid]);
            let join = tokio::task::spawn_blocking(move || group.join(&pids));
            let qmp = Qmp::open(stream, self.patience).await?;
            network::listening(&network, self.patience).await?;
            drop(network);
            let answered = begin.elapsed();
            joined(join.await).map_err(EngineError::host("put the emulator into its control group"))?;
            tracing::debug!(
                name,
                spawn_ms = millis(spawned),
                jail_ms = millis(jailed - spawned),
                emulator_ms = millis(answered - jailed),
                group_ms = millis(begin.elapsed() - answered),
                "emulator started"
            );
            Ok((processes, qmp, console_tail))
        };
        match attempt.await {
            Ok((processes, qmp, console)) => Ok(Launched { child, processes, qmp, console, complaints, link: None }),
            Err(error) => {
                let _ = child.start_kill();
                complaints.finish(Duration::from_secs(1)).await;
                Err(with_complaints(error, &complaints))
            }
        }
    }
}

/// Milliseconds with fractions, for the log.
pub(crate) fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// Adds what the emulator or the jail said to an error about it.
pub(crate) fn with_complaints(error: EngineError, complaints: &Tail) -> EngineError {
    let said = complaints.last_lines(SHOWN_LINES);
    match error {
        EngineError::Emulator { step, detail } if !said.is_empty() => {
            EngineError::Emulator { step, detail: format!("{detail}; it said: {said}") }
        }
        error => error,
    }
}

fn child_id(child: &Child) -> Result<ProcessId, EngineError> {
    let gone = || EngineError::Emulator { step: "start", detail: "it ended at once".to_owned() };
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).ok_or_else(gone)?;
    ProcessId::of(pid).map_err(|_| gone())
}

/// bubblewrap reports the id, as the host sees it, of the process that becomes the emulator.
async fn read_emulator_id(pipe: OwnedFd, patience: Duration) -> Result<ProcessId, EngineError> {
    #[derive(Deserialize)]
    struct Info {
        #[serde(rename = "child-pid")]
        child_pid: i32,
    }
    let failed = |detail: String| EngineError::Emulator { step: "jail", detail };
    let receiver = pipe::Receiver::from_owned_fd(pipe).map_err(EngineError::host("read what bubblewrap reports"))?;
    let mut text = String::new();
    let mut limited = receiver.take(4096);
    match tokio::time::timeout(patience, limited.read_to_string(&mut text)).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => return Err(failed(error.to_string())),
        Err(_) => return Err(failed(format!("bubblewrap made no jail within {patience:?}"))),
    }
    let info: Info =
        serde_json::from_str(&text).map_err(|_| failed("bubblewrap could not make the jail".to_owned()))?;
    ProcessId::of(info.child_pid).map_err(|_| failed("the emulator ended at once".to_owned()))
}

fn host_error(action: &str, error: nix::errno::Errno) -> EngineError {
    EngineError::host(action)(error.into())
}
