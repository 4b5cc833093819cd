//! Who gets in and what is refused, with a client of the same library and machines that are this process.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use russh::{
    ChannelMsg, ChannelOpenFailure,
    client::{self, AuthResult},
    keys::{PrivateKey, PrivateKeyWithHashAlg, PublicKeyOrCertificate},
};
use stockade_engine::fake::FakeHost;
use stockade_model::{Sandbox, SandboxId};
use stockade_service::{CreateSandbox, PauseMode, Principal, Service, SshKeyRequest, fake};
use stockade_ssh::{HostKey, KeyPair, Server};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

const PATIENCE: Duration = Duration::from_secs(60);

/// A hang becomes a failure.
async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.expect("hangs")
}

struct TestServer {
    service: Service,
    server: Server,
    who: Principal,
    host_key: String,
    _dir: TempDir,
}

/// A client that takes the host key it was told of and no other.
struct Pinned(String);

impl client::Handler for Pinned {
    type Error = russh::Error;

    async fn check_server_key(&mut self, key: &PublicKeyOrCertificate) -> Result<bool, russh::Error> {
        let PublicKeyOrCertificate::PublicKey { key, .. } = key else { return Ok(false) };
        Ok(key.to_openssh().is_ok_and(|key| key == self.0))
    }
}

type Session = client::Handle<Pinned>;

impl TestServer {
    async fn start() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let host = FakeHost::hosting().expect("a host");
        let served = fake::serve(dir.path(), &host, |config| config.metrics_period = Duration::ZERO);
        let (service, _) = served.await.expect("a service");
        fake::register(&service, dir.path(), fake::template("base")).await.expect("registered");
        let who = principal(&service, "default").await;
        let key = HostKey::open_or_create(&dir.path().join("host-key")).expect("a key");
        let host_key = key.public.clone();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let server = stockade_ssh::serve(listener, key, service.clone()).expect("serves");
        Self { service, server, who, host_key, _dir: dir }
    }

    fn address(&self) -> SocketAddr {
        self.server.address()
    }

    async fn create(&self) -> Sandbox {
        let request = CreateSandbox {
            template: "base".to_owned(),
            lifetime: Duration::from_secs(600),
            auto_resume: true,
            ..CreateSandbox::default()
        };
        within(self.service.create(&self.who, request)).await.expect("created")
    }

    async fn add(&self, who: &Principal, sandbox: Option<SandboxId>, lifetime: Option<Duration>) -> KeyPair {
        let pair = KeyPair::generate().expect("a pair");
        let request = SshKeyRequest { name: "k".to_owned(), public_key: pair.public.clone(), sandbox, lifetime };
        self.service.add_ssh_key(who, request).await.expect("added");
        pair
    }

    async fn connect(&self) -> Session {
        let handler = Pinned(self.host_key.clone());
        within(client::connect(Arc::default(), self.address(), handler)).await.expect("connects")
    }

    /// Logs in; whether that was let.
    async fn enters(&self, user: &str, pair: &KeyPair) -> Result<Session, Session> {
        let mut session = self.connect().await;
        match within(offer(&mut session, user, pair)).await.expect("an answer") {
            AuthResult::Success => Ok(session),
            AuthResult::Failure { .. } => Err(session),
        }
    }
}

async fn principal(service: &Service, workspace: &str) -> Principal {
    let workspace = service.workspace(workspace).await.expect("a workspace");
    let (key, _) = service.create_api_key(&workspace, "k").await.expect("a key");
    Principal { workspace, key }
}

async fn offer(session: &mut Session, user: &str, pair: &KeyPair) -> Result<AuthResult, russh::Error> {
    let key = PrivateKey::from_openssh(pair.private.expose()).expect("a key");
    session.authenticate_publickey(user, PrivateKeyWithHashAlg::new(Arc::new(key), None)).await
}

/// What a channel said until it was closed.
#[derive(Debug, Default, PartialEq)]
struct Said {
    out: String,
    err: String,
    code: Option<u32>,
    signal: Option<String>,
    refused: bool,
}

