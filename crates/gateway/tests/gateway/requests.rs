//! Requests the gateway reads: clear-text HTTP and intercepted TLS.

use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::mpsc,
};
use tokio_tungstenite::tungstenite::Message;

use super::{
    servers::{Http1, Reply, full, get, http2},
    world::World,
};

fn intercepted(names: &[&str]) -> Value {
    json!({
        "default": "deny",
        "rules": [{"id": "web", "action": "allow", "names": names}],
        "intercept": {"always": names},
    })
}

/// Sends bytes to port 80 of `name` and returns the status lines that come back.
async fn raw(world: &World, name: &str, sent: &[u8]) -> (Vec<u16>, String) {
    let (guest, _attachment) =
        world.attach_with(intercepted(&["good.example", "fine.example"]), |spec| spec.limits.idle_timeout_ms = 300);
    let mut stream = guest.connect_name(name, 80).await.unwrap();
    stream.write_all(sent).await.unwrap();
    let mut answer = Vec::new();
    // A reset is an answer too.
    let _ = stream.read_to_end(&mut answer).await;
    let text = String::from_utf8_lossy(&answer).into_owned();
    let statuses = text.match_indices("HTTP/1.1 ").filter_map(|(at, _)| text[at + 9..at + 12].parse().ok()).collect();
    (statuses, text)
}

#[tokio::test]
async fn clear_text_requests_reach_their_host_and_no_other() {
    let world = World::new();
    let server = world.http("good.example", "93.184.216.34").await;
    let other = world.http("fine.example", "93.184.216.35").await;
    let (guest, _attachment) = world.attach(intercepted(&["good.example", "fine.example"]));
    let mut http = Http1::over(guest.connect_name("good.example", 80).await.unwrap()).await;
    assert_eq!(http.send(get("good.example", "/one?q=1")).await.json()["path"], "/one?q=1");
    assert_eq!(http.send(get("GOOD.example:80", "/two")).await.status, 200);
    // The same connection, another host, although it is allowed too.
    let reply = http.send(get("fine.example", "/three")).await;
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (421, "misdirected"));
    assert_eq!((server.count(), other.count()), (2, 0));
}

#[tokio::test]
async fn a_refusal_says_who_could_allow_it() {
    let world = World::with(|config| config.floor.deny_names = vec!["floor.example".to_owned()]);
    for name in ["floor.example", "bound.example", "asked.example", "own.example", "other.example"] {
        world.http(name, "93.184.216.34").await;
    }
    world.name("private.example", &["10.0.0.1"]);
    world.name("metadata.example", &["169.254.169.254"]);
    let bound = json!({
        "rules": [{"action": "deny", "names": ["bound.example"]}],
        "http": [{"hosts": ["asked.example"], "action": "deny", "scheme": "http"}],
    });
    let own = json!({
        "rules": [{"action": "deny", "names": ["own.example"]}, {"action": "allow", "names": ["*"]}],
        "http": [{"hosts": ["other.example"], "action": "deny", "scheme": "http"}],
    });
    let bound = serde_json::from_value(bound).unwrap();
    let (guest, _attachment) = world.attach_with(own, |spec| spec.policy.insert(0, bound));
    for (name, code, who) in [
        ("floor.example", "operator", "the operator of this deployment closed it"),
        ("bound.example", "operator", "the operator of this deployment closed it"),
        ("asked.example", "http_rule", "the operator of this deployment closed it"),
        ("private.example", "private_address", "the operator of this deployment closed it"),
        ("metadata.example", "metadata_address", "closed in every deployment"),
        ("own.example", "rule", "the sandbox's owner can allow it"),
        ("other.example", "http_rule", "the sandbox's owner can allow it"),
    ] {
        let reply = Http1::over(guest.connect_name(name, 80).await.unwrap()).await.send(get(name, "/")).await;
        let hint = reply.json()["error"]["hint"].as_str().unwrap().to_owned();
        assert_eq!((reply.status.as_u16(), reply.code().as_str()), (403, code), "{name}");
        assert!(hint.contains(who), "{name}: {hint}");
    }
}

