//! One server under test.

use std::{
    fs::{self, File},
    io::Write,
    net::SocketAddr,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use reqwest::{Client, Method, RequestBuilder, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt},
    process::{Child, Command},
};

use crate::{
    ACCESS_TOKEN, CLIENT_SECRET, Finding, Inodes, Leftovers, MINT_BEARER, Needle, Sandbox,
    host::{cgroup_prefix, processes},
    scan, stockade_program, target_directory,
};

/// A first start builds the base template, on a slow mirror and behind other tests.
const START_PATIENCE: Duration = Duration::from_secs(1500);
const STOP_PATIENCE: Duration = Duration::from_secs(60);
/// Holds the pid of the test a data directory belongs to.
const OWNER: &str = "test-pid";
const POLL: Duration = Duration::from_millis(20);
/// Where an authority is, in a data directory and in the build's.
const AUTHORITY: &str = "network-ca";

/// A running `stockade up`. Dropping it ends the server and its machines; [`TestServer::stop`] also
/// checks that nothing is left, and that no secret is in anything the server kept or said.
pub struct TestServer {
    data: TempDir,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    running: Option<Running>,
    client: Client,
    cgroup_prefix: Option<String>,
    secrets: Mutex<Vec<String>>,
}

struct Running {
    child: Child,
    ready: Ready,
    key: String,
}

#[derive(Clone, Debug, Deserialize)]
struct Ready {
    http_url: String,
    https_url: String,
    base_domain: String,
    api_key_file: PathBuf,
    ca_file: PathBuf,
    #[serde(default)]
    ssh_addr: Option<SocketAddr>,
    #[serde(default)]
    ssh_host_key: Option<String>,
    pid: u32,
}

/// How a command of the CLI ended.
#[derive(Debug)]
pub struct Ended {
    /// Its exit code; `None`: a signal ended it.
    pub code: Option<i32>,
    /// What it wrote.
    pub stdout: Vec<u8>,
    /// What it said.
    pub stderr: String,
}

impl TestServer {
    /// A server with a data directory of its own and without a pool, so that tests do not pay for
    /// machines they do not use.
    pub async fn start() -> Self {
        Self::start_with(&["--pool", "0"]).await
    }

    /// The same with more arguments for `stockade up`.
    pub async fn start_with(arguments: &[&str]) -> Self {
        // On the file system of the cache, so that templates are linked and not copied; a short path,
        // because sockets have paths, too.
        Self::start_in(&target_directory().join("t"), arguments, &[]).await
    }

    /// The same with its data directory in a directory of the test's choice, and more in its environment.
    pub async fn start_in(parent: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        fs::create_dir_all(parent).expect("the directory is ours");
        clear_up_after_the_dead(parent);
        let data = tempfile::Builder::new().prefix("").rand_bytes(8).tempdir_in(parent).expect("it can be created");
        fs::write(data.path().join(OWNER), std::process::id().to_string()).expect("it can be written to");
        share_authority(data.path());
        let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        let environment = environment.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
        let secrets = Mutex::new([ACCESS_TOKEN, CLIENT_SECRET, MINT_BEARER].map(str::to_owned).to_vec());
        let (client, running, cgroup_prefix) = (Client::new(), None, None);
        let mut server = Self { data, arguments, environment, running, client, cgroup_prefix, secrets };
        server.start_again().await;
        server
    }

