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

/// Templates a server has only where it is told to.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Extra {
    /// Jupyter kernels and what data work needs, warm; serves E2B's code interpreter and `stockade code`
    CodeInterpreter,
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
    /// A certificate for *.e2b.DOMAIN, *.DOMAIN and DOMAIN, PEM [default: one of a CA of the server's own]
    #[arg(long, value_name = "FILE", env = "STOCKADE_TLS_CERT", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// The certificate's key, PEM
    #[arg(long, value_name = "FILE", env = "STOCKADE_TLS_KEY", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// The name all others hang below: E2B's API is api.e2b.DOMAIN
    #[arg(long, value_name = "DOMAIN", env = "STOCKADE_BASE_DOMAIN", default_value = "stockade.localhost")]
    pub(crate) base_domain: String,
    /// What runs the guests
    #[arg(long, value_enum, env = "STOCKADE_ACCEL", default_value = "auto")]
    pub(crate) accel: Accel,
    #[command(flatten)]
    pub(crate) prices: PriceOptions,
    /// Make another template too, in a few minutes the first time; repeatable
    #[arg(long, value_enum, value_name = "TEMPLATE", env = "STOCKADE_WITH", value_delimiter = ',')]
    pub(crate) with: Vec<Extra>,
    /// Machines kept ready per template, at least; more, and some per snapshot, by recent demand. 0: none at all
    #[arg(long, value_name = "N", env = "STOCKADE_POOL", default_value_t = 2)]
    pub(crate) pool: usize,
    /// Memory all machines kept ready may hold together
    #[arg(long, value_name = "MIB", env = "STOCKADE_POOL_MEMORY", default_value_t = 1024)]
    pub(crate) pool_memory: u64,
    /// A JSON file with the deployment's network: what sandboxes start from and cannot leave
    #[arg(long, value_name = "FILE", env = "STOCKADE_NETWORK")]
    pub(crate) network: Option<PathBuf>,
    /// Where archived sandboxes are kept: a directory, or s3://BUCKET/PREFIX with AWS_* variables as usual
    /// [default: archive in the data directory]
    #[arg(long, value_name = "URL", env = "STOCKADE_ARCHIVE")]
    pub(crate) archive: Option<String>,
    /// Serve at once, without running a first sandbox
    #[arg(long, env = "STOCKADE_NO_SELF_CHECK", value_parser = FalseyValueParser::new())]
    pub(crate) no_self_check: bool,
}

/// What usage costs, in dollars.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Prices, in dollars")]
pub(crate) struct PriceOptions {
    /// A second of a processor really used
    #[arg(long, value_name = "USD", env = "STOCKADE_PRICE_VCPU_SECOND", value_parser = dollars, default_value = "0.000015")]
    pub(crate) price_vcpu_second: u64,
    /// A GiB of memory really held, for a second
    #[arg(
        long,
        value_name = "USD",
        env = "STOCKADE_PRICE_MEMORY_GIB_SECOND",
        value_parser = dollars,
        default_value = "0.0000045"
    )]
    pub(crate) price_memory_gib_second: u64,
    /// A GiB of disk, for an hour
    #[arg(long, value_name = "USD", env = "STOCKADE_PRICE_DISK_GIB_HOUR", value_parser = dollars, default_value = "0")]
    pub(crate) price_disk_gib_hour: u64,
    /// A GiB of snapshots, for an hour
    #[arg(long, value_name = "USD", env = "STOCKADE_PRICE_SNAPSHOT_GIB_HOUR", value_parser = dollars, default_value = "0")]
    pub(crate) price_snapshot_gib_hour: u64,
    /// A GiB sent to the outside
    #[arg(long, value_name = "USD", env = "STOCKADE_PRICE_EGRESS_GIB", value_parser = dollars, default_value = "0")]
    pub(crate) price_egress_gib: u64,
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
    #[command(flatten)]
    pub(crate) network: Network,
}

