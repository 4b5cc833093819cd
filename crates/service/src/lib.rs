//! What can be done, whoever asks: the verbs behind every API. Knows no peer's field names.
//!
//! Each live sandbox has one owner task that alone changes its state (see `owner`); everything here
//! either reads records or sends that task a request and waits for its answer.

use std::{collections::BTreeMap, time::Duration};

use stockade_model::{ApiKeyId, SandboxState, WorkspaceId};

mod adopt;
mod clock;
mod config;
mod core;
mod create;
mod end;
mod error;
mod janitor;
mod keys;
mod live;
mod metrics;
mod owner;
mod pool;
mod request;
mod service;
mod start;
mod templates;

pub use clock::{Clock, SystemClock};
pub use config::ServiceConfig;
pub use error::ServiceError;
pub use metrics::MetricsSample;
pub use service::Service;

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
