//! Keys that open sandboxes over SSH, and where that is.

use reqwest::Method;
use serde::{Deserialize, Serialize};

use super::Client;
use crate::failure::Failure;

/// Where the server speaks SSH.
#[derive(Debug, Deserialize)]
pub(crate) struct SshEndpoint {
    pub(crate) address: std::net::SocketAddr,
    pub(crate) host_key: String,
}

/// A key to be added.
#[derive(Debug, Serialize)]
pub(crate) struct AddSshKey<'a> {
    pub(crate) name: &'a str,
    pub(crate) public_key: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sandbox: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) lifetime_seconds: Option<f64>,
}

/// A key as the server has it.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct SshKey {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) fingerprint: String,
    pub(crate) public_key: String,
    pub(crate) sandbox: Option<String>,
    pub(crate) created_at: String,
    pub(crate) expires_at: Option<String>,
}

#[derive(Debug, Deserialize)]
struct SshKeyList {
    items: Vec<SshKey>,
}

impl Client {
    /// Where the server speaks SSH.
    pub(crate) async fn ssh_endpoint(&self) -> Result<SshEndpoint, Failure> {
        self.json(self.request(Method::GET, &["v1", "ssh"])).await
    }

    /// The host the server is reached at.
    pub(crate) fn host(&self) -> &str {
        self.base.host_str().unwrap_or_default().trim_matches(['[', ']'])
    }

    /// Lets a key open sandboxes.
    pub(crate) async fn add_ssh_key(&self, key: &AddSshKey<'_>) -> Result<SshKey, Failure> {
        self.json(self.request(Method::POST, &["v1", "ssh-keys"]).json(key)).await
    }

    /// All keys.
    pub(crate) async fn ssh_keys(&self) -> Result<Vec<SshKey>, Failure> {
        let list: SshKeyList = self.json(self.request(Method::GET, &["v1", "ssh-keys"])).await?;
        Ok(list.items)
    }

    /// Removes a key.
    pub(crate) async fn remove_ssh_key(&self, id: &str) -> Result<(), Failure> {
        self.send(self.request(Method::DELETE, &["v1", "ssh-keys", id])).await.map(drop)
    }
}
