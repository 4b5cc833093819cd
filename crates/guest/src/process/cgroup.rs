//! Control groups: the agent's own with a reserve, and one for each process below `user`.
//!
//! ```text
//! /sys/fs/cgroup/agent          memory.min, high cpu.weight
//! /sys/fs/cgroup/user           memory.max = what is free at boot - reserve, pids.max
//! /sys/fs/cgroup/user/p<n>      one process and all its descendants, whatever sessions they make; pids.max is
//!                               four fifths of the users'
//! ```

use std::{
    fs, io,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use nix::{
    fcntl::{OFlag, open},
    sys::stat::Mode,
};

pub(crate) const AGENT_GROUP: &str = "/sys/fs/cgroup/agent";
pub(crate) const USER_GROUP: &str = "/sys/fs/cgroup/user";

/// Makes groups for processes.
pub(crate) struct Cgroups {
    next: AtomicU64,
    /// How many tasks one process's group may hold, as text; `None` where the kernel does not count.
    tasks: Option<String>,
    /// Made ahead, so that a process need not wait for it.
    spare: Mutex<Option<Cgroup>>,
    /// Groups whose process has ended but that still held descendants when it did.
    left: Mutex<Vec<PathBuf>>,
}

/// The group of one process.
pub(crate) struct Cgroup {
    path: PathBuf,
    directory: OwnedFd,
}

impl Cgroups {
    /// `None` where init has made no group for users.
    pub(crate) fn open() -> Option<Self> {
        let all = fs::read_to_string(format!("{USER_GROUP}/pids.max")).ok();
        let tasks = all.and_then(|all| all.trim().parse::<u64>().ok()).map(|all| (all / 5 * 4).to_string());
        Path::new(USER_GROUP).is_dir().then(|| {
            let (spare, left) = <_>::default();
            let groups = Self { next: AtomicU64::new(1), tasks, spare, left };
            groups.make_spare();
            groups
        })
    }

    /// A group for a process to be born into.
    pub(super) fn take(&self) -> io::Result<Cgroup> {
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).take();
        spare.map_or_else(|| self.make(), Ok)
    }

    /// Makes the group of a process to come, unless there is one. Should that fail, the process makes its own.
    pub(super) fn make_spare(&self) {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.is_none() {
            *spare = self.make().ok();
        }
    }

    fn make(&self) -> io::Result<Cgroup> {
        let path = Path::new(USER_GROUP).join(format!("p{}", self.next.fetch_add(1, Ordering::Relaxed)));
        fs::create_dir(&path)?;
        let directory = open(&path, OFlag::O_DIRECTORY | OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())?;
        if let Some(tasks) = &self.tasks {
            fs::write(path.join("pids.max"), tasks)?;
        }
        Ok(Cgroup { path, directory })
    }

    /// Removes a group once it is empty: now, or when a later process ends.
    pub(super) fn discard(&self, group: PathBuf) {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        left.push(group);
        left.retain(|path| matches!(fs::remove_dir(path), Err(error) if error.raw_os_error() == Some(libc::EBUSY)));
    }
}

impl Cgroup {
    pub(super) fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// For `CLONE_INTO_CGROUP`.
    pub(super) fn directory_fd(&self) -> RawFd {
        self.directory.as_raw_fd()
    }

    /// Where a process writes itself to move in.
    pub(super) fn procs_path(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    /// Kills everything in the group with SIGKILL.
    pub(super) fn kill(&self) -> io::Result<()> {
        fs::write(self.path.join("cgroup.kill"), "1")
    }

    /// Whether the kernel killed something in the group for lack of memory.
    pub(super) fn was_out_of_memory(&self) -> bool {
        let events = fs::read_to_string(self.path.join("memory.events")).unwrap_or_default();
        events.lines().any(|line| line.strip_prefix("oom_kill ").is_some_and(|count| count.trim() != "0"))
    }
}
