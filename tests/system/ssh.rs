//! The clients people have, unmodified, against a real machine: ssh, scp, sftp, rsync.

use std::{fs, path::Path, process::Stdio};

use reqwest::Method;
use serde_json::json;
use stockade_system_tests::{Ended, Sandbox, TestServer};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    process::{Child, Command},
};

/// A user's own files: a key pair the server takes, and what its `ssh` is told.
struct Home {
    directory: TempDir,
    port: u16,
}

impl Home {
    async fn of(server: &TestServer) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let key = directory.path().join("id");
        let made = Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&key).status().await;
        assert!(made.expect("ssh-keygen runs").success());
        let public = directory.path().join("id.pub");
        server.cli_ok(&["ssh-key", "add", "laptop", public.to_str().expect("text")]).await;
        let (address, fingerprint) = server.ssh();
        let endpoint = server.json(Method::GET, "/v1/ssh", None).await;
        assert_eq!(endpoint["fingerprint"], fingerprint.as_str());
        let host_key = endpoint["host_key"].as_str().expect("a key");
        fs::write(directory.path().join("known"), format!("sandboxes {host_key}\n")).expect("written");
        let config = format!(
            "Host *\n HostName 127.0.0.1\n Port {port}\n HostKeyAlias sandboxes\n UserKnownHostsFile {home}/known\n \
             GlobalKnownHostsFile /dev/null\n StrictHostKeyChecking yes\n IdentityFile {home}/id\n IdentitiesOnly yes\n \
             IdentityAgent none\n BatchMode yes\n",
            port = address.port(),
            home = directory.path().display(),
        );
        fs::write(directory.path().join("config"), config).expect("written");
        Self { directory, port: address.port() }
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).display().to_string()
    }

    fn start(&self, program: &str, arguments: &[&str]) -> Child {
        let mut command = Command::new(program);
        if program != "rsync" {
            command.args(["-F", &self.path("config")]);
        }
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        command.spawn().expect("the client starts")
    }

    async fn run(&self, program: &str, arguments: &[&str], input: &[u8]) -> Ended {
        let mut child = self.start(program, arguments);
        let mut stdin = child.stdin.take().expect("piped");
        let write = async move {
            // It may end without having read all.
            let _ = stdin.write_all(input).await;
        };
        let ((), output) = tokio::join!(write, child.wait_with_output());
        let output = output.expect("it ends");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        Ended { code: output.status.code(), stdout: output.stdout, stderr }
    }

    async fn ok(&self, program: &str, arguments: &[&str], input: &[u8]) -> Vec<u8> {
        let ended = self.run(program, arguments, input).await;
        assert_eq!(ended.code, Some(0), "{program} {arguments:?}: {}", ended.stderr);
        ended.stdout
    }

    async fn ssh(&self, sandbox: &Sandbox<'_>, arguments: &[&str], input: &[u8]) -> Ended {
        let host = format!("{}@any", sandbox.id());
        let options = arguments.iter().take_while(|argument| argument.starts_with('-')).count();
        let (options, command) = arguments.split_at(options);
        self.run("ssh", &[options, &[&host], command].concat(), input).await
    }
}

