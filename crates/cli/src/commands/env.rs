//! `stockade env e2b`: what the E2B SDKs need to find this server.

use std::collections::BTreeMap;

use serde_json::json;

use crate::{
    args::{Common, Env},
    failure::Failure,
    local_paths::{Ready, default_data_dir},
    ui::Ui,
};

pub(super) fn env(common: &Common, ui: Ui, Env::E2b: Env) -> Result<(), Failure> {
    let data_dir = common.data_dir.clone().unwrap_or_else(default_data_dir);
    let Some(ready) = Ready::read(&data_dir)? else {
        let message = format!("no server is running with data directory {}", data_dir.display());
        return Err(Failure::new("no_server", message)
            .hint("`stockade up` starts one; or name its data directory with --data-dir"));
    };
    let variables = e2b_variables(&ready, &ready.read_key()?);
    let lines = || variables.iter().map(|(name, value)| format!("export {name}={}\n", quoted(value))).collect();
    ui.data(&json!(variables.iter().cloned().collect::<BTreeMap<_, _>>()), lines)
}

/// The variables of the E2B SDKs for this server.
pub(crate) fn e2b_variables(ready: &Ready, key: &str) -> Vec<(&'static str, String)> {
    let port = ready.https_url.rsplit_once(':').and_then(|(_, port)| port.trim_end_matches('/').parse::<u16>().ok());
    let domain = match port {
        Some(port) if port != 443 => format!("e2b.{}:{port}", ready.base_domain),
        _ => format!("e2b.{}", ready.base_domain),
    };
    let mut variables = vec![("E2B_DOMAIN", domain), ("E2B_API_KEY", key.to_owned())];
    // With the operator's certificate there is no CA of ours to trust.
    if ready.ca_file.exists() {
        let ca_file = ready.ca_file.display().to_string();
        variables.extend([("SSL_CERT_FILE", ca_file.clone()), ("NODE_EXTRA_CA_CERTS", ca_file)]);
    }
    variables
}

/// A value that a shell reads back as it is.
pub(crate) fn quoted(value: &str) -> String {
    let plain = |character: char| character.is_ascii_alphanumeric() || "._-/:".contains(character);
    if !value.is_empty() && value.chars().all(plain) {
        value.to_owned()
    } else {
        format!("'{}'", value.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_survive_a_shell() {
        assert_eq!(quoted("/a/b-c.pem"), "/a/b-c.pem");
        assert_eq!(quoted(""), "''");
        assert_eq!(quoted("it's here"), r"'it'\''s here'");
    }
}
