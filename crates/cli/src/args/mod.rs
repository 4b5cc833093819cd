//! What can be typed. Every option is an environment variable too: `STOCKADE_` and its name, with the command's name
//! between them where another command means something else by it: what is set for one command must not change what
//! another does. `set` and `policy set` change what is there already and listen to what is typed alone.

use std::{ffi::OsString, path::PathBuf, process::ExitCode};

use clap::{
    Arg, ArgAction, ArgMatches, Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand,
    builder::{FalseyValueParser, Resettable},
    error::ErrorKind,
};

mod lifecycle;
mod network;
mod refusal;
mod sandbox;
mod server;
mod ssh;
mod values;

pub(crate) use lifecycle::{Fork, Idle, Pause, Resume, Rollback, Rules, Set, Snapshot, SnapshotCommand, Step, Usage};
pub(crate) use network::{Audit, Network, OAuth, Policy, Preview, Secret, Tunnel};
pub(crate) use sandbox::{
    Attach, Code, CodeRun, Cp, Create, Exec, Extend, Kill, Ls, One, Ps, Run, Running, Shell, Template, TemplateBuild,
};
pub(crate) use server::{Accel, Bench, Doctor, Env, Extra, Up};
pub(crate) use ssh::{Ssh, SshKey};

use crate::{failure::BAD_USAGE, ui::Ui};

/// Machines of their own for AI agents: create them, run code in them, copy files.
#[derive(Debug, Parser)]
#[command(name = "stockade", version, propagate_version = true, max_term_width = 100, after_help = EXIT_CODES)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXIT_CODES: &str = "\
Exit codes: 0 success, 1 failure, 2 bad usage. `run`, `exec`, `shell` and `attach` end with the command's own code, \
128 + the signal that killed it, 124 when its time was up, 125 when Stockade failed, 126 when the command \
cannot be executed, 127 when it is not found.";

/// Options of every command.
#[derive(Args, Clone, Debug)]
pub(crate) struct Common {
    /// The server [default: the one whose ready.json is in the data directory]
    #[arg(long, global = true, value_name = "URL", env = "STOCKADE_URL", help_heading = "Global options")]
    pub(crate) url: Option<String>,
    /// The API key [default: the one in the data directory]
    #[arg(
        long,
        global = true,
        value_name = "KEY",
        env = "STOCKADE_API_KEY",
        hide_env_values = true,
        help_heading = "Global options"
    )]
    pub(crate) api_key: Option<String>,
    /// Certificates to trust besides the usual ones, for https URLs
    #[arg(long, global = true, value_name = "FILE", env = "STOCKADE_CA_FILE", help_heading = "Global options")]
    pub(crate) ca_file: Option<PathBuf>,
    /// The server's data [default: /var/lib/stockade for root, else ~/.local/share/stockade]
    #[arg(long, global = true, value_name = "DIR", env = "STOCKADE_DATA_DIR", help_heading = "Global options")]
    pub(crate) data_dir: Option<PathBuf>,
    /// What templates are built from; may be shared [default: cache in the data directory]
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        env = "STOCKADE_TEMPLATE_CACHE",
        hide_short_help = true,
        help_heading = "Global options"
    )]
    pub(crate) template_cache: Option<PathBuf>,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start a server: prepare what is missing, then serve until told to stop
    Up(Up),
    /// Create a sandbox, run a command in it, end the sandbox
    Run(Run),
    /// Create a sandbox and print its id
    Create(Create),
    /// List sandboxes
    #[command(visible_alias = "list")]
    Ls(Ls),
    /// Show one sandbox
    Info(One),
    /// Run a command in a sandbox
    Exec(Exec),
    /// Open a terminal in a sandbox
    Shell(Shell),
    /// List the processes that were started in a sandbox
    Ps(Ps),
    /// Attach to a process in a sandbox: what it wrote, what it writes, its exit code
    Attach(Attach),
    /// Copy files and directories between here and a sandbox (SANDBOX:PATH)
    Cp(Cp),
    /// Show the last lines of a sandbox's console
    Logs(One),
    /// End sandboxes
    Kill(Kill),
    /// Move a sandbox's deadline, only ever later
    Extend(Extend),
    /// Halt a sandbox and keep it, memory and disk
    Pause(Pause),
    /// Bring a paused or stopped sandbox back
    Resume(Resume),
    /// Shut a sandbox down and keep its disk
    Stop(One),
    /// Boot a stopped sandbox from its disk
    Start(One),
    /// Change how long a sandbox lives and when it goes down by itself
    Set(Set),
    /// Take a snapshot of a running sandbox and print its id, a template for `create` and `run`
    Snapshot(Snapshot),
    /// Put a sandbox back to one of its snapshots, under the same id
    Rollback(Rollback),
    /// Make copies of a running sandbox, memory and disk included; run a command in each, keep the best
    Fork(Fork),
    /// Let a forked copy live on under the id of the sandbox it was forked from
    Promote(One),
    /// Show what was used and what it costs
    Usage(Usage),
    /// Run code in the kernels of a sandbox made from the template code-interpreter
    #[command(subcommand)]
    Code(Code),
    /// Show templates
    #[command(subcommand)]
    Template(Template),
    /// Print a link to a port of a sandbox
    Preview(Preview),
    /// Lead a port here to a port of a sandbox, until interrupted
    Tunnel(Tunnel),
    /// Open a terminal or run a command in a sandbox by the host's own ssh, with a key made for this login
    Ssh(Ssh),
    /// Keep the public keys that open your sandboxes over SSH
    #[command(subcommand)]
    SshKey(SshKey),
    /// Look at a sandbox's network policy, ask it, change it
    #[command(subcommand)]
    Policy(Policy),
    /// Keep secrets that sandboxes use without having them
    #[command(subcommand)]
    Secret(Secret),
    /// Show what the gateway decided for your sandboxes
    Audit(Audit),
    /// Check this host for all a server needs and say what mends it
    Doctor(Doctor),
    /// Measure this host's speed with a throwaway server
    Bench(Bench),
    /// Print the versions of this program and of the server
    Version,
    /// Print environment variables for other programs
    #[command(subcommand)]
    Env(Env),
}