/// What a sandbox may reach; nothing said: as the deployment has it.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Network")]
pub(crate) struct Network {
    /// Open this and close the rest: a name, *.NAME, or a CIDR, each with :PORT or not; repeatable
    #[arg(long, value_name = "DESTINATION", env = "STOCKADE_ALLOW_OUT")]
    pub(crate) allow_out: Vec<String>,
    /// Close this, whatever else is said; repeatable
    #[arg(long, value_name = "DESTINATION", env = "STOCKADE_DENY_OUT")]
    pub(crate) deny_out: Vec<String>,
    /// No internet, but for what --allow-out names
    #[arg(long, env = "STOCKADE_NO_INTERNET", value_parser = FalseyValueParser::new())]
    pub(crate) no_internet: bool,
    /// Let the sandbox use a secret: variable VAR holds a token that stands for it; repeatable
    #[arg(long = "secret", value_name = "VAR=SECRET", env = "STOCKADE_SECRET", value_parser = pair)]
    pub(crate) secrets: Vec<(String, String)>,
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
    #[command(flatten)]
    pub(crate) rules: Rules,
}

/// How a sandbox lives on without being asked.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Life without being asked")]
pub(crate) struct Rules {
    /// At the end of its lifetime
    #[arg(long, value_enum, env = "STOCKADE_ON_TIMEOUT")]
    pub(crate) on_timeout: Option<OnTimeout>,
    /// Whether a command or file request brings it back from a pause
    #[arg(long, value_name = "BOOL", env = "STOCKADE_AUTO_RESUME", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) auto_resume: Option<bool>,
    /// Seconds without use until it goes into standby, or `never`
    #[arg(long, value_name = "SECONDS", env = "STOCKADE_STANDBY_AFTER", value_parser = seconds_or_never)]
    pub(crate) standby_after: Option<Idle>,
    /// Seconds without use until it is hibernated, or `never`
    #[arg(long, value_name = "SECONDS", env = "STOCKADE_HIBERNATE_AFTER", value_parser = seconds_or_never)]
    pub(crate) hibernate_after: Option<Idle>,
    /// Seconds without use until it goes into the archive, or `never`
    #[arg(long, value_name = "SECONDS", env = "STOCKADE_ARCHIVE_AFTER", value_parser = seconds_or_never)]
    pub(crate) archive_after: Option<Idle>,
    /// Seconds without use until it ends, or `never`
    #[arg(long, value_name = "SECONDS", env = "STOCKADE_DELETE_AFTER", value_parser = seconds_or_never)]
    pub(crate) delete_after: Option<Idle>,
    /// Per cent of one processor at which a guest is in use by its own work; 0: that does not count
    #[arg(long, value_name = "PERCENT", env = "STOCKADE_BUSY_PERCENT", value_parser = clap::value_parser!(u32).range(0..=100))]
    pub(crate) busy_percent: Option<u32>,
}

/// What happens at the deadline.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum OnTimeout {
    /// The sandbox ends
    Kill,
    /// It is hibernated
    Pause,
    /// It is shut down, its disk is kept
    Stop,
}

impl OnTimeout {
    /// The API's word.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Pause => "pause",
            Self::Stop => "stop",
        }
    }
}

/// An idle time; `None`: never.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Idle(pub(crate) Option<f64>);