#[tokio::test]
async fn fronting_inside_intercepted_tls_is_refused_in_both_protocols() {
    let world = World::new();
    let server = world.https("good.example", "93.184.216.34", &["h2", "http/1.1"]).await;
    let (guest, _attachment) = world.attach(intercepted(&["good.example", "fine.example"]));
    for host in ["fine.example", "evil.example", "good.example:8443", "good.example:99999", "user@good.example"] {
        let tls = world.connect_tls(&guest, "good.example", true, &["http/1.1"]).await.unwrap();
        let reply = Http1::over(tls).await.send(get(host, "/")).await;
        assert_eq!(reply.status, 421, "{host}");
    }
    let tls = world.connect_tls(&guest, "good.example", true, &["h2"]).await.unwrap();
    let mut http = http2(tls).await;
    let request = Request::get("https://fine.example/").body(full("")).unwrap();
    assert_eq!(http.send_request(request).await.unwrap().status(), 421);
    let request = Request::get("https://good.example/").header(header::HOST, "fine.example").body(full("")).unwrap();
    assert_eq!(http.send_request(request).await.unwrap().status(), 421);
    assert_eq!(server.count(), 0);
    let request = Request::get("https://good.example/").body(full("")).unwrap();
    assert_eq!(http.send_request(request).await.unwrap().status(), 200);
}

#[tokio::test]
async fn protocols_are_translated_in_every_combination() {
    let world = World::new();
    for (number, upstream) in ["h2", "http/1.1"].into_iter().enumerate() {
        let name = format!("s{number}.example");
        let server = world.https(&name, &format!("93.184.216.{number}"), &[upstream]).await;
        let (guest, _attachment) = world.attach(intercepted(&[&name]));
        let tls = world.connect_tls(&guest, &name, true, &["http/1.1"]).await.unwrap();
        let request = Request::post("/p?q=a%20b").header(header::HOST, &name).body(full("body")).unwrap();
        let reply = Http1::over(tls).await.send(request).await;
        assert_eq!((&reply.json()["body"], &reply.json()["path"]), (&json!("body"), &json!("/p?q=a%20b")));
        let tls = world.connect_tls(&guest, &name, true, &["h2"]).await.unwrap();
        let mut http = http2(tls).await;
        let requests = (0..20).map(|at| {
            let request = Request::put(format!("https://{name}/{at}"));
            let request = request.header("cookie", "a=1").header("cookie", "b=2").header("te", "trailers");
            http.send_request(request.body(full(format!("{at}"))).unwrap())
        });
        let requests: Vec<_> = requests.collect();
        for (at, response) in futures::future::try_join_all(requests).await.unwrap().into_iter().enumerate() {
            assert_eq!(Reply::read(response).await.json()["body"], at.to_string());
        }
        let last = server.last();
        assert_eq!(last["version"], if upstream == "h2" { "HTTP/2.0" } else { "HTTP/1.1" });
        if upstream == "http/1.1" {
            assert_eq!(last["headers"]["cookie"], json!(["a=1; b=2"]));
            assert_eq!(last["headers"]["host"], json!([name]));
        }
    }
}

