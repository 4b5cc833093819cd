//! Times snapshots, forks and standby of a real machine, each beside the bare emulator's restore.
//!
//! `snapshot_times KERNEL INITRAMFS ROOT_DISK DATA_DIR [ROUNDS]`; the root disk needs `/bin/worker` (the guest
//! program of this crate's tests). `RUST_LOG=debug` shows each part.

use std::{
    error::Error,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use futures::StreamExt;
use stockade_engine::{
    Engine, GuestClient, Machine, SnapshotScope, TemplateBoot,
    qemu::{AcceleratorChoice, QemuConfig, QemuEngine, QemuMachine},
};
use stockade_model::{MachineId, MachineShape};
use stockade_wire::{
    event::Event,
    hello::Hello,
    process::{Command, StartRequest},
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

type Outcome<T> = Result<T, Box<dyn Error>>;

struct Bench {
    engine: QemuEngine,
    template: PathBuf,
    data: PathBuf,
    rounds: usize,
}

#[tokio::main]
async fn main() -> Outcome<()> {
    tracing_subscriber::fmt().with_env_filter(tracing_subscriber::EnvFilter::from_default_env()).init();
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [kernel, initramfs, root_disk, data, rest @ ..] = arguments.as_slice() else {
        return Err("usage: snapshot_times KERNEL INITRAMFS ROOT_DISK DATA_DIR [ROUNDS]".into());
    };
    let rounds = rest.first().and_then(|word| word.to_str()?.parse().ok()).unwrap_or(10);
    let mut config = QemuConfig::new(data, kernel.clone(), initramfs.clone());
    config.accelerator = AcceleratorChoice::Tcg;
    let engine = QemuEngine::new(config).await?;
    let template = data.join("template");
    if engine.check_template(&template).await.is_err() {
        let _ = fs::remove_dir_all(&template);
        let shape = MachineShape { vcpus: 1, memory_mib: 768, disk_mib: 1024 };
        let boot = TemplateBoot {
            root_disk: root_disk.clone(),
            shape,
            introduction: None,
            startup: None,
            directory: template.clone(),
        };
        engine.boot_template(&boot, &|step| eprintln!("{step}")).await?;
    }
    fs::create_dir_all(data.join("snapshots"))?;
    let bench = Bench { engine, template, data: data.clone(), rounds };
    println!("load: {}", fs::read_to_string("/proc/loadavg")?.trim());
    bench.bare("bare restore").await?;
    for mib in [0, 100, 400] {
        bench.pauses(mib).await?;
    }
    bench.forks().await?;
    bench.depths().await?;
    bench.standby().await?;
    bench.bare("bare restore again").await?;
    println!("load: {}", fs::read_to_string("/proc/loadavg")?.trim());
    Ok(())
}

impl Bench {
    async fn bare(&self, name: &str) -> Outcome<()> {
        let mut times = Vec::new();
        for _ in 0..self.rounds {
            times.push(self.engine.bare_times(&self.template).await?.restore);
        }
        show(name, times);
        Ok(())
    }

    async fn machine(&self) -> Outcome<QemuMachine> {
        let machine = self.engine.start_machine(&MachineId::random(), &self.template).await?;
        machine.resume().await?;
        machine.guest().await?;
        Ok(machine)
    }

    async fn snapshot(&self, machine: &QemuMachine) -> Outcome<(PathBuf, stockade_engine::SnapshotReport)> {
        let directory = self.data.join("snapshots").join(MachineId::random().as_str());
        let report = machine.snapshot(&directory, SnapshotScope::MemoryAndDisk).await?;
        Ok((directory, report))
    }

    /// From the call to the first answer of the guest's agent.
    async fn child(&self, snapshot: &Path) -> Outcome<(QemuMachine, Duration)> {
        let begin = Instant::now();
        let machine = self.engine.start_machine_from(&MachineId::random(), &self.template, snapshot).await?;
        machine.resume().await?;
        answer(&machine).await?;
        Ok((machine, begin.elapsed()))
    }

    async fn pauses(&self, mib: u32) -> Outcome<()> {
        let machine = self.machine().await?;
        if mib > 0 {
            hold(&machine.guest().await?, mib).await?;
        }
        let (mut paused, mut whole, mut changed) = (Vec::new(), Vec::new(), 0);
        for _ in 0..self.rounds {
            let begin = Instant::now();
            let (directory, report) = self.snapshot(&machine).await?;
            whole.push(begin.elapsed());
            paused.push(report.paused);
            changed = report.memory_bytes >> 20;
            fs::remove_dir_all(directory)?;
        }
        show(&format!("pause, {changed} MiB changed"), paused);
        show(&format!("snapshot as a whole, {changed} MiB changed"), whole);
        machine.kill().await?;
        Ok(())
    }

    async fn forks(&self) -> Outcome<()> {
        let parent = self.machine().await?;
        let (snapshot, _) = self.snapshot(&parent).await?;
        let (mut single, mut eight, mut each, mut fork) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for _ in 0..self.rounds {
            let (child, took) = self.child(&snapshot).await?;
            single.push(took);
            child.kill().await?;
            let begin = Instant::now();
            let children = futures::future::join_all((0..8).map(|_| self.child(&snapshot))).await;
            eight.push(begin.elapsed());
            for child in children {
                let (child, took) = child?;
                each.push(took);
                child.kill().await?;
            }
            let begin = Instant::now();
            let (directory, _) = self.snapshot(&parent).await?;
            let (child, _) = self.child(&directory).await?;
            fork.push(begin.elapsed());
            child.kill().await?;
            fs::remove_dir_all(directory)?;
        }
        show("one child", single);
        show("each of eight children at once", each);
        show("eight children together", eight);
        show("snapshot and one child", fork);
        parent.kill().await?;
        Ok(())
    }

    async fn depths(&self) -> Outcome<()> {
        let mut machine = self.machine().await?;
        for depth in 1..=10 {
            let (snapshot, report) = self.snapshot(&machine).await?;
            machine.kill().await?;
            if [1, 5, 10].contains(&depth) {
                let mut times = Vec::new();
                for _ in 0..self.rounds {
                    let (child, took) = self.child(&snapshot).await?;
                    times.push(took);
                    child.kill().await?;
                }
                show(&format!("child at depth {depth}, {} MiB changed", report.memory_bytes >> 20), times);
            }
            machine = self.child(&snapshot).await?.0;
            fs::remove_dir_all(snapshot)?;
        }
        machine.kill().await?;
        Ok(())
    }

    async fn standby(&self) -> Outcome<()> {
        let machine = self.machine().await?;
        let mut times = Vec::new();
        for _ in 0..self.rounds {
            machine.pause().await?;
            let begin = Instant::now();
            machine.resume().await?;
            machine.guest().await?.health().await?;
            times.push(begin.elapsed());
        }
        show("standby to first reply", times);
        machine.kill().await?;
        Ok(())
    }
}

async fn answer(machine: &QemuMachine) -> Outcome<()> {
    let mut link = machine.connect_link()?;
    let mut epoch = [0; 16];
    getrandom::fill(&mut epoch).map_err(|error| error.to_string())?;
    let hello = Hello::new(epoch).encode();
    link.write_all(&hello).await?;
    // What the parent's session had under way may come first.
    let mut seen = Vec::new();
    while !seen.ends_with(&hello) {
        seen.push(link.read_u8().await?);
    }
    Ok(())
}

/// Has the guest fill so much memory.
async fn hold(guest: &GuestClient, mib: u32) -> Outcome<()> {
    let request = StartRequest {
        user: Some("root".to_owned()),
        cwd: Some("/".to_owned()),
        stdin: true,
        ..StartRequest::new(Command::Argv(["/bin/worker", "hold", &mib.to_string()].map(str::to_owned).to_vec()))
    };
    let mut events = guest.start(&request).await?.events;
    while let Some(event) = events.next().await {
        if matches!(event?, Event::Stdout(_)) {
            return Ok(());
        }
    }
    Err("the guest's program ended".into())
}

fn show(name: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |part: usize| times[(times.len() * part / 100).min(times.len() - 1)].as_secs_f64() * 1000.0;
    println!("{name}: p50 {:.1} ms, p95 {:.1} ms, best {:.1} ms", at(50), at(95), at(0));
}
