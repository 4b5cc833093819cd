//! A server on the fake engine in this very process, and the program to run against it.

use std::{process::Stdio, time::Duration};

use stockade_api::{ServeConfig, Server};
use stockade_engine::fake::FakeHost;
use stockade_model::{MachineShape, Template};
use stockade_service::{Service, fake};
use stockade_store::{AuditRow, Store};
use tempfile::TempDir;
use tokio::{
    io::AsyncWriteExt as _,
    net::TcpListener,
    process::{Child, Command},
};

const SHAPE: MachineShape = MachineShape { vcpus: 1, memory_mib: 64, disk_mib: 256 };

/// A server with a template `base`, and a key to it.
pub(crate) struct TestServer {
    pub(crate) url: String,
    pub(crate) key: String,
    pub(crate) directory: TempDir,
    pub(crate) host: FakeHost,
    store: Store,
    service: Service,
    _server: Server,
}

impl TestServer {
    pub(crate) async fn start() -> Self {
        let directory = TempDir::new().expect("a directory");
        let host = FakeHost::hosting().expect("a host");
        let (service, store) = fake::serve(directory.path(), &host, |_| ()).await.expect("a service");
        let base = Template { shape: SHAPE, default_user: "user".to_owned(), ..fake::template("base") };
        fake::register(&service, directory.path(), base).await.expect("a template");
        let key = fake::key(&service, "default").await.expect("a key");
        let http = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let config = ServeConfig { http, https: None, base_domain: "stockade.localhost".to_owned(), ssh: None };
        let server = stockade_api::serve(config, service.clone()).expect("a server");
        Self {
            url: format!("http://{}", server.http_address()),
            key: key.expose().to_owned(),
            directory,
            host,
            store,
            service,
            _server: server,
        }
    }

    /// The program, pointed at this server.
    pub(crate) fn stockade(&self, arguments: &[&str]) -> Command {
        let mut command = stockade(arguments);
        command.env("STOCKADE_URL", &self.url).env("STOCKADE_API_KEY", &self.key);
        command
    }

    /// Runs it without input; it must succeed.
    pub(crate) async fn ok(&self, arguments: &[&str]) -> String {
        let ran = run(self.stockade(arguments), b"").await;
        assert_eq!(ran.code, Some(0), "{arguments:?}: {}", ran.stderr);
        ran.stdout
    }

    /// Numbered decisions of a sandbox's gateway.
    pub(crate) async fn decide(&self, sandbox: &str, count: usize) {
        let workspace = self.service.default_workspace().await.expect("a workspace").to_string();
        let row = |number: usize| AuditRow {
            at: jiff::Timestamp::now(),
            workspace: workspace.clone(),
            sandbox: sandbox.to_owned(),
            kind: "dns".to_owned(),
            verdict: "allow".to_owned(),
            record: format!(r#"{{"number":{number}}}"#),
        };
        self.store.put_audit(&(0..count).map(row).collect::<Vec<_>>()).await.expect("written");
    }

    /// A new sandbox's id.
    pub(crate) async fn create(&self) -> String {
        self.ok(&["create"]).await.trim().to_owned()
    }
}

/// The program with nothing in its environment that the machine's user may have set.
pub(crate) fn stockade(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stockade"));
    let ours: Vec<_> = std::env::vars_os().map(|(name, _)| name).collect();
    for name in ours.into_iter().filter(|name| name.to_string_lossy().starts_with("STOCKADE_")) {
        command.env_remove(name);
    }
    command.args(arguments).env("STOCKADE_DATA_DIR", "/nonexistent/stockade").env("TZ", "UTC").kill_on_drop(true);
    command
}

/// What a run left.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs to the end with this input.
pub(crate) async fn run(mut command: Command, input: &[u8]) -> Ran {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("started");
    let mut stdin = child.stdin.take().expect("piped");
    let input = input.to_owned();
    let feed = tokio::spawn(async move {
        // A program that needs no input may be gone before it is written.
        let _ = stdin.write_all(&input).await;
    });
    let output = child.wait_with_output().await.expect("ended");
    feed.await.expect("fed");
    Ran {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Long enough for any machine; nothing waits this long unless something is wrong.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Sends a signal; the exit code it ends with.
pub(crate) async fn end_by(mut child: Child, signal: i32) -> Option<i32> {
    let pid = i32::try_from(child.id().expect("it runs")).expect("a pid");
    // SAFETY: the child has not been waited for, so the number is still its own.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    tokio::time::timeout(PATIENCE, child.wait()).await.expect("in time").expect("waited").code()
}
