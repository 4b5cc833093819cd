//! Work that may block, on threads of its own.
//!
//! File systems in a guest can stand still (a FUSE file system whose server hangs, a disk that is busy),
//! so nothing that touches a path of the user's runs on the thread that serves the link. The runtime's
//! pool is small ([`crate::init`] bounds it); its threads are reused and go away when idle.
//!
//! Handing work to a thread and back costs about a millisecond under emulation, a third of a small request.
//! So short work ([`quick`], [`quick_as`]) runs at once while no file system that could stand still is
//! mounted; the kernel says when the mounts have changed.

use std::{
    fs::File,
    io::Read,
    os::fd::AsRawFd,
    sync::{Mutex, PoisonError},
};

use stockade_wire::{ErrorBody, ErrorCode};

use crate::{account::Account, failure::Result};

/// Runs blocking work with the agent's own rights.
pub(crate) async fn run<T, F>(work: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(_) => Err(ErrorBody::new(ErrorCode::Internal, "the agent failed at this request")),
    }
}

/// Runs work that is short unless a file system stands still, with the agent's own rights.
pub(crate) async fn quick<T, F>(work: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    if MOUNTS.are_local() { work() } else { run(work).await }
}

/// As [`quick`], with an account's rights to files.
pub(crate) async fn quick_as<T, F>(account: &Account, work: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    if !MOUNTS.are_local() {
        return run_as(account, work).await;
    }
    let _rights = account.is_foreign.then(|| Rights::take(account)).transpose()?;
    work()
}

static MOUNTS: Mounts = Mounts(Mutex::new(None));

/// What is known of this machine's mounts.
struct Mounts(Mutex<Option<Known>>);

struct Known {
    table: File,
    are_local: bool,
}

/// File systems that answer whatever happens outside of this machine's kernel.
const LOCAL: &[&str] = &[
    "cgroup",
    "cgroup2",
    "devpts",
    "devtmpfs",
    "ext4",
    "overlay",
    "proc",
    "ramfs",
    "rootfs",
    "securityfs",
    "sysfs",
    "tmpfs",
];

impl Mounts {
    fn are_local(&self) -> bool {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.as_ref().is_none_or(Known::has_changed) {
            *known = Known::read();
        }
        known.as_ref().is_some_and(|known| known.are_local)
    }
}

impl Known {
    fn read() -> Option<Self> {
        let mut table = File::open("/proc/self/mounts").ok()?;
        let mut text = String::new();
        table.read_to_string(&mut text).ok()?;
        let are_local = text.lines().all(|line| line.split(' ').nth(2).is_some_and(|kind| LOCAL.contains(&kind)));
        Some(Self { table, are_local })
    }

    /// The kernel raises an error condition on the open table once for each change.
    fn has_changed(&self) -> bool {
        let mut state = libc::pollfd { fd: self.table.as_raw_fd(), events: libc::POLLPRI, revents: 0 };
        // SAFETY: one live element; a timeout of 0 never waits.
        unsafe { libc::poll(&raw mut state, 1, 0) != 0 }
    }
}

/// Runs blocking work with an account's rights to files.
pub(crate) async fn run_as<T, F>(account: &Account, work: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    if !account.is_foreign {
        return run(work).await;
    }
    let account = account.clone();
    run(move || {
        let _rights = Rights::take(&account)?;
        work()
    })
    .await
}

/// This thread's file rights while it works for somebody. Linux keeps credentials per thread; the raw
/// system calls change only the caller's. Leaving user 0 for file access also drops the file
/// capabilities (`CAP_DAC_OVERRIDE`, `CAP_CHOWN`, ...), and coming back restores them.
struct Rights;

impl Rights {
    fn take(account: &Account) -> Result<Self> {
        let rights = Self;
        if set(account.uid, account.gid, &account.groups) {
            return Ok(rights);
        }
        Err(ErrorBody::new(ErrorCode::Internal, format!("cannot take the rights of user '{}'", account.name)))
    }
}

impl Drop for Rights {
    fn drop(&mut self) {
        // A thread with somebody's rights must never serve somebody else.
        if !set(0, 0, &[0]) {
            std::process::abort();
        }
    }
}

/// Sets all three and reads them back: setfsuid does not tell success from failure.
fn set(uid: u32, gid: u32, groups: &[u32]) -> bool {
    // SAFETY: raw calls with values and one slice that outlives them; they change this thread only.
    unsafe {
        if uid == 0 {
            libc::syscall(libc::SYS_setfsuid, 0);
        }
        if libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) != 0 {
            return false;
        }
        libc::syscall(libc::SYS_setfsgid, gid);
        libc::syscall(libc::SYS_setfsuid, uid);
        libc::syscall(libc::SYS_setfsgid, -1i32) == i64::from(gid)
            && libc::syscall(libc::SYS_setfsuid, -1i32) == i64::from(uid)
    }
}
