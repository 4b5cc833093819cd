//! Boots a root disk once and keeps the running machine.
//!
//! Order: the files are gathered under another name, the machine is booted on them, its agent writes
//! the guest's file systems out, the machine is halted, its device state is written, the emulator
//! ends, the manifest is written, all of it goes to disk, the directory gets its name.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use serde_json::json;
use stockade_model::MachineId;
use tokio::{net::UnixStream, sync::broadcast};

use super::{
    Host, Limits, agent, clock, command_line,
    command_line::{Origin, RootDisk},
    config::joined,
    jail::Mount,
    launch::{Launch, Launched, SHOWN_LINES, with_complaints},
    machine_dir::{LINK, MachineDir, Record, give_to_nobody, take_back},
    manifest::{DEVICE_STATE, DISK, MACHINE_LAYER, MEMORY, Manifest, ROOT},
    memory, qemu_img,
    qmp::{CLOSED, Qmp, QmpEvent},
    remains::{Own, Remains, Undo},
};
use crate::{EngineError, GuestClient, Progress, TemplateBoot};

/// Boots and keeps a template.
pub(crate) async fn boot(host: &Arc<Host>, boot: &TemplateBoot, progress: Progress<'_>) -> Result<(), EngineError> {
    let machine = MachineId::random();
    let unfinished = unfinished_name(&boot.directory, &machine)?;
    let directory = MachineDir::of(&host.machines_dir, &machine);
    let mut record = Record::new(host, &machine, unfinished.clone());
    record.unfinished_template = Some(unfinished.clone());
    let mut undo = Undo::new(Remains::of_record(host, directory.clone(), &record));
    let _own = Own::new(host, &machine);
    let mut attempt = Boot { host, boot, unfinished: &unfinished, directory: &directory, record };
    match attempt.run(progress, &mut undo).await {
        Ok(()) => {
            // The template has its name; what is left is the machine it was booted on.
            undo.update(|remains| remains.unfinished_template = None);
            undo.run().await;
            Ok(())
        }
        Err(error) => {
            undo.run().await;
            Err(error)
        }
    }
}

fn unfinished_name(directory: &Path, machine: &MachineId) -> Result<PathBuf, EngineError> {
    let refuse = |reason: io::Error| EngineError::host(format!("make {}", directory.display()))(reason);
    if directory.exists() {
        return Err(refuse(io::ErrorKind::AlreadyExists.into()));
    }
    let name = directory.file_name().ok_or_else(|| refuse(io::ErrorKind::InvalidInput.into()))?;
    let parent = directory.parent().ok_or_else(|| refuse(io::ErrorKind::InvalidInput.into()))?;
    let parent = fs::canonicalize(parent).map_err(EngineError::host(format!("find {}", parent.display())))?;
    Ok(parent.join(format!("{}.unfinished-{machine}", name.to_string_lossy())))
}

struct Boot<'a> {
    host: &'a Arc<Host>,
    boot: &'a TemplateBoot,
    unfinished: &'a Path,
    directory: &'a MachineDir,
    record: Record,
}

