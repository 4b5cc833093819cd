//! E2B's control API: what sandboxes go through beside create and kill.

use std::time::Duration;

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use stockade_engine::fake::{Moment, Step};

use crate::support::{Answer, BASE, TestServer};

async fn ask(t: &TestServer, method: Method, path: &str, body: Value) -> Answer {
    let request = t.client.request(method, t.url(path)).header("Host", format!("api.e2b.{BASE}"));
    Answer::of(request.header("X-API-Key", &t.key).json(&body)).await
}

async fn post(t: &TestServer, path: &str, body: Value) -> Answer {
    ask(t, Method::POST, path, body).await
}

async fn get(t: &TestServer, path: &str) -> Value {
    let answer = ask(t, Method::GET, path, json!({})).await;
    assert_eq!(answer.status, StatusCode::OK, "{path}: {answer:?}");
    answer.json
}

/// A sandbox's id.
async fn create(t: &TestServer, body: Value) -> String {
    let made = post(t, "/v2/sandboxes", body).await;
    assert_eq!(made.status, StatusCode::CREATED, "{made:?}");
    made.json["sandboxID"].as_str().expect("an id").to_owned()
}

async fn ids(t: &TestServer, state: &str) -> Vec<String> {
    let list = get(t, &format!("/v2/sandboxes?state={state}")).await;
    let id = |item: &Value| item["sandboxID"].as_str().expect("an id").to_owned();
    list.as_array().expect("a list").iter().map(id).collect()
}

#[tokio::test]
async fn a_paused_sandbox_is_listed_as_such_and_connect_brings_it_back_under_its_id() {
    let t = TestServer::start().await;
    for memory in [true, false] {
        let id = create(&t, json!({"templateID": "base"})).await;
        let paused = post(&t, &format!("/sandboxes/{id}/pause"), json!({"memory": memory})).await;
        assert_eq!(paused.status, StatusCode::NO_CONTENT, "{paused:?}");
        assert_eq!(get(&t, &format!("/sandboxes/{id}")).await["state"], "paused");
        assert!(ids(&t, "paused").await.contains(&id) && !ids(&t, "running").await.contains(&id));
        let again = post(&t, &format!("/sandboxes/{id}/pause"), json!({})).await;
        assert_eq!(again.status, StatusCode::CONFLICT, "{again:?}");
        for (path, status) in [("v2/", StatusCode::CREATED), ("v2/", StatusCode::OK), ("", StatusCode::OK)] {
            let connected = post(&t, &format!("/{path}sandboxes/{id}/connect"), json!({"timeout": 100})).await;
            assert_eq!((connected.status, &connected.json["sandboxID"]), (status, &json!(id)), "{connected:?}");
        }
        assert_eq!(get(&t, &format!("/sandboxes/{id}")).await["state"], "running");
    }
}

