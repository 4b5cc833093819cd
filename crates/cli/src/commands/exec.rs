//! `stockade exec` and `stockade shell`.

use std::{
    collections::BTreeMap,
    env,
    io::{self, IsTerminal as _},
};

use super::{
    Context,
    attend::{Attendance, Attended, Role, Signals},
};
use crate::{
    args::{Exec, Running, Shell},
    client::{ExecRequest, ExecSession, PtySize},
    failure::Failure,
    terminal::{self, RawMode},
};

/// Size of a terminal nobody looks at.
const DEFAULT_SIZE: PtySize = PtySize { cols: 80, rows: 24 };

/// Runs a command in a sandbox; its exit code.
pub(super) async fn exec(context: &Context, args: Exec) -> Result<u8, Failure> {
    let request = request(&args.running, args.env)?;
    let mut signals = Signals::listen()?;
    start_and_attend(context, &args.sandbox, &request, Role::Exec, &mut signals).await
}

/// Opens a terminal in a sandbox. Without a terminal here it is a shell that reads our input to its end.
pub(super) async fn shell(context: &Context, args: Shell) -> Result<u8, Failure> {
    let mut signals = Signals::listen()?;
    let is_terminal = io::stdin().is_terminal();
    let mut request = ExecRequest {
        argv: vec!["bash".to_owned(), "-l".to_owned()],
        user: args.user,
        cwd: args.cwd,
        env: if is_terminal { terminal_type() } else { BTreeMap::new() },
        stdin: true,
        pty: is_terminal.then(|| terminal::size().unwrap_or(DEFAULT_SIZE)),
        timeout_seconds: None,
    };
    match start_and_attend(context, &args.sandbox, &request, Role::Exec, &mut signals).await {
        // A template without bash.
        Err(failure) if failure.code == "cannot_execute" => {
            "sh".clone_into(&mut request.argv[0]);
            start_and_attend(context, &args.sandbox, &request, Role::Exec, &mut signals).await
        }
        ended => ended,
    }
}

/// The request for what was typed.
pub(super) fn request(running: &Running, env: Vec<(String, String)>) -> Result<ExecRequest, Failure> {
    let mut argv = Vec::with_capacity(running.command.len());
    for argument in &running.command {
        let text = argument.to_str().ok_or_else(|| {
            Failure::new("invalid_argument", format!("the argument {argument:?} is not UTF-8"))
                .hint("put it into a script, copy the script with `stockade cp`, and run that")
        })?;
        argv.push(text.to_owned());
    }
    let mut all = if running.tty { terminal_type() } else { BTreeMap::new() };
    all.extend(env);
    Ok(ExecRequest {
        argv,
        user: running.user.clone(),
        cwd: running.cwd.clone(),
        env: all,
        stdin: !running.no_stdin && !terminal::is_in_background(),
        pty: running.tty.then(|| terminal::size().unwrap_or(DEFAULT_SIZE)),
        timeout_seconds: running.timeout,
    })
}

/// Starts the command and stands by until it ends; its exit code.
pub(super) async fn start_and_attend(
    context: &Context,
    sandbox: &str,
    request: &ExecRequest,
    role: Role,
    signals: &mut Signals,
) -> Result<u8, Failure> {
    let session = tokio::select! {
        session = context.client.exec(sandbox, request) => session?,
        number = signals.next() => return Ok(Attended::Signalled(number).exit_code()),
    };
    let Context { client, ui } = context;
    let tty = request.pty.is_some();
    stand_by(&Attendance { client, ui: *ui, sandbox, stdin: request.stdin, tty, role }, session, signals).await
}

/// Attends with our terminal set for it; the command's exit code.
pub(super) async fn stand_by(
    attendance: &Attendance<'_>,
    session: ExecSession,
    signals: &mut Signals,
) -> Result<u8, Failure> {
    let ui = attendance.ui;
    let raw = if attendance.tty && io::stdout().is_terminal() { RawMode::enter() } else { Ok(None) };
    let raw = raw.map_err(|error| Failure::host("set the terminal to raw mode", error))?;
    let ended = attendance.attend(session, signals).await;
    // Before anything is printed about how it went.
    drop(raw);
    let ended = ended?;
    match ended {
        Attended::Exited(exit) if exit.timed_out => ui.note("error: the command was killed because its time was up"),
        Attended::Exited(exit) if exit.out_of_memory => {
            ui.note("error: the guest ran out of memory; its kernel killed the command or a child of it");
        }
        _ => {}
    }
    Ok(ended.exit_code())
}

fn terminal_type() -> BTreeMap<String, String> {
    let term = env::var("TERM").unwrap_or_else(|_| "xterm-256color".to_owned());
    BTreeMap::from([("TERM".to_owned(), term)])
}
