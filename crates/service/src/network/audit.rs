//! Decisions of the gateway: into the store in batches, and to whoever listens.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use jiff::Timestamp;
use stockade_gateway::audit::{AuditRecord, AuditSink};
use stockade_model::{SandboxId, WorkspaceId};
use stockade_store::{AuditQuery, AuditRow, Store};
use tokio::sync::{broadcast, mpsc, oneshot};
use tracing::warn;

use super::secrets::WORKSPACE;
use crate::{Principal, Service, ServiceError, error::store_error};

/// Records that wait to be written; more are dropped and counted.
const WAITING: usize = 16_384;
const BATCH: usize = 512;
/// Records a slow listener may be behind.
const BEHIND: usize = 4_096;
const LARGEST_PAGE: u32 = 1_000;

/// Where the gateway's records go.
pub(crate) struct Log {
    sender: mpsc::Sender<Entry>,
    receiver: Mutex<Option<mpsc::Receiver<Entry>>>,
    live: broadcast::Sender<AuditLine>,
    dropped: AtomicU64,
}

enum Entry {
    Row(AuditRow),
    Flush(oneshot::Sender<()>),
}

/// A record as it is streamed.
#[derive(Clone, Debug)]
pub struct AuditLine {
    workspace: Arc<str>,
    sandbox: Arc<str>,
    /// JSON on one line.
    pub text: Arc<str>,
}

impl AuditLine {
    /// Whether it belongs to a caller's workspace and, if one is named, to a sandbox.
    pub fn is_for(&self, workspace: &WorkspaceId, sandbox: Option<&SandboxId>) -> bool {
        &*self.workspace == workspace.as_str() && sandbox.is_none_or(|sandbox| *self.sandbox == *sandbox.as_str())
    }
}

/// Which decisions; all conditions hold.
#[derive(Clone, Debug, Default)]
pub struct AuditFilter {
    /// Of this sandbox.
    pub sandbox: Option<SandboxId>,
    /// Of this kind.
    pub kind: Option<String>,
    /// With this outcome.
    pub verdict: Option<String>,
    /// From this time on.
    pub since: Option<Timestamp>,
    /// At most this many, 1 to 1000.
    pub limit: u32,
    /// The cursor of the page before.
    pub cursor: Option<String>,
}

impl Log {
    pub(super) fn new() -> Arc<Self> {
        let (sender, receiver) = mpsc::channel(WAITING);
        let live = broadcast::channel(BEHIND).0;
        Arc::new(Self { sender, receiver: Mutex::new(Some(receiver)), live, dropped: AtomicU64::new(0) })
    }

    /// Writes until the service ends.
    pub(crate) async fn write(self: Arc<Self>, store: Store) {
        let receiver = self.receiver.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut receiver) = receiver else { return };
        let mut batch = Vec::with_capacity(BATCH);
        while receiver.recv_many(&mut batch, BATCH).await > 0 {
            let (mut rows, mut flushes) = (Vec::with_capacity(batch.len()), Vec::new());
            for entry in batch.drain(..) {
                match entry {
                    Entry::Row(row) => rows.push(row),
                    Entry::Flush(done) => flushes.push(done),
                }
            }
            if !rows.is_empty()
                && let Err(error) = store.put_audit(&rows).await
            {
                warn!(records = rows.len(), error = &error as &dyn std::error::Error, "audit records are lost");
            }
            let dropped = self.dropped.swap(0, Ordering::Relaxed);
            if dropped > 0 {
                warn!(dropped, "audit records came faster than they could be written and are lost");
            }
            for flush in flushes {
                flush.send(()).ok();
            }
        }
    }

    /// Returns when everything recorded before is in the store.
    pub(crate) async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        if self.sender.send(Entry::Flush(done)).await.is_ok() {
            // Not answered where the writer has ended; its records are lost then, as it has said.
            tokio::time::timeout(Duration::from_secs(5), flushed).await.ok();
        }
    }
}

impl AuditSink for Log {
    fn record(&self, record: AuditRecord) {
        let Ok(text) = serde_json::to_string(&record) else { return };
        let workspace = record.owner.get(WORKSPACE).cloned().unwrap_or_default();
        let word = |value: serde_json::Result<serde_json::Value>| match value {
            Ok(serde_json::Value::String(word)) => word,
            _ => String::new(),
        };
        if self.live.receiver_count() > 0 {
            let line = AuditLine {
                workspace: workspace.as_str().into(),
                sandbox: record.sandbox.as_str().into(),
                text: text.as_str().into(),
            };
            self.live.send(line).ok();
        }
        let row = AuditRow {
            at: record.time,
            workspace,
            sandbox: record.sandbox.to_string(),
            kind: word(serde_json::to_value(record.kind)),
            verdict: word(serde_json::to_value(record.verdict)),
            record: text,
        };
        if self.sender.try_send(Entry::Row(row)).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[expect(clippy::missing_errors_doc, reason = "as for the other verbs")]
impl Service {
    /// Decisions of the caller's sandboxes, newest first: JSON texts, and a cursor if there is more.
    pub async fn audit(
        &self,
        who: &Principal,
        filter: &AuditFilter,
    ) -> Result<(Vec<String>, Option<String>), ServiceError> {
        if !(1..=LARGEST_PAGE).contains(&filter.limit) {
            let problem = format!("is {}: it must be 1 to {LARGEST_PAGE}", filter.limit);
            return Err(ServiceError::Invalid { field: "limit", problem });
        }
        let bad_cursor =
            || ServiceError::Invalid { field: "cursor", problem: "is not one that a page gave".to_owned() };
        let before =
            filter.cursor.as_ref().map(|cursor| cursor.parse::<i64>().map_err(|_| bad_cursor())).transpose()?;
        let network = self.handle.core.network()?;
        network.audit.flush().await;
        let query = AuditQuery {
            sandbox: filter.sandbox.clone(),
            kind: filter.kind.clone(),
            verdict: filter.verdict.clone(),
            since: filter.since,
            before,
            limit: filter.limit + 1,
        };
        let mut rows = self.store().audit(&who.workspace, &query).await.map_err(store_error)?;
        let more = rows.len() > filter.limit as usize;
        rows.truncate(filter.limit as usize);
        let cursor = rows.last().filter(|_| more).map(|(sequence, _)| sequence.to_string());
        Ok((rows.into_iter().map(|(_, text)| text).collect(), cursor))
    }

    /// Decisions of all sandboxes from now on; see [`AuditLine::is_for`].
    pub fn audit_stream(&self) -> Result<broadcast::Receiver<AuditLine>, ServiceError> {
        Ok(self.handle.core.network()?.audit.live.subscribe())
    }
}
