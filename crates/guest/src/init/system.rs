//! Names, network, limits.

use std::{fs, io, os::unix::fs::DirBuilderExt as _, path::Path};

use super::{InitError, cannot, say};
use crate::failure::check;

/// Files the agent itself may have open: pipes, files and connections of many requests.
const AGENT_FILES: u64 = 65_536;

/// What differs from machine to machine is kept here, in memory; a root file system may link to it.
const MEMORY: &str = "/run/stockade";

/// What wakes an idle kernel several times a second for nothing: each time costs an emulated machine a millisecond of
/// the host's processor, and a machine that is shared with hundreds the same.
const QUIET: [(&str, &str); 5] = [
    // Memory is compacted when it is asked for.
    ("vm/compaction_proactiveness", "0"),
    // Counters of each processor are added up when somebody reads them, else once a minute.
    ("vm/stat_interval", "60"),
    // A halted machine looks stuck to it when it goes on.
    ("kernel/watchdog", "0"),
    // There is one neighbour, and it never moves.
    ("net/ipv4/neigh/default/interval_probe_time_ms", "3600000"),
    ("net/ipv6/neigh/default/interval_probe_time_ms", "3600000"),
];

pub(super) fn set_up() -> Result<(), InitError> {
    loopback_up().map_err(cannot("bring up the loopback interface"))?;
    fs::DirBuilder::new().recursive(true).mode(0o755).create(MEMORY).map_err(cannot(format!("make {MEMORY}")))?;
    let hostname = fs::read_to_string("/etc/hostname").unwrap_or_default();
    let hostname = match hostname.trim() {
        "" => "stockade",
        name => name,
    };
    nix::unistd::sethostname(hostname).map_err(|errno| cannot("set the host name")(errno.into()))?;
    provide("/etc/hosts", "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n")?;
    if crate::network::set_up().map_err(cannot("set up the network interface"))? {
        crate::network::name_server().map_err(cannot("write /etc/resolv.conf"))?;
    } else {
        // Without a server the library asks 127.0.0.1, which refuses at once.
        provide("/etc/resolv.conf", "# This machine has no name server.\n")?;
    }
    // What a kernel lacks of these is not worth a machine.
    for (name, value) in [
        // A panic ends the machine at once, and the host sees it.
        ("kernel/panic", "-1"),
        ("kernel/panic_on_oops", "1"),
        // Build tools and editors watch whole trees.
        ("fs/inotify/max_user_watches", "524288"),
        ("fs/inotify/max_user_instances", "1024"),
        ("net/ipv4/ping_group_range", "0 2147483647"),
    ]
    .into_iter()
    .chain(QUIET)
    {
        if let Err(error) = fs::write(format!("/proc/sys/{name}"), value) {
            say(&format!("{name}: {error}"));
        }
    }
    fs::write("/proc/self/oom_score_adj", "-1000").map_err(cannot("protect the agent"))?;
    let limit = libc::rlimit { rlim_cur: AGENT_FILES, rlim_max: 524_288 };
    // SAFETY: `limit` lives over the call.
    check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }.into())
        .map_err(cannot("raise the limit of open files"))?;
    // Users' processes are bounded by their cgroup alone.
    let unlimited = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: as above.
    check(unsafe { libc::setrlimit(libc::RLIMIT_NPROC, &raw const unlimited) }.into())
        .map_err(cannot("lift the limit of processes"))?;
    be_patient().map_err(cannot("set the agent's scheduling"))?;
    // SAFETY: umask has no preconditions.
    unsafe { libc::umask(0o022) };
    Ok(())
}

/// The agent's weight would have it interrupt a program at each of its writes, and both would spend their time taking
/// turns. A batch task is scheduled when the program waits, ends, or has had its slice.
fn be_patient() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: `parameters` lives over the call.
    check(unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const parameters) }.into()).map(drop)
}

/// Writes a file where there is none, or only a link that leads nowhere.
fn provide(path: &str, text: &str) -> Result<(), InitError> {
    if Path::new(path).exists() {
        return Ok(());
    }
    let _ = fs::remove_file(path);
    fs::write(path, text).map_err(cannot(format!("write {path}")))
}

fn loopback_up() -> io::Result<()> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
    let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
    // SAFETY: all zero is a valid value of this plain struct.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b'l' as libc::c_char;
    request.ifr_name[1] = b'o' as libc::c_char;
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: `request` is a complete ifreq and lives over the call.
    check(unsafe { libc::ioctl(fd, libc::SIOCSIFFLAGS, &raw const request) }.into()).map(drop)
}
