//! Networks, secrets, decisions. What the API answers is shown as it is.

use reqwest::{Method, RequestBuilder, Response};
use serde_json::{Value, json};
use stockade_model::Secret;

use super::Client;
use crate::failure::Failure;

impl Client {
    /// A sandbox's network.
    pub(crate) async fn network(&self, id: &str) -> Result<Value, Failure> {
        self.json(self.request(Method::GET, &["v1", "sandboxes", id, "network"])).await
    }

    /// Changes a sandbox's network as a whole; returns when it is in force.
    pub(crate) async fn set_network(&self, id: &str, spec: &Value) -> Result<Value, Failure> {
        self.json(self.request(Method::PUT, &["v1", "sandboxes", id, "network"]).json(spec)).await
    }

    /// Changes some of it.
    pub(crate) async fn change_network(&self, id: &str, change: &Value) -> Result<Value, Failure> {
        self.json(self.request(Method::PATCH, &["v1", "sandboxes", id, "network"]).json(change)).await
    }

    /// What sandboxes start from, of a template or the workspace.
    pub(crate) async fn default_network(&self, template: Option<&str>) -> Result<Value, Failure> {
        self.json(self.default_request(Method::GET, template)).await
    }

    /// Changes it.
    pub(crate) async fn set_default_network(&self, template: Option<&str>, spec: &Value) -> Result<Value, Failure> {
        self.json(self.default_request(Method::PUT, template).json(spec)).await
    }

    /// Forgets it.
    pub(crate) async fn clear_default_network(&self, template: Option<&str>) -> Result<(), Failure> {
        self.send(self.default_request(Method::DELETE, template)).await.map(drop)
    }

    fn default_request(&self, method: Method, template: Option<&str>) -> RequestBuilder {
        match template {
            Some(template) => self.request(method, &["v1", "templates", template, "network"]),
            None => self.request(method, &["v1", "network", "default"]),
        }
    }

    /// What would happen to a request.
    pub(crate) async fn explain(&self, id: &str, method: &str, url: &str) -> Result<Value, Failure> {
        let request = self.request(Method::POST, &["v1", "sandboxes", id, "network", "explain"]);
        self.json(request.json(&json!({"method": method, "url": url}))).await
    }

    /// Keeps a secret or its next value; of a client of a token endpoint where there is one.
    pub(crate) async fn put_secret(
        &self,
        name: &str,
        value: &Secret,
        hosts: &[String],
        oauth: Option<Value>,
    ) -> Result<Value, Failure> {
        let body = match oauth {
            None => json!({"value": value.expose(), "hosts": hosts}),
            Some(oauth) => json!({"oauth": oauth, "client_secret": value.expose(), "hosts": hosts}),
        };
        self.json(self.request(Method::PUT, &["v1", "secrets", name]).json(&body)).await
    }

    /// All secrets, without values.
    pub(crate) async fn secrets(&self) -> Result<Value, Failure> {
        self.json(self.request(Method::GET, &["v1", "secrets"])).await
    }

    /// Forgets a secret.
    pub(crate) async fn remove_secret(&self, name: &str) -> Result<(), Failure> {
        self.send(self.request(Method::DELETE, &["v1", "secrets", name])).await.map(drop)
    }

    /// The newest decisions, a page.
    pub(crate) async fn audit(&self, conditions: &[(&str, String)]) -> Result<Value, Failure> {
        self.json(self.request(Method::GET, &["v1", "audit"]).query(conditions)).await
    }

    /// Decisions from now on, as JSON lines.
    pub(crate) async fn follow_audit(&self, sandbox: Option<&str>) -> Result<Response, Failure> {
        let request = self.request(Method::GET, &["v1", "audit"]).query(&[("follow", "true")]);
        self.send(request.query(&sandbox.map(|id| [("sandbox", id)]))).await
    }

    /// A link to a port of a sandbox.
    pub(crate) async fn preview(&self, id: &str, port: u16, lifetime: Option<f64>) -> Result<Value, Failure> {
        let mut body = json!({"port": port});
        if let Some(lifetime) = lifetime {
            body["lifetime_seconds"] = lifetime.into();
        }
        self.json(self.request(Method::POST, &["v1", "sandboxes", id, "previews"]).json(&body)).await
    }

    /// A stream that broke.
    pub(crate) fn stream_broken(&self, error: &reqwest::Error) -> Failure {
        self.transport(error)
    }
}
