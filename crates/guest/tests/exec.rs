//! Commands: what runs, what comes out, how it ends.

mod common;

use std::collections::BTreeMap;

use common::{Guest, argv, bytes, finish, pid, refusal, shell, wait_for};
use futures::StreamExt;
use stockade_engine::guest::{Events, Selector};
use stockade_wire::{
    ErrorCode,
    event::Event,
    process::{Exit, SignalRequest, StartRequest},
};

fn code(code: i32) -> Exit {
    Exit { code: Some(code), ..Exit::default() }
}

fn signal(signal: i32) -> Exit {
    Exit { signal: Some(signal), ..Exit::default() }
}

/// Refused starts have no events to print.
fn refused(result: Result<Events, stockade_engine::EngineError>) -> (ErrorCode, String) {
    refusal(result.map(|_| ()))
}

#[tokio::test]
async fn a_command_gives_its_output_and_its_exit_code() {
    let guest = Guest::start().await;
    let outcome = guest.shell("echo out; echo err >&2; exit 3").await;
    assert_eq!((outcome.stdout.as_slice(), outcome.stderr.as_slice()), (&b"out\n"[..], &b"err\n"[..]));
    assert_eq!(outcome.exit, code(3));
}

#[tokio::test]
async fn exit_codes_and_deaths_by_signal_are_told_apart() {
    let guest = Guest::start().await;
    for (text, exit) in [
        ("exit 0", code(0)),
        ("exit 255", code(255)),
        ("kill -9 $$", signal(9)),
        ("kill -15 $$", signal(15)),
        ("kill -SEGV $$", signal(11)),
    ] {
        assert_eq!(guest.shell(text).await.exit, exit, "{text}");
    }
}

#[tokio::test]
async fn both_pipes_may_fill_at_once() {
    let guest = Guest::start().await;
    let script = guest.input("exec_both_pipes.py");
    let outcome = guest.run(argv(["python3", &script])).await;
    assert_eq!((outcome.stdout.len(), outcome.stderr.len()), (1 << 20, 1 << 20));
    assert_eq!(outcome.exit, code(7));
}

#[tokio::test]
async fn characters_may_be_cut_anywhere() {
    let guest = Guest::start().await;
    let script = guest.input("exec_utf8_split.py");
    let mut request = argv(["python3", &script]);
    request.env.insert("PYTHONIOENCODING".to_owned(), "utf-8".to_owned());
    let outcome = guest.run(request).await;
    assert!(outcome.text().starts_with("caf\u{e9}\u{2615}\u{1f600}\n.\u{2615}"));
    assert_eq!(outcome.text().chars().filter(|c| *c == '\u{2615}').count(), 100_001);
}

#[tokio::test]
async fn the_last_bytes_before_a_quick_end_all_arrive() {
    let guest = Guest::start().await;
    let script = guest.input("exec_abrupt_end.py");
    for _ in 0..10 {
        let outcome = guest.run(argv(["python3", &script])).await;
        assert_eq!(outcome.stdout.len(), 4_194_307);
        assert!(outcome.stdout.ends_with(b"END"));
        assert_eq!(outcome.exit, code(3));
    }
}

#[tokio::test]
async fn a_background_child_neither_holds_the_command_nor_dies_of_its_end() {
    let guest = Guest::start().await;
    // The child writes more than a pipe holds after its parent has ended, then leaves a mark.
    let mark = guest.path("mark");
    let text =
        format!("(read x < {0}; head -c 300000 /dev/zero; echo alive > {mark}) & echo started", guest.path("go"));
    guest.shell(&format!("mkfifo {}", guest.path("go"))).await;
    let outcome = guest.shell(&text).await;
    assert_eq!((outcome.text(), &outcome.exit), ("started\n", &code(0)));
    assert_eq!(
        guest
            .shell(&format!("echo go > {0}; until test -s {mark}; do sleep 0.05; done; cat {mark}", guest.path("go")))
            .await
            .text(),
        "alive\n"
    );
}

#[tokio::test]
async fn a_timeout_ends_the_whole_group_and_keeps_what_was_written() {
    let guest = Guest::start().await;
    let procs = guest.input("procs.py");
    let mark = format!("{}.25", 10_000 + std::process::id());
    let mut request = shell(&format!("echo first; echo second >&2; sleep {mark} & sleep {mark} | cat; wait"));
    request.timeout_ms = Some(500);
    let outcome = guest.run(request).await;
    assert_eq!(outcome.exit, Exit { timed_out: true, ..signal(9) });
    assert_eq!((outcome.stdout.as_slice(), outcome.stderr.as_slice()), (&b"first\n"[..], &b"second\n"[..]));
    let (whole, part) = mark.split_once('.').expect("two halves");
    assert_eq!(guest.run(argv(["python3", &procs, whole, part])).await.text(), "0\n");
}

#[tokio::test]
async fn without_input_a_reader_sees_the_end_at_once() {
    let guest = Guest::start().await;
    assert_eq!(guest.shell("cat; echo rc=$?").await.text(), "rc=0\n");
}

