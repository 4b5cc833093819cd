//! What sandboxes start from, and who may come in.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::support::{Answer, BASE, TestServer};

async fn put(t: &TestServer, path: &str, body: &Value) -> Answer {
    Answer::of(t.request(Method::PUT, path).json(body)).await
}

async fn network_of(t: &TestServer, sandbox: &str) -> Value {
    t.get(&format!("/v1/sandboxes/{sandbox}/network")).await.json["network"].clone()
}

async fn create(t: &TestServer, body: Value) -> String {
    let made = t.post("/v1/sandboxes", &body).await;
    made.json["id"].as_str().unwrap_or_else(|| panic!("{made:?}")).to_owned()
}

#[tokio::test]
async fn a_sandbox_starts_from_the_nearest_default_and_keeps_it() {
    let t = TestServer::start().await;
    const WORKSPACE: &str = "/v1/network/default";
    const TEMPLATE: &str = "/v1/templates/base/network";
    let from = async |path: &str| t.get(path).await.json["from"].clone();
    assert_eq!((from(WORKSPACE).await, from(TEMPLATE).await), (json!("operator"), json!("operator")));
    assert_eq!(network_of(&t, &t.create().await).await, json!({}));

    let wide = json!({"allow": ["workspace.example"]});
    let near = json!({"internet": false, "previews": "public"});
    assert_eq!(put(&t, WORKSPACE, &wide).await.status, StatusCode::OK);
    assert_eq!((from(WORKSPACE).await, from(TEMPLATE).await), (json!("workspace"), json!("workspace")));
    let first = t.create().await;
    assert_eq!(network_of(&t, &first).await, wide);
    assert_eq!(put(&t, TEMPLATE, &near).await.json, json!({"from": "template", "network": near}));
    let second = t.create().await;
    assert_eq!(network_of(&t, &second).await, near);
    let own = json!({"deny": ["a.example"]});
    assert_eq!(network_of(&t, &create(&t, json!({"network": own})).await).await, own);

    // What is there keeps what it has; so does what is made of it.
    let snapshot = t.post(&format!("/v1/sandboxes/{first}/snapshots"), &json!({})).await.json;
    let forks = t.post(&format!("/v1/sandboxes/{first}/fork"), &json!({"count": 1})).await.json;
    let child = forks["items"][0]["sandbox"]["id"].as_str().expect("a child").to_owned();
    let again = create(&t, json!({"template": snapshot["id"]})).await;
    for sandbox in [&first, &child, &again] {
        assert_eq!(network_of(&t, sandbox).await, wide);
    }

    // Those of others are their own.
    let theirs = Answer::of(t.client.get(t.url(TEMPLATE)).bearer_auth(&t.stranger)).await;
    assert_eq!(theirs.json["from"], "operator");
    assert_eq!(t.delete(TEMPLATE).await.status, StatusCode::NO_CONTENT);
    assert_eq!(network_of(&t, &t.create().await).await, wide);
    assert_eq!(t.delete(WORKSPACE).await.status, StatusCode::NO_CONTENT);
    assert_eq!(t.delete(WORKSPACE).await.status, StatusCode::NO_CONTENT);
    assert_eq!(network_of(&t, &t.create().await).await, json!({}));
}

#[tokio::test]
async fn a_default_no_sandbox_could_have_is_refused() {
    let t = TestServer::start().await;
    let refused = async |path: &str, body: Value| put(&t, path, &body).await;
    let bad = refused("/v1/network/default", json!({"allow": ["a b"]})).await;
    assert_eq!((bad.status, bad.code()), (StatusCode::BAD_REQUEST, "invalid_argument"));
    let bad = refused("/v1/network/default", json!({"secrets": [{"secret": "none", "env": "A"}]})).await;
    assert_eq!((bad.status, bad.code()), (StatusCode::NOT_FOUND, "secret_not_found"));
    let bad = refused("/v1/network/default", json!({"mask_request_host": "a b"})).await;
    assert!(bad.message().contains("mask_request_host"), "{bad:?}");
    let bad = refused("/v1/templates/none/network", json!({})).await;
    assert_eq!((bad.status, bad.code()), (StatusCode::NOT_FOUND, "template_not_found"));
    assert_eq!(t.get("/v1/network/default").await.json["from"], "operator");
}