async fn listen(channel: &mut russh::Channel<client::Msg>) -> Said {
    let mut said = Said::default();
    within(async {
        while let Some(message) = channel.wait().await {
            match message {
                ChannelMsg::Data { data } => said.out.push_str(&String::from_utf8_lossy(&data)),
                ChannelMsg::ExtendedData { data, ext: 1 } => said.err.push_str(&String::from_utf8_lossy(&data)),
                ChannelMsg::ExitStatus { exit_status } => said.code = Some(exit_status),
                ChannelMsg::ExitSignal { signal_name, .. } => said.signal = Some(format!("{signal_name:?}")),
                ChannelMsg::Failure => {
                    said.refused = true;
                    break;
                }
                ChannelMsg::Close => break,
                _ => {}
            }
        }
    })
    .await;
    said
}

async fn run(session: &Session, command: &str) -> Said {
    let mut channel = within(session.channel_open_session()).await.expect("a channel");
    channel.exec(true, command).await.expect("asked");
    listen(&mut channel).await
}

#[tokio::test]
async fn a_key_of_the_workspace_opens_its_sandboxes_and_runs_commands() {
    let t = TestServer::start().await;
    let sandbox = t.create().await;
    let pair = t.add(&t.who, None, None).await;
    let session = t.enters(sandbox.id.as_str(), &pair).await.unwrap_or_else(|_| panic!("let in"));
    let said = run(&session, "echo out; echo err >&2; exit 3").await;
    assert_eq!((said.out.as_str(), said.err.as_str(), said.code), ("out\n", "err\n", Some(3)));
    assert_eq!(run(&session, "kill -TERM $$").await.signal, Some("TERM".to_owned()));
    t.server.stop().await;
}

#[tokio::test]
async fn input_ends_where_the_client_ends_it_and_variables_arrive() {
    let t = TestServer::start().await;
    let sandbox = t.create().await;
    let pair = t.add(&t.who, None, None).await;
    let session = t.enters(sandbox.id.as_str(), &pair).await.unwrap_or_else(|_| panic!("let in"));
    let mut channel = within(session.channel_open_session()).await.expect("a channel");
    channel.set_env(false, "GREETING", "hello").await.expect("asked");
    channel.exec(true, "echo $GREETING; wc -c").await.expect("asked");
    // More than a window: the program takes it, so it goes on.
    let large = vec![b'x'; 5 << 20];
    within(channel.data(large.as_slice())).await.expect("taken");
    channel.eof().await.expect("ended");
    assert_eq!(listen(&mut channel).await.out.trim_end(), format!("hello\n{}", 5 << 20));
}

#[tokio::test]
async fn more_than_windows_hold_goes_both_ways_at_once() {
    let t = TestServer::start().await;
    let sandbox = t.create().await;
    let pair = t.add(&t.who, None, None).await;
    let session = t.enters(sandbox.id.as_str(), &pair).await.unwrap_or_else(|_| panic!("let in"));
    let channel = within(session.channel_open_session()).await.expect("a channel");
    channel.exec(true, "cat").await.expect("asked");
    let (mut reader, mut writer) = tokio::io::split(channel.into_stream());
    let total = 40 << 20;
    let sent = async {
        let piece = vec![b'x'; 1 << 20];
        for _ in 0..total >> 20 {
            writer.write_all(&piece).await.expect("taken");
        }
        writer.shutdown().await.expect("ended");
    };
    let came = async {
        let (mut count, mut buffer) = (0, vec![0; 64 << 10]);
        while count < total {
            match reader.read(&mut buffer).await.expect("readable") {
                0 => break,
                read => count += read,
            }
        }
        count
    };
    assert_eq!(within(async { tokio::join!(sent, came).1 }).await, total);
}

