//! A sandbox and the states it goes through.
//!
//! ```text
//! creating --> running <---------------- resuming
//!     |         |  ^ |                    ^   |
//!     |         |  | +--> pausing --+     |   v
//!     v         |  |         |  ^   +--> paused (standby, hibernated, archived)
//!   failed      |  +---------+  |   +--> stopped (disk only)
//!               |     (failed)  +---------+ (to a deeper tier)
//!               |
//!               +--> killing --> gone      every living state may be killed; one whose machine has
//!                                          ended by itself is `gone` at once
//! ```
//!
//! `failed` and `gone` are final and keep a record of when and why. A standby machine is a halted process,
//! so going there and back is a matter of milliseconds and leaves out `pausing` and `resuming` in the record.
//! The deadline runs while a sandbox is running and at no other time.

use std::{collections::BTreeMap, fmt, str::FromStr, time::Duration};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{ApiKeyId, MachineId, MachineShape, SandboxId, Secret, SnapshotId, TemplateId, WorkspaceId};

/// Where a sandbox is in its life.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SandboxState {
    /// A machine is being made for it.
    Creating,
    /// It takes commands.
    Running,
    /// What it holds is being put away.
    Pausing,
    /// It stands still, memory included; [`Sandbox::tier`] says where that is kept.
    Paused,
    /// It is being brought back.
    Resuming,
    /// It has been shut down; its disk is kept and boots when it is started again.
    Stopped,
    /// It could not be made.
    Failed,
    /// It is being ended.
    Killing,
    /// It has ended.
    Gone,
}

/// A step that is not in the diagram.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("a sandbox that is {from} cannot become {to}")]
pub struct TransitionError {
    /// The state it is in.
    pub from: SandboxState,
    /// The state asked for.
    pub to: SandboxState,
}

impl SandboxState {
    /// All states, in the order of a life.
    pub const ALL: [Self; 9] = [
        Self::Creating,
        Self::Running,
        Self::Pausing,
        Self::Paused,
        Self::Resuming,
        Self::Stopped,
        Self::Failed,
        Self::Killing,
        Self::Gone,
    ];

    /// Whether nothing can follow.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Failed | Self::Gone)
    }

    /// The state after a step.
    ///
    /// # Errors
    /// The diagram has no such step.
    pub fn step(self, to: Self) -> Result<Self, TransitionError> {
        use SandboxState::{Creating, Failed, Gone, Killing, Paused, Pausing, Resuming, Running, Stopped};
        match (self, to) {
            (Creating, Running | Failed | Killing)
            | (Running, Pausing | Paused | Killing | Gone)
            | (Pausing, Running | Paused | Stopped | Killing | Gone)
            | (Paused, Pausing | Resuming | Running | Killing | Gone)
            | (Resuming, Running | Paused | Stopped | Killing | Gone)
            | (Stopped, Resuming | Running | Killing | Gone)
            | (Killing, Gone) => Ok(to),
            (from, to) => Err(TransitionError { from, to }),
        }
    }

    /// The state's word, as in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Running => "running",
            Self::Pausing => "pausing",
            Self::Paused => "paused",
            Self::Resuming => "resuming",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
            Self::Killing => "killing",
            Self::Gone => "gone",
        }
    }
}

/// A word that names no state.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "{} is not a state of a sandbox: expected {}",
    crate::quoted(text),
    SandboxState::ALL.map(SandboxState::as_str).join(", ")
)]
pub struct UnknownState {
    text: String,
}

impl FromStr for SandboxState {
    type Err = UnknownState;

    fn from_str(text: &str) -> Result<Self, UnknownState> {
        Self::ALL.into_iter().find(|state| state.as_str() == text).ok_or_else(|| UnknownState { text: text.to_owned() })
    }
}

impl fmt::Display for SandboxState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Why a sandbox is no more.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum EndCause {
    /// A client asked for it.
    Killed {
        /// With which key.
        key: ApiKeyId,
    },
    /// Its deadline passed.
    Expired,
    /// Its guest powered off, rebooted or panicked.
    GuestEnded,
    /// The host ran out of memory and its machine was chosen.
    OutOfMemory,
    /// Its emulator ended unexpectedly.
    Crashed,
    /// Its machine was no longer there when the server came back.
    HostLost,
    /// It could not be made.
    CreateFailed,
    /// Nobody used it for as long as its rules allow.
    Idle,
    /// It took the place of the sandbox it was forked from.
    Promoted {
        /// Under which id it lives on.
        into: SandboxId,
    },
}

impl EndCause {
    /// Its word, the same as in JSON.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Killed { .. } => "killed",
            Self::Expired => "expired",
            Self::GuestEnded => "guest_ended",
            Self::OutOfMemory => "out_of_memory",
            Self::Crashed => "crashed",
            Self::HostLost => "host_lost",
            Self::CreateFailed => "create_failed",
            Self::Idle => "idle",
            Self::Promoted { .. } => "promoted",
        }
    }
}

