//! Sandboxes, one transaction per change. A change names the state it starts from, so that a late or
//! repeated step cannot undo what came after it.

use jiff::Timestamp;
use sqlx::{Row, SqliteConnection, sqlite::SqliteRow};
use stockade_model::{Ending, MachineId, Sandbox, SandboxId, SandboxState, SnapshotId, Tier, WorkspaceId};

use crate::{
    Idempotency, Store, StoreError, idempotency,
    open::{BEGIN, to_the_end},
    rows::{self, duration_millis, get, id, instant, json, millis, millis_rounded_up, signed, to_json},
};

/// What became of [`Store::insert_sandbox`].
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Inserted {
    /// The record is written.
    New,
    /// The idempotency key stands for an earlier request; nothing was written.
    Existing(crate::IdempotencyRecord),
}

/// A change of state.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SandboxEvent {
    /// When.
    pub at: Timestamp,
    /// To what.
    pub state: SandboxState,
    /// The tier it is in, or on its way to or from.
    pub tier: Option<Tier>,
    /// Why, where it is an end.
    pub ending: Option<Ending>,
}

impl Store {
    /// The access token of a sandbox, for the record that is about to be made.
    pub fn access_token(&self, id: &SandboxId) -> stockade_model::Secret {
        self.secret.access_token(id)
    }

    /// The token of a link to one port of a sandbox that works until a time, in seconds since the epoch.
    pub fn preview_token(&self, id: &SandboxId, port: u16, expires: i64) -> stockade_model::Secret {
        self.secret.preview_token(id, port, expires)
    }

    /// The token that opens all of a sandbox's ports, as long as it lives.
    pub fn traffic_token(&self, id: &SandboxId) -> stockade_model::Secret {
        self.secret.traffic_token(id)
    }

    /// Writes a new record, in state `creating`, unless the idempotency key is taken.
    ///
    /// # Errors
    /// The database fails.
    pub async fn insert_sandbox(&self, sandbox: &Sandbox, key: Option<&Idempotency>) -> Result<Inserted, StoreError> {
        let (store, sandbox, key) = (self.clone(), sandbox.clone(), key.cloned());
        to_the_end(async move {
            let fail = || StoreError::database("write a sandbox's record");
            let mut tx = store.write.begin_with(BEGIN).await.map_err(fail())?;
            if let Some(key) = &key {
                if let Some(existing) = idempotency::find(&mut tx, &sandbox.workspace, &key.key).await? {
                    return Ok(Inserted::Existing(existing));
                }
                idempotency::put(&mut tx, &sandbox.workspace, key, &sandbox.id).await.map_err(fail())?;
            }
            let sequence = store.insert_row(&mut tx, &sandbox).await.map_err(fail())?;
            for (key, value) in &sandbox.metadata {
                sqlx::query("INSERT INTO sandbox_labels (workspace, key, value, sandbox) VALUES (?, ?, ?, ?)")
                    .bind(sandbox.workspace.as_str())
                    .bind(key)
                    .bind(value)
                    .bind(sequence)
                    .execute(&mut *tx)
                    .await
                    .map_err(fail())?;
            }
            event(&mut tx, &sandbox.id, sandbox.created_at, SandboxState::Creating, None).await.map_err(fail())?;
            tx.commit().await.map_err(fail())?;
            Ok(Inserted::New)
        })
        .await
    }

    async fn insert_row(&self, connection: &mut SqliteConnection, sandbox: &Sandbox) -> sqlx::Result<i64> {
        sqlx::query(
            "INSERT INTO sandboxes (id, workspace, template, template_name, state, vcpus, memory_mib, disk_mib, machine,
                 metadata, env, created_ms, deadline_ms, lifetime_ms, rules, lineage)
             VALUES (?, ?, ?, ?, 'creating', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        )
        .bind(sandbox.id.as_str())
        .bind(sandbox.workspace.as_str())
        .bind(sandbox.template.as_str())
        .bind(&sandbox.template_name)
        .bind(sandbox.shape.vcpus)
        .bind(signed(sandbox.shape.memory_mib))
        .bind(signed(sandbox.shape.disk_mib))
        .bind(sandbox.machine.as_ref().map(MachineId::as_str))
        .bind(to_json(&sandbox.metadata))
        .bind(self.secret.seal(sandbox.id.as_str(), to_json(&sandbox.env).as_bytes()))
        .bind(millis(sandbox.created_at))
        .bind(millis_rounded_up(sandbox.deadline))
        .bind(duration_millis(sandbox.lifetime))
        .bind(to_json(&sandbox.rules))
        .bind(to_json(&sandbox.lineage))
        .execute(connection)
        .await
        .map(|done| done.last_insert_rowid())
    }

