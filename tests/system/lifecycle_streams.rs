//! A snapshot of a sandbox in the middle of its work: the work and everybody who follows it notice nothing, and
//! what is made from the snapshot goes on from that very moment.

use std::process::ExitStatus;

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use stockade_system_tests::{Sandbox, TestServer};
use tokio::{io::AsyncReadExt as _, process::Child};

use crate::lifecycle::{check_clock, check_counter, start_counter};

const LINES: usize = 400;
const SNAPSHOTS: usize = 4;
const DOWNLOAD_BYTES: usize = 48 << 20;

#[tokio::test]
async fn streams_run_through_a_snapshot_and_its_children_go_on_from_there() {
    let server = TestServer::start().await;
    let sandbox = server.create("base").await;
    start_counter(&sandbox).await;
    let before = sandbox.info().await;
    sandbox.says("head -c 48M /dev/urandom > big; echo before > state").await;
    let sum = sandbox.says("sha256sum big").await;

    let count = format!("i=0; while [ $i -lt {LINES} ]; do i=$((i+1)); echo $i; sleep 0.01; done");
    let plain = server.start_cli(&["exec", "-n", sandbox.id(), "--", "sh", "-c", &count]);
    let terminal = server.start_cli(&["exec", "-n", "--tty", sandbox.id(), "--", "sh", "-c", &count]);
    let snapshots = async {
        let mut ids = Vec::new();
        for nth in 0..SNAPSHOTS {
            let body = json!({"name": format!("point-{nth}"), "labels": {"nth": nth.to_string()}});
            ids.push(sandbox.verb("snapshots", body).await["id"].as_str().expect("an id").to_owned());
        }
        ids
    };
    let (plain, terminal, download, ids) =
        tokio::join!(lines(plain), lines(terminal), download(&sandbox, &server), snapshots);
    let expected: Vec<_> = (1..=LINES).map(|number| number.to_string()).collect();
    assert!(plain.0.success() && plain.1 == expected, "{:?} {:?}", plain.0, plain.1);
    assert!(terminal.0.success() && terminal.1 == expected, "{:?} {:?}", terminal.0, terminal.1);
    sandbox.write("/home/user/back", download).await;
    assert_eq!(sandbox.says("sha256sum < back").await.split(' ').next(), sum.split(' ').next());
    let count = check_counter(&sandbox, 0).await;
    check_clock(&sandbox).await;
    assert_eq!(sandbox.says("hostname").await, sandbox.id());
    let after = sandbox.info().await;
    for kept in ["deadline", "metadata", "idle", "on_timeout", "auto_resume"] {
        assert_eq!(after[kept], before[kept], "{kept}");
    }

    children_go_on(&server, &sandbox, &ids).await;
    roll_back(&sandbox, &ids[1], count).await;
    disk_only(&server, &sandbox).await;
    refusals(&server, &sandbox).await;
    let listed = server.cli_ok(&["snapshot", "ls", sandbox.id(), "-q"]).await;
    let all: Vec<_> = listed.lines().collect();
    assert_eq!(all.len(), SNAPSHOTS + 1, "{listed}");
    let rm = [&["snapshot", "rm"], all.as_slice()].concat();
    assert_eq!(server.cli_ok(&rm).await, listed);
    assert_eq!(server.cli_ok(&["snapshot", "ls", "-q"]).await, "");
    // What is in use of them is the machine's own now.
    check_counter(&sandbox, 0).await;
    server.stop().await;
}

async fn lines(mut child: Child) -> (ExitStatus, Vec<String>) {
    let mut text = String::new();
    child.stdout.take().expect("piped").read_to_string(&mut text).await.expect("text");
    (child.wait().await.expect("it ends"), text.lines().map(str::to_owned).collect())
}

async fn download(sandbox: &Sandbox<'_>, server: &TestServer) -> Vec<u8> {
    let request = server.request(Method::GET, &format!("/v1/sandboxes/{}/files", sandbox.id()));
    let mut answer = request.query(&[("path", "/home/user/big")]).send().await.expect("an answer");
    let mut all = Vec::new();
    while let Some(piece) = answer.chunk().await.expect("the download holds") {
        all.extend_from_slice(&piece);
    }
    assert_eq!(all.len(), DOWNLOAD_BYTES);
    all
}

