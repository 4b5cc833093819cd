//! The agent as a program: process 1 of a machine.

use std::{error::Error, process::ExitCode};

use stockade_guest::{init, tools};

fn main() -> ExitCode {
    if let Some(code) = tools::run() {
        return code;
    }
    if std::process::id() != 1 {
        eprintln!(
            "stockade-guest {}: the first process of a Stockade machine; it does nothing elsewhere",
            env!("CARGO_PKG_VERSION")
        );
        return ExitCode::from(2);
    }
    let Err(error) = init::run();
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        line = format!("{line}: {next}");
        cause = next.source();
    }
    init::say(&line);
    ExitCode::FAILURE
}
