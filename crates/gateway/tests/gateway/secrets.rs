//! Credentials that never enter a guest.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{Request, header};
use serde_json::{Value, json};
use stockade_gateway::broker;

use super::{
    servers::{Http1, Reply, full, get, http2},
    world::World,
};

const VALUE: &str = "sk-live-8f3b";

fn policy(token: &str, more: Value) -> Value {
    let mut substitution = json!({"placeholder": token, "secret": "API_KEY", "hosts": ["api.example"]});
    for (key, value) in more.as_object().unwrap() {
        substitution[key] = value.clone();
    }
    json!({
        "rules": [{"id": "web", "action": "allow", "names": ["*.example", "api.example"]}],
        "intercept": {"always": ["other.example"]},
        "substitutions": [substitution],
    })
}

/// No record may hold a value, whatever happened.
fn no_value_in_records(world: &World) {
    let records = serde_json::to_string(&world.records()).unwrap();
    assert!(!records.contains(VALUE) && !records.contains(&STANDARD.encode(format!("u:{VALUE}"))), "{records}");
}

#[tokio::test]
async fn a_token_becomes_the_value_on_the_wire_only() {
    let world = World::new();
    world.secret("API_KEY", VALUE);
    let server = world.https("api.example", "93.184.216.34", &["h2", "http/1.1"]).await;
    let token = broker::placeholder();
    let (guest, _attachment) = world.attach(policy(&token, json!({})));
    let bearer = format!("Bearer {token}");
    let request = Request::get("/v1?k=1").header(header::HOST, "api.example").header("authorization", &bearer);
    assert_eq!(world.get_inside(&guest, request).await.status, 200);
    assert_eq!(server.last()["headers"]["authorization"], json!([format!("Bearer {VALUE}")]));
    let tls = world.connect_tls(&guest, "api.example", true, &["h2"]).await.unwrap();
    let request = Request::get("https://api.example/").header("x-api-key", &token).body(full("")).unwrap();
    assert_eq!(http2(tls).await.send_request(request).await.unwrap().status(), 200);
    assert_eq!(server.last()["headers"]["x-api-key"], json!([VALUE]));
    let basic = format!("Basic {}", STANDARD.encode(format!("u:{token}")));
    let request = Request::get("/").header(header::HOST, "api.example").header("authorization", basic);
    world.get_inside(&guest, request).await;
    let expected = format!("Basic {}", STANDARD.encode(format!("u:{VALUE}")));
    assert_eq!(server.last()["headers"]["authorization"], json!([expected]));
    let used = world.record("forwarded").await;
    assert_eq!(used.facts.secrets, ["API_KEY"]);
    no_value_in_records(&world);
}

#[tokio::test]
async fn a_token_sent_elsewhere_is_stopped_and_reported() {
    let world = World::new();
    world.secret("API_KEY", VALUE);
    let other = world.https("other.example", "93.184.216.35", &["http/1.1"]).await;
    let plain = world.http("plain.example", "93.184.216.36").await;
    let api = world.http("api.example", "93.184.216.34").await;
    let token = broker::placeholder();
    let (guest, _attachment) = world.attach(policy(&token, json!({})));
    let basic = format!("Basic {}", STANDARD.encode(format!("{token}:")));
    for request in [
        Request::get("/").header("authorization", format!("Bearer {token}")),
        Request::get("/").header("authorization", basic),
        Request::get("/").header("x-anything", format!("a{token}b")),
        Request::get(format!("/?q={token}")),
        Request::get(format!("/{token}/x")),
    ] {
        let reply = world.get_inside(&guest, request.header(header::HOST, "other.example")).await;
        assert_eq!((reply.status.as_u16(), reply.code().as_str()), (403, "token_misplaced"));
        assert!(!String::from_utf8_lossy(&reply.body).contains(VALUE));
    }
    // In a body, cut anywhere.
    let tls = world.connect_tls(&guest, "other.example", true, &["http/1.1"]).await.unwrap();
    let request = Request::post("/").header(header::HOST, "other.example").body(full(format!("a={token}"))).unwrap();
    assert_eq!(Http1::over(tls).await.send(request).await.code(), "token_misplaced");
    // In clear text not even to its own host.
    for host in ["plain.example", "api.example"] {
        let mut request = get(host, "/");
        request.headers_mut().insert("x-api-key", token.parse().unwrap());
        let stream = guest.connect_name(host, 80).await.unwrap();
        assert_eq!(Http1::over(stream).await.send(request).await.code(), "token_misplaced");
    }
    assert_eq!((plain.count(), api.count(), other.count()), (0, 0, 0));
    let report = world.record("token_misplaced").await;
    assert_eq!(report.facts.secrets, ["API_KEY"]);
    no_value_in_records(&world);
}