/// `stockade set`
#[derive(Args, Clone, Debug)]
pub(crate) struct Set {
    /// The sandbox's id
    pub(crate) sandbox: String,
    /// Seconds from now to its deadline, earlier or later than it was
    #[arg(long, value_name = "SECONDS", env = "STOCKADE_LIFETIME", value_parser = seconds)]
    pub(crate) lifetime: Option<f64>,
    #[command(flatten)]
    pub(crate) rules: Rules,
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

/// `stockade code`
#[derive(Debug, Subcommand)]
pub(crate) enum Code {
    /// Run code and show what it does
    Run(CodeRun),
    /// List a sandbox's contexts
    Contexts(One),
}

/// `stockade code run`
#[derive(Args, Clone, Debug)]
pub(crate) struct CodeRun {
    /// The sandbox's id
    pub(crate) sandbox: String,
    /// The code [default: all of standard input]
    pub(crate) code: Option<String>,
    /// python, javascript, typescript, bash, r or java
    #[arg(long, short = 'l', value_name = "LANGUAGE", env = "STOCKADE_LANGUAGE", conflicts_with = "context")]
    pub(crate) language: Option<String>,
    /// Run in this context and not in its language's own one
    #[arg(long, value_name = "ID", env = "STOCKADE_CONTEXT")]
    pub(crate) context: Option<String>,
    /// Environment variable for this run; repeatable
    #[arg(long = "env", short = 'e', value_name = "KEY=VALUE", env = "STOCKADE_ENV", value_parser = pair)]
    pub(crate) env: Vec<(String, String)>,
    /// Interrupt the code after this many seconds (exit code 124)
    #[arg(long, value_name = "SECONDS", env = "STOCKADE_TIMEOUT", value_parser = seconds)]
    pub(crate) timeout: Option<f64>,
    /// Write pictures and other results that are no text to files in this directory
    #[arg(long, value_name = "DIR", env = "STOCKADE_SAVE")]
    pub(crate) save: Option<PathBuf>,
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
    /// Keep it in the archive, out of this host
    #[arg(long, conflicts_with_all = ["disk_only", "standby"], env = "STOCKADE_ARCHIVE_IT", value_parser = FalseyValueParser::new())]
    pub(crate) archive: bool,
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
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Snapshot {
    #[command(subcommand)]
    pub(crate) command: Option<SnapshotCommand>,
    /// The sandbox's id
    #[arg(required = true)]
    pub(crate) sandbox: Option<String>,
    /// A name; the newest snapshot of a name is meant by it
    #[arg(long, env = "STOCKADE_SNAPSHOT_NAME")]
    pub(crate) name: Option<String>,
    /// Label; repeatable
    #[arg(long = "label", short = 'l', value_name = "KEY=VALUE", env = "STOCKADE_LABEL", value_parser = pair)]
    pub(crate) labels: Vec<(String, String)>,
    /// Seconds after which it is deleted by itself [default: never]
    #[arg(long, value_name = "SECONDS", env = "STOCKADE_EXPIRES_AFTER", value_parser = seconds)]
    pub(crate) expires_after: Option<f64>,
    /// Keep the disk alone; what is made from it boots
    #[arg(long, env = "STOCKADE_DISK_ONLY", value_parser = FalseyValueParser::new())]
    pub(crate) disk_only: bool,
}

/// `stockade snapshot ls | info | rm`
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum SnapshotCommand {
    /// List snapshots
    #[command(visible_alias = "list")]
    Ls {
        /// Only those of this sandbox
        sandbox: Option<String>,
        /// Only those of this name
        #[arg(long, env = "STOCKADE_SNAPSHOT_NAME")]
        name: Option<String>,
        /// Only those with this label; repeatable
        #[arg(long = "label", short = 'l', value_name = "KEY=VALUE", env = "STOCKADE_LABEL", value_parser = pair)]
        labels: Vec<(String, String)>,
        /// Print ids only
        #[arg(long, short = 'q', env = "STOCKADE_QUIET", value_parser = FalseyValueParser::new())]
        quiet: bool,
    },
    /// Show one snapshot
    Info {
        /// Name or id
        snapshot: String,
    },
    /// Delete snapshots; what was made from them lives on
    Rm {
        /// Their ids
        #[arg(required = true)]
        snapshots: Vec<String>,
    },
}

/// `stockade rollback`
#[derive(Args, Clone, Debug)]
pub(crate) struct Rollback {
    /// The sandbox's id
    pub(crate) sandbox: String,
    /// A snapshot of it, or the one it was made from; name or id
    pub(crate) snapshot: String,
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
    /// End every copy once the command has ended in it
    #[arg(long, conflicts_with = "keep_best", requires = "command", env = "STOCKADE_RM", value_parser = FalseyValueParser::new())]
    pub(crate) rm: bool,
    /// Let the best copy take the sandbox's place and end the others: of those whose command succeeded the one
    /// with the best score, else the first
    #[arg(long, requires = "command", env = "STOCKADE_KEEP_BEST", value_parser = FalseyValueParser::new())]
    pub(crate) keep_best: bool,
    /// A shell line run in each copy whose command succeeded; the last line it prints is the copy's score, a
    /// number, the highest the best
    #[arg(long, value_name = "LINE", requires = "keep_best", env = "STOCKADE_SCORE")]
    pub(crate) score: Option<String>,
    /// The lowest score is the best
    #[arg(long, requires = "score", env = "STOCKADE_LOWEST", value_parser = FalseyValueParser::new())]
    pub(crate) lowest: bool,
    /// Kill the command after this many seconds
    #[arg(long, value_name = "SECONDS", env = "STOCKADE_TIMEOUT", value_parser = seconds)]
    pub(crate) timeout: Option<f64>,
    /// User to run as [default: the template's]
    #[arg(long, short = 'u', value_name = "USER", env = "STOCKADE_USER")]
    pub(crate) user: Option<String>,
    /// Directory to run in [default: the user's home]
    #[arg(long, short = 'C', value_name = "DIR", env = "STOCKADE_CWD")]
    pub(crate) cwd: Option<String>,
    /// A command to run in each copy; STOCKADE_FORK_INDEX is 0 in the first, 1 in the second, and so on
    #[arg(last = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

/// `stockade usage`
#[derive(Args, Clone, Debug)]
pub(crate) struct Usage {
    /// Only this sandbox's, also when it has ended
    pub(crate) sandbox: Option<String>,
    /// Only sandboxes with this label; repeatable
    #[arg(long = "metadata", short = 'm', value_name = "KEY=VALUE", env = "STOCKADE_METADATA", value_parser = pair)]
    pub(crate) metadata: Vec<(String, String)>,
    /// From this time on, as in 2026-01-31T12:00:00Z
    #[arg(long, value_name = "TIME", env = "STOCKADE_FROM")]
    pub(crate) from: Option<String>,
    /// Before this time
    #[arg(long, value_name = "TIME", env = "STOCKADE_TO")]
    pub(crate) to: Option<String>,
    /// A row for each value of this label in place of each sandbox
    #[arg(long, value_name = "KEY", env = "STOCKADE_BY_LABEL")]
    pub(crate) by_label: Option<String>,
    /// A row for each hour or day, UTC
    #[arg(long, value_enum, env = "STOCKADE_STEP")]
    pub(crate) step: Option<Step>,
    /// Print comma-separated values
    #[arg(long, env = "STOCKADE_CSV", value_parser = FalseyValueParser::new())]
    pub(crate) csv: bool,
}

/// A stretch of time.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Step {
    /// From full hour to full hour
    Hour,
    /// From midnight to midnight
    Day,
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
    /// Build a template and show the build's log
    Build(TemplateBuild),
    /// Delete a template that was built
    Rm {
        /// Name or id
        template: String,
    },
}

/// `stockade template build`
#[derive(Args, Clone, Debug)]
#[command(after_help = SPEC_HELP)]
pub(crate) struct TemplateBuild {
    /// What to build, as JSON; - reads standard input
    pub(crate) spec: PathBuf,
    /// Where the sources of copy steps are [default: the spec's directory]
    #[arg(long, value_name = "DIR", env = "STOCKADE_CONTEXT_DIR")]
    pub(crate) context: Option<PathBuf>,
    /// Carry out every step, also those an earlier build has carried out
    #[arg(long, env = "STOCKADE_FORCE", value_parser = FalseyValueParser::new())]
    pub(crate) force: bool,
}

const SPEC_HELP: &str = r#"The spec is the body of POST /v1/templates; a copy step names a file or directory of the context:
  {"name": "web", "from": "base",
   "steps": [{"run": {"command": "pip install flask"}}, {"copy": {"source": "app", "destination": "/app"}},
             {"env": {"name": "PORT", "value": "8000"}}, {"workdir": {"path": "/app"}}],
   "start": "python3 main.py", "ready": "curl -sf localhost:8000"}"#;

/// `stockade preview`
#[derive(Args, Clone, Debug)]
pub(crate) struct Preview {
    /// The sandbox's id
    pub(crate) sandbox: String,
    /// The port in the sandbox
    pub(crate) port: u16,
    /// Seconds the link works
    #[arg(long, value_name = "SECONDS", env = "STOCKADE_LIFETIME", value_parser = seconds)]
    pub(crate) lifetime: Option<f64>,
}

/// `stockade tunnel`
#[derive(Args, Clone, Debug)]
pub(crate) struct Tunnel {
    /// The sandbox's id
    pub(crate) sandbox: String,
    /// The port in the sandbox
    pub(crate) port: u16,
    /// Where to listen here; port 0 takes a free one [default: 127.0.0.1 and the sandbox's port]
    #[arg(long, value_name = "ADDR", env = "STOCKADE_LISTEN")]
    pub(crate) listen: Option<SocketAddr>,
}

/// `stockade policy`
#[derive(Debug, Subcommand)]
pub(crate) enum Policy {
    /// Print a sandbox's network as JSON, as `set --file` takes it
    Get(One),
    /// Say what would happen to a request, and why; nothing is sent
    Explain {
        /// The sandbox's id
        sandbox: String,
        /// http://, https://, or tcp://HOST:PORT for plain TCP
        #[arg(value_name = "URL")]
        request: String,
        /// The request's method
        #[arg(long, short = 'X', value_name = "METHOD", env = "STOCKADE_METHOD", default_value = "GET")]
        method: String,
    },
    /// Change a sandbox's network as a whole, at once
    Set {
        /// The sandbox's id
        sandbox: String,
        /// A JSON file instead of the options below; - is standard input
        #[arg(long, value_name = "FILE", env = "STOCKADE_POLICY_FILE",
              conflicts_with_all = ["allow_out", "deny_out", "no_internet", "secrets"])]
        file: Option<PathBuf>,
        #[command(flatten)]
        network: Network,
    },
}

