//! Down and up again, snapshots and forks.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::{Answer, TestServer};

async fn done(t: &TestServer, path: &str, body: Value) -> Value {
    let answer = t.post(path, &body).await;
    assert!(answer.status.is_success(), "{path}: {answer:?}");
    answer.json
}

#[tokio::test]
async fn a_sandbox_goes_down_each_way_and_comes_back_under_its_id() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let path = |verb: &str| format!("/v1/sandboxes/{id}/{verb}");
    for (body, state, tier) in [
        (json!({"tier": "standby"}), "paused", json!("standby")),
        (json!({}), "paused", json!("hibernated")),
        (json!({"tier": "archived"}), "paused", json!("archived")),
        (json!({"memory": false}), "stopped", Value::Null),
    ] {
        let paused = done(&t, &path("pause"), body.clone()).await;
        assert_eq!((&paused["id"], &paused["state"], &paused["tier"]), (&json!(id), &json!(state), &tier));
        let again = done(&t, &path("pause"), body).await;
        assert_eq!((&again["state"], &again["tier"], &again["deadline"]), (&json!(state), &tier, &paused["deadline"]));
        let resumed = done(&t, &path("resume"), json!({"lifetime_seconds": 60})).await;
        assert_eq!(
            (&resumed["id"], &resumed["state"], &resumed["tier"]),
            (&json!(id), &json!("running"), &Value::Null)
        );
    }
    assert_eq!(done(&t, &path("stop"), json!({})).await["state"], "stopped");
    assert_eq!(done(&t, &path("stop"), json!({})).await["state"], "stopped", "it is already");
    let other = t.post(&path("pause"), &json!({})).await;
    assert_eq!((other.status.as_u16(), other.code()), (409, "wrong_state"), "its memory is gone");
    assert_eq!(done(&t, &path("start"), json!({})).await["state"], "running");
    let wrong = t.post(&path("pause"), &json!({"memory": false, "tier": "standby"})).await;
    assert_eq!((wrong.status.as_u16(), wrong.code()), (400, "invalid_argument"));
    assert_eq!(t.get(&format!("/v1/sandboxes/{id}")).await.json["state"], "running");
}

#[tokio::test]
async fn rules_given_at_create_are_shown_and_wake_a_paused_sandbox() {
    let t = TestServer::start().await;
    let made = done(&t, "/v1/sandboxes", json!({"on_timeout": "pause", "auto_resume": true})).await;
    assert_eq!((&made["on_timeout"], &made["auto_resume"]), (&json!("pause"), &json!(true)));
    let id = made["id"].as_str().expect("an id");
    done(&t, &format!("/v1/sandboxes/{id}/pause"), json!({})).await;
    assert_eq!(t.run(id, &json!({"shell": "true"})).await.status, 200);
    assert_eq!(t.get(&format!("/v1/sandboxes/{id}")).await.json["state"], "running");
    let plain = t.create().await;
    done(&t, &format!("/v1/sandboxes/{plain}/pause"), json!({})).await;
    let refused = t.run(&plain, &json!({"shell": "true"})).await;
    assert_eq!((refused.status.as_u16(), refused.code()), (409, "wrong_state"));
}

