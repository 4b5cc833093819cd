//! What becomes of a sandbox: tiers, snapshots, forks; and what it used.

use reqwest::Method;
use serde::Deserialize;
use serde_json::Value;

use super::{
    Client,
    types::{Items, Sandbox, Snapshot, UsageReport},
};
use crate::failure::Failure;

/// Which snapshots to list.
#[derive(Clone, Debug, Default)]
pub(crate) struct SnapshotQuery {
    pub(crate) sandbox: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) labels: Vec<(String, String)>,
}

#[derive(Deserialize)]
struct Child {
    sandbox: Sandbox,
}

impl Client {
    /// A verb of a sandbox that answers with the sandbox: `pause`, `resume`, `stop`, `start`, `rollback`, `promote`.
    pub(crate) async fn change(&self, id: &str, verb: &str, body: &Value) -> Result<Sandbox, Failure> {
        self.json(self.request(Method::POST, &["v1", "sandboxes", id, verb]).json(body)).await
    }

    /// Changes a sandbox's lifetime and rules.
    pub(crate) async fn set(&self, id: &str, body: &Value) -> Result<Sandbox, Failure> {
        self.json(self.request(Method::PATCH, &["v1", "sandboxes", id]).json(body)).await
    }

    /// Takes a snapshot; returns when it is durable.
    pub(crate) async fn snapshot(&self, id: &str, body: &Value) -> Result<Snapshot, Failure> {
        self.json(self.request(Method::POST, &["v1", "sandboxes", id, "snapshots"]).json(body)).await
    }

    /// One snapshot by id, or the newest of a name.
    pub(crate) async fn get_snapshot(&self, name: &str) -> Result<Snapshot, Failure> {
        self.json(self.request(Method::GET, &["v1", "snapshots", name])).await
    }

    /// Deletes a snapshot; returns when nothing is left of it.
    pub(crate) async fn delete_snapshot(&self, id: &str) -> Result<(), Failure> {
        self.send(self.request(Method::DELETE, &["v1", "snapshots", id])).await.map(drop)
    }

    /// All snapshots that match, oldest first.
    pub(crate) async fn snapshots(&self, query: &SnapshotQuery) -> Result<Vec<Snapshot>, Failure> {
        let mut all = Vec::new();
        let mut cursor: Option<String> = None;
        loop {
            let mut pairs = vec![("order", "asc".to_owned()), ("limit", "100".to_owned())];
            pairs.extend(query.sandbox.clone().map(|sandbox| ("sandbox", sandbox)));
            pairs.extend(query.name.clone().map(|name| ("name", name)));
            pairs.extend(query.labels.iter().map(|(key, value)| ("label", format!("{key}={value}"))));
            pairs.extend(cursor.map(|cursor| ("cursor", cursor)));
            let page: Items<Snapshot> =
                self.json(self.request(Method::GET, &["v1", "snapshots"]).query(&pairs)).await?;
            all.extend(page.items);
            match page.cursor {
                Some(next) => cursor = Some(next),
                None => return Ok(all),
            }
        }
    }

    /// Makes copies, all or none; returns when they take commands.
    pub(crate) async fn fork(&self, id: &str, body: &Value) -> Result<Vec<Sandbox>, Failure> {
        let request = self.request(Method::POST, &["v1", "sandboxes", id, "fork"]).json(body);
        let page: Items<Child> = self.json(request).await?;
        Ok(page.items.into_iter().map(|child| child.sandbox).collect())
    }

    /// What was used.
    pub(crate) async fn usage(&self, pairs: &[(&str, String)]) -> Result<UsageReport, Failure> {
        self.json(self.request(Method::GET, &["v1", "usage"]).query(pairs)).await
    }

    /// What was used, as the server writes it.
    pub(crate) async fn usage_csv(&self, pairs: &[(&str, String)]) -> Result<String, Failure> {
        let response = self.send(self.request(Method::GET, &["v1", "usage"]).query(pairs)).await?;
        response.text().await.map_err(|error| self.transport(&error))
    }
}
