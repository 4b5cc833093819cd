//! Snapshots. A record is `creating` before its directory is begun and `deleting` before it is removed, so
//! that whatever a crash leaves has a record that says what to do with it. Only `ready` ones are seen by
//! clients; ephemeral ones (the moment between a parent and its forks) stay `creating` for all their life.

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;
use sqlx::{QueryBuilder, Sqlite, sqlite::SqliteRow};
use stockade_model::{SandboxId, Snapshot, SnapshotId, TemplateId, WorkspaceId};

use crate::{
    Store, StoreError,
    list::{order_letter, parse_cursor},
    open::{BEGIN, to_the_end},
    rows::{get, id, instant, json, millis, number, optional_id, shape, signed, to_json},
    seal::SecretFile,
};

/// A snapshot and the environment of the sandbox it was taken of.
#[derive(Clone, Debug)]
pub struct SnapshotRecord {
    /// The snapshot.
    pub snapshot: Snapshot,
    /// Environment of every process.
    pub env: BTreeMap<String, String>,
    /// What it is for.
    pub purpose: SnapshotPurpose,
}

/// What a snapshot is for.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum SnapshotPurpose {
    /// Its owner keeps it; the only kind that is listed and found by name.
    #[default]
    Kept,
    /// It is a template's.
    Template,
    /// A build that is run again goes on from it.
    Step,
}

impl SnapshotPurpose {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Kept => "kept",
            Self::Template => "template",
            Self::Step => "step",
        }
    }
}

/// Which snapshots; all conditions hold.
#[derive(Clone, Debug, Default)]
pub struct SnapshotQuery {
    /// Taken of this sandbox.
    pub sandbox: Option<SandboxId>,
    /// Of this purpose.
    pub purpose: SnapshotPurpose,
    /// Of this name.
    pub name: Option<String>,
    /// With all of these labels.
    pub labels: BTreeMap<String, String>,
    /// Oldest first.
    pub ascending: bool,
    /// At most this many.
    pub limit: u32,
    /// The cursor of the page before.
    pub cursor: Option<String>,
}

/// One page.
#[derive(Clone, Debug)]
pub struct SnapshotPage {
    /// The snapshots.
    pub items: Vec<Snapshot>,
    /// Present if there is more.
    pub cursor: Option<String>,
}

impl Store {
    /// Writes a new record, in state `creating`.
    ///
    /// # Errors
    /// The database fails.
    pub async fn insert_snapshot(&self, record: &SnapshotRecord) -> Result<(), StoreError> {
        let (store, record) = (self.clone(), record.clone());
        to_the_end(async move {
            let fail = || StoreError::database("write a snapshot's record");
            let snapshot = &record.snapshot;
            let mut tx = store.write.begin_with(BEGIN).await.map_err(fail())?;
            let done = sqlx::query(
                "INSERT INTO snapshots (id, workspace, name, labels, state, sandbox, parent, template, template_name, vcpus,
                     memory_mib, disk_mib, has_memory, memory_bytes, disk_bytes, paused_us, env, created_ms, expires_ms,
                     purpose)
                 VALUES (?, ?, ?, ?, 'creating', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            )
            .bind(snapshot.id.as_str())
            .bind(snapshot.workspace.as_str())
            .bind(&snapshot.name)
            .bind(to_json(&snapshot.labels))
            .bind(snapshot.sandbox.as_str())
            .bind(snapshot.parent.as_ref().map(SnapshotId::as_str))
            .bind(snapshot.template.as_str())
            .bind(&snapshot.template_name)
            .bind(snapshot.shape.vcpus)
            .bind(signed(snapshot.shape.memory_mib))
            .bind(signed(snapshot.shape.disk_mib))
            .bind(snapshot.has_memory)
            .bind(signed(snapshot.memory_bytes))
            .bind(signed(snapshot.disk_bytes))
            .bind(i64::try_from(snapshot.paused.as_micros()).unwrap_or(i64::MAX))
            .bind(store.secret.seal(snapshot.id.as_str(), to_json(&record.env).as_bytes()))
            .bind(millis(snapshot.created_at))
            .bind(snapshot.expires_at.map(millis))
            .bind(record.purpose.as_str())
            .execute(&mut *tx)
            .await
            .map_err(fail())?;
            for (key, value) in &snapshot.labels {
                sqlx::query("INSERT INTO snapshot_labels (workspace, key, value, snapshot) VALUES (?, ?, ?, ?)")
                    .bind(snapshot.workspace.as_str())
                    .bind(key)
                    .bind(value)
                    .bind(done.last_insert_rowid())
                    .execute(&mut *tx)
                    .await
                    .map_err(fail())?;
            }
            tx.commit().await.map_err(fail())
        })
        .await
    }

