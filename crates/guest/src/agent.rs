//! What the agent knows: where it runs, who it serves by default, which processes it keeps.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
};

use stockade_wire::{
    PROTOCOL,
    machine::{AgentInfo, Authority},
    process::SignalRequest,
};

use crate::{
    account::{self, Account},
    failure::Result,
    held::Held,
    network::Trusted,
    process::{Cgroups, Processes},
    stats::CpuSample,
    watch::Watches,
};

const SOURCES_OF_NAMES: &str = "/etc/nsswitch.conf";

/// Whether these sources of names have one that knows the machine's own.
fn names_itself(sources: &str) -> bool {
    let hosts = sources.lines().filter_map(|line| line.trim_start().strip_prefix("hosts:"));
    hosts.flat_map(str::split_whitespace).any(|source| source == "myhostname")
}

/// The agent's state. Clones share it.
#[derive(Clone)]
pub struct Agent {
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) place: Place,
    pub(crate) settings: RwLock<Settings>,
    pub(crate) processes: Processes,
    pub(crate) watches: Watches,
    pub(crate) cpu_sample: Mutex<Option<CpuSample>>,
    pub(crate) held: Held,
    /// Somebody had something done in this machine.
    used: AtomicBool,
    /// The library finds the machine's own name without a line in `/etc/hosts`.
    pub(crate) resolves_own_name: bool,
    /// The authority this machine was made to trust, and what programs are told of it.
    pub(crate) trusted: Mutex<Option<(Authority, Trusted)>>,
}

/// Where the agent runs.
pub(crate) enum Place {
    /// In a machine of its own, as root.
    Machine(Option<Cgroups>),
    /// As an ordinary program on somebody's host; all users are this account.
    Hosted(Account),
}

/// What the identity sets.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) default_user: String,
    pub(crate) default_cwd: Option<String>,
}

impl Agent {
    /// An agent that is root in a machine and may change all of it.
    pub fn machine() -> Self {
        Self::new(Place::Machine(Cgroups::open()), "root".to_owned())
    }

    /// An agent that runs as an ordinary program: the default user, whatever its name, is the user
    /// the program runs as, with `home_dir` as home; clock, host name, random pool and cgroups are
    /// left alone.
    pub fn hosted(home_dir: impl Into<PathBuf>) -> Self {
        // SAFETY: these calls have no preconditions and cannot fail.
        let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
        let name = account::name_of(uid).unwrap_or_else(|| uid.to_string());
        let account = Account {
            name: name.clone(),
            uid,
            gid,
            groups: vec![gid],
            home: home_dir.into().to_string_lossy().into_owned(),
            shell: "/bin/sh".to_owned(),
            is_foreign: false,
        };
        Self::new(Place::Hosted(account), name)
    }

    /// Kills every process, as the end of a machine would. For an agent that is only hosted.
    pub fn end(&self) {
        let running = self.list_processes().processes.into_iter().filter(|process| process.exit.is_none());
        for process in running {
            let selector = crate::process::Selector::Pid(process.pid);
            if let Ok(process) = self.find_process(&selector) {
                // It may have ended by itself in between.
                process.signal(SignalRequest { signal: libc::SIGKILL, main_only: false }).ok();
            }
        }
    }

    fn new(place: Place, default_user: String) -> Self {
        let settings = Settings { env: BTreeMap::new(), default_user, default_cwd: None };
        let shared = Shared {
            place,
            settings: RwLock::new(settings),
            processes: Processes::default(),
            watches: Watches::default(),
            cpu_sample: Mutex::new(None),
            held: Held::default(),
            used: AtomicBool::new(false),
            resolves_own_name: names_itself(&std::fs::read_to_string(SOURCES_OF_NAMES).unwrap_or_default()),
            trusted: Mutex::new(None),
        };
        Self { shared: Arc::new(shared) }
    }

    pub(crate) fn info(&self) -> AgentInfo {
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        AgentInfo {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            boot_id: boot_id.trim().to_owned(),
            uptime_ms: uptime_ms(),
        }
    }

    pub(crate) fn settings(&self) -> Settings {
        self.shared.settings.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The account a request names, or the default one.
    pub(crate) fn account(&self, name: Option<&str>) -> Result<Account> {
        let settings = self.shared.settings.read().unwrap_or_else(PoisonError::into_inner);
        let name = name.filter(|name| !name.is_empty()).unwrap_or(&settings.default_user);
        match &self.shared.place {
            Place::Machine(_) => {
                let mut account = account::find(name)?;
                account.is_foreign = account.uid != 0;
                Ok(account)
            }
            Place::Hosted(own) => {
                if name != own.name && name != settings.default_user {
                    account::find(name)?;
                }
                Ok(Account { name: name.to_owned(), ..own.clone() })
            }
        }
    }

    /// Whether the agent was ever asked to start something: that, or what it has started, may still run.
    pub(crate) fn has_processes(&self) -> bool {
        self.shared.processes.are_any()
    }

    /// Somebody has something done that may change any file.
    pub(crate) fn note_use(&self) {
        self.shared.used.store(true, Ordering::Relaxed);
    }

    pub(crate) fn was_used(&self) -> bool {
        self.shared.used.load(Ordering::Relaxed)
    }

    pub(crate) fn is_machine(&self) -> bool {
        matches!(self.shared.place, Place::Machine(_))
    }

    pub(crate) fn cgroups(&self) -> Option<&Cgroups> {
        match &self.shared.place {
            Place::Machine(cgroups) => cgroups.as_ref(),
            Place::Hosted(_) => None,
        }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

fn uptime_ms() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a valid place for the answer.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut now) };
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// Milliseconds since the epoch.
pub(crate) fn unix_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_that_knows_the_machines_own_name_is_found() {
        assert!(names_itself("passwd: files\nhosts: files myhostname dns\n"));
        assert!(names_itself("  hosts:\tfiles mdns4_minimal [NOTFOUND=return] dns myhostname"));
        for without in ["", "hosts: files dns", "# hosts: myhostname", "networks: myhostname"] {
            assert!(!names_itself(without), "{without}");
        }
    }
}
