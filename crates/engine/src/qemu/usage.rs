//! What a machine holds, and what the host has left.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use stockade_model::MachineShape;

use super::{Limits, process::ProcessId};
use crate::{EngineError, MachineCounters, MachineUsage};

/// Reads what one emulator holds now.
pub(crate) fn read(emulator: &ProcessId, disk_bytes: u64) -> io::Result<MachineUsage> {
    if !emulator.is_alive() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "the emulator has ended"));
    }
    let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", emulator.pid))?;
    let bytes = |key: &str| field_kib(&rollup, key).unwrap_or(0) << 10;
    Ok(MachineUsage {
        private_bytes: bytes("Private_Clean:") + bytes("Private_Dirty:"),
        proportional_bytes: bytes("Pss:"),
        cpu_micros: emulator.cpu_micros()?,
        disk_bytes,
    })
}

/// What is counted of one emulator: unlike [`read`] a matter of microseconds.
pub(crate) fn counters(emulator: &ProcessId, disk_bytes: u64) -> io::Result<MachineCounters> {
    let cpu_micros = emulator.cpu_micros()?;
    let statm = fs::read_to_string(format!("/proc/{}/statm", emulator.pid))?;
    let pages = anonymous_pages(&statm).ok_or(io::ErrorKind::InvalidData)?;
    let page_bytes = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten().unwrap_or(4096);
    Ok(MachineCounters { cpu_micros, anonymous_bytes: pages * page_bytes.unsigned_abs(), disk_bytes })
}

/// All that is resident, less what is a file's (or shared memory's).
fn anonymous_pages(statm: &str) -> Option<u64> {
    let mut fields = statm.split_ascii_whitespace().skip(1).map(str::parse::<u64>);
    let (resident, shared) = (fields.next()?.ok()?, fields.next()?.ok()?);
    Some(resident.saturating_sub(shared))
}

/// Whether one more machine fits: memory it will need soon, with a reserve for the host, and disk.
///
/// Memory is shared with the template until it is written to, so a machine is not counted whole: its
/// overhead and a quarter of its memory must be free. A guest that takes more than the host has is
/// ended by its own control group or the kernel, never a neighbour by its doing alone.
///
/// `more_bytes`: what it brings with it besides, as the pages of a snapshot.
pub(crate) fn check_capacity(
    shape: &MachineShape,
    more_bytes: u64,
    limits: &Limits,
    machines_dir: &Path,
) -> Result<(), EngineError> {
    let needed = ((limits.overhead_mib + shape.memory_mib / 4 + limits.reserve_mib) << 20) + more_bytes;
    let available = available_memory().map_err(EngineError::host("read how much memory is left"))?;
    if available < needed {
        return Err(no_capacity("memory", needed, available));
    }
    check_disk(0, limits, machines_dir)
}

/// Of a child's memory this part is expected to become its own soon: it goes on with what its parent did, and shares
/// all that stays as it was. A single machine, of which nothing is known, is counted with a quarter.
const OWN_PART_OF_CHILD: u64 = 16;
/// The emulator's own memory in a child that has just been started, in MiB: what it translates comes later.
const CHILD_OVERHEAD_MIB: u64 = 48;

/// Whether so many children of one snapshot fit: its pages once, and of each child what will be its own.
pub(crate) fn check_fork_capacity(
    shape: &MachineShape,
    count: u32,
    snapshot_bytes: u64,
    limits: &Limits,
    machines_dir: &Path,
) -> Result<(), EngineError> {
    // Once written and once in memory, for as long as the fork takes.
    check_disk(snapshot_bytes, limits, machines_dir)?;
    let needed = fork_bytes(shape, count, snapshot_bytes, limits);
    let available = available_memory().map_err(EngineError::host("read how much memory is left"))?;
    if available < needed {
        return Err(no_capacity("memory", needed, available));
    }
    Ok(())
}

fn fork_bytes(shape: &MachineShape, count: u32, snapshot_bytes: u64, limits: &Limits) -> u64 {
    let child_mib = CHILD_OVERHEAD_MIB.min(limits.overhead_mib) + shape.memory_mib / OWN_PART_OF_CHILD;
    let all_mib = u64::from(count).saturating_mul(child_mib).saturating_add(limits.reserve_mib);
    (all_mib << 20).saturating_add(snapshot_bytes)
}

/// Whether so many bytes fit on the disk, with the reserve left.
pub(crate) fn check_disk(bytes: u64, limits: &Limits, machines_dir: &Path) -> Result<(), EngineError> {
    let disk = nix::sys::statvfs::statvfs(machines_dir)
        .map_err(|error| EngineError::host(format!("look at the disk of {}", machines_dir.display()))(error.into()))?;
    let available = disk.blocks_available() * disk.fragment_size();
    let needed = (limits.disk_reserve_mib << 20) + bytes;
    if available < needed {
        return Err(no_capacity("disk", needed, available));
    }
    Ok(())
}