#[tokio::test]
async fn where_the_policy_says_pass_a_foreign_token_goes_unchanged() {
    let world = World::new();
    world.secret("API_KEY", VALUE);
    let other = world.https("other.example", "93.184.216.35", &["http/1.1"]).await;
    let token = broker::placeholder();
    let (guest, _attachment) = world.attach(policy(&token, json!({"other_host": "pass"})));
    let request = Request::get("/").header(header::HOST, "other.example").header("x-api-key", &token);
    assert_eq!(world.get_inside(&guest, request).await.status, 200);
    assert_eq!(other.last()["headers"]["x-api-key"], json!([token]));
}

#[tokio::test]
async fn headers_that_servers_echo_and_places_not_named_keep_the_token() {
    let world = World::new();
    world.secret("API_KEY", VALUE);
    let server = world.https("api.example", "93.184.216.34", &["http/1.1"]).await;
    let token = broker::placeholder();
    let (guest, _attachment) = world.attach(policy(&token, json!({})));
    let escaped: String = token.bytes().map(|byte| format!("%{byte:02x}")).collect();
    let request = Request::get(format!("/?a={token}&b={escaped}"))
        .header(header::HOST, "api.example")
        .header("user-agent", &token)
        .header("x-forwarded-for", &token)
        .header("x-b64", STANDARD.encode(&token));
    assert_eq!(world.get_inside(&guest, request).await.status, 200);
    assert!(!server.last().to_string().contains(VALUE));
    let (guest, _attachment) = world.attach(policy(&token, json!({"header_names": ["x-only"]})));
    let request = Request::get("/").header(header::HOST, "api.example").header("x-only", &token).header("x-b", &token);
    world.get_inside(&guest, request).await;
    assert_eq!(server.last()["headers"]["x-only"], json!([VALUE]));
    assert_eq!(server.last()["headers"]["x-b"], json!([token]));
}

#[tokio::test]
async fn query_and_body_are_replaced_where_asked() {
    let world = World::new();
    world.secret("API_KEY", "a b&c");
    let server = world.https("api.example", "93.184.216.34", &["http/1.1"]).await;
    let token = broker::placeholder();
    let places = json!({"in": {"headers": false, "basic": false, "query": true, "body": true}});
    let (guest, _attachment) =
        world.attach_with(policy(&token, places), |spec| spec.limits.substituted_body_bytes = 10_000);
    let post = async |body: String| {
        let tls = world.connect_tls(&guest, "api.example", true, &["http/1.1"]).await.unwrap();
        let request = Request::post(format!("/?k={token}")).header(header::HOST, "api.example");
        Http1::over(tls).await.send(request.body(full(body)).unwrap()).await
    };
    assert_eq!(post(format!("[\"{token}\"]")).await.status, 200);
    assert_eq!(server.last()["path"], "/?k=a%20b%26c");
    assert_eq!(server.last()["body"], "[\"a b&c\"]");
    assert_eq!(server.last()["headers"]["content-length"], json!(["9"]));
    assert_eq!(post("x".repeat(20_000)).await.code(), "body_too_large");
}

#[tokio::test]
async fn an_echo_is_masked_where_asked() {
    let world = World::new();
    world.secret("API_KEY", VALUE);
    world.https("api.example", "93.184.216.34", &["http/1.1"]).await;
    let token = broker::placeholder();
    let (guest, _attachment) = world.attach(policy(&token, json!({"mask_echo": true})));
    let request = Request::get("/").header(header::HOST, "api.example").header("authorization", &token);
    let reply = world.get_inside(&guest, request).await;
    assert_eq!(reply.headers["x-echo"], token.as_str());
    assert_eq!(reply.json()["headers"]["authorization"], json!([token]));
    assert!(!String::from_utf8_lossy(&reply.body).contains(VALUE));
}

