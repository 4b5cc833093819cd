//! The machine as a whole: who it is, how it does.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What the agent says of itself.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct AgentInfo {
    /// The protocol it speaks.
    pub protocol: u32,
    /// Its version.
    pub version: String,
    /// The kernel's boot id: another one means the guest really rebooted.
    pub boot_id: String,
    /// Milliseconds since boot, guest clock.
    pub uptime_ms: u64,
}

/// Makes a restored machine one of its own: clock, randomness, names, environment. All of it is done
/// when the answer comes; sending it again is harmless.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Identity {
    /// The sandbox's id.
    pub sandbox_id: String,
    /// The template's name or id.
    pub template_id: String,
    /// The host name to take.
    pub hostname: String,
    /// What programs know the machine by (`/etc/machine-id`): 32 hexadecimal digits, the same as long as the sandbox is.
    pub machine_id: String,
    /// The host's wall clock, nanoseconds since the epoch, read just before sending.
    pub unix_time_ns: u64,
    /// 32 random bytes or more, standard base64, for the kernel's generator (credited and re-keyed at once).
    pub entropy: String,
    /// Environment of every process.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// User of processes and files that name none.
    pub default_user: String,
    /// Directory of processes that name none; absent: the user's home.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_cwd: Option<String>,
    /// Small files to write as root (mode 0644, parents made): path → text.
    #[serde(default)]
    pub files: BTreeMap<String, String>,
    /// What has changed about its network; absent: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Network>,
}

/// What a machine is told of itself. `I`: an [`Identity`], owned or not.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Introduction<I = Identity> {
    /// Who it is.
    Identity(I),
    /// That it is who it was, and the host's wall clock, nanoseconds since the epoch: it stood still.
    Time(u64),
}

impl Identity {
    /// Whether a machine that was told `before`, and has run or stood still since, is told nothing new but the time.
    pub fn is_that_of(&self, before: &Self) -> bool {
        // All but the moment and the randomness, which only a copy has to have anew.
        let lasting = |identity: &Self| {
            let mut lasting = identity.clone();
            (lasting.unix_time_ns, lasting.entropy) = (0, String::new());
            lasting.network.iter_mut().for_each(|network| network.reset_connections = false);
            lasting
        };
        let resets = self.network.as_ref().is_some_and(|network| network.reset_connections);
        !resets && lasting(self) == lasting(before)
    }
}

/// What a machine is told about its network. Addresses are not among it: all machines have the same.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Network {
    /// The host knows of no connection of this machine: those it remembers are ended.
    #[serde(default)]
    pub reset_connections: bool,
    /// Signs for hosts the gateway answers for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority: Option<Authority>,
}

/// A certificate authority to be trusted by the guest's programs.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Authority {
    /// Its certificate as PEM.
    pub certificate: String,
    /// OpenSSL's checksum of its subject: the name directories of certificates list it under.
    pub subject_hash: String,
}

/// How the machine does, one sample.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Stats {
    /// Milliseconds since the epoch, guest clock.
    pub unix_ms: u64,
    /// Processors.
    pub cpu_count: u32,
    /// Processor time in use since the sample before, per cent of all processors.
    pub cpu_used_percent: f64,
    /// Bytes of memory.
    pub memory_total: u64,
    /// Bytes of memory in use, caches not counted.
    pub memory_used: u64,
    /// Bytes of page cache.
    pub memory_cache: u64,
    /// Bytes of the root file system.
    pub disk_total: u64,
    /// Bytes of it in use.
    pub disk_used: u64,
    /// Processes and threads.
    pub tasks: u64,
}
