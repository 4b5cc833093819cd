//! A small typed client of the native API, `/v1`.
//!
//! Errors keep the API's code, message and hint. Nothing is retried here but the create of a sandbox,
//! which carries an idempotency key.

use std::{path::Path, sync::Arc, time::Duration};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::{Method, RequestBuilder, Response, StatusCode, Url};
use serde::de::DeserializeOwned;
use stockade_model::{Secret, quoted};

use crate::failure::{Failure, chain};

mod code;
mod discovery;
mod events;
mod exec;
mod files;
mod lifecycle;
mod network;
mod sandboxes;
mod socket;
mod ssh;
mod tunnel;
mod types;

pub(crate) use code::{CodeContext, CodeEvent, CodeRequest};
pub(crate) use exec::{ExecEvent, ExecInput, ExecRequest, ExecSession, Exit, PtySize};
pub(crate) use files::WriteOptions;
pub(crate) use lifecycle::SnapshotQuery;
pub(crate) use sandboxes::{CreateRequest, ListQuery};
pub(crate) use ssh::{AddSshKey, SshEndpoint, SshKey};
pub(crate) use types::{Process, Sandbox, Snapshot, Template, UsageItem, Used};

/// How long a connection may take to come about.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest error body read.
const MAX_ERROR_BYTES: usize = 64 << 10;
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// A server and the key to it. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Client {
    http: reqwest::Client,
    base: Url,
    key: Arc<Secret>,
    tls: Arc<rustls::ClientConfig>,
}