#[tokio::test]
async fn resume_is_for_paused_sandboxes_alone() {
    let t = TestServer::start().await;
    let id = create(&t, json!({"templateID": "base"})).await;
    let resume = format!("/sandboxes/{id}/resume");
    assert_eq!(post(&t, &resume, json!({})).await.status, StatusCode::CONFLICT);
    let pause = format!("/sandboxes/{id}/pause");
    assert_eq!(post(&t, &pause, json!({})).await.status, StatusCode::NO_CONTENT);
    for wrong in [json!({"autoPause": true}), json!({"timeout": 0})] {
        let refused = post(&t, &resume, wrong).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{refused:?}");
    }
    assert_eq!(post(&t, &resume, json!({"timeout": 60})).await.status, StatusCode::CREATED);
    let unknown = post(&t, "/sandboxes/sbxaaaaaaaaaaaaaaaaaaaa/pause", json!({})).await;
    assert_eq!(unknown.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn memory_that_was_kept_is_dropped_where_asked_for() {
    let t = TestServer::start().await;
    for path in ["resume", "connect"] {
        let id = create(&t, json!({"templateID": "base"})).await;
        assert_eq!(post(&t, &format!("/sandboxes/{id}/pause"), json!({})).await.status, StatusCode::NO_CONTENT);
        assert_eq!(get(&t, &format!("/sandboxes/{id}")).await["pauseMode"], "full");
        let back = post(&t, &format!("/sandboxes/{id}/{path}"), json!({"timeout": 60, "memory": false})).await;
        assert_eq!(back.status, StatusCode::CREATED, "{back:?}");
        assert!(get(&t, &format!("/sandboxes/{id}")).await["pauseMode"].is_null());
    }
}

#[tokio::test]
async fn a_strict_pause_needs_a_guest_that_answers() {
    let t = TestServer::start().await;
    let id = create(&t, json!({"templateID": "base"})).await;
    let (pause, strict) = (format!("/sandboxes/{id}/pause"), json!({"requireHealthyGuest": true}));
    assert_eq!(post(&t, &pause, strict.clone()).await.status, StatusCode::NO_CONTENT);
    post(&t, &format!("/sandboxes/{id}/connect"), json!({"timeout": 60})).await;

    for machine in t.host.machines() {
        t.host.silence(&machine);
    }
    let refused = post(&t, &pause, strict).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE, "{refused:?}");
    assert!(refused.json["message"].as_str().is_some_and(|text| text.contains("was not paused")), "{refused:?}");
    assert_eq!(get(&t, &format!("/sandboxes/{id}")).await["state"], "running");
    assert_eq!(post(&t, &pause, json!({})).await.status, StatusCode::NO_CONTENT);
}

#[tokio::test]
async fn a_guest_that_was_paused_while_it_did_not_answer_is_told_by_the_code_the_sdks_know() {
    let t = TestServer::start_with(|config| config.step_patience = Duration::from_secs(2)).await;
    let id = create(&t, json!({"templateID": "base"})).await;
    assert_eq!(post(&t, &format!("/sandboxes/{id}/pause"), json!({})).await.status, StatusCode::NO_CONTENT);
    for path in ["connect", "resume"] {
        let _silence = t.host.hang(Step::Link, Moment::Before);
        let refused = post(&t, &format!("/sandboxes/{id}/{path}"), json!({"timeout": 60})).await;
        assert_eq!(refused.status, StatusCode::CONFLICT, "{refused:?}");
        assert_eq!(refused.json["error_code"], "sandbox_snapshot_guest_agent_unresponsive");
        assert_eq!(get(&t, &format!("/sandboxes/{id}")).await["state"], "paused");
    }
    let back = post(&t, &format!("/sandboxes/{id}/connect"), json!({"timeout": 60, "memory": false})).await;
    assert_eq!(back.status, StatusCode::CREATED, "{back:?}");
}

#[tokio::test]
async fn a_timeout_that_keeps_the_disk_alone_is_a_pause_of_the_file_system() {
    let t = TestServer::start().await;
    let id = create(&t, json!({"templateID": "base", "autoPause": true, "autoPauseMemory": false})).await;
    assert_eq!(get(&t, &format!("/sandboxes/{id}")).await["lifecycle"]["onTimeout"], "pause");
    post(&t, &format!("/sandboxes/{id}/timeout"), json!({"timeout": 0})).await;
    let paused = get(&t, &format!("/sandboxes/{id}")).await;
    assert_eq!((&paused["state"], &paused["pauseMode"]), (&json!("paused"), &json!("filesystem")));
    let back = post(&t, &format!("/sandboxes/{id}/connect"), json!({"timeout": 60})).await;
    assert_eq!(back.status, StatusCode::CREATED, "{back:?}");
}

#[tokio::test]
async fn a_timeout_of_zero_does_what_the_timeout_would() {
    let t = TestServer::start().await;
    let body = json!({"templateID": "base", "autoPause": true, "autoResume": {"enabled": true}});
    let id = create(&t, body).await;
    let lifecycle = get(&t, &format!("/sandboxes/{id}")).await["lifecycle"].clone();
    assert_eq!(lifecycle, json!({"autoResume": true, "onTimeout": "pause"}));
    for _ in 0..2 {
        let ended = post(&t, &format!("/sandboxes/{id}/timeout"), json!({"timeout": 0})).await;
        assert_eq!(ended.status, StatusCode::NO_CONTENT);
        assert_eq!(get(&t, &format!("/sandboxes/{id}")).await["state"], "paused");
    }
    let plain = create(&t, json!({"templateID": "base"})).await;
    assert_eq!(
        get(&t, &format!("/sandboxes/{plain}")).await["lifecycle"],
        json!({"autoResume": false, "onTimeout": "kill"})
    );
    post(&t, &format!("/sandboxes/{plain}/timeout"), json!({"timeout": 0})).await;
    let gone = ask(&t, Method::GET, &format!("/sandboxes/{plain}"), json!({})).await;
    assert_eq!(gone.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn forks_are_sandboxes_of_their_own_and_need_a_running_parent() {
    let t = TestServer::start().await;
    let id = create(&t, json!({"templateID": "base", "metadata": {"a": "1"}})).await;
    let fork = format!("/sandboxes/{id}/fork");
    let forked = post(&t, &fork, json!({"count": 2, "timeout": 60})).await;
    assert_eq!(forked.status, StatusCode::CREATED, "{forked:?}");
    let children = forked.json.as_array().expect("a list");
    assert_eq!(children.len(), 2);
    for child in children {
        let child = child["sandbox"]["sandboxID"].as_str().unwrap_or_else(|| panic!("no sandbox: {forked:?}"));
        assert_ne!(child, id);
        assert_eq!(get(&t, &format!("/sandboxes/{child}")).await["metadata"], json!({"a": "1"}));
    }
    for wrong in [json!({"count": 0}), json!({"count": -1}), json!({"count": 101}), json!({"timeout": 0})] {
        let refused = post(&t, &fork, wrong).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{refused:?}");
    }
    post(&t, &format!("/sandboxes/{id}/pause"), json!({})).await;
    assert_eq!(post(&t, &fork, json!({})).await.status, StatusCode::CONFLICT);
}

#[tokio::test]
async fn a_snapshot_is_listed_started_from_and_deleted_like_a_template() {
    let t = TestServer::start().await;
    let id = create(&t, json!({"templateID": "base"})).await;
    let taken = post(&t, &format!("/sandboxes/{id}/snapshots"), json!({"name": "Mine"})).await;
    assert_eq!((taken.status, &taken.json["names"]), (StatusCode::CREATED, &json!(["mine"])), "{taken:?}");
    let snapshot = taken.json["snapshotID"].as_str().expect("an id");
    let other = create(&t, json!({"templateID": "base"})).await;
    assert_eq!(get(&t, &format!("/snapshots?sandboxID={id}")).await, json!([taken.json]));
    assert_eq!(get(&t, "/snapshots?name=mine&limit=1").await, json!([taken.json]));
    assert_eq!(get(&t, &format!("/snapshots?sandboxID={other}")).await, json!([]));
    let path = format!("/templates/{snapshot}");
    for name in [snapshot, "Mine", &format!("{snapshot}:default")] {
        let child = create(&t, json!({"templateID": name})).await;
        let needed = ask(&t, Method::DELETE, &path, json!({})).await;
        let told = needed.json["message"].as_str().unwrap_or_default();
        assert!(needed.status == StatusCode::BAD_REQUEST && told.contains(&child), "{needed:?}");
        assert_eq!(
            ask(&t, Method::DELETE, &format!("/sandboxes/{child}"), json!({})).await.status,
            StatusCode::NO_CONTENT
        );
    }
    assert_eq!(ask(&t, Method::DELETE, &path, json!({})).await.status, StatusCode::NO_CONTENT);
    assert_eq!(ask(&t, Method::DELETE, &path, json!({})).await.status, StatusCode::NOT_FOUND);
    assert_eq!(post(&t, "/v2/sandboxes", json!({"templateID": snapshot})).await.status, StatusCode::NOT_FOUND);
    let template = ask(&t, Method::DELETE, "/templates/base", json!({})).await;
    assert_eq!(template.status, StatusCode::BAD_REQUEST);
    assert!(template.json["message"].as_str().is_some_and(|text| text.contains("template of the server")));
}

#[tokio::test]
async fn a_sandbox_with_mcp_servers_needs_a_template_with_a_gateway() {
    let t = TestServer::start().await;
    let servers = json!({"exa": {"apiKey": "k"}});
    create(&t, json!({"templateID": "base", "mcp": servers})).await;
    let missing = post(&t, "/v2/sandboxes", json!({"templateID": "mcp-gateway", "mcp": servers})).await;
    assert_eq!(missing.status, StatusCode::NOT_FOUND);
    let message = missing.json["message"].as_str().unwrap_or_default();
    assert!(message.starts_with("template 'mcp-gateway' not found: build one"), "{missing:?}");
    let nonsense = post(&t, "/v2/sandboxes", json!({"templateID": "base", "mcp": "exa"})).await;
    assert_eq!(nonsense.status, StatusCode::BAD_REQUEST);
    assert!(nonsense.json["message"].as_str().is_some_and(|text| text.contains("mcp")), "{nonsense:?}");
}

/// A new sandbox's guest, as E2B's clients speak to it: the host and its token.
async fn guest(t: &TestServer) -> (String, String) {
    let made = post(t, "/v2/sandboxes", json!({"templateID": "base"})).await;
    let of = |field: &str| made.json[field].as_str().expect("it is told").to_owned();
    (format!("49983-{}.e2b.{BASE}", of("sandboxID")), of("envdAccessToken"))
}

#[tokio::test]
async fn an_upload_that_cannot_be_unpacked_is_the_clients_fault_and_said_so() {
    let t = TestServer::start().await;
    let (host, token) = guest(&t).await;
    for (encoding, status, words) in [
        ("gzip", StatusCode::BAD_REQUEST, "the body cannot be read"),
        ("br", StatusCode::UNSUPPORTED_MEDIA_TYPE, "\"br\" is not known"),
    ] {
        let request = t.client.post(t.url("/files?path=/tmp/broken-upload")).header("Host", &host);
        let request = request.header("X-Access-Token", &token).header("Content-Encoding", encoding);
        let refused = Answer::of(request.header("Content-Type", "application/octet-stream").body("abc")).await;
        assert_eq!(refused.status, status, "{refused:?}");
        assert_eq!(refused.json["code"], status.as_u16());
        assert!(refused.json["message"].as_str().is_some_and(|text| text.contains(words)), "{refused:?}");
    }
}

#[tokio::test]
async fn a_client_with_another_encoding_is_told_which_one_there_is() {
    let t = TestServer::start().await;
    let (host, token) = guest(&t).await;
    let call = |path: &str, content_type: &str| {
        let request = t.client.post(t.url(path)).header("Host", &host).header("X-Access-Token", &token);
        Answer::of(request.header("Content-Type", content_type).body("\n\x01a"))
    };
    for (path, given, accepted) in [
        ("/process.Process/List", "application/proto", "application/json"),
        ("/filesystem.Filesystem/Stat", "application/grpc", "application/json"),
        ("/process.Process/Start", "application/connect+proto", "application/connect+json"),
    ] {
        let refused = call(path, given).await;
        assert_eq!(refused.status, StatusCode::UNSUPPORTED_MEDIA_TYPE, "{refused:?}");
        assert_eq!(refused.headers["accept-post"], accepted);
        let message = format!(
            "Content-Type is {given}; it must be {accepted}; messages in protobuf's binary form and gRPC are not \
             supported: set the client to Connect with JSON"
        );
        assert_eq!(refused.json, json!({"code": "unimplemented", "message": message}));
    }
    let refused = call("/process.Process/List", "text/plain").await;
    assert_eq!(refused.json["message"], "Content-Type is text/plain; it must be application/json");
}