#[tokio::test]
async fn strangers_wrong_keys_and_what_is_not_there_look_the_same() {
    let t = TestServer::start().await;
    let sandbox = t.create().await;
    let other = t.create().await;
    let stranger = principal(&t.service, "strangers").await;
    let (good, foreign) = (t.add(&t.who, None, None).await, t.add(&stranger, None, None).await);
    let unknown = KeyPair::generate().expect("a pair");
    let bound = t.add(&t.who, Some(other.id.clone()), None).await;
    let absent = SandboxId::random();
    for (user, pair) in [
        (sandbox.id.as_str(), &unknown),
        (sandbox.id.as_str(), &foreign),
        (sandbox.id.as_str(), &bound),
        (absent.as_str(), &good),
        ("root", &good),
        ("", &good),
    ] {
        assert!(t.enters(user, pair).await.is_err(), "{user}");
    }
    assert!(t.enters(other.id.as_str(), &bound).await.is_ok());
    let mut session = t.connect().await;
    let password = within(session.authenticate_password(sandbox.id.as_str(), "secret")).await.expect("an answer");
    assert!(!password.success());
    assert!(!within(session.authenticate_none(sandbox.id.as_str())).await.expect("an answer").success());
}

#[tokio::test]
async fn a_removed_key_and_an_expired_one_open_nothing() {
    let t = TestServer::start().await;
    let sandbox = t.create().await;
    let pair = t.add(&t.who, None, None).await;
    let key = t.service.ssh_keys(&t.who).await.expect("keys").remove(0);
    let stranger = principal(&t.service, "strangers").await;
    assert!(t.service.remove_ssh_key(&stranger, &key.id).await.is_err());
    assert!(t.enters(sandbox.id.as_str(), &pair).await.is_ok());
    t.service.remove_ssh_key(&t.who, &key.id).await.expect("removed");
    assert!(t.enters(sandbox.id.as_str(), &pair).await.is_err());
    let brief = t.add(&t.who, None, Some(Duration::from_millis(1))).await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert!(t.enters(sandbox.id.as_str(), &brief).await.is_err());
    assert!(t.service.ssh_keys(&t.who).await.expect("keys").is_empty());
}

#[tokio::test]
async fn after_too_many_wrong_keys_the_connection_ends() {
    let t = TestServer::start().await;
    let sandbox = t.create().await;
    let mut session = t.connect().await;
    let mut tries = 0;
    while tries < 100 {
        let pair = KeyPair::generate().expect("a pair");
        match within(offer(&mut session, sandbox.id.as_str(), &pair)).await {
            Ok(result) => assert!(!result.success()),
            Err(_) => break,
        }
        tries += 1;
    }
    assert!(tries < 30, "{tries} were heard");
    let pair = t.add(&t.who, None, None).await;
    assert!(within(offer(&mut session, sandbox.id.as_str(), &pair)).await.is_err(), "it is over");
}

#[tokio::test]
async fn an_ended_sandbox_says_so_and_a_paused_one_comes_back() {
    let t = TestServer::start().await;
    let (ended, paused) = (t.create().await, t.create().await);
    let pair = t.add(&t.who, None, None).await;
    within(t.service.kill(&t.who, &ended.id)).await.expect("killed");
    let session = t.enters(ended.id.as_str(), &pair).await.unwrap_or_else(|_| panic!("let in"));
    let said = run(&session, "echo never").await;
    assert_eq!((said.out.as_str(), said.code), ("", Some(255)));
    assert!(said.err.contains("has ended at"), "{said:?}");
    within(t.service.pause(&t.who, &paused.id, PauseMode::default())).await.expect("paused");
    let session = t.enters(paused.id.as_str(), &pair).await.unwrap_or_else(|_| panic!("let in"));
    assert_eq!(run(&session, "echo back").await.out, "back\n");
}

