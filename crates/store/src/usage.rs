//! The meter's book. A row is one stretch of one state of one subject, at most an hour; it is written whole
//! and again as it grows, so that a write that is repeated, or one that is lost, neither doubles nor tears.

use std::collections::BTreeMap;

use jiff::Timestamp;
use sqlx::{QueryBuilder, Sqlite, SqliteConnection, sqlite::SqliteRow};
use stockade_model::{MachineId, SandboxId, Usage, WorkspaceId};

use crate::{
    Store, StoreError,
    open::{BEGIN, to_the_end},
    rows::{get, id, instant, json, millis, number, optional_id, signed, to_json},
};

/// One stretch.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct UsageRow {
    /// A sandbox's or a snapshot's id.
    pub subject: String,
    /// Which of the subject's rows.
    pub sequence: u64,
    /// The sandbox it counts for.
    pub sandbox: SandboxId,
    /// What the subject was: a state's or tier's word, or `snapshot`.
    pub state: String,
    /// From when.
    pub from: Timestamp,
    /// To when.
    pub to: Timestamp,
    /// The machine whose counter `cpu_seen` is.
    pub machine: Option<MachineId>,
    /// The machine's own count of processor time when the row was last written, microseconds.
    pub cpu_seen: u64,
    /// Bytes of memory it held then.
    pub memory_seen: u64,
    /// Bytes of disk it held then.
    pub disk_seen: u64,
    /// What was used from `from` to `to`; the times are in those two.
    pub usage: Usage,
}

/// Whose the usage of a sandbox is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Metered {
    /// The sandbox.
    pub sandbox: SandboxId,
    /// Its workspace.
    pub workspace: WorkspaceId,
    /// The template's name.
    pub template_name: String,
    /// Its labels.
    pub metadata: BTreeMap<String, String>,
}

/// Which usage; all conditions hold.
#[derive(Clone, Debug, Default)]
pub struct UsageQuery {
    /// Of this sandbox.
    pub sandbox: Option<SandboxId>,
    /// Of sandboxes with all of these labels.
    pub metadata: BTreeMap<String, String>,
    /// Not before.
    pub from: Option<Timestamp>,
    /// Before.
    pub to: Option<Timestamp>,
}

impl Store {
    /// Writes what the meter has counted, in one transaction. Repeatable.
    ///
    /// # Errors
    /// The database fails; nothing is written then.
    pub async fn put_usage(&self, metered: &[Metered], rows: &[UsageRow]) -> Result<(), StoreError> {
        let (store, metered, rows) = (self.clone(), metered.to_vec(), rows.to_vec());
        to_the_end(async move {
            if metered.is_empty() && rows.is_empty() {
                return Ok(());
            }
            let fail = || StoreError::database("write usage");
            let mut tx = store.write.begin_with(BEGIN).await.map_err(fail())?;
            for metered in metered {
                sqlx::query(
                    "INSERT OR IGNORE INTO metered (sandbox, workspace, template_name, metadata) VALUES (?, ?, ?, ?)",
                )
                .bind(metered.sandbox.as_str())
                .bind(metered.workspace.as_str())
                .bind(&metered.template_name)
                .bind(to_json(&metered.metadata))
                .execute(&mut *tx)
                .await
                .map_err(fail())?;
            }
            for row in rows {
                put(&mut tx, &row).await.map_err(fail())?;
            }
            tx.commit().await.map_err(fail())
        })
        .await
    }

    /// The last row of a subject.
    ///
    /// # Errors
    /// The database fails.
    pub async fn last_usage(&self, subject: &str) -> Result<Option<UsageRow>, StoreError> {
        sqlx::query("SELECT * FROM usage WHERE subject = ? ORDER BY sequence DESC LIMIT 1")
            .bind(subject)
            .fetch_optional(&self.write)
            .await
            .map_err(StoreError::database("read a subject's last usage"))?
            .map(|row| read(&row))
            .transpose()
    }

    /// A workspace's usage, by sandbox and time.
    ///
    /// # Errors
    /// The database fails.
    pub async fn usage(
        &self,
        workspace: &WorkspaceId,
        query: &UsageQuery,
    ) -> Result<Vec<(Metered, Vec<UsageRow>)>, StoreError> {
        let mut sql = select(workspace, query);
        let rows = sql.build().fetch_all(&self.write).await.map_err(StoreError::database("read usage"))?;
        let mut found: Vec<(Metered, Vec<UsageRow>)> = Vec::new();
        for row in rows {
            let usage = read(&row)?;
            match found.last_mut() {
                Some((metered, rows)) if metered.sandbox == usage.sandbox => rows.push(usage),
                _ => found.push((metered(&row)?, vec![usage])),
            }
        }
        // A map of labels is not worth a table here: a workspace's metered sandboxes are read anyway.
        let has_all = |labels: &BTreeMap<String, String>| {
            query.metadata.iter().all(|(key, value)| labels.get(key) == Some(value))
        };
        found.retain(|(metered, _)| has_all(&metered.metadata));
        Ok(found)
    }

