//! A machine's directory on the host, and the record in it.
//!
//! ```text
//! machines/<id>/            the server's alone
//!   machine.json            what adopt and sweep need; written before the emulator is started
//!   control.sock, link.sock, console.sock, network.sock   bound by the server, listened to by the emulator
//!   memory.map              only where its memory is an image of its own: the pages that differ from the template's
//!   layers/                 all layers of its disk (layers.rs); the emulator may read them
//!   disk/                   the emulator's; all it may write to
//!     <layer>.qcow2         its own layer, under a second name
//!   snapshot.new/           a snapshot that is being taken; it gets its place when it is whole
//! ```
//!
//! The emulator cannot reach the record: what a sweep kills is never chosen by a guest. Nor does the
//! server follow a name in `disk/`: the emulator may have put anything there.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::AsRawFd,
        unix::{
            fs::{DirBuilderExt, MetadataExt, PermissionsExt},
            net::UnixListener,
        },
    },
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use stockade_model::MachineId;
use tokio::net::UnixStream;

use super::{
    Host,
    cgroup::Cgroup,
    command_line,
    jail::NOBODY,
    layers::{self, DiskChain, LayerId},
    memory,
    process::ProcessId,
};

/// The emulator's control channel.
pub(crate) const CONTROL: &str = "control.sock";
/// The guest link.
pub(crate) const LINK: &str = "link.sock";
/// The guest's console.
pub(crate) const CONSOLE: &str = "console.sock";
/// The guest's NIC.
pub(crate) const NETWORK: &str = "network.sock";

const RECORD: &str = "machine.json";

/// What is known of a machine.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Record {
    /// The machine.
    pub(crate) machine: MachineId,
    /// Whose name its processes and its control group carry, where that is not the machine's: its emulator was started
    /// before it was known for which.
    #[serde(default)]
    pub(crate) emulator: Option<MachineId>,
    /// The host's boot it runs in.
    pub(crate) boot_id: String,
    /// The template it comes from.
    pub(crate) template: PathBuf,
    /// The unfinished template this machine is booted for; removed with it.
    pub(crate) unfinished_template: Option<PathBuf>,
    /// Its control group.
    pub(crate) cgroup: Cgroup,
    /// bubblewrap and the emulator; `None` while starting.
    pub(crate) processes: Option<Processes>,
    /// Under which number the emulator holds the shared memory.
    pub(crate) memory_fd: i32,
    /// Whether it was restored completely.
    pub(crate) is_complete: bool,
    /// The layers of its disk; `None`: it has no layer of its own, as at the boot of a template.
    pub(crate) disk: Option<DiskChain>,
    /// What its memory's shared pages are those of.
    pub(crate) memory: MemoryBase,
}

impl Record {
    /// Of a machine that is to be started.
    pub(crate) fn new(host: &Host, machine: &MachineId, template: PathBuf) -> Self {
        Self {
            machine: machine.clone(),
            emulator: None,
            boot_id: host.boot_id.clone(),
            template,
            unfinished_template: None,
            cgroup: host.cgroups.name(machine.as_str()),
            processes: None,
            memory_fd: -1,
            is_complete: false,
            disk: None,
            memory: MemoryBase::default(),
        }
    }

    /// Whose name its processes and its control group carry.
    pub(crate) fn emulator(&self) -> &MachineId {
        self.emulator.as_ref().unwrap_or(&self.machine)
    }
}

/// What a machine's memory is made of besides its own pages.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum MemoryBase {
    /// The template's memory.
    #[default]
    Template,
    /// An image of the template's memory with a snapshot's pages in it, those in `memory.map`.
    Image,
    /// Nothing: it was booted from its disk.
    Zero,
    /// An image of nothing but a snapshot's pages.
    ZeroImage,
}

impl MemoryBase {
    /// Whether the machine's directory has a list of its image's pages.
    pub(crate) fn has_map(self) -> bool {
        matches!(self, Self::Image | Self::ZeroImage)
    }

    /// Whether it was booted from a disk rather than from the template.
    pub(crate) fn is_zero(self) -> bool {
        matches!(self, Self::Zero | Self::ZeroImage)
    }
}

