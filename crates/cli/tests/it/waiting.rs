//! What takes long says so, on standard error alone.

use std::{fs::File, io::Read as _, process::Stdio};

use nix::pty::{Winsize, openpty};
use stockade_engine::fake::{Moment, Step};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::Command,
    time::timeout,
};

use crate::support::{PATIENCE, TestServer, run};

/// Into the archive and back: the step that takes long, what is said of it, and how standard output begins.
const LONG: [(&[&str], Step, &str, &str); 2] = [
    (&["pause", "--archive"], Step::Halted, "archiving", "paused\n"),
    (&["resume"], Step::Restore, "bringing back", "deadline "),
];

fn piped(mut command: Command) -> Command {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[tokio::test]
async fn an_archive_that_takes_long_says_what_it_is_at() {
    let server = TestServer::start().await;
    let id = server.create().await;
    for (verb, step, doing, printed) in LONG {
        let hang = server.host.hang(step, Moment::Before);
        let mut child = piped(server.stockade(&[verb, &[&id]].concat())).spawn().expect("started");
        let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
        let line = timeout(PATIENCE, lines.next_line()).await.expect("in time").expect("read");
        assert_eq!(line, Some(format!("{doing} {id} (2 s)")));
        hang.release();
        let output = child.wait_with_output().await.expect("ended");
        assert!(output.status.success(), "{output:?}");
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(stdout.starts_with(printed) && stdout.lines().count() == 1, "data alone: {stdout}");
    }
}

#[tokio::test]
async fn a_terminal_is_told_by_a_line_that_goes_again() {
    let server = TestServer::start().await;
    let id = server.create().await;
    for (verb, step, doing, printed) in LONG {
        let size = Winsize { ws_row: 24, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };
        let terminal = openpty(&size, None).expect("a terminal");
        let hang = server.host.hang(step, Moment::Before);
        let mut command = piped(server.stockade(&[verb, &[&id]].concat()));
        command.stderr(Stdio::from(terminal.slave)).env("TERM", "xterm");
        let child = command.spawn().expect("started");
        // With it goes our own end of the terminal: its other end is the program's alone.
        drop(command);
        let mut screen = File::from(terminal.master);
        let said = format!("{doing} {id}");
        let (seen, is_seen) = tokio::sync::oneshot::channel();
        let reader = tokio::task::spawn_blocking(move || {
            let (mut shown, mut seen, mut piece) = (String::new(), Some(seen), [0; 4096]);
            // A terminal nobody writes to any more is an error to read from.
            while let Ok(length @ 1..) = screen.read(&mut piece) {
                shown.push_str(&String::from_utf8_lossy(&piece[..length]));
                if shown.contains(&said) {
                    seen.take().map(|seen| seen.send(()));
                }
            }
            shown
        });
        timeout(PATIENCE, is_seen).await.expect("in time").expect("it is shown");
        hang.release();
        let output = child.wait_with_output().await.expect("ended");
        let shown = reader.await.expect("read");
        assert!(output.status.success() && output.stdout.starts_with(printed.as_bytes()), "{output:?}");
        assert!(shown.trim_end().ends_with("\u{1b}[2K"), "the line is cleared: {shown:?}");
    }
}

#[tokio::test]
async fn what_is_soon_done_says_nothing() {
    let server = TestServer::start().await;
    let id = server.create().await;
    for (verb, _, _, printed) in LONG {
        let ran = run(server.stockade(&[verb, &[&id]].concat()), b"").await;
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
        assert!(ran.stdout.starts_with(printed), "{ran:?}");
    }
}