/// Whether so much memory can be taken for a moment without touching the reserve.
pub(crate) fn has_memory(bytes: u64, limits: &Limits) -> bool {
    available_memory().is_ok_and(|available| available >= bytes + (limits.reserve_mib << 20))
}

fn no_capacity(resource: &'static str, needed: u64, available: u64) -> EngineError {
    let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
    EngineError::NoCapacity { resource, needed: mib(needed), available: mib(available) }
}

/// What the host and the control groups above us leave.
fn available_memory() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let host = field_kib(&text, "MemAvailable:").ok_or(io::ErrorKind::InvalidData)? << 10;
    Ok(own_group_memory().map_or(host, |group| group.min(host)))
}

/// Memory left below the limit of the control group this process is in; `None`: no limit.
fn own_group_memory() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let find = |controller: &str| {
        groups.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            (parts.next()? == controller).then(|| parts.next())?
        })
    };
    let read = |directory: &Path, name: &str| fs::read_to_string(directory.join(name)).ok()?.trim().parse::<u64>().ok();
    let (directory, limit, usage) = match find("memory") {
        Some(path) => {
            let directory = PathBuf::from(format!("/sys/fs/cgroup/memory{path}"));
            (directory, "memory.limit_in_bytes", "memory.usage_in_bytes")
        }
        None => (PathBuf::from(format!("/sys/fs/cgroup{}", find("")?)), "memory.max", "memory.current"),
    };
    let limit = read(&directory, limit)?;
    let used = read(&directory, usage)?;
    // Page cache counts as used but gives way; it is seen in the host's own number.
    let cache = fs::read_to_string(directory.join("memory.stat")).ok().and_then(|text| {
        let of = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.trim().parse::<u64>().ok());
        of("total_inactive_file ").or_else(|| of("inactive_file "))
    });
    Some(limit.saturating_sub(used.saturating_sub(cache.unwrap_or(0))))
}

fn field_kib(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key))?.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_by_their_whole_name() {
        let text = "SwapPss: 7 kB\nPss:   1234 kB\nPss_Anon: 5 kB\n";
        assert_eq!(field_kib(text, "Pss:"), Some(1234));
        assert_eq!(field_kib(text, "Private_Dirty:"), None);
    }

    #[test]
    fn what_is_no_files_is_counted_and_a_look_at_every_page_agrees() {
        assert_eq!(anonymous_pages("900 100 40 1 0 7 0\n"), Some(60));
        assert_eq!(anonymous_pages("900 40 100 1 0 7 0\n"), Some(0));
        assert!(["", "900", "900 100", "a b c"].iter().all(|strange| anonymous_pages(strange).is_none()));
        let this = ProcessId::of(std::process::id().try_into().expect("a process id")).expect("this process");
        let held = std::hint::black_box(vec![1_u8; 32 << 20]);
        let (counted, seen) = (counters(&this, 7).expect("it runs"), read(&this, 7).expect("it runs"));
        drop(held);
        assert!(counted.anonymous_bytes >= 32 << 20 && counted.disk_bytes == 7, "{counted:?}");
        // Files only this process maps are its own, too; the kernel counts pages in batches.
        assert!(counted.anonymous_bytes.abs_diff(seen.private_bytes) < 16 << 20, "{counted:?} {seen:?}");
    }

    #[test]
    fn children_share_what_their_parent_held() {
        let shape = MachineShape { vcpus: 2, memory_mib: 512, disk_mib: 1024 };
        let limits = Limits::default();
        let parent = 300 << 20;
        let of = |count| fork_bytes(&shape, count, parent, &limits);
        // The parent's pages count once, whatever the number of children.
        assert_eq!(of(8) - of(7), of(2) - of(1));
        assert_eq!((of(2) - of(1)) >> 20, 80);
        assert_eq!(of(1) >> 20, 80 + 300 + limits.reserve_mib);
        assert!(check_fork_capacity(&shape, u32::MAX, 0, &limits, Path::new("/")).is_err());
    }

    #[test]
    fn a_machine_larger_than_the_host_is_refused_with_numbers() {
        let shape = MachineShape { vcpus: 1, memory_mib: 1 << 30, disk_mib: 1024 };
        let error = check_capacity(&shape, 0, &Limits::default(), Path::new("/")).expect_err("too large");
        assert!(error.to_string().starts_with("not enough memory on this host: 268"), "{error}");
    }
}