    /// One sandbox in a workspace's sight, also one that has ended.
    ///
    /// # Errors
    /// The database fails.
    pub async fn sandbox(&self, workspace: &WorkspaceId, id: &SandboxId) -> Result<Option<Sandbox>, StoreError> {
        let row = sqlx::query("SELECT * FROM sandboxes WHERE id = ? AND workspace = ?")
            .bind(id.as_str())
            .bind(workspace.as_str())
            .fetch_optional(&self.read)
            .await
            .map_err(StoreError::database("read a sandbox's record"))?;
        row.map(|row| Ok(rows::sandbox(&row, &self.secret)?.0)).transpose()
    }

    /// One sandbox of any workspace: for callers that hold its own token instead of an API key, which
    /// must be compared before anything is told.
    ///
    /// # Errors
    /// The database fails.
    pub async fn sandbox_of_any_workspace(&self, id: &SandboxId) -> Result<Option<Sandbox>, StoreError> {
        let row = sqlx::query("SELECT * FROM sandboxes WHERE id = ?")
            .bind(id.as_str())
            .fetch_optional(&self.read)
            .await
            .map_err(StoreError::database("read a sandbox's record"))?;
        row.map(|row| Ok(rows::sandbox(&row, &self.secret)?.0)).transpose()
    }

    /// Every sandbox that is not final, oldest first, with the ending a `killing` one will have: for
    /// adoption at start.
    ///
    /// # Errors
    /// The database fails.
    pub async fn unfinished(&self) -> Result<Vec<(Sandbox, Option<Ending>)>, StoreError> {
        sqlx::query("SELECT * FROM sandboxes WHERE state NOT IN ('failed', 'gone') ORDER BY sequence")
            .fetch_all(&self.write)
            .await
            .map_err(StoreError::database("read the records that are not final"))?
            .iter()
            .map(|row| rows::sandbox(row, &self.secret))
            .collect()
    }

    /// Names the machine a sandbox is about to get. For its owner task.
    ///
    /// # Errors
    /// It is final or unknown, or the database fails.
    pub async fn set_machine(&self, id: &SandboxId, machine: &MachineId) -> Result<(), StoreError> {
        let done = sqlx::query("UPDATE sandboxes SET machine = ? WHERE id = ? AND state NOT IN ('failed', 'gone')")
            .bind(machine.as_str())
            .bind(id.as_str())
            .execute(&self.write)
            .await
            .map_err(StoreError::database("name a sandbox's machine"))?;
        changed(done.rows_affected(), id, SandboxState::Creating)
    }

    /// `creating` → `running`. For its owner task.
    ///
    /// # Errors
    /// It is in another state, or the database fails.
    pub async fn mark_running(
        &self,
        id: &SandboxId,
        started_at: Timestamp,
        deadline: Timestamp,
    ) -> Result<(), StoreError> {
        let (store, id) = (self.clone(), id.clone());
        to_the_end(async move {
            let fail = || StoreError::database("mark a sandbox running");
            let mut tx = store.write.begin_with(BEGIN).await.map_err(fail())?;
            let done = sqlx::query(
                "UPDATE sandboxes SET state = 'running', started_ms = ?, deadline_ms = ?
                 WHERE id = ? AND state = 'creating'",
            )
            .bind(millis(started_at))
            .bind(millis_rounded_up(deadline))
            .bind(id.as_str())
            .execute(&mut *tx)
            .await
            .map_err(fail())?;
            changed(done.rows_affected(), &id, SandboxState::Creating)?;
            event(&mut tx, &id, started_at, SandboxState::Running, None).await.map_err(fail())?;
            tx.commit().await.map_err(fail())
        })
        .await
    }

    /// Writes what changes in the life of a sandbox that has run (its state, machine, times, where it is
    /// kept, where it comes from), if it still is in the state `from`. For its owner task.
    ///
    /// # Errors
    /// It is in another state, or the database fails.
    pub async fn put_life(&self, sandbox: &Sandbox, from: SandboxState, at: Timestamp) -> Result<(), StoreError> {
        let (store, sandbox) = (self.clone(), sandbox.clone());
        to_the_end(async move {
            let fail = || StoreError::database("write a sandbox's state");
            let mut tx = store.write.begin_with(BEGIN).await.map_err(fail())?;
            put_life(&mut tx, &sandbox, from, at).await?;
            tx.commit().await.map_err(fail())
        })
        .await
    }

