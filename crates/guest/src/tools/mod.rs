//! What the agent's program does as a process of a user's, so that it works whatever an image has in it. It runs with the
//! user's rights and is no more trusted than any other process.

mod connect;
mod sftp;

use std::process::ExitCode;

use stockade_wire::process::TOOL_NAME;

/// Runs the tool this process was started as; `None`: it is none.
pub fn run() -> Option<ExitCode> {
    let argv: Vec<_> = std::env::args_os().collect();
    if argv.first().is_none_or(|name| name != TOOL_NAME) {
        return None;
    }
    let word = |index: usize| argv.get(index).and_then(|word| word.to_str());
    let done = match (word(1), argv.get(2)) {
        (Some("sftp"), _) => sftp::serve(&mut std::io::stdin().lock(), &mut std::io::stdout().lock()),
        (Some("connect"), Some(path)) => connect::join(path.as_ref()),
        _ => return Some(ExitCode::from(2)),
    };
    Some(match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    })
}
