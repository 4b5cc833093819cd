//! Records: who may come in, what sandboxes can be made from, and every sandbox that is or was.
//!
//! SQLite in WAL mode. One connection writes (SQLite has one writer anyway; waiting in our queue is
//! fairer than `SQLITE_BUSY`), a few read. `synchronous=FULL`: what was acknowledged survives a
//! power cut, so that a record may point at things more durable than a machine. A change of state
//! and the event that tells of it are one transaction.
//!
//! What a client sees takes the workspace along with the id, so that forgetting to check the owner is
//! not possible; the few calls without one are the owner task's and say so. Nothing here leaks SQL, so
//! that another database can follow.
//!
//! Secrets: API keys are kept as SHA-256 (they have 160 random bits); access tokens are derived from
//! the sandbox id, never kept; environments, networks and the secrets of users are sealed. The key for both is in a file of its own
//! beside the database ([`SecretFile`]), so that a copied database alone gives nothing away.

mod archive;
mod audit;
mod error;
mod idempotency;
mod keys;
mod list;
mod networks;
mod open;
mod rows;
mod sandboxes;
mod seal;
mod secrets;
mod snapshots;
mod ssh_keys;
mod templates;
mod usage;

pub use archive::{Archive, ArchiveError};
pub use audit::{AuditQuery, AuditRow};
pub use error::StoreError;
pub use idempotency::{Idempotency, IdempotencyRecord};
pub use keys::ApiKeyRecord;
pub use list::{SandboxPage, SandboxQuery};
pub use networks::NetworkRecord;
pub use open::Store;
pub use sandboxes::{Inserted, SandboxEvent};
pub use seal::SecretFile;
pub use secrets::{NewSecret, SecretRecord};
pub use snapshots::{SnapshotPage, SnapshotPurpose, SnapshotQuery, SnapshotRecord};
pub use ssh_keys::SshKeyRecord;
pub use templates::{Built, DEFAULT_TAG, TemplateRecord, TemplateTag};
pub use usage::{Metered, UsageQuery, UsageRow};