#[tokio::test]
async fn a_refusal_names_the_field_as_it_was_written() {
    let t = TestServer::start().await;
    put(&t, "/v1/secrets/one", &json!({"hosts": ["api.example"], "value": "hidden-4711"})).await;
    let using = |more: Value| {
        let mut one = json!({"secret": "one", "env": "ONE"});
        one.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        json!({"policy": {"substitutions": [{"placeholder": "stk_0123456789012345678901234", "secret": "one",
                                             "hosts": ["api.example"]}]}, "secrets": [one]})
    };
    let many: Vec<_> = (0..2_001).map(|at| format!("h{at}.example")).collect();
    for (network, field) in [
        (json!({"policy": {"rules": [{"action": "allow", "cidrs": ["300.0.0.0/8"]}]}}), "policy.rules[0].cidrs[0]: "),
        (json!({"policy": {"http": [{"hosts": [], "action": "deny"}]}}), "policy.http[0].hosts: "),
        (json!({"policy": {"egress_proxy": {"url": "ftp://a.example"}}}), "policy.egress_proxy"),
        (json!({"allow": ["a.example", "a b"]}), "allow[1]: "),
        (json!({"allow": ["a.example", "10.0.0.0/8"]}), "allow[1]: 10.0.0.0/8 cannot be opened"),
        (json!({"deny": ["b.example"], "allow": ["[fd00::1]:22"]}), "allow[0]: "),
        (json!({"allow": ["mail.example:25"]}), "allow[0]: 25 cannot be opened: the operator has closed it"),
        (
            json!({"policy": {"rules": [{"action": "allow", "cidrs": ["169.254.169.254"]}]}}),
            "policy.rules[0].cidrs[0]: ",
        ),
        (json!({"deny": many}), "allow and deny: "),
        (using(json!({"header_names": ["a b"]})), "secrets[0].header_names"),
        (using(json!({"env": "PATH"})), "secrets[0].env: PATH "),
        (using(json!({"env": "LD_PRELOAD"})), "secrets[0].env: LD_PRELOAD "),
        (using(json!({"env": "SSL_CERT_FILE"})), "secrets[0].env: SSL_CERT_FILE "),
    ] {
        let refused = t.post("/v1/sandboxes", &json!({"network": network})).await;
        assert_eq!((refused.status, refused.code()), (StatusCode::BAD_REQUEST, "invalid_argument"), "{network}");
        assert!(refused.message().starts_with(&format!("network {field}")), "{}", refused.message());
    }
    create(&t, json!({"network": using(json!({"env": "LDAP_PATH"}))})).await;
}

#[tokio::test]
async fn secrets_take_a_value_or_a_client_and_never_give_either_back() {
    let t = TestServer::start().await;
    let client = json!({"token_url": "https://login.example/token", "client_id": "me", "scopes": ["a"]});
    let good = json!({"hosts": ["a.example"], "oauth": client, "client_secret": "hidden-4711"});
    let kept = put(&t, "/v1/secrets/one", &good).await;
    assert_eq!((&kept.json["source"], &kept.json["version"]), (&json!("oauth"), &json!(1)), "{kept:?}");
    let shown = t.get("/v1/secrets/one").await.json;
    assert_eq!(shown["oauth"]["token_url"], "https://login.example/token");
    assert!(!shown.to_string().contains("hidden") && !kept.json.to_string().contains("hidden"));
    let mut both = good.clone();
    both["value"] = json!("hidden-4711");
    let mut without = good.clone();
    without.as_object_mut().expect("an object").remove("client_secret");
    let wrong_url = |url: &str| {
        let mut bad = good.clone();
        bad["oauth"]["token_url"] = json!(url);
        bad
    };
    for bad in [
        both,
        without,
        json!({"hosts": ["a.example"]}),
        wrong_url("http://login.example/"),
        wrong_url("https://u:p@login.example/"),
        json!({"hosts": ["a.example"], "command": ["/bin/sh"]}),
        json!({"hosts": ["a.example"], "mint": {"command": ["/bin/sh"]}}),
    ] {
        let refused = put(&t, "/v1/secrets/two", &bad).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{bad}: {refused:?}");
        assert!(!refused.json.to_string().contains("hidden"), "{refused:?}");
    }
    let value = json!({"hosts": ["a.example"], "value": "plain-4711"});
    let kept = put(&t, "/v1/secrets/one", &value).await;
    assert_eq!((&kept.json["source"], &kept.json["version"]), (&json!("value"), &json!(2)));
}

