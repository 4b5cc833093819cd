//! Secrets that guests use without having them. A value goes in and comes out for the gateway alone.

use std::collections::BTreeMap;

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
    /// Its id, which no later secret of the same name has: `sec_` and 26 characters.
    pub id: String,
    /// Its name, unique in its workspace.
    pub name: String,
    /// Counts up with each value.
    pub version: u64,
    /// Where it may go; name patterns.
    pub hosts: Vec<String>,
    /// How its value is come by; empty: it is kept. The service's text, and nothing secret.
    pub origin: String,
    /// Labels of its owner's.
    pub metadata: BTreeMap<String, String>,
    /// When the first value came.
    pub created_at: Timestamp,
    /// When this one came.
    pub updated_at: Timestamp,
}

/// A secret to be written.
#[derive(Clone, Debug)]
pub struct NewSecret<'a> {
    /// Its name.
    pub name: &'a str,
    /// Where it may go.
    pub hosts: &'a [String],
    /// How its value is come by; empty: it is kept.
    pub origin: &'a str,
    /// Labels; `None`: as they are, or none.
    pub metadata: Option<&'a BTreeMap<String, String>>,
    /// Its value, or what its values are got with.
    pub value: &'a Secret,
}

impl Store {
    /// Writes a secret or its next version; the value before is gone. Returns what it is now.
    ///
    /// # Errors
    /// The database fails.
    pub async fn put_secret(
        &self,
        workspace: &WorkspaceId,
        new: &NewSecret<'_>,
        now: Timestamp,
    ) -> Result<SecretRecord, StoreError> {
        let row = self.write_secret(REPLACE, workspace, new, now).await?;
        row.ok_or_else(|| StoreError::damaged("secrets", "a written row is not there"))
    }

    /// Writes a secret whose name is free; `None`: it is taken, and nothing changes.
    ///
    /// # Errors
    /// The database fails.
    pub async fn insert_secret(
        &self,
        workspace: &WorkspaceId,
        new: &NewSecret<'_>,
        now: Timestamp,
    ) -> Result<Option<SecretRecord>, StoreError> {
        self.write_secret("DO NOTHING", workspace, new, now).await
    }

    async fn write_secret(
        &self,
        on_conflict: &'static str,
        workspace: &WorkspaceId,
        new: &NewSecret<'_>,
        now: Timestamp,
    ) -> Result<Option<SecretRecord>, StoreError> {
        let sql = format!(
            "INSERT INTO secrets (id, workspace, name, version, hosts, value, created_ms, updated_ms, origin, metadata)
             VALUES ('sec_' || lower(hex(randomblob(13))), ?1, ?2, 1, ?3, ?4, ?5, ?5, ?6, coalesce(?7, '{{}}'))
             ON CONFLICT (workspace, name) {on_conflict} RETURNING *"
        );
        let row = sqlx::query(&sql)
            .bind(workspace.as_str())
            .bind(new.name)
            .bind(to_json(&new.hosts))
            .bind(self.secret.seal(&place(workspace, new.name, new.origin), new.value.expose().as_bytes()))
            .bind(millis(now))
            .bind(new.origin)
            .bind(new.metadata.map(to_json))
            .fetch_optional(&self.write)
            .await
            .map_err(StoreError::database("write a secret"))?;
        row.as_ref().map(secret).transpose()
    }

    /// Gives a secret whose value is kept its next value; `None`: there is none of this id whose value is kept.
    ///
    /// # Errors
    /// The database fails.
    pub async fn update_secret(
        &self,
        workspace: &WorkspaceId,
        (id, name): (&str, &str),
        value: &Secret,
        metadata: Option<&BTreeMap<String, String>>,
        now: Timestamp,
    ) -> Result<Option<SecretRecord>, StoreError> {
        let row = sqlx::query(
            "UPDATE secrets SET version = version + 1, value = ?4, metadata = coalesce(?5, metadata), updated_ms = ?6
             WHERE workspace = ?1 AND id = ?2 AND name = ?3 AND origin = '' RETURNING *",
        )
        .bind(workspace.as_str())
        .bind(id)
        .bind(name)
        .bind(self.secret.seal(&place(workspace, name, ""), value.expose().as_bytes()))
        .bind(metadata.map(to_json))
        .bind(millis(now))
        .fetch_optional(&self.write)
        .await
        .map_err(StoreError::database("write a secret"))?;
        row.as_ref().map(secret).transpose()
    }

    /// One secret by its id or its name, without its value.
    ///
    /// # Errors
    /// The database fails.
    pub async fn find_secret(
        &self,
        workspace: &WorkspaceId,
        reference: &str,
    ) -> Result<Option<SecretRecord>, StoreError> {
        let row =
            sqlx::query("SELECT * FROM secrets WHERE workspace = ?1 AND (id = ?2 OR name = ?2) ORDER BY id <> ?2")
                .bind(workspace.as_str())
                .bind(reference)
                .fetch_optional(&self.read)
                .await
                .map_err(StoreError::database("read a secret"))?;
        row.as_ref().map(secret).transpose()
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

    /// Those after a name, at most `limit`.
    ///
    /// # Errors
    /// The database fails.
    pub async fn secrets_after(
        &self,
        workspace: &WorkspaceId,
        after: &str,
        limit: u32,
    ) -> Result<Vec<SecretRecord>, StoreError> {
        sqlx::query("SELECT * FROM secrets WHERE workspace = ? AND name > ? ORDER BY name LIMIT ?")
            .bind(workspace.as_str())
            .bind(after)
            .bind(limit)
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

const REPLACE: &str = "DO UPDATE SET version = version + 1, hosts = ?3, value = ?4, updated_ms = ?5, origin = ?6,
                       metadata = coalesce(?7, metadata)";

/// What a value is sealed to: moved to another row, or said to be for another endpoint, it does not open.
fn place(workspace: &WorkspaceId, name: &str, origin: &str) -> String {
    match origin {
        "" => format!("secret:{workspace}:{name}"),
        origin => format!("secret:{workspace}:{name}:{origin}"),
    }
}

fn secret(row: &SqliteRow) -> Result<SecretRecord, StoreError> {
    Ok(SecretRecord {
        id: get(row, "id")?,
        name: get(row, "name")?,
        version: number(row, "version")?,
        hosts: json(get::<&str>(row, "hosts")?.as_bytes(), "hosts")?,
        origin: get(row, "origin")?,
        metadata: json(get::<&str>(row, "metadata")?.as_bytes(), "metadata")?,
        created_at: instant(get(row, "created_ms")?, "created_ms")?,
        updated_at: instant(get(row, "updated_ms")?, "updated_ms")?,
    })
}
