//! A throwaway server: this very program, with a data directory of its own that shares built templates.

use std::{
    env,
    fs::{self, File},
    io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::Deserialize;
use stockade_model::Secret;
use tempfile::TempDir;
use tokio::{
    process::{Child, Command},
    time::{self, Instant},
};

use super::PAUSE;
use crate::{client::Client, commands::env::e2b_variables, failure::Failure, local_paths::Ready};

/// The first one may have to build the base template.
const START_TIMEOUT: Duration = Duration::from_secs(1800);
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(10);

pub(super) struct Throwaway {
    child: Child,
    kept: Kept,
    directory: TempDir,
    pub(super) client: Client,
    pub(super) accel: String,
}

/// What a server keeps ready.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Kept {
    /// Machines in its pool.
    pub(super) machines: usize,
    /// The most emulators that wait.
    pub(super) emulators: usize,
}

/// What the engine keeps of a machine, as far as it matters here.
#[derive(Debug, Deserialize)]
struct MachineRecord {
    #[serde(default)]
    is_complete: bool,
    processes: Option<Processes>,
}

impl MachineRecord {
    fn pid(&self) -> Option<i32> {
        self.processes.as_ref().map(|processes| processes.emulator.pid)
    }
}

#[derive(Debug, Deserialize)]
struct Processes {
    emulator: ProcessId,
}

#[derive(Debug, Deserialize)]
struct ProcessId {
    pid: i32,
}

/// What throwaway servers have in common with each other and with the server this user has, if there is one.
pub(super) struct Shared {
    pub(super) cache: PathBuf,
    /// Templates are made with the authority that their machines trust: another one's are made anew.
    authority: PathBuf,
    /// The first throwaway server's, where the user has no server.
    _own: Option<TempDir>,
}

const AUTHORITY: &str = "network-ca";
const AUTHORITY_FILES: [&str; 2] = ["ca.pem", "ca.key"];

impl Shared {
    pub(super) fn new(data_dir: &Path, cache: PathBuf) -> Result<Self, Failure> {
        let authority = data_dir.join(AUTHORITY);
        if is_authority(&authority) {
            return Ok(Self { cache, authority, _own: None });
        }
        let own = TempDir::with_prefix("stockade-bench-").map_err(|error| Failure::host("make a directory", error))?;
        Ok(Self { cache, authority: own.path().join(AUTHORITY), _own: Some(own) })
    }

    fn give_authority(&self, data_dir: &Path) -> Result<(), Failure> {
        copy_authority(&self.authority, &data_dir.join(AUTHORITY))
    }

    fn keep_authority(&self, data_dir: &Path) -> Result<(), Failure> {
        if is_authority(&self.authority) { Ok(()) } else { copy_authority(&data_dir.join(AUTHORITY), &self.authority) }
    }
}

fn is_authority(directory: &Path) -> bool {
    AUTHORITY_FILES.iter().all(|name| directory.join(name).is_file())
}

/// Copies it if it is there.
fn copy_authority(from: &Path, to: &Path) -> Result<(), Failure> {
    if !is_authority(from) {
        return Ok(());
    }
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(to);
    let copy = |name: &&str| fs::copy(from.join(name), to.join(name)).map(drop);
    let copied = made.and_then(|()| AUTHORITY_FILES.iter().try_for_each(copy));
    copied.map_err(|error| Failure::host(format!("copy {}", from.display()), error))
}

