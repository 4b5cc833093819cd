//! A sandbox and the states it goes through.
//!
//! ```text
//! creating --> running --> killing --> gone
//!     |           |                     ^
//!     v           +--(machine ended)----+
//!   failed
//! ```
//!
//! `failed` and `gone` are final and keep a record of when and why. The tiers below `running`
//! (paused, hibernated, ...) join between `running` and `killing`.

use std::{collections::BTreeMap, fmt, str::FromStr};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{ApiKeyId, MachineId, MachineShape, SandboxId, Secret, TemplateId, WorkspaceId};

/// Where a sandbox is in its life.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SandboxState {
    /// A machine is being made for it.
    Creating,
    /// It takes commands.
    Running,
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
    pub const ALL: [Self; 5] = [Self::Creating, Self::Running, Self::Failed, Self::Killing, Self::Gone];

    /// Whether nothing can follow.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Failed | Self::Gone)
    }

    /// The state after a step.
    ///
    /// # Errors
    /// The diagram has no such step.
    pub fn step(self, to: Self) -> Result<Self, TransitionError> {
        use SandboxState::{Creating, Failed, Gone, Killing, Running};
        match (self, to) {
            (Creating, Running | Failed | Killing) | (Running, Killing | Gone) | (Killing, Gone) => Ok(to),
            (from, to) => Err(TransitionError { from, to }),
        }
    }

    /// The state's word, as in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Running => "running",
            Self::Failed => "failed",
            Self::Killing => "killing",
            Self::Gone => "gone",
        }
    }
}

/// A word that names no state.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{text:?} is not a state of a sandbox: expected creating, running, failed, killing or gone")]
pub struct UnknownState {
    text: String,
}

impl FromStr for SandboxState {
    type Err = UnknownState;

    fn from_str(text: &str) -> Result<Self, UnknownState> {
        Self::ALL
            .into_iter()
            .find(|state| state.as_str() == text)
            .ok_or_else(|| UnknownState { text: text.chars().take(64).collect() })
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
    /// When it will be ended.
    pub deadline: Timestamp,
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
