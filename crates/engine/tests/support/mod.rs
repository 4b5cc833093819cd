#![allow(
    unreachable_pub,
    dead_code,
    missing_docs,
    clippy::unwrap_used,
    reason = "shared by several test programs, each uses a part"
)]
//! A real QEMU engine on a data directory of its own, with a template that is booted once per checkout.

use std::{
    collections::BTreeSet,
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
use stockade_images::Images;
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
        let engine = QemuEngine::new(config(data).await).await.unwrap_or_else(|error| panic!("{error}"));
        let template = shared_template(&engine).await;
        Self { engine, template, data: data.to_owned(), _temporary: None }
    }

    pub async fn start(&self) -> QemuMachine {
        self.engine.start_machine(&MachineId::random(), &self.template).await.unwrap_or_else(|error| panic!("{error}"))
    }

    /// No directory, process or control group of this data directory is left.
    pub async fn assert_clean(&self) {
        assert_eq!(self.leftovers(), Vec::<String>::new());
        assert!(self.engine.sweep(&BTreeSet::new()).await.expect("swept").is_empty());
    }

    /// For what is cleaned up in the background.
    pub async fn wait_until_clean(&self) {
        let clean = async {
            while !self.leftovers().is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let patience = Duration::from_secs(30);
        tokio::time::timeout(patience, clean).await.unwrap_or_else(|_| panic!("left: {:?}", self.leftovers()));
    }

    fn leftovers(&self) -> Vec<String> {
        let names = |path: PathBuf| -> Vec<String> {
            let entries = fs::read_dir(path).into_iter().flatten().flatten();
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        };
        let mut left = names(self.data.join("machines"));
        let machines = fs::canonicalize(self.data.join("machines")).expect("there");
        let mut visit = vec![PathBuf::from("/sys/fs/cgroup")];
        let owner = sha256_prefix(&machines);
        while let Some(path) = visit.pop() {
            for entry in fs::read_dir(&path).into_iter().flatten().flatten() {
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    if entry.file_name().to_string_lossy().contains(&owner) {
                        left.push(entry.path().display().to_string());
                    }
                    visit.push(entry.path());
                }
            }
        }
        for pid in names(PathBuf::from("/proc")) {
            let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            if String::from_utf8_lossy(&arguments).contains(&format!("guest=stockade-{owner}-")) {
                left.push(format!("process {pid}"));
            }
        }
        left
    }

    /// A copy that a test may break.
    pub fn copy_of_template(&self) -> PathBuf {
        let copy = self.data.join(format!("template-{}", MachineId::random()));
        let status = Command::new("cp").args(["-r", "--sparse=always"]).arg(&self.template).arg(&copy).status();
        assert!(status.expect("cp runs").success());
        for entry in fs::read_dir(&copy).expect("listed") {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
            fs::set_permissions(entry.expect("read").path(), mode).expect("set");
        }
        copy
    }
}

fn sha256_prefix(path: &Path) -> String {
    use sha2::{Digest, Sha256};
    let digest = Sha256::digest(path.as_os_str().as_encoded_bytes());
    digest.iter().take(4).map(|byte| format!("{byte:02x}")).collect()
}

pub async fn config(data: &Path) -> QemuConfig {
    let (kernel, initramfs) = boot_files().await;
    let mut config = QemuConfig::new(data, kernel, initramfs);
    config.runtime_dir = cache().join("runtime");
    config.accelerator = AcceleratorChoice::Tcg;
    config
}

pub fn cache() -> PathBuf {
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("engine");
    fs::create_dir_all(&directory).expect("a directory for what tests share");
    directory
}

/// Kernel and initramfs as the product makes them. `STOCKADE_TEST_BOOT` names a directory with others.
async fn boot_files() -> (PathBuf, PathBuf) {
    if let Some(directory) = std::env::var_os("STOCKADE_TEST_BOOT").map(PathBuf::from) {
        return (directory.join("vmlinuz"), directory.join("initramfs"));
    }
    let _lock = lock("boot").await;
    let agent = tokio::task::spawn_blocking(agent).await.expect("built");
    let images = std::env::var_os("STOCKADE_TEMPLATE_CACHE").map_or_else(|| cache().join("images"), PathBuf::from);
    let images = Images::open(&images).unwrap_or_else(|error| panic!("{error}"));
    let boot = images.boot_files(&agent, &stockade_images::progress::Silent).await;
    let boot = boot.unwrap_or_else(|error| panic!("{error}: {:?}", error.hint()));
    (boot.vmlinuz(), boot.initramfs())
}

/// The guest's agent, built as the command line's build script builds it and where it builds it.
fn agent() -> Vec<u8> {
    let path = std::env::var_os("STOCKADE_GUEST_BINARY").map_or_else(build_agent, PathBuf::from);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn build_agent() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("below target").join("guest-agent");
    let triple = "x86_64-unknown-linux-gnu";
    let status = Command::new(env!("CARGO"))
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."))
        .args(["build", "--quiet", "--profile", "guest", "--package", "stockade-guest", "--bin", "stockade-guest"])
        .args(["--target", triple, "--target-dir"])
        .arg(&target)
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env_remove("RUSTC_WRAPPER")
        .status();
    assert!(status.expect("cargo runs").success(), "the guest agent does not compile");
    target.join(triple).join("guest/stockade-guest")
}

/// Tests are processes of their own and share what takes long to make.
async fn lock(name: &str) -> Flock<File> {
    let file = File::create(cache().join(format!("{name}.lock"))).expect("a lock file");
    let take = move || Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, error)| error);
    tokio::task::spawn_blocking(take).await.expect("ran").expect("locked")
}

/// One test process builds it, the others wait for the lock.
async fn shared_template(engine: &QemuEngine) -> PathBuf {
    let _lock = lock("template").await;
    // Another number where the root disk below changes; all else a template depends on it says itself.
    let template = cache().join("template-2");
    if engine.check_template(&template).await.is_err() {
        let _ = fs::remove_dir_all(&template);
        let boot = TemplateBoot { root_disk: root_disk(&cache()), shape: SHAPE, directory: template.clone() };
        engine.boot_template(&boot, &|step| eprintln!("{step}")).await.unwrap_or_else(|error| panic!("{error}"));
    }
    template
}

/// A small ext4 file system with the directories a guest needs.
pub fn root_disk(directory: &Path) -> PathBuf {
    let (tree, disk) = (directory.join("tree"), directory.join("root.ext4"));
    for name in ["dev", "proc", "sys", "tmp", "run", "etc", "root", "home", "bin"] {
        fs::create_dir_all(tree.join(name)).expect("a directory");
    }
    fs::write(tree.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n").expect("written");
    fs::write(tree.join("etc/group"), "root:x:0:\n").expect("written");
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