    /// Starts the server over the data directory of one that has ended.
    pub async fn start_again(&mut self) {
        assert!(self.running.is_none(), "it still runs");
        let log = File::options().create(true).append(true).open(self.log_file()).expect("the log can be opened");
        let mut child = Command::new(stockade_program())
            .args(["up", "--http", "127.0.0.1:0", "--https", "127.0.0.1:0", "--no-self-check"])
            .args(&self.arguments)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .env("STOCKADE_DATA_DIR", self.data_dir())
            .env("STOCKADE_TEMPLATE_CACHE", target_directory().join("template-cache"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a file can be cloned"))
            .stderr(log)
            .spawn()
            .expect("the program starts");
        let ready = tokio::time::timeout(START_PATIENCE, async {
            loop {
                if let Some(status) = child.try_wait().expect("it is our child") {
                    panic!("the server ended with {status}:\n{}", self.log());
                }
                // One from before, of a server that was killed, has another pid.
                let ready = fs::read(self.data_dir().join("ready.json")).ok();
                let ready: Option<Ready> = ready.and_then(|text| serde_json::from_slice(&text).ok());
                match ready {
                    Some(ready) if Some(ready.pid) == child.id() => break ready,
                    _ => tokio::time::sleep(POLL).await,
                }
            }
        })
        .await
        .unwrap_or_else(|_| panic!("the server was not ready in time:\n{}", self.log()));
        let key = fs::read_to_string(&ready.api_key_file).expect("there is a key").trim().to_owned();
        self.guard(&key);
        self.running = Some(Running { child, ready, key });
        publish_authority(self.data_dir());
    }

    /// Its data directory.
    pub fn data_dir(&self) -> &Path {
        self.data.path()
    }

    /// What the server has written so far, in all its runs.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.log_file()).unwrap_or_default()).into_owned()
    }

    fn log_file(&self) -> PathBuf {
        self.data_dir().join("test-server.log")
    }

    fn running(&self) -> &Running {
        self.running.as_ref().expect("the server runs")
    }

    /// The HTTP client tests share.
    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let running = self.running();
        self.client
            .request(method, format!("{}{path}", running.ready.http_url.trim_end_matches('/')))
            .bearer_auth(&running.key)
    }

    /// The same without a key.
    pub fn anonymous(&self, method: Method, path: &str) -> RequestBuilder {
        self.client.request(method, format!("{}{path}", self.running().ready.http_url.trim_end_matches('/')))
    }

    /// Where it speaks SSH, and the fingerprint of its key there.
    pub fn ssh(&self) -> (SocketAddr, String) {
        let ready = &self.running().ready;
        (ready.ssh_addr.expect("it speaks SSH"), ready.ssh_host_key.clone().expect("it has a key"))
    }

    /// The key.
    pub fn api_key(&self) -> String {
        self.running().key.clone()
    }

    /// `stockade tunnel` and the address it listens on.
    pub async fn tunnel(&self, sandbox: &str, port: u16) -> (Child, String) {
        let mut child = Command::new(stockade_program())
            .args(["tunnel", sandbox, &port.to_string(), "--listen", "127.0.0.1:0"])
            .env("STOCKADE_DATA_DIR", self.data_dir())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("the program starts");
        let output = child.stdout.take().expect("piped");
        let line = tokio::io::BufReader::new(output).lines().next_line().await.expect("readable");
        (child, line.expect("it says where it listens"))
    }

    /// Sends a request that must succeed; returns its JSON, `null` if there is no body.
    pub async fn json(&self, method: Method, path: &str, body: Option<Value>) -> Value {
        let (status, value) = self.try_json(method.clone(), path, body).await.expect("the server answers");
        assert!(status.is_success(), "{method} {path}: {status} {value}");
        value
    }