/// The processes of a machine.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(crate) struct Processes {
    /// The one that made the jail and waits for the emulator.
    pub(crate) bubblewrap: ProcessId,
    /// The emulator.
    pub(crate) emulator: ProcessId,
}

/// A machine's directory.
#[derive(Clone, Debug)]
pub(crate) struct MachineDir {
    path: PathBuf,
}

impl MachineDir {
    /// The directory a machine has or would have.
    pub(crate) fn of(machines_dir: &Path, machine: &MachineId) -> Self {
        Self { path: machines_dir.join(machine.as_str()) }
    }

    /// Makes it; it must not exist.
    pub(crate) fn create(&self) -> io::Result<()> {
        let mut builder = fs::DirBuilder::new();
        builder.mode(0o700).create(&self.path)?;
        builder.create(self.disk_dir())?;
        give_to_nobody(&self.disk_dir())?;
        builder.create(self.layers_dir())?;
        // Nobody reads it, through the jail's mount alone.
        memory::set_mode(&self.layers_dir(), 0o755)
    }

    /// Makes it another machine's, which must have none.
    pub(crate) fn rename(&self, other: &Self) -> io::Result<()> {
        if other.path.exists() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        fs::rename(&self.path, &other.path)
    }

    /// The directory itself.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Where all layers of its disk are.
    pub(crate) fn layers_dir(&self) -> PathBuf {
        self.path.join("layers")
    }

    /// A layer of its disk.
    pub(crate) fn layer(&self, id: &LayerId) -> PathBuf {
        self.layers_dir().join(id.file_name())
    }

    /// Where a snapshot is put together.
    pub(crate) fn unfinished_snapshot(&self) -> PathBuf {
        self.path.join("snapshot.new")
    }

    /// The pages its image has besides the template's.
    pub(crate) fn memory_map(&self) -> PathBuf {
        self.path.join("memory.map")
    }

    /// Makes a layer that the emulator may write to. Repeatable.
    pub(crate) fn add_layer(&self, empty: &Path, id: &LayerId, below: Option<&LayerId>) -> io::Result<()> {
        let path = self.layer(id);
        layers::create(empty, &path, below)?;
        give_to_nobody(&path)?;
        fs::hard_link(path, self.disk_dir().join(id.file_name()))
    }

    /// Writes into the machine's own layer, which nothing has been written to, what lies below it.
    pub(crate) fn name_below(&self, disk: &DiskChain) -> io::Result<()> {
        match disk.frozen.last() {
            Some(below) => layers::name_below(&self.layer(&disk.own), &below.id),
            None => Ok(()),
        }
    }

    /// Takes the right to change a layer away from everyone.
    pub(crate) fn freeze_layer(&self, id: &LayerId) -> io::Result<()> {
        take_back(&self.layer(id))?;
        self.remove_file_of_disk(id)
    }

    /// Removes a layer that is not in use. Repeatable.
    pub(crate) fn remove_layer(&self, id: &LayerId) -> io::Result<()> {
        self.remove_file_of_disk(id)?;
        if_there(fs::remove_file(self.layer(id)))
    }

    fn remove_file_of_disk(&self, id: &LayerId) -> io::Result<()> {
        if_there(fs::remove_file(self.disk_dir().join(id.file_name())))
    }

    /// Bytes a layer takes.
    pub(crate) fn layer_bytes(&self, id: &LayerId) -> u64 {
        fs::symlink_metadata(self.layer(id)).map_or(0, |metadata| metadata.blocks() * 512)
    }

    /// The part of it that belongs to the emulator.
    pub(crate) fn disk_dir(&self) -> PathBuf {
        self.path.join("disk")
    }

    /// The one disk of a machine without layers.
    pub(crate) fn disk(&self) -> PathBuf {
        self.disk_dir().join("disk.qcow2")
    }

    /// Lets the emulator have the disk that is in place.
    pub(crate) fn give_disk(&self) -> io::Result<()> {
        fs::set_permissions(self.disk(), fs::Permissions::from_mode(0o600))?;
        give_to_nobody(&self.disk())
    }

