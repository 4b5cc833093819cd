//! What is typed for the server and what looks after it.

use std::{net::SocketAddr, path::PathBuf};

use clap::{Args, Subcommand, ValueEnum, builder::FalseyValueParser};

use super::values::{count, dollars};

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
    /// Where to listen for SSH into sandboxes, as in 127.0.0.1:2222; port 0 takes a free one [default: nowhere]
    #[arg(long, value_name = "ADDR", env = "STOCKADE_SSH")]
    pub(crate) ssh: Option<SocketAddr>,
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
    /// Emulators kept ready per template that sandboxes are made, forked or woken from, at most; how many of them, by
    /// recent demand. 0: none at all
    #[arg(long, value_name = "N", env = "STOCKADE_SPARE_EMULATORS", default_value_t = 8)]
    pub(crate) spare_emulators: usize,
    /// Hibernate what stands by for so long and has no rule of its own for it; 0: never
    #[arg(long, value_name = "SECONDS", env = "STOCKADE_LONGEST_STANDBY", default_value_t = 3600)]
    pub(crate) longest_standby: u64,
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
    #[arg(long, short = 'n', value_name = "N", env = "STOCKADE_BENCH_N", default_value = "20", value_parser = count::<usize>)]
    pub(crate) n: usize,
    /// Speak JSON; with a file, write it there
    #[arg(long = "json", value_name = "FILE", env = "STOCKADE_BENCH_JSON", num_args = 0..=1)]
    pub(crate) json_file: Option<Option<PathBuf>>,
    /// What runs the guests
    #[arg(long, value_enum, env = "STOCKADE_ACCEL", default_value = "auto")]
    pub(crate) accel: Accel,
    /// Measure nothing but the service beside N idle sandboxes; each takes some 30 MiB of this host's memory
    #[arg(long, value_name = "N", env = "STOCKADE_BENCH_IDLE", value_parser = count::<usize>)]
    pub(crate) idle: Option<usize>,
    /// Measure nothing but E2B's SDK beside our own API, with this Python, which has e2b or e2b-code-interpreter installed
    #[arg(long, value_name = "PYTHON", env = "STOCKADE_E2B_PYTHON", conflicts_with = "idle")]
    pub(crate) e2b: Option<PathBuf>,
}

/// `stockade env`
#[derive(Debug, Subcommand)]
pub(crate) enum Env {
    /// For the E2B SDKs: eval "$(stockade env e2b)"
    E2b,
}
