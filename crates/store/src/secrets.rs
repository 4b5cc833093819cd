//! Secrets that guests use without having them. A value goes in and comes out for the gateway alone.

use jiff::Timestamp;
use sqlx::sqlite::SqliteRow;
use stockade_model::{Secret, WorkspaceId};

use crate::{
    Store, StoreError,
    rows::{get, instant, json, millis, number, to_json},
};

/// A secret as it is shown: without its value.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SecretRecord {
    /// Its name, unique in its workspace.
    pub name: String,
    /// Counts up with each value.
    pub version: u64,
    /// Where it may go; name patterns.
    pub hosts: Vec<String>,
    /// How its value is come by; empty: it is kept. The service's text, and nothing secret.
    pub origin: String,
    /// When the first value came.
    pub created_at: Timestamp,
    /// When this one came.
    pub updated_at: Timestamp,
}

impl Store {
    /// Writes a secret or its next version; the value before is gone. Returns what it is now.
    ///
    /// # Errors
    /// The database fails.
    pub async fn put_secret(
        &self,
        workspace: &WorkspaceId,
        name: &str,
        hosts: &[String],
        origin: &str,
        value: &Secret,
        now: Timestamp,
    ) -> Result<SecretRecord, StoreError> {
        let row = sqlx::query(
            "INSERT INTO secrets (workspace, name, version, hosts, value, created_ms, updated_ms, origin)
             VALUES (?1, ?2, 1, ?3, ?4, ?5, ?5, ?6)
             ON CONFLICT (workspace, name)
             DO UPDATE SET version = version + 1, hosts = ?3, value = ?4, updated_ms = ?5, origin = ?6
             RETURNING *",
        )
        .bind(workspace.as_str())
        .bind(name)
        .bind(to_json(&hosts))
        .bind(self.secret.seal(&place(workspace, name, origin), value.expose().as_bytes()))
        .bind(millis(now))
        .bind(origin)
        .fetch_one(&self.write)
        .await
        .map_err(StoreError::database("write a secret"))?;
        secret(&row)
    }

    /// The secrets of a workspace, by name.
    ///
    /// # Errors
    /// The database fails.
    pub async fn secrets(&self, workspace: &WorkspaceId) -> Result<Vec<SecretRecord>, StoreError> {
        sqlx::query("SELECT * FROM secrets WHERE workspace = ? ORDER BY name")
            .bind(workspace.as_str())
            .fetch_all(&self.read)
            .await
            .map_err(StoreError::database("list secrets"))?
            .iter()
            .map(secret)
            .collect()
    }

    /// One secret and its value, for the gateway.
    ///
    /// # Errors
    /// The database fails, or the value does not open.
    pub async fn secret(
        &self,
        workspace: &WorkspaceId,
        name: &str,
    ) -> Result<Option<(SecretRecord, Secret)>, StoreError> {
        let row = sqlx::query("SELECT * FROM secrets WHERE workspace = ? AND name = ?")
            .bind(workspace.as_str())
            .bind(name)
            .fetch_optional(&self.read)
            .await
            .map_err(StoreError::database("read a secret"))?;
        let Some(row) = row else { return Ok(None) };
        let value = self.secret.open(&place(workspace, name, get(&row, "origin")?), get(&row, "value")?)?;
        let value =
            std::str::from_utf8(&value).map_err(|_| StoreError::damaged("a secret's value", "it is no text"))?;
        Ok(Some((secret(&row)?, Secret::new(value))))
    }

    /// Removes a secret; false: there is none of this name.
    ///
    /// # Errors
    /// The database fails.
    pub async fn remove_secret(&self, workspace: &WorkspaceId, name: &str) -> Result<bool, StoreError> {
        let done = sqlx::query("DELETE FROM secrets WHERE workspace = ? AND name = ?")
            .bind(workspace.as_str())
            .bind(name)
            .execute(&self.write)
            .await
            .map_err(StoreError::database("remove a secret"))?;
        Ok(done.rows_affected() > 0)
    }
}

/// What a value is sealed to: moved to another row, or said to be for another endpoint, it does not open.
fn place(workspace: &WorkspaceId, name: &str, origin: &str) -> String {
    match origin {
        "" => format!("secret:{workspace}:{name}"),
        origin => format!("secret:{workspace}:{name}:{origin}"),
    }
}

fn secret(row: &SqliteRow) -> Result<SecretRecord, StoreError> {
    Ok(SecretRecord {
        name: get(row, "name")?,
        version: number(row, "version")?,
        hosts: json(get::<&str>(row, "hosts")?.as_bytes(), "hosts")?,
        origin: get(row, "origin")?,
        created_at: instant(get(row, "created_ms")?, "created_ms")?,
        updated_at: instant(get(row, "updated_ms")?, "updated_ms")?,
    })
}
