//! A session channel: one process in the guest.
//!
//! ```text
//! client --data--> stdin (or terminal)         end of data: stdin is closed (in a terminal: ^D)
//!        <-data--- stdout (or terminal)        window, signal: to the process group
//!        <-ext 1-- stderr, and what we have to say
//!        <-exit status or signal, end, close
//! ```
//!
//! A client that goes away before the process has ended hangs up: the process's group gets SIGHUP, as from sshd.

use std::io;

use bytes::Bytes;
use futures::StreamExt as _;
use russh::{Sig, server::Handle};
use stockade_engine::{EngineError, GuestClient, guest::Selector};
use stockade_model::SandboxId;
use stockade_service::{Service, ServiceError};
use stockade_wire::{
    event::Event,
    process::{Command, Exit, SignalRequest, StartRequest},
};
use tokio::sync::mpsc;

use crate::client::{Control, Input, Inputs, Out, Setup};

const STDERR: u32 = 1;
/// What `ssh` itself ends with when the connection fails.
const OWN_FAILURE: u32 = 255;
const END_OF_TRANSMISSION: &[u8] = b"\x04";
const SIGHUP: i32 = 1;

/// What to run.
#[derive(Debug, Eq, PartialEq)]
pub(crate) enum Program {
    /// The user's shell, as at a login.
    Shell,
    /// A command line for the user's shell.
    Command(String),
    /// What answers `sftp` and `scp`.
    Sftp,
}

