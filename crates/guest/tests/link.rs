//! The link: sessions, ports, and readers that do not keep up.

mod common;

use std::{collections::BTreeMap, time::Duration};

use common::{Guest, argv, finish, refusal, shell};
use futures::StreamExt;
use stockade_engine::{EngineError, GuestClient};
use stockade_wire::{
    ErrorCode, PROTOCOL,
    event::Event,
    hello::{Hello, message},
    machine::Identity,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, UnixStream},
};

#[tokio::test]
async fn a_session_can_follow_another_on_the_same_stream_without_a_hang_up() {
    let guest = Guest::start().await;
    let (mut host, agent_end) = UnixStream::pair().expect("a socket pair");
    tokio::spawn(stockade_guest::serve(agent_end, guest.agent.clone()));
    // The tail of something older, a first hello, and half a frame: 10,000 bytes that never come.
    host.write_all(b"\0\0rubbish \xffSTKD").await.expect("sent");
    host.write_all(&Hello::new([1; 16]).encode()).await.expect("sent");
    let mut answer = [0; 28];
    host.read_exact(&mut answer).await.expect("answered");
    assert_eq!(answer, Hello::new([1; 16]).encode());
    host.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0\0\x27\x10\0\0\0\0\0\x01half")
        .await
        .expect("sent");
    let client = GuestClient::open(host, Duration::from_secs(20)).await.expect("a new session");
    assert_eq!(client.health().await.expect("answers").protocol, PROTOCOL);
}

#[tokio::test]
async fn an_agent_that_says_nothing_is_reported_in_time() {
    let (host, _agent) = UnixStream::pair().expect("a socket pair");
    let silent = GuestClient::open(host, Duration::from_millis(300)).await;
    assert!(matches!(silent, Err(EngineError::GuestSilent { .. })));
}

#[tokio::test]
async fn an_agent_of_another_protocol_is_refused() {
    let (host, mut agent) = UnixStream::pair().expect("a socket pair");
    tokio::spawn(async move {
        let mut hello = [0; 28];
        agent.read_exact(&mut hello).await.expect("said");
        let hello = Hello { protocol: PROTOCOL + 1, ..Hello::decode(&hello).expect("a hello") };
        agent.write_all(&hello.encode()).await.expect("answered");
        agent.read(&mut [0]).await
    });
    let refused = GuestClient::open(host, Duration::from_secs(20)).await;
    assert!(matches!(refused, Err(EngineError::Mismatch { .. })), "{refused:?}");
}

#[tokio::test]
async fn everything_under_way_fails_when_the_link_breaks() {
    let guest = Guest::start().await;
    let mut events = guest.client.start(&shell("echo hi; sleep 30")).await.expect("starts");
    guest.server.abort();
    let last = loop {
        match events.events.next().await {
            Some(Ok(_)) => {}
            last => break last,
        }
    };
    assert!(matches!(last, Some(Err(EngineError::LinkBroken { .. }))));
    assert!(matches!(guest.client.health().await, Err(EngineError::LinkBroken { .. })));
    assert!(!guest.client.is_open());
}

#[tokio::test]
async fn a_gigabyte_of_output_read_slowly_stays_bounded() {
    let guest = Guest::start().await;
    let mut events = guest.client.start(&argv(["head", "-c", "1000000000", "/dev/zero"])).await.expect("starts");
    let before = resident_kib();
    let (mut read, mut most) = (0u64, 0);
    while let Some(event) = events.events.next().await {
        match event.expect("the stream holds") {
            Event::Stdout(bytes) => {
                read += bytes.len() as u64;
                if read % 64 == 0 {
                    tokio::task::yield_now().await;
                    most = most.max(resident_kib());
                }
            }
            Event::Missed(_) => panic!("the only reader misses nothing"),
            Event::Exit(exit) => assert_eq!(exit.code, Some(0)),
            _ => {}
        }
    }
    assert_eq!(read, 1_000_000_000);
    assert!(most - before < 32 << 10, "grew by {} KiB", most - before);
}

#[tokio::test]
async fn a_reader_that_stands_still_holds_its_process_and_nothing_else() {
    let guest = Guest::start().await;
    let mut stuck = Vec::new();
    for _ in 0..12 {
        stuck.push(guest.client.start(&shell("exec yes")).await.expect("starts"));
    }
    let before = resident_kib();
    for _ in 0..50 {
        assert_eq!(guest.shell("echo ok").await.text(), "ok\n");
    }
    assert!(resident_kib() - before < 48 << 10, "grew by {} KiB", resident_kib() - before);
    for events in &stuck {
        let kill = stockade_wire::process::SignalRequest { signal: 9, main_only: false };
        guest.client.signal(&common::pid(events), kill).await.expect("killed");
    }
    for events in stuck {
        assert_eq!(finish(events).await.exit.signal, Some(9));
    }
}

