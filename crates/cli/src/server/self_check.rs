//! The first sandbox: made and used the way any client does, through the API.

use std::time::Instant;

use stockade_model::Secret;

use crate::{
    client::{Client, CreateRequest, ExecRequest},
    failure::Failure,
    local_paths::Ready,
    ui::Ui,
};

/// How long the first sandbox took.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub(super) struct Timing {
    pub(super) create_ms: f64,
    pub(super) run_ms: f64,
}

/// Creates, runs, looks at the answer, ends.
pub(super) async fn run_first_sandbox(ready: &Ready, ui: Ui) -> Result<Timing, Failure> {
    ui.note("checking with a first sandbox");
    let client = Client::new(&ready.http_url, Secret::new(ready.read_key()?), None)?;
    let request = CreateRequest {
        template: "base".to_owned(),
        lifetime_seconds: Some(120.0),
        metadata: [("purpose".to_owned(), "self-check".to_owned())].into(),
        env: Default::default(),
        rules: Default::default(),
        network: None,
    };
    let begun = Instant::now();
    let sandbox = client.create(&request).await.map_err(failed)?;
    let create_ms = begun.elapsed().as_secs_f64() * 1e3;
    let begun = Instant::now();
    let argv = ["sh", "-c", "echo $((6*7))"].map(str::to_owned).to_vec();
    let collected = client.collect(&sandbox.id, &ExecRequest { argv, ..ExecRequest::default() }, false).await;
    let run_ms = begun.elapsed().as_secs_f64() * 1e3;
    let killed = client.kill(&sandbox.id).await;
    let collected = collected.map_err(failed)?;
    killed.map_err(failed)?;
    if collected.stdout != b"42\n" || collected.exit.and_then(|exit| exit.code) != Some(0) {
        let said = String::from_utf8_lossy(&collected.stdout).into_owned();
        return Err(failed(Failure::new("self_check_failed", format!("6*7 gave {said:?}, {:?}", collected.exit))));
    }
    Ok(Timing { create_ms, run_ms })
}

fn failed(failure: Failure) -> Failure {
    let message = format!("the first sandbox did not work: {}", failure.message);
    let hint = failure.hint.unwrap_or_else(|| "`stockade doctor` looks at everything a sandbox needs".to_owned());
    Failure::new("self_check_failed", message).hint(hint)
}
