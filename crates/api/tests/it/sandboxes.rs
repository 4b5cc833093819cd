//! Sandboxes, templates and the server's own pages.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::{Answer, TestServer};

#[tokio::test]
async fn the_server_says_what_it_is() {
    let t = TestServer::start().await;
    assert_eq!(t.get("/v1/health").await.json, json!({"status": "ok"}));
    let version = t.get("/v1/version").await;
    assert_eq!(version.json["engine"]["name"], "fake");
    assert_eq!(version.json["engine"]["isolation"], "none");
    let document = t.get("/v1/openapi.json").await;
    assert_eq!(document.json["paths"]["/v1/health"]["get"]["security"], json!([{}]));
    assert!(document.json["components"]["schemas"]["ErrorEnvelope"].is_object());
}

#[tokio::test]
async fn templates_are_found_by_name_and_id() {
    let t = TestServer::start().await;
    let list = t.get("/v1/templates").await;
    let template = &list.json["items"][0];
    assert_eq!((&template["name"], &template["state"]), (&json!("base"), &json!("ready")));
    assert_eq!(template["created_at"], "2026-01-02T03:04:05.000Z");
    let id = template["id"].as_str().expect("an id");
    assert_eq!(t.get(&format!("/v1/templates/{id}")).await.json, *template);
    assert_eq!(t.get("/v1/templates/base").await.json, *template);
}

#[tokio::test]
async fn a_sandbox_lives_from_create_to_kill_and_leaves_a_record() {
    let t = TestServer::start().await;
    let made = t.post("/v1/sandboxes", &json!({"metadata": {"a": "1"}, "env": {"K": "canary"}})).await;
    assert_eq!(made.status, 201);
    assert!(!made.json.to_string().contains("canary"), "environment values are not shown: {made:?}");
    let id = made.json["id"].as_str().expect("an id");
    assert_eq!((&made.json["state"], &made.json["ending"]), (&json!("running"), &Value::Null));
    assert_eq!(made.json["shape"], json!({"vcpus": 1, "memory_mib": 512, "disk_mib": 1024}));
    assert_eq!(t.get(&format!("/v1/sandboxes/{id}")).await.json, made.json);
    assert_eq!(t.get("/v1/sandboxes?metadata=a%3D1").await.json["items"][0]["id"], id);
    assert_eq!(t.get("/v1/sandboxes?metadata=a%3D2").await.json["items"], json!([]));

    assert_eq!(t.delete(&format!("/v1/sandboxes/{id}")).await.status, 204);
    let again = t.delete(&format!("/v1/sandboxes/{id}")).await;
    assert_eq!((again.status.as_u16(), again.code()), (409, "sandbox_ended"));
    let record = t.get(&format!("/v1/sandboxes/{id}")).await;
    assert_eq!((&record.json["state"], &record.json["ending"]["cause"]["kind"]), (&json!("gone"), &json!("killed")));
    assert_eq!(t.get("/v1/sandboxes").await.json["items"], json!([]));
    assert_eq!(t.get("/v1/sandboxes?state=gone,failed").await.json["items"][0]["id"], id);
    let exec = t.run(id, &json!({"shell": "true"})).await;
    assert_eq!((exec.status.as_u16(), exec.code()), (409, "sandbox_ended"));
    assert!(t.host.machines().is_empty());
}

#[tokio::test]
async fn a_filter_by_a_template_nobody_knows_is_told_and_not_an_empty_list() {
    let t = TestServer::start().await;
    let unknown = t.get("/v1/sandboxes?template=nope").await;
    assert_eq!((unknown.status.as_u16(), unknown.code()), (404, "template_not_found"));
    assert_eq!(t.get("/v1/sandboxes?template=base").await.json["items"], json!([]));
}

#[tokio::test]
async fn extending_never_shortens_and_setting_does() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let path = format!("/v1/sandboxes/{id}");
    let before = t.get(&path).await.json["deadline"].as_str().expect("a time").to_owned();
    let extended = t.post(&format!("{path}/extend"), &json!({"lifetime_seconds": 1})).await;
    assert_eq!(extended.json["deadline"], before);
    let extended = t.post(&format!("{path}/extend"), &json!({"lifetime_seconds": 3600.5})).await;
    assert!(extended.json["deadline"].as_str() > Some(&before));
    let set = Answer::of(t.request(Method::PATCH, &path).json(&json!({"lifetime_seconds": 100}))).await;
    assert!(set.json["deadline"].as_str() < Some(&before), "{set:?}");
    let far = Answer::of(t.request(Method::PATCH, &path).json(&json!({"lifetime_seconds": 1e12}))).await;
    assert_eq!((far.status.as_u16(), far.code()), (400, "invalid_argument"));
    assert_eq!(far.message(), "lifetime is over this server's maximum of 86400 s");
}

#[tokio::test]
async fn an_idempotency_key_gives_one_sandbox_and_refuses_another_request() {
    let t = TestServer::start().await;
    let create = async |key: &str, body: Value| {
        Answer::of(t.request(Method::POST, "/v1/sandboxes").header("idempotency-key", key).json(&body)).await
    };
    let first = create("k1", json!({})).await;
    let second = create("k1", json!({})).await;
    assert_eq!((second.status.as_u16(), &second.json["id"]), (201, &first.json["id"]));
    let other = create("k1", json!({"metadata": {"a": "b"}})).await;
    assert_eq!((other.status.as_u16(), other.code()), (409, "idempotency_conflict"));
    assert_eq!(create("", json!({})).await.status, 400);
    assert_eq!(create(&"k".repeat(256), json!({})).await.status, 400);
    assert_eq!(t.host.machines().len(), 1);
}

#[tokio::test]
async fn pages_follow_one_another_without_gap_or_double() {
    let t = TestServer::start().await;
    let mut made = Vec::new();
    for _ in 0..5 {
        made.push(t.create().await);
    }
    let (mut seen, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = t.get(&format!("/v1/sandboxes?order=asc&limit=2{cursor}")).await;
        let items = page.json["items"].as_array().expect("items");
        seen.extend(items.iter().map(|item| item["id"].as_str().expect("an id").to_owned()));
        match page.json["cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    assert_eq!(seen, made);
    let bad = t.get("/v1/sandboxes?cursor=nonsense").await;
    assert_eq!((bad.status.as_u16(), bad.code()), (400, "invalid_argument"));
}

#[tokio::test]
async fn a_full_host_says_so_and_when_to_come_back() {
    let t = TestServer::start().await;
    t.host.set_full(true);
    let refused = t.post("/v1/sandboxes", &json!({})).await;
    assert_eq!((refused.status.as_u16(), refused.code()), (503, "no_capacity"));
    assert!(refused.headers.contains_key("retry-after"));
}