fn resident_kib() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("read");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a line");
    line.split_ascii_whitespace().next().expect("a number").parse().expect("a number")
}

#[tokio::test]
async fn a_port_carries_both_directions_and_each_end_alone() {
    let guest = Guest::start().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let port = listener.local_addr().expect("bound").port();
    let service = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("accepted");
        let mut all = Vec::new();
        stream.read_to_end(&mut all).await.expect("read to the end");
        stream.write_all(&all).await.expect("answered");
        all.len()
    });
    let mut stream = guest.client.connect_port(port).await.expect("connected");
    let sent: Vec<u8> = (0..3_000_000u32).map(|n| (n % 253) as u8).collect();
    stream.write_all(&sent).await.expect("sent");
    stream.shutdown().await.expect("ended");
    let mut back = Vec::new();
    stream.read_to_end(&mut back).await.expect("read");
    assert!(back == sent);
    assert_eq!(service.await.expect("ran"), sent.len());
}

#[tokio::test]
async fn a_port_nobody_listens_on_is_closed() {
    let guest = Guest::start().await;
    let port = {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
        listener.local_addr().expect("bound").port()
    };
    assert_eq!(refusal(guest.client.connect_port(port).await.map(|_| ())).0, ErrorCode::PortClosed);
}

fn identity() -> Identity {
    Identity {
        sandbox_id: "sbx_1".to_owned(),
        template_id: "base".to_owned(),
        hostname: "box".to_owned(),
        machine_id: "0123456789abcdef0123456789abcdef".to_owned(),
        unix_time_ns: 0,
        entropy: String::new(),
        env: BTreeMap::from([("FROM_SANDBOX".to_owned(), "a".to_owned()), ("BOTH".to_owned(), "sandbox".to_owned())]),
        default_user: "user".to_owned(),
        default_cwd: Some("/tmp".to_owned()),
        files: BTreeMap::new(),
        network: None,
    }
}

#[tokio::test]
async fn an_identity_gives_every_process_its_environment() {
    let guest = Guest::start().await;
    let identity = identity();
    guest.client.set_identity(&identity).await.expect("taken");
    guest.client.set_identity(&identity).await.expect("taken again");
    let mut request = argv(["sh", "-c", "echo $FROM_SANDBOX $BOTH $USER $HOME; pwd"]);
    request.env.insert("BOTH".to_owned(), "request".to_owned());
    let home = guest.path("").trim_end_matches('/').to_owned();
    assert_eq!(guest.run(request).await.text(), format!("a request user {home}\n/tmp\n"));
    for wrong in [
        Identity { hostname: "no name".to_owned(), ..identity.clone() },
        Identity { machine_id: "0123456789ABCDEF0123456789abcdef".to_owned(), ..identity.clone() },
        Identity { machine_id: String::new(), ..identity.clone() },
    ] {
        assert_eq!(refusal(guest.client.set_identity(&wrong).await).0, ErrorCode::InvalidArgument);
        // As the first thing said, too.
        let (first, _server) = common::connect(&guest.agent).await;
        assert_eq!(refusal(first.set_identity(&wrong).await).0, ErrorCode::InvalidArgument);
        first.set_identity(&identity).await.expect("taken");
        first.health().await.expect("the session goes on");
        assert_eq!(refusal(first.set_identity(&wrong).await).0, ErrorCode::InvalidArgument);
    }
}

#[tokio::test]
async fn who_it_is_a_machine_is_told_once() {
    let guest = Guest::start().await;
    let (of_one, mut of_other) = (identity(), identity());
    of_other.env.insert("FROM_SANDBOX".to_owned(), "b".to_owned());
    let (other, _server) = common::connect(&guest.agent).await;
    let env = async || guest.run(argv(["sh", "-c", "echo $FROM_SANDBOX"])).await.text().to_owned();
    guest.client.set_identity(&of_one).await.expect("taken");
    other.set_identity(&of_other).await.expect("taken");
    // Only the moment is another: the first client says nothing else, and so does not take back what the other said.
    let later = Identity { unix_time_ns: 1, entropy: "other".to_owned(), ..of_one.clone() };
    guest.client.set_identity(&later).await.expect("taken");
    assert_eq!(env().await, "b\n");
    for (told, heard) in [(Identity { hostname: "box2".to_owned(), ..later }, "a\n"), (of_other.clone(), "b\n")] {
        guest.client.set_identity(&told).await.expect("taken");
        assert_eq!(env().await, heard);
    }
    // After a refusal all of it is said.
    let wrong = Identity { hostname: String::new(), ..of_one.clone() };
    assert_eq!(refusal(guest.client.set_identity(&wrong).await).0, ErrorCode::InvalidArgument);
    other.set_identity(&of_one).await.expect("taken");
    guest.client.set_identity(&of_other).await.expect("taken");
    assert_eq!(env().await, "b\n");
}

