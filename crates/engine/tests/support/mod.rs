#![allow(
    unreachable_pub,
    dead_code,
    missing_docs,
    clippy::unwrap_used,
    reason = "shared by several test programs, each uses a part"
)]
//! A real QEMU engine on a data directory of its own, with a template that is booted once per checkout.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use nix::fcntl::{Flock, FlockArg};
use stockade_engine::{
    Engine, EngineError, TemplateBoot,
    qemu::{AcceleratorChoice, QemuConfig, QemuEngine, QemuMachine},
};
use stockade_model::{MachineId, MachineShape};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

pub const SHAPE: MachineShape = MachineShape { vcpus: 1, memory_mib: 256, disk_mib: 128 };

pub struct Rig {
    pub engine: QemuEngine,
    pub template: PathBuf,
    pub data: PathBuf,
    _temporary: Option<tempfile::TempDir>,
}

impl Rig {
    pub async fn new() -> Self {
        let _ = tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .with_test_writer()
            .try_init();
        let temporary = tempfile::tempdir().expect("a directory");
        let mut rig = Self::on(temporary.path()).await;
        rig._temporary = Some(temporary);
        rig
    }

    pub async fn on(data: &Path) -> Self {
        let engine = QemuEngine::new(config(data)).await.unwrap_or_else(|error| panic!("{error}"));
        let template = shared_template(&engine).await;
        Self { engine, template, data: data.to_owned(), _temporary: None }
    }

    pub async fn start(&self) -> QemuMachine {
        self.engine.start_machine(&MachineId::random(), &self.template).await.unwrap_or_else(|error| panic!("{error}"))
    }

    pub fn machine_dirs(&self) -> Vec<String> {
        let entries = fs::read_dir(self.data.join("machines")).expect("listed");
        entries.map(|entry| entry.expect("read").file_name().to_string_lossy().into_owned()).collect()
    }
}

pub fn config(data: &Path) -> QemuConfig {
    let boot = boot_files();
    let mut config = QemuConfig::new(data, boot.join("vmlinuz"), boot.join("initramfs"));
    config.runtime_dir = cache().join("runtime");
    config.accelerator = AcceleratorChoice::Tcg;
    config
}

pub fn cache() -> PathBuf {
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("engine");
    fs::create_dir_all(&directory).expect("a directory for what tests share");
    directory
}

fn boot_files() -> PathBuf {
    PathBuf::from(std::env::var_os("STOCKADE_TEST_BOOT").expect("STOCKADE_TEST_BOOT names a directory"))
}

/// One test process builds it, the others wait for the lock.
async fn shared_template(engine: &QemuEngine) -> PathBuf {
    let lock = File::create(cache().join("lock")).expect("a lock file");
    let take = move || Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, error)| error);
    let lock = tokio::task::spawn_blocking(take).await.expect("ran").expect("locked");
    let template = cache().join("template");
    if engine.check_template(&template).await.is_err() {
        let _ = fs::remove_dir_all(&template);
        let boot = TemplateBoot { root_disk: root_disk(), shape: SHAPE, directory: template.clone() };
        engine.boot_template(&boot, &|step| eprintln!("{step}")).await.unwrap_or_else(|error| panic!("{error}"));
    }
    drop(lock);
    template
}

/// A small ext4 file system with the directories a guest needs.
fn root_disk() -> PathBuf {
    let (tree, disk) = (cache().join("tree"), cache().join("root.ext4"));
    for name in ["dev", "proc", "sys", "tmp", "run", "etc", "root", "home", "bin"] {
        fs::create_dir_all(tree.join(name)).expect("a directory");
    }
    let _ = fs::remove_file(&disk);
    let status = Command::new("mke2fs").args(["-q", "-t", "ext4", "-d"]).arg(&tree).arg(&disk).arg("64M").status();
    assert!(status.expect("mke2fs runs; `apt-get install e2fsprogs` installs it").success());
    disk
}

/// Says hello and hears it back: the guest's processor runs and its agent answers.
pub async fn hello(machine: &QemuMachine) -> UnixStream {
    let mut stream = machine.connect_link().expect("connects");
    let hello = stockade_wire::hello::Hello::new(std::array::from_fn(|_| rand_byte())).encode();
    stream.write_all(&hello).await.expect("written");
    let mut seen = Vec::new();
    let read = async {
        while !seen.ends_with(&hello) {
            seen.push(stream.read_u8().await.expect("the link stands"));
        }
    };
    tokio::time::timeout(Duration::from_secs(60), read).await.expect("the agent answers");
    stream
}

fn rand_byte() -> u8 {
    let mut byte = [0];
    getrandom::fill(&mut byte).expect("random");
    byte[0]
}

pub fn error_text(error: EngineError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}