#[tokio::test]
async fn any_bytes_go_in_and_the_end_is_seen() {
    let guest = Guest::start().await;
    let events = guest.client.start(&StartRequest { stdin: true, ..argv(["sha256sum"]) }).await.expect("starts");
    let process = pid(&events);
    let content: Vec<u8> = (0..1_000_000u32).map(|n| (n % 251) as u8).collect();
    guest.client.write_stdin(&process, bytes(content[..10].to_vec()), false).await.expect("written");
    guest.client.write_stdin(&process, bytes(content[10..].to_vec()), true).await.expect("written");
    let outcome = finish(events).await;
    std::fs::write(guest.path("same"), &content).expect("written");
    assert_eq!(
        outcome.text().split(' ').next(),
        guest.shell(&format!("sha256sum {}", guest.path("same"))).await.text().split(' ').next()
    );
    let (refused, _) = refusal(guest.client.write_stdin(&process, bytes("x"), false).await);
    assert_eq!(refused, ErrorCode::StdinClosed);
}

#[tokio::test]
async fn writing_to_a_process_that_ends_does_not_hang() {
    let guest = Guest::start().await;
    let events = guest.client.start(&StartRequest { stdin: true, ..shell("sleep 0.3") }).await.expect("starts");
    let written = guest.client.write_stdin(&pid(&events), bytes(vec![0; 1 << 20]), false).await;
    assert_eq!(refusal(written).0, ErrorCode::StdinClosed);
}

#[tokio::test]
async fn arguments_and_environment_arrive_byte_for_byte() {
    let guest = Guest::start().await;
    let script = guest.input("exec_env.py");
    let mut request = argv(["python3", &script, "single \"double\" $HOME `id` \\n", "tab\there", ""]);
    request.env = BTreeMap::from(
        [("FC_LINES", "two\nlines\n"), ("FC_EMPTY", ""), ("FC_WIDE", "na\u{ef}ve \u{2615}"), ("FC_EQ", "a=b=c")]
            .map(|(key, value)| (key.to_owned(), value.to_owned())),
    );
    let outcome = guest.run(request).await;
    let seen: serde_json::Value = serde_json::from_slice(&outcome.stdout).expect("JSON");
    assert_eq!(
        seen,
        serde_json::json!([
            {"FC_LINES": "two\nlines\n", "FC_EMPTY": "", "FC_WIDE": "na\u{ef}ve \u{2615}", "FC_EQ": "a=b=c"},
            ["single \"double\" $HOME `id` \\n", "tab\there", ""]
        ])
    );
}

#[tokio::test]
async fn shell_text_reaches_the_shell_as_it_is() {
    let guest = Guest::start().await;
    assert_eq!(guest.shell("cat <<'EOF'\nhello\n  EOF not yet\nEOF").await.text(), "hello\n  EOF not yet\n");
    assert_eq!(guest.shell("echo a # and a closing note").await.text(), "a\n");
    assert_eq!(guest.shell("echo b; sleep 0.1 &").await.text(), "b\n");
    assert_ne!(guest.shell("echo \"never closed").await.exit, code(0));
    assert_eq!(guest.shell("echo still-alive").await.text(), "still-alive\n");
}

#[tokio::test]
async fn what_cannot_start_says_why() {
    let guest = Guest::start().await;
    let start = async |request: StartRequest| refused(guest.client.start(&request).await);
    let (code, message) = start(StartRequest { cwd: Some("/no/such/dir".to_owned()), ..shell("pwd") }).await;
    assert_eq!(code, ErrorCode::BadCwd);
    assert!(message.contains("/no/such/dir"), "{message}");
    let (code, message) = start(argv(["no-such-program"])).await;
    assert_eq!(code, ErrorCode::CannotExecute);
    assert!(message.contains("no-such-program"), "{message}");
    assert_eq!(start(argv(["/etc/passwd"])).await.0, ErrorCode::CannotExecute);
    assert_eq!(start(argv([])).await.0, ErrorCode::InvalidArgument);
    assert_eq!(start(argv(["echo", "a\0b"])).await.0, ErrorCode::InvalidArgument);
    assert_eq!(start(shell(&"x".repeat(300_000))).await.0, ErrorCode::TooLong);
    assert_eq!(
        start(StartRequest { user: Some("nobody-here".to_owned()), ..shell("id") }).await.0,
        ErrorCode::UnknownUser
    );
    assert_eq!(start(StartRequest { timeout_ms: Some(0), ..shell("id") }).await.0, ErrorCode::InvalidArgument);
    assert_eq!(guest.shell("echo ok").await.text(), "ok\n");
}

