//! What is typed for the network of sandboxes.

use std::{net::SocketAddr, path::PathBuf};

use clap::{
    Args, Subcommand,
    builder::{FalseyValueParser, NonEmptyStringValueParser},
};

use super::{
    sandbox::One,
    values::{count, pair, seconds, secret_name},
};

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

/// `stockade preview`
#[derive(Args, Clone, Debug)]
pub(crate) struct Preview {
    /// The sandbox's id
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(crate) sandbox: String,
    /// The port in the sandbox
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: u16,
    /// Seconds the link works
    #[arg(long, value_name = "SECONDS", env = "STOCKADE_PREVIEW_LIFETIME", value_parser = seconds)]
    pub(crate) lifetime: Option<f64>,
}

/// `stockade tunnel`
#[derive(Args, Clone, Debug)]
pub(crate) struct Tunnel {
    /// The sandbox's id
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(crate) sandbox: String,
    /// The port in the sandbox
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
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
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        sandbox: String,
        /// http://, https://, or tcp://HOST:PORT for plain TCP
        #[arg(value_name = "URL")]
        request: String,
        /// The request's method
        #[arg(long, short = 'X', value_name = "METHOD", env = "STOCKADE_METHOD", default_value = "GET")]
        method: String,
    },
    /// Print what sandboxes start from whose request says nothing about the network
    Default(Template),
    /// Change what sandboxes start from; those that are there keep what they have
    SetDefault {
        #[command(flatten)]
        of: Template,
        /// A JSON file instead of the options below; - is standard input
        #[arg(long, value_name = "FILE",
              conflicts_with_all = ["allow_out", "deny_out", "no_internet", "secrets"])]
        file: Option<PathBuf>,
        #[command(flatten)]
        network: Network,
    },
    /// Forget what sandboxes start from; the next wider default counts again
    ClearDefault(Template),
    /// Change a sandbox's network, at once: what it may reach, its secrets, or both; what is not said stays
    Set {
        /// The sandbox's id
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        sandbox: String,
        /// The network as a whole from a JSON file instead; - is standard input
        #[arg(long, value_name = "FILE",
              conflicts_with_all = ["allow_out", "deny_out", "no_internet", "secrets"])]
        file: Option<PathBuf>,
        #[command(flatten)]
        network: Network,
    },
}

/// Whose default.
#[derive(Args, Clone, Debug)]
pub(crate) struct Template {
    /// The template's, which counts before the workspace's
    #[arg(long, value_name = "NAME", env = "STOCKADE_DEFAULT_OF_TEMPLATE")]
    pub(crate) template: Option<String>,
}

/// `stockade secret`
#[derive(Debug, Subcommand)]
pub(crate) enum Secret {
    /// Keep a secret, or give it its next value, read from standard input
    Set {
        /// Its name
        #[arg(value_parser = secret_name)]
        name: String,
        /// Where it may be sent: a name, *.NAME, or * for everywhere; repeatable
        #[arg(long = "host", value_name = "HOST", env = "STOCKADE_SECRET_HOST", required = true)]
        hosts: Vec<String>,
        #[command(flatten)]
        oauth: OAuth,
    },
    /// List secrets, without their values
    #[command(visible_alias = "list")]
    Ls,
    /// Forget secrets
    Rm {
        /// Their names
        #[arg(required = true, value_parser = NonEmptyStringValueParser::new())]
        names: Vec<String>,
    },
}

/// A client of a token endpoint; standard input is its secret then.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "OAuth client credentials")]
pub(crate) struct OAuth {
    /// Send access tokens of this endpoint (https); standard input is then the client's secret
    #[arg(long, value_name = "URL", env = "STOCKADE_OAUTH_TOKEN_URL", requires = "client_id")]
    pub(crate) token_url: Option<String>,
    /// The client's id
    #[arg(long, value_name = "ID", env = "STOCKADE_OAUTH_CLIENT_ID", requires = "token_url")]
    pub(crate) client_id: Option<String>,
    /// A scope to ask for; repeatable
    #[arg(long = "scope", value_name = "SCOPE", env = "STOCKADE_OAUTH_SCOPE", requires = "token_url")]
    pub(crate) scopes: Vec<String>,
    /// The audience to ask for
    #[arg(long, value_name = "AUDIENCE", env = "STOCKADE_OAUTH_AUDIENCE", requires = "token_url")]
    pub(crate) audience: Option<String>,
    /// Send the client's secret as a field of the form instead of in a header
    #[arg(long, env = "STOCKADE_OAUTH_FORM", requires = "token_url", value_parser = FalseyValueParser::new())]
    pub(crate) form: bool,
}

/// `stockade audit`
#[derive(Args, Clone, Debug)]
pub(crate) struct Audit {
    /// Only those of this sandbox
    #[arg(value_name = "SANDBOX", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) sandbox: Option<String>,
    /// Only those with this outcome: allow, deny or error
    #[arg(long, value_name = "VERDICT", env = "STOCKADE_VERDICT", value_parser = ["allow", "deny", "error"])]
    pub(crate) verdict: Option<String>,
    /// At most this many, the newest
    #[arg(long, short = 'n', value_name = "N", env = "STOCKADE_AUDIT_LIMIT", default_value_t = 100,
          value_parser = count::<u32>)]
    pub(crate) limit: u32,
    /// Print decisions as they are made, one JSON object a line, until interrupted
    #[arg(long, short = 'f', conflicts_with = "verdict", env = "STOCKADE_FOLLOW", value_parser = FalseyValueParser::new())]
    pub(crate) follow: bool,
    /// Print all that are kept, one JSON object a line, the newest first
    #[arg(long, conflicts_with_all = ["follow", "limit"], env = "STOCKADE_EXPORT",
          value_parser = FalseyValueParser::new())]
    pub(crate) export: bool,
}
