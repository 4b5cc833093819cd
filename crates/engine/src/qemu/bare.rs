//! The bare side of the benchmark: the same emulator on the same template, nothing of ours around it.

use std::{
    fs::{self, File},
    os::{
        fd::AsRawFd,
        unix::{fs::PermissionsExt, net::UnixListener},
    },
    path::Path,
    process::Stdio,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::StreamExt as _;
use serde_json::{Value, json};
use stockade_wire::{
    event::Event,
    process::{Command as GuestCommand, StartRequest},
};
use tempfile::TempDir;
use tokio::{
    net::UnixStream,
    process::{Child, Command},
};

use super::{
    Host, Limits, agent, command_line,
    command_line::{Layer, MachineArguments, Origin, RootDisk, TEMPLATE_NODE},
    manifest::{DEVICE_STATE, DISK, MACHINE_LAYER, Manifest, ROOT},
    memories::Memories,
    network,
    qmp::Qmp,
    template::{migrate, set_capabilities},
};
use crate::{EngineError, GuestClient};

/// What the emulator takes for itself.
#[derive(Clone, Copy, Debug)]
pub struct BareTimes {
    /// From the start of its process to the agent's first answer.
    pub restore: Duration,
    /// From `stop` to `cont`, with the devices' state written in between: the least a snapshot can take of its
    /// source's time, without a page or a block of it.
    pub snapshot_pause: Duration,
    /// From `cont` to the agent's answer.
    pub wake: Duration,
}

/// A machine that was restored by the emulator alone. It ends when it is dropped.
#[derive(Debug)]
pub struct BareMachine {
    child: Child,
    control: Qmp,
    agent: UnixStream,
    limits: Limits,
    begun: Instant,
    restore: Duration,
    directory: TempDir,
    /// Held open: the emulator was given it.
    _link: UnixListener,
}

impl BareMachine {
    /// The emulator's process; `None`: it has ended.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// What it took, and what two halts of it take.
    pub(crate) async fn times(&mut self) -> Result<BareTimes, EngineError> {
        let begin = Instant::now();
        self.run("stop", json!({})).await?;
        let devices = self.directory.path().join("devices").display().to_string();
        self.run("xen-save-devices-state", json!({ "filename": devices, "live": false })).await?;
        self.run("cont", json!({})).await?;
        let snapshot_pause = begin.elapsed();

        self.run("stop", json!({})).await?;
        let begin = Instant::now();
        self.run("cont", json!({})).await?;
        agent::hello(&mut self.agent, self.limits.guest_patience).await?;
        Ok(BareTimes { restore: self.restore, snapshot_pause, wake: begin.elapsed() })
    }

    /// Runs a first command through the agent and ends. From the start of the emulator's process to the command's
    /// first output: what a restored machine needs until it is of use, with nothing of ours but the agent.
    pub(crate) async fn first_output(self) -> Result<Duration, EngineError> {
        let Self { mut child, agent, limits, begun, directory, _link, .. } = self;
        let guest = GuestClient::open(agent, limits.guest_patience).await?;
        let echo = ["/bin/echo", "ready"].map(str::to_owned);
        let request = StartRequest::new(GuestCommand::Argv(echo.into()));
        let mut events = guest.start(&request).await?.events;
        let mut first = None;
        while let Some(event) = events.next().await {
            if matches!(event?, Event::Stdout(_)) {
                first = Some(begun.elapsed());
                break;
            }
        }
        child.kill().await.map_err(EngineError::host("end the emulator"))?;
        drop((directory, _link));
        let silent = || EngineError::GuestSilent { waited: begun.elapsed(), console: String::new() };
        first.ok_or_else(silent)
    }

    /// Ends it and waits until it has ended.
    pub async fn end(mut self) -> Result<(), EngineError> {
        self.child.kill().await.map_err(EngineError::host("end the emulator"))
    }

    async fn run(&self, command: &'static str, arguments: Value) -> Result<(), EngineError> {
        self.control.run(command, arguments, self.limits.command_patience).await.map(drop)
    }
}

pub(crate) async fn start(host: &Arc<Host>, memories: &Memories, template: &Path) -> Result<BareMachine, EngineError> {
    let template = fs::canonicalize(template).map_err(EngineError::host(format!("find {}", template.display())))?;
    let manifest = Manifest::check(&template, &host.needs)?;
    let memory = memories.get(host, &template, &manifest).await?;
    let directory = tempfile::tempdir().map_err(EngineError::host("make a directory"))?;
    let disk = directory.path().join("disk.qcow2");
    fs::copy(template.join(MACHINE_LAYER), &disk)
        .and_then(|_| fs::set_permissions(&disk, fs::Permissions::from_mode(0o600)))
        .map_err(EngineError::host("copy the machine's disk"))?;
    let state = File::open(template.join(DEVICE_STATE)).map_err(EngineError::host("open the device state"))?;
    let bind = |name: &str| {
        let path = directory.path().join(name);
        UnixListener::bind(&path).map_err(EngineError::host(format!("bind {}", path.display())))
    };
    let connect = |name: &str| {
        let stream = UnixStream::connect(directory.path().join(name));
        async move { stream.await.map_err(EngineError::host("connect to the emulator")) }
    };
    let (control, link, console, network) = (bind("control")?, bind("link")?, bind("console")?, bind("network")?);
    let sockets = [&control, &link, &console, &network].map(AsRawFd::as_raw_fd);
    let inherited: Vec<_> = sockets.into_iter().chain([memory.file().as_raw_fd()]).collect();
    let text = |path: &Path| path.display().to_string();
    let disk = RootDisk {
        lower: vec![Layer {
            node: TEMPLATE_NODE.to_owned(),
            path: text(&template.join(DISK)),
            raw_below: Some(text(&template.join(ROOT))),
        }],
        top: Layer { node: "top".to_owned(), path: text(&disk), raw_below: None },
    };
    let arguments = command_line::arguments(&MachineArguments {
        name: "bare",
        shape: manifest.shape,
        accelerator: host.accelerator,
        disk: &disk,
        firmware: &host.firmware.display().to_string(),
        memory: memory.file().as_raw_fd(),
        control: control.as_raw_fd(),
        link: link.as_raw_fd(),
        console: console.as_raw_fd(),
        network: network.as_raw_fd(),
        origin: Origin::Saved,
        seccomp: false,
    });
    let mut command = Command::new(&host.emulator);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
    // SAFETY: `fcntl` on numbers that were copied before the fork.
    unsafe {
        command.pre_exec(move || {
            for fd in &inherited {
                if libc::fcntl(*fd, libc::F_SETFD, 0) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }

    let begin = Instant::now();
    let child = command.spawn().map_err(EngineError::host("start the emulator"))?;
    drop((control, console));
    let limits = &host.limits;
    let qmp = Qmp::open(connect("control").await?, limits.restore_patience).await?;
    network::listening(&network, limits.restore_patience).await?;
    drop(network);
    set_capabilities(&qmp, limits.command_patience).await?;
    migrate(&qmp, "migrate-incoming", &state, limits).await?;
    qmp.run("cont", json!({}), limits.command_patience).await?;
    let mut stream = connect("link").await?;
    agent::hello(&mut stream, limits.guest_patience).await?;
    let restore = begin.elapsed();
    let limits = limits.clone();
    Ok(BareMachine { child, control: qmp, agent: stream, limits, begun: begin, restore, directory, _link: link })
}
