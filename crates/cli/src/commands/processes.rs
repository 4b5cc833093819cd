//! `stockade ps` and `stockade attach`.

use serde_json::json;

use super::{
    Context,
    attend::{Attendance, Attended, Role, Signals},
    env::quoted,
    exec::stand_by,
    sandboxes::local_time,
};
use crate::{
    args::{Attach, Ps},
    client::{Exit, Process},
    failure::Failure,
    terminal,
    ui::{printable, table},
};

const HEAD: [&str; 7] = ["PID", "TAG", "USER", "TTY", "STARTED", "STATE", "COMMAND"];

pub(super) async fn ps(context: &Context, args: Ps) -> Result<(), Failure> {
    let mut processes = context.client.processes(&args.sandbox).await?;
    processes.retain(|process| args.all || process.exit.is_none());
    context.ui.data(&json!({"items": processes}), || table(&HEAD, &processes.iter().map(row).collect::<Vec<_>>()))
}

fn row(process: &Process) -> Vec<String> {
    let state = match process.exit {
        None => "running".to_owned(),
        Some(Exit { signal: Some(signal), .. }) => format!("signal {signal}"),
        Some(Exit { code, .. }) => code.map_or_else(|| "ended".to_owned(), |code| format!("exit {code}")),
    };
    let argv = process.argv.iter().flatten().map(|argument| quoted(argument)).collect::<Vec<_>>().join(" ");
    let command = process.shell.as_ref().unwrap_or(&argv);
    vec![
        process.pid.to_string(),
        printable(process.tag.as_deref().unwrap_or("-")),
        printable(&process.user),
        if process.pty { "yes" } else { "no" }.to_owned(),
        local_time(&process.started_at),
        state,
        // A line is one process.
        printable(command).replace('\n', "\\n"),
    ]
}

/// Attaches to a process; its exit code.
pub(super) async fn attach(context: &Context, args: Attach) -> Result<u8, Failure> {
    let mut signals = Signals::listen()?;
    let Context { client, ui } = context;
    let processes = client.processes(&args.sandbox).await?;
    let is_meant = |process: &Process| match args.process.strip_prefix("tag:") {
        Some(tag) => process.tag.as_deref() == Some(tag),
        None => process.pid.to_string() == args.process,
    };
    // One that is not there is the server's to refuse.
    let tty = processes.iter().rfind(|process| is_meant(process)).is_some_and(|process| process.pty);
    let session = tokio::select! {
        session = client.attach(&args.sandbox, &args.process, !args.no_replay) => session?,
        number = signals.next() => return Ok(Attended::Signalled(number).exit_code()),
    };
    let stdin = !args.no_stdin && !terminal::is_in_background();
    let attendance = Attendance { client, ui: *ui, sandbox: &args.sandbox, stdin, tty, role: Role::Attach };
    stand_by(&attendance, session, &mut signals).await
}