#[tokio::test]
async fn an_explanation_knows_where_secrets_may_go() {
    let t = TestServer::start().await;
    put(&t, "/v1/secrets/one", &json!({"hosts": ["api.example"], "value": "hidden-4711"})).await;
    let rule = |host: &str, secret: &str| json!({"hosts": [host], "action": {"set_headers": {"x-key": format!("${{secrets.{secret}}}")}}});
    let http = [rule("api.example", "one"), rule("other.example", "one"), rule("late.example", "none")];
    let network = json!({"policy": {"http": http}, "secrets": [{"secret": "one", "env": "ONE"}]});
    let id = create(&t, json!({"network": network})).await;
    let explain = async |host: &str| {
        let url = json!({"url": format!("https://{host}/")});
        t.post(&format!("/v1/sandboxes/{id}/network/explain"), &url).await.json
    };
    let good = explain("api.example").await;
    assert_eq!((&good["allowed"], &good["secrets"]), (&json!(true), &json!(["one"])), "{good}");
    for (host, reason) in [
        ("other.example", "secret one may not be sent to other.example"),
        ("late.example", "secret none does not exist"),
    ] {
        let told = explain(host).await;
        assert_eq!((&told["allowed"], &told["reason"]), (&json!(false), &json!(reason)), "{told}");
        assert_eq!((&told["mode"], &told["secrets"]), (&json!("refuse"), &json!([])), "{told}");
    }
    // One that may go elsewhere by now is not said to be used, and is not needed.
    put(&t, "/v1/secrets/one", &json!({"hosts": ["moved.example"], "value": "hidden-4711"})).await;
    let policy = json!({"secrets": [{"secret": "one", "env": "ONE"}]});
    put(&t, &format!("/v1/sandboxes/{id}/network"), &policy).await;
    assert_eq!(explain("moved.example").await["secrets"], json!(["one"]));
    put(&t, "/v1/secrets/one", &json!({"hosts": ["api.example"], "value": "hidden-4711"})).await;
    let moved = explain("moved.example").await;
    assert_eq!((&moved["allowed"], &moved["secrets"]), (&json!(true), &json!([])), "{moved}");
}

async fn e2b(t: &TestServer, method: Method, path: &str, body: &Value) -> Answer {
    let request = t.client.request(method, t.url(path)).header("Host", format!("api.e2b.{BASE}"));
    Answer::of(request.header("X-API-Key", &t.key).json(body)).await
}