impl Boot<'_> {
    async fn run(&mut self, progress: Progress<'_>, undo: &mut Undo) -> Result<(), EngineError> {
        let write_record = |directory: &MachineDir, record: &Record| {
            directory.write_record(record).map_err(EngineError::host("write the machine's record"))
        };
        self.directory.create().map_err(EngineError::host("make the machine's directory"))?;
        write_record(self.directory, &self.record)?;

        progress("copying the root disk");
        let root_digest = self.gather_files().await?;
        let create =
            self.host.cgroups.create(self.record.machine.as_str(), &self.host.limits.of_group(&self.boot.shape));
        self.record.cgroup = create.map_err(EngineError::host("make the machine's control group"))?;

        progress("booting");
        let begin = Instant::now();
        let launched = self.launch(undo).await?;
        if let Err(error) = wait_until_booted(self.host, self.directory, &launched).await {
            return Err(explain_boot(error, &launched).await);
        }
        progress(&format!("booted in {:.1} s", begin.elapsed().as_secs_f64()));
        if let Some(introduction) = &self.boot.introduction {
            self.talk("introduce", &launched, self.host.limits.boot_patience, async |stream, patience| {
                agent::introduce(stream, patience, introduction).await
            })
            .await?;
        }
        if let Some(startup) = &self.boot.startup {
            progress("starting what belongs to it");
            self.talk("start up", &launched, startup.patience, async |stream, patience| {
                agent::start_up(stream, patience, startup).await
            })
            .await?;
            progress(&format!("started in {:.1} s", begin.elapsed().as_secs_f64()));
        }

        progress("keeping memory and devices");
        self.keep_state(launched).await?;
        for name in [DISK, MACHINE_LAYER, MEMORY, DEVICE_STATE] {
            take_back(&self.unfinished.join(name)).map_err(EngineError::host(format!("take {name} back")))?;
        }

        progress("writing checksums");
        let (directory, needs, shape) = (self.unfinished.to_owned(), self.host.needs.clone(), self.boot.shape);
        let write = tokio::task::spawn_blocking(move || Manifest::write(&directory, needs, shape, root_digest));
        joined(write.await).map_err(EngineError::host("write the template's manifest"))?;
        fs::rename(self.unfinished, &self.boot.directory)
            .map_err(EngineError::host(format!("make {}", self.boot.directory.display())))?;
        if let Some(parent) = self.boot.directory.parent() {
            memory::sync_directory(parent).map_err(EngineError::host(format!("write {}", parent.display())))?;
        }
        Ok(())
    }

    /// The disk and its layers, and files for memory and devices. Returns the disk's checksum.
    async fn gather_files(&self) -> Result<String, EngineError> {
        let path = |name: &str| self.unfinished.join(name);
        fs::DirBuilder::new()
            .mode(0o755)
            .create(self.unfinished)
            .map_err(EngineError::host(format!("make {}", self.unfinished.display())))?;
        let (from, to) = (self.boot.root_disk.clone(), path(ROOT));
        let copy = tokio::task::spawn_blocking(move || memory::copy_sparse(&from, &to));
        let digest = joined(copy.await)
            .map_err(EngineError::host(format!("copy the root disk {}", self.boot.root_disk.display())))?;
        take_back(&path(ROOT)).map_err(EngineError::host("set the root disk's rights"))?;

        let layer = format!("{}/{ROOT}", command_line::TEMPLATE_DIR);
        qemu_img::create(&self.host.qemu_img, &path(DISK), Some((&layer, "raw")), self.boot.shape.disk_mib).await?;
        let layer = format!("{}/{DISK}", command_line::TEMPLATE_DIR);
        let below = Some((layer.as_str(), "qcow2"));
        qemu_img::create(&self.host.qemu_img, &path(MACHINE_LAYER), below, self.boot.shape.disk_mib).await?;
        let prepare = || {
            self.directory.add_kernel(&self.host.kernel, &self.host.initramfs)?;
            File::create_new(path(MEMORY))?.set_len(self.boot.shape.memory_mib << 20)?;
            File::create_new(path(DEVICE_STATE))?;
            // The emulator opens these two by name, as nobody.
            give_to_nobody(&path(MEMORY))?;
            give_to_nobody(&path(DISK))
        };
        prepare().map_err(EngineError::host("make the template's files"))?;
        Ok(digest)
    }

    fn open(&self, name: &str) -> Result<File, EngineError> {
        let path = self.unfinished.join(name);
        let file = OpenOptions::new().read(true).write(true).open(&path);
        file.map_err(EngineError::host(format!("open {}", path.display())))
    }

    async fn launch(&mut self, undo: &mut Undo) -> Result<Launched, EngineError> {
        let host = self.host;
        let memory = self.open(MEMORY)?;
        let disk = format!("{}/{DISK}", command_line::TEMPLATE_DIR);
        let kernel_command_line = command_line::kernel_command_line(host.accelerator, clock::tsc_khz());
        let launch = Launch {
            directory: self.directory,
            shape: self.boot.shape,
            accelerator: host.accelerator,
            origin: Origin::Boot { kernel_command_line: &kernel_command_line, keeps_memory: true },
            disk: &RootDisk::of_file(&disk),
            mounts: vec![
                Mount::new(self.unfinished.to_owned(), command_line::TEMPLATE_DIR, false),
                Mount::new(self.unfinished.join(DISK), &disk, true),
                Mount::new(self.directory.disk_dir(), command_line::BOOT_DIR, false),
            ],
            memory: &memory,
            patience: host.limits.restore_patience,
        };
        launch.run(host, &mut self.record, undo).await
    }

    /// A step the guest's agent takes: bounded, and over when the guest ends.
    async fn talk(
        &self,
        step: &'static str,
        launched: &Launched,
        patience: Duration,
        work: impl AsyncFnOnce(UnixStream, Duration) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let mut events = launched.qmp.events();
        let work = async {
            let stream = self.directory.connect(LINK).map_err(EngineError::host("connect to the guest's link"))?;
            work(stream, self.host.limits.boot_patience).await
        };
        tokio::select! {
            result = tokio::time::timeout(patience, work) => match result {
                Ok(result) => result,
                Err(_) => Err(EngineError::Emulator { step, detail: format!("the guest was not done within {patience:?}") }),
            },
            detail = ended(&mut events) => Err(EngineError::Emulator { step, detail }),
        }
    }

    async fn keep_state(&self, mut launched: Launched) -> Result<(), EngineError> {
        let patience = self.host.limits.command_patience;
        // The host is connected when the machine is saved, as it is when machines made from it go on: what need not be
        // told to a guest need not be translated by its emulator either.
        let link = self.directory.connect(LINK).map_err(EngineError::host("connect to the guest's link"))?;
        let _connected = GuestClient::open(link, self.host.limits.guest_patience).await?;
        let qmp = &launched.qmp;
        qmp.run("stop", json!({}), patience).await?;
        set_capabilities(qmp, patience).await?;
        migrate(qmp, "migrate", &self.open(DEVICE_STATE)?, &self.host.limits).await?;
        qmp.run("quit", json!({}), patience).await?;
        match tokio::time::timeout(patience, launched.child.wait()).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(EngineError::host("wait for the emulator's end")(error)),
            Err(_) => Err(EngineError::Emulator { step: "quit", detail: format!("it runs on after {patience:?}") }),
        }
    }
}

