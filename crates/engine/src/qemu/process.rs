//! Processes known by id *and* start time, so that a recycled id is never mistaken for a machine.
//!
//! An adopted machine is not our child: `wait` does not work for it, a pidfd does (it becomes readable
//! when the process has ended, whoever its parent is).

use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
};

use serde::{Deserialize, Serialize};
use tokio::io::{Interest, unix::AsyncFd};

/// A process of this boot of the host.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct ProcessId {
    /// Its id, in the host's pid namespace.
    pub(crate) pid: i32,
    /// When it started, in clock ticks since the host booted (field 22 of `/proc/<pid>/stat`).
    pub(crate) start_ticks: u64,
}

impl ProcessId {
    /// Names a process that runs now.
    pub(crate) fn of(pid: i32) -> io::Result<Self> {
        Ok(Self { pid, start_ticks: stat_fields(pid)?.start_ticks })
    }

    /// Whether this very process still runs (a zombie does not).
    pub(crate) fn is_alive(&self) -> bool {
        stat_fields(self.pid).is_ok_and(|stat| stat.start_ticks == self.start_ticks && stat.state != b'Z')
    }

    /// Processor time it has used, user and system, in microseconds.
    pub(crate) fn cpu_micros(&self) -> io::Result<u64> {
        let stat = stat_fields(self.pid)?;
        if stat.start_ticks != self.start_ticks || stat.state == b'Z' {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the process has ended"));
        }
        let ticks_per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok().flatten().unwrap_or(100);
        Ok(stat.cpu_ticks * 1_000_000 / ticks_per_second.unsigned_abs().max(1))
    }

    /// A descriptor for the process. `None`: it has ended.
    pub(crate) fn open(&self) -> io::Result<Option<PidFd>> {
        // SAFETY: a system call without pointers; it returns a new descriptor or -1.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, self.pid, 0) };
        if fd < 0 {
            let error = io::Error::last_os_error();
            return if error.raw_os_error() == Some(libc::ESRCH) { Ok(None) } else { Err(error) };
        }
        // SAFETY: `fd` was returned one line up and nobody else holds it.
        let fd = unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).map_err(io::Error::other)?) };
        // Looked at after the descriptor was taken: from here on the id cannot be recycled unnoticed.
        if !self.is_alive() {
            return Ok(None);
        }
        Ok(Some(PidFd { fd }))
    }
}

/// A descriptor for one process.
#[derive(Debug)]
pub(crate) struct PidFd {
    fd: OwnedFd,
}

impl PidFd {
    /// Sends SIGKILL. A process that has ended is fine.
    pub(crate) fn kill(&self) -> io::Result<()> {
        // SAFETY: the descriptor is open for the length of the call; no signal information is passed.
        let result = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.fd.as_raw_fd(),
                libc::SIGKILL,
                std::ptr::null::<libc::siginfo_t>(),
                0,
            )
        };
        if result < 0 {
            let error = io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::ESRCH) {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Returns when the process has ended. Cancel-safe.
    pub(crate) async fn wait(&self) -> io::Result<()> {
        // SAFETY: the borrowed descriptor stays open and the same for as long as the borrow lasts.
        let fd = unsafe { AsyncFd::register_with_interest(self.fd.as_fd(), Interest::READABLE) }?;
        let _ready = fd.readable().await?;
        Ok(())
    }
}

/// The host's boot id: process ids and start times of another boot mean nothing.
pub(crate) fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Every process there is, with its arguments. Processes that end meanwhile are left out.
pub(crate) fn processes_with_arguments() -> io::Result<Vec<(i32, Vec<String>)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Ok(pid) = entry?.file_name().to_string_lossy().parse::<i32>() else { continue };
        let Ok(arguments) = fs::read(format!("/proc/{pid}/cmdline")) else { continue };
        let arguments = arguments.split(|byte| *byte == 0).map(|text| String::from_utf8_lossy(text).into_owned());
        found.push((pid, arguments.collect()));
    }
    Ok(found)
}

struct Stat {
    state: u8,
    cpu_ticks: u64,
    start_ticks: u64,
}

fn stat_fields(pid: i32) -> io::Result<Stat> {
    parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat"))?)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/stat has an unknown form")))
}

fn parse_stat(text: &str) -> Option<Stat> {
    // The second field is the program's name in brackets and may hold anything, brackets and blanks too.
    let (_, rest) = text.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
    Some(Stat {
        state: *fields.first()?.as_bytes().first()?,
        cpu_ticks: number(11)? + number(12)?,
        start_ticks: number(19)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_name_with_brackets_does_not_shift_the_fields() {
        let text = "17 (a) S (b) R 1 2 3 4 5 6 7 8 9 10 100 20 13 14 15 16 17 18 4711 20 21";
        let stat = parse_stat(text).expect("a valid line");
        assert_eq!((stat.state, stat.cpu_ticks, stat.start_ticks), (b'R', 120, 4711));
    }

    #[tokio::test]
    async fn the_end_of_a_process_is_seen_and_its_id_no_longer_counts() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().expect("sleep starts");
        let process = ProcessId::of(i32::try_from(child.id()).expect("small")).expect("it runs");
        let descriptor = process.open().expect("opens").expect("it runs");
        descriptor.kill().expect("killed");
        descriptor.wait().await.expect("waited");
        child.wait().expect("reaped");
        assert!(!process.is_alive());
        assert!(process.open().expect("opens").is_none());
        descriptor.kill().expect("killing it again is fine");
    }
}
