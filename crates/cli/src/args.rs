//! What can be typed. Every option is an environment variable too: `STOCKADE_` and its name.

use std::{ffi::OsString, net::SocketAddr, path::PathBuf};

use clap::{
    Arg, ArgAction, ArgMatches, Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, ValueEnum,
    builder::FalseyValueParser,
};

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
Exit codes: 0 success, 1 failure, 2 bad usage. `run`, `exec` and `shell` end with the command's own code, \
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
    /// Take a snapshot of a running sandbox and print its id, a template for `create` and `run`
    Snapshot(Snapshot),
    /// Make copies of a running sandbox, memory and disk included, and print their ids
    Fork(Fork),
    /// Show templates
    #[command(subcommand)]
    Template(Template),
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
pub(crate) fn parse() -> (Arguments, bool) {
    let matches = command().get_matches();
    let json = says_json(&matches);
    match Arguments::from_arg_matches(&matches) {
        Ok(arguments) => {
            let json = json || matches!(&arguments.command, Command::Bench(Bench { json_file: Some(None), .. }));
            (arguments, json)
        }
        Err(error) => error.exit(),
    }
}

fn command() -> clap::Command {
    with_json(Arguments::command())
}

fn with_json(command: clap::Command) -> clap::Command {
    let own_json = command.get_arguments().any(|argument| argument.get_long() == Some("json"));
    let command = command.mut_subcommands(with_json);
    if own_json {
        return command;
    }
    command.arg(
        Arg::new("json")
            .long("json")
            .env("STOCKADE_JSON")
            .action(ArgAction::SetTrue)
            .value_parser(FalseyValueParser::new())
            .help_heading("Global options")
            .help("Speak JSON on both standard output and standard error"),
    )
}

fn says_json(matches: &ArgMatches) -> bool {
    let here = matches.try_get_one::<bool>("json").ok().flatten().copied().unwrap_or_default();
    here || matches.subcommand().is_some_and(|(_, matches)| says_json(matches))
}

/// What makes the guest's instructions run.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Accel {
    /// KVM where a probe shows that it works, else emulation
    Auto,
    /// The processor, through /dev/kvm
    Kvm,
    /// QEMU's software emulation
    Tcg,
}

/// `stockade up`
#[derive(Args, Clone, Debug)]
pub(crate) struct Up {
    /// Where to listen for HTTP; port 0 takes a free one
    #[arg(long, value_name = "ADDR", env = "STOCKADE_HTTP", default_value = "127.0.0.1:8080")]
    pub(crate) http: SocketAddr,
    /// Where to listen for HTTPS; port 0 takes a free one
    #[arg(long, value_name = "ADDR", env = "STOCKADE_HTTPS", default_value = "127.0.0.1:8443")]
    pub(crate) https: SocketAddr,
    /// The name all others hang below: E2B's API is api.e2b.DOMAIN
    #[arg(long, value_name = "DOMAIN", env = "STOCKADE_BASE_DOMAIN", default_value = "stockade.localhost")]
    pub(crate) base_domain: String,
    /// What runs the guests
    #[arg(long, value_enum, env = "STOCKADE_ACCEL", default_value = "auto")]
    pub(crate) accel: Accel,
    /// Machines kept ready per template; 0 restores each on demand
    #[arg(long, value_name = "N", env = "STOCKADE_POOL", default_value_t = 2)]
    pub(crate) pool: usize,
    /// Serve at once, without running a first sandbox
    #[arg(long, env = "STOCKADE_NO_SELF_CHECK", value_parser = FalseyValueParser::new())]
    pub(crate) no_self_check: bool,
}

/// What a new sandbox is made from.
#[derive(Args, Clone, Debug)]
pub(crate) struct Making {
    /// Template, by name or id
    #[arg(long, short = 't', value_name = "TEMPLATE", env = "STOCKADE_TEMPLATE", default_value = "base")]
    pub(crate) template: String,
    /// Seconds the sandbox may live
    #[arg(long, value_name = "SECONDS", env = "STOCKADE_LIFETIME", value_parser = seconds)]
    pub(crate) lifetime: Option<f64>,
    /// Environment variable; repeatable
    #[arg(long = "env", short = 'e', value_name = "KEY=VALUE", env = "STOCKADE_ENV", value_parser = pair)]
    pub(crate) env: Vec<(String, String)>,
    /// Label; repeatable
    #[arg(long = "metadata", short = 'm', value_name = "KEY=VALUE", env = "STOCKADE_METADATA", value_parser = pair)]
    pub(crate) metadata: Vec<(String, String)>,
}