    /// In one transaction: `sandbox` is written as by [`Store::put_life`], and the machine it has now is no
    /// longer `child`'s, which has ended. For the owner of `sandbox`.
    ///
    /// # Errors
    /// One of them is in another state, or the database fails; nothing is written then.
    pub async fn promote(
        &self,
        sandbox: &Sandbox,
        from: SandboxState,
        child: &SandboxId,
        ending: &Ending,
    ) -> Result<(), StoreError> {
        let (store, sandbox, child, ending) = (self.clone(), sandbox.clone(), child.clone(), ending.clone());
        to_the_end(async move {
            let fail = || StoreError::database("give a sandbox's machine to another");
            let mut tx = store.write.begin_with(BEGIN).await.map_err(fail())?;
            put_life(&mut tx, &sandbox, from, ending.at).await?;
            let done = sqlx::query(
                "UPDATE sandboxes SET state = 'gone', machine = NULL, ending = ?, ended_ms = ?
                 WHERE id = ? AND state = 'paused'",
            )
            .bind(to_json(&ending))
            .bind(millis(ending.at))
            .bind(child.as_str())
            .execute(&mut *tx)
            .await
            .map_err(fail())?;
            changed(done.rows_affected(), &child, SandboxState::Paused)?;
            event(&mut tx, &child, ending.at, SandboxState::Gone, Some(&ending)).await.map_err(fail())?;
            tx.commit().await.map_err(fail())
        })
        .await
    }

    /// Any living state → `killing`, and what the ending will have been. Repeatable: the first ending
    /// stays. For its owner task.
    ///
    /// # Errors
    /// It is final or unknown, or the database fails.
    pub async fn begin_end(&self, id: &SandboxId, ending: &Ending) -> Result<(), StoreError> {
        let (store, id, ending) = (self.clone(), id.clone(), ending.clone());
        to_the_end(async move {
            let fail = || StoreError::database("mark a sandbox as being ended");
            let mut tx = store.write.begin_with(BEGIN).await.map_err(fail())?;
            let state: Option<String> =
                sqlx::query_scalar("SELECT state FROM sandboxes WHERE id = ? AND state NOT IN ('failed', 'gone')")
                    .bind(id.as_str())
                    .fetch_optional(&mut *tx)
                    .await
                    .map_err(fail())?;
            match state.as_deref() {
                None => return Err(StoreError::WrongState { id, expected: SandboxState::Running }),
                Some("killing") => return Ok(()),
                Some(_) => {}
            }
            sqlx::query("UPDATE sandboxes SET state = 'killing', ending = ? WHERE id = ?")
                .bind(to_json(&ending))
                .bind(id.as_str())
                .execute(&mut *tx)
                .await
                .map_err(fail())?;
            event(&mut tx, &id, ending.at, SandboxState::Killing, None).await.map_err(fail())?;
            tx.commit().await.map_err(fail())
        })
        .await
    }

    /// A final state, with its ending. Repeatable: a record that is final stays as it is. A create that
    /// failed gives its idempotency key back, so that the client may try again. For its owner task.
    ///
    /// # Errors
    /// The database fails.
    pub async fn finish(&self, id: &SandboxId, state: SandboxState, ending: &Ending) -> Result<(), StoreError> {
        let (store, id, ending) = (self.clone(), id.clone(), ending.clone());
        to_the_end(async move {
            debug_assert!(state.is_final());
            let fail = || StoreError::database("write a sandbox's end");
            let mut tx = store.write.begin_with(BEGIN).await.map_err(fail())?;
            let done = sqlx::query(
                "UPDATE sandboxes SET state = ?, ending = ?, ended_ms = ? WHERE id = ? AND state NOT IN ('failed', 'gone')",
            )
            .bind(state.as_str())
            .bind(to_json(&ending))
            .bind(millis(ending.at))
            .bind(id.as_str())
            .execute(&mut *tx)
            .await
            .map_err(fail())?;
            if done.rows_affected() > 0 {
                event(&mut tx, &id, ending.at, state, Some(&ending)).await.map_err(fail())?;
            }
            if state == SandboxState::Failed {
                sqlx::query("DELETE FROM idempotency_keys WHERE sandbox = ?")
                    .bind(id.as_str())
                    .execute(&mut *tx)
                    .await
                    .map_err(fail())?;
            }
            tx.commit().await.map_err(fail())
        })
        .await
    }

