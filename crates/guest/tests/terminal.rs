//! Terminals.

mod common;

use common::{Guest, argv, bytes, finish, pid, refusal, shell, wait_for};
use stockade_engine::guest::Events;
use stockade_wire::{
    ErrorCode,
    process::{PtySize, StartRequest},
};

const SIZE: PtySize = PtySize { cols: 80, rows: 24 };

async fn open(guest: &Guest) -> Events {
    let request = StartRequest { pty: Some(SIZE), ..argv(["/bin/bash", "--norc", "-i"]) };
    guest.client.start(&request).await.expect("starts")
}

async fn send(guest: &Guest, events: &Events, text: &str) {
    guest.client.write_stdin(&pid(events), bytes(text.to_owned()), false).await.expect("written");
}

#[tokio::test]
async fn a_terminal_delivers_everything_then_the_exit_code() {
    let guest = Guest::start().await;
    for _ in 0..10 {
        let request = StartRequest { pty: Some(SIZE), ..shell("seq 1 20000; printf end; exit 5") };
        let outcome = guest.run(request).await;
        let expected: String = (1..=20_000).map(|n| format!("{n}\r\n")).chain(["end".to_owned()]).collect();
        assert!(outcome.pty == expected.as_bytes(), "{} of {} bytes", outcome.pty.len(), expected.len());
        assert_eq!(outcome.exit.code, Some(5));
    }
}

#[tokio::test]
async fn resize_interrupt_and_exit_code_reach_their_process() {
    let guest = Guest::start().await;
    let script = guest.input("pty_winch.py");
    let mut events = open(&guest).await;
    send(&guest, &events, &format!("echo $TERM; python3 {script}; echo left-$?\n")).await;
    let seen = wait_for(&mut events, "size 24 80").await;
    assert!(String::from_utf8_lossy(&seen).contains("xterm-256color"));
    guest.client.resize(&pid(&events), PtySize { cols: 132, rows: 50 }).await.expect("resized");
    wait_for(&mut events, "size 50 132").await;
    send(&guest, &events, "q\n").await;
    wait_for(&mut events, "left-5").await;
    // Said by the job itself: by then it is in the foreground.
    send(&guest, &events, "sh -c 'echo $((40+1))-go; exec sleep 300'\n").await;
    wait_for(&mut events, "41-go").await;
    send(&guest, &events, "\u{3}").await;
    send(&guest, &events, "echo back-$((40+2))\n").await;
    wait_for(&mut events, "back-42").await;
    send(&guest, &events, "exit 6\n").await;
    assert_eq!(finish(events).await.exit.code, Some(6));
}

#[tokio::test]
async fn a_terminal_ends_with_its_shell_whatever_it_left_behind() {
    let guest = Guest::start().await;
    let events = open(&guest).await;
    send(&guest, &events, "(trap '' HUP; sleep 20) & exit 3\n").await;
    assert_eq!(finish(events).await.exit.code, Some(3));
}

#[tokio::test]
async fn what_a_terminal_cannot_do_is_said() {
    let guest = Guest::start().await;
    let events = open(&guest).await;
    let closed = guest.client.write_stdin(&pid(&events), bytes(""), true).await;
    assert_eq!(refusal(closed).0, ErrorCode::InvalidArgument);
    let plain = guest.client.start(&StartRequest { stdin: true, ..argv(["cat"]) }).await.expect("starts");
    assert_eq!(refusal(guest.client.resize(&pid(&plain), SIZE).await).0, ErrorCode::NotATerminal);
}