/// Parses the process's arguments; the flag is `--json`.
///
/// `--json` is taken before and after each command. It is added here and not as a global option because
/// `bench` has a `--json` of its own that takes a file.
///
/// # Errors
/// They make no sense, which has been said, or there is nothing to run beyond what was said: the exit code.
pub(crate) fn parse() -> Result<(Arguments, bool), ExitCode> {
    let typed: Vec<_> = std::env::args_os().collect();
    match read(&typed).map_err(refusal::bounded) {
        Ok((arguments, json)) => {
            let json = json || matches!(&arguments.command, Command::Bench(Bench { json_file: Some(None), .. }));
            Ok((arguments, json))
        }
        Err(error) if error.use_stderr() && wants_json(&typed) => {
            Ui { json: true }.failure(&refusal::failure(&error));
            Err(ExitCode::from(BAD_USAGE))
        }
        Err(error) => error.exit(),
    }
}

fn read(typed: &[OsString]) -> Result<(Arguments, bool), clap::Error> {
    let matches = command().try_get_matches_from(typed).map_err(|error| refusal::naming_lifetime(error, command()))?;
    let (arguments, json) = (Arguments::from_arg_matches(&matches)?, says_json(&matches));
    check(&arguments.command, json)?;
    Ok((arguments, json))
}

/// What can be said of arguments only together.
fn check(given: &Command, json: bool) -> Result<(), clap::Error> {
    let (name, to_run): (_, &[OsString]) = match given {
        Command::Run(Run { running, .. }) => ("run", &running.command),
        Command::Exec(Exec { running, .. }) => ("exec", &running.command),
        Command::Fork(Fork { command, .. }) => ("fork", command),
        Command::Usage(Usage { csv: true, .. }) if json => {
            return Err(refuse("usage", ErrorKind::ArgumentConflict, "--csv and --json cannot be used together"));
        }
        _ => return Ok(()),
    };
    if to_run.first().is_some_and(|program| program.is_empty()) {
        return Err(refuse(name, ErrorKind::ValueValidation, "the first word of the command, its program, is empty"));
    }
    Ok(())
}

/// As clap refuses arguments of this command, with its usage.
fn refuse(name: &str, kind: ErrorKind, message: &str) -> clap::Error {
    let mut all = command();
    all.build();
    match all.find_subcommand_mut(name) {
        Some(command) => command.error(kind, message),
        None => all.error(kind, message),
    }
}

