//! One sandbox of a server under test, through the native API.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use reqwest::Method;
use serde_json::{Value, json};

use crate::TestServer;

/// A sandbox. Ends with its server, or by [`Sandbox::kill`].
pub struct Sandbox<'a> {
    server: &'a TestServer,
    id: String,
}

/// How a command in a sandbox ended.
#[derive(Debug)]
pub struct Ran {
    /// Exit code; `None`: a signal.
    pub code: Option<i64>,
    /// Standard output, up to 1 MiB.
    pub stdout: Vec<u8>,
    /// Standard error, up to 1 MiB.
    pub stderr: Vec<u8>,
    /// The whole answer.
    pub answer: Value,
}

impl Ran {
    /// Panics with all that is known unless the command succeeded.
    #[track_caller]
    pub fn expect_success(self) -> Self {
        assert_eq!(self.code, Some(0), "{self}");
        self
    }
}

impl std::fmt::Display for Ran {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        write!(f, "code {:?}\n{}\n{}", self.code, text(&self.stdout), text(&self.stderr))
    }
}

impl<'a> Sandbox<'a> {
    /// A sandbox that is known by its id.
    pub fn new(server: &'a TestServer, id: &str) -> Self {
        Self { server, id: id.to_owned() }
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.id
    }

    fn path(&self, rest: &str) -> String {
        format!("/v1/sandboxes/{}{rest}", self.id)
    }

    /// Its record.
    pub async fn info(&self) -> Value {
        self.server.json(Method::GET, &self.path(""), None).await
    }

    /// A verb with a JSON answer, as `pause`; it must succeed.
    pub async fn verb(&self, verb: &str, body: Value) -> Value {
        self.server.json(Method::POST, &self.path(&format!("/{verb}")), Some(body)).await
    }

    /// What a command line that must succeed prints, without the last line's end.
    pub async fn says(&self, line: &str) -> String {
        let ran = self.shell(line).await.expect_success();
        String::from_utf8(ran.stdout).expect("UTF-8").trim_end().to_owned()
    }

    /// Runs a command line to its end.
    pub async fn shell(&self, line: &str) -> Ran {
        self.run(json!({ "shell": line })).await
    }

    /// Runs a request of the native API to its end.
    pub async fn run(&self, request: Value) -> Ran {
        let answer = self.server.json(Method::POST, &self.path("/run"), Some(request)).await;
        let bytes = |name: &str| {
            let text = answer[name].as_str().unwrap_or_else(|| panic!("{name} in {answer}"));
            STANDARD.decode(text).expect("standard base64")
        };
        Ran { code: answer["code"].as_i64(), stdout: bytes("stdout_base64"), stderr: bytes("stderr_base64"), answer }
    }

    /// Writes a file as a user.
    pub async fn write_as(&self, user: &str, path: &str, content: Vec<u8>) {
        let request = self.server.request(Method::PUT, &self.path("/files"));
        let answer = request.query(&[("path", path), ("user", user)]).body(content).send().await.expect("it answers");
        let status = answer.status();
        assert!(status.is_success(), "PUT {path}: {status} {}", answer.text().await.unwrap_or_default());
    }

    /// Writes a file as the default user.
    pub async fn write(&self, path: &str, content: impl Into<Vec<u8>>) {
        self.write_as("user", path, content.into()).await;
    }

    /// Reads a file.
    pub async fn read(&self, path: &str) -> Vec<u8> {
        let request = self.server.request(Method::GET, &self.path("/files"));
        let answer = request.query(&[("path", path)]).send().await.expect("it answers");
        assert!(answer.status().is_success(), "GET {path}: {}", answer.status());
        answer.bytes().await.expect("the whole file").to_vec()
    }

    /// Ends it.
    pub async fn kill(self) {
        self.server.json(Method::DELETE, &self.path(""), None).await;
    }
}
