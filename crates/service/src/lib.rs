//! What can be done, whoever asks: the verbs behind every API. Knows no peer's field names.
//!
//! Each live sandbox has one owner task that alone changes its state (see `owner`); everything here
//! either reads records or sends that task a request and waits for its answer.

use std::{collections::BTreeMap, time::Duration};

use stockade_model::{ApiKeyId, IdleRules, LifeRules, OnTimeout, SandboxId, SandboxState, Tier, WorkspaceId};

mod activity;
mod adopt;
mod archive;
mod builds;
mod clock;
mod config;
mod core;
mod create;
mod dirs;
mod end;
mod error;
#[cfg(feature = "fake")]
pub mod fake;
mod fork;
mod identity;
mod janitor;
mod keys;
mod live;
mod meter;
mod metrics;
mod network;
mod owner;
mod pause;
mod paused;
mod pool;
mod replace;
mod request;
mod resume;
mod running;
mod service;
mod snapshots;
mod ssh_keys;
mod start;
mod templates;
mod usage;

pub use builds::{
    BUILD_LABEL, BuildAction, BuildPlace, BuildPlan, BuildState, BuildStep, BuildView, LogEntry, LogLevel, NewBuild,
};
pub use clock::{Clock, SystemClock};
pub use config::ServiceConfig;
pub use error::{ServiceError, StateOf};
pub use metrics::MetricsSample;
pub use network::{
    AuditFilter, AuditLine, ClientAuth, DefaultNetwork, DefaultOf, Ingress, MintedSecret, NetworkChange, NetworkConfig,
    NetworkSpec, NetworkState, OAuthClient, PreviewToken, Previews, SecretContent, SecretInfo, SecretRequest,
    SecretUse, SharedBy, check_secret_name,
};
pub use service::Service;
pub use ssh_keys::SshKeyRequest;
pub use stockade_engine::SnapshotScope;
pub use stockade_gateway::{Stats as NetworkStats, policy};
pub use stockade_store::{DEFAULT_TAG, SandboxEvent, SshKeyRecord, TemplateTag};
pub use usage::{UsageFilter, UsageGroup, UsageReportRow, UsageStep, UsedBy};

/// Who asks: found from an API key.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Principal {
    /// Whose sandboxes and templates it may see.
    pub workspace: WorkspaceId,
    /// The key it came with.
    pub key: ApiKeyId,
}

/// A sandbox to be made.
#[derive(Clone, Debug, Default)]
pub struct CreateSandbox {
    /// A template's or a snapshot's name or id; of a name a template comes first, then the newest snapshot.
    pub template: String,
    /// How long it may live from when it runs; must be over zero and at most the server's maximum.
    pub lifetime: Duration,
    /// Labels.
    pub metadata: BTreeMap<String, String>,
    /// Environment of every process, over the template's and the snapshot's.
    pub env: BTreeMap<String, String>,
    /// What happens when its lifetime is over.
    pub on_timeout: OnTimeout,
    /// Whether a request to its guest brings it back from a pause, whatever put it there.
    pub auto_resume: bool,
    /// When it goes down by itself for want of use.
    pub idle: IdleRules,
    /// From a snapshot: boot from its disk, whatever else is in it.
    pub from_disk: bool,
    /// Where it may connect and with which secrets; `None`: as the deployment has it, or the snapshot it comes from.
    pub network: Option<NetworkSpec>,
    /// The same key within a day gives the same sandbox; another request under it is refused.
    pub idempotency_key: Option<String>,
}

/// Rules to be changed; `None`: as they are.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct LifeChange {
    /// What happens when its lifetime is over.
    pub on_timeout: Option<OnTimeout>,
    /// Whether a request to its guest brings it back from a pause.
    pub auto_resume: Option<bool>,
    /// When it goes down by itself for want of use; all of these rules.
    pub idle: Option<IdleRules>,
}

impl LifeChange {
    /// Whether nothing is to change.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    pub(crate) fn apply(self, rules: LifeRules) -> LifeRules {
        LifeRules {
            on_timeout: self.on_timeout.unwrap_or(rules.on_timeout),
            auto_resume: self.auto_resume.unwrap_or(rules.auto_resume),
            idle: self.idle.unwrap_or(rules.idle),
        }
    }
}

/// A snapshot to be taken.
#[derive(Clone, Debug)]
pub struct SnapshotRequest {
    /// A name; need not be unique, the newest one of a name is meant by it.
    pub name: Option<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// With or without memory.
    pub scope: SnapshotScope,
    /// When it is to be deleted; `None`: never.
    pub expires_after: Option<Duration>,
}

/// Which snapshots to list: all conditions hold.
#[derive(Clone, Debug, Default)]
pub struct SnapshotFilter {
    /// Taken of this sandbox.
    pub sandbox: Option<SandboxId>,
    /// Of this name.
    pub name: Option<String>,
    /// With all of these labels.
    pub labels: BTreeMap<String, String>,
    /// Oldest first; false: newest first.
    pub ascending: bool,
    /// At most this many, 1 to 1000.
    pub limit: u32,
    /// The cursor of the page before.
    pub cursor: Option<String>,
}

/// Children to be made.
#[derive(Clone, Debug, Default)]
pub struct ForkRequest {
    /// How many.
    pub count: u32,
    /// How long each may live; `None`: as long as the parent was to.
    pub lifetime: Option<Duration>,
    /// Their labels; `None`: the parent's.
    pub metadata: Option<BTreeMap<String, String>>,
    /// If one cannot be made, none is.
    pub all_or_nothing: bool,
}

/// How to pause.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PauseMode {
    /// False: only the disk is kept, the sandbox is stopped and boots when it is resumed.
    pub memory: bool,
    /// Where memory is kept.
    pub tier: Tier,
}

impl Default for PauseMode {
    fn default() -> Self {
        Self { memory: true, tier: Tier::Hibernated }
    }
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