#[tokio::test]
async fn signals_reach_the_group_or_the_main_process_alone() {
    let guest = Guest::start().await;
    let send = async |events: &Events, signal, main_only| {
        guest.client.signal(&pid(events), SignalRequest { signal, main_only }).await
    };
    let mut events = guest
        .client
        .start(&shell("trap 'echo got; exit 4' TERM; echo ready; while :; do sleep 0.05; done"))
        .await
        .expect("starts");
    wait_for(&mut events, "ready").await;
    assert_eq!(refusal(send(&events, 1000, false).await).0, ErrorCode::UnknownSignal);
    send(&events, 15, true).await.expect("sent");
    let selector = pid(&events);
    let outcome = finish(events).await;
    assert_eq!((outcome.text(), &outcome.exit), ("got\n", &code(4)));
    let late = guest.client.signal(&selector, SignalRequest { signal: 9, main_only: false }).await;
    assert_eq!(refusal(late).0, ErrorCode::NoSuchProcess);
    let unknown = guest.client.signal(&Selector::Pid(4_000_000), SignalRequest { signal: 9, main_only: false }).await;
    assert_eq!(refusal(unknown).0, ErrorCode::NoSuchProcess);
}

#[tokio::test]
async fn a_late_reader_gets_the_rest_without_a_gap_and_the_exit() {
    let guest = Guest::start().await;
    let events = guest
        .client
        .start(&StartRequest { tag: Some("a/b c".to_owned()), ..shell("seq 1 2000; exit 9") })
        .await
        .expect("starts");
    let whole = finish(events).await.stdout;
    let selector = Selector::Tag("a/b c".to_owned());
    for after in [0, 1, 1000, whole.len() as u64] {
        let events = guest.client.attach(&selector, Some(after)).await.expect("attached");
        assert_eq!(events.started.as_ref().expect("started").offset, after);
        let outcome = finish(events).await;
        assert_eq!(outcome.stdout, whole[after as usize..], "after {after}");
        assert_eq!(outcome.exit, code(9));
    }
}

#[tokio::test]
async fn a_process_outlives_the_session_it_was_started_in() {
    let guest = Guest::start().await;
    let script = guest.path("go");
    let mut events = guest
        .client
        .start(&shell(&format!("echo one; until test -e {script}; do sleep 0.02; done; echo two; exit 9")))
        .await
        .expect("starts");
    let process = pid(&events);
    let seen = wait_for(&mut events, "one\n").await.len() as u64;
    guest.client.close();
    assert!(matches!(events.events.next().await, Some(Err(_))), "a broken stream is an error");
    let (client, _server) = common::connect(&guest.agent).await;
    std::fs::write(&script, "").expect("written");
    let outcome = finish(client.attach(&process, Some(seen)).await.expect("attached")).await;
    assert_eq!((outcome.text(), &outcome.exit), ("two\n", &code(9)));
}

#[tokio::test]
async fn output_nobody_reads_is_dropped_from_its_front_and_counted() {
    let guest = Guest::start().await;
    let events = guest.client.start(&shell("head -c 5000000 /dev/zero; echo; echo end")).await.expect("starts");
    let process = pid(&events);
    drop(events);
    while guest.client.processes().await.expect("listed").processes[0].exit.is_none() {}
    let outcome = finish(guest.client.attach(&process, Some(0)).await.expect("attached")).await;
    assert!(outcome.stdout.ends_with(b"end\n"));
    assert_eq!(outcome.missed + outcome.stdout.len() as u64, 5_000_005);
    assert!(outcome.stdout.len() <= 2 << 20, "what is kept is bounded");
}

#[tokio::test]
async fn a_silent_reader_does_not_starve_the_others() {
    let guest = Guest::start().await;
    let script = guest.input("life_responder.py");
    let request = StartRequest { stdin: true, ..argv(["python3", "-u", &script]) };
    let mut started = guest.client.start(&request).await.expect("starts");
    let process = pid(&started);
    let _stuck = guest.client.attach(&process, None).await.expect("attached");
    for _ in 0..200 {
        guest.client.write_stdin(&process, bytes("BIG 8000\n"), false).await.expect("written");
        let mut read = 0;
        while read < 8001 {
            match started.events.next().await.expect("goes on").expect("holds") {
                Event::Stdout(bytes) => read += bytes.len(),
                Event::Missed(_) => panic!("the fastest reader misses nothing"),
                _ => {}
            }
        }
        assert_eq!(read, 8001);
    }
    guest.client.write_stdin(&process, bytes("hello\n"), false).await.expect("written");
    wait_for(&mut started, "echo hello").await;
}

#[tokio::test]
async fn the_list_names_what_runs_and_what_ended() {
    let guest = Guest::start().await;
    let running = guest
        .client
        .start(&StartRequest { tag: Some("t".to_owned()), stdin: true, ..argv(["cat"]) })
        .await
        .expect("starts");
    guest.shell("exit 2").await;
    let list = guest.client.processes().await.expect("listed").processes;
    assert_eq!(list.len(), 2);
    assert_eq!((list[0].tag.as_deref(), &list[0].exit), (Some("t"), &None));
    assert_eq!(list[1].exit, Some(code(2)));
    let again = guest.client.start(&StartRequest { tag: Some("t".to_owned()), ..argv(["true"]) }).await;
    assert_eq!(refused(again).0, ErrorCode::AlreadyExists);
    guest.client.write_stdin(&pid(&running), bytes(""), true).await.expect("closed");
    finish(running).await;
    let again = guest.client.start(&StartRequest { tag: Some("t".to_owned()), ..argv(["true"]) }).await;
    again.expect("a tag is free again when its process has ended");
}
