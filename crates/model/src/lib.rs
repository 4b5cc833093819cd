//! The nouns of Stockade and the rules that need no I/O: ids, shapes, states, secrets.

mod id;
mod sandbox;
mod secret;
mod shape;
mod template;

pub use id::{ApiKeyId, IdError, MachineId, SandboxId, TemplateId, WorkspaceId};
pub use sandbox::{EndCause, Ending, Sandbox, SandboxState, TransitionError, UnknownState};
pub use secret::Secret;
pub use shape::{Accelerator, IsolationClass, MachineShape};
pub use template::{Template, TemplateState};