/// `stockade secret`
#[derive(Debug, Subcommand)]
pub(crate) enum Secret {
    /// Keep a secret, or give it its next value, read from standard input
    Set {
        /// Its name
        name: String,
        /// Where it may be sent: a name, *.NAME, or * for everywhere; repeatable
        #[arg(long = "host", value_name = "HOST", env = "STOCKADE_SECRET_HOST", required = true)]
        hosts: Vec<String>,
    },
    /// List secrets, without their values
    #[command(visible_alias = "list")]
    Ls,
    /// Forget secrets
    Rm {
        /// Their names
        #[arg(required = true)]
        names: Vec<String>,
    },
}

/// `stockade audit`
#[derive(Args, Clone, Debug)]
pub(crate) struct Audit {
    /// Only those of this sandbox
    #[arg(value_name = "SANDBOX")]
    pub(crate) sandbox: Option<String>,
    /// Only those with this outcome: allow, deny or error
    #[arg(long, value_name = "VERDICT", env = "STOCKADE_VERDICT")]
    pub(crate) verdict: Option<String>,
    /// At most this many, the newest
    #[arg(long, short = 'n', value_name = "N", env = "STOCKADE_COUNT", default_value_t = 100)]
    pub(crate) limit: u32,
    /// Print decisions as they are made, one JSON object a line, until interrupted
    #[arg(long, short = 'f', conflicts_with = "verdict", env = "STOCKADE_FOLLOW", value_parser = FalseyValueParser::new())]
    pub(crate) follow: bool,
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

fn seconds_or_never(text: &str) -> Result<Idle, String> {
    if text == "never" {
        return Ok(Idle(None));
    }
    seconds(text).map(|seconds| Idle(Some(seconds))).map_err(|error| format!("{error}, or `never`"))
}

/// Dollars as whole nano-dollars.
fn dollars(text: &str) -> Result<u64, String> {
    let problem = || "expected dollars like 0.000015, with at most nine decimals".to_owned();
    let (whole, decimals) = text.split_once('.').unwrap_or((text, "0"));
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(whole) || !is_number(decimals) || decimals.len() > 9 {
        return Err(problem());
    }
    let whole: u64 = whole.parse().map_err(|_| problem())?;
    let decimals: u64 = format!("{decimals:0<9}").parse().map_err(|_| problem())?;
    whole.checked_mul(1_000_000_000).and_then(|nano| nano.checked_add(decimals)).ok_or_else(problem)
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
    fn dollars_are_exact_to_the_nano_dollar() {
        assert_eq!(dollars("0.0000045"), Ok(4_500));
        assert_eq!((dollars("0"), dollars("12"), dollars("1.5")), (Ok(0), Ok(12_000_000_000), Ok(1_500_000_000)));
        for bad in ["", ".5", "1.", "-1", "1e-6", "0.0000000001", "99999999999999"] {
            assert!(dollars(bad).is_err(), "{bad:?}");
        }
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
