//! Public keys for SSH. There is nothing secret in them.

use jiff::Timestamp;
use sqlx::sqlite::SqliteRow;
use stockade_model::{SandboxId, SshKeyId, WorkspaceId};

use crate::{
    Store, StoreError,
    rows::{get, id, instant, millis, optional_id},
};

/// A public key that opens sandboxes.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SshKeyRecord {
    /// Its id.
    pub id: SshKeyId,
    /// What its owner calls it.
    pub name: String,
    /// `SHA256:` and the digest of the key, as `ssh-keygen -l` shows it.
    pub fingerprint: String,
    /// Algorithm and key, as in `authorized_keys`, without the comment.
    pub public_key: String,
    /// The one sandbox it opens; `None`: all of its workspace.
    pub sandbox: Option<SandboxId>,
    /// When it was added.
    pub created_at: Timestamp,
    /// Until when it opens anything; `None`: for good.
    pub expires_at: Option<Timestamp>,
}

impl Store {
    /// Keeps a key. False, and nothing changes: the workspace has this key already, or `most` others.
    ///
    /// # Errors
    /// The database fails.
    pub async fn insert_ssh_key(
        &self,
        workspace: &WorkspaceId,
        record: &SshKeyRecord,
        most: u32,
    ) -> Result<bool, StoreError> {
        let fail = StoreError::database("keep an SSH key");
        let done = sqlx::query(
            "INSERT INTO ssh_keys (id, workspace, name, fingerprint, public_key, sandbox, created_ms, expires_ms)
             SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8
             WHERE (SELECT count(*) FROM ssh_keys WHERE workspace = ?2) < ?9
             ON CONFLICT (workspace, fingerprint) DO NOTHING",
        )
        .bind(record.id.as_str())
        .bind(workspace.as_str())
        .bind(&record.name)
        .bind(&record.fingerprint)
        .bind(&record.public_key)
        .bind(record.sandbox.as_ref().map(SandboxId::as_str))
        .bind(millis(record.created_at))
        .bind(record.expires_at.map(millis))
        .bind(most)
        .execute(&self.write)
        .await
        .map_err(fail)?;
        Ok(done.rows_affected() > 0)
    }

    /// The keys of a workspace, oldest first.
    ///
    /// # Errors
    /// The database fails.
    pub async fn ssh_keys(&self, workspace: &WorkspaceId) -> Result<Vec<SshKeyRecord>, StoreError> {
        sqlx::query("SELECT * FROM ssh_keys WHERE workspace = ? ORDER BY created_ms, id")
            .bind(workspace.as_str())
            .fetch_all(&self.read)
            .await
            .map_err(StoreError::database("list SSH keys"))?
            .iter()
            .map(ssh_key)
            .collect()
    }

    /// The key of a fingerprint.
    ///
    /// # Errors
    /// The database fails.
    pub async fn ssh_key(
        &self,
        workspace: &WorkspaceId,
        fingerprint: &str,
    ) -> Result<Option<SshKeyRecord>, StoreError> {
        let row = sqlx::query("SELECT * FROM ssh_keys WHERE workspace = ? AND fingerprint = ?")
            .bind(workspace.as_str())
            .bind(fingerprint)
            .fetch_optional(&self.read)
            .await
            .map_err(StoreError::database("look up an SSH key"))?;
        row.as_ref().map(ssh_key).transpose()
    }

    /// Forgets a key; false: there is none of this id in the workspace.
    ///
    /// # Errors
    /// The database fails.
    pub async fn remove_ssh_key(&self, workspace: &WorkspaceId, key: &SshKeyId) -> Result<bool, StoreError> {
        let done = sqlx::query("DELETE FROM ssh_keys WHERE workspace = ? AND id = ?")
            .bind(workspace.as_str())
            .bind(key.as_str())
            .execute(&self.write)
            .await
            .map_err(StoreError::database("forget an SSH key"))?;
        Ok(done.rows_affected() > 0)
    }

    /// Forgets keys that have expired.
    ///
    /// # Errors
    /// The database fails.
    pub async fn purge_ssh_keys(&self, now: Timestamp) -> Result<u64, StoreError> {
        let done = sqlx::query("DELETE FROM ssh_keys WHERE expires_ms <= ?")
            .bind(millis(now))
            .execute(&self.write)
            .await
            .map_err(StoreError::database("forget expired SSH keys"))?;
        Ok(done.rows_affected())
    }
}

fn ssh_key(row: &SqliteRow) -> Result<SshKeyRecord, StoreError> {
    let expires: Option<i64> = get(row, "expires_ms")?;
    Ok(SshKeyRecord {
        id: id(row, "id")?,
        name: get(row, "name")?,
        fingerprint: get(row, "fingerprint")?,
        public_key: get(row, "public_key")?,
        sandbox: optional_id(row, "sandbox")?,
        created_at: instant(get(row, "created_ms")?, "created_ms")?,
        expires_at: expires.map(|ms| instant(ms, "expires_ms")).transpose()?,
    })
}