    /// What happened to a sandbox, oldest first.
    ///
    /// # Errors
    /// The database fails.
    pub async fn events(&self, workspace: &WorkspaceId, id: &SandboxId) -> Result<Vec<SandboxEvent>, StoreError> {
        sqlx::query(
            "SELECT e.at_ms, e.state, e.tier, e.ending FROM sandbox_events e JOIN sandboxes s ON s.sequence = e.sandbox
             WHERE s.id = ? AND s.workspace = ? ORDER BY e.sequence",
        )
        .bind(id.as_str())
        .bind(workspace.as_str())
        .fetch_all(&self.read)
        .await
        .map_err(StoreError::database("read a sandbox's events"))?
        .iter()
        .map(read_event)
        .collect()
    }

    /// Forgets sandboxes that ended before a time; returns how many.
    ///
    /// # Errors
    /// The database fails.
    pub async fn purge_ended(&self, before: Timestamp) -> Result<u64, StoreError> {
        let done = sqlx::query("DELETE FROM sandboxes WHERE ended_ms IS NOT NULL AND ended_ms < ?")
            .bind(millis(before))
            .execute(&self.write)
            .await;
        done.map(|done| done.rows_affected()).map_err(StoreError::database("purge ended sandboxes"))
    }
}

async fn put_life(
    connection: &mut SqliteConnection,
    sandbox: &Sandbox,
    from: SandboxState,
    at: Timestamp,
) -> Result<(), StoreError> {
    let fail = || StoreError::database("write a sandbox's state");
    let done = sqlx::query(
        "UPDATE sandboxes SET state = ?, machine = ?, deadline_ms = ?, lifetime_ms = ?, remaining_ms = ?, tier = ?,
             saved = ?, idle_since_ms = ?, lineage = ?, rules = ? WHERE id = ? AND state = ?",
    )
    .bind(sandbox.state.as_str())
    .bind(sandbox.machine.as_ref().map(MachineId::as_str))
    .bind(millis_rounded_up(sandbox.deadline))
    .bind(duration_millis(sandbox.lifetime))
    .bind(sandbox.remaining.map(duration_millis))
    .bind(sandbox.tier.map(Tier::as_str))
    .bind(sandbox.saved.as_ref().map(SnapshotId::as_str))
    .bind(sandbox.idle_since.map(millis))
    .bind(to_json(&sandbox.lineage))
    .bind(to_json(&sandbox.rules))
    .bind(sandbox.id.as_str())
    .bind(from.as_str())
    .execute(&mut *connection)
    .await
    .map_err(fail())?;
    changed(done.rows_affected(), &sandbox.id, from)?;
    if sandbox.state != from {
        let told = "INSERT INTO sandbox_events (sandbox, at_ms, state, tier)
                    SELECT sequence, ?, ?, ? FROM sandboxes WHERE id = ?";
        sqlx::query(told)
            .bind(millis(at))
            .bind(sandbox.state.as_str())
            .bind(sandbox.tier.map(Tier::as_str))
            .bind(sandbox.id.as_str())
            .execute(connection)
            .await
            .map_err(fail())?;
    }
    Ok(())
}

async fn event(
    connection: &mut SqliteConnection,
    id: &SandboxId,
    at: Timestamp,
    state: SandboxState,
    ending: Option<&Ending>,
) -> sqlx::Result<()> {
    sqlx::query(
        "INSERT INTO sandbox_events (sandbox, at_ms, state, ending)
         SELECT sequence, ?, ?, ? FROM sandboxes WHERE id = ?",
    )
    .bind(millis(at))
    .bind(state.as_str())
    .bind(ending.map(to_json))
    .bind(id.as_str())
    .execute(connection)
    .await
    .map(drop)
}

fn read_event(row: &SqliteRow) -> Result<SandboxEvent, StoreError> {
    let ending: Option<&str> = row.try_get("ending").map_err(|error| StoreError::damaged("ending", error))?;
    Ok(SandboxEvent {
        at: instant(get(row, "at_ms")?, "at_ms")?,
        state: id(row, "state")?,
        tier: rows::tier(row)?,
        ending: ending.map(|text| json(text.as_bytes(), "ending")).transpose()?,
    })
}

fn changed(rows: u64, id: &SandboxId, expected: SandboxState) -> Result<(), StoreError> {
    if rows == 0 { Err(StoreError::WrongState { id: id.clone(), expected }) } else { Ok(()) }
}
