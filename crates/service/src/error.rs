use std::{fmt, time::Duration};

use stockade_engine::EngineError;
use stockade_model::{Ending, NameRule, SandboxId, SandboxState, SnapshotId, quoted};
use stockade_store::{ArchiveError, StoreError};

/// Whose state is kept on the disk.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum StateOf {
    /// A snapshot.
    Snapshot(SnapshotId),
    /// A sandbox that is hibernated or stopped.
    Sandbox(SandboxId),
}

impl fmt::Display for StateOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Snapshot(id) => write!(f, "snapshot {id}"),
            Self::Sandbox(id) => write!(f, "the saved state of sandbox {id}"),
        }
    }
}

/// Why the service did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// No such template in the caller's sight.
    #[error("template {} not found", quoted(name))]
    TemplateNotFound {
        /// As asked for.
        name: String,
    },
    /// No such sandbox in the caller's sight.
    #[error("sandbox {} not found", quoted(id))]
    SandboxNotFound {
        /// As asked for.
        id: String,
    },
    /// The sandbox has ended; when and why is known.
    #[error("sandbox {id} has ended at {}: {}", ending.at.strftime("%Y-%m-%dT%H:%M:%S%.3fZ"), ending.cause.as_str())]
    SandboxEnded {
        /// Which.
        id: SandboxId,
        /// When and why.
        ending: Box<Ending>,
    },
    /// The sandbox is in a state in which this cannot be done.
    #[error("sandbox {id} is {state}")]
    WrongState {
        /// Which.
        id: SandboxId,
        /// Its state.
        state: SandboxState,
    },
    /// No such snapshot in the caller's sight.
    #[error("snapshot {} not found", quoted(name))]
    SnapshotNotFound {
        /// As asked for.
        name: String,
    },
    /// No such secret in the caller's sight.
    #[error("secret {} not found", quoted(name))]
    SecretNotFound {
        /// As asked for.
        name: String,
    },
    /// The workspace has a secret of this name already.
    #[error("a secret {} is there already", quoted(name))]
    SecretExists {
        /// Which.
        name: String,
    },
    /// The secret is the operator's.
    #[error("secret {} is the operator's and cannot be changed here", quoted(name))]
    OperatorsSecret {
        /// As asked for.
        name: String,
    },
    /// No such SSH key in the caller's sight.
    #[error("SSH key {} not found", quoted(id))]
    SshKeyNotFound {
        /// As asked for.
        id: String,
    },
    /// The workspace has this public key already.
    #[error("the key {fingerprint} is there already")]
    SshKeyExists {
        /// Which.
        fingerprint: String,
    },
    /// The network cannot be had.
    #[error("no network: {problem}")]
    Network {
        /// Why.
        problem: String,
    },
    /// A machine is just being started from the snapshot.
    #[error("snapshot {id} is being started from; try again in a moment")]
    SnapshotInUse {
        /// Which.
        id: SnapshotId,
    },
    /// What is kept on the disk was made by something this host has not, or is not what was written; nothing else
    /// is touched by that.
    #[error("{of} cannot be used")]
    StateUnusable {
        /// Whose state.
        of: StateOf,
        /// [`EngineError::Mismatch`] or [`EngineError::Damaged`].
        #[source]
        source: EngineError,
    },
    /// No such build in the caller's sight.
    #[error("build {} not found", quoted(id))]
    BuildNotFound {
        /// As asked for.
        id: String,
    },
    /// Sandboxes or snapshots need the template.
    #[error(
        "template {} is needed by sandboxes, snapshots or other templates made from it; delete those first",
        quoted(name)
    )]
    TemplateInUse {
        /// As asked for.
        name: String,
    },
    /// A field of the request makes no sense.
    #[error("{field} {problem}")]
    Invalid {
        /// Which field.
        field: &'static str,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// The idempotency key was used with another request.
    #[error("idempotency key was used before with another request")]
    IdempotencyConflict,
    /// The access token is not this sandbox's.
    #[error("access token is missing or wrong")]
    WrongToken,
    /// Too many creates or sandboxes at the moment.
    #[error("the server is busy: {what}")]
    Busy {
        /// What is short.
        what: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// The machine, the emulator or the guest.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The archive failed.
    #[error("the archive could not be read or written")]
    Archive(#[from] ArchiveError),
    /// The store failed.
    #[error("the record could not be read or written")]
    Store(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// A name that breaks its rule.
pub(crate) fn check_name(field: &'static str, rule: NameRule, name: &str) -> Result<(), ServiceError> {
    rule.check(name).map_err(|bad| ServiceError::Invalid { field, problem: bad.to_string() })
}

/// What a caller waits after the database had no time for it.
const STORE_RETRY: Duration = Duration::from_secs(2);

/// A store error as the service tells it.
pub(crate) fn store_error(error: StoreError) -> ServiceError {
    match error {
        StoreError::BadCursor => ServiceError::Invalid { field: "cursor", problem: error.to_string() },
        error if error.is_busy() => {
            tracing::warn!(error = &error as &dyn std::error::Error, "the database is too slow for what is asked");
            ServiceError::Busy { what: "its database cannot keep up".to_owned(), retry_after: STORE_RETRY }
        }
        error => ServiceError::Store(Box::new(error)),
    }
}

/// An error and its causes on one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}
