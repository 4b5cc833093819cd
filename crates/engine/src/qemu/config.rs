//! What the engine is told, and what it finds out about the host from it.

use std::{
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use stockade_model::{Accelerator, MachineShape};
use tokio::{process::Command, sync::Semaphore};

use super::{
    Host,
    cgroup::{CgroupLimits, Cgroups},
    checked_files::CheckedFiles,
    clock, command_line,
    manifest::Needs,
    memory, probe, process,
    runtime_root::RuntimeRoot,
};
use crate::EngineError;

/// What should run the guests' instructions.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum AcceleratorChoice {
    /// KVM where it works, software emulation elsewhere.
    #[default]
    Auto,
    /// KVM or nothing.
    Kvm,
    /// Software emulation.
    Tcg,
}

/// What the engine is told.
#[derive(Clone, Debug)]
pub struct QemuConfig {
    /// Where machines have their directories.
    pub machines_dir: PathBuf,
    /// Where the emulator's assembled root and the probe's verdict are kept; can be removed when nothing runs.
    pub runtime_dir: PathBuf,
    /// The guest's kernel, a distribution's `vmlinuz`; readable by everyone.
    pub kernel: PathBuf,
    /// Its initial file system with the agent as `/init`; readable by everyone.
    pub initramfs: PathBuf,
    /// What should run the instructions.
    pub accelerator: AcceleratorChoice,
    /// The emulator; `None`: `qemu-system-x86_64` from the search path.
    pub emulator: Option<PathBuf>,
    /// Its firmware; `None`: where Debian keeps it.
    pub firmware_dir: Option<PathBuf>,
    /// `bwrap`; `None`: from the search path.
    pub bubblewrap: Option<PathBuf>,
    /// `qemu-img`; `None`: from the search path.
    pub qemu_img: Option<PathBuf>,
    /// What machines may take.
    pub limits: Limits,
}

impl QemuConfig {
    /// The usual set-up below a data directory.
    pub fn new(data_dir: &Path, kernel: PathBuf, initramfs: PathBuf) -> Self {
        Self {
            machines_dir: data_dir.join("machines"),
            runtime_dir: data_dir.join("runtime"),
            kernel,
            initramfs,
            accelerator: AcceleratorChoice::Auto,
            emulator: None,
            firmware_dir: None,
            bubblewrap: None,
            qemu_img: None,
            limits: Limits::default(),
        }
    }
}

/// What machines may take, and how long is waited for them.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The emulator's own memory, in MiB, over that of its guest.
    pub overhead_mib: u64,
    /// Memory that must stay free on the host for a machine to be started, in MiB.
    pub reserve_mib: u64,
    /// Disk that must stay free for a machine to be started, in MiB.
    pub disk_reserve_mib: u64,
    /// What all snapshots that are being taken may hold in memory together, in MiB; others are written to
    /// their files while the machine stands still, which takes longer.
    pub snapshot_buffers_mib: u32,
    /// The most emulators that wait for a machine, of each template that machines are started from; see spares.rs.
    pub spare_emulators: usize,
    /// Processes and threads of one emulator.
    pub processes: u64,
    /// Processor time of the emulator's own work, in hundredths of a processor, over that of its guest.
    pub cpu_margin_percent: u64,
    /// How long the emulator may take to answer a command.
    pub command_patience: Duration,
    /// How long an emulator may take to start and a machine to be restored.
    pub restore_patience: Duration,
    /// How long the guest's agent may take to answer.
    pub guest_patience: Duration,
    /// How long the guest may take to boot.
    pub boot_patience: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            overhead_mib: 192,
            reserve_mib: 256,
            disk_reserve_mib: 512,
            snapshot_buffers_mib: 512,
            spare_emulators: 0,
            processes: 128,
            cpu_margin_percent: 50,
            command_patience: Duration::from_secs(30),
            restore_patience: Duration::from_secs(60),
            guest_patience: Duration::from_secs(30),
            boot_patience: Duration::from_secs(180),
        }
    }
}

impl Limits {
    /// The control group's limits for a machine of this shape.
    ///
    /// Twice the guest's memory: where the shared memory has a hole, a first write takes a page of it besides the
    /// guest's own, and both count for who wrote. All machines of a template together fill each hole once.
    pub(crate) fn of_group(&self, shape: &MachineShape) -> CgroupLimits {
        CgroupLimits {
            memory_bytes: (2 * shape.memory_mib + self.overhead_mib) << 20,
            cpu_percent: u64::from(shape.vcpus) * 100 + self.cpu_margin_percent,
            processes: self.processes,
        }
    }
}

const FIRMWARE_DIRS: [&str; 3] = ["/usr/share/qemu", "/usr/share/seabios", "/usr/local/share/qemu"];
const MODULE_DIRS: [&str; 3] = ["/usr/lib/x86_64-linux-gnu/qemu", "/usr/lib64/qemu", "/usr/lib/qemu"];
const TCG_MODULE: &str = "accel-tcg-x86_64.so";

