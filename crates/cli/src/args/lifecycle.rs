//! What is typed for the life of sandboxes: rules, tiers, snapshots, forks, usage.

use std::ffi::OsString;

use clap::{
    Args, Subcommand, ValueEnum,
    builder::{FalseyValueParser, NonEmptyStringValueParser},
};

use super::values::{count, pair, seconds, seconds_or_never, snapshot_name};

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
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(crate) sandbox: String,
    /// Seconds from now to its deadline, earlier or later than it was
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) lifetime: Option<f64>,
    #[command(flatten)]
    pub(crate) rules: Rules,
}

/// `stockade pause`
#[derive(Args, Clone, Debug)]
pub(crate) struct Pause {
    /// The sandbox's id
    #[arg(value_parser = NonEmptyStringValueParser::new())]
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
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(crate) sandbox: String,
    /// Seconds it may live from then [default: what was left of its lifetime]
    #[arg(long, value_name = "SECONDS", env = "STOCKADE_RESUME_LIFETIME", value_parser = seconds)]
    pub(crate) lifetime: Option<f64>,
}

/// `stockade snapshot`
#[derive(Args, Clone, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Snapshot {
    #[command(subcommand)]
    pub(crate) command: Option<SnapshotCommand>,
    /// The sandbox's id
    #[arg(required = true, value_parser = NonEmptyStringValueParser::new())]
    pub(crate) sandbox: Option<String>,
    /// A name; the newest snapshot of a name is meant by it
    #[arg(long, env = "STOCKADE_SNAPSHOT_NAME", value_parser = snapshot_name)]
    pub(crate) name: Option<String>,
    /// Label; repeatable
    #[arg(long = "label", short = 'l', value_name = "KEY=VALUE", env = "STOCKADE_LABEL", value_parser = pair)]
    pub(crate) labels: Vec<(String, String)>,
    /// Seconds after which it is deleted by itself [default: never]
    #[arg(long, value_name = "SECONDS", env = "STOCKADE_EXPIRES_AFTER", value_parser = seconds)]
    pub(crate) expires_after: Option<f64>,
    /// Keep the disk alone; what is made from it boots
    #[arg(long, env = "STOCKADE_SNAPSHOT_DISK_ONLY", value_parser = FalseyValueParser::new())]
    pub(crate) disk_only: bool,
}

/// `stockade snapshot ls | info | rm`
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum SnapshotCommand {
    /// List snapshots
    #[command(visible_alias = "list")]
    Ls {
        /// Only those of this sandbox
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        sandbox: Option<String>,
        /// Only those of this name
        #[arg(long, env = "STOCKADE_SNAPSHOT_LS_NAME", value_parser = NonEmptyStringValueParser::new())]
        name: Option<String>,
        /// Only those with this label; repeatable
        #[arg(long = "label", short = 'l', value_name = "KEY=VALUE", env = "STOCKADE_SNAPSHOT_LS_LABEL", value_parser = pair)]
        labels: Vec<(String, String)>,
        /// Print ids only
        #[arg(long, short = 'q', env = "STOCKADE_SNAPSHOT_LS_QUIET", value_parser = FalseyValueParser::new())]
        quiet: bool,
    },
    /// Show one snapshot
    Info {
        /// Name or id
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        snapshot: String,
    },
    /// Delete snapshots; what was made from them lives on
    Rm {
        /// Their ids; of a name the newest
        #[arg(required = true, value_parser = NonEmptyStringValueParser::new())]
        snapshots: Vec<String>,
    },
}

/// `stockade rollback`
#[derive(Args, Clone, Debug)]
pub(crate) struct Rollback {
    /// The sandbox's id
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(crate) sandbox: String,
    /// A snapshot of it, or the one it was made from; name or id
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(crate) snapshot: String,
}

/// `stockade fork`
#[derive(Args, Clone, Debug)]
pub(crate) struct Fork {
    /// The sandbox's id
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(crate) sandbox: String,
    /// How many copies; if one cannot be made, none is
    #[arg(long, short = 'n', value_name = "N", env = "STOCKADE_FORK_COUNT", default_value_t = 1,
          value_parser = count::<u32>)]
    pub(crate) count: u32,
    /// Seconds each may live [default: as long as the sandbox was to]
    #[arg(long, value_name = "SECONDS", env = "STOCKADE_FORK_LIFETIME", value_parser = seconds)]
    pub(crate) lifetime: Option<f64>,
    /// End every copy once the command has ended in it
    #[arg(long, conflicts_with = "keep_best", requires = "command", env = "STOCKADE_FORK_RM", value_parser = FalseyValueParser::new())]
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
    #[arg(long, value_name = "SECONDS", env = "STOCKADE_FORK_TIMEOUT", value_parser = seconds)]
    pub(crate) timeout: Option<f64>,
    /// User to run as [default: the template's]
    #[arg(long, short = 'u', value_name = "USER", env = "STOCKADE_FORK_USER")]
    pub(crate) user: Option<String>,
    /// Directory to run in [default: the user's home]
    #[arg(long, short = 'C', value_name = "DIR", env = "STOCKADE_FORK_CWD")]
    pub(crate) cwd: Option<String>,
    /// A command to run in each copy; STOCKADE_FORK_INDEX is 0 in the first, 1 in the second, and so on
    #[arg(last = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

/// `stockade usage`
#[derive(Args, Clone, Debug)]
pub(crate) struct Usage {
    /// Only this sandbox's, also when it has ended
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(crate) sandbox: Option<String>,
    /// Only sandboxes with this label; repeatable
    #[arg(long = "metadata", short = 'm', value_name = "KEY=VALUE", env = "STOCKADE_USAGE_METADATA", value_parser = pair)]
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
