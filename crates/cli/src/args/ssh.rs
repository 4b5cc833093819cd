//! What is typed for SSH.

use std::path::PathBuf;

use clap::{Args, Subcommand, builder::NonEmptyStringValueParser};

use super::values::{seconds, ssh_key_name};

/// `stockade ssh`
#[derive(Args, Clone, Debug)]
pub(crate) struct Ssh {
    /// The sandbox's id
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(crate) sandbox: String,
    /// What `ssh` gets besides: options, then a command
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    pub(crate) arguments: Vec<String>,
}

/// `stockade ssh-key`
#[derive(Debug, Subcommand)]
pub(crate) enum SshKey {
    /// Let a public key open your sandboxes over SSH
    Add {
        /// What to call it
        #[arg(value_parser = ssh_key_name)]
        name: String,
        /// A .pub file; - is standard input
        file: PathBuf,
        /// The one sandbox it is to open [default: all]
        #[arg(long, value_name = "SANDBOX", env = "STOCKADE_SSH_SANDBOX")]
        sandbox: Option<String>,
        /// Seconds it opens anything [default: until it is removed]
        #[arg(long, value_name = "SECONDS", env = "STOCKADE_SSH_KEY_LIFETIME", value_parser = seconds)]
        lifetime: Option<f64>,
    },
    /// List keys
    #[command(visible_alias = "list")]
    Ls,
    /// Remove keys, by id or by name
    Rm {
        /// Their ids or names
        #[arg(required = true, value_parser = NonEmptyStringValueParser::new())]
        keys: Vec<String>,
    },
}