#[tokio::test]
async fn proxies_are_not_offered() {
    let world = World::new();
    let server = world.http("good.example", "93.184.216.34").await;
    let cases: [(&[u8], u16); 4] = [
        (b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n", 405),
        (b"CONNECT good.example:80 HTTP/1.1\r\nHost: good.example\r\n\r\n", 405),
        (b"GET http://evil.example/ HTTP/1.1\r\nHost: good.example\r\n\r\n", 421),
        (b"GET http://good.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
    ];
    for (sent, status) in cases {
        assert_eq!(raw(&world, "good.example", sent).await.0, [status], "{}", String::from_utf8_lossy(sent));
    }
    assert_eq!(server.count(), 0);
    // Clear text where TLS is due: the ports tell it from the host that was meant.
    let (guest, _attachment) = world.attach(intercepted(&["good.example"]));
    let stream = guest.connect_name("good.example", 443).await.unwrap();
    let reply = Http1::over(stream).await.send(get("good.example", "/")).await;
    let told = reply.json()["error"]["message"].to_string();
    assert!(told.contains("made to good.example:443, the request is for http://good.example"), "{told}");
}

#[tokio::test]
async fn nothing_is_smuggled() {
    let world = World::new();
    let server = world.http("good.example", "93.184.216.34").await;
    let smuggled = "GET /smuggled HTTP/1.1\r\nHost: good.example\r\n\r\n";
    let refused = [
        "POST / HTTP/1.1\r\nHost: good.example\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcd".to_owned(),
        "POST / HTTP/1.1\r\nHost: good.example\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n".to_owned(),
        "POST / HTTP/1.1\r\nHost: good.example\r\nTransfer-Encoding: gzip\r\n\r\n0\r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\nHost: good.example\r\nX-A: 1\r\n folded\r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\nHost : good.example\r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\nHost: good.example\r\nHost: evil.example\r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\nHost: good.example\r\nHost: good.example\r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\nHost: \r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\nHost: good.example\r\nX-A: a\0b\r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\nHost: good.example/evil\r\n\r\n".to_owned(),
        "GET /a b HTTP/1.1\r\nHost: good.example\r\n\r\n".to_owned(),
    ];
    for sent in &refused {
        let (statuses, text) = raw(&world, "good.example", sent.as_bytes()).await;
        assert!(statuses.iter().all(|status| matches!(status, 400 | 421)), "{sent:?} -> {text}");
    }
    assert_eq!(server.count(), 0);
    // Two lengths: the message is framed anew, as chunks, and what follows is a request of its own or an error.
    let both = format!(
        "POST /one HTTP/1.1\r\nHost: good.example\r\nContent-Length: {}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{smuggled}",
        smuggled.len() + 5
    );
    let (_, text) = raw(&world, "good.example", both.as_bytes()).await;
    let seen = server.seen.lock().unwrap().clone();
    for request in &seen {
        assert_eq!(request["headers"]["host"], json!(["good.example"]), "{text}");
        assert!(request["headers"]["content-length"].is_null() || request["headers"]["transfer-encoding"].is_null());
        assert_eq!(request["body"], "");
    }
}

#[tokio::test]
async fn large_and_slow_heads_are_cut_off() {
    let world = World::new();
    let server = world.http("good.example", "93.184.216.34").await;
    let large = format!("GET / HTTP/1.1\r\nHost: good.example\r\nX-A: {}\r\n\r\n", "a".repeat(80 << 10));
    assert_eq!(raw(&world, "good.example", large.as_bytes()).await.0, [431]);
    let many = format!("GET / HTTP/1.1\r\nHost: good.example\r\n{}\r\n", "X-A: 1\r\n".repeat(400));
    assert_eq!(raw(&world, "good.example", many.as_bytes()).await.0, [431]);
    // A head that never ends: the connection does.
    let (statuses, _) = raw(&world, "good.example", b"GET / HTTP/1.1\r\nHost: good.example\r\n").await;
    assert!(statuses.iter().all(|status| *status == 408), "{statuses:?}");
    assert_eq!(server.count(), 0);
}

#[tokio::test]
async fn hop_headers_stay_on_their_hop() {
    let world = World::new();
    let server = world.http("good.example", "93.184.216.34").await;
    let sent = b"GET / HTTP/1.1\r\nHost: good.example\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\nUpgrade: h2c\r\n\
        HTTP2-Settings: AAMAAABkAAQAAP__\r\nProxy-Authorization: Basic eA==\r\nKeep-Alive: 5\r\nX-Kept: 1\r\n\r\n";
    assert_eq!(raw(&world, "good.example", sent).await.0, [200]);
    let headers = server.last()["headers"].clone();
    for gone in ["x-hop", "upgrade", "http2-settings", "proxy-authorization", "keep-alive", "connection"] {
        assert!(headers[gone].is_null(), "{gone}: {headers}");
    }
    assert_eq!(headers["x-kept"], json!(["1"]));
}

#[tokio::test]
async fn answers_come_as_they_are_without_the_way_to_udp() {
    let world = World::new();
    world.https("good.example", "93.184.216.34", &["http/1.1"]).await;
    let (guest, _attachment) = world.attach(intercepted(&["good.example"]));
    let request = Request::get("/redirect").header(header::HOST, "good.example");
    let reply = world.get_inside(&guest, request).await;
    assert_eq!(reply.status, StatusCode::FOUND);
    assert_eq!(reply.headers[header::LOCATION], "https://other.example/");
    assert!(!reply.headers.contains_key(header::ALT_SVC));
}

#[tokio::test]
async fn bodies_stream_both_ways_through_interception() {
    let world = World::new();
    let server = world.https("good.example", "93.184.216.34", &["http/1.1"]).await;
    let (guest, _attachment) = world.attach(intercepted(&["good.example"]));
    for protocol in ["http/1.1", "h2"] {
        let (sender, pieces) = mpsc::channel(1);
        *server.pieces.lock().unwrap() = Some(pieces);
        let tls = world.connect_tls(&guest, "good.example", true, &[protocol]).await.unwrap();
        let mut response = if protocol == "h2" {
            let request = Request::get("https://good.example/stream").body(full("")).unwrap();
            http2(tls).await.send_request(request).await.unwrap()
        } else {
            Http1::over(tls).await.0.send_request(get("good.example", "/stream")).await.unwrap()
        };
        for piece in ["one", "two"] {
            // Each piece arrives before the next is sent.
            sender.send(Bytes::from(piece)).await.unwrap();
            let frame = response.body_mut().frame().await.unwrap().unwrap();
            assert_eq!(frame.into_data().unwrap(), piece);
        }
        drop(sender);
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "");
        let (sink, mut sunk) = mpsc::unbounded_channel();
        *server.sunk.lock().unwrap() = Some(sink);
        let (mut sender, pieces) = futures::channel::mpsc::channel::<Bytes>(1);
        let body = StreamBody::new(pieces.map(|piece| Ok(Frame::data(piece)))).boxed_unsync();
        let tls = world.connect_tls(&guest, "good.example", true, &["http/1.1"]).await.unwrap();
        let request = Request::post("/sink").header(header::HOST, "good.example").body(body).unwrap();
        let sending = tokio::spawn(async move { Http1::over(tls).await.send(request).await });
        for piece in ["eins", "zwei"] {
            sender.send(Bytes::from(piece)).await.unwrap();
            assert_eq!(sunk.recv().await.unwrap(), piece);
        }
        drop(sender);
        assert_eq!(sending.await.unwrap().body, "sunk");
    }
}

#[tokio::test]
async fn a_slow_reader_holds_the_sender_back() {
    let world = World::new();
    let server = world.https("good.example", "93.184.216.34", &["http/1.1"]).await;
    let (guest, _attachment) = world.attach(intercepted(&["good.example"]));
    let (sender, pieces) = mpsc::channel(1);
    *server.pieces.lock().unwrap() = Some(pieces);
    let tls = world.connect_tls(&guest, "good.example", true, &["http/1.1"]).await.unwrap();
    let mut response = Http1::over(tls).await.0.send_request(get("good.example", "/stream")).await.unwrap();
    // Nobody reads: what is taken is bounded by the buffers on the way.
    let piece = Bytes::from(vec![7; 64 << 10]);
    let mut taken = 0;
    while let Ok(sent) = tokio::time::timeout(std::time::Duration::from_millis(500), sender.send(piece.clone())).await {
        sent.unwrap();
        taken += piece.len();
        assert!(taken < 64 << 20, "the gateway holds {taken} bytes");
    }
    drop(sender);
    let mut got = 0;
    while let Some(frame) = response.body_mut().frame().await {
        got += frame.unwrap().into_data().map_or(0, |data| data.len());
    }
    assert!(got >= taken, "{got} of {taken}");
}

#[tokio::test]
async fn websockets_work_through_interception() {
    let world = World::new();
    let server = world.https("good.example", "93.184.216.34", &["h2", "http/1.1"]).await;
    let (guest, attachment) = world.attach(intercepted(&["good.example"]));
    let tls = world.connect_tls(&guest, "good.example", true, &["http/1.1"]).await.unwrap();
    let request = Request::get("/ws")
        .header(header::HOST, "good.example")
        .header(header::CONNECTION, "Upgrade")
        .header(header::UPGRADE, "websocket")
        .header("sec-websocket-version", "13")
        .header("sec-websocket-key", "AAAAAAAAAAAAAAAAAAAAAA==");
    let mut http = Http1::over(tls).await;
    let mut response = http.0.send_request(request.body(full("")).unwrap()).await.unwrap();
    assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
    let io = hyper_util::rt::TokioIo::new(hyper::upgrade::on(&mut response).await.unwrap());
    // The server sends frames back as they come, so that the client's own masking is undone by its peer role here.
    let role = tokio_tungstenite::tungstenite::protocol::Role::Client;
    let config = tokio_tungstenite::tungstenite::protocol::WebSocketConfig::default().accept_unmasked_frames(true);
    let mut socket = tokio_tungstenite::WebSocketStream::from_raw_socket(io, role, Some(config)).await;
    socket.send(Message::text("hello")).await.unwrap();
    let echoed = socket.next().await;
    // A client refuses masked frames: reading one proves that bytes came back.
    assert!(matches!(
        echoed,
        Some(Err(tokio_tungstenite::tungstenite::Error::Protocol(
            tokio_tungstenite::tungstenite::error::ProtocolError::MaskedFrameFromServer
        )))
    ));
    assert_eq!(server.last()["headers"]["sec-websocket-key"], json!(["AAAAAAAAAAAAAAAAAAAAAA=="]));
    assert_eq!(server.last()["version"], "HTTP/1.1");
    // It ends when a new rule refuses the request it came from.
    let mut next = intercepted(&["good.example"]);
    next["http"] = json!([{"hosts": ["good.example"], "path": {"exact": "/other"}, "action": "deny"}]);
    assert_eq!(attachment.set_policy(&[serde_json::from_value(next.clone()).unwrap()]).unwrap(), 0);
    next["http"][0]["path"]["exact"] = "/ws".into();
    assert_eq!(attachment.set_policy(&[serde_json::from_value(next).unwrap()]).unwrap(), 1);
}

#[tokio::test]
async fn rules_on_method_path_and_headers_decide_in_order() {
    let world = World::new();
    let server = world.https("api.example", "93.184.216.34", &["http/1.1"]).await;
    let mut policy = intercepted(&["api.example"]);
    policy["http"] = json!([
        {"id": "teapot", "hosts": ["api.example"], "path": {"exact": "/tea"},
         "action": {"respond": {"status": 418, "headers": {"x-a": "b"}, "body": "short"}}},
        {"id": "no-admin", "hosts": ["*"], "path": {"prefix": "/admin"}, "action": "deny"},
        {"id": "reads", "hosts": ["api.example"], "methods": ["GET"], "query": [{"name": "v", "value": {"exact": "1"}}],
         "action": "allow"},
        {"id": "rest", "hosts": ["api.example"], "action": "deny"},
    ]);
    let (guest, attachment) = world.attach(policy);
    for (method, path, status, rule) in [
        ("GET", "/x?v=1", 200, "reads"),
        ("GET", "/x?v=2", 403, "rest"),
        ("GET", "/x?v=1&v=2", 403, "rest"),
        ("POST", "/x?v=1", 403, "rest"),
        ("GET", "/admin?v=1", 403, "no-admin"),
        ("GET", "/tea", 418, "teapot"),
        ("GET", "/x/../admin?v=1", 403, "no-admin"),
        ("GET", "/%61dmin?v=1", 403, "no-admin"),
        ("GET", "//admin?v=1", 403, "no-admin"),
    ] {
        let request = Request::builder().method(method).uri(path).header(header::HOST, "api.example");
        let reply = world.get_inside(&guest, request).await;
        assert_eq!(reply.status.as_u16(), status, "{method} {path}");
        let records = world.records();
        let last = records.iter().rev().find(|record| record.facts.status.is_some()).unwrap();
        assert_eq!(last.facts.rule.as_deref(), Some(rule), "{method} {path}");
    }
    assert_eq!(server.count(), 1);
    // A change counts for the next request of a connection that stays open.
    let tls = world.connect_tls(&guest, "api.example", true, &["http/1.1"]).await.unwrap();
    let mut http = Http1::over(tls).await;
    assert_eq!(http.send(get("api.example", "/x?v=1")).await.status, 200);
    let mut next = intercepted(&["api.example"]);
    next["http"] = json!([{"id": "closed", "hosts": ["api.example"], "action": "deny"}]);
    assert_eq!(attachment.set_policy(&[serde_json::from_value(next).unwrap()]).unwrap(), 0);
    assert_eq!(http.send(get("api.example", "/x?v=1")).await.code(), "http_rule");
}

#[tokio::test]
async fn what_the_gateway_answers_a_head_with_has_no_body() {
    let world = World::new();
    world.https("good.example", "93.184.216.34", &["http/1.1"]).await;
    let mut policy = intercepted(&["good.example"]);
    policy["http"] = json!([
        {"hosts": ["good.example"], "path": {"exact": "/tea"}, "action": {"respond": {"status": 418, "body": "short"}}},
        {"hosts": ["good.example"], "action": "deny"},
    ]);
    let (guest, _attachment) = world.attach(policy);
    for (name, path, status) in [("good.example", "/tea", 418), ("good.example", "/", 403), ("evil.example", "/", 403)]
    {
        let tls = world.connect_tls(&guest, name, true, &["h2"]).await.unwrap();
        let request = Request::head(format!("https://{name}{path}")).body(full("")).unwrap();
        let response = http2(tls).await.send_request(request).await.unwrap();
        assert_eq!(response.status(), status, "{name}{path}");
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "", "{name}{path}");
    }
}

