use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{MachineShape, TemplateId, WorkspaceId};

/// What sandboxes start from: a disk and the memory of a machine that has already booted from it.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Template {
    /// Its id; also the name of its directory.
    pub id: TemplateId,
    /// The workspace it belongs to; `None`: everyone's.
    pub workspace: Option<WorkspaceId>,
    /// Its name, unique within its workspace.
    pub name: String,
    /// Whether sandboxes can be made from it.
    pub state: TemplateState,
    /// Processors, memory and disk of its machines.
    pub shape: MachineShape,
    /// Digest of the recipe it was built from; a changed recipe makes a new template of the same name.
    pub recipe_digest: String,
    /// Environment of every process.
    pub env: BTreeMap<String, String>,
    /// User of processes and files that name none.
    pub default_user: String,
    /// Directory of processes that name none; `None`: the user's home.
    pub default_cwd: Option<String>,
    /// When it was built.
    pub created_at: Timestamp,
}

/// Whether a template can be used.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TemplateState {
    /// Being built.
    Building,
    /// Sandboxes can be made from it.
    Ready,
    /// Its build failed.
    Failed,
    /// A newer one has its name; kept while machines need it.
    Replaced,
}
