//! Commands in sandboxes: streams, exit codes, signals.

use std::{process::Stdio, time::Duration};

use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
    time::timeout,
};

use crate::support::{TestServer, run};

/// Long enough for any machine; nothing waits this long unless something is wrong.
const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::test]
async fn run_passes_both_streams_and_the_exit_code_and_leaves_nothing() {
    let server = TestServer::start().await;
    let ran = run(server.stockade(&["run", "--", "sh", "-c", "echo out; echo err >&2; exit 3"]), b"").await;
    assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.as_str()), (Some(3), "out\n", "err\n"));
    assert_eq!(server.ok(&["ls", "-q"]).await, "");
}

#[tokio::test]
async fn input_of_every_byte_arrives_and_ends() {
    let server = TestServer::start().await;
    let input: Vec<u8> = (0..=255).cycle().take(1 << 20).collect();
    let ran = run(server.stockade(&["run", "--", "sh", "-c", "cksum; echo done"]), &input).await;
    let expected = run(Command::new("cksum"), &input).await.stdout;
    assert_eq!((ran.code, ran.stdout), (Some(0), format!("{expected}done\n")));
    let ran = run(server.stockade(&["run", "--no-stdin", "--", "wc", "-c"]), b"not passed on").await;
    assert_eq!((ran.code, ran.stdout.trim()), (Some(0), "0"));
}

#[tokio::test]
async fn exit_codes_tell_the_ways_a_command_can_end_apart() {
    let server = TestServer::start().await;
    let id = server.create().await;
    for (options, command, code) in [
        (&[][..], &["sh", "-c", "exit 255"][..], 255),
        (&[], &["sh", "-c", "kill -9 $$"], 137),
        (&[], &["sh", "-c", "kill -15 $$"], 143),
        (&["--timeout", "0.2"], &["sleep", "60"], 124),
        (&[], &["/no/such/program"], 127),
        (&[], &["/etc/passwd"], 126),
        (&["--cwd", "/no/such/dir"], &["true"], 125),
    ] {
        let arguments = [&["exec", &id], options, &["--"], command].concat();
        let ran = run(server.stockade(&arguments), b"").await;
        assert_eq!(ran.code, Some(code), "{arguments:?}: {}", ran.stderr);
    }
}

#[tokio::test]
async fn environment_and_arguments_arrive_as_they_are() {
    let server = TestServer::start().await;
    let odd = "a 'b' \"c\" $d `e` \\ \n*";
    let env = format!("ODD={odd}");
    let ran = run(
        server.stockade(&["run", "--env", &env, "--", "sh", "-c", "printf '%s|%s' \"$ODD\" \"$1\"", "sh", odd]),
        b"",
    );
    let ran = ran.await;
    assert_eq!((ran.code, ran.stdout), (Some(0), format!("{odd}|{odd}")));
}

#[tokio::test]
async fn a_run_that_is_interrupted_ends_its_sandbox() {
    let server = TestServer::start().await;
    for (signal, code) in [(libc::SIGINT, 130), (libc::SIGTERM, 143)] {
        let child = start_and_see(server.stockade(&["run", "--", "sh", "-c", "echo started; sleep 600"])).await;
        assert_eq!(end_by(child, signal).await, Some(code));
        assert_eq!(server.ok(&["ls", "-q"]).await, "");
    }
}

#[tokio::test]
async fn an_exec_passes_an_interrupt_on_to_its_command() {
    let server = TestServer::start().await;
    let id = server.create().await;
    let script = "trap 'exit 9' INT; echo started; while :; do sleep 0.05; done";
    let child = start_and_see(server.stockade(&["exec", &id, "--", "sh", "-c", script])).await;
    assert_eq!(end_by(child, libc::SIGINT).await, Some(9));
}

#[tokio::test]
async fn json_events_carry_what_happened() {
    let server = TestServer::start().await;
    let ran = run(server.stockade(&["run", "--json", "--", "sh", "-c", "echo hi; exit 4"]), b"").await;
    let events: Vec<Value> = ran.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let kinds: Vec<_> = events.iter().filter_map(|event| event["type"].as_str()).collect();
    assert_eq!((ran.code, kinds), (Some(4), vec!["started", "stdout", "exit"]));
    assert_eq!((events[1]["data"].as_str(), events[2]["code"].as_i64()), (Some("aGkK"), Some(4)));
}

/// Starts it; returns once its command has written a line.
async fn start_and_see(mut command: Command) -> Child {
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("started");
    let stdout = child.stdout.take().expect("piped");
    let mut lines = BufReader::new(stdout).lines();
    let line = timeout(PATIENCE, lines.next_line()).await.expect("in time").expect("readable");
    assert_eq!(line.as_deref(), Some("started"));
    // The pipe must stay open: a closed one would end the program.
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    child
}

async fn end_by(mut child: Child, signal: i32) -> Option<i32> {
    let pid = i32::try_from(child.id().expect("it runs")).expect("a pid");
    // SAFETY: the child has not been waited for, so the number is still its own.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    timeout(PATIENCE, child.wait()).await.expect("in time").expect("waited").code()
}
