//! `stockade doctor`: looks at everything a server needs and says what mends what is missing.
//!
//! Where it matters a thing is tried, not looked up: a file `/dev/kvm` may be there and no guest run on it,
//! a kernel may have user namespaces and forbid them.

use std::{net::SocketAddr, path::PathBuf, process::Output, time::Duration};

use serde::Serialize;
use tokio::{process::Command, time::timeout};

use crate::{
    args::{Common, Doctor},
    failure::{FAILED, Failure},
    local_paths::default_data_dir,
    ui::Ui,
};

mod host;
mod isolation;
mod network;
mod programs;

/// How long any program we try may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a check says.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    /// As it should be.
    Ok,
    /// Works, but slower or weaker.
    Warn,
    /// A server cannot do without.
    Fail,
}

/// One thing looked at.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Check {
    pub(crate) name: &'static str,
    pub(crate) verdict: Verdict,
    /// What was found.
    pub(crate) finding: String,
    /// The command that mends it.
    pub(crate) remedy: Option<String>,
}

impl Check {
    fn ok(name: &'static str, finding: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Ok, finding: finding.into(), remedy: None }
    }

    fn warn(name: &'static str, finding: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Warn, finding: finding.into(), remedy: Some(remedy.into()) }
    }

    fn fail(name: &'static str, finding: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Fail, finding: finding.into(), remedy: Some(remedy.into()) }
    }
}

/// What the server to be is like.
struct Plan {
    data_dir: PathBuf,
    http: SocketAddr,
    https: SocketAddr,
    base_domain: String,
}

/// Looks at everything; exit code 1 if something fails.
pub(crate) async fn doctor(common: &Common, args: Doctor, ui: Ui) -> Result<u8, Failure> {
    let data_dir = common.data_dir.clone().unwrap_or_else(default_data_dir);
    let plan = Plan { data_dir, http: args.http, https: args.https, base_domain: args.base_domain };
    let mut checks = vec![host::processor()];
    checks.extend(programs::checks().await);
    checks.push(isolation::kvm(&plan.data_dir).await);
    checks.push(isolation::namespaces().await);
    checks.push(isolation::cgroups());
    checks.extend([host::memory(), host::disk(&plan.data_dir), host::data_dir(&plan.data_dir), host::clock()]);
    checks.extend(network::ports(&plan));
    checks.push(network::names(&plan.base_domain).await);
    let fails = checks.iter().any(|check| check.verdict == Verdict::Fail);
    ui.data(&serde_json::json!({"ok": !fails, "checks": checks}), || checks.iter().map(line).collect())?;
    Ok(if fails { FAILED } else { 0 })
}

fn line(check: &Check) -> String {
    let verdict = match check.verdict {
        Verdict::Ok => "ok",
        Verdict::Warn => "warn",
        Verdict::Fail => "fail",
    };
    // What a program said may be several lines; a check is one.
    let finding: Vec<_> = check.finding.lines().map(str::trim).collect();
    let mut line = format!("{verdict:<5} {:<11} {}\n", check.name, finding.join(" "));
    if let Some(remedy) = &check.remedy {
        line.push_str(&format!("{:18}mend: {remedy}\n", ""));
    }
    line
}

/// Runs a program to its end, for a while at most.
async fn try_run(program: &str, arguments: &[&str]) -> Result<Output, String> {
    let output = Command::new(program).args(arguments).kill_on_drop(true).output();
    match timeout(PATIENCE, output).await {
        Err(_) => Err(format!("{program} did not end within {PATIENCE:?}")),
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => Err(format!("{program} is not installed")),
        Ok(Err(error)) => Err(format!("cannot run {program}: {error}")),
        Ok(Ok(output)) => Ok(output),
    }
}

/// A command of root's, as this user has to type it.
fn as_root(command: &str) -> String {
    if nix::unistd::geteuid().is_root() { command.to_owned() } else { format!("sudo {command}") }
}
