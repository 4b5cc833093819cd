//! `stockade version`.

use serde_json::json;

use crate::{args::Common, client::Client, failure::Failure, ui::Ui};

/// This program's version, and the server's where there is one.
pub(super) async fn version(common: &Common, ui: Ui) -> Result<(), Failure> {
    let mine = env!("CARGO_PKG_VERSION");
    let server = match Client::find(common) {
        Ok(client) => client.version().await,
        Err(failure) => Err(failure),
    };
    match server {
        Ok(server) => ui.data(&json!({"version": mine, "server": server}), || {
            let engine = &server.engine;
            format!(
                "stockade {mine}\nserver   {}\nengine   {} {} ({}, {})\n",
                server.version, engine.name, engine.version, engine.accelerator, engine.isolation
            )
        }),
        // Only a server that was named has to be there.
        Err(failure) if common.url.is_some() => Err(failure),
        Err(failure) => {
            ui.note(&format!("no server: {failure}"));
            ui.data(&json!({"version": mine, "server": null}), || format!("stockade {mine}\n"))
        }
    }
}
