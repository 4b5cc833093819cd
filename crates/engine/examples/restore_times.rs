//! Times restores of a template against the bare emulator's, in turn.
//!
//! `restore_times KERNEL INITRAMFS ROOT_DISK DATA_DIR [ROUNDS]`; `RUST_LOG=debug` shows the steps.

use std::{error::Error, path::PathBuf, time::Instant};

use stockade_engine::{
    Engine, Machine, TemplateBoot,
    qemu::{AcceleratorChoice, QemuConfig, QemuEngine},
};
use stockade_model::{MachineId, MachineShape};
use stockade_wire::hello::Hello;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_env_filter(tracing_subscriber::EnvFilter::from_default_env()).init();
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [kernel, initramfs, root_disk, data, rest @ ..] = arguments.as_slice() else {
        return Err("usage: restore_times KERNEL INITRAMFS ROOT_DISK DATA_DIR [ROUNDS]".into());
    };
    let rounds = rest.first().and_then(|word| word.to_str()?.parse().ok()).unwrap_or(20);
    let mut config = QemuConfig::new(data, kernel.clone(), initramfs.clone());
    config.accelerator = AcceleratorChoice::Tcg;
    let engine = QemuEngine::new(config).await?;
    let template = data.join("template");
    if engine.check_template(&template).await.is_err() {
        let _ = std::fs::remove_dir_all(&template);
        let shape = MachineShape { vcpus: 1, memory_mib: 512, disk_mib: 1024 };
        let boot = TemplateBoot {
            root_disk: root_disk.clone(),
            shape,
            introduction: None,
            startup: None,
            directory: template.clone(),
        };
        engine.boot_template(&boot, &|step| eprintln!("{step}")).await?;
    }
    let (mut ours, mut bare) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let begin = Instant::now();
        let machine = engine.start_machine(&MachineId::random(), &template).await?;
        let started = begin.elapsed();
        machine.resume().await?;
        let mut link = machine.connect_link()?;
        let mut echo = [0; 28];
        link.write_all(&Hello::new([7; 16]).encode()).await?;
        link.read_exact(&mut echo).await?;
        let elapsed = begin.elapsed();
        ours.push(elapsed.as_secs_f64() * 1000.0);
        let begin = Instant::now();
        machine.kill().await?;
        let killed = begin.elapsed();
        bare.push(engine.bare_times(&template).await?.restore.as_secs_f64() * 1000.0);
        println!(
            "start {started:.1?}, first reply {elapsed:.1?}, kill {killed:.1?}, bare {:.1} ms",
            bare[bare.len() - 1]
        );
    }
    for list in [&mut ours, &mut bare] {
        list.sort_by(f64::total_cmp);
    }
    let middle = |list: &[f64]| list[list.len() / 2];
    println!(
        "p50: ours {:.1} ms, bare {:.1} ms, ratio {:.2}",
        middle(&ours),
        middle(&bare),
        middle(&ours) / middle(&bare)
    );
    Ok(())
}
