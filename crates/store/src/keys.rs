use jiff::Timestamp;
use ring::digest::{SHA256, digest};
use sqlx::{Row, sqlite::SqliteRow};
use stockade_model::{ApiKeyId, Secret, WorkspaceId};

use crate::{
    Store, StoreError,
    open::{BEGIN, to_the_end},
    rows::{id, instant, millis},
};

/// An API key as it is shown; its text is not kept.
#[derive(Clone, Debug)]
pub struct ApiKeyRecord {
    /// Its id.
    pub id: ApiKeyId,
    /// What its owner calls it.
    pub name: String,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it stopped working.
    pub revoked_at: Option<Timestamp>,
}

impl Store {
    /// Keeps a key's hash. A key that is there already (same text, same workspace) keeps its id.
    ///
    /// # Errors
    /// The database fails.
    pub async fn insert_api_key(
        &self,
        workspace: &WorkspaceId,
        name: &str,
        key: &Secret,
    ) -> Result<ApiKeyId, StoreError> {
        let row = sqlx::query(
            "INSERT INTO api_keys (id, workspace, name, hash, created_ms) VALUES (?, ?, ?, ?, ?)
             ON CONFLICT (hash) DO UPDATE SET name = name WHERE workspace = excluded.workspace RETURNING id",
        )
        .bind(ApiKeyId::random().as_str())
        .bind(workspace.as_str())
        .bind(name)
        .bind(hash(key.expose()))
        .bind(millis(Timestamp::now()))
        .fetch_one(&self.write)
        .await
        .map_err(StoreError::database("keep an API key"))?;
        id(&row, "id")
    }

    /// Makes `key` the one key of a name: keeps it as [`insert_api_key`](Self::insert_api_key) does, lets it work even
    /// if it was revoked, and revokes the others of that name.
    ///
    /// # Errors
    /// The database fails.
    pub async fn replace_api_key(
        &self,
        workspace: &WorkspaceId,
        name: &str,
        key: &Secret,
    ) -> Result<ApiKeyId, StoreError> {
        let (store, workspace, name, hash) = (self.clone(), workspace.clone(), name.to_owned(), hash(key.expose()));
        to_the_end(async move {
            let fail = || StoreError::database("replace an API key");
            let mut transaction = store.write.begin_with(BEGIN).await.map_err(fail())?;
            let now = millis(Timestamp::now());
            let row = sqlx::query(
                "INSERT INTO api_keys (id, workspace, name, hash, created_ms) VALUES (?, ?, ?, ?, ?)
                 ON CONFLICT (hash) DO UPDATE SET revoked_ms = NULL WHERE workspace = excluded.workspace RETURNING id",
            )
            .bind(ApiKeyId::random().as_str())
            .bind(workspace.as_str())
            .bind(&name)
            .bind(&hash)
            .bind(now)
            .fetch_one(&mut *transaction)
            .await
            .map_err(fail())?;
            let others = "UPDATE api_keys SET revoked_ms = ?
                          WHERE workspace = ? AND name = ? AND hash <> ? AND revoked_ms IS NULL";
            let others = sqlx::query(others).bind(now).bind(workspace.as_str()).bind(&name).bind(&hash);
            others.execute(&mut *transaction).await.map_err(fail())?;
            transaction.commit().await.map_err(fail())?;
            id(&row, "id")
        })
        .await
    }

    /// Who a key belongs to; `None`: nobody, or it was revoked.
    ///
    /// The index finds the hash, not the text: how long that takes says nothing about a key.
    ///
    /// # Errors
    /// The database fails.
    pub async fn find_api_key(&self, key: &str) -> Result<Option<(WorkspaceId, ApiKeyId)>, StoreError> {
        let row = sqlx::query("SELECT id, workspace FROM api_keys WHERE hash = ? AND revoked_ms IS NULL")
            .bind(hash(key))
            .fetch_optional(&self.read)
            .await
            .map_err(StoreError::database("look up an API key"))?;
        row.map(|row| Ok((id(&row, "workspace")?, id(&row, "id")?))).transpose()
    }

    /// The keys of a workspace, also revoked ones.
    ///
    /// # Errors
    /// The database fails.
    pub async fn api_keys(&self, workspace: &WorkspaceId) -> Result<Vec<ApiKeyRecord>, StoreError> {
        sqlx::query("SELECT * FROM api_keys WHERE workspace = ? ORDER BY created_ms, id")
            .bind(workspace.as_str())
            .fetch_all(&self.read)
            .await
            .map_err(StoreError::database("list API keys"))?
            .iter()
            .map(api_key)
            .collect()
    }

    /// Makes a key useless; false: there is none of this id in the workspace, or it is revoked already.
    ///
    /// # Errors
    /// The database fails.
    pub async fn revoke_api_key(&self, workspace: &WorkspaceId, key: &ApiKeyId) -> Result<bool, StoreError> {
        let done =
            sqlx::query("UPDATE api_keys SET revoked_ms = ? WHERE workspace = ? AND id = ? AND revoked_ms IS NULL")
                .bind(millis(Timestamp::now()))
                .bind(workspace.as_str())
                .bind(key.as_str())
                .execute(&self.write)
                .await
                .map_err(StoreError::database("revoke an API key"))?;
        Ok(done.rows_affected() > 0)
    }
}

fn hash(key: &str) -> Vec<u8> {
    digest(&SHA256, key.as_bytes()).as_ref().to_vec()
}

fn api_key(row: &SqliteRow) -> Result<ApiKeyRecord, StoreError> {
    let revoked: Option<i64> =
        row.try_get("revoked_ms").map_err(|error| StoreError::damaged("an API key's revoked_ms", error))?;
    Ok(ApiKeyRecord {
        id: id(row, "id")?,
        name: crate::rows::get(row, "name")?,
        created_at: instant(crate::rows::get(row, "created_ms")?, "created_ms")?,
        revoked_at: revoked.map(|ms| instant(ms, "revoked_ms")).transpose()?,
    })
}