#[tokio::test]
async fn an_echo_of_what_a_rule_put_in_is_masked_where_asked() {
    let world = World::new();
    world.secret("API_KEY", VALUE);
    world.https("api.example", "93.184.216.34", &["h2", "http/1.1"]).await;
    let injecting = |more: Value| {
        let mut rule = json!({"id": "inject", "hosts": ["api.example"],
                              "action": {"set_headers": {"authorization": "Bearer ${secrets.API_KEY}"}}});
        rule.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"rules": [{"action": "allow", "names": ["*.example"]}], "http": [rule]})
    };
    let token = broker::placeholder();
    // What is written into the rule itself; by a reference in it; by the secret's token, wherever the value came from; not at all.
    let by_rule = injecting(json!({"mask_echo": true}));
    let mut by_token = injecting(json!({}));
    by_token["substitutions"] = policy(&token, json!({"mask_echo": true}))["substitutions"].clone();
    let mut literal = injecting(json!({"mask_echo": true}));
    literal["http"][0]["action"]["set_headers"] = json!({"authorization": format!("Bearer {VALUE}"), "x-short": "a"});
    let ways = [
        (literal, "***".to_owned()),
        (by_rule, "Bearer ${secrets.API_KEY}".to_owned()),
        (by_token, format!("Bearer {token}")),
        (injecting(json!({})), format!("Bearer {VALUE}")),
    ];
    for (policy, shown) in ways {
        let (guest, _attachment) = world.attach(policy);
        let reply = world.get_inside(&guest, Request::get("/").header(header::HOST, "api.example")).await;
        assert_eq!(reply.headers["x-echo"], shown.as_str());
        assert_eq!(reply.json()["headers"]["authorization"], json!([shown]));
        let tls = world.connect_tls(&guest, "api.example", true, &["h2"]).await.unwrap();
        let request = Request::get("https://api.example/").body(full("")).unwrap();
        let reply = Reply::read(http2(tls).await.send_request(request).await.unwrap()).await;
        assert_eq!(reply.json()["headers"]["authorization"], json!([shown]));
    }
    no_value_in_records(&world);
}

#[tokio::test]
async fn rules_inject_headers_on_their_path_only() {
    let world = World::new();
    world.secret("API_KEY", VALUE);
    let server = world.https("api.example", "93.184.216.34", &["http/1.1"]).await;
    let (guest, _attachment) = world.attach(json!({
        "rules": [{"action": "allow", "names": ["api.example"]}],
        "http": [{"id": "inject", "hosts": ["api.example"], "methods": ["GET"], "path": {"prefix": "/v1/"},
                  "action": {"set_headers": {"authorization": "Bearer ${secrets.API_KEY}", "x-price": "$$5"}}}],
        "attribution": {"X-Sandbox": "a"},
    }));
    let ask = async |method: &str, path: &str| {
        let request = Request::builder().method(method).uri(path).header(header::HOST, "api.example");
        assert_eq!(world.get_inside(&guest, request.header("authorization", "mine")).await.status, 200);
        server.last()["headers"].clone()
    };
    let headers = ask("GET", "/v1/models").await;
    assert_eq!(headers["authorization"], json!([format!("Bearer {VALUE}")]));
    assert_eq!((&headers["x-price"], &headers["x-sandbox"]), (&json!(["$5"]), &json!(["a"])));
    for (method, path) in [
        ("POST", "/v1/models"),
        ("GET", "/v2/models"),
        ("GET", "/v1/../v2"),
        ("GET", "/v1//x"),
        ("GET", "/v1/%2e%2e/v2"),
        ("GET", "/v1/a%2fb"),
        ("GET", "/V1/models"),
    ] {
        assert_eq!(ask(method, path).await["authorization"], json!(["mine"]), "{method} {path}");
    }
    no_value_in_records(&world);
}

#[tokio::test]
async fn a_rotated_secret_counts_for_the_next_request_and_a_bad_one_is_not_sent() {
    let world = World::new();
    let server = world.https("api.example", "93.184.216.34", &["http/1.1"]).await;
    let token = broker::placeholder();
    let (guest, _attachment) = world.attach(policy(&token, json!({})));
    let tls = world.connect_tls(&guest, "api.example", true, &["http/1.1"]).await.unwrap();
    let mut http = Http1::over(tls).await;
    let mut ask = async |value: Option<&str>| -> Reply {
        match value {
            Some(value) => world.secret("API_KEY", value),
            None => drop(world.secrets.0.lock().unwrap().remove("API_KEY")),
        }
        let mut request = get("api.example", "/");
        request.headers_mut().insert("x-api-key", token.parse().unwrap());
        http.send(request).await
    };
    assert_eq!(ask(Some("first")).await.json()["headers"]["x-api-key"], json!(["first"]));
    assert_eq!(ask(Some("second")).await.json()["headers"]["x-api-key"], json!(["second"]));
    for bad in [Some("a\r\nX-Evil: 1"), Some("a\nb"), None] {
        let reply = ask(bad).await;
        assert_eq!((reply.status.as_u16(), reply.code().as_str()), (502, "secret_unavailable"));
        assert!(!String::from_utf8_lossy(&reply.body).contains("Evil"));
    }
    assert_eq!(server.count(), 2);
}

#[tokio::test]
async fn hosts_without_a_rule_are_not_opened() {
    let world = World::new();
    world.https("docs.example", "93.184.216.37", &["http/1.1"]).await;
    let token = broker::placeholder();
    let (guest, _attachment) = world.attach(policy(&token, json!({})));
    world.connect_tls(&guest, "docs.example", false, &["http/1.1"]).await.unwrap();
}
