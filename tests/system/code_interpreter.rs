//! The code interpreter's machines that wait in a pool.

use std::time::Duration;

use base64::{Engine, engine::general_purpose::STANDARD};
use reqwest::Method;
use serde_json::{Value, json};
use stockade_system_tests::{Sandbox, TestServer};
use tokio::time::{Instant, sleep, timeout};

const PATIENCE: Duration = Duration::from_secs(180);
const POLL: Duration = Duration::from_secs(2);
/// How long what the service has written may take to arrive.
const LOG_PATIENCE: Duration = Duration::from_secs(5);

/// What a first run in a kernel can find of runs before it: itself, and what IPython and the template bring.
const LOOK: &str = "
import builtins, os
history = list(get_ipython().history_manager.get_range())
names = sorted(name for name in globals() if not name.startswith('_'))
[len(In), len(history), len(Out), hasattr(builtins, '_'), names, os.environ['E2B_SANDBOX_ID'], os.environ['MINE']]
";

#[tokio::test]
async fn nothing_of_a_rehearsal_is_left_in_a_machine_out_of_the_pool() {
    let server = TestServer::start_with(&["--pool", "1", "--with", "code-interpreter"]).await;
    let sandbox = out_of_the_pool(&server).await;

    let first = events(&server, &sandbox, LOOK).await;
    let seen = first.iter().find(|event| event["type"] == "result").unwrap_or_else(|| panic!("a result in {first:?}"));
    let names = "['In', 'Out', 'builtins', 'exit', 'get_ipython', 'history', 'open', 'os', 'quit']";
    let expected = format!("[2, 1, 0, False, {names}, '{}', 'yes']", sandbox.id());
    let seen = seen["data"]["text/plain"].as_str().unwrap_or_default();
    assert_eq!(seen.split_whitespace().collect::<Vec<_>>().join(" "), expected, "{first:?}");
    let second = events(&server, &sandbox, "6 * 7").await;
    assert!(second.iter().any(|event| event["type"] == "started" && event["count"] == 2), "{second:?}");
    server.stop().await;
}

/// A sandbox whose machine has rehearsed; the pool is filled when the server has time to.
async fn out_of_the_pool(server: &TestServer) -> Sandbox<'_> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let body = json!({ "template": "code-interpreter", "env": { "MINE": "yes" } });
        let made = server.json(Method::POST, "/v1/sandboxes", Some(body)).await;
        let sandbox = Sandbox::new(server, made["id"].as_str().expect("a sandbox has an id"));
        let log = service_log(server, &sandbox).await;
        if log.contains("POST /rehearsal") {
            return sandbox;
        }
        assert!(Instant::now() < deadline, "no machine has rehearsed; the last one's service wrote: {log}");
        sandbox.kill().await;
        sleep(POLL).await;
    }
}

/// What the service of the guest has written so far.
async fn service_log(server: &TestServer, sandbox: &Sandbox<'_>) -> String {
    let path = format!("/v1/sandboxes/{}/processes/tag:code-interpreter/events?after=0", sandbox.id());
    let mut answer = server.request(Method::GET, &path).send().await.expect("it answers");
    assert!(answer.status().is_success(), "GET {path}: {}", answer.status());
    let mut lines = Vec::new();
    while let Ok(chunk) = timeout(LOG_PATIENCE, answer.chunk()).await {
        lines.extend(chunk.expect("the process runs on").expect("a chunk"));
    }
    let events = lines.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice::<Value>(line).ok());
    let written = events.filter_map(|event| STANDARD.decode(event["data"].as_str()?).ok()).flatten();
    String::from_utf8(written.collect()).expect("UTF-8")
}

async fn events(server: &TestServer, sandbox: &Sandbox<'_>, code: &str) -> Vec<Value> {
    let path = format!("/v1/sandboxes/{}/code", sandbox.id());
    let answer = server.request(Method::POST, &path).json(&json!({ "code": code })).send().await.expect("it answers");
    assert!(answer.status().is_success(), "POST {path}: {}", answer.status());
    let text = answer.text().await.expect("the whole stream");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}
