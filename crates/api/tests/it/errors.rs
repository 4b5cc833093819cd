//! Requests that make no sense: each a clear error in one shape, nothing of the request repeated.

use reqwest::Method;
use serde_json::json;

use crate::support::{Answer, TestServer};

#[tokio::test]
async fn what_the_router_refuses_has_our_shape() {
    let t = TestServer::start().await;
    let missing = t.get("/v1/nothing").await;
    assert_eq!((missing.status.as_u16(), missing.code()), (404, "no_such_route"));

    let method = Answer::of(t.request(Method::PUT, "/v1/sandboxes")).await;
    assert_eq!((method.status.as_u16(), method.code()), (405, "method_not_allowed"));
    let allow = method.headers["allow"].to_str().expect("text");
    assert!(allow.contains("GET") && allow.contains("POST"), "{allow}");

    let kind =
        Answer::of(t.request(Method::POST, "/v1/sandboxes").header("content-type", "text/plain").body("{}")).await;
    assert_eq!((kind.status.as_u16(), kind.code()), (415, "unsupported_media_type"));

    let path = t.get("/v1/sandboxes/%ff").await;
    assert_eq!((path.status.as_u16(), path.code()), (400, "invalid_argument"));

    let upgrade = t.get("/v1/sandboxes/sbxaaaaaaaaaaaaaaaaaaaa/exec/ws").await;
    assert_eq!((upgrade.status.as_u16(), upgrade.code()), (426, "websocket_required"));
}