/// Where a paused sandbox is kept, its memory included.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// In its halted machine: back in milliseconds, at the price of the memory.
    Standby,
    /// In files: no process, no memory.
    Hibernated,
    /// In the archive, an object store: not even on this host.
    Archived,
}

impl Tier {
    /// All tiers, the deepest last.
    pub const ALL: [Self; 3] = [Self::Standby, Self::Hibernated, Self::Archived];

    /// The tier's word, as in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Standby => "standby",
            Self::Hibernated => "hibernated",
            Self::Archived => "archived",
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What happens at the deadline.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnTimeout {
    /// The sandbox ends.
    #[default]
    Kill,
    /// It is hibernated.
    Pause,
    /// It is stopped: only its disk is kept.
    Stop,
}

/// How long after the last activity a sandbox goes down, tier by tier. Activity is a request to the guest,
/// every stream from it that is open, and with [`IdleRules::busy_percent`] work of the guest's own.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct IdleRules {
    /// Into standby.
    pub standby_after: Option<Duration>,
    /// Into hibernation.
    pub hibernate_after: Option<Duration>,
    /// Into the archive, once it is hibernated or stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub archive_after: Option<Duration>,
    /// Its end, whatever tier it is in by then, stopped included.
    pub delete_after: Option<Duration>,
    /// A guest that uses this many per cent of one processor when its time is up is not idle. `None`: what the
    /// guest does by itself does not count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_percent: Option<u32>,
}

/// How a sandbox lives on without being asked. Kept through every tier.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct LifeRules {
    /// What happens at the deadline.
    pub on_timeout: OnTimeout,
    /// Whether a request to the guest brings it back, and waits for that.
    pub auto_resume: bool,
    /// When it goes down by itself.
    pub idle: IdleRules,
}

/// Where a sandbox comes from, beside its template.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Lineage {
    /// The snapshot it was made from or was last rolled back to.
    pub snapshot: Option<SnapshotId>,
    /// The sandbox it was forked from.
    pub parent: Option<SandboxId>,
    /// Which of its siblings it is, from 0.
    pub fork_index: Option<u32>,
}

/// The end of a sandbox.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize, utoipa::ToSchema)]
pub struct Ending {
    /// When.
    #[schema(value_type = String, format = DateTime)]
    pub at: Timestamp,
    /// Why.
    pub cause: EndCause,
    /// What else is known, for people.
    pub detail: String,
}

/// One sandbox, as its owner and the store know it.
#[derive(Clone, Debug)]
pub struct Sandbox {
    /// Its id.
    pub id: SandboxId,
    /// Whose it is.
    pub workspace: WorkspaceId,
    /// What it was made from.
    pub template: TemplateId,
    /// The template's name at that time.
    pub template_name: String,
    /// Where it is in its life.
    pub state: SandboxState,
    /// Processors, memory and disk.
    pub shape: MachineShape,
    /// The machine it has now.
    pub machine: Option<MachineId>,
    /// Labels of the owner's choice.
    pub metadata: BTreeMap<String, String>,
    /// Environment of every process.
    pub env: BTreeMap<String, String>,
    /// Token a client needs to reach the guest directly, where an API has one per sandbox.
    pub access_token: Secret,
    /// When it was asked for.
    pub created_at: Timestamp,
    /// When it took its first command.
    pub started_at: Option<Timestamp>,
    /// When its lifetime ends; means nothing while it is paused or stopped.
    pub deadline: Timestamp,
    /// The lifetime it was last given.
    pub lifetime: Duration,
    /// What is left of its lifetime, while it is paused or stopped.
    pub remaining: Option<Duration>,
    /// Where it is kept while it is paused with its memory, or being brought there or back.
    pub tier: Option<Tier>,
    /// The directory it is kept in while it is hibernated or stopped, or being brought there or back.
    pub saved: Option<SnapshotId>,
    /// Since when nobody has used it, while it is paused or stopped.
    pub idle_since: Option<Timestamp>,
    /// How it lives on without being asked.
    pub rules: LifeRules,
    /// Where it comes from.
    pub lineage: Lineage,
    /// Set once it is final.
    pub ending: Option<Ending>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_reads_back_from_its_word() {
        for state in SandboxState::ALL {
            assert_eq!(state.as_str().parse(), Ok(state));
        }
        assert!("paused?".parse::<SandboxState>().is_err());
    }

    #[test]
    fn nothing_follows_a_final_state_and_no_state_is_a_dead_end_otherwise() {
        for from in SandboxState::ALL {
            let followers = SandboxState::ALL.into_iter().filter(|to| from.step(*to).is_ok()).count();
            assert_eq!(followers == 0, from.is_final(), "{from}");
        }
    }
}