    /// `creating` → `ready`, with what is known now that it is taken.
    ///
    /// # Errors
    /// It is in another state, or the database fails.
    pub async fn mark_snapshot_ready(&self, snapshot: &Snapshot) -> Result<(), StoreError> {
        let done = sqlx::query(
            "UPDATE snapshots SET state = 'ready', memory_bytes = ?, disk_bytes = ?, paused_us = ?, created_ms = ?,
                 expires_ms = ? WHERE id = ? AND state = 'creating'",
        )
        .bind(signed(snapshot.memory_bytes))
        .bind(signed(snapshot.disk_bytes))
        .bind(i64::try_from(snapshot.paused.as_micros()).unwrap_or(i64::MAX))
        .bind(millis(snapshot.created_at))
        .bind(snapshot.expires_at.map(millis))
        .bind(snapshot.id.as_str())
        .execute(&self.write)
        .await
        .map_err(StoreError::database("mark a snapshot ready"))?;
        if done.rows_affected() == 0 {
            return Err(StoreError::damaged(format!("record of {}", snapshot.id), "it is not being made"));
        }
        Ok(())
    }

    /// The ready snapshot of an id, or the newest one of a name, that has not expired.
    ///
    /// # Errors
    /// The database fails.
    pub async fn snapshot(
        &self,
        workspace: &WorkspaceId,
        name_or_id: &str,
        now: Timestamp,
    ) -> Result<Option<SnapshotRecord>, StoreError> {
        sqlx::query(
            "SELECT * FROM snapshots WHERE workspace = ?1 AND state = 'ready' AND (id = ?2 OR name = ?2)
                 AND (expires_ms IS NULL OR expires_ms > ?3)
             ORDER BY id = ?2 DESC, sequence DESC LIMIT 1",
        )
        .bind(workspace.as_str())
        .bind(name_or_id)
        .bind(millis(now))
        .fetch_optional(&self.read)
        .await
        .map_err(StoreError::database("look up a snapshot"))?
        .map(|row| record(&row, &self.secret))
        .transpose()
    }

    /// Lists a workspace's ready snapshots that have not expired.
    ///
    /// # Errors
    /// The cursor is not one of this order, or the database fails.
    pub async fn list_snapshots(
        &self,
        workspace: &WorkspaceId,
        query: &SnapshotQuery,
        now: Timestamp,
    ) -> Result<SnapshotPage, StoreError> {
        let mut sql = select(workspace, query, now)?;
        let rows = sql.build().fetch_all(&self.read).await.map_err(StoreError::database("list snapshots"))?;
        let limit = query.limit as usize;
        let mut cursor = None;
        if rows.len() > limit && limit > 0 {
            let last: i64 = get(&rows[limit - 1], "sequence")?;
            cursor = Some(format!("{}{last}", order_letter(query.ascending)));
        }
        let items = rows.iter().take(limit).map(snapshot);
        Ok(SnapshotPage { items: items.collect::<Result<_, StoreError>>()?, cursor })
    }

    /// `ready` → `deleting`: from here on no client sees it. False: it was not ready.
    ///
    /// # Errors
    /// The database fails.
    pub async fn begin_snapshot_delete(&self, id: &SnapshotId) -> Result<bool, StoreError> {
        let done = sqlx::query("UPDATE snapshots SET state = 'deleting' WHERE id = ? AND state = 'ready'")
            .bind(id.as_str())
            .execute(&self.write)
            .await;
        done.map(|done| done.rows_affected() > 0).map_err(StoreError::database("mark a snapshot as being deleted"))
    }

    /// A living sandbox that was made from a snapshot, if there is one.
    ///
    /// # Errors
    /// The database fails.
    pub async fn made_from_snapshot(
        &self,
        workspace: &WorkspaceId,
        snapshot: &SnapshotId,
    ) -> Result<Option<SandboxId>, StoreError> {
        sqlx::query(
            "SELECT id FROM sandboxes
             WHERE workspace = ? AND state NOT IN ('failed', 'gone') AND lineage ->> 'snapshot' = ? LIMIT 1",
        )
        .bind(workspace.as_str())
        .bind(snapshot.as_str())
        .fetch_optional(&self.read)
        .await
        .map_err(StoreError::database("look for sandboxes of a snapshot"))?
        .map(|row| id(&row, "id"))
        .transpose()
    }

    /// What builds have kept of their steps on a template.
    ///
    /// # Errors
    /// The database fails.
    pub async fn steps_on(&self, template: &TemplateId) -> Result<Vec<SnapshotId>, StoreError> {
        sqlx::query("SELECT id FROM snapshots WHERE template = ? AND purpose = ? AND state = 'ready'")
            .bind(template.as_str())
            .bind(SnapshotPurpose::Step.as_str())
            .fetch_all(&self.read)
            .await
            .map_err(StoreError::database("look for the steps of builds"))?
            .iter()
            .map(|row| id(row, "id"))
            .collect()
    }

    /// Forgets a snapshot whose directory is gone. Repeatable.
    ///
    /// # Errors
    /// The database fails.
    pub async fn remove_snapshot(&self, id: &SnapshotId) -> Result<(), StoreError> {
        let done = sqlx::query("DELETE FROM snapshots WHERE id = ?").bind(id.as_str()).execute(&self.write).await;
        done.map(drop).map_err(StoreError::database("remove a snapshot's record"))
    }

