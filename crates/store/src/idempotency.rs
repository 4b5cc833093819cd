use std::time::Duration;

use jiff::Timestamp;
use sqlx::SqliteConnection;
use stockade_model::{SandboxId, WorkspaceId};

use crate::{
    Store, StoreError,
    rows::{get, id, millis},
};

/// How long a key stands for its request.
const KEPT: Duration = Duration::from_secs(24 * 3600);

/// The idempotency key a request came with.
#[derive(Clone, Debug)]
pub struct Idempotency {
    /// The client's key.
    pub key: String,
    /// [`Store::request_digest`] of the request.
    pub digest: Vec<u8>,
}

/// What a key was used for.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct IdempotencyRecord {
    /// Digest of the first request under the key.
    pub digest: Vec<u8>,
    /// The sandbox that request made.
    pub sandbox: SandboxId,
}

impl Store {
    /// What a key was used for within the last day.
    ///
    /// # Errors
    /// The database fails.
    pub async fn idempotency(
        &self,
        workspace: &WorkspaceId,
        key: &str,
    ) -> Result<Option<IdempotencyRecord>, StoreError> {
        let mut connection = self.read.acquire().await.map_err(StoreError::database("look up an idempotency key"))?;
        find(&mut connection, workspace, key).await
    }

    /// Forgets keys older than a day.
    ///
    /// # Errors
    /// The database fails.
    pub async fn purge_idempotency(&self, now: Timestamp) -> Result<u64, StoreError> {
        let done = sqlx::query("DELETE FROM idempotency_keys WHERE created_ms < ?").bind(oldest(now));
        let done = done.execute(&self.write).await;
        done.map(|done| done.rows_affected()).map_err(StoreError::database("purge idempotency keys"))
    }
}

pub(crate) async fn find(
    connection: &mut SqliteConnection,
    workspace: &WorkspaceId,
    key: &str,
) -> Result<Option<IdempotencyRecord>, StoreError> {
    let row =
        sqlx::query("SELECT digest, sandbox FROM idempotency_keys WHERE workspace = ? AND key = ? AND created_ms >= ?")
            .bind(workspace.as_str())
            .bind(key)
            .bind(oldest(Timestamp::now()))
            .fetch_optional(connection)
            .await
            .map_err(StoreError::database("look up an idempotency key"))?;
    row.map(|row| Ok(IdempotencyRecord { digest: get(&row, "digest")?, sandbox: id(&row, "sandbox")? })).transpose()
}

pub(crate) async fn put(
    connection: &mut SqliteConnection,
    workspace: &WorkspaceId,
    key: &Idempotency,
    sandbox: &SandboxId,
) -> sqlx::Result<()> {
    sqlx::query(
        "INSERT OR REPLACE INTO idempotency_keys (workspace, key, digest, sandbox, created_ms) VALUES (?, ?, ?, ?, ?)",
    )
    .bind(workspace.as_str())
    .bind(&key.key)
    .bind(&key.digest)
    .bind(sandbox.as_str())
    .bind(millis(Timestamp::now()))
    .execute(connection)
    .await
    .map(drop)
}

fn oldest(now: Timestamp) -> i64 {
    millis(now) - KEPT.as_millis() as i64
}
