//! Where a data directory is when nobody says so, and what a running server leaves there for clients.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    {env, fs, io},
};

use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// The file a server writes once it serves, and removes when it stops.
pub(crate) const READY_FILE: &str = "ready.json";

/// What `ready.json` says.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Ready {
    pub(crate) http_url: String,
    pub(crate) https_url: String,
    pub(crate) base_domain: String,
    pub(crate) api_key_file: PathBuf,
    pub(crate) ca_file: PathBuf,
    /// Where SSH into sandboxes is spoken, if it is, and the fingerprint of the key to expect there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ssh_addr: Option<SocketAddr>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ssh_host_key: Option<String>,
    pub(crate) pid: u32,
    pub(crate) accel: String,
}

impl Ready {
    /// What the server of this data directory left; `None` if there is none.
    pub(crate) fn read(data_dir: &Path) -> Result<Option<Self>, Failure> {
        let path = data_dir.join(READY_FILE);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Failure::host(format!("read {}", path.display()), error)),
        };
        let malformed = |error| {
            Failure::new("damaged_ready_file", format!("{} is not what a server writes: {error}", path.display()))
        };
        serde_json::from_str(&text).map(Some).map_err(malformed)
    }

    /// The key in the key file, without the newline.
    pub(crate) fn read_key(&self) -> Result<String, Failure> {
        let path = self.api_key_file.display();
        let text = fs::read_to_string(&self.api_key_file).map_err(|error| {
            Failure::host(format!("read the API key in {path}"), error)
                .hint("name a key with --api-key or STOCKADE_API_KEY")
        })?;
        Ok(text.trim().to_owned())
    }
}

/// The data directory when none is named: `/var/lib/stockade` for root, else in the user's own data.
pub(crate) fn default_data_dir() -> PathBuf {
    if nix::unistd::geteuid().is_root() {
        return PathBuf::from("/var/lib/stockade");
    }
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    match absolute("XDG_DATA_HOME") {
        Some(data) => data.join("stockade"),
        None => absolute("HOME").unwrap_or_else(|| PathBuf::from("/")).join(".local/share/stockade"),
    }
}
