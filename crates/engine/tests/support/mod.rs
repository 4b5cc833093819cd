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
    io,
    path::{Path, PathBuf},
    pin::Pin,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures::StreamExt;
use nix::fcntl::{Flock, FlockArg};
use stockade_engine::{
    Engine, EngineError, GuestClient, Machine, SnapshotScope, TemplateBoot,
    guest::{Events, Selector},
    qemu::{AcceleratorChoice, QemuConfig, QemuEngine, QemuMachine},
};
use stockade_images::Images;
use stockade_model::{MachineId, MachineShape};
use stockade_wire::{
    event::Event,
    process::{PtySize, StartRequest},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf},
    net::UnixStream,
};

pub const SHAPE: MachineShape = MachineShape { vcpus: 1, memory_mib: 256, disk_mib: 128 };

pub struct Rig {
    pub engine: QemuEngine,
    pub template: PathBuf,
    pub data: PathBuf,
    _temporary: Option<DataDir>,
}

/// A data directory. Machines that a failing test leaves behind end with it.
pub struct DataDir(tempfile::TempDir);

impl DataDir {
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory"))
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for DataDir {
    fn drop(&mut self) {
        self.end_machines();
    }
}

impl DataDir {
    /// Ends what runs and removes its control groups.
    pub fn end_machines(&self) {
        use nix::{
            sys::signal::{Signal, kill},
            unistd::Pid,
        };
        let left = leftovers(self.path());
        for _ in 0..500 {
            let pids =
                leftovers(self.path()).into_iter().filter_map(|text| text.strip_prefix("process ")?.parse().ok());
            let pids: Vec<i32> = pids.collect();
            if pids.is_empty() {
                break;
            }
            for pid in pids {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        left.iter().filter(|text| text.starts_with("/sys/")).for_each(|group| drop(fs::remove_dir(group)));
    }
}

impl Rig {
    pub async fn new() -> Self {
        let temporary = DataDir::new();
        let mut rig = Self::on(temporary.path()).await;
        rig._temporary = Some(temporary);
        rig
    }

    pub async fn on(data: &Path) -> Self {
        Self::with(data, |_| {}).await
    }

    pub async fn with(data: &Path, change: impl FnOnce(&mut QemuConfig)) -> Self {
        let _ = tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .with_test_writer()
            .try_init();
        let mut config = config(data).await;
        change(&mut config);
        let engine = QemuEngine::new(config).await.unwrap_or_else(|error| panic!("{error}"));
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
        leftovers(&self.data)
    }

    /// Where the next snapshot may be put.
    pub fn snapshot_dir(&self) -> PathBuf {
        let directory = self.data.join("snapshots");
        fs::create_dir_all(&directory).expect("a directory");
        directory.join(MachineId::random().as_str())
    }

    /// Takes a snapshot of memory and disk.
    pub async fn snapshot(&self, machine: &QemuMachine) -> PathBuf {
        let directory = self.snapshot_dir();
        let taken = machine.snapshot(&directory, SnapshotScope::MemoryAndDisk).await;
        taken.unwrap_or_else(|error| panic!("{}", error_text(error)));
        directory
    }

    /// Starts a machine from a snapshot and lets it run.
    pub async fn start_from(&self, snapshot: &Path) -> QemuMachine {
        let machine = self.engine.start_machine_from(&MachineId::random(), &self.template, snapshot).await;
        let machine = machine.unwrap_or_else(|error| panic!("{}", error_text(error)));
        machine.resume().await.expect("resumed");
        machine
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

/// Directories, processes and control groups of the machines of a data directory.
fn leftovers(data: &Path) -> Vec<String> {
    let names = |path: PathBuf| -> Vec<String> {
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    };
    let mut left = names(data.join("machines"));
    let machines = fs::canonicalize(data.join("machines")).unwrap_or_default();
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
    let template = cache().join("template-4");
    if engine.check_template(&template).await.is_err() {
        let _ = fs::remove_dir_all(&template);
        let boot = TemplateBoot {
            root_disk: root_disk(&cache()),
            shape: SHAPE,
            introduction: None,
            startup: None,
            directory: template.clone(),
        };
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
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/worker.c");
    let status = Command::new("cc").args(["-O2", "-static", "-o"]).arg(tree.join("bin/worker")).arg(source).status();
    assert!(status.expect("cc runs").success(), "the guest's program does not compile");
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

/// A link whose host stops reading when it is told to.
pub struct Deafened {
    stream: UnixStream,
    deaf: Arc<AtomicBool>,
}

impl Deafened {
    pub fn new(stream: UnixStream, deaf: Arc<AtomicBool>) -> Self {
        Self { stream, deaf }
    }
}

impl AsyncRead for Deafened {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.deaf.load(Ordering::Relaxed) {
            // For good: nobody wakes it.
            true => Poll::Pending,
            false => Pin::new(&mut self.stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Deafened {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

fn rand_byte() -> u8 {
    let mut byte = [0];
    getrandom::fill(&mut byte).expect("random");
    byte[0]
}

/// Starts the guest's program.
pub async fn work(guest: &GuestClient, arguments: &[&str]) -> Lines {
    let request = StartRequest { tag: Some(arguments[0].to_owned()), ..request(arguments) };
    Lines::of(guest.start(&request).await.unwrap_or_else(|error| panic!("{}", error_text(error))))
}

/// The guest's program on a terminal.
pub fn terminal(arguments: &[&str]) -> StartRequest {
    StartRequest { pty: Some(PtySize { cols: 80, rows: 24 }), stdin: false, ..request(arguments) }
}

fn request(arguments: &[&str]) -> StartRequest {
    let words = std::iter::once("/bin/worker").chain(arguments.iter().copied()).map(str::to_owned).collect();
    StartRequest {
        user: Some("root".to_owned()),
        cwd: Some("/".to_owned()),
        stdin: true,
        ..StartRequest::new(stockade_wire::process::Command::Argv(words))
    }
}

/// The output of a process, line by line.
pub struct Lines {
    events: Events,
    text: String,
}

impl Lines {
    pub fn of(events: Events) -> Self {
        Self { events, text: String::new() }
    }

    /// What a process prints from here on.
    pub async fn attach(guest: &GuestClient, tag: &str) -> Self {
        let mut lines = Self::of(guest.attach(&Selector::Tag(tag.to_owned()), None).await.expect("attached"));
        if matches!(tag, "count" | "churn") {
            // It prints all the time: this may be the middle of a line.
            lines.next().await;
        }
        lines
    }

    pub async fn next(&mut self) -> String {
        let line = tokio::time::timeout(Duration::from_secs(120), self.read_line()).await;
        let line = line.unwrap_or_else(|_| panic!("nothing came after {:?}", self.text));
        assert!(!line.starts_with("BROKEN"), "{line}");
        line
    }

    async fn read_line(&mut self) -> String {
        loop {
            if let Some((line, rest)) = self.text.split_once('\n') {
                let (line, rest) = (line.to_owned(), rest.to_owned());
                self.text = rest;
                return line;
            }
            match self.events.events.next().await.expect("the stream goes on").expect("the stream is whole") {
                Event::Stdout(bytes) | Event::Pty(bytes) => self.text += &String::from_utf8_lossy(&bytes),
                Event::KeepAlive => {}
                other => panic!("{other:?} after {:?}", self.text),
            }
        }
    }

    pub async fn number(&mut self) -> u64 {
        self.next().await.trim().parse().expect("a number")
    }
}

/// The root disk of a snapshot as one raw file.
pub fn raw_disk(template: &Path, snapshot: &Path, to: &Path) {
    let text = fs::read(snapshot.join("manifest.json")).expect("read");
    let manifest: serde_json::Value = serde_json::from_slice(&text).expect("valid");
    let file = |path: PathBuf| serde_json::json!({ "driver": "file", "filename": path });
    let root = serde_json::json!({ "driver": "raw", "file": file(template.join("root.ext4")) });
    let mut node = serde_json::json!({ "driver": "qcow2", "file": file(template.join("disk.qcow2")), "backing": root });
    for layer in manifest["layers"].as_array().expect("a list") {
        let path = snapshot.join(format!("{}.qcow2", layer["id"].as_str().expect("a name")));
        node = serde_json::json!({ "driver": "qcow2", "file": file(path), "backing": node });
    }
    let status = Command::new("qemu-img").args(["convert", "-O", "raw", &format!("json:{node}")]).arg(to).status();
    assert!(status.expect("qemu-img runs").success());
}

/// Has a process that waits for input go on.
pub async fn poke(guest: &GuestClient, tag: &str) {
    let body = futures::stream::iter([Ok(bytes::Bytes::from_static(b"\n"))]);
    guest.write_stdin(&Selector::Tag(tag.to_owned()), Box::pin(body), false).await.expect("written");
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

/// Runs something in a runtime of its own and drops all of it, as a crash would: connections close, no
/// destructor of a machine gets to do anything.
pub fn in_a_server_that_crashes<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let result = runtime.block_on(work);
    runtime.shutdown_background();
    result
}