#[tokio::test]
async fn a_snapshot_is_found_started_from_rolled_back_to_and_deleted() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let body = json!({"name": "first", "labels": {"a": "1"}, "expires_after_seconds": 3600});
    let taken = done(&t, &format!("/v1/sandboxes/{id}/snapshots"), body).await;
    assert_eq!((&taken["sandbox"], &taken["memory"]), (&json!(id), &json!(true)));
    assert!(taken["expires_at"].is_string());
    let snapshot = taken["id"].as_str().expect("an id");
    let path = format!("/v1/snapshots/{snapshot}");
    assert_eq!(t.get(&path).await.json, taken);
    assert_eq!(t.get("/v1/snapshots/first").await.json, taken);
    for (query, count) in [("", 1), ("?label=a%3D1&limit=5", 1), ("?label=a%3D2", 0), ("?name=second", 0)] {
        let list = t.get(&format!("/v1/snapshots{query}")).await;
        assert_eq!(list.json["items"].as_array().map(Vec::len), Some(count), "{query}: {list:?}");
    }
    let child = done(&t, "/v1/sandboxes", json!({"template": "first"})).await;
    assert_eq!(child["snapshot"], snapshot);
    let back = done(&t, &format!("/v1/sandboxes/{id}/rollback"), json!({"snapshot": snapshot})).await;
    assert_eq!((&back["id"], &back["state"]), (&json!(id), &json!("running")));

    for (method, path) in [(Method::GET, path.as_str()), (Method::DELETE, &path)] {
        let foreign = Answer::of(t.client.request(method, t.url(path)).bearer_auth(&t.stranger)).await;
        assert_eq!((foreign.status.as_u16(), foreign.code()), (404, "snapshot_not_found"));
    }
    assert_eq!(t.delete("/v1/snapshots/first").await.code(), "snapshot_not_found");
    assert_eq!(t.delete(&path).await.status, 204);
    assert_eq!(t.delete(&path).await.code(), "snapshot_not_found");
}

#[tokio::test]
async fn a_child_can_take_its_parents_place() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let forked = done(&t, &format!("/v1/sandboxes/{id}/fork"), json!({"count": 2, "metadata": {"n": "1"}})).await;
    let items = forked["items"].as_array().expect("a list");
    assert_eq!(items.len(), 2);
    for item in items {
        assert_eq!((&item["error"], &item["sandbox"]["parent"]), (&Value::Null, &json!(id)), "{item}");
        assert_eq!(item["sandbox"]["metadata"], json!({"n": "1"}));
    }
    let child = items[0]["sandbox"]["id"].as_str().expect("an id");
    let promoted = done(&t, &format!("/v1/sandboxes/{child}/promote"), json!({})).await;
    assert_eq!((&promoted["id"], &promoted["state"]), (&json!(id), &json!("running")));
    assert_eq!(t.get(&format!("/v1/sandboxes/{child}")).await.json["state"], "gone");
    let orphan = t.post(&format!("/v1/sandboxes/{id}/promote"), &json!({})).await;
    assert_eq!((orphan.status.as_u16(), orphan.code()), (400, "invalid_argument"));
    let none = t.post(&format!("/v1/sandboxes/{id}/fork"), &json!({"count": 0})).await;
    assert_eq!((none.status.as_u16(), none.code()), (400, "invalid_argument"));
}

#[tokio::test]
async fn idle_rules_are_given_shown_and_changed_and_nonsense_is_named() {
    let t = TestServer::start().await;
    let idle = json!({"standby_after_seconds": 60, "delete_after_seconds": 600});
    let made = done(&t, "/v1/sandboxes", json!({"idle": idle})).await;
    let shown = json!({"standby_after_seconds": 60.0, "hibernate_after_seconds": null,
        "archive_after_seconds": null, "delete_after_seconds": 600.0, "busy_percent": null});
    assert_eq!(made["idle"], shown);
    let id = made["id"].as_str().expect("an id");
    let path = format!("/v1/sandboxes/{id}");
    let change = async |body: Value| Answer::of(t.request(Method::PATCH, &path).json(&body)).await;
    done(&t, &format!("{path}/pause"), json!({})).await;
    let changed = change(json!({"auto_resume": true, "on_timeout": "stop", "idle": {}})).await;
    assert_eq!(changed.status, 200, "{changed:?}");
    assert_eq!((&changed.json["state"], &changed.json["auto_resume"]), (&json!("paused"), &json!(true)));
    assert_eq!(changed.json["idle"]["standby_after_seconds"], Value::Null);
    assert_eq!(t.get(&path).await.json, changed.json, "it is recorded");
    for bad in [
        json!({}),
        json!({"idle": {"standby_after_seconds": 0}}),
        json!({"idle": {"standby_after_seconds": -1}}),
        json!({"idle": {"standby_after_seconds": 2, "hibernate_after_seconds": 1}}),
        json!({"idle": {"busy_percent": 0}}),
        json!({"idle": {"busy_percent": 101}}),
        json!({"idle": {"sleep_after_seconds": 1}}),
        json!({"on_timeout": "explode"}),
    ] {
        let refused = change(bad.clone()).await;
        assert_eq!((refused.status.as_u16(), refused.code()), (400, "invalid_argument"), "{bad}");
    }
    let foreign = t.client.patch(t.url(&path)).bearer_auth(&t.stranger).json(&json!({"auto_resume": false}));
    assert_eq!(Answer::of(foreign).await.code(), "sandbox_not_found");
}