    /// Sends a request; returns status and JSON.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn try_json(
        &self,
        method: Method,
        path: &str,
        body: Option<Value>,
    ) -> Result<(StatusCode, Value), reqwest::Error> {
        let mut request = self.request(method, path);
        if let Some(body) = body {
            if path.starts_with("/v1/secrets/") {
                ["value", "client_secret"]
                    .iter()
                    .filter_map(|&field| body[field].as_str())
                    .for_each(|it| self.guard(it));
            }
            request = request.json(&body);
        }
        let answer = request.send().await?;
        let status = answer.status();
        let bytes = answer.bytes().await?;
        let value = serde_json::from_slice(&bytes).unwrap_or_else(|_| match bytes.is_empty() {
            true => Value::Null,
            false => Value::String(String::from_utf8_lossy(&bytes).into_owned()),
        });
        Ok((status, value))
    }

    /// Makes a sandbox that lives for an hour.
    pub async fn create(&self, template: &str) -> Sandbox<'_> {
        let body = json!({ "template": template, "lifetime_seconds": 3600 });
        let sandbox = self.json(Method::POST, "/v1/sandboxes", Some(body)).await;
        Sandbox::new(self, sandbox["id"].as_str().expect("a sandbox has an id"))
    }

    /// Starts a command of the CLI against this server, its standard streams piped.
    pub fn start_cli(&self, arguments: &[&str]) -> Child {
        Command::new(stockade_program())
            .args(arguments)
            .env("STOCKADE_DATA_DIR", self.data_dir())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("the program starts")
    }

    /// Runs a command of the CLI that must succeed; what it wrote.
    pub async fn cli_ok(&self, arguments: &[&str]) -> String {
        let ended = self.cli(arguments, b"").await;
        assert_eq!(ended.code, Some(0), "{arguments:?}: {}", ended.stderr);
        String::from_utf8(ended.stdout).expect("the CLI writes UTF-8")
    }

    /// Runs a command of the CLI against this server, with this input.
    pub async fn cli(&self, arguments: &[&str], stdin: &[u8]) -> Ended {
        let mut child = self.start_cli(arguments);
        let mut input = child.stdin.take().expect("piped");
        let write = async move {
            // The command may end without having read all.
            let _ = input.write_all(stdin).await;
            drop(input);
        };
        let ((), output) = tokio::join!(write, child.wait_with_output());
        let output = output.expect("it ends");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        Ended { code: output.status.code(), stdout: output.stdout, stderr }
    }

    /// Environment for the unmodified E2B SDK.
    pub fn e2b_environment(&self) -> Vec<(String, String)> {
        let Running { ready, key, .. } = self.running();
        let port = ready.https_url.trim_end_matches('/').rsplit(':').next().unwrap_or_default();
        vec![
            ("E2B_DOMAIN".into(), format!("e2b.{}:{port}", ready.base_domain)),
            ("E2B_API_KEY".into(), key.clone()),
            ("SSL_CERT_FILE".into(), ready.ca_file.display().to_string()),
        ]
    }

    /// Notes which control groups are this server's; call it while a machine runs.
    pub fn note_cgroups(&mut self) {
        if self.cgroup_prefix.is_none() {
            self.cgroup_prefix = cgroup_prefix(self.data_dir());
        }
    }

    /// Kills the server without a warning, also while requests are under way. Machines go on.
    pub fn send_kill(&self) {
        signal(self.running().child.id(), Signal::SIGKILL);
    }

    /// Waits for the end of a server that was killed.
    pub async fn reap(&mut self) {
        let mut running = self.running.take().expect("it runs");
        running.child.wait().await.expect("it is our child");
    }

    /// Stops the server as an operator would. Machines go on.
    pub async fn terminate(&mut self) {
        let mut running = self.running.take().expect("it runs");
        signal(running.child.id(), Signal::SIGTERM);
        let ended = tokio::time::timeout(STOP_PATIENCE, running.child.wait()).await;
        let status = ended.unwrap_or_else(|_| panic!("the server does not stop:\n{}", self.log()));
        assert!(status.expect("it is our child").success(), "the server stopped with an error:\n{}", self.log());
    }

    /// A text that must not be in anything the server keeps or says when it is stopped. What is sent to the API as a
    /// secret's value is one of itself; one too short to be told from chance is not looked for.
    pub fn guard(&self, secret: &str) {
        let mut secrets = self.secrets.lock().unwrap_or_else(PoisonError::into_inner);
        if secret.len() >= Needle::SHORTEST && !secrets.iter().any(|known| known == secret) {
            secrets.push(secret.to_owned());
        }
    }

    /// Where secrets are found that should not be: in any file of the data directory that is not shared with all
    /// servers (log, database, audit, snapshots with their memory, sandboxes that are paused or ended).
    fn betrayed(&self) -> Vec<Finding> {
        let secrets = self.secrets.lock().unwrap_or_else(PoisonError::into_inner);
        let needles: Vec<_> = secrets.iter().map(|secret| Needle::new(secret, secret)).collect();
        let mut findings = scan(self.data_dir(), &needles, &Inodes::below(&target_directory().join("template-cache")));
        findings.retain(|finding| finding.path != self.data_dir().join("api-key"));
        findings
    }

    /// Ends all sandboxes and the server, then checks that nothing of either is left on the host and that no secret
    /// was kept.
    pub async fn stop(mut self) {
        self.note_cgroups();
        self.kill_all().await;
        self.terminate().await;
        let left = self.wait_for_nothing().await;
        assert!(left.is_empty(), "left behind: {left}\nserver's log:\n{}", self.log());
        assert_eq!(self.betrayed(), [], "a secret was kept");
    }

    /// Ends all sandboxes there are.
    pub async fn kill_all(&self) {
        loop {
            let page = self.json(Method::GET, "/v1/sandboxes?limit=100", None).await;
            let items = page["items"].as_array().expect("a list").clone();
            if items.is_empty() {
                return;
            }
            for item in items {
                let path = format!("/v1/sandboxes/{}", item["id"].as_str().expect("an id"));
                let (status, value) = self.try_json(Method::DELETE, &path, None).await.expect("the server answers");
                // 404: it ended in the meantime.
                assert!(status.is_success() || status == StatusCode::NOT_FOUND, "{status} {value}");
            }
        }
    }

    /// What is left once everything had the time to go. Pool machines end with the server; the kernel
    /// takes a moment to take away processes and groups.
    async fn wait_for_nothing(&self) -> Leftovers {
        let look = || Leftovers::of(self.data_dir(), self.cgroup_prefix.as_deref());
        let gone = async {
            while !look().is_empty() {
                tokio::time::sleep(POLL).await;
            }
        };
        let _ = tokio::time::timeout(STOP_PATIENCE, gone).await;
        look()
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        if let Some(running) = &mut self.running {
            signal(running.child.id(), Signal::SIGKILL);
        }
        kill_processes(self.data.path());
        if std::thread::panicking() {
            let _ = writeln!(std::io::stderr(), "server's log:\n{}", self.log());
        }
    }
}

