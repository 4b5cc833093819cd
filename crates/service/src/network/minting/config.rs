//! Minted secrets as the operator writes them into the server's network file. There is no other way to name a program
//! or a callback: no request can.

use std::{sync::Arc, time::Duration};

use serde::Deserialize;
use stockade_gateway::{Fetcher, policy::NamePattern};
use stockade_model::WorkspaceId;

use super::{Asked, Callback, Command, Fresh};

const LONGEST_PATIENCE: Duration = Duration::from_secs(60);

/// A secret of the operator's whose values are made when they are needed.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MintedSecret {
    /// Where values may go; name patterns, or `*`.
    pub hosts: Vec<String>,
    /// Whose sandboxes may use it; empty: all.
    #[serde(default)]
    pub workspaces: Vec<WorkspaceId>,
    /// Who gets the same value.
    #[serde(default)]
    pub shared_by: SharedBy,
    /// How long a value may take to be made, up to a minute.
    #[serde(default = "ten_seconds")]
    pub timeout_ms: u64,
    /// What makes it.
    pub(crate) mint: Mint,
}

fn ten_seconds() -> u64 {
    10_000
}

/// Who gets the same value. Its maker is told no more than this, so that it cannot depend on more.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum SharedBy {
    /// One sandbox, for one host.
    #[default]
    Sandbox,
    /// All sandboxes of a workspace whose metadata says the same under this key, for one host: `{"metadata": "user"}`
    /// is a value for each user. A sandbox whose metadata does not have the key gets none.
    Metadata(String),
    /// All sandboxes of a workspace, for one host.
    Workspace,
    /// All sandboxes, for one host.
    Deployment,
}

/// What makes values.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Mint {
    Command(Command),
    Callback(Callback),
}

/// A minted secret that was checked.
pub(crate) struct Minter {
    pub(crate) config: MintedSecret,
}

impl Minter {
    /// # Errors
    /// It cannot work; the text says what is wrong.
    pub(crate) fn new(name: &str, config: MintedSecret) -> Result<Arc<Self>, String> {
        let wrong = |problem: String| format!("secrets.{name}.{problem}");
        super::super::check_secret_name(name).map_err(|error| wrong(error.to_string()))?;
        if config.hosts.is_empty() {
            return Err(wrong("hosts: names no host".to_owned()));
        }
        for host in &config.hosts {
            NamePattern::parse(host).map_err(|error| wrong(format!("hosts: {error}")))?;
        }
        if !(1..=LONGEST_PATIENCE.as_millis()).contains(&u128::from(config.timeout_ms)) {
            return Err(wrong(format!("timeout_ms: must be 1 to {}", LONGEST_PATIENCE.as_millis())));
        }
        if matches!(&config.shared_by, SharedBy::Metadata(key) if key.is_empty()) {
            return Err(wrong("shared_by.metadata: names no key".to_owned()));
        }
        if let Mint::Callback(callback) = &config.mint {
            callback.check().map_err(|problem| wrong(format!("mint.callback.{problem}")))?;
        }
        Ok(Arc::new(Self { config }))
    }

    /// Whether sandboxes of a workspace may use it.
    pub(crate) fn is_for(&self, workspace: &WorkspaceId) -> bool {
        self.config.workspaces.is_empty() || self.config.workspaces.contains(workspace)
    }

    /// A word for what makes it.
    pub(crate) fn kind(&self) -> &'static str {
        match self.config.mint {
            Mint::Command(_) => "command",
            Mint::Callback(_) => "callback",
        }
    }

    pub(crate) async fn make(&self, fetcher: &Fetcher, asked: &Asked) -> Result<Fresh, String> {
        let patience = Duration::from_millis(self.config.timeout_ms);
        match &self.config.mint {
            Mint::Command(command) => command.make(asked, patience).await,
            Mint::Callback(callback) => callback.make(fetcher, asked, patience).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_work_is_refused_when_the_server_starts() {
        let read = |text: &str| {
            let config: MintedSecret = serde_json::from_str(text).map_err(|error| error.to_string())?;
            Minter::new("s", config).map(|minter| minter.kind())
        };
        assert_eq!(read(r#"{"hosts": ["a.example"], "mint": {"command": ["/bin/mint", "x"]}}"#), Ok("command"));
        assert_eq!(read(r#"{"hosts": ["*"], "mint": {"callback": {"url": "https://a.example/x"}}}"#), Ok("callback"));
        for bad in [
            r#"{"hosts": [], "mint": {"command": ["/bin/mint"]}}"#,
            r#"{"hosts": ["a b"], "mint": {"command": ["/bin/mint"]}}"#,
            r#"{"hosts": ["a.example"], "mint": {"command": ["mint"]}}"#,
            r#"{"hosts": ["a.example"], "mint": {"command": "mint | sh"}}"#,
            r#"{"hosts": ["a.example"], "mint": {"callback": {"url": "http://a.example/"}}}"#,
            r#"{"hosts": ["a.example"], "mint": {"callback": {"url": "https://u:p@a.example/"}}}"#,
            r#"{"hosts": ["a.example"], "mint": {"callback": {"url": "https://a.example/", "bearer_file": "/nowhere"}}}"#,
            r#"{"hosts": ["a.example"], "timeout_ms": 0, "mint": {"command": ["/bin/mint"]}}"#,
            r#"{"hosts": ["a.example"]}"#,
            r#"{"hosts": ["a.example"], "shared_by": {"metadata": ""}, "mint": {"command": ["/bin/mint"]}}"#,
            r#"{"hosts": ["a.example"], "shared_by": "user", "mint": {"command": ["/bin/mint"]}}"#,
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
