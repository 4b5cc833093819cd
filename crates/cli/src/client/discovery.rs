//! Finds the server and the key: what is named on the command line or in the environment, else what a
//! running server left in its data directory.

use std::path::Path;

use stockade_model::Secret;

use super::Client;
use crate::{
    args::Common,
    failure::Failure,
    local_paths::{READY_FILE, Ready, default_data_dir},
};

impl Client {
    /// The client that `--url`, `--api-key`, `--ca-file` and `--data-dir` ask for.
    pub(crate) fn find(common: &Common) -> Result<Self, Failure> {
        let data_dir = common.data_dir.clone().unwrap_or_else(default_data_dir);
        let ready = match (&common.url, &common.api_key) {
            // All is said; a damaged file of some other server must not matter.
            (Some(_), Some(_)) => None,
            _ => Ready::read(&data_dir)?,
        };
        let url = match (&common.url, &ready) {
            (Some(url), _) => url.clone(),
            (None, Some(ready)) => ready.http_url.clone(),
            (None, None) => return Err(no_server(&data_dir.join(READY_FILE))),
        };
        // The local server's key goes to no other server.
        let local =
            ready.filter(|ready| [&ready.http_url, &ready.https_url].contains(&&url.trim_end_matches('/').to_owned()));
        let key = match (&common.api_key, &local) {
            (Some(key), _) => key.trim().to_owned(),
            (None, Some(ready)) => ready.read_key()?,
            (None, None) => return Err(no_key(&url)),
        };
        if !key.bytes().all(|byte| byte.is_ascii_graphic()) || key.is_empty() {
            return Err(Failure::new("invalid_api_key", "the API key is empty or has characters no key has")
                .hint("check --api-key or STOCKADE_API_KEY"));
        }
        let ca_file =
            common.ca_file.clone().or_else(|| local.filter(|_| url.starts_with("https:")).map(|ready| ready.ca_file));
        Self::new(&url, Secret::new(key), ca_file.as_deref())
    }
}

fn no_server(ready_file: &Path) -> Failure {
    Failure::new("no_server", format!("no server is running here: there is no {}", ready_file.display()))
        .hint("`stockade up` starts one; or name one with --url and --api-key, or its data directory with --data-dir")
}

fn no_key(url: &str) -> Failure {
    Failure::new("no_api_key", format!("no API key for {url}"))
        .hint("name it with --api-key or STOCKADE_API_KEY; the server keeps its first one in DATA_DIR/api-key")
}
