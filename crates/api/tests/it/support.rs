//! One server per test: its own directory, host, database and ports.

use std::{net::SocketAddr, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::{Value, json};
use stockade_api::{ServeConfig, Server, Tls};
use stockade_engine::fake::FakeHost;
use stockade_model::Template;
use stockade_service::{Service, ServiceConfig, fake};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

/// Nothing here takes that long unless it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
pub(crate) const BASE: &str = "stockade.localhost";

pub(crate) struct TestServer {
    pub(crate) host: FakeHost,
    pub(crate) key: String,
    pub(crate) stranger: String,
    pub(crate) server: Server,
    pub(crate) client: reqwest::Client,
    _dir: TempDir,
    _service: Service,
}

impl TestServer {
    pub(crate) async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    pub(crate) async fn start_with(change: impl FnOnce(&mut ServiceConfig)) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let host = FakeHost::hosting().expect("a host");
        let service = service(&dir, &host, change).await;
        let key = key_to(&service, "default").await;
        let stranger = key_to(&service, "strangers").await;
        let bind = async || TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let tls = Tls::OwnCa { directory: dir.path().join("tls") };
        let https = Some((bind().await, tls));
        let config = ServeConfig { http: bind().await, https, base_domain: BASE.to_owned(), ssh: None };
        let server = stockade_api::serve(config, service.clone()).expect("serves");
        Self { host, key, stranger, server, client: reqwest::Client::new(), _dir: dir, _service: service }
    }

    pub(crate) fn http(&self) -> SocketAddr {
        self.server.http_address()
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.http())
    }

    /// A request with the key.
    pub(crate) fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.client.request(method, self.url(path)).bearer_auth(&self.key)
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        Answer::of(self.request(Method::GET, path)).await
    }

    pub(crate) async fn delete(&self, path: &str) -> Answer {
        Answer::of(self.request(Method::DELETE, path)).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        Answer::of(self.request(Method::POST, path).json(body)).await
    }

    /// A new sandbox.
    pub(crate) async fn create(&self) -> String {
        let answer = self.post("/v1/sandboxes", &json!({})).await;
        assert_eq!(answer.status, 201, "{answer:?}");
        answer.json["id"].as_str().expect("an id").to_owned()
    }

    /// Runs a command to its end.
    pub(crate) async fn run(&self, sandbox: &str, body: &Value) -> Answer {
        self.post(&format!("/v1/sandboxes/{sandbox}/run"), body).await
    }

    /// Sends bytes as they are and returns all that comes until the server closes.
    pub(crate) async fn raw(&self, request: &[u8]) -> String {
        let talk = async {
            let mut stream = TcpStream::connect(self.http()).await.expect("connects");
            stream.write_all(request).await.expect("writes");
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await.expect("reads");
            String::from_utf8_lossy(&answer).into_owned()
        };
        within(talk).await
    }
}

/// Status, headers and JSON of an answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: reqwest::header::HeaderMap,
    pub(crate) json: Value,
}

impl Answer {
    pub(crate) async fn of(request: RequestBuilder) -> Self {
        within(async {
            let response = request.send().await.expect("an answer");
            let (status, headers) = (response.status(), response.headers().clone());
            let bytes = response.bytes().await.expect("a body");
            let json = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
            Self { status, headers, json }
        })
        .await
    }

    /// The error's code; every answer that is no success has one, a message and a hint.
    pub(crate) fn code(&self) -> &str {
        let error = &self.json["error"];
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{self:?}");
        assert!(error["hint"].is_string(), "{self:?}");
        error["code"].as_str().unwrap_or_else(|| panic!("no code: {self:?}"))
    }

    pub(crate) fn message(&self) -> &str {
        self.json["error"]["message"].as_str().unwrap_or_default()
    }

    /// A base64 field, decoded.
    pub(crate) fn bytes(&self, field: &str) -> Vec<u8> {
        let text = self.json[field].as_str().unwrap_or_else(|| panic!("no {field}: {self:?}"));
        BASE64.decode(text).expect("base64")
    }

    pub(crate) fn text(&self, field: &str) -> String {
        String::from_utf8(self.bytes(field)).expect("UTF-8")
    }
}

async fn service(dir: &TempDir, host: &FakeHost, change: impl FnOnce(&mut ServiceConfig)) -> Service {
    let served = fake::serve(dir.path(), host, |config| {
        config.metrics_period = Duration::ZERO;
        change(config);
    });
    let (service, _) = served.await.expect("a service");
    let created_at = "2026-01-02T03:04:05Z".parse().expect("a time");
    let base = Template { created_at, ..fake::template("base") };
    fake::register(&service, dir.path(), base).await.expect("registered");
    service
}

async fn key_to(service: &Service, workspace: &str) -> String {
    fake::key(service, workspace).await.expect("a key").expose().to_owned()
}

/// A hang becomes a failure.
pub(crate) async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.expect("hangs")
}
