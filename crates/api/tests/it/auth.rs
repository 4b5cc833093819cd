//! Every route × no, bogus and foreign credential; the list of routes is the OpenAPI document's.

use reqwest::{Method, StatusCode};
use serde_json::Value;

use crate::support::{Answer, TestServer};

/// Every operation of the document, with ids filled in.
fn operations(sandbox: &str) -> Vec<(Method, String)> {
    let document = serde_json::to_value(stockade_api::document()).expect("a document");
    let paths = document["paths"].as_object().expect("paths");
    let mut operations = Vec::new();
    for (path, item) in paths {
        let path = path.replace("{id}", sandbox).replace("{process}", "1").replace("{template}", "base");
        let path = path.replace("{snapshot}", "snapaaaaaaaaaaaaaaaaaaaa").replace("{context}", "any");
        let path = path.replace("{port}", "80").replace("{name}", "any").replace("{key}", "any");
        for method in item.as_object().expect("operations").keys().filter(|key| *key != "parameters") {
            operations.push((method.to_uppercase().parse().expect("a method"), path.clone()));
        }
    }
    operations
}

#[tokio::test]
async fn without_a_valid_key_every_route_but_health_is_401() {
    let t = TestServer::start().await;
    let mut seen = 0;
    for (method, path) in operations("sbxaaaaaaaaaaaaaaaaaaaa") {
        let plain = || t.client.request(method.clone(), t.url(&path));
        let bogus = "e2b_0123456789012345678901234567890123456789";
        let attempts = [
            plain(),
            plain().bearer_auth(bogus),
            plain().header("x-api-key", bogus),
            plain().basic_auth(&t.key, Some("")),
        ];
        for attempt in attempts {
            let answer = Answer::of(attempt).await;
            if path == "/v1/health" {
                assert_eq!(answer.status, 200);
                continue;
            }
            assert_eq!((answer.status, answer.code()), (StatusCode::UNAUTHORIZED, "unauthorized"), "{method} {path}");
            assert!(!answer.json.to_string().contains(bogus));
            seen += 1;
        }
    }
    assert!(seen > 80, "only {seen} attempts: is the document whole?");
}

#[tokio::test]
async fn paths_that_are_no_route_are_401_too() {
    let t = TestServer::start().await;
    let paths =
        ["/", "/v1", "/v1/", "/v1/nothing", "/v1/health/", "/v1/%68ealth", "/v1//health", "/v1/../v1/health?", "/x"];
    for path in paths {
        let raw =
            t.raw(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").as_bytes()).await;
        assert!(raw.starts_with("HTTP/1.1 401 "), "{path}: {raw}");
    }
    for method in ["POST", "DELETE", "OPTIONS", "TRACE", "BREW"] {
        let request = format!("{method} /v1/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        assert!(t.raw(request.as_bytes()).await.starts_with("HTTP/1.1 401 "), "{method}");
    }
}

#[tokio::test]
async fn a_foreign_sandbox_is_as_unknown_as_one_that_never_was() {
    let t = TestServer::start().await;
    let sandbox = t.create().await;
    let mut seen = 0;
    for (method, path) in operations(&sandbox).into_iter().filter(|(_, path)| path.contains(&sandbox)) {
        let path = with_parameters(&method, &path);
        let request = |path: &str| {
            let request = t.client.request(method.clone(), t.url(path)).bearer_auth(&t.stranger);
            let request = match body(path) {
                Some(body) if takes_json(&method, path) => request.json(&body),
                _ => request,
            };
            if path.contains("/ws") { websocket(request) } else { request }
        };
        let foreign = Answer::of(request(&path)).await;
        assert_eq!(
            (foreign.status.as_u16(), foreign.code()),
            (404, "sandbox_not_found"),
            "{method} {path}: {foreign:?}"
        );
        let unknown = Answer::of(request(&path.replace(&sandbox, "sbxaaaaaaaaaaaaaaaaaaaa"))).await;
        let blank = |answer: &Answer, id: &str| answer.json.to_string().replace(id, "ID");
        assert_eq!(blank(&foreign, &sandbox), blank(&unknown, "sbxaaaaaaaaaaaaaaaaaaaa"), "{method} {path}");
        seen += 1;
    }
    assert!(seen >= 31, "only {seen} routes: is the document whole?");

    let list = Answer::of(t.client.get(t.url("/v1/sandboxes?state=running")).bearer_auth(&t.stranger)).await;
    assert_eq!(list.json["items"], Value::Array(Vec::new()));
    assert_eq!(t.get(&format!("/v1/sandboxes/{sandbox}")).await.json["state"], "running");
}

fn with_parameters(method: &Method, path: &str) -> String {
    let is_files_query = path.ends_with("/files") || (method == Method::GET && path.contains("/files/"));
    if is_files_query { format!("{path}?path=/tmp") } else { path.to_owned() }
}

fn takes_json(method: &Method, path: &str) -> bool {
    method == Method::POST || method == Method::PATCH || method == Method::PUT && path.ends_with("/network")
}

/// A body each route accepts, so that nothing but the sandbox is wrong.
fn body(path: &str) -> Option<Value> {
    use serde_json::json;
    let last = path.split('?').next()?.rsplit('/').next()?;
    Some(match last {
        "exec" | "run" => json!({"shell": "true"}),
        "pause" | "resume" | "snapshots" | "fork" => json!({}),
        "code" => json!({"code": "1"}),
        "contexts" | "restart" => json!({}),
        "network" => json!({}),
        "previews" => json!({"port": 80}),
        "explain" => json!({"url": "https://a.example/"}),
        "rollback" => json!({"snapshot": "any"}),
        "extend" => json!({"lifetime_seconds": 10}),
        "signal" => json!({"signal": "TERM"}),
        "resize" => json!({"cols": 1, "rows": 1}),
        "mkdir" | "attributes" => json!({"path": "/tmp/x"}),
        "rename" => json!({"from": "/tmp/x", "to": "/tmp/y"}),
        "symlink" => json!({"target": "/tmp/x", "path": "/tmp/y"}),
        "stdin" => return None,
        _ => json!({"lifetime_seconds": 10}),
    })
}

fn websocket(request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
    request
        .header("connection", "upgrade")
        .header("upgrade", "websocket")
        .header("sec-websocket-version", "13")
        .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
}