/// Waits for the agent, or for the guest's end, and lets the agent write the guest's disks out.
pub(crate) async fn wait_until_booted(
    host: &Host,
    directory: &MachineDir,
    launched: &Launched,
) -> Result<(), EngineError> {
    let patience = host.limits.boot_patience;
    let mut events = launched.qmp.events();
    let link = async {
        let stream = directory.connect(LINK).map_err(EngineError::host("connect to the guest's link"))?;
        agent::settle(stream, patience).await
    };
    let told = tokio::select! {
        result = link => result,
        detail = ended(&mut events) => return Err(EngineError::Emulator { step: "boot", detail }),
    };
    match told {
        // The link broke: most likely because the machine ended, which is the better explanation.
        Err(error @ (EngineError::LinkBroken { .. } | EngineError::Host { .. })) => {
            match tokio::time::timeout(Duration::from_secs(2), ended(&mut events)).await {
                Ok(detail) => Err(EngineError::Emulator { step: "boot", detail }),
                Err(_) => Err(error),
            }
        }
        told => told,
    }
}

/// Adds what guest and emulator said to the error of a boot that failed.
pub(crate) async fn explain_boot(error: EngineError, launched: &Launched) -> EngineError {
    if !matches!(error, EngineError::GuestSilent { .. }) {
        launched.console.finish(Duration::from_secs(1)).await;
    }
    with_console(with_complaints(error, &launched.complaints), launched)
}

fn with_console(error: EngineError, launched: &Launched) -> EngineError {
    let console = launched.console.last_lines(SHOWN_LINES);
    match error {
        EngineError::GuestSilent { waited, .. } => EngineError::GuestSilent { waited, console },
        EngineError::Emulator { step, detail } if !console.is_empty() => {
            EngineError::Emulator { step, detail: format!("{detail}; last console lines: {console}") }
        }
        error => error,
    }
}

/// Waits until a machine ends that should not; says how it did.
pub(crate) async fn ended(events: &mut broadcast::Receiver<QmpEvent>) -> String {
    loop {
        match events.recv().await {
            Ok(event) if event.name == "SHUTDOWN" && event.data["guest"] == true => {
                return format!("the guest ended itself ({})", event.data["reason"].as_str().unwrap_or("no reason"));
            }
            Ok(event) if event.name == CLOSED => return "the emulator ended".to_owned(),
            Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
            Err(broadcast::error::RecvError::Closed) => return "the emulator ended".to_owned(),
        }
    }
}

/// Memory stays where it is; progress is reported.
pub(crate) async fn set_capabilities(qmp: &Qmp, patience: Duration) -> Result<(), EngineError> {
    let on = |name: &str| json!({ "capability": name, "state": true });
    let capabilities = json!({ "capabilities": [on("x-ignore-shared"), on("events")] });
    qmp.run("migrate-set-capabilities", capabilities, patience).await.map(drop)
}

/// Writes device state to a file (`migrate`) or loads it from one (`migrate-incoming`), and waits until that is done.
pub(crate) async fn migrate(
    qmp: &Qmp,
    command: &'static str,
    state: &File,
    limits: &Limits,
) -> Result<(), EngineError> {
    const NAME: &str = "state";
    let patience = limits.restore_patience;
    qmp.give(state, NAME, limits.command_patience).await?;
    let mut events = qmp.events();
    let work = async {
        qmp.run(command, json!({ "uri": format!("fd:{NAME}") }), patience).await?;
        loop {
            let failed = |detail: &str| Err(EngineError::Emulator { step: command, detail: detail.to_owned() });
            match events.recv().await {
                Ok(event) if event.name == "MIGRATION" => match event.data["status"].as_str() {
                    Some("completed") => return Ok(()),
                    Some(status @ ("failed" | "cancelled")) => return failed(status),
                    _ => {}
                },
                Ok(event) if event.name == CLOSED => return failed("the emulator ended"),
                Ok(_) => {}
                Err(_) => return failed("too many events"),
            }
        }
    };
    match tokio::time::timeout(patience, work).await {
        Ok(result) => result,
        Err(_) => Err(EngineError::Emulator { step: command, detail: format!("not done within {patience:?}") }),
    }
}
