//! The archive in a service that speaks S3: Moto's server, on this host.

use std::{process::Stdio, time::Duration};

use reqwest::{Client, Method};
use serde_json::json;
use stockade_system_tests::{Sandbox, TestServer, target_directory};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
};

use crate::lifecycle::{check_clock, check_counter, start_counter};

const BUCKET: &str = "sandboxes";

/// A server of Moto's; it ends with this.
struct S3 {
    url: String,
    client: Client,
    _process: Child,
}

impl S3 {
    async fn start() -> Self {
        let python = target_directory().join("python/s3-moto/bin/python");
        assert!(python.exists(), "{} is missing: make test installs it", python.display());
        let mut process = Command::new(python)
            .args(["-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("python starts");
        let mut lines = BufReader::new(process.stderr.take().expect("piped")).lines();
        let url = loop {
            let line = lines.next_line().await.expect("readable").expect("it says where it listens");
            if let Some((_, url)) = line.split_once("Running on ") {
                break url.trim().to_owned();
            }
        };
        // It writes a line for each request.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        let s3 = Self { url, client: Client::new(), _process: process };
        let made = s3.client.put(format!("{}/{BUCKET}", s3.url)).send().await.expect("it answers");
        assert!(made.status().is_success(), "{}", made.status());
        s3
    }

    /// What is in the bucket, as S3 lists it.
    async fn list(&self) -> Vec<String> {
        let listing = self.client.get(format!("{}/{BUCKET}?list-type=2", self.url)).send().await.expect("it answers");
        let text = listing.text().await.expect("a list");
        let keys = text.split("<Key>").skip(1);
        keys.map(|rest| rest.split("</Key>").next().unwrap_or_default().to_owned()).collect()
    }

    /// Puts an object in another's place; returns the other.
    async fn replace(&self, key: &str, bytes: Vec<u8>) -> Vec<u8> {
        let request = |method: Method| {
            let request = self.client.request(method, format!("{}/{BUCKET}/{key}", self.url));
            // It looks at whether there is a signature, not at what it says.
            request.header("authorization", "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request")
        };
        let got = request(Method::GET).send().await.expect("it answers");
        assert!(got.status().is_success(), "{}", got.status());
        let before = got.bytes().await.expect("an object").to_vec();
        let put = request(Method::PUT).body(bytes).send().await.expect("it answers");
        assert!(put.status().is_success(), "{}", put.status());
        before
    }
}

/// Sandboxes whose files are on this host.
fn here(server: &TestServer) -> usize {
    std::fs::read_dir(server.data_dir().join("paused")).expect("a directory").count()
}

async fn archived(server: &TestServer, id: &str, state: &str) {
    let info = Sandbox::new(server, id).info().await;
    assert_eq!((&info["state"], &info["tier"]), (&json!(state), &json!("archived")), "{info}");
}

#[tokio::test]
async fn sandboxes_come_back_from_s3_after_every_local_file_of_theirs_is_gone() {
    let s3 = S3::start().await;
    let environment = [
        ("AWS_ENDPOINT", s3.url.as_str()),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
    ];
    let arguments = ["--pool", "0", "--archive", "s3://sandboxes/of-this/host"];
    let mut server = TestServer::start_in(&target_directory().join("t"), &arguments, &environment).await;
    let (paused, stopped) = (server.create("base").await.id().to_owned(), server.create("base").await.id().to_owned());
    {
        let [paused, stopped] = [&paused, &stopped].map(|id| Sandbox::new(&server, id));
        start_counter(&paused).await;
        // Larger than one part of an upload.
        paused.says("head -c 24M /dev/urandom > big; sha256sum big > sum").await;
        stopped.says("echo kept > file").await;
        assert_eq!(server.cli_ok(&["pause", "--archive", paused.id()]).await, "paused\n");
        stopped.verb("stop", json!({})).await;
        assert_eq!(here(&server), 1);
        stopped.verb("pause", json!({ "tier": "archived" })).await;
    }
    assert_eq!(here(&server), 0, "nothing of them is on this host");
    let keys = s3.list().await;
    assert!(keys.iter().all(|key| key.starts_with("of-this/host/")), "{keys:?}");
    assert_eq!(keys.iter().filter(|key| key.ends_with(".json")).count(), 2, "{keys:?}");

    server.note_cgroups();
    server.send_kill();
    server.reap().await;
    server.start_again().await;
    archived(&server, &paused, "paused").await;
    archived(&server, &stopped, "stopped").await;
    assert_eq!(s3.list().await, keys, "the new server has removed nothing");

    resume_despite_damage(&server, &s3, [&paused, &stopped]).await;
    let [paused, stopped] = [&paused, &stopped].map(|id| Sandbox::new(&server, id));
    for sandbox in [&paused, &stopped] {
        check_clock(sandbox).await;
    }
    check_counter(&paused, 0).await;
    paused.says("sha256sum --check --quiet sum").await;
    assert_eq!(stopped.says("cat file").await, "kept");
    let forgotten = async {
        while !s3.list().await.is_empty() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    assert!(tokio::time::timeout(Duration::from_secs(30), forgotten).await.is_ok(), "{:?}", s3.list().await);
    server.stop().await;
}

/// Resumes both. An object of one is not what was put there: that one is refused and stays, the other is not harmed. What
/// is mended is whole again.
async fn resume_despite_damage(server: &TestServer, s3: &S3, ids: [&str; 2]) {
    let keys = s3.list().await;
    let object = keys.iter().find(|key| !key.ends_with(".json")).expect("an object");
    let whole = s3.replace(object, b"spoilt".to_vec()).await;
    let mut refused = Vec::new();
    for id in ids {
        let body = json!({ "lifetime_seconds": 3600 });
        let path = format!("/v1/sandboxes/{id}/resume");
        let (status, answer) = server.try_json(Method::POST, &path, Some(body)).await.expect("it answers");
        if !status.is_success() {
            assert_eq!(answer["error"]["code"], "saved_state_damaged", "{answer}");
            refused.push(Sandbox::new(server, id));
        }
    }
    assert_eq!(refused.len(), 1);
    assert_eq!(refused[0].info().await["tier"], "archived");
    s3.replace(object, whole).await;
    refused[0].verb("resume", json!({ "lifetime_seconds": 3600 })).await;
}