pub(crate) async fn prepare(config: QemuConfig) -> Result<Host, EngineError> {
    for directory in [&config.machines_dir, &config.runtime_dir] {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(EngineError::host(format!("make {}", directory.display())))?;
    }
    let canonical = |path: &Path| fs::canonicalize(path).map_err(EngineError::host(format!("find {}", path.display())));
    let machines_dir = canonical(&config.machines_dir)?;
    let (kernel, initramfs) = (canonical(&config.kernel)?, canonical(&config.initramfs)?);
    let bubblewrap = program(config.bubblewrap, "bwrap", "bubblewrap")?;
    let qemu_img = program(config.qemu_img, "qemu-img", "qemu-utils")?;
    let emulator = program(config.emulator, "qemu-system-x86_64", "qemu-system-x86")?;
    let firmware = firmware_dir(config.firmware_dir)?;
    let version = first_line(&emulator, "--version").await?;

    let modules: Vec<PathBuf> = MODULE_DIRS
        .iter()
        .map(|directory| Path::new(directory).join(TCG_MODULE))
        .filter(|path| path.exists())
        .collect();
    let root = RuntimeRoot::assemble(&canonical(&config.runtime_dir)?, &emulator, &firmware, &modules).await?;

    let digest = |path: &Path| memory::file_digest(path).map_err(EngineError::host(format!("read {}", path.display())));
    let owner = memory::bytes_digest(machines_dir.as_os_str().as_encoded_bytes())[..8].to_owned();
    let mut host = Host {
        bubblewrap,
        qemu_img,
        emulator,
        firmware,
        root,
        accelerator: Accelerator::Tcg,
        cgroups: Cgroups::detect(&owner),
        prefix: format!("stockade-{owner}-"),
        boot_id: process::boot_id().map_err(EngineError::host("read the host's boot id"))?,
        needs: Needs {
            emulator: version,
            machine_type: command_line::MACHINE_TYPE.to_owned(),
            accelerator: Accelerator::Tcg,
            cpu_model: String::new(),
            hardware_digest: String::new(),
            host_cpu: None,
            kernel_digest: digest(&kernel)?,
            initramfs_digest: digest(&initramfs)?,
            tsc_khz: None,
        },
        own: Mutex::default(),
        snapshot_buffers: Arc::new(Semaphore::new(config.limits.snapshot_buffers_mib as usize)),
        limits: config.limits,
        checked_files: CheckedFiles::default(),
        machines_dir,
        kernel,
        initramfs,
    };
    let accelerator = match config.accelerator {
        AcceleratorChoice::Tcg => Accelerator::Tcg,
        choice => match probe::kvm(&host, &config.runtime_dir.join("kvm.json")).await {
            probe::KvmVerdict::Works => Accelerator::Kvm,
            probe::KvmVerdict::Unusable(why) if choice == AcceleratorChoice::Kvm => {
                return Err(EngineError::Unsupported { missing: "KVM".to_owned(), why });
            }
            probe::KvmVerdict::Unusable(reason) => {
                tracing::info!(reason, "KVM is not usable here, guests are emulated");
                Accelerator::Tcg
            }
        },
    };
    host.accelerator = accelerator;
    host.needs.accelerator = accelerator;
    host.needs.cpu_model = command_line::cpu_model(accelerator).to_owned();
    host.needs.hardware_digest = command_line::hardware_digest(accelerator);
    match accelerator {
        Accelerator::Kvm => host.needs.host_cpu = Some(host_cpu()),
        Accelerator::Tcg | Accelerator::None => host.needs.tsc_khz = Some(clock::tsc_khz()),
    }
    Ok(host)
}

/// A program by its given path or from the search path.
fn program(given: Option<PathBuf>, name: &str, package: &str) -> Result<PathBuf, EngineError> {
    let found = match given {
        Some(path) => Some(path),
        None => {
            let path = std::env::var_os("PATH").unwrap_or_default();
            std::env::split_paths(&path)
                .chain(["/usr/bin", "/usr/local/bin"].map(PathBuf::from))
                .map(|directory| directory.join(name))
                .find(|path| path.is_file())
        }
    };
    found.filter(|path| path.is_file()).ok_or_else(|| EngineError::Unsupported {
        missing: name.to_owned(),
        why: format!("it is not installed; `apt-get install {package}` installs it"),
    })
}

fn firmware_dir(given: Option<PathBuf>) -> Result<PathBuf, EngineError> {
    let has_firmware = |directory: &PathBuf| directory.join("bios-microvm.bin").is_file();
    let found = match given {
        Some(directory) => Some(directory).filter(has_firmware),
        None => FIRMWARE_DIRS.iter().map(PathBuf::from).find(has_firmware),
    };
    found.ok_or_else(|| EngineError::Unsupported {
        missing: "bios-microvm.bin".to_owned(),
        why: "the emulator's firmware is not installed; `apt-get install qemu-system-data` installs it".to_owned(),
    })
}

async fn first_line(program: &Path, argument: &str) -> Result<String, EngineError> {
    let output = Command::new(program)
        .arg(argument)
        .output()
        .await
        .map_err(EngineError::host(format!("run {}", program.display())))?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().next().filter(|_| output.status.success()).map(str::to_owned).ok_or_else(|| {
        let why =
            format!("{} {argument} failed: {}", program.display(), String::from_utf8_lossy(&output.stderr).trim());
        EngineError::Unsupported { missing: program.display().to_string(), why }
    })
}

/// The host's processor as guests see it: model and features.
fn host_cpu() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let of = |key: &str| {
        text.lines().find_map(|line| line.strip_prefix(key)?.trim_start().strip_prefix(':')).map_or("", str::trim)
    };
    let features = memory::bytes_digest(of("flags").as_bytes());
    format!("{} (features {})", of("model name"), &features[..12])
}

/// An error of a task that should not have failed.
pub(crate) fn joined<T>(result: Result<io::Result<T>, tokio::task::JoinError>) -> io::Result<T> {
    result.map_err(io::Error::other)?
}