/// How a command is run.
#[derive(Args, Clone, Debug)]
pub(crate) struct Running {
    /// Kill the command after this many seconds (exit code 124)
    #[arg(long, value_name = "SECONDS", env = "STOCKADE_TIMEOUT", value_parser = seconds)]
    pub(crate) timeout: Option<f64>,
    /// User to run as [default: the template's]
    #[arg(long, short = 'u', value_name = "USER", env = "STOCKADE_USER")]
    pub(crate) user: Option<String>,
    /// Directory to run in [default: the user's home]
    #[arg(long, short = 'C', value_name = "DIR", env = "STOCKADE_CWD")]
    pub(crate) cwd: Option<String>,
    /// Give the command a terminal
    #[arg(long, env = "STOCKADE_TTY", value_parser = FalseyValueParser::new())]
    pub(crate) tty: bool,
    /// Give the command an empty standard input and leave ours alone
    #[arg(long, short = 'n', env = "STOCKADE_NO_STDIN", value_parser = FalseyValueParser::new())]
    pub(crate) no_stdin: bool,
    /// The command and its arguments
    #[arg(required = true, last = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

/// `stockade run`
#[derive(Args, Clone, Debug)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) making: Making,
    /// Leave the sandbox running and print its id on standard error
    #[arg(long, env = "STOCKADE_KEEP", value_parser = FalseyValueParser::new())]
    pub(crate) keep: bool,
    #[command(flatten)]
    pub(crate) running: Running,
}

/// `stockade create`
#[derive(Args, Clone, Debug)]
pub(crate) struct Create {
    #[command(flatten)]
    pub(crate) making: Making,
}

/// `stockade ls`
#[derive(Args, Clone, Debug)]
pub(crate) struct Ls {
    /// Only these states, comma separated [default: all but those that have ended]
    #[arg(long, value_name = "STATES", env = "STOCKADE_STATE")]
    pub(crate) state: Option<String>,
    /// Also those that have ended
    #[arg(long, short = 'a', conflicts_with = "state", env = "STOCKADE_ALL", value_parser = FalseyValueParser::new())]
    pub(crate) all: bool,
    /// Only those made from this template
    #[arg(long, short = 't', value_name = "TEMPLATE", env = "STOCKADE_TEMPLATE")]
    pub(crate) template: Option<String>,
    /// Only those with this label; repeatable
    #[arg(long = "metadata", short = 'm', value_name = "KEY=VALUE", env = "STOCKADE_METADATA", value_parser = pair)]
    pub(crate) metadata: Vec<(String, String)>,
    /// Print ids only
    #[arg(long, short = 'q', env = "STOCKADE_QUIET", value_parser = FalseyValueParser::new())]
    pub(crate) quiet: bool,
}

/// A command about one sandbox.
#[derive(Args, Clone, Debug)]
pub(crate) struct One {
    /// The sandbox's id
    pub(crate) sandbox: String,
}

/// `stockade exec`
#[derive(Args, Clone, Debug)]
pub(crate) struct Exec {
    /// The sandbox's id
    pub(crate) sandbox: String,
    /// Environment variable; repeatable
    #[arg(long = "env", short = 'e', value_name = "KEY=VALUE", env = "STOCKADE_ENV", value_parser = pair)]
    pub(crate) env: Vec<(String, String)>,
    #[command(flatten)]
    pub(crate) running: Running,
}

/// `stockade shell`
#[derive(Args, Clone, Debug)]
pub(crate) struct Shell {
    /// The sandbox's id
    pub(crate) sandbox: String,
    /// User to be [default: the template's]
    #[arg(long, short = 'u', value_name = "USER", env = "STOCKADE_USER")]
    pub(crate) user: Option<String>,
    /// Directory to start in [default: the user's home]
    #[arg(long, short = 'C', value_name = "DIR", env = "STOCKADE_CWD")]
    pub(crate) cwd: Option<String>,
}

/// `stockade cp`
#[derive(Args, Clone, Debug)]
pub(crate) struct Cp {
    /// A path here, SANDBOX:PATH, or - for standard input
    #[arg(value_name = "FROM")]
    pub(crate) from: OsString,
    /// A path here, SANDBOX:PATH, or - for standard output
    #[arg(value_name = "TO")]
    pub(crate) to: OsString,
    /// With whose rights in the sandbox [default: the template's user]
    #[arg(long, short = 'u', value_name = "USER", env = "STOCKADE_USER")]
    pub(crate) user: Option<String>,
}

/// `stockade kill`
#[derive(Args, Clone, Debug)]
pub(crate) struct Kill {
    /// The sandboxes' ids
    #[arg(required_unless_present = "all")]
    pub(crate) sandboxes: Vec<String>,
    /// All sandboxes there are
    #[arg(long, conflicts_with = "sandboxes")]
    pub(crate) all: bool,
}