    /// Removes what [`Self::add_kernel`] has put in place; a guest that is up needs it no more.
    pub(crate) fn remove_kernel(&self) -> io::Result<()> {
        [command_line::KERNEL, command_line::INITRAMFS]
            .into_iter()
            .try_for_each(|name| if_there(fs::remove_file(self.disk_dir().join(name))))
    }

    /// Puts copies of kernel and initial file system in place: the originals may be closed to nobody.
    pub(crate) fn add_kernel(&self, kernel: &Path, initramfs: &Path) -> io::Result<()> {
        for (from, name) in [(kernel, command_line::KERNEL), (initramfs, command_line::INITRAMFS)] {
            let copy = self.disk_dir().join(name);
            fs::copy(from, &copy)?;
            give_to_nobody(&copy)?;
        }
        Ok(())
    }

    /// Binds a socket that the emulator will listen to. Only this user can connect.
    pub(crate) fn bind(&self, name: &str) -> io::Result<UnixListener> {
        self.with_short_path(name, |path| UnixListener::bind(path))
    }

    /// Connects to a socket of the emulator; no wait is involved.
    pub(crate) fn connect(&self, name: &str) -> io::Result<UnixStream> {
        let stream = self.with_short_path(name, |path| std::os::unix::net::UnixStream::connect(path))?;
        stream.set_nonblocking(true)?;
        UnixStream::from_std(stream)
    }

    /// Connects to a socket of the emulator unless others are in line before us.
    pub(crate) async fn try_connect(&self, name: &str) -> io::Result<UnixStream> {
        let directory = File::open(&self.path)?;
        UnixStream::connect(format!("/proc/self/fd/{}/{name}", directory.as_raw_fd())).await
    }

    /// Socket names hold 107 bytes, directory names more: go through a descriptor.
    fn with_short_path<T>(&self, name: &str, act: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<T> {
        let directory = File::open(&self.path)?;
        act(Path::new(&format!("/proc/self/fd/{}/{name}", directory.as_raw_fd())))
    }

    /// Writes the record, whole or not at all.
    pub(crate) fn write_record(&self, record: &Record) -> io::Result<()> {
        // Not forced to the disk: after a power failure there is no machine it could be about.
        let temporary = self.path.join("machine.json.new");
        fs::write(&temporary, serde_json::to_vec(record)?)?;
        fs::rename(temporary, self.path.join(RECORD))
    }

    /// Reads the record; `None`: there is none.
    pub(crate) fn read_record(&self) -> io::Result<Option<Record>> {
        match fs::read(self.path.join(RECORD)) {
            Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Removes it with all that is in it. Repeatable.
    pub(crate) fn remove(&self) -> io::Result<()> {
        remove_tree(&self.path)
    }
}

/// Removes a directory that may not be there.
pub(crate) fn remove_tree(path: &Path) -> io::Result<()> {
    if_there(fs::remove_dir_all(path))
}

fn if_there(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Lets the emulator's user own a file, when that is another one than ours.
pub(crate) fn give_to_nobody(path: &Path) -> io::Result<()> {
    if nix::unistd::geteuid().is_root() {
        std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY))?;
    }
    Ok(())
}

/// Takes a file back, read-only for everyone.
pub(crate) fn take_back(path: &Path) -> io::Result<()> {
    if nix::unistd::geteuid().is_root() {
        std::os::unix::fs::chown(path, Some(0), Some(0))?;
    }
    fs::set_permissions(path, fs::Permissions::from_mode(0o444))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn sockets_work_below_directories_with_long_names() {
        let base = tempfile::tempdir().expect("a directory");
        let long = base.path().join("d".repeat(200));
        fs::create_dir(&long).expect("created");
        let directory = MachineDir::of(&long, &MachineId::random());
        directory.create().expect("created");
        let listener = directory.bind(LINK).expect("bound");
        let _stream = directory.connect(LINK).expect("connected");
        listener.accept().expect("accepted");
        directory.remove().expect("removed");
        directory.remove().expect("removing again is fine");
        assert!(!directory.path.exists());
    }
}