#[tokio::test]
async fn ports_of_the_sandbox_are_joined_and_all_else_is_refused_by_name() {
    let t = TestServer::start().await;
    let sandbox = t.create().await;
    let pair = t.add(&t.who, None, None).await;
    let session = t.enters(sandbox.id.as_str(), &pair).await.unwrap_or_else(|_| panic!("let in"));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = u32::from(listener.local_addr().expect("an address").port());
    let echo = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("a client");
        let mut text = String::new();
        stream.read_to_string(&mut text).await.expect("text");
        stream.write_all(text.to_uppercase().as_bytes()).await.expect("taken");
    });
    let channel = within(session.channel_open_direct_tcpip("localhost", port, "127.0.0.1", 1)).await.expect("joined");
    let mut stream = channel.into_stream();
    within(stream.write_all(b"hello")).await.expect("taken");
    within(stream.shutdown()).await.expect("ended");
    let mut answer = String::new();
    within(stream.read_to_string(&mut answer)).await.expect("text");
    assert_eq!(answer, "HELLO");
    within(echo).await.expect("served");
    let code = |result: Result<_, russh::Error>| match result {
        Err(russh::Error::ChannelOpenFailure(failure)) => failure,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("joined"),
    };
    let closed = within(session.channel_open_direct_tcpip("127.0.0.1", port, "127.0.0.1", 1)).await;
    assert_eq!(code(closed), ChannelOpenFailure::ConnectFailed);
    let elsewhere = within(session.channel_open_direct_tcpip("example.com", 80, "127.0.0.1", 1)).await;
    assert_eq!(code(elsewhere), ChannelOpenFailure::AdministrativelyProhibited);
    assert!(within(session.tcpip_forward("localhost", 0)).await.is_err(), "remote forwards");
    let mut channel = within(session.channel_open_session()).await.expect("a channel");
    channel.request_x11(true, false, "MIT-MAGIC-COOKIE-1", "00", 0).await.expect("asked");
    assert!(listen(&mut channel).await.refused, "X11");
    channel.agent_forward(true).await.expect("asked");
    assert!(listen(&mut channel).await.refused, "an agent");
    channel.request_subsystem(true, "netconf").await.expect("asked");
    assert!(listen(&mut channel).await.refused, "other subsystems");
    // The connection has lived through all of it.
    assert_eq!(run(&session, "echo on").await.out, "on\n");
}

#[tokio::test]
async fn a_client_that_leaves_hangs_up_what_it_started() {
    let t = TestServer::start().await;
    let sandbox = t.create().await;
    let pair = t.add(&t.who, None, None).await;
    let session = t.enters(sandbox.id.as_str(), &pair).await.unwrap_or_else(|_| panic!("let in"));
    let mut channel = within(session.channel_open_session()).await.expect("a channel");
    channel.exec(true, "echo started; exec sleep 1000").await.expect("asked");
    within(async { while !matches!(channel.wait().await, Some(ChannelMsg::Data { .. })) {} }).await;
    drop((channel, session));
    let (_, guest) = within(t.service.guest_by_token(&sandbox.id, None)).await.expect("a guest");
    within(async {
        loop {
            let list = guest.processes().await.expect("a list").processes;
            if list.iter().all(|process| process.exit.as_ref().is_some_and(|exit| exit.signal == Some(1))) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn connections_to_one_sandbox_are_bounded() {
    let t = TestServer::start().await;
    let sandbox = t.create().await;
    let pair = t.add(&t.who, None, None).await;
    let mut sessions = Vec::new();
    for _ in 0..32 {
        sessions.push(t.enters(sandbox.id.as_str(), &pair).await.unwrap_or_else(|_| panic!("let in")));
    }
    assert_eq!(run(&sessions[31], "echo in").await.out, "in\n");
    let one_more = t.enters(sandbox.id.as_str(), &pair).await;
    if let Ok(session) = one_more {
        assert!(within(session.channel_open_session()).await.is_err(), "it was sent away");
    }
    let other = t.create().await;
    assert!(t.enters(other.id.as_str(), &pair).await.is_ok(), "another sandbox has its own");
}

#[tokio::test]
async fn what_is_no_ssh_client_is_let_go() {
    let t = TestServer::start().await;
    let mut stream = TcpStream::connect(t.address()).await.expect("connects");
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.expect("taken");
    let mut said = Vec::new();
    within(stream.read_to_end(&mut said)).await.ok();
    assert!(String::from_utf8_lossy(&said).starts_with("SSH-2.0-Stockade_"));
    t.server.stop().await;
}