/// Bytes in which every place is told from its neighbours.
fn pattern(count: usize) -> Vec<u8> {
    (0..count).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

async fn commands_and_terminals(home: &Home, sandbox: &Sandbox<'_>) {
    let ended = home.ssh(sandbox, &["id -un; pwd; echo oh >&2; exit 7"], b"").await;
    assert_eq!((ended.code, ended.stdout.as_slice()), (Some(7), b"user\n/home/user\n".as_slice()), "{ended:?}");
    assert_eq!(ended.stderr, "oh\n");
    let ended = home.ssh(sandbox, &["-oSetEnv=GREETING=hello", "echo $GREETING"], b"").await;
    assert_eq!(ended.stdout, b"hello\n", "{ended:?}");
    // Both ways at once, more than windows hold.
    let input = pattern(6_000_000);
    let ended = home.ssh(sandbox, &["cat"], &input).await;
    assert!(ended.code == Some(0) && ended.stdout == input, "{} bytes, {}", ended.stdout.len(), ended.stderr);
    // A login shell, on a terminal and without.
    let ended = home.ssh(sandbox, &["-T"], b"shopt -q login_shell && echo login\nexit 5\n").await;
    assert_eq!((ended.code, ended.stdout.as_slice()), (Some(5), b"login\n".as_slice()), "{ended:?}");
    let ended = home.ssh(sandbox, &["-tt", "tty; stty size; echo $TERM; exit 4"], b"").await;
    let said = String::from_utf8_lossy(&ended.stdout).into_owned();
    assert!(ended.code == Some(4) && said.starts_with("/dev/pts/"), "{ended:?}");
    let ended = home.ssh(sandbox, &["kill -KILL $$"], b"").await;
    assert_eq!(ended.code, Some(255), "{ended:?}");
}

async fn files(home: &Home, sandbox: &Sandbox<'_>) {
    let (local, back, remote) = (home.path("data"), home.path("back"), format!("{}@any:", sandbox.id()));
    let content = pattern(3_000_001);
    fs::write(&local, &content).expect("written");
    for protocol in ["-s", "-O"] {
        home.ok("scp", &[protocol, "-p", &local, &format!("{remote}up{protocol}")], b"").await;
        assert!(sandbox.read(&format!("/home/user/up{protocol}")).await == content, "{protocol}: the bytes differ");
        home.ok("scp", &[protocol, &format!("{remote}up{protocol}"), &back], b"").await;
        assert!(fs::read(&back).expect("there") == content, "{protocol}: the bytes differ");
    }
    let tree = home.path("tree");
    fs::create_dir_all(Path::new(&tree).join("a/b")).expect("made");
    fs::write(Path::new(&tree).join("a/b/c"), "deep").expect("written");
    home.ok("scp", &["-r", &tree, &format!("{remote}~/copied")], b"").await;
    assert_eq!(sandbox.read("/home/user/copied/a/b/c").await, b"deep");
    let batch = b"mkdir made\nput data made/x\nrename made/x made/y\nchmod 600 made/y\nsymlink y made/l\nls -l made\nrm made/l\n";
    fs::write(home.path("batch"), batch).expect("written");
    let mut child = Command::new("sftp");
    child.args(["-F", &home.path("config"), "-b", &home.path("batch"), &format!("{}@any", sandbox.id())]);
    let output = child.current_dir(home.directory.path()).output().await.expect("sftp runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && said.contains("lrwxrwxrwx"),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(sandbox.shell("ls -A made; stat -c %a made/y").await.expect_success().stdout, b"y\n600\n");
    let refused = home.run("scp", &[&local, &format!("{remote}/etc/no")], b"").await;
    assert!(refused.code == Some(1) && refused.stderr.contains("ermission denied"), "{refused:?}");
}

async fn rsync(home: &Home, sandbox: &Sandbox<'_>) {
    let remote = format!("{}@any:", sandbox.id());
    let tree = home.path("tree");
    let shell = format!("ssh -F {}", home.path("config"));
    let transfer = ["-a", "--stats", "-e", &shell];
    home.ok("rsync", &[&transfer[..], &[&format!("{tree}/"), &format!("{remote}synced/")]].concat(), b"").await;
    assert_eq!(sandbox.read("/home/user/synced/a/b/c").await, b"deep");
    sandbox.write("/home/user/synced/new", b"from there".to_vec()).await;
    let back = home.path("synced");
    home.ok("rsync", &[&transfer[..], &[&format!("{remote}synced/"), &format!("{back}/")]].concat(), b"").await;
    assert_eq!(fs::read(format!("{back}/new")).expect("there"), b"from there");
    let again =
        home.ok("rsync", &[&transfer[..], &[&format!("{remote}synced/"), &format!("{back}/")]].concat(), b"").await;
    let again = String::from_utf8_lossy(&again).into_owned();
    assert!(again.contains("regular files transferred: 0"), "{again}");
}

async fn forwards(home: &Home, sandbox: &Sandbox<'_>) {
    let server = "import socketserver,sys,os\n\
        class H(socketserver.StreamRequestHandler):\n def handle(self): self.wfile.write(self.rfile.readline().upper())\n\
        class U(socketserver.ThreadingUnixStreamServer): pass\n\
        import threading\n\
        t=socketserver.ThreadingTCPServer(('127.0.0.1',7007),H); u=U('/home/user/s.sock',H)\n\
        threading.Thread(target=t.serve_forever,daemon=True).start(); open('/home/user/up','w').close(); u.serve_forever()\n";
    sandbox.write("/home/user/server.py", server.as_bytes().to_vec()).await;
    sandbox
        .shell("setsid python3 server.py >/dev/null 2>&1 & while [ ! -e up ]; do sleep 0.05; done")
        .await
        .expect_success();
    let host = format!("{}@any", sandbox.id());
    let said = home.ok("ssh", &["-W", "localhost:7007", &host], b"port\n").await;
    assert_eq!(said, b"PORT\n");
    let socket = home.path("local.sock");
    let forward = format!("{socket}:/home/user/s.sock");
    let _tunnel = home.start("ssh", &["-N", "-L", &forward, &host]);
    let mut stream = loop {
        match UnixStream::connect(&socket).await {
            Ok(stream) => break stream,
            Err(_) => tokio::time::sleep(std::time::Duration::from_millis(20)).await,
        }
    };
    stream.write_all(b"socket\n").await.expect("taken");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("text");
    assert_eq!(answer, "SOCKET\n");
    // What is not to be had is said, not left out.
    let refused = home.run("ssh", &["-W", "example.com:80", &host], b"").await;
    assert!(refused.code == Some(255) && refused.stderr.contains("only ports of the sandbox"), "{refused:?}");
    let refused = home.run("ssh", &["-oExitOnForwardFailure=yes", "-R", "0:localhost:1", &host, "true"], b"").await;
    assert!(refused.code == Some(255) && refused.stderr.contains("forward"), "{refused:?}");
}

#[tokio::test]
async fn ordinary_clients_work_in_a_sandbox() {
    let server = TestServer::start_with(&["--pool", "0", "--ssh", "127.0.0.1:0"]).await;
    let body = json!({"template": "base", "lifetime_seconds": 3600, "auto_resume": true});
    let made = server.json(Method::POST, "/v1/sandboxes", Some(body)).await;
    let sandbox = Sandbox::new(&server, made["id"].as_str().expect("an id"));
    let home = Home::of(&server).await;
    commands_and_terminals(&home, &sandbox).await;
    files(&home, &sandbox).await;
    rsync(&home, &sandbox).await;
    forwards(&home, &sandbox).await;

    // A paused one comes back for the login.
    let path = format!("/v1/sandboxes/{}/pause", sandbox.id());
    server.json(Method::POST, &path, Some(json!({}))).await;
    let ended = home.ssh(&sandbox, &["cat copied/a/b/c"], b"").await;
    assert_eq!((ended.code, ended.stdout.as_slice()), (Some(0), b"deep".as_slice()), "{ended:?}");

    // A login made for once, without a key of the user's.
    let once = server.cli(&["ssh", sandbox.id(), "-T", "cat; exit 9"], b"in").await;
    assert_eq!((once.code, once.stdout.as_slice()), (Some(9), b"in".as_slice()), "{once:?}");
    let keys = server.json(Method::GET, "/v1/ssh-keys", None).await;
    assert_eq!(keys["items"].as_array().map(Vec::len), Some(1), "{keys}");

    // Without its key there is no way in any more; the server's own key is closed to others.
    server.cli_ok(&["ssh-key", "rm", "laptop"]).await;
    let refused = home.ssh(&sandbox, &["true"], b"").await;
    assert!(refused.code == Some(255) && refused.stderr.contains("Permission denied (publickey)"), "{refused:?}");
    let mode =
        std::os::unix::fs::MetadataExt::mode(&fs::metadata(server.data_dir().join("ssh-host-key")).expect("there"));
    assert_eq!(mode & 0o777, 0o600);
    assert!(!server.log().contains("PRIVATE KEY") && home.port > 0);
    server.stop().await;
}
