//! What can be done, whoever asks: the verbs behind every API. Knows no peer's field names.
//!
//! Each live sandbox has one owner task that alone changes its state (see `owner`); everything here
//! either reads records or sends that task a request and waits for its answer.

use std::{collections::BTreeMap, time::Duration};

use stockade_engine::{EngineInfo, GuestClient};
use stockade_model::{ApiKeyId, Sandbox, SandboxId, SandboxState, Secret, Template, WorkspaceId};

mod error;

pub use error::ServiceError;

/// Who asks: found from an API key.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Principal {
    /// Whose sandboxes and templates it may see.
    pub workspace: WorkspaceId,
    /// The key it came with.
    pub key: ApiKeyId,
}

/// A sandbox to be made.
#[derive(Clone, Debug)]
pub struct CreateSandbox {
    /// A template's name or id.
    pub template: String,
    /// How long it may live from when it runs; must be over zero and at most the server's maximum.
    pub lifetime: Duration,
    /// Labels.
    pub metadata: BTreeMap<String, String>,
    /// Environment of every process, over the template's.
    pub env: BTreeMap<String, String>,
    /// The same key within a day gives the same sandbox; another request under it is refused.
    pub idempotency_key: Option<String>,
}

/// Which sandboxes to list: all conditions hold.
#[derive(Clone, Debug, Default)]
pub struct ListFilter {
    /// In one of these states; empty: all that are not final.
    pub states: Vec<SandboxState>,
    /// With all of these labels.
    pub metadata: BTreeMap<String, String>,
    /// Made from this template (name or id).
    pub template: Option<String>,
    /// Oldest first; false: newest first.
    pub ascending: bool,
    /// At most this many, 1 to 1000.
    pub limit: u32,
    /// The cursor of the page before.
    pub cursor: Option<String>,
}

/// One page of a list.
#[derive(Clone, Debug)]
pub struct Page<T> {
    /// In order of creation.
    pub items: Vec<T>,
    /// Present if there is more.
    pub cursor: Option<String>,
}

/// The verbs. Cheap to clone.
#[derive(Clone)]
pub struct Service {}

#[expect(unused_variables, clippy::todo, clippy::missing_errors_doc, reason = "replaced by the service")]
impl Service {
    /// Who an API key belongs to; `None`: nobody.
    pub async fn authenticate(&self, key: &str) -> Result<Option<Principal>, ServiceError> {
        todo!()
    }

    /// Makes a sandbox; returns when it takes commands.
    pub async fn create(&self, who: &Principal, request: CreateSandbox) -> Result<Sandbox, ServiceError> {
        todo!()
    }

    /// One sandbox, also one that has ended.
    pub async fn get(&self, who: &Principal, id: &SandboxId) -> Result<Sandbox, ServiceError> {
        todo!()
    }

    /// Sandboxes, page by page.
    pub async fn list(&self, who: &Principal, filter: &ListFilter) -> Result<Page<Sandbox>, ServiceError> {
        todo!()
    }

    /// Ends a sandbox; returns when nothing of it is left. One that has ended already is `NotFound`.
    pub async fn kill(&self, who: &Principal, id: &SandboxId) -> Result<(), ServiceError> {
        todo!()
    }

    /// Sets the deadline to now + `lifetime` (zero: at once).
    pub async fn set_lifetime(
        &self,
        who: &Principal,
        id: &SandboxId,
        lifetime: Duration,
    ) -> Result<Sandbox, ServiceError> {
        todo!()
    }

    /// Moves the deadline to now + `lifetime` if that is later.
    pub async fn extend(&self, who: &Principal, id: &SandboxId, lifetime: Duration) -> Result<Sandbox, ServiceError> {
        todo!()
    }

    /// The guest of a running sandbox, for commands and files.
    pub async fn guest(&self, who: &Principal, id: &SandboxId) -> Result<GuestClient, ServiceError> {
        todo!()
    }

    /// The guest of a running sandbox by its own access token, for APIs that have one per sandbox.
    /// `token` `None`: the caller has checked the right to enter in another way.
    pub async fn guest_by_token(
        &self,
        id: &SandboxId,
        token: Option<&Secret>,
    ) -> Result<(Sandbox, GuestClient), ServiceError> {
        todo!()
    }

    /// The last lines of the guest's console.
    pub async fn console(&self, who: &Principal, id: &SandboxId) -> Result<String, ServiceError> {
        todo!()
    }

    /// What runs the machines.
    pub fn engine_info(&self) -> EngineInfo {
        todo!()
    }

    /// Templates the workspace can use.
    pub async fn templates(&self, who: &Principal) -> Result<Vec<Template>, ServiceError> {
        todo!()
    }

    /// One template by name or id.
    pub async fn template(&self, who: &Principal, name_or_id: &str) -> Result<Template, ServiceError> {
        todo!()
    }
}