async fn children_go_on(server: &TestServer, parent: &Sandbox<'_>, ids: &[String]) {
    parent.says("echo after > state").await;
    let by_name = server.create("point-0").await;
    let by_id = server.create(&ids[SNAPSHOTS - 1]).await;
    for child in [&by_name, &by_id] {
        check_counter(child, 0).await;
        check_clock(child).await;
        assert_eq!(child.says("cat state; hostname").await, format!("before\n{}", child.id()));
    }
    assert_eq!(by_id.info().await["snapshot"], *ids[SNAPSHOTS - 1]);
    let random = "head -c 16 /dev/urandom | sha256sum";
    assert_ne!(by_name.says(random).await, by_id.says(random).await);
    by_name.kill().await;
    by_id.kill().await;
}

async fn roll_back(sandbox: &Sandbox<'_>, snapshot: &str, count: u64) {
    let back = sandbox.verb("rollback", json!({"snapshot": snapshot})).await;
    assert_eq!((back["id"].as_str(), &back["snapshot"]), (Some(sandbox.id()), &json!(snapshot)));
    assert_eq!(sandbox.says("cat state; hostname").await, format!("before\n{}", sandbox.id()));
    check_clock(sandbox).await;
    // It counts again what it had counted after the snapshot, and then on.
    let last: u64 = sandbox.says("tail -n 2 count | head -n 1 | cut -d' ' -f1").await.parse().expect("a number");
    assert!(last < count, "{last} {count}");
    check_counter(sandbox, last).await;
}

async fn disk_only(server: &TestServer, sandbox: &Sandbox<'_>) {
    sandbox.says("echo unsynced > new").await;
    let id = server.cli_ok(&["snapshot", sandbox.id(), "--disk-only", "--name", "disk"]).await;
    let child = server.create(id.trim()).await;
    assert_eq!(child.says("cat new state").await, "unsynced\nbefore");
    assert_ne!(child.shell("pgrep -f '[c]ounter.py'").await.code, Some(0), "a disk has no processes");
    child.kill().await;
}

/// Each refusal has its code, and the sandbox is as it was.
async fn refusals(server: &TestServer, sandbox: &Sandbox<'_>) {
    let path = |verb: &str| format!("/v1/sandboxes/{}/{verb}", sandbox.id());
    let refused = async |path: &str, body: Value, status: StatusCode, code: &str| {
        let (found, answer) = server.try_json(Method::POST, path, Some(body)).await.expect("it answers");
        assert_eq!((found, answer["error"]["code"].as_str()), (status, Some(code)), "{path}: {answer}");
    };
    let (bad, state, unknown) = (StatusCode::BAD_REQUEST, StatusCode::CONFLICT, StatusCode::NOT_FOUND);
    for count in [json!(0), json!(101), json!(-1), json!("many")] {
        refused(&path("fork"), json!({"count": count}), bad, "invalid_argument").await;
    }
    refused(&path("snapshots"), json!({"name": ""}), bad, "invalid_argument").await;
    refused(&path("snapshots"), json!({"expires_after_seconds": 0}), bad, "invalid_argument").await;
    refused(&path("rollback"), json!({"snapshot": "nothing"}), unknown, "snapshot_not_found").await;
    refused(&path("promote"), json!({}), bad, "invalid_argument").await;
    sandbox.verb("pause", json!({"tier": "standby"})).await;
    refused(&path("snapshots"), json!({}), state, "wrong_state").await;
    refused(&path("fork"), json!({}), state, "wrong_state").await;
    sandbox.verb("resume", json!({})).await;
    let ended = server.create("base").await;
    let id = ended.id().to_owned();
    ended.kill().await;
    for verb in ["fork", "snapshots", "pause", "resume", "stop"] {
        refused(&format!("/v1/sandboxes/{id}/{verb}"), json!({}), state, "sandbox_ended").await;
    }
}
