//! The nouns of Stockade and the rules that need no I/O: ids, shapes, states, secrets.

mod id;
mod name;
mod sandbox;
mod secret;
mod shape;
mod snapshot;
mod template;
mod usage;

pub use id::{ApiKeyId, IdError, MachineId, SandboxId, SnapshotId, SshKeyId, TemplateId, WorkspaceId};
pub use name::{
    BadName, LABEL_KEY, NameRule, Quoted, SECRET_NAME, SNAPSHOT_NAME, SSH_KEY_NAME, TEMPLATE_NAME, TEMPLATE_TAG,
    quoted, shortened,
};
pub use sandbox::{
    EndCause, Ending, IdleRules, LifeRules, Lineage, OnTimeout, Sandbox, SandboxState, Tier, TransitionError,
    UnknownState,
};
pub use secret::Secret;
pub use shape::{Accelerator, IsolationClass, MachineShape};
pub use snapshot::Snapshot;
pub use template::{Template, TemplateState};
pub use usage::{Costs, Prices, Usage};
