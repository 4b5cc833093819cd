//! E2B's secrets: the workspace's own, under another name.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::support::{Answer, BASE, TestServer};

async fn ask_as(t: &TestServer, key: &str, method: Method, path: &str, body: Value) -> Answer {
    let request = t.client.request(method, t.url(path)).header("Host", format!("api.e2b.{BASE}"));
    Answer::of(request.header("X-API-Key", key).json(&body)).await
}

async fn ask(t: &TestServer, method: Method, path: &str, body: Value) -> Answer {
    ask_as(t, &t.key, method, path, body).await
}

async fn create(t: &TestServer, body: Value) -> Answer {
    ask(t, Method::POST, "/secrets", body).await
}

#[tokio::test]
async fn a_secret_is_the_same_through_both_apis_and_nobody_elses() {
    let t = TestServer::start().await;
    let made = create(&t, json!({"name": "Key", "value": "hidden-1", "metadata": {"a": "b"}})).await;
    assert_eq!(made.status, StatusCode::CREATED, "{made:?}");
    let id = made.json["secretID"].as_str().expect("an id").to_owned();
    assert!(id.starts_with("sec_") && id.len() == 30, "{id}");
    let native = t.get("/v1/secrets/key").await.json;
    assert_eq!((&native["id"], &native["hosts"]), (&json!(id), &json!(["*"])));
    assert_eq!(native["metadata"], json!({"a": "b"}));

    // An update here keeps the hosts that were given there, one there keeps the labels that were given here.
    let body = json!({"value": "hidden-2", "hosts": ["a.example"]});
    Answer::of(t.request(Method::PUT, "/v1/secrets/key").json(&body)).await;
    let updated = ask(&t, Method::POST, &format!("/secrets/{id}"), json!({"value": "hidden-3"})).await;
    assert_eq!((updated.status, &updated.json["currentVersion"]), (StatusCode::OK, &json!(3)), "{updated:?}");
    assert_eq!(updated.json["metadata"], json!({"a": "b"}));
    let native = t.get("/v1/secrets/key").await.json;
    assert_eq!((&native["id"], &native["hosts"]), (&json!(id), &json!(["a.example"])));
    assert!(!format!("{made:?}{updated:?}{native}").contains("hidden"));

    for (method, body) in
        [(Method::GET, json!({})), (Method::POST, json!({"value": "mine"})), (Method::DELETE, json!({}))]
    {
        for name in [id.as_str(), "key"] {
            let theirs = ask_as(&t, &t.stranger, method.clone(), &format!("/secrets/{name}"), body.clone()).await;
            assert_eq!(theirs.status, StatusCode::NOT_FOUND, "{method} {name}: {theirs:?}");
        }
    }
    let theirs = ask_as(&t, &t.stranger, Method::GET, "/secrets", json!({})).await;
    assert_eq!(theirs.json, json!([]));

    // A new one of the same name is another.
    let path = format!("/secrets/{id}");
    assert_eq!(ask(&t, Method::DELETE, &path, json!({})).await.status, StatusCode::NO_CONTENT);
    assert_eq!(ask(&t, Method::DELETE, &path, json!({})).await.status, StatusCode::NOT_FOUND);
    let again = create(&t, json!({"name": "key", "value": "v"})).await;
    assert_eq!((again.status, &again.json["currentVersion"]), (StatusCode::CREATED, &json!(1)));
    assert_ne!(again.json["secretID"], json!(id));
}