#[tokio::test]
async fn bodies_that_are_malformed_are_named_by_place_and_never_repeated() {
    let t = TestServer::start().await;
    let send = async |body: &str| {
        let request = t.request(Method::POST, "/v1/sandboxes").header("content-type", "application/json");
        Answer::of(request.body(body.to_owned())).await
    };
    let cases = [
        (r#"{"env": {"KEY": "canary"}, "template": canary}"#, "malformed_json", "line 1 column"),
        (r#"{"template": 1}"#, "invalid_argument", "template: expected a string"),
        (r#"{"lifetime_seconds": "canary"}"#, "invalid_argument", "lifetime_seconds: expected"),
        (r#"{"tempalte": "canary"}"#, "invalid_argument", "unknown field `tempalte`, expected one of `template`"),
        (r#"["canary"]"#, "invalid_argument", "expected"),
        (r#"{"env": {"A": null}}"#, "invalid_argument", "env.A: expected a string"),
        ("", "malformed_json", "line 1 column 0"),
        (r#"{"lifetime_seconds": -1}"#, "invalid_argument", "lifetime_seconds"),
        (r#"{"lifetime_seconds": 1e300}"#, "invalid_argument", "86400"),
        (r#"{"lifetime_seconds": NaN}"#, "malformed_json", "lifetime_seconds"),
    ];
    for (body, code, message) in cases {
        let answer = send(body).await;
        assert_eq!((answer.status.as_u16(), answer.code()), (400, code), "{body}: {answer:?}");
        assert!(answer.message().contains(message), "{body}: {answer:?}");
        assert!(!answer.json.to_string().contains("canary"), "{body}: {answer:?}");
    }
    let deep = send(&"[".repeat(100_000)).await;
    assert_eq!(deep.status, 400);
}

#[tokio::test]
async fn a_json_body_over_a_mebibyte_is_413_announced_or_not() {
    let t = TestServer::start().await;
    let body = json!({ "template": "x".repeat(1 << 20) }).to_string();
    let json = |request: reqwest::RequestBuilder| request.header("content-type", "application/json");
    let announced = Answer::of(json(t.request(Method::POST, "/v1/sandboxes")).body(body.clone())).await;
    assert_eq!((announced.status.as_u16(), announced.code()), (413, "body_too_large"));
    let pieces: Vec<_> = body.as_bytes().chunks(4096).map(|piece| Ok::<_, std::io::Error>(piece.to_vec())).collect();
    let chunked = reqwest::Body::wrap_stream(futures::stream::iter(pieces));
    let chunked = Answer::of(json(t.request(Method::POST, "/v1/sandboxes")).body(chunked)).await;
    assert_eq!((chunked.status.as_u16(), chunked.code()), (413, "body_too_large"));
}

#[tokio::test]
async fn a_hint_fits_what_was_asked() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let put = async |path: &str, body: String| {
        let request = t.request(Method::PUT, path).header("content-type", "application/json");
        Answer::of(request.body(body)).await
    };
    let hint = |answer: &Answer| answer.json["error"]["hint"].as_str().unwrap_or_default().to_owned();
    let large = json!({"value": "x".repeat(1 << 20), "hosts": ["a.example"]}).to_string();
    let large = put("/v1/secrets/large", large).await;
    assert_eq!((large.status.as_u16(), large.code()), (413, "body_too_large"));
    assert!(hint(&large).contains("openapi") && !hint(&large).contains("stdin"), "{large:?}");
    let argument = t.post(&format!("/v1/sandboxes/{id}/exec"), &json!({"argv": ["x".repeat(1 << 20)]})).await;
    assert!(argument.status == 413 && hint(&argument).contains("stdin"), "{argument:?}");
    let nameless = put("/v1/secrets/", json!({"value": "x", "hosts": ["a.example"]}).to_string()).await;
    assert!(nameless.message().contains("a part of the path is empty"), "{nameless:?}");
    assert!(!t.get("/v1/nothing").await.message().contains("empty"));

    t.post(&format!("/v1/sandboxes/{id}/pause"), &json!({})).await;
    let refused = t.run(&id, &json!({"shell": "true"})).await;
    assert!(refused.code() == "wrong_state" && hint(&refused).contains("/resume"), "{refused:?}");
}

#[tokio::test]
async fn what_is_in_the_way_is_named_in_fields_of_its_own() {
    let t = TestServer::start().await;
    let id = t.create().await;
    for (down, up, state) in [("pause", "resume", "paused"), ("stop", "start", "stopped")] {
        t.post(&format!("/v1/sandboxes/{id}/{down}"), &json!({})).await;
        let refused = t.post(&format!("/v1/sandboxes/{id}/snapshots"), &json!({})).await;
        assert_eq!((refused.status.as_u16(), refused.code()), (409, "wrong_state"), "{refused:?}");
        assert_eq!(refused.message(), format!("sandbox {id} is {state}"));
        let error = &refused.json["error"];
        assert_eq!((&error["sandbox"], &error["state"]), (&json!(id), &json!(state)), "{error}");
        t.post(&format!("/v1/sandboxes/{id}/{up}"), &json!({})).await;
    }
    let unknown = t.get("/v1/sandboxes/sbxaaaaaaaaaaaaaaaaaaaa").await;
    let error = unknown.json["error"].as_object().expect("an object");
    assert!(!error.contains_key("sandbox") && !error.contains_key("state"), "none is in the way: {error:?}");
}

#[tokio::test]
async fn names_are_refused_by_their_rule_and_long_words_are_not_repeated() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let long = "x".repeat(5000);
    let snapshots = format!("/v1/sandboxes/{id}/snapshots");
    for (path, body, told) in [
        (&*snapshots, json!({"name": ""}), "name must have 1 to 128 bytes, no control characters: it is empty"),
        (&snapshots, json!({"name": "a\u{1b}[2J"}), "has '\\u{1b}'"),
        (&snapshots, json!({"name": &long}), "(5000 bytes) is longer"),
        (&snapshots, json!({"name": &id}), "reads like an id"),
        (&snapshots, json!({"labels": {"a\nb": "1"}}), "labels must have 1 to 256 bytes"),
        ("/v1/sandboxes", json!({"metadata": {"a\u{7f}": "1"}}), "metadata must have 1 to 256 bytes"),
        ("/v1/sandboxes", json!({"metadata": {&long: "1"}}), "(5000 bytes) is longer"),
        ("/v1/sandboxes", json!({"template": &long}), "(5000 bytes) not found"),
        (
            "/v1/templates",
            json!({"name": "Web", "from": "base"}),
            "lower-case letters, digits and - _ . /: \"Web\" has 'W'",
        ),
        ("/v1/templates", json!({"name": "web", "tags": [&long], "from": "base"}), "(5000 bytes) is longer"),
        ("/v1/sandboxes", json!({"network": {"allow": [&long]}}), "(5000 bytes) is no destination"),
        ("/v1/sandboxes", json!({"network": {"allow": ["a.example:99999"]}}), "has the port \"99999\", which is none"),
    ] {
        let answer = t.post(path, &body).await;
        assert!(answer.status.is_client_error() && answer.message().contains(told), "{told}: {answer:?}");
        assert!(answer.message().len() < 400, "{answer:?}");
    }
    for path in ["/v1/snapshots", "/v1/templates", "/v1/secrets", "/v1/builds"] {
        let answer = t.get(&format!("{path}/{long}")).await;
        assert!(answer.status == 404 && answer.message().contains("… (5000 bytes) not found"), "{answer:?}");
    }
}

#[tokio::test]
async fn headers_are_bounded() {
    let t = TestServer::start().await;
    let many: String = (0..200).map(|index| format!("x-{index}: 1\r\n")).collect();
    let many = t.raw(format!("GET /v1/health HTTP/1.1\r\nHost: localhost\r\n{many}\r\n").as_bytes()).await;
    assert!(many.starts_with("HTTP/1.1 431 "), "{many}");
    let long = "x".repeat(200_000);
    let long = t.raw(format!("GET /v1/health HTTP/1.1\r\nHost: localhost\r\nx-long: {long}\r\n\r\n").as_bytes()).await;
    assert!(long.is_empty() || long.starts_with("HTTP/1.1 431 "), "{long}");
    assert_eq!(t.get("/v1/health").await.status, 200);
}

#[tokio::test]
async fn unknown_templates_and_ids_are_404_with_a_hint() {
    let t = TestServer::start().await;
    let template = t.post("/v1/sandboxes", &json!({"template": "nothing"})).await;
    assert_eq!((template.status.as_u16(), template.code()), (404, "template_not_found"));
    assert_eq!(t.get("/v1/templates/nothing").await.code(), "template_not_found");
    for id in ["sbxaaaaaaaaaaaaaaaaaaaa", "x", "tplaaaaaaaaaaaaaaaaaaaa", "..%2f..", "%00", &"x".repeat(5000)] {
        let answer = t.get(&format!("/v1/sandboxes/{id}")).await;
        assert_eq!((answer.status.as_u16(), answer.code()), (404, "sandbox_not_found"), "{id}");
        assert!(answer.json.to_string().len() < 1000);
    }
}