/// Whether `--json` is among arguments that cannot be understood as a whole, or in the environment.
fn wants_json(typed: &[OsString]) -> bool {
    let ours = typed.iter().skip(1).take_while(|argument| *argument != "--");
    let flag = ours.filter(|argument| *argument == "--json").take(1);
    let alone = clap::Command::new("stockade").arg(json_flag());
    let matches = alone.try_get_matches_from([&OsString::from("stockade")].into_iter().chain(flag));
    matches.is_ok_and(|matches| says_json(&matches))
}

fn command() -> clap::Command {
    let command = Arguments::command().mut_subcommand("set", without_variables).mut_subcommand("policy", |policy| {
        policy.mut_subcommand("set", without_variables).mut_subcommand("set-default", without_variables)
    });
    with_json(command)
}

fn without_variables(command: clap::Command) -> clap::Command {
    command.mut_args(|argument| argument.env(Resettable::Reset))
}

fn with_json(command: clap::Command) -> clap::Command {
    let own_json = command.get_arguments().any(|argument| argument.get_long() == Some("json"));
    let command = command.mut_subcommands(with_json);
    if own_json {
        return command;
    }
    command.arg(json_flag())
}

fn json_flag() -> Arg {
    Arg::new("json")
        .long("json")
        .env("STOCKADE_JSON")
        .action(ArgAction::SetTrue)
        .value_parser(FalseyValueParser::new())
        .help_heading("Global options")
        .help("Speak JSON on both standard output and standard error")
}

fn says_json(matches: &ArgMatches) -> bool {
    let here = matches.try_get_one::<bool>("json").ok().flatten().copied().unwrap_or_default();
    here || matches.subcommand().is_some_and(|(_, matches)| says_json(matches))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    /// A variable that is set for one command changes no other: those that stand for the same thing are listed.
    #[test]
    fn a_variable_means_one_thing() {
        const SHARED: [(&str, &[&str]); 4] = [
            (
                "what `up` serves with, looked at by `doctor`, measured by `bench`",
                &["HTTP", "HTTPS", "BASE_DOMAIN", "ACCEL"],
            ),
            (
                "what `run` and `create` make",
                &["TEMPLATE", "LIFETIME", "METADATA", "ALLOW_OUT", "DENY_OUT", "NO_INTERNET", "SECRET"],
            ),
            ("how `run` and `exec` run a command", &["ENV", "TIMEOUT", "USER", "CWD", "TTY", "NO_STDIN"]),
            ("whose network default is shown or forgotten", &["DEFAULT_OF_TEMPLATE"]),
        ];
        fn collect(command: &clap::Command, path: &str, found: &mut BTreeMap<String, Vec<String>>) {
            let path = format!("{path} {}", command.get_name());
            for argument in command.get_arguments().filter(|argument| !argument.is_global_set()) {
                let Some(variable) = argument.get_env() else { continue };
                let name = variable.to_string_lossy().trim_start_matches("STOCKADE_").to_owned();
                if name != "JSON" {
                    found.entry(name).or_default().push(path.trim().to_owned());
                }
            }
            command.get_subcommands().for_each(|command| collect(command, &path, found));
        }
        let mut found = BTreeMap::new();
        collect(&command(), "", &mut found);
        found.retain(|name, of| of.len() > 1 && !SHARED.iter().any(|(_, names)| names.contains(&name.as_str())));
        assert_eq!(found, BTreeMap::new());
    }

    #[test]
    fn every_option_is_an_environment_variable_too() {
        fn check(command: &clap::Command) {
            // They change what is there.
            if command.get_arguments().any(|argument| ["on_timeout", "allow_out"].contains(&argument.get_id().as_str()))
                && ["set", "set-default"].contains(&command.get_name())
            {
                return;
            }
            for argument in command.get_arguments().filter(|argument| argument.get_long().is_some()) {
                let name = argument.get_long().unwrap_or_default();
                if !["help", "version", "all"].contains(&name) {
                    assert!(argument.get_env().is_some(), "{} --{name}", command.get_name());
                }
            }
            command.get_subcommands().for_each(check);
        }
        check(&command());
    }
}
