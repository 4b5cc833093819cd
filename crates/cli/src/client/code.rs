//! Code in the kernels of a sandbox, its events as JSON lines.

use std::collections::BTreeMap;

use bytes::BytesMut;
use futures::{Stream, StreamExt as _};
use reqwest::Method;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Client, types::Items};
use crate::failure::Failure;

/// Code to run.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct CodeRequest {
    pub(crate) code: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) language: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) context: Option<String>,
    pub(crate) env: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) timeout_seconds: Option<f64>,
}

/// What the code does.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum CodeEvent {
    Stdout {
        text: String,
    },
    Stderr {
        text: String,
    },
    Result {
        is_main: bool,
        data: BTreeMap<String, Value>,
    },
    Error {
        name: String,
        value: String,
        traceback: String,
    },
    End,
    #[serde(other)]
    Other,
}

/// A kernel with a state of its own.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct CodeContext {
    pub(crate) id: String,
    pub(crate) language: String,
    pub(crate) cwd: String,
}

/// Code that runs; dropping it has the code interrupted.
pub(crate) struct CodeRun {
    body: std::pin::Pin<Box<dyn Stream<Item = reqwest::Result<bytes::Bytes>> + Send>>,
    pending: BytesMut,
    client: Client,
}

impl Client {
    /// Runs code.
    pub(crate) async fn run_code(&self, id: &str, request: &CodeRequest) -> Result<CodeRun, Failure> {
        let response = self.send(self.request(Method::POST, &["v1", "sandboxes", id, "code"]).json(request)).await?;
        Ok(CodeRun { body: Box::pin(response.bytes_stream()), pending: BytesMut::new(), client: self.clone() })
    }

    /// The contexts of a sandbox.
    pub(crate) async fn code_contexts(&self, id: &str) -> Result<Vec<CodeContext>, Failure> {
        let items: Items<CodeContext> =
            self.json(self.request(Method::GET, &["v1", "sandboxes", id, "code", "contexts"])).await?;
        Ok(items.items)
    }
}

impl CodeRun {
    /// The next event, and the line it came in.
    pub(crate) async fn next(&mut self) -> Result<(CodeEvent, String), Failure> {
        loop {
            if let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
                let line = String::from_utf8_lossy(&self.pending.split_to(end + 1)).into_owned();
                let event = serde_json::from_str(&line).map_err(|error| {
                    let message = format!("{} sent an event this client does not know: {error}", self.client.url());
                    Failure::new("unexpected_answer", message)
                })?;
                return Ok((event, line));
            }
            match self.body.next().await {
                Some(Ok(piece)) => self.pending.extend_from_slice(&piece),
                Some(Err(error)) => return Err(self.client.transport(&error)),
                None => {
                    let message = format!("the connection to {} was lost before the code ended", self.client.url());
                    return Err(Failure::new("stream_cut", message).hint("the code has been interrupted"));
                }
            }
        }
    }
}