#[tokio::test]
async fn what_is_kept_is_booted_from_its_disk_if_asked_for() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let taken = done(&t, &format!("/v1/sandboxes/{id}/snapshots"), json!({})).await;
    let from_disk = |template: &Value| json!({"template": template, "memory": false});
    let child = done(&t, "/v1/sandboxes", from_disk(&taken["id"])).await;
    assert_eq!((&child["state"], &child["snapshot"]), (&json!("running"), &taken["id"]));
    let refused = t.post("/v1/sandboxes", &from_disk(&json!("base"))).await;
    assert_eq!((refused.status.as_u16(), refused.code()), (400, "invalid_argument"));
    for tier in ["standby", "hibernated"] {
        done(&t, &format!("/v1/sandboxes/{id}/pause"), json!({"tier": tier})).await;
        let back = done(&t, &format!("/v1/sandboxes/{id}/resume"), json!({"memory": false})).await;
        assert_eq!((&back["state"], &back["id"]), (&json!("running"), &json!(id)), "{tier}");
        assert_eq!(t.run(&id, &json!({"shell": "true"})).await.status, 200, "{tier}");
    }
}

#[tokio::test]
async fn usage_is_told_by_sandbox_label_and_time_as_json_and_csv() {
    let t = TestServer::start().await;
    let made = done(&t, "/v1/sandboxes", json!({"metadata": {"team": "a,\"b\""}})).await;
    let id = made["id"].as_str().expect("an id");
    let plain = t.create().await;
    let report = t.get(&format!("/v1/usage?sandbox={id}")).await;
    assert_eq!((report.status.as_u16(), report.json["items"].as_array().map(Vec::len)), (200, Some(1)), "{report:?}");
    assert_eq!(report.json["items"][0]["metadata"], made["metadata"]);
    assert_eq!(report.json["prices"]["memory_gib_second"], 0.0000045);
    let by_label = t.get("/v1/usage?by=label:team").await;
    let labels: Vec<_> = by_label.json["items"].as_array().expect("a list").iter().map(|item| &item["label"]).collect();
    assert_eq!(labels, [&Value::Null, &json!("a,\"b\"")]);
    let csv = t.request(Method::GET, "/v1/usage?format=csv").send().await.expect("an answer");
    assert_eq!(csv.headers()["content-type"], "text/csv; charset=utf-8");
    let text = csv.text().await.expect("text");
    assert!(text.contains("\"{\"\"team\"\":\"\"a,\\\"\"b\\\"\"\"\"}\""), "{text}");
    assert!(text.contains(&plain) && text.lines().count() == 3, "{text}");
    let none = t.get("/v1/usage?to=2020-01-01T00:00:00Z").await;
    assert_eq!(none.json["items"], json!([]));
    for bad in ["from=2026-01-02T00:00:00Z&to=2026-01-01T00:00:00Z", "by=label:", "step=week", "sandboxes=x"] {
        let refused = t.get(&format!("/v1/usage?{bad}")).await;
        assert_eq!((refused.status.as_u16(), refused.code()), (400, "invalid_argument"), "{bad}");
    }
    let foreign = Answer::of(t.client.get(t.url("/v1/usage")).bearer_auth(&t.stranger)).await;
    assert_eq!(foreign.json["items"], json!([]));
}
