//! Whether KVM really works here.
//!
//! `/dev/kvm` may exist and still be unable to run a stock kernel: some hosts' KVM emulates a guest's
//! kernel code one instruction at a time, so a few bytes of test code run and a kernel never starts. So
//! the guests' own kernel is booted, in the jail guests get, until it starts its first program. The
//! verdict is kept for this boot of the host, this emulator and this kernel.

use std::{
    fs,
    os::fd::AsRawFd,
    path::Path,
    time::{Duration, Instant},
};

use nix::sys::memfd::{MFdFlags, memfd_create};
use serde::{Deserialize, Serialize};
use stockade_model::{Accelerator, MachineId, MachineShape};

use super::{
    Host, command_line,
    command_line::{Origin, RootDisk},
    jail::Mount,
    launch::{Launch, SHOWN_LINES, millis},
    machine_dir::{MachineDir, Record},
    memory, qemu_img,
    remains::{Remains, Undo},
};
use crate::EngineError;

const DEVICE: &str = "/dev/kvm";
/// What the kernel says when it has come all the way up. With KVM that takes well below a second.
const SIGN_OF_LIFE: &str = "Run /init as init process";
const PATIENCE: Duration = Duration::from_secs(10);
const SHAPE: MachineShape = MachineShape { vcpus: 1, memory_mib: 192, disk_mib: 1 };

/// What came of trying KVM.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KvmVerdict {
    /// A stock kernel runs.
    Works,
    /// It does not; why.
    Unusable(String),
}

#[derive(Deserialize, Serialize)]
struct Remembered {
    key: String,
    verdict: KvmVerdict,
}

/// Tries KVM, or remembers what came of it.
pub(crate) async fn kvm(host: &Host, memory_file: &Path) -> KvmVerdict {
    if let Err(error) = fs::metadata(DEVICE) {
        return KvmVerdict::Unusable(format!(
            "{DEVICE} cannot be found ({error}); load the kvm module, or enable nested virtualisation if this \
             host is itself a virtual machine"
        ));
    }
    if let Err(error) = fs::OpenOptions::new().read(true).write(true).open(DEVICE) {
        return KvmVerdict::Unusable(format!("{DEVICE} cannot be opened ({error}); add this user to its group"));
    }
    let key = memory::bytes_digest(
        format!("{} {} {} {SIGN_OF_LIFE}", host.boot_id, host.needs.emulator, host.needs.kernel_digest).as_bytes(),
    );
    let remembered = fs::read(memory_file).ok().and_then(|bytes| serde_json::from_slice::<Remembered>(&bytes).ok());
    if let Some(Remembered { verdict, .. }) = remembered.filter(|remembered| remembered.key == key) {
        return verdict;
    }
    let begin = Instant::now();
    let verdict = match boot(host).await {
        Ok(verdict) => verdict,
        Err(error) => KvmVerdict::Unusable(error.to_string()),
    };
    tracing::debug!(?verdict, ms = millis(begin.elapsed()), "KVM tried");
    let remembered = Remembered { key, verdict };
    let written = serde_json::to_vec(&remembered).map_err(std::io::Error::from);
    if let Err(error) = written.and_then(|bytes| memory::write_atomically(memory_file, &bytes)) {
        tracing::debug!(%error, "the verdict on KVM cannot be kept; it is tried again next time");
    }
    remembered.verdict
}

async fn boot(host: &Host) -> Result<KvmVerdict, EngineError> {
    let machine = MachineId::random();
    let directory = MachineDir::of(&host.machines_dir, &machine);
    let record = Record::new(host, &machine, directory.disk_dir());
    let mut undo = Undo::new(Remains::of_record(host, directory.clone(), &record));
    let result = run(host, &machine, &directory, record, &mut undo).await;
    undo.run().await;
    result
}

async fn run(
    host: &Host,
    machine: &MachineId,
    directory: &MachineDir,
    mut record: Record,
    undo: &mut Undo,
) -> Result<KvmVerdict, EngineError> {
    directory.create().map_err(EngineError::host("make a machine's directory"))?;
    directory.write_record(&record).map_err(EngineError::host("write the machine's record"))?;
    directory.add_kernel(&host.kernel, &host.initramfs).map_err(EngineError::host("copy the kernel"))?;
    qemu_img::create(&host.qemu_img, &directory.disk(), None, SHAPE.disk_mib).await?;
    directory.give_disk().map_err(EngineError::host("make the machine's disk"))?;
    record.cgroup = host
        .cgroups
        .create(machine.as_str(), &host.limits.of_group(&SHAPE))
        .map_err(EngineError::host("make the machine's control group"))?;
    let memory = memfd_create(c"stockade-probe", MFdFlags::MFD_CLOEXEC)
        .map_err(|error| EngineError::host("make memory")(error.into()))?;
    let memory = fs::File::from(memory);
    memory.set_len(SHAPE.memory_mib << 20).map_err(EngineError::host("make memory"))?;
    record.memory_fd = memory.as_raw_fd();
    let mount = |target: &str, is_writable| Mount::new(directory.disk_dir(), target, is_writable);
    let launch = Launch {
        directory,
        shape: SHAPE,
        accelerator: Accelerator::Kvm,
        origin: Origin::Boot { kernel_command_line: command_line::PROBE_COMMAND_LINE, keeps_memory: true },
        disk: &RootDisk::of_file("/machine/disk.qcow2"),
        mounts: vec![mount("/machine", true), mount(command_line::BOOT_DIR, false)],
        memory: &memory,
        patience: PATIENCE,
    };
    let launched = launch.run(host, &mut record, undo).await?;
    let said = |console: String| if console.is_empty() { "nothing".to_owned() } else { console };
    match tokio::time::timeout(PATIENCE, launched.console.shows(SIGN_OF_LIFE)).await {
        Ok(true) => Ok(KvmVerdict::Works),
        Ok(false) => Ok(KvmVerdict::Unusable(format!(
            "a stock kernel did not come up, the emulator ended: {}",
            said(launched.complaints.last_lines(SHOWN_LINES))
        ))),
        Err(_) => Ok(KvmVerdict::Unusable(format!(
            "a stock kernel did not come up within {PATIENCE:?} (paravirtual hosts cannot run one); it printed: {}",
            said(launched.console.last_lines(3))
        ))),
    }
}