impl Client {
    /// A client of the server at `url`.
    pub(crate) fn new(url: &str, key: Secret, ca_file: Option<&Path>) -> Result<Self, Failure> {
        let base = parse_url(url)?;
        let tls = Arc::new(socket::tls_config(ca_file)?);
        let mut http = reqwest::Client::builder()
            .user_agent(concat!("stockade/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .use_preconfigured_tls((*tls).clone());
        if is_loopback(&base) {
            // A proxy is elsewhere and cannot reach our loopback address.
            http = http.no_proxy();
        }
        let http = http.build().map_err(|error| Failure::new("internal", chain(&error)))?;
        Ok(Self { http, base, key: Arc::new(key), tls })
    }

    /// The server's address, for texts.
    pub(crate) fn url(&self) -> &str {
        self.base.as_str().trim_end_matches('/')
    }

    /// The URL of a route; each segment may hold any character.
    fn route(&self, segments: &[&str]) -> Url {
        let path: String = segments.iter().map(|part| format!("/{}", utf8_percent_encode(part, SEGMENT))).collect();
        let mut url = self.base.clone();
        url.set_path(&format!("{}{path}", self.base.path().trim_end_matches('/')));
        url
    }

    fn request(&self, method: Method, segments: &[&str]) -> RequestBuilder {
        self.http.request(method, self.route(segments)).bearer_auth(self.key.expose())
    }

    /// Sends a request; every status but success is a failure with the API's words.
    async fn send(&self, request: RequestBuilder) -> Result<Response, Failure> {
        let response = request.send().await.map_err(|error| self.transport(&error))?;
        if response.status().is_success() { Ok(response) } else { Err(read_error(response).await) }
    }

    async fn json<T: DeserializeOwned>(&self, request: RequestBuilder) -> Result<T, Failure> {
        let response = self.send(request).await?;
        let body = response.bytes().await.map_err(|error| self.transport(&error))?;
        serde_json::from_slice(&body).map_err(|error| {
            let message = format!("{} answered with something else than expected: {error}", self.url());
            Failure::new("unexpected_answer", message)
                .hint("is it a Stockade server of this version? `stockade version`")
        })
    }

    /// The request did not reach the server, or its answer did not reach us.
    fn transport(&self, error: &reqwest::Error) -> Failure {
        let url = self.url();
        // The outer texts only repeat the URL.
        let mut cause: &dyn std::error::Error = error;
        while let Some(next) = cause.source() {
            cause = next;
        }
        if error.is_connect() {
            return Failure::new("unreachable", format!("cannot reach the server at {url}: {cause}"))
                .hint("is it running? `stockade up` starts one");
        }
        Failure::new("connection_lost", format!("the connection to {url} broke: {cause}"))
    }
}

fn parse_url(text: &str) -> Result<Url, Failure> {
    let bad = |why: String| {
        Failure::new("invalid_url", format!("{} is not a server's URL: {why}", quoted(text)))
            .hint("expected something like http://127.0.0.1:8080")
    };
    let url = Url::parse(text).map_err(|error| bad(error.to_string()))?;
    match url.scheme() {
        "http" | "https" if url.has_host() => Ok(url),
        other => Err(bad(format!("scheme {other:?} is neither http nor https"))),
    }
}

fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let address = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>();
    host == "localhost" || host.ends_with(".localhost") || address.is_ok_and(|address| address.is_loopback())
}

async fn read_error(mut response: Response) -> Failure {
    let status = response.status();
    let mut body = Vec::new();
    while let Ok(Some(chunk)) = response.chunk().await {
        body.extend_from_slice(&chunk);
        if body.len() > MAX_ERROR_BYTES {
            break;
        }
    }
    error_from(status, &body)
}

/// The API's error object, or the status where there is none.
fn error_from(status: StatusCode, body: &[u8]) -> Failure {
    let failure = match serde_json::from_slice::<types::ErrorAnswer>(body) {
        Ok(types::ErrorAnswer { error }) => error.into_failure(),
        Err(_) => Failure::new("unexpected_answer", format!("the server answered {status}")),
    };
    match status {
        StatusCode::UNAUTHORIZED => failure.or_hint("check --api-key or STOCKADE_API_KEY"),
        _ => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(url: &str) -> Client {
        Client::new(url, Secret::new("k"), None).expect("a client")
    }

    #[test]
    fn a_route_carries_any_character_in_its_segments() {
        let url = client("http://127.0.0.1:1/base/").route(&["v1", "templates", "a/b ?#%"]);
        assert_eq!(url.as_str(), "http://127.0.0.1:1/base/v1/templates/a%2Fb%20%3F%23%25");
    }

    #[test]
    fn what_is_no_server_url_is_refused() {
        for bad in ["", "127.0.0.1:8080", "ftp://x", "http://"] {
            assert!(parse_url(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_error_keeps_the_words_of_the_api() {
        let body = br#"{"error":{"code":"wrong_state","message":"sandbox x is creating","hint":"look"}}"#;
        let failure = error_from(StatusCode::CONFLICT, body);
        assert_eq!((failure.code.as_str(), failure.hint.as_deref()), ("wrong_state", Some("look")));
        assert_eq!(failure.message, "sandbox x is creating");
        // A hint at a route becomes one at a command.
        let body = br#"{"error":{"code":"sandbox_not_found","message":"sandbox x not found","hint":"GET /v1"}}"#;
        assert!(error_from(StatusCode::NOT_FOUND, body).hint.is_some_and(|hint| hint.contains("stockade ls")));
        let body = br#"{"error":{"code":"wrong_state","message":"any words","hint":"POST /v1","sandbox":"x","state":"paused"}}"#;
        let failure = error_from(StatusCode::CONFLICT, body);
        assert_eq!(failure.hint.as_deref(), Some("`stockade resume x` brings it back"));
        let in_the_way = failure.in_the_way.expect("it is named");
        assert_eq!((in_the_way.sandbox.as_str(), in_the_way.state.as_str()), ("x", "paused"));
        // A server that does not say which and how.
        let body = br#"{"error":{"code":"wrong_state","message":"sandbox x is paused","hint":"POST /v1"}}"#;
        assert_eq!(error_from(StatusCode::CONFLICT, body).hint.as_deref(), Some("POST /v1"));
        assert_eq!(error_from(StatusCode::BAD_GATEWAY, b"<html>").code, "unexpected_answer");
    }
}
