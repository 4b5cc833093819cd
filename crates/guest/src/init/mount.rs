//! Mounts, before and after the root file system is there.

use std::{
    ffi::CString,
    fs, io,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink},
    path::Path,
};

use nix::mount::{MsFlags, mount};

use super::{InitError, cannot};

/// Where the root disk is mounted first.
pub(super) const NEW_ROOT: &str = "/newroot";

const SAFE: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV).union(MsFlags::MS_NOEXEC);

/// `/proc`, `/sys` and `/dev` of the initial file system, and something to print to.
pub(super) fn early() -> Result<(), InitError> {
    mount_at("proc", "/proc", "proc", SAFE, "")?;
    mount_at("sysfs", "/sys", "sysfs", SAFE, "")?;
    mount_at("devtmpfs", "/dev", "devtmpfs", MsFlags::MS_NOSUID, "mode=0755")?;
    open_console().map_err(cannot("open /dev/console"))
}

/// The kernel opens the console for process 1 only if the initial file system holds its device.
fn open_console() -> io::Result<()> {
    for fd in 0..3 {
        // SAFETY: plain system calls with a path that ends with NUL. The lowest free descriptor is the one
        // missing, as all below are open.
        unsafe {
            if libc::fcntl(fd, libc::F_GETFD) >= 0 {
                continue;
            }
            if libc::open(c"/dev/console".as_ptr(), libc::O_RDWR | libc::O_NOCTTY) < 0
                && libc::open(c"/dev/null".as_ptr(), libc::O_RDWR) < 0
            {
                return Err(io::Error::last_os_error());
            }
        }
    }
    Ok(())
}

/// Access times are not kept: each would be a block written, in every fork. Nor are tables of what the file system has
/// grown by cleared ahead of their use: that would go on for minutes in each machine, and fill its layer with zeros.
pub(super) fn root(device: &Path) -> Result<(), InitError> {
    let device = device.to_string_lossy();
    mount_at(&device, NEW_ROOT, "ext4", MsFlags::MS_NOATIME, "noinit_itable,no_prefetch_block_bitmaps")
}

/// Moves the mounts over, frees the initial file system's memory and makes the disk the root.
pub(super) fn switch_root() -> Result<(), InitError> {
    for name in ["proc", "sys", "dev"] {
        let to = format!("{NEW_ROOT}/{name}");
        make_dir(&to, 0o755)?;
        let moved = mount(Some(format!("/{name}").as_str()), to.as_str(), None::<&str>, MsFlags::MS_MOVE, None::<&str>);
        moved.map_err(|errno| cannot(format!("move /{name} to the root disk"))(errno.into()))?;
    }
    let initial = fs::metadata("/").map_err(cannot("look at the initial root"))?.dev();
    empty(Path::new("/"), initial);
    let step = |action: &'static str| move |errno: nix::Error| cannot(action)(errno.into());
    nix::unistd::chdir(NEW_ROOT).map_err(step("enter the root disk"))?;
    mount(Some("."), "/", None::<&str>, MsFlags::MS_MOVE, None::<&str>).map_err(step("make the disk the root"))?;
    nix::unistd::chroot(".").map_err(step("change the root"))?;
    nix::unistd::chdir("/").map_err(step("enter the new root"))
}

/// Removes what lies on the initial file system and nothing else. What stays costs memory, no more.
fn empty(directory: &Path, device: u64) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
        if metadata.dev() != device {
            continue;
        }
        if metadata.is_dir() {
            empty(&path, device);
            let _ = fs::remove_dir(&path);
        } else {
            let _ = fs::remove_file(&path);
        }
    }
}

/// What lies on top of the root disk.
pub(super) fn late() -> Result<(), InitError> {
    let nothing_special = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount_at("devpts", "/dev/pts", "devpts", MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC, "gid=5,mode=620,ptmxmode=666")?;
    mount_at("tmpfs", "/dev/shm", "tmpfs", nothing_special, "mode=1777")?;
    mount_at("tmpfs", "/run", "tmpfs", nothing_special, "mode=0755")?;
    make_dir("/run/lock", 0o1777)?;
    mount_at("cgroup2", "/sys/fs/cgroup", "cgroup2", SAFE, "")?;
    make_dir("/tmp", 0o1777)?;
    make_dir("/var/tmp", 0o1777)?;
    for (name, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        match symlink(target, name) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(cannot(format!("make {name}"))(error));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Makes a directory, or gives one that is there its mode.
fn make_dir(path: &str, mode: u32) -> Result<(), InitError> {
    let made = fs::DirBuilder::new().recursive(true).mode(mode).create(path);
    let made = made.and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(mode)));
    made.map_err(cannot(format!("make {path}")))
}

fn mount_at(source: &str, path: &str, kind: &str, flags: MsFlags, options: &str) -> Result<(), InitError> {
    // Only made where it is missing: what is there may be read-only or have a mode of its own.
    if !Path::new(path).is_dir() {
        make_dir(path, 0o755)?;
    }
    let options = CString::new(options).unwrap_or_default();
    match mount(Some(source), path, Some(kind), flags, Some(options.as_c_str())) {
        // The kernel mounts devtmpfs by itself where it is built to.
        Ok(()) | Err(nix::Error::EBUSY) => Ok(()),
        Err(errno) => Err(cannot(format!("mount {kind} {source} at {path}"))(errno.into())),
    }
}