    /// Ready snapshots that have expired.
    ///
    /// # Errors
    /// The database fails.
    pub async fn expired_snapshots(&self, now: Timestamp) -> Result<Vec<SnapshotId>, StoreError> {
        sqlx::query("SELECT id FROM snapshots WHERE state = 'ready' AND expires_ms <= ?")
            .bind(millis(now))
            .fetch_all(&self.write)
            .await
            .map_err(StoreError::database("look for expired snapshots"))?
            .iter()
            .map(|row| id(row, "id"))
            .collect()
    }

    /// Every snapshot of every workspace and whether it is ready; for the server's start.
    ///
    /// # Errors
    /// The database fails.
    pub async fn all_snapshots(&self) -> Result<Vec<(Snapshot, bool)>, StoreError> {
        sqlx::query("SELECT * FROM snapshots ORDER BY sequence")
            .fetch_all(&self.write)
            .await
            .map_err(StoreError::database("read the snapshots"))?
            .iter()
            .map(|row| Ok((snapshot(row)?, get::<&str>(row, "state")? == "ready")))
            .collect()
    }

    /// How many snapshots and living sandboxes need a template's files.
    ///
    /// # Errors
    /// The database fails.
    pub async fn template_users(&self, template: &TemplateId) -> Result<u64, StoreError> {
        let users: i64 = sqlx::query_scalar(
            "SELECT (SELECT count(*) FROM snapshots WHERE template = ?1)
                 + (SELECT count(*) FROM sandboxes WHERE template = ?1 AND state NOT IN ('failed', 'gone'))",
        )
        .bind(template.as_str())
        .fetch_one(&self.write)
        .await
        .map_err(StoreError::database("count the users of a template"))?;
        Ok(u64::try_from(users).unwrap_or_default())
    }
}

fn select<'q>(
    workspace: &'q WorkspaceId,
    query: &'q SnapshotQuery,
    now: Timestamp,
) -> Result<QueryBuilder<'q, Sqlite>, StoreError> {
    let mut sql = QueryBuilder::new("SELECT * FROM snapshots s WHERE s.state = 'ready' AND s.workspace = ");
    sql.push_bind(workspace.as_str());
    sql.push(" AND (s.expires_ms IS NULL OR s.expires_ms > ").push_bind(millis(now)).push(")");
    sql.push(" AND s.purpose = ").push_bind(query.purpose.as_str());
    if let Some(sandbox) = &query.sandbox {
        sql.push(" AND s.sandbox = ").push_bind(sandbox.as_str());
    }
    if let Some(name) = &query.name {
        sql.push(" AND s.name = ").push_bind(name);
    }
    for (key, value) in &query.labels {
        sql.push(" AND EXISTS (SELECT 1 FROM snapshot_labels l WHERE l.snapshot = s.sequence")
            .push(" AND l.workspace = s.workspace AND l.key = ")
            .push_bind(key)
            .push(" AND l.value = ")
            .push_bind(value)
            .push(")");
    }
    if let Some(cursor) = &query.cursor {
        let last = parse_cursor(cursor, query.ascending).ok_or(StoreError::BadCursor)?;
        sql.push(if query.ascending { " AND s.sequence > " } else { " AND s.sequence < " }).push_bind(last);
    }
    sql.push(if query.ascending { " ORDER BY s.sequence" } else { " ORDER BY s.sequence DESC" });
    sql.push(" LIMIT ").push_bind(i64::from(query.limit) + 1);
    Ok(sql)
}

fn record(row: &SqliteRow, secret: &SecretFile) -> Result<SnapshotRecord, StoreError> {
    let snapshot = snapshot(row)?;
    let env = secret.open(snapshot.id.as_str(), get(row, "env")?)?;
    let purposes = [SnapshotPurpose::Kept, SnapshotPurpose::Template, SnapshotPurpose::Step];
    let word: &str = get(row, "purpose")?;
    let purpose = purposes.into_iter().find(|purpose| purpose.as_str() == word);
    let purpose = purpose.ok_or_else(|| StoreError::damaged("a snapshot's purpose", word))?;
    Ok(SnapshotRecord { env: json(&env, "env")?, snapshot, purpose })
}

fn snapshot(row: &SqliteRow) -> Result<Snapshot, StoreError> {
    let expires: Option<i64> = get(row, "expires_ms")?;
    Ok(Snapshot {
        id: id(row, "id")?,
        workspace: id(row, "workspace")?,
        name: get(row, "name")?,
        labels: json(get::<&str>(row, "labels")?.as_bytes(), "labels")?,
        sandbox: id(row, "sandbox")?,
        parent: optional_id(row, "parent")?,
        template: id(row, "template")?,
        template_name: get(row, "template_name")?,
        shape: shape(row)?,
        has_memory: get(row, "has_memory")?,
        memory_bytes: number(row, "memory_bytes")?,
        disk_bytes: number(row, "disk_bytes")?,
        paused: Duration::from_micros(number(row, "paused_us")?),
        created_at: instant(get(row, "created_ms")?, "created_ms")?,
        expires_at: expires.map(|ms| instant(ms, "expires_ms")).transpose()?,
    })
}