impl Throwaway {
    /// `more`: further arguments of `stockade up`.
    pub(super) async fn start(shared: &Shared, accel: &str, kept: Kept, more: &[&str]) -> Result<Self, Failure> {
        let directory =
            TempDir::with_prefix("stockade-bench-").map_err(|error| Failure::host("make a directory", error))?;
        let data_dir = directory.path().join("data");
        shared.give_authority(&data_dir)?;
        let program = env::current_exe().map_err(|error| Failure::host("find this program", error))?;
        let log = directory.path().join("log");
        let log_file = File::create(&log).map_err(|error| Failure::host(format!("make {}", log.display()), error))?;
        let mut command = Command::new(program);
        // The user's own settings are meant for another server.
        for (name, _) in env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("STOCKADE_")) {
            command.env_remove(name);
        }
        command.args(["up", "--http", "127.0.0.1:0", "--https", "127.0.0.1:0", "--no-self-check", "--accel", accel]);
        command
            .arg("--pool")
            .arg(kept.machines.to_string())
            .arg("--spare-emulators")
            .arg(kept.emulators.to_string())
            .arg("--data-dir")
            .arg(&data_dir)
            .arg("--template-cache")
            .arg(&shared.cache)
            .args(more);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log_file).kill_on_drop(true);
        let child = command.spawn().map_err(|error| Failure::host("start a server", error))?;
        let (child, ready) = wait_until_ready(child, &data_dir, &log).await?;
        shared.keep_authority(&data_dir)?;
        let client = Client::new(&ready.http_url, Secret::new(ready.read_key()?), None)?;
        Ok(Self { child, kept, directory, client, accel: ready.accel })
    }

    pub(super) fn data_dir(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    /// What E2B's SDKs need to find it.
    pub(super) fn e2b_variables(&self) -> Result<Vec<(&'static str, String)>, Failure> {
        let ready = Ready::read(&self.data_dir())?;
        let ready = ready.ok_or_else(|| Failure::new("bench_server", "the throwaway server has ended"))?;
        Ok(e2b_variables(&ready, &ready.read_key()?))
    }

    /// Machines, and how many emulators wait for one.
    fn machines(&self) -> (Vec<MachineRecord>, usize) {
        let all = self.records();
        let (machines, waiting): (Vec<_>, Vec<_>) = all.into_iter().partition(|record| record.is_complete);
        (machines, waiting.len())
    }

    fn records(&self) -> Vec<MachineRecord> {
        let Ok(entries) = fs::read_dir(self.data_dir().join("machines")) else { return Vec::new() };
        let read = |path: PathBuf| serde_json::from_slice(&fs::read(path.join("machine.json")).ok()?).ok();
        entries.filter_map(|entry| read(entry.ok()?.path())).collect()
    }

    /// Waits until exactly this many machines are there and complete: the pool is full and the killed are gone. And
    /// until there is nothing more to be started ahead of need.
    pub(super) async fn settle(&self, machines: usize) -> Result<(), Failure> {
        /// Emulators are started when nothing else has been for a second.
        const STILL: Duration = Duration::from_millis(1500);
        let deadline = Instant::now() + Duration::from_secs(60);
        let (mut seen, mut since) = (None, Instant::now());
        loop {
            let (all, waiting) = self.machines();
            if seen != Some(waiting) {
                (seen, since) = (Some(waiting), Instant::now());
            }
            let has_emulators = match self.kept.emulators {
                0 => waiting == 0,
                _ => since.elapsed() >= STILL,
            };
            if all.len() == machines && has_emulators {
                return Ok(());
            }
            if Instant::now() > deadline {
                let all = all.len();
                let message = format!(
                    "the server has {all} machines after a minute and {waiting} that are not, {machines} expected"
                );
                return Err(Failure::new("bench_unsettled", message));
            }
            time::sleep(POLL).await;
        }
    }

    /// Waits until the pool has no less than this many machines and has stopped growing or shrinking: it follows
    /// demand. No sandbox may be there.
    pub(super) async fn settle_pool(&self, least: usize) -> Result<(), Failure> {
        const STILL: Duration = Duration::from_secs(1);
        let deadline = Instant::now() + Duration::from_secs(120);
        let (mut seen, mut since) = (usize::MAX, Instant::now());
        loop {
            let (machines, waiting) = self.machines();
            let is_full = machines.len() >= least && waiting == 0;
            if !is_full || machines.len() != seen {
                (seen, since) = (machines.len(), Instant::now());
            } else if since.elapsed() >= STILL {
                return Ok(());
            }
            if Instant::now() > deadline {
                let message = format!("the pool has {seen} machines after two minutes and is still changing");
                return Err(Failure::new("bench_unsettled", message));
            }
            time::sleep(POLL).await;
        }
    }

    /// Waits until a sample can be taken: exactly this many machines, and quiet guests.
    pub(super) async fn quiet(&self, machines: usize) -> Result<(), Failure> {
        self.settle(machines).await?;
        time::sleep(PAUSE).await;
        Ok(())
    }

    /// The same where no machines are but those of a pool, which keeps no less than `least`; 0: there is none.
    pub(super) async fn quiet_pool(&self, least: usize) -> Result<(), Failure> {
        match least {
            0 => self.settle(0).await?,
            least => self.settle_pool(least).await?,
        }
        time::sleep(PAUSE).await;
        Ok(())
    }

    /// Private and proportional memory of each machine's emulator, in MiB.
    pub(super) fn memory(&self) -> Vec<Result<(f64, f64), String>> {
        self.machines().0.iter().filter_map(MachineRecord::pid).map(memory_of).collect()
    }

    /// The same of the emulators that wait.
    pub(super) fn memory_of_waiting(&self) -> Vec<Result<(f64, f64), String>> {
        let waiting = self.records().into_iter().filter(|record| !record.is_complete);
        waiting.filter_map(|record| record.pid()).map(memory_of).collect()
    }

    /// Processor time all machines have used, in seconds.
    pub(super) fn cpu_seconds(&self) -> f64 {
        self.machines().0.iter().filter_map(MachineRecord::pid).filter_map(cpu_seconds_of).sum()
    }

    /// Ends the sandboxes, then the server: its machines would outlive it.
    pub(super) async fn stop(mut self) -> Result<(), Failure> {
        for sandbox in self.client.sandboxes(&crate::client::ListQuery::default()).await? {
            self.client.kill(&sandbox.id).await?;
        }
        if let Some(pid) = self.child.id().and_then(|pid| i32::try_from(pid).ok()) {
            kill(Pid::from_raw(pid), Signal::SIGTERM).map_err(|error| Failure::host("stop the server", error))?;
        }
        let ended = time::timeout(STOP_TIMEOUT, self.child.wait()).await;
        ended
            .map_err(|_| Failure::new("bench_unsettled", "the server did not stop"))?
            .map(drop)
            .map_err(|error| Failure::host("stop the server", error))
    }
}