#[tokio::test]
async fn an_upload_that_is_refused_is_taken_to_its_end_so_that_the_reason_is_heard() {
    let world = World::new();
    world.https("good.example", "93.184.216.34", &["http/1.1"]).await;
    let (guest, _attachment) = world.attach(intercepted(&["good.example"]));
    // Fronting, and a host that is not allowed.
    for (name, host) in [("good.example", "fine.example"), ("evil.example", "evil.example")] {
        let tls = world.connect_tls(&guest, name, true, &["h2"]).await.unwrap();
        let (mut sender, pieces) = futures::channel::mpsc::channel::<Bytes>(1);
        let body = StreamBody::new(pieces.map(|piece| Ok(Frame::data(piece)))).boxed_unsync();
        let request = Request::post(format!("https://{host}/")).body(body).unwrap();
        let mut http = http2(tls).await;
        let response = http.send_request(request).await.unwrap();
        assert!(Reply::read(response).await.status.is_client_error(), "{name}");
        for _ in 0..40 {
            sender.send(vec![b'x'; 64 << 10].into()).await.unwrap_or_else(|_| panic!("{name}: the upload was reset"));
        }
    }
}

#[tokio::test]
async fn a_guest_that_does_not_trust_the_authority_leaves_a_record_with_a_hint() {
    let world = World::new();
    world.https("good.example", "93.184.216.34", &[]).await;
    let (guest, _attachment) = world.attach(intercepted(&["good.example"]));
    assert!(world.connect_tls(&guest, "good.example", false, &[]).await.is_err());
    let record = world.record("handshake_failed").await;
    assert!(record.facts.detail.unwrap().contains("CA"));
}

#[tokio::test]
async fn an_upstream_nobody_vouches_for_is_refused() {
    let world = World::new();
    world.https("good.example", "93.184.216.34", &["http/1.1"]).await;
    // The address of one name, the certificate of another.
    world.name("fake.example", &["93.184.216.34"]);
    let (guest, _attachment) = world.attach(intercepted(&["fake.example"]));
    let reply = world.get_inside(&guest, Request::get("/").header(header::HOST, "fake.example")).await;
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (502, "upstream_failed"));
}