#[tokio::test]
async fn ports_without_public_traffic_take_the_sandboxs_token() {
    let t = TestServer::start().await;
    let body = json!({"templateID": "base", "network": {"allowPublicTraffic": false}});
    let open = e2b(&t, Method::POST, "/sandboxes", &body).await;
    assert_eq!(open.status, StatusCode::BAD_REQUEST, "an unsecured sandbox has no tokens: {open:?}");
    let made = e2b(&t, Method::POST, "/v2/sandboxes", &body).await;
    let text = |answer: &Value, name: &str| answer[name].as_str().map(str::to_owned);
    let id = text(&made.json, "sandboxID").unwrap_or_else(|| panic!("{made:?}"));
    let token = text(&made.json, "trafficAccessToken").unwrap_or_else(|| panic!("{made:?}"));
    let look = async |id: &str, port: u16, token: Option<&str>| {
        let mut request = t.client.get(t.url("/")).header("Host", format!("{port}-{id}.e2b.{BASE}"));
        if let Some(token) = token {
            request = request.header("E2b-Traffic-Access-Token", token);
        }
        Answer::of(request).await
    };
    let others = e2b(&t, Method::POST, "/v2/sandboxes", &body).await;
    let others = text(&others.json, "trafficAccessToken").expect("a token of its own");
    for wrong in [None, Some(others.as_str()), Some("")] {
        let refused = look(&id, 8000, wrong).await;
        assert_eq!((refused.status, &refused.json["code"]), (StatusCode::FORBIDDEN, &json!(403)), "{refused:?}");
        assert!(refused.json["message"].is_string());
    }
    // Let in: nobody listens there.
    let passed = look(&id, 8000, Some(&token)).await;
    assert_eq!(passed.status, StatusCode::BAD_GATEWAY, "{passed:?}");
    assert_ne!(look(&id, 49983, None).await.status, StatusCode::FORBIDDEN, "the agent has a token of its own");

    // An update of the rest keeps it; it cannot be undone by one.
    let path = format!("/sandboxes/{id}/network");
    assert_eq!(e2b(&t, Method::PUT, &path, &json!({"denyOut": ["1.1.1.1"]})).await.status, StatusCode::NO_CONTENT);
    assert_eq!(look(&id, 8000, None).await.status, StatusCode::FORBIDDEN);
    let undo = e2b(&t, Method::PUT, &path, &json!({"allowPublicTraffic": true})).await;
    assert_eq!(undo.status, StatusCode::BAD_REQUEST, "{undo:?}");
    let forks = e2b(&t, Method::POST, &format!("/sandboxes/{id}/fork"), &json!({})).await;
    let child = &forks.json[0]["sandbox"];
    let (child, token) = (text(child, "sandboxID").expect("a child"), text(child, "trafficAccessToken"));
    assert_eq!(look(&child, 8000, None).await.status, StatusCode::FORBIDDEN);
    assert_eq!(look(&child, 8000, token.as_deref()).await.status, StatusCode::BAD_GATEWAY);

    let open = e2b(&t, Method::POST, "/v2/sandboxes", &json!({"templateID": "base"})).await;
    assert_eq!(open.json["trafficAccessToken"], Value::Null);
    let id = text(&open.json, "sandboxID").expect("an id");
    assert_eq!(look(&id, 8000, None).await.status, StatusCode::BAD_GATEWAY);
}

#[tokio::test]
async fn a_change_of_some_of_a_network_leaves_the_rest() {
    let t = TestServer::start().await;
    let own = json!({"allow": ["a.example"], "previews": "public", "mask_request_host": "localhost"});
    let id = create(&t, json!({"network": own})).await;
    let path = format!("/v1/sandboxes/{id}/network");
    let patch = async |body: Value| Answer::of(t.request(Method::PATCH, &path).json(&body)).await;
    let changed = patch(json!({"internet": false, "mask_request_host": ""})).await;
    assert_eq!(changed.json["network"], json!({"internet": false, "previews": "public"}), "{changed:?}");
    assert_eq!(patch(json!({"previews": "private"})).await.json["network"], json!({"internet": false}));
    for (wrong, code) in [(json!({"deny": ["a b"]}), "invalid_argument"), (json!({"allowed": []}), "invalid_argument")]
    {
        let refused = patch(wrong).await;
        assert_eq!((refused.status, refused.code()), (StatusCode::BAD_REQUEST, code), "{refused:?}");
    }
    assert_eq!(network_of(&t, &id).await, json!({"internet": false}));
}