async fn wait_until_ready(mut child: Child, data_dir: &Path, log: &Path) -> Result<(Child, Ready), Failure> {
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        if let Some(ready) = Ready::read(data_dir)? {
            return Ok((child, ready));
        }
        let ended = child.try_wait().map_err(|error| Failure::host("wait for the server", error))?;
        if ended.is_some() || Instant::now() > deadline {
            let log = fs::read_to_string(log).unwrap_or_default();
            let last: Vec<_> = log.lines().rev().take(10).collect();
            let last: Vec<_> = last.into_iter().rev().collect();
            return Err(Failure::new(
                "bench_server",
                format!("the throwaway server did not come up:\n{}", last.join("\n")),
            ));
        }
        time::sleep(POLL).await;
    }
}

fn cpu_seconds_of(pid: i32) -> Option<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before them may hold anything; user and system time are the 14th and 15th field.
    let fields: Vec<_> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    let ticks = |at: usize| fields.get(at)?.parse::<f64>().ok();
    // SAFETY: no pointers are involved.
    let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64;
    Some((ticks(11)? + ticks(12)?) / per_second)
}

/// Private and proportional memory of a process, in MiB.
pub(super) fn memory_of(pid: i32) -> Result<(f64, f64), String> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = fs::read_to_string(&path).map_err(|error: io::Error| format!("{path}: {error}"))?;
    let mib = |names: &[&str]| {
        let kib = |line: &str| line.split_whitespace().nth(1).and_then(|number| number.parse::<f64>().ok());
        let lines = text.lines().filter(|line| names.iter().any(|name| line.starts_with(name)));
        lines.filter_map(kib).sum::<f64>() / 1024.0
    };
    Ok((mib(&["Private_Clean:", "Private_Dirty:"]), mib(&["Pss:"])))
}
