//! Sandboxes, templates, version.

use std::collections::BTreeMap;

use reqwest::Method;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use stockade_model::Secret;

use super::{
    Client,
    types::{Items, Sandbox, Template, Version},
};
use crate::failure::Failure;

/// A sandbox to be made.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct CreateRequest {
    pub(crate) template: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) lifetime_seconds: Option<f64>,
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) env: BTreeMap<String, String>,
    /// How it lives on without being asked.
    #[serde(flatten)]
    pub(crate) rules: Map<String, Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) network: Option<Value>,
}

/// Which sandboxes to list.
#[derive(Clone, Debug, Default)]
pub(crate) struct ListQuery {
    /// Comma separated; `None`: those that have not ended.
    pub(crate) states: Option<String>,
    pub(crate) template: Option<String>,
    pub(crate) metadata: Vec<(String, String)>,
}

#[derive(Serialize)]
struct Lifetime {
    lifetime_seconds: f64,
}

#[derive(Deserialize)]
struct Logs {
    console: String,
}

impl Client {
    /// Begins to build a template.
    pub(crate) async fn start_build(&self, spec: &Value) -> Result<Value, Failure> {
        self.json(self.request(Method::POST, &["v1", "templates"]).json(spec)).await
    }

    /// A build, with its log after so many lines.
    pub(crate) async fn build(&self, id: &str, log_offset: usize) -> Result<Value, Failure> {
        self.json(self.request(Method::GET, &["v1", "builds", id]).query(&[("log_offset", log_offset)])).await
    }

    /// Uploads what a build copies from.
    pub(crate) async fn upload(&self, digest: &str, archive: Vec<u8>) -> Result<(), Failure> {
        self.send(self.request(Method::PUT, &["v1", "uploads", digest]).body(archive)).await.map(drop)
    }

    /// Deletes a template that was built.
    pub(crate) async fn remove_template(&self, template: &str) -> Result<(), Failure> {
        self.send(self.request(Method::DELETE, &["v1", "templates", template])).await.map(drop)
    }

    /// Makes a sandbox; returns when it takes commands. A connection that breaks is tried once more: the
    /// idempotency key makes that the same sandbox.
    pub(crate) async fn create(&self, request: &CreateRequest) -> Result<Sandbox, Failure> {
        let idempotency_key = Secret::random_hex("cli-", 16);
        let attempt = || {
            let post = self.request(Method::POST, &["v1", "sandboxes"]);
            self.json(post.header("Idempotency-Key", idempotency_key.expose()).json(request))
        };
        match attempt().await {
            Err(failure) if failure.code == "connection_lost" => attempt().await,
            answer => answer,
        }
    }

    /// One sandbox, also one that has ended.
    pub(crate) async fn sandbox(&self, id: &str) -> Result<Sandbox, Failure> {
        self.json(self.request(Method::GET, &["v1", "sandboxes", id])).await
    }

    /// All sandboxes that match, oldest first.
    pub(crate) async fn sandboxes(&self, query: &ListQuery) -> Result<Vec<Sandbox>, Failure> {
        let mut all = Vec::new();
        let mut cursor: Option<String> = None;
        loop {
            let mut pairs = vec![("order", "asc".to_owned()), ("limit", "100".to_owned())];
            pairs.extend(query.states.clone().map(|states| ("state", states)));
            pairs.extend(query.template.clone().map(|template| ("template", template)));
            pairs.extend(query.metadata.iter().map(|(key, value)| ("metadata", format!("{key}={value}"))));
            pairs.extend(cursor.map(|cursor| ("cursor", cursor)));
            let request = self.request(Method::GET, &["v1", "sandboxes"]).query(&pairs);
            let page: Items<Sandbox> = self.json(request).await?;
            all.extend(page.items);
            match page.cursor {
                Some(next) => cursor = Some(next),
                None => return Ok(all),
            }
        }
    }

    /// Ends a sandbox; returns when nothing of it is left.
    pub(crate) async fn kill(&self, id: &str) -> Result<(), Failure> {
        self.send(self.request(Method::DELETE, &["v1", "sandboxes", id])).await.map(drop)
    }

    /// Moves the deadline to now + `seconds` if that is later.
    pub(crate) async fn extend(&self, id: &str, seconds: f64) -> Result<Sandbox, Failure> {
        let request = self.request(Method::POST, &["v1", "sandboxes", id, "extend"]);
        self.json(request.json(&Lifetime { lifetime_seconds: seconds })).await
    }

    /// The last lines of the guest's console.
    pub(crate) async fn console(&self, id: &str) -> Result<String, Failure> {
        let logs: Logs = self.json(self.request(Method::GET, &["v1", "sandboxes", id, "logs"])).await?;
        Ok(logs.console)
    }

    /// All templates.
    pub(crate) async fn templates(&self) -> Result<Vec<Template>, Failure> {
        let page: Items<Template> = self.json(self.request(Method::GET, &["v1", "templates"])).await?;
        Ok(page.items)
    }

    /// One template by name or id.
    pub(crate) async fn template(&self, name: &str) -> Result<Template, Failure> {
        self.json(self.request(Method::GET, &["v1", "templates", name])).await
    }

    /// The server's version and engine.
    pub(crate) async fn version(&self) -> Result<Version, Failure> {
        self.json(self.request(Method::GET, &["v1", "version"])).await
    }
}