impl Program {
    fn command(self) -> Command {
        // A login's own files may print what the other side of rsync or scp would choke on: not for commands.
        let argv = match self {
            Self::Shell => ["/bin/sh", "-c", r#"exec "${SHELL:-/bin/sh}" -l"#].map(str::to_owned).to_vec(),
            Self::Command(line) => {
                let start = r#"exec "${SHELL:-/bin/sh}" -c "$0""#;
                vec!["/bin/sh".to_owned(), "-c".to_owned(), start.to_owned(), line]
            }
            Self::Sftp => return Command::Tool(stockade_wire::process::Tool::Sftp),
        };
        Command::Argv(argv)
    }
}

/// Both ways of a channel.
pub(crate) struct Wire {
    pub(crate) out: Out,
    pub(crate) handle: Handle,
    pub(crate) inputs: Inputs,
    pub(crate) control: mpsc::Receiver<Control>,
}

/// Serves the channel to its end.
pub(crate) async fn run(service: &Service, sandbox: &SandboxId, program: Program, setup: Setup, wire: Wire) {
    let Wire { out, handle, inputs, mut control } = wire;
    let has_terminal = setup.pty.is_some();
    let guest = match service.guest_by_token(sandbox, None).await {
        Ok((_, guest)) => guest,
        Err(error) => return fail(&out, &tell(sandbox, &error)).await,
    };
    let request = StartRequest {
        cwd: Some("~".to_owned()),
        env: setup.env,
        stdin: !has_terminal,
        pty: setup.pty,
        ..StartRequest::new(program.command())
    };
    let mut events = match guest.start(&request).await {
        Ok(events) => events,
        Err(error) => return fail(&out, &tell(sandbox, &error.into())).await,
    };
    let Some(process) = events.started.take().map(|started| Selector::Pid(started.pid)) else {
        return fail(&out, "the guest did not say which process it started").await;
    };
    let input = tokio::spawn(write_input(guest.clone(), process.clone(), inputs, has_terminal));
    let output = async {
        loop {
            let sent = match events.events.next().await {
                Some(Ok(Event::Stdout(bytes) | Event::Pty(bytes))) => out.data_bytes(bytes).await,
                Some(Ok(Event::Stderr(bytes))) => out.extended_data_bytes(STDERR, bytes).await,
                Some(Ok(Event::Exit(exit))) => return Ended::Exit(exit),
                Some(Ok(Event::Missed(missed))) => {
                    say(&out, &format!("{} bytes of output are lost", missed.bytes)).await
                }
                Some(Ok(_)) => Ok(()),
                Some(Err(error)) => return Ended::Broken(tell(sandbox, &error.into())),
                None => return Ended::Broken("the guest's answer broke off".to_owned()),
            };
            if sent.is_err() {
                return Ended::Left;
            }
        }
    };
    let ended = tokio::select! {
        ended = output => ended,
        () = steer(&guest, &process, &mut control) => Ended::Left,
    };
    input.abort();
    match ended {
        Ended::Exit(exit) => report(&out, &handle, exit).await,
        Ended::Broken(why) => fail(&out, &why).await,
        Ended::Left => hang_up(&guest, &process).await,
    }
}

enum Ended {
    Exit(Exit),
    Broken(String),
    /// The client has gone.
    Left,
}

/// Passes on sizes and signals; ends when the client has gone.
async fn steer(guest: &GuestClient, process: &Selector, control: &mut mpsc::Receiver<Control>) {
    while let Some(wish) = control.recv().await {
        let done = match wish {
            Control::Resize(size) => guest.resize(process, size).await,
            Control::Signal(signal) => guest.signal(process, SignalRequest { signal, main_only: false }).await,
        };
        if let Err(error) = done {
            // It has just ended, or has no terminal; its exit or its link tells.
            tracing::debug!(error = &error as &dyn std::error::Error, "a process does not take what its client wants");
        }
    }
}

async fn hang_up(guest: &GuestClient, process: &Selector) {
    if let Err(error) = guest.signal(process, SignalRequest { signal: SIGHUP, main_only: false }).await {
        tracing::debug!(error = &error as &dyn std::error::Error, "a process cannot be hung up");
    }
}

/// All input goes into one request, which waits for the process. Each piece counts until it has gone.
async fn write_input(guest: GuestClient, process: Selector, inputs: Inputs, has_terminal: bool) {
    let pieces = futures::stream::unfold((inputs, false), move |(mut inputs, is_over)| async move {
        if is_over {
            return None;
        }
        match inputs.recv().await {
            Some(Input::Data(piece)) => Some((Ok::<_, io::Error>(piece.bytes().clone()), (inputs, false))),
            Some(Input::End) if has_terminal => Some((Ok(Bytes::from_static(END_OF_TRANSMISSION)), (inputs, true))),
            Some(Input::End) | None => None,
        }
    });
    if let Err(error) = guest.write_stdin(&process, Box::pin(pieces), !has_terminal).await {
        tracing::debug!(error = &error as &dyn std::error::Error, "a process took not all of its input");
    }
}

async fn report(out: &Out, handle: &Handle, exit: Exit) {
    let sent = match (exit.signal, exit.code) {
        (Some(signal), _) => {
            let message = if exit.out_of_memory { "out of memory" } else { "" };
            let name = name_of(signal);
            handle.exit_signal_request(out.id(), name, false, message.to_owned(), String::new()).await.is_ok()
        }
        (None, code) => {
            let code = code.and_then(|code| u32::try_from(code).ok()).unwrap_or(OWN_FAILURE);
            out.exit_status(code).await.is_ok()
        }
    };
    if sent {
        let _ = out.eof().await;
        let _ = out.close().await;
    }
}

/// Says why there is no more, and ends the channel as a failure. A client that has gone hears nothing.
async fn fail(out: &Out, why: &str) {
    if say(out, why).await.is_ok() && out.exit_status(OWN_FAILURE).await.is_ok() {
        let _ = out.eof().await;
        let _ = out.close().await;
    }
}

async fn say(out: &Out, what: &str) -> Result<(), russh::Error> {
    // A terminal in raw mode goes down only.
    out.extended_data_bytes(STDERR, format!("stockade: {what}\r\n")).await
}

/// An error in words for whoever may enter the sandbox. What is the server's own is in its log.
pub(crate) fn tell(sandbox: &SandboxId, error: &ServiceError) -> String {
    match error {
        ServiceError::Engine(EngineError::Guest(refused)) => refused.message.clone(),
        ServiceError::Engine(EngineError::LinkBroken { .. }) => {
            format!("the connection to sandbox {sandbox} broke: it was paused, moved on or ended")
        }
        ServiceError::SandboxEnded { ending, .. } => format!("sandbox {sandbox} has ended at {}", ending.at),
        ServiceError::WrongState { state, .. } => {
            format!("sandbox {sandbox} is {state} and is not brought back by a login; `stockade resume` does")
        }
        ServiceError::SandboxNotFound { .. } => format!("sandbox {sandbox} is not there"),
        error @ ServiceError::Busy { .. } => error.to_string(),
        error => {
            tracing::error!(%sandbox, error = error as &dyn std::error::Error, "an SSH client cannot be served");
            "the server failed at this; its log has the cause".to_owned()
        }
    }
}

const SIGNALS: [(&str, i32); 14] = [
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("ILL", 4),
    ("TRAP", 5),
    ("ABRT", 6),
    ("FPE", 8),
    ("KILL", 9),
    ("USR1", 10),
    ("SEGV", 11),
    ("USR2", 12),
    ("PIPE", 13),
    ("ALRM", 14),
    ("TERM", 15),
];

/// The number a signal of the protocol has on Linux; `None`: it has none that we pass on.
pub(crate) fn number_of(signal: &Sig) -> Option<i32> {
    let name = match signal {
        Sig::ABRT => "ABRT",
        Sig::ALRM => "ALRM",
        Sig::FPE => "FPE",
        Sig::HUP => "HUP",
        Sig::ILL => "ILL",
        Sig::INT => "INT",
        Sig::KILL => "KILL",
        Sig::PIPE => "PIPE",
        Sig::QUIT => "QUIT",
        Sig::SEGV => "SEGV",
        Sig::TERM => "TERM",
        Sig::USR1 => "USR1",
        Sig::Custom(name) => name,
    };
    SIGNALS.iter().find(|(known, _)| *known == name).map(|(_, number)| *number)
}

fn name_of(number: i32) -> Sig {
    match number {
        1 => Sig::HUP,
        2 => Sig::INT,
        3 => Sig::QUIT,
        4 => Sig::ILL,
        6 => Sig::ABRT,
        8 => Sig::FPE,
        9 => Sig::KILL,
        10 => Sig::USR1,
        11 => Sig::SEGV,
        13 => Sig::PIPE,
        14 => Sig::ALRM,
        15 => Sig::TERM,
        other => {
            let known = SIGNALS.iter().find(|(_, number)| *number == other);
            // The protocol has a form for names of one's own.
            Sig::Custom(known.map_or_else(|| format!("{other}@stockade"), |(name, _)| format!("{name}@stockade")))
        }
    }
}
