//! Shares of memory and processor: the agent keeps a reserve that no load of the users can take.

use std::fs;

use super::{InitError, cannot, say};
use crate::process::{AGENT_GROUP, USER_GROUP};

const ROOT: &str = "/sys/fs/cgroup";
/// Memory the users' processes cannot have, of what is free once the kernel and the agent run. Their
/// group has to run out before the machine does: its out-of-memory killer works among them alone.
const RESERVE: u64 = 48 << 20;
/// Of it, what is never taken from the agent.
const AGENT_MEMORY: u64 = 32 << 20;
const AGENT_WEIGHT: &str = "10000";
const MIN_TASKS: u64 = 256;
const MAX_TASKS: u64 = 24_000;
/// Memory a process or thread takes at least, so that the number of them is bounded before memory is
/// exhausted: a fork bomb that thrashes is worse than one that fails.
const TASK_MEMORY: u64 = 512 << 10;

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
    // Each process's group counts its own out-of-memory kills, gets its share of the processor however many
    // it is, and cannot have all of the users' tasks: a later command still finds some.
    set(USER_GROUP, "cgroup.subtree_control", "+memory +cpu +pids");
    let memory = memory_available();
    let memory = memory.saturating_sub(RESERVE).max(memory / 2);
    let tasks = (memory / TASK_MEMORY).clamp(MIN_TASKS, MAX_TASKS);
    set(USER_GROUP, "memory.max", &memory.to_string());
    set(USER_GROUP, "pids.max", &tasks.to_string());
    Ok(())
}

fn set(group: &str, file: &str, value: &str) {
    if let Err(error) = fs::write(format!("{group}/{file}"), value) {
        say(&format!("{group}/{file} = {value}: {error}"));
    }
}

fn memory_available() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    line.and_then(|rest| rest.split_ascii_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) << 10
}
