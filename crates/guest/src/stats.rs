//! How the machine does, from `/proc` and the root file system.

use std::{fs, sync::PoisonError};

use stockade_wire::machine::Stats;

use crate::{
    Agent,
    agent::unix_ms,
    failure::{Result, failed},
};

/// Processor time as the kernel counts it, in ticks.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct CpuSample {
    busy: u64,
    all: u64,
}

/// Takes one sample; processor use is that since the sample before (or since boot).
pub(crate) fn sample(agent: &Agent) -> Result<Stats> {
    let read = |path: &str| fs::read_to_string(path).map_err(failed(format_args!("read {path}")));
    let (cpu, cpu_count) = parse_cpu(&read("/proc/stat")?);
    let memory = read("/proc/meminfo")?;
    let load = read("/proc/loadavg")?;
    let before = agent.shared().cpu_sample.lock().unwrap_or_else(PoisonError::into_inner).replace(cpu);
    let before = before.unwrap_or_default();
    let elapsed = cpu.all.saturating_sub(before.all).max(1);
    let root =
        nix::sys::statvfs::statvfs("/").map_err(|errno| failed("read the root file system's size")(errno.into()))?;
    let total = meminfo(&memory, "MemTotal:");
    let disk_total = root.blocks() * root.fragment_size();
    Ok(Stats {
        unix_ms: unix_ms(),
        cpu_count,
        cpu_used_percent: cpu.busy.saturating_sub(before.busy) as f64 * 100.0 / elapsed as f64,
        memory_total: total,
        memory_used: total.saturating_sub(meminfo(&memory, "MemAvailable:")),
        memory_cache: meminfo(&memory, "Cached:"),
        disk_total,
        disk_used: disk_total - root.blocks_free() * root.fragment_size(),
        tasks: parse_tasks(&load),
    })
}

/// `cpu  user nice system idle iowait irq softirq steal ...`, then one line per processor.
fn parse_cpu(text: &str) -> (CpuSample, u32) {
    let mut sample = CpuSample::default();
    let mut count = 0;
    for line in text.lines().take_while(|line| line.starts_with("cpu")) {
        if !line.starts_with("cpu ") {
            count += 1;
            continue;
        }
        // Guest time (fields 9 and 10) is already part of user and nice.
        for (field, ticks) in line.split_ascii_whitespace().skip(1).take(8).enumerate() {
            let ticks: u64 = ticks.parse().unwrap_or(0);
            sample.all += ticks;
            if field != 3 && field != 4 {
                sample.busy += ticks;
            }
        }
    }
    (sample, count)
}

fn meminfo(text: &str, key: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    line.and_then(|rest| rest.split_ascii_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) << 10
}

/// `0.00 0.01 0.05 1/123 4567`
fn parse_tasks(text: &str) -> u64 {
    text.split_ascii_whitespace().nth(3).and_then(|field| field.split_once('/')?.1.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_leaves_out_idle_and_waiting() {
        let text = "cpu  10 5 20 100 50 1 2 3 0 0\ncpu0 10 5 20 100 50 1 2 3 0 0\nintr 1\n";
        assert_eq!(parse_cpu(text), (CpuSample { busy: 41, all: 191 }, 1));
    }

    #[test]
    fn memory_is_given_in_bytes_and_tasks_are_found() {
        assert_eq!(meminfo("MemTotal:  2 kB\nCached: 1 kB\n", "Cached:"), 1024);
        assert_eq!(parse_tasks("0.00 0.01 0.05 1/123 4567\n"), 123);
        assert_eq!(parse_tasks("rubbish"), 0);
    }
}
