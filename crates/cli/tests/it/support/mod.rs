//! A server on the fake engine in this very process, and the program to run against it.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use stockade_api::{ServeConfig, Server};
use stockade_engine::{
    Engine, TemplateBoot,
    fake::{FakeEngine, FakeHost},
};
use stockade_model::{MachineShape, Template, TemplateId, TemplateState};
use stockade_service::{Service, ServiceConfig};
use stockade_store::{Archive, SecretFile, Store};
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
    _service: Service,
    _server: Server,
}

impl TestServer {
    pub(crate) async fn start() -> Self {
        let directory = TempDir::new().expect("a directory");
        let host = FakeHost::hosting().expect("a host");
        let engine = Arc::new(FakeEngine::new(host.clone()));
        let secret = SecretFile::open_or_create(&directory.path().join("secret")).expect("a secret");
        let store = Store::open(&directory.path().join("db"), secret).await.expect("a store");
        let template = boot_template(engine.as_ref(), directory.path()).await;
        let archive = Some(Archive::at_directory(&directory.path().join("archive")).expect("an archive"));
        let config = ServiceConfig { pool_size: 0, archive, ..ServiceConfig::new(engine, store) };
        let service = Service::start(config).await.expect("a service");
        service.register_template(template.0, &template.1).await.expect("a template");
        let workspace = service.default_workspace().await.expect("a workspace");
        let (_, key) = service.create_api_key(&workspace, "test").await.expect("a key");
        let http = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let config = ServeConfig { http, https: None, base_domain: "stockade.localhost".to_owned(), ssh: None };
        let server = stockade_api::serve(config, service.clone()).expect("a server");
        Self {
            url: format!("http://{}", server.http_address()),
            key: key.expose().to_owned(),
            directory,
            host,
            _service: service,
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

    /// A new sandbox's id.
    pub(crate) async fn create(&self) -> String {
        self.ok(&["create"]).await.trim().to_owned()
    }
}

async fn boot_template(engine: &dyn Engine, directory: &Path) -> (Template, PathBuf) {
    let id = TemplateId::random();
    let place = directory.join(id.as_str());
    let boot = TemplateBoot {
        root_disk: PathBuf::new(),
        shape: SHAPE,
        introduction: None,
        startup: None,
        directory: place.clone(),
    };
    engine.boot_template(&boot, &|_| ()).await.expect("booted");
    let template = Template {
        id,
        workspace: None,
        name: "base".to_owned(),
        state: TemplateState::Ready,
        shape: SHAPE,
        recipe_digest: "test".to_owned(),
        env: BTreeMap::new(),
        default_user: "user".to_owned(),
        default_cwd: None,
        created_at: jiff::Timestamp::now(),
    };
    (template, place)
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