    /// Forgets usage that ended before a time.
    ///
    /// # Errors
    /// The database fails.
    pub async fn purge_usage(&self, before: Timestamp) -> Result<u64, StoreError> {
        let fail = || StoreError::database("purge usage");
        let done = sqlx::query("DELETE FROM usage WHERE to_ms < ?").bind(millis(before)).execute(&self.write).await;
        let purged = done.map_err(fail())?.rows_affected();
        if purged > 0 {
            // Repeatable on its own: should this fail, the next purge does it.
            sqlx::query("DELETE FROM metered WHERE sandbox NOT IN (SELECT sandbox FROM usage)")
                .execute(&self.write)
                .await
                .map_err(fail())?;
        }
        Ok(purged)
    }
}

async fn put(connection: &mut SqliteConnection, row: &UsageRow) -> sqlx::Result<()> {
    let short = |number: u128| i64::try_from(number).unwrap_or(i64::MAX);
    sqlx::query(
        "INSERT OR REPLACE INTO usage (subject, sequence, sandbox, state, from_ms, to_ms, machine, cpu_seen, cpu_micros,
             memory_byte_ms, disk_byte_ms, snapshot_byte_ms, egress_bytes, memory_seen, disk_seen)
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    )
    .bind(&row.subject)
    .bind(signed(row.sequence))
    .bind(row.sandbox.as_str())
    .bind(&row.state)
    .bind(millis(row.from))
    .bind(millis(row.to))
    .bind(row.machine.as_ref().map(MachineId::as_str))
    .bind(signed(row.cpu_seen))
    .bind(short(row.usage.cpu_micros))
    .bind(short(row.usage.memory_byte_ms))
    .bind(short(row.usage.disk_byte_ms))
    .bind(short(row.usage.snapshot_byte_ms))
    .bind(short(row.usage.egress_bytes))
    .bind(signed(row.memory_seen))
    .bind(signed(row.disk_seen))
    .execute(connection)
    .await
    .map(drop)
}

fn select<'q>(workspace: &'q WorkspaceId, query: &'q UsageQuery) -> QueryBuilder<'q, Sqlite> {
    let mut sql = QueryBuilder::new(
        "SELECT u.*, m.workspace, m.template_name, m.metadata FROM metered m JOIN usage u ON u.sandbox = m.sandbox
         WHERE m.workspace = ",
    );
    sql.push_bind(workspace.as_str());
    if let Some(sandbox) = &query.sandbox {
        sql.push(" AND m.sandbox = ").push_bind(sandbox.as_str());
    }
    if let Some(from) = query.from {
        sql.push(" AND u.to_ms > ").push_bind(millis(from));
    }
    if let Some(to) = query.to {
        sql.push(" AND u.from_ms < ").push_bind(millis(to));
    }
    sql.push(" ORDER BY m.sandbox, u.from_ms, u.subject, u.sequence");
    sql
}

fn metered(row: &SqliteRow) -> Result<Metered, StoreError> {
    Ok(Metered {
        sandbox: id(row, "sandbox")?,
        workspace: id(row, "workspace")?,
        template_name: get(row, "template_name")?,
        metadata: json(get::<&str>(row, "metadata")?.as_bytes(), "metadata")?,
    })
}

fn read(row: &SqliteRow) -> Result<UsageRow, StoreError> {
    let wide = |column| number(row, column).map(u128::from);
    Ok(UsageRow {
        subject: get(row, "subject")?,
        sequence: number(row, "sequence")?,
        sandbox: id(row, "sandbox")?,
        state: get(row, "state")?,
        from: instant(get(row, "from_ms")?, "from_ms")?,
        to: instant(get(row, "to_ms")?, "to_ms")?,
        machine: optional_id(row, "machine")?,
        cpu_seen: number(row, "cpu_seen")?,
        memory_seen: number(row, "memory_seen")?,
        disk_seen: number(row, "disk_seen")?,
        usage: Usage {
            cpu_micros: wide("cpu_micros")?,
            memory_byte_ms: wide("memory_byte_ms")?,
            disk_byte_ms: wide("disk_byte_ms")?,
            snapshot_byte_ms: wide("snapshot_byte_ms")?,
            egress_bytes: wide("egress_bytes")?,
            running_ms: 0,
            paused_ms: 0,
        },
    })
}
