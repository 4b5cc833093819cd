//! Shares of memory and processor: the agent keeps a reserve that no load of the users can take.

use std::fs;

use super::{InitError, cannot, say};
use crate::process::{AGENT_GROUP, USER_GROUP};

const ROOT: &str = "/sys/fs/cgroup";
/// Memory the users' processes cannot have.
const RESERVE: u64 = 48 << 20;
/// Of it, what is never taken from the agent.
const AGENT_MEMORY: u64 = 32 << 20;
const AGENT_WEIGHT: &str = "10000";

pub(super) fn set_up() -> Result<(), InitError> {
    for controller in ["cpu", "memory", "pids", "io"] {
        // A kernel without one of them runs, less well protected.
        if let Err(error) = fs::write(format!("{ROOT}/cgroup.subtree_control"), format!("+{controller}")) {
            say(&format!("no {controller} control: {error}"));
        }
    }
    for group in [AGENT_GROUP, USER_GROUP] {
        fs::create_dir_all(group).map_err(cannot(format!("make cgroup {group}")))?;
    }
    fs::write(format!("{AGENT_GROUP}/cgroup.procs"), "1").map_err(cannot("move the agent to its cgroup"))?;
    set(AGENT_GROUP, "memory.min", &AGENT_MEMORY.to_string());
    set(AGENT_GROUP, "cpu.weight", AGENT_WEIGHT);
    // Each process's group counts its own out-of-memory kills.
    set(USER_GROUP, "cgroup.subtree_control", "+memory");
    let total = memory_total();
    set(USER_GROUP, "memory.max", &total.saturating_sub(RESERVE).max(total / 2).to_string());
    set(USER_GROUP, "pids.max", &pids_max().to_string());
    Ok(())
}

fn set(group: &str, file: &str, value: &str) {
    if let Err(error) = fs::write(format!("{group}/{file}"), value) {
        say(&format!("{group}/{file} = {value}: {error}"));
    }
}

fn memory_total() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    line.and_then(|rest| rest.split_ascii_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) << 10
}

/// Three quarters of what the kernel would allow in all: the rest is for the kernel and the agent.
fn pids_max() -> u64 {
    let most = fs::read_to_string("/proc/sys/kernel/threads-max").unwrap_or_default();
    let most: u64 = most.trim().parse().unwrap_or(2048);
    (most / 4 * 3).clamp(256, 24_000)
}