/// `stockade extend`
#[derive(Args, Clone, Debug)]
pub(crate) struct Extend {
    /// The sandbox's id
    pub(crate) sandbox: String,
    /// Seconds from now
    #[arg(value_parser = seconds)]
    pub(crate) seconds: f64,
}

/// `stockade pause`
#[derive(Args, Clone, Debug)]
pub(crate) struct Pause {
    /// The sandbox's id
    pub(crate) sandbox: String,
    /// Keep the disk alone; processes end and the sandbox boots when it is resumed
    #[arg(long, conflicts_with = "standby", env = "STOCKADE_DISK_ONLY", value_parser = FalseyValueParser::new())]
    pub(crate) disk_only: bool,
    /// Keep the halted machine in memory: back in milliseconds
    #[arg(long, env = "STOCKADE_STANDBY", value_parser = FalseyValueParser::new())]
    pub(crate) standby: bool,
}

/// `stockade resume`
#[derive(Args, Clone, Debug)]
pub(crate) struct Resume {
    /// The sandbox's id
    pub(crate) sandbox: String,
    /// Seconds it may live from then [default: what was left of its lifetime]
    #[arg(long, value_name = "SECONDS", env = "STOCKADE_LIFETIME", value_parser = seconds)]
    pub(crate) lifetime: Option<f64>,
}

/// `stockade snapshot`
#[derive(Args, Clone, Debug)]
pub(crate) struct Snapshot {
    /// The sandbox's id
    pub(crate) sandbox: String,
    /// A name; the newest snapshot of a name is meant by it
    #[arg(long, env = "STOCKADE_SNAPSHOT_NAME")]
    pub(crate) name: Option<String>,
    /// Keep the disk alone; what is made from it boots
    #[arg(long, env = "STOCKADE_DISK_ONLY", value_parser = FalseyValueParser::new())]
    pub(crate) disk_only: bool,
}

/// `stockade fork`
#[derive(Args, Clone, Debug)]
pub(crate) struct Fork {
    /// The sandbox's id
    pub(crate) sandbox: String,
    /// How many copies; if one cannot be made, none is
    #[arg(long, short = 'n', value_name = "N", env = "STOCKADE_COUNT", default_value_t = 1)]
    pub(crate) count: u32,
    /// Seconds each may live [default: as long as the sandbox was to]
    #[arg(long, value_name = "SECONDS", env = "STOCKADE_LIFETIME", value_parser = seconds)]
    pub(crate) lifetime: Option<f64>,
}

/// `stockade template`
#[derive(Debug, Subcommand)]
pub(crate) enum Template {
    /// List templates
    #[command(visible_alias = "list")]
    Ls,
    /// Show one template
    Info {
        /// Name or id
        template: String,
    },
}

/// `stockade doctor`
#[derive(Args, Clone, Debug)]
pub(crate) struct Doctor {
    /// The address `up` is to listen on for HTTP
    #[arg(long, value_name = "ADDR", env = "STOCKADE_HTTP", default_value = "127.0.0.1:8080")]
    pub(crate) http: SocketAddr,
    /// The address `up` is to listen on for HTTPS
    #[arg(long, value_name = "ADDR", env = "STOCKADE_HTTPS", default_value = "127.0.0.1:8443")]
    pub(crate) https: SocketAddr,
    /// The domain `up` is to use
    #[arg(long, value_name = "DOMAIN", env = "STOCKADE_BASE_DOMAIN", default_value = "stockade.localhost")]
    pub(crate) base_domain: String,
}

/// `stockade bench`
#[derive(Args, Clone, Debug)]
pub(crate) struct Bench {
    /// Rounds per measurement
    #[arg(long, short = 'n', value_name = "N", env = "STOCKADE_N", default_value_t = 20)]
    pub(crate) n: usize,
    /// Speak JSON; with a file, write it there
    #[arg(long = "json", value_name = "FILE", env = "STOCKADE_JSON_FILE", num_args = 0..=1)]
    pub(crate) json_file: Option<Option<PathBuf>>,
    /// What runs the guests
    #[arg(long, value_enum, env = "STOCKADE_ACCEL", default_value = "auto")]
    pub(crate) accel: Accel,
}

/// `stockade env`
#[derive(Debug, Subcommand)]
pub(crate) enum Env {
    /// For the E2B SDKs: eval "$(stockade env e2b)"
    E2b,
}

fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("expected KEY=VALUE".to_owned()),
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds.is_finite() && seconds > 0.0 => Ok(seconds),
        _ => Err("expected a number of seconds over zero".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn every_option_is_an_environment_variable_too() {
        fn check(command: &clap::Command) {
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
