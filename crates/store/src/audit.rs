//! What the gateway decided, one row each, in order.

use jiff::Timestamp;
use sqlx::{QueryBuilder, Sqlite, sqlite::SqliteRow};
use stockade_model::{SandboxId, WorkspaceId};

use crate::{
    Store, StoreError,
    open::BEGIN,
    rows::{get, millis},
};

/// A decision to be kept.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct AuditRow {
    /// When.
    pub at: Timestamp,
    /// Whose sandbox.
    pub workspace: String,
    /// Which.
    pub sandbox: String,
    /// What was decided on.
    pub kind: String,
    /// The outcome.
    pub verdict: String,
    /// All of it, as JSON on one line.
    pub record: String,
}

/// Which decisions; all conditions hold.
#[derive(Clone, Debug, Default)]
pub struct AuditQuery {
    /// Of this sandbox.
    pub sandbox: Option<SandboxId>,
    /// Of this kind.
    pub kind: Option<String>,
    /// With this outcome.
    pub verdict: Option<String>,
    /// From this time on.
    pub since: Option<Timestamp>,
    /// Before the record of this number.
    pub before: Option<i64>,
    /// At most this many.
    pub limit: u32,
}

impl Store {
    /// Keeps decisions, in order.
    ///
    /// # Errors
    /// The database fails; none is kept then.
    pub async fn put_audit(&self, rows: &[AuditRow]) -> Result<(), StoreError> {
        let fail = || StoreError::database("write audit records");
        let mut tx = self.write.begin_with(BEGIN).await.map_err(fail())?;
        for row in rows {
            sqlx::query(
                "INSERT INTO audit (at_ms, workspace, sandbox, kind, verdict, record) VALUES (?, ?, ?, ?, ?, ?)",
            )
            .bind(millis(row.at))
            .bind(&row.workspace)
            .bind(&row.sandbox)
            .bind(&row.kind)
            .bind(&row.verdict)
            .bind(&row.record)
            .execute(&mut *tx)
            .await
            .map_err(fail())?;
        }
        tx.commit().await.map_err(fail())
    }

    /// Decisions of a workspace's sandboxes, the newest first: number and JSON text.
    ///
    /// # Errors
    /// The database fails.
    pub async fn audit(&self, workspace: &WorkspaceId, query: &AuditQuery) -> Result<Vec<(i64, String)>, StoreError> {
        let mut sql = QueryBuilder::<Sqlite>::new("SELECT sequence, record FROM audit WHERE workspace = ");
        sql.push_bind(workspace.as_str());
        if let Some(sandbox) = &query.sandbox {
            sql.push(" AND sandbox = ").push_bind(sandbox.as_str());
        }
        if let Some(kind) = &query.kind {
            sql.push(" AND kind = ").push_bind(kind);
        }
        if let Some(verdict) = &query.verdict {
            sql.push(" AND verdict = ").push_bind(verdict);
        }
        if let Some(since) = query.since {
            sql.push(" AND at_ms >= ").push_bind(millis(since));
        }
        if let Some(before) = query.before {
            sql.push(" AND sequence < ").push_bind(before);
        }
        sql.push(" ORDER BY sequence DESC LIMIT ").push_bind(i64::from(query.limit));
        let rows = sql.build().fetch_all(&self.read).await.map_err(StoreError::database("read audit records"))?;
        rows.iter().map(read).collect()
    }

    /// Forgets decisions made before a time, and the oldest ones above a number; returns how many.
    ///
    /// # Errors
    /// The database fails.
    pub async fn purge_audit(&self, before: Timestamp, most: u64) -> Result<u64, StoreError> {
        let done = sqlx::query(
            "DELETE FROM audit WHERE at_ms < ?1 OR sequence <= (SELECT coalesce(max(sequence), 0) FROM audit) - ?2",
        )
        .bind(millis(before))
        .bind(i64::try_from(most).unwrap_or(i64::MAX))
        .execute(&self.write)
        .await;
        done.map(|done| done.rows_affected()).map_err(StoreError::database("purge audit records"))
    }
}

fn read(row: &SqliteRow) -> Result<(i64, String), StoreError> {
    Ok((get(row, "sequence")?, get(row, "record")?))
}
