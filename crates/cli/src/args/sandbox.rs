//! What is typed for sandboxes, templates and what runs in them.

use std::{ffi::OsString, path::PathBuf};

use clap::{
    Args, Subcommand,
    builder::{FalseyValueParser, NonEmptyStringValueParser},
};

use super::{
    lifecycle::Rules,
    network::Network,
    values::{pair, process, seconds},
};

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
    /// Leave the sandbox running and print its id on standard error (with --json: the first event, on standard output)
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

/// `stockade ls`
#[derive(Args, Clone, Debug)]
pub(crate) struct Ls {
    /// Only these states, comma separated [default: all but those that have ended]
    #[arg(long, value_name = "STATES", env = "STOCKADE_LS_STATE")]
    pub(crate) state: Option<String>,
    /// Also those that have ended
    #[arg(long, short = 'a', conflicts_with = "state", env = "STOCKADE_LS_ALL", value_parser = FalseyValueParser::new())]
    pub(crate) all: bool,
    /// Only those made from this template
    #[arg(long, short = 't', value_name = "TEMPLATE", env = "STOCKADE_LS_TEMPLATE")]
    pub(crate) template: Option<String>,
    /// Only those with this label; repeatable
    #[arg(long = "metadata", short = 'm', value_name = "KEY=VALUE", env = "STOCKADE_LS_METADATA", value_parser = pair)]
    pub(crate) metadata: Vec<(String, String)>,
    /// Print ids only
    #[arg(long, short = 'q', env = "STOCKADE_LS_QUIET", value_parser = FalseyValueParser::new())]
    pub(crate) quiet: bool,
}

/// A command about one sandbox.
#[derive(Args, Clone, Debug)]
pub(crate) struct One {
    /// The sandbox's id
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(crate) sandbox: String,
}

/// `stockade exec`
#[derive(Args, Clone, Debug)]
pub(crate) struct Exec {
    /// The sandbox's id
    #[arg(value_parser = NonEmptyStringValueParser::new())]
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
    #[arg(value_parser = NonEmptyStringValueParser::new())]
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
    #[arg(long = "env", short = 'e', value_name = "KEY=VALUE", env = "STOCKADE_CODE_ENV", value_parser = pair)]
    pub(crate) env: Vec<(String, String)>,
    /// Interrupt the code after this many seconds (exit code 124)
    #[arg(long, value_name = "SECONDS", env = "STOCKADE_CODE_TIMEOUT", value_parser = seconds)]
    pub(crate) timeout: Option<f64>,
    /// Write pictures and other results that are no text to files in this directory
    #[arg(long, value_name = "DIR", env = "STOCKADE_SAVE")]
    pub(crate) save: Option<PathBuf>,
}

/// `stockade shell`
#[derive(Args, Clone, Debug)]
pub(crate) struct Shell {
    /// The sandbox's id
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(crate) sandbox: String,
    /// User to be [default: the template's]
    #[arg(long, short = 'u', value_name = "USER", env = "STOCKADE_SHELL_USER")]
    pub(crate) user: Option<String>,
    /// Directory to start in [default: the user's home]
    #[arg(long, short = 'C', value_name = "DIR", env = "STOCKADE_SHELL_CWD")]
    pub(crate) cwd: Option<String>,
}

/// `stockade ps`
#[derive(Args, Clone, Debug)]
pub(crate) struct Ps {
    /// The sandbox's id
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(crate) sandbox: String,
    /// Also those that have ended and are still known
    #[arg(long, short = 'a', env = "STOCKADE_PS_ALL", value_parser = FalseyValueParser::new())]
    pub(crate) all: bool,
}

/// `stockade attach`
#[derive(Args, Clone, Debug)]
#[command(after_help = ATTACH_HELP)]
pub(crate) struct Attach {
    /// The sandbox's id
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(crate) sandbox: String,
    /// The process: its pid, or tag:NAME
    #[arg(value_parser = process)]
    pub(crate) process: String,
    /// Leave the process's standard input alone
    #[arg(long, short = 'n', env = "STOCKADE_ATTACH_NO_STDIN", value_parser = FalseyValueParser::new())]
    pub(crate) no_stdin: bool,
    /// Leave out what it wrote before
    #[arg(long, env = "STOCKADE_NO_REPLAY", value_parser = FalseyValueParser::new())]
    pub(crate) no_replay: bool,
}

const ATTACH_HELP: &str = "\
Begins with what is kept of the process's output. Ctrl-C goes to the process; SIGTERM, SIGHUP and SIGQUIT detach and \
leave it running. A process that has ended gives its output and its exit code for a while.";

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
    #[arg(long, short = 'u', value_name = "USER", env = "STOCKADE_CP_USER")]
    pub(crate) user: Option<String>,
}

/// `stockade kill`
#[derive(Args, Clone, Debug)]
pub(crate) struct Kill {
    /// The sandboxes' ids
    #[arg(required_unless_present = "all", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) sandboxes: Vec<String>,
    /// All sandboxes there are
    #[arg(long, conflicts_with = "sandboxes")]
    pub(crate) all: bool,
}

/// `stockade extend`
#[derive(Args, Clone, Debug)]
pub(crate) struct Extend {
    /// The sandbox's id
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(crate) sandbox: String,
    /// Seconds from now
    #[arg(value_parser = seconds)]
    pub(crate) seconds: f64,
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
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        template: String,
    },
    /// Build a template and show the build's log
    Build(TemplateBuild),
    /// Delete templates that were built
    Rm {
        /// Their names or ids
        #[arg(required = true, value_parser = NonEmptyStringValueParser::new())]
        templates: Vec<String>,
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
