//! The `stockade` command line: a server to start, and a client of its native API.
//!
//! ```text
//! args      what can be typed, and its environment variables
//! client    a typed client of /v1: requests, WebSocket exec, event frames; finds server and key
//! commands  one file a verb
//! copy      trees between host and guest, as tar streams
//! failure   what the user sees when something goes wrong, and exit codes
//! ```
//!
//! Data goes to standard output, everything else to standard error. `--json` makes both JSON.

use std::process::ExitCode;

mod args;
mod bench;
mod client;
mod commands;
mod copy;
mod doctor;
mod failure;
pub mod guest_binary;
mod local_paths;
mod server;
mod terminal;
mod ui;
mod waiting;

/// Parses the command line, runs the command, returns its exit code.
pub fn main() -> ExitCode {
    let (arguments, json) = match args::parse() {
        Ok(parsed) => parsed,
        Err(code) => return code,
    };
    let ui = ui::Ui { json };
    let runtime = match commands::runtime(&arguments.command) {
        Ok(runtime) => runtime,
        Err(error) => {
            ui.failure(&failure::Failure::new("internal", format!("cannot start the runtime: {error}")));
            return ExitCode::from(failure::OWN_FAILURE);
        }
    };
    let code = match runtime.block_on(commands::dispatch(arguments, ui)) {
        Ok(code) => code,
        Err(failure) => {
            ui.failure(&failure);
            failure.exit
        }
    };
    // Threads that still read standard input must not hold up the end.
    runtime.shutdown_background();
    ExitCode::from(code)
}
