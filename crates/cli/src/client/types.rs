//! The API's objects as this client reads them. Fields it does not know are kept for `--json`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use stockade_model::MachineShape;

use super::exec::Exit;
use crate::failure::{Failure, InTheWay};

/// `{"error": …}`
#[derive(Debug, Deserialize)]
pub(super) struct ErrorAnswer {
    pub(super) error: ApiError,
}

/// What the API says went wrong.
#[derive(Debug, Deserialize)]
pub(super) struct ApiError {
    code: String,
    message: String,
    #[serde(default)]
    hint: Option<String>,
    /// Which sandbox is in the way, and the state it is in.
    #[serde(default)]
    sandbox: Option<String>,
    #[serde(default)]
    state: Option<String>,
}

impl ApiError {
    pub(super) fn into_failure(self) -> Failure {
        // Where the API names a route, a command says the same here.
        let ours = match self.code.as_str() {
            "wrong_state" => self.way_back(),
            "sandbox_not_found" => Some("`stockade ls --all` lists the sandboxes there are and were".to_owned()),
            "template_not_found" => Some("`stockade template ls` lists the templates there are".to_owned()),
            "snapshot_not_found" => Some("`stockade snapshot ls` lists the snapshots there are".to_owned()),
            "secret_not_found" => Some("`stockade secret ls` lists the secrets there are".to_owned()),
            "no_such_process" => Some("`stockade ps --all` lists the processes that are known".to_owned()),
            _ => None,
        };
        let mut failure = Failure::new(self.code, self.message);
        failure.hint = ours.or(self.hint.filter(|hint| !hint.is_empty()));
        let in_the_way = self.sandbox.zip(self.state);
        failure.in_the_way = in_the_way.map(|(sandbox, state)| Box::new(InTheWay { sandbox, state }));
        failure
    }

    /// What brings a sandbox back that is not running.
    fn way_back(&self) -> Option<String> {
        let verb = match self.state.as_deref()? {
            "paused" => "resume",
            "stopped" => "start",
            _ => return None,
        };
        Some(format!("`stockade {verb} {}` brings it back", self.sandbox.as_deref()?))
    }
}

/// A sandbox.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Sandbox {
    pub(crate) id: String,
    pub(crate) template: TemplateName,
    pub(crate) state: String,
    pub(crate) shape: MachineShape,
    #[serde(default)]
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) created_at: String,
    pub(crate) started_at: Option<String>,
    pub(crate) deadline: String,
    pub(crate) ending: Option<Ending>,
    #[serde(flatten)]
    other: BTreeMap<String, Value>,
}

impl Sandbox {
    /// A field this client has no name for.
    pub(crate) fn field(&self, name: &str) -> &Value {
        self.other.get(name).unwrap_or(&Value::Null)
    }
}

/// A snapshot.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Snapshot {
    pub(crate) id: String,
    pub(crate) name: Option<String>,
    #[serde(default)]
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) sandbox: String,
    pub(crate) parent: Option<String>,
    pub(crate) template: TemplateName,
    pub(crate) memory: bool,
    pub(crate) memory_bytes: u64,
    pub(crate) disk_bytes: u64,
    pub(crate) paused_seconds: f64,
    pub(crate) created_at: String,
    pub(crate) expires_at: Option<String>,
    #[serde(flatten)]
    other: BTreeMap<String, Value>,
}

/// What was used.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct UsageReport {
    pub(crate) items: Vec<UsageItem>,
    pub(crate) total: Used,
    #[serde(flatten)]
    other: BTreeMap<String, Value>,
}

/// What one sandbox or all of a label used.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct UsageItem {
    pub(crate) sandbox: Option<String>,
    pub(crate) label: Option<String>,
    pub(crate) from: String,
    #[serde(flatten)]
    pub(crate) used: Used,
}

/// Amounts and what they cost.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Used {
    pub(crate) running_seconds: f64,
    pub(crate) paused_seconds: f64,
    pub(crate) vcpu_seconds: f64,
    pub(crate) memory_gib_seconds: f64,
    pub(crate) disk_gib_hours: f64,
    pub(crate) snapshot_gib_hours: f64,
    pub(crate) egress_bytes: u64,
    pub(crate) cost: Cost,
    #[serde(flatten)]
    other: BTreeMap<String, Value>,
}

/// Dollars.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Cost {
    pub(crate) total: f64,
    #[serde(flatten)]
    other: BTreeMap<String, Value>,
}

/// What a sandbox was made from.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct TemplateName {
    pub(crate) id: String,
    pub(crate) name: String,
}

/// When and why a sandbox ended.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Ending {
    pub(crate) at: String,
    pub(crate) cause: Cause,
    #[serde(default)]
    pub(crate) detail: String,
}

/// Why a sandbox ended.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Cause {
    pub(crate) kind: String,
    #[serde(flatten)]
    other: BTreeMap<String, Value>,
}

/// A template.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Template {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) state: String,
    pub(crate) shape: MachineShape,
    pub(crate) created_at: String,
    #[serde(default)]
    pub(crate) default_user: String,
    #[serde(flatten)]
    other: BTreeMap<String, Value>,
}

/// A process that was started in a sandbox.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) tag: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) argv: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) shell: Option<String>,
    pub(crate) user: String,
    pub(crate) pty: bool,
    pub(crate) started_at: String,
    pub(crate) exit: Option<Exit>,
    #[serde(flatten)]
    other: BTreeMap<String, Value>,
}

/// One page of a list.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Items<T> {
    pub(super) items: Vec<T>,
    #[serde(default)]
    pub(super) cursor: Option<String>,
}

/// The server's version and engine.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Version {
    pub(crate) version: String,
    pub(crate) engine: EngineVersion,
}

/// What runs the machines.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct EngineVersion {
    pub(crate) name: String,
    pub(crate) accelerator: String,
    pub(crate) isolation: String,
    pub(crate) version: String,
}

/// A file, directory or link in a sandbox.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Entry {
    pub(crate) kind: String,
    pub(crate) mode: String,
}

impl Entry {
    /// The permission bits.
    pub(crate) fn mode_bits(&self) -> u32 {
        u32::from_str_radix(&self.mode, 8).unwrap_or(0o644) & 0o777
    }
}