#[tokio::test]
async fn an_identity_that_never_ends_gives_way_to_the_next_session() {
    let guest = Guest::start().await;
    let (mut host, agent_end) = UnixStream::pair().expect("a socket pair");
    tokio::spawn(stockade_guest::serve(agent_end, guest.agent.clone()));
    let message = message(&serde_json::to_vec(&identity()).expect("JSON")).expect("short");
    host.write_all(&Hello::new([1; 16]).encode()).await.expect("sent");
    host.write_all(&message[..40]).await.expect("sent");
    host.read_exact(&mut [0; 28]).await.expect("answered");
    let client = GuestClient::open(host, Duration::from_secs(20)).await.expect("a new session");
    client.set_identity(&identity()).await.expect("taken");
    assert_eq!(client.health().await.expect("answers").protocol, PROTOCOL);
}

#[tokio::test]
async fn a_session_nobody_has_spoken_in_knows_when_its_guest_is_gone() {
    let guest = Guest::start().await;
    let (client, server) = common::connect(&guest.agent).await;
    assert!(client.is_open());
    server.abort();
    assert!(server.await.expect_err("aborted").is_cancelled());
    assert!(!client.is_open());
    assert!(matches!(client.set_identity(&identity()).await, Err(EngineError::LinkBroken { .. })));
    assert!(matches!(client.health().await, Err(EngineError::LinkBroken { started: false, .. })));
}

#[tokio::test]
async fn who_answers_an_identity_with_something_else_is_not_believed() {
    for answer in [&b"\xffSTKDMSG\xff\xff\xff\xff"[..], b"\0\0\0\x04\0\0\0\0\0", b"\xffSTKDMSG\0\0\0\x02[]", b""] {
        let (host, mut agent) = UnixStream::pair().expect("a socket pair");
        let answers = tokio::spawn(async move {
            let mut hello = [0; 28];
            agent.read_exact(&mut hello).await.expect("said");
            agent.write_all(&hello).await.expect("answered");
            assert!(agent.read(&mut [0; 4_096]).await.expect("said") > 0);
            agent.write_all(answer).await.expect("answered");
        });
        let client = GuestClient::open(host, Duration::from_secs(20)).await.expect("a session");
        let told = client.set_identity(&identity()).await;
        assert!(matches!(told, Err(EngineError::LinkBroken { .. })), "{answer:?}: {told:?}");
        answers.await.expect("it ran");
    }
}

#[tokio::test]
async fn stats_are_plausible() {
    let guest = Guest::start().await;
    let stats = guest.client.stats().await.expect("sampled");
    assert!(stats.cpu_count > 0 && stats.tasks > 0);
    assert!(stats.memory_used > 0 && stats.memory_used < stats.memory_total);
    assert!(stats.disk_used > 0 && stats.disk_used <= stats.disk_total);
    guest.client.sync().await.expect("synced");
}

#[tokio::test]
async fn rubbish_on_the_link_ends_its_session_and_nothing_else() {
    let guest = Guest::start().await;
    let (mut host, agent_end) = UnixStream::pair().expect("a socket pair");
    tokio::spawn(stockade_guest::serve(agent_end, guest.agent.clone()));
    let mut state = 0x2545_f491_u32;
    for round in 0..20u8 {
        let mut epoch = [round; 16];
        epoch[0] = 0xaa;
        host.write_all(&Hello::new(epoch).encode()).await.expect("sent");
        host.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.expect("sent");
        let rubbish: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .take(2000)
        .collect();
        host.write_all(&rubbish).await.expect("sent");
    }
    let client = GuestClient::open(host, Duration::from_secs(20)).await.expect("a new session");
    assert_eq!(client.health().await.expect("answers").protocol, PROTOCOL);
    assert_eq!(guest.shell("echo ok").await.text(), "ok\n");
}