#[tokio::test]
async fn what_is_wrong_is_refused_and_changes_nothing() {
    let t = TestServer::start().await;
    let good = json!({"name": "key", "value": "v"});
    assert_eq!(create(&t, good.clone()).await.status, StatusCode::CREATED);
    for name in ["key", "KEY"] {
        let taken = create(&t, json!({"name": name, "value": "w"})).await;
        assert_eq!((taken.status, &taken.json["code"]), (StatusCode::CONFLICT, &json!(409)), "{taken:?}");
    }
    assert_eq!(ask(&t, Method::GET, "/secrets/key", json!({})).await.json["currentVersion"], 1);
    let labels = |count: usize, value: &str| -> Value {
        (0..count).map(|at| (at.to_string(), json!(value))).collect::<serde_json::Map<_, _>>().into()
    };
    for (field, value) in [
        ("name", json!("a.b")),
        ("name", json!("sec_a")),
        ("value", json!("two\nlines")),
        ("value", json!("")),
        ("value", Value::Null),
        ("metadata", labels(33, "v")),
        ("metadata", labels(1, &"v".repeat(1025))),
        ("metadata", labels(32, &"v".repeat(300))),
        ("metadata", json!({"": "v"})),
        ("metadata", json!({"a": 1})),
        ("hosts", json!(["a.example"])),
    ] {
        let mut bad = json!({"name": "other", "value": "v"});
        bad[field] = value;
        let refused = create(&t, bad.clone()).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{bad}: {refused:?}");
    }
    // What is made, and not kept, has no value to be given.
    let client = json!({"token_url": "https://login.example/token", "client_id": "me"});
    let body = json!({"hosts": ["a.example"], "oauth": client, "client_secret": "c"});
    Answer::of(t.request(Method::PUT, "/v1/secrets/oauth").json(&body)).await;
    let refused = ask(&t, Method::POST, "/secrets/oauth", json!({"value": "v"})).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{refused:?}");
    for query in ["limit=0", "limit=101", "limit=x"] {
        let refused = ask(&t, Method::GET, &format!("/secrets?{query}"), json!({})).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{query}: {refused:?}");
    }
}

#[tokio::test]
async fn a_value_of_the_wrong_type_is_not_repeated() {
    let t = TestServer::start().await;
    let refused = create(&t, json!({"name": "key", "value": 424_242})).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
    let message = refused.json["message"].as_str().expect("a message");
    assert!(message.contains("value: expected a string") && !message.contains("424242"), "{message}");
}

#[tokio::test]
async fn pages_hold_each_secret_once() {
    let t = TestServer::start().await;
    for name in ["c", "a", "e", "b", "d"] {
        create(&t, json!({"name": name, "value": "v"})).await;
    }
    let mut seen = Vec::new();
    let mut token = String::new();
    loop {
        let page = ask(&t, Method::GET, &format!("/secrets?limit=2&nextToken={token}"), json!({})).await;
        let names = page.json.as_array().expect("a list").iter().map(|secret| secret["name"].clone());
        seen.extend(names);
        match page.headers.get("x-next-token") {
            Some(next) => token = next.to_str().expect("text").to_owned(),
            None => break,
        }
    }
    assert_eq!(json!(seen), json!(["a", "b", "c", "d", "e"]));
}

#[tokio::test]
async fn placeholders_name_secrets_as_they_are_kept() {
    let t = TestServer::start().await;
    let body = json!({"value": "v", "hosts": ["*"]});
    Answer::of(t.request(Method::PUT, "/v1/secrets/NATIVE").json(&body)).await;
    let headers = json!({"x": "${e2b.secrets.NATIVE} ${e2b.secrets.Later}"});
    let rules = json!({"a.example": [{"transform": {"headers": headers}}]});
    let made = ask(&t, Method::POST, "/v2/sandboxes", json!({"templateID": "base", "network": {"rules": rules}})).await;
    let id = made.json["sandboxID"].as_str().unwrap_or_else(|| panic!("{made:?}")).to_owned();
    let header = async || {
        let network = t.get(&format!("/v1/sandboxes/{id}/network")).await.json;
        network["network"]["policy"]["http"][0]["action"]["set_headers"]["x"].clone()
    };
    assert_eq!(header().await, "${secrets.NATIVE} ${secrets.later}");
    let headers = json!({"x": "${e2b.secrets.LATER}"});
    let rules = json!({"rules": {"a.example": [{"transform": {"headers": headers}}]}});
    let put = ask(&t, Method::PUT, &format!("/sandboxes/{id}/network"), rules).await;
    assert_eq!(put.status, StatusCode::NO_CONTENT, "{put:?}");
    assert_eq!(header().await, "${secrets.later}");
}
