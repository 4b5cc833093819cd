//! Commands in sandboxes: streams, exit codes, signals.

use std::process::Stdio;

use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
    time::timeout,
};

use crate::support::{PATIENCE, TestServer, end_by, run};

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
    for (signal, code) in [(libc::SIGINT, 130), (libc::SIGTERM, 143), (libc::SIGHUP, 129), (libc::SIGQUIT, 131)] {
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
    assert_eq!((ran.code, kinds), (Some(4), vec!["sandbox", "started", "stdout", "exit"]));
    assert_eq!((events[2]["data"].as_str(), events[3]["code"].as_i64()), (Some("aGkK"), Some(4)));
    let ran = run(server.stockade(&["--json", "run", "--keep", "--", "true"]), b"").await;
    let event: Value = serde_json::from_str(ran.stdout.lines().next().expect("a line")).expect("JSON");
    assert_eq!(event["id"].as_str().map(|id| format!("{id}\n")), Some(server.ok(&["ls", "-q"]).await));
}

#[tokio::test]
async fn a_shell_without_a_terminal_ends_with_its_input() {
    let server = TestServer::start().await;
    let id = server.create().await;
    let shell = |arguments: &[&str], input: &'static [u8]| {
        let command = server.stockade(&[arguments, &[&id]].concat());
        async move { timeout(PATIENCE, run(command, input)).await.expect("it ends") }
    };
    assert_eq!(shell(&["shell"], b"").await.code, Some(0));
    let ran = shell(&["shell"], b"echo $((6*7))\nexit 3\n").await;
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(3), "42\n"));
    // A terminal that was asked for gets the key for the end, after an unfinished line too.
    for input in [&b""[..], b"line\n", b"unfinished"] {
        let command = server.stockade(&["exec", "--tty", &id, "--", "cat"]);
        let ran = timeout(PATIENCE, run(command, input)).await.expect("it ends");
        assert_eq!(ran.code, Some(0), "{ran:?}");
    }
    // What waits for a key anew each time gets one each time.
    let script = "i=0; while [ $i -lt 3 ]; do cat; i=$((i+1)); done";
    let command = server.stockade(&["exec", "--tty", &id, "--", "sh", "-c", script]);
    assert_eq!(timeout(PATIENCE, run(command, b"")).await.expect("it ends").code, Some(0));
}

#[tokio::test]
async fn a_command_does_not_outlive_its_output() {
    let server = TestServer::start().await;
    let id = server.create().await;
    let script = "echo started; trap '' HUP; exec yes";
    let mut command = server.stockade(&["exec", "-n", &id, "--", "sh", "-c", script]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("started");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    assert_eq!(lines.next_line().await.expect("readable").as_deref(), Some("started"));
    let running = server.ok(&["ps", &id]).await;
    assert!(running.contains("running") && running.contains("exec yes"), "{running}");
    drop(lines);
    let output = timeout(PATIENCE, child.wait_with_output()).await.expect("in time").expect("waited");
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(141), ""));
    assert_eq!(server.ok(&["ps", &id]).await.lines().count(), 1, "only the head");

    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("a full device");
    let mut command = server.stockade(&["exec", "-n", &id, "--", "echo", "hello"]);
    command.stdout(full).stderr(Stdio::piped());
    let output = command.spawn().expect("started").wait_with_output().await.expect("waited");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{stderr}");
    assert!(stderr.starts_with("error: cannot write to standard output: No space left"), "{stderr}");
}

#[tokio::test]
async fn processes_are_listed_and_attached_to() {
    let server = TestServer::start().await;
    let id = server.create().await;
    let script = "echo started; read line; echo got $line; exit 7";
    let mut command = server.stockade(&["exec", &id, "--", "sh", "-c", script]);
    command.stdin(Stdio::piped());
    command.stdout(Stdio::piped());
    let mut child = command.spawn().expect("started");
    let stdin = child.stdin.take().expect("piped");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    assert_eq!(lines.next_line().await.expect("readable").as_deref(), Some("started"));
    child.kill().await.expect("killed");
    drop(stdin);

    let listed: Value = serde_json::from_str(&server.ok(&["ps", &id, "--json"]).await).expect("JSON");
    let process = &listed["items"][0];
    assert_eq!((&process["argv"][2], &process["pty"]), (&script.into(), &false.into()));
    let pid = process["pid"].to_string();
    let ran = run(server.stockade(&["attach", &id, &pid]), b"it\n").await;
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(7), "started\ngot it\n"), "{ran:?}");
    // It has ended: its output and exit code are still known.
    assert_eq!(server.ok(&["ps", &id]).await.lines().count(), 1);
    assert!(server.ok(&["ps", "--all", &id]).await.contains("exit 7"));
    let ran = run(server.stockade(&["attach", "-n", &id, &pid]), b"").await;
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(7), "started\ngot it\n"), "{ran:?}");
    for (process, code) in [("999999", "no_such_process"), ("tag:nope", "no_such_process")] {
        let ran = run(server.stockade(&["attach", "--json", &id, process]), b"").await;
        let error: Value = serde_json::from_str(&ran.stderr).expect("JSON");
        assert_eq!((ran.code, error["error"]["code"].as_str()), (Some(125), Some(code)), "{error}");
    }
}

#[tokio::test]
async fn an_interrupt_reaches_the_process_attached_to_and_other_signals_detach() {
    let server = TestServer::start().await;
    let id = server.create().await;
    let script = "trap 'exit 9' INT; echo started; while :; do sleep 0.05; done";
    let first = start_and_see(server.stockade(&["exec", "-n", &id, "--", "sh", "-c", script])).await;
    let listed: Value = serde_json::from_str(&server.ok(&["ps", &id, "--json"]).await).expect("JSON");
    let pid = listed["items"][0]["pid"].to_string();
    let attach = || start_and_see(server.stockade(&["attach", "-n", &id, &pid]));
    for (signal, code) in [(libc::SIGTERM, 143), (libc::SIGHUP, 129), (libc::SIGQUIT, 131), (libc::SIGINT, 9)] {
        assert_eq!(end_by(attach().await, signal).await, Some(code));
    }
    let ended = timeout(PATIENCE, first.wait_with_output()).await.expect("in time").expect("waited");
    assert_eq!(ended.status.code(), Some(9));
}

#[tokio::test]
async fn a_command_whose_sandbox_ends_is_told_why() {
    let server = TestServer::start().await;
    let id = server.create().await;
    let mut command = server.stockade(&["exec", "-n", &id, "--", "sh", "-c", "echo started; exec sleep 600"]);
    command.stderr(Stdio::piped());
    let child = start_and_see(command).await;
    server.ok(&["kill", &id]).await;
    let output = timeout(PATIENCE, child.wait_with_output()).await.expect("in time").expect("waited");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{stderr}");
    assert!(
        stderr.starts_with(&format!("error: sandbox {id} has ended at ")) && stderr.contains(": killed\n"),
        "{stderr}"
    );
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