/// Templates are made with the authority their machines trust: servers that share templates share it, too.
fn share_authority(data_dir: &Path) {
    let own = data_dir.join(AUTHORITY);
    fs::DirBuilder::new().mode(0o700).create(&own).expect("the directory is ours");
    let shared = target_directory().join(AUTHORITY);
    if shared.exists() {
        copy_authority(&shared, &own);
    }
}

/// The first server's becomes everybody's.
fn publish_authority(data_dir: &Path) {
    let shared = target_directory().join(AUTHORITY);
    if !shared.exists() {
        let new = tempfile::tempdir_in(target_directory()).expect("the directory is ours");
        copy_authority(&data_dir.join(AUTHORITY), new.path());
        // Another test may have been faster; what is not moved away goes with `new`.
        let _ = fs::rename(new.path(), shared);
    }
}

fn copy_authority(from: &Path, to: &Path) {
    for name in ["ca.pem", "ca.key"] {
        fs::copy(from.join(name), to.join(name)).expect("there is an authority");
    }
}

/// A test that was killed could not clear up; the next one does it.
fn clear_up_after_the_dead(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let Ok(owner) = fs::read_to_string(entry.path().join(OWNER)) else { continue };
        if !Path::new("/proc").join(owner).exists() {
            kill_processes(&entry.path());
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Only those that name this very directory.
fn kill_processes(data_dir: &Path) {
    for (pid, _) in processes(data_dir) {
        signal(u32::try_from(pid).ok(), Signal::SIGKILL);
    }
}

fn signal(pid: Option<u32>, signal: Signal) {
    if let Some(pid) = pid.and_then(|pid| i32::try_from(pid).ok()) {
        // It may have ended by itself.
        let _ = kill(Pid::from_raw(pid), signal);
    }
}
