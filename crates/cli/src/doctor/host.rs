//! Processor, memory, disk, data directory, clock.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use nix::{
    sys::statvfs::statvfs,
    unistd::{AccessFlags, access},
};

use super::{Check, as_root};

const MIB: u64 = 1 << 20;
/// A template (512 MiB) booting besides the build.
const LEAST_MEMORY_MIB: u64 = 1024;
const GOOD_MEMORY_MIB: u64 = 2048;
/// The base template and its build.
const LEAST_DISK_MIB: u64 = 4096;
const GOOD_DISK_MIB: u64 = 10240;

pub(super) fn processor() -> Check {
    match env::consts::ARCH {
        "x86_64" => {
            let count = std::thread::available_parallelism().map_or(1, usize::from);
            Check::ok("processor", format!("x86-64, {count} processors"))
        }
        other => Check::fail("processor", format!("{other}; only x86-64 is supported"), "use an x86-64 host"),
    }
}

pub(super) fn memory() -> Check {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = |line: &str| line.split_whitespace().nth(1).and_then(|number| number.parse::<u64>().ok());
    let available = text.lines().find(|line| line.starts_with("MemAvailable:")).and_then(kib).unwrap_or(0) / 1024;
    let finding = format!("{available} MiB available");
    let remedy = "end other programs, or give the host more memory";
    match available {
        GOOD_MEMORY_MIB.. => Check::ok("memory", finding),
        LEAST_MEMORY_MIB.. => Check::warn("memory", format!("{finding}: enough for a few sandboxes"), remedy),
        _ => Check::fail("memory", format!("{finding}, {LEAST_MEMORY_MIB} MiB needed"), remedy),
    }
}

pub(super) fn disk(data_dir: &Path) -> Check {
    let place = existing(data_dir);
    let free = match statvfs(&place) {
        Ok(stat) => stat.blocks_available() * stat.fragment_size() / MIB,
        Err(error) => {
            let finding = format!("cannot look at {}: {error}", place.display());
            return Check::fail("disk", finding, "name another --data-dir");
        }
    };
    let finding = format!("{free} MiB free in {}", place.display());
    let remedy = "free some space, or name a --data-dir on another disk";
    match free {
        GOOD_DISK_MIB.. => Check::ok("disk", finding),
        LEAST_DISK_MIB.. => {
            Check::warn("disk", format!("{finding}: enough for the base template and little more"), remedy)
        }
        _ => Check::fail("disk", format!("{finding}, {LEAST_DISK_MIB} MiB needed"), remedy),
    }
}

pub(super) fn data_dir(data_dir: &Path) -> Check {
    let place = existing(data_dir);
    let shown = data_dir.display();
    if !place.is_dir() {
        return Check::fail("data dir", format!("{} is no directory", place.display()), "name another --data-dir");
    }
    if access(&place, AccessFlags::W_OK | AccessFlags::X_OK).is_err() {
        let remedy = as_root(&format!("install --directory --owner=$USER {shown}"));
        return Check::fail("data dir", format!("{shown}: {} cannot be written", place.display()), remedy);
    }
    match crate::server::data_dir::holder(data_dir) {
        Some(pid) => Check::ok("data dir", format!("{shown}, in use by the server with pid {pid}")),
        None => Check::ok("data dir", format!("{shown} can be written")),
    }
}

pub(super) fn clock() -> Check {
    // SAFETY: all-zero is a valid timex: `modes` 0 asks and changes nothing.
    let mut timex: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: the address is that of a timex that lives for the call.
    let state = unsafe { libc::adjtimex(&raw mut timex) };
    let now = jiff::Timestamp::now();
    if now.as_second() < 1_735_689_600 {
        let remedy = as_root("timedatectl set-ntp true");
        return Check::fail("clock", format!("the clock says {now}: guests get it, and certificates fail"), remedy);
    }
    if state < 0 || timex.status & libc::STA_UNSYNC != 0 {
        let finding = "nothing keeps the clock right (no NTP); deadlines may come early or late when it is set";
        return Check::warn("clock", finding, as_root("apt-get install --yes systemd-timesyncd"));
    }
    Check::ok("clock", "kept right by NTP")
}

/// The path itself or the nearest directory above it that is there.
fn existing(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    path.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(Path::new("/")).to_owned()
}
