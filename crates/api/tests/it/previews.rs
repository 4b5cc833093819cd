//! `<port>-<id>.<base>`: who is let in, and that what is spoken there arrives as it is.

use std::{convert::Infallible, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::{Request, WebSocketUpgrade, ws::Message},
    response::sse,
    routing::{any, get, post},
};
use futures::{SinkExt as _, StreamExt as _, stream};
use reqwest::{Client, RequestBuilder, StatusCode, Version};
use serde_json::json;
use tokio::{net::TcpListener, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;

use crate::support::{BASE, TestServer, within};

/// A server in the guest, which here is this host; its port.
async fn serve() -> u16 {
    let (said, heard) = mpsc::channel::<()>(1);
    let heard = std::sync::Arc::new(tokio::sync::Mutex::new(heard));
    let router = Router::new()
        .route("/sent", any(|request: Request| async move { format!("{} {:?}", request.uri(), request.headers()) }))
        .route(
            "/count",
            post(|request: Request| async move {
                let mut body = request.into_body().into_data_stream();
                let mut count = 0;
                while let Some(piece) = body.next().await {
                    count += piece.expect("whole").len();
                }
                count.to_string()
            }),
        )
        .route(
            "/large",
            get(|| async {
                let piece = bytes::Bytes::from(vec![b'x'; 1 << 20]);
                Body::from_stream(stream::iter((0..64).map(move |_| Ok::<_, Infallible>(piece.clone()))))
            }),
        )
        // The second event comes only once the first has been seen.
        .route(
            "/events",
            get(move || async move {
                let events = stream::unfold(0, move |count| {
                    let heard = heard.clone();
                    async move {
                        if count > 0 {
                            heard.lock().await.recv().await;
                        }
                        Some((Ok::<_, Infallible>(sse::Event::default().data(count.to_string())), count + 1))
                    }
                });
                sse::Sse::new(events)
            }),
        )
        .route("/seen", post(move || async move { said.send(()).await.expect("somebody waits") }))
        .route(
            "/ws",
            any(|upgrade: WebSocketUpgrade| async {
                upgrade.on_upgrade(|mut socket| async move {
                    while let Some(Ok(message)) = socket.recv().await {
                        if let Message::Text(text) = message {
                            socket.send(Message::text(text.to_uppercase())).await.expect("sent");
                        }
                    }
                })
            }),
        );
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    tokio::spawn(async move { axum::serve(listener, router).await });
    port
}

struct Preview {
    t: TestServer,
    host: String,
    token: String,
}

impl Preview {
    async fn start() -> Self {
        let t = TestServer::start().await;
        let (sandbox, port) = (t.create().await, serve().await);
        let made = t.post(&format!("/v1/sandboxes/{sandbox}/previews"), &json!({"port": port})).await;
        assert_eq!(made.status, 200, "{made:?}");
        let token = made.json["token"].as_str().expect("a token").to_owned();
        let host = format!("{port}-{sandbox}.{BASE}");
        let link = made.json["url"].as_str().expect("a link");
        assert!(link.contains(&host) && link.ends_with(&token), "{link}");
        Self { t, host, token }
    }

    fn client(&self, is_http2: bool) -> Client {
        let builder = Client::builder().resolve(&self.host, self.t.http());
        let builder = if is_http2 { builder.http2_prior_knowledge() } else { builder.http1_only() };
        builder.build().expect("a client")
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}:{}{path}", self.host, self.t.http().port())
    }

    fn open(&self, request: RequestBuilder) -> RequestBuilder {
        request.header("x-stockade-token", &self.token)
    }
}

#[tokio::test]
async fn a_link_a_cookie_a_header_and_the_owners_key_open_it_and_nothing_else_does() {
    let p = Preview::start().await;
    let client = p.client(false);
    let status = async |request: RequestBuilder| within(request.send()).await.expect("an answer").status();
    let get = |path: &str| client.get(p.url(path));
    assert_eq!(status(get("/sent")).await, 401);
    assert_eq!(status(get("/sent").header("x-stockade-token", "9999999999.00")).await, 401);
    assert_eq!(status(get("/sent").header("x-api-key", &p.t.stranger)).await, 401);
    assert_eq!(status(get("/sent").header("x-api-key", &p.t.key)).await, 200);
    assert_eq!(status(p.open(get("/sent"))).await, 200);

    let link = get(&format!("/sent?a=1&stockade_token={}", p.token));
    let answer = within(link.send()).await.expect("an answer");
    let cookie = answer.headers()["set-cookie"].to_str().expect("text").to_owned();
    let seen = within(answer.text()).await.expect("text");
    assert!(seen.starts_with("/sent?a=1 ") && !seen.contains(&p.token), "{seen}");
    let pair = cookie.split(';').next().expect("a pair");
    let answer = within(get("/sent").header("cookie", format!("mine=1; {pair}")).send()).await.expect("an answer");
    assert_eq!(answer.status(), 200);
    let seen = within(answer.text()).await.expect("text");
    assert!(seen.contains("mine=1") && !seen.contains(&p.token), "the guest sees its own cookie alone: {seen}");

    // No key of the deployment's gets in, on whichever way it is sent; what is the guest's own does.
    let e2b = p.host.replace(BASE, &format!("e2b.{BASE}"));
    for key in [&p.t.key, &p.t.stranger] {
        for (name, value) in [("x-api-key", key.clone()), ("authorization", format!("Bearer {key}"))] {
            for host in [&p.host, &e2b] {
                let request = p.open(get("/sent")).header("host", host).header(name, &value);
                let answer = within(request.header("authorization", "Bearer mine").send()).await.expect("an answer");
                assert_eq!(answer.status(), 200, "{name} {host}");
                let seen = within(answer.text()).await.expect("text");
                assert!(seen.contains("Bearer mine") && !seen.contains(key.as_str()), "{name} {host}: {seen}");
            }
        }
    }
    assert_eq!(status(get("/sent").bearer_auth(&p.t.key)).await, 200);
    assert_eq!(status(get("/sent").bearer_auth(&p.t.stranger)).await, 401);

    // A token is for its port alone.
    let other = format!("http://1-{}:{}/", p.host.split_once('-').expect("a dash").1, p.t.http().port());
    let elsewhere = Client::builder().resolve(other.split(['/', ':']).nth(3).expect("a host"), p.t.http());
    let request = elsewhere.build().expect("a client").get(&other);
    assert_eq!(status(p.open(request)).await, 401);
}

#[tokio::test]
async fn large_bodies_pass_both_ways_over_either_version_of_http() {
    let p = Preview::start().await;
    for (is_http2, version) in [(false, Version::HTTP_11), (true, Version::HTTP_2)] {
        let client = p.client(is_http2);
        let mut answer = within(p.open(client.get(p.url("/large"))).send()).await.expect("an answer");
        assert_eq!((answer.status(), answer.version()), (StatusCode::OK, version));
        let mut count = 0;
        while let Some(piece) = within(answer.chunk()).await.expect("a piece") {
            assert!(piece.iter().all(|byte| *byte == b'x'));
            count += piece.len();
        }
        assert_eq!(count, 64 << 20, "{version:?}");
        let pieces = (0..64).map(|_| Ok::<_, Infallible>(vec![b'y'; 1 << 20]));
        let body = reqwest::Body::wrap_stream(stream::iter(pieces));
        let answer = within(p.open(client.post(p.url("/count"))).body(body).send()).await.expect("an answer");
        assert_eq!(within(answer.text()).await.expect("text"), (64 << 20).to_string(), "{version:?}");
    }
}

#[tokio::test]
async fn events_arrive_as_they_are_sent() {
    let p = Preview::start().await;
    for is_http2 in [false, true] {
        let client = p.client(is_http2);
        let mut events = within(p.open(client.get(p.url("/events"))).send()).await.expect("an answer");
        assert_eq!(events.headers()["content-type"], "text/event-stream");
        for count in 0..3 {
            let piece = within(events.chunk()).await.expect("a piece").expect("not the end");
            assert_eq!(piece, format!("data: {count}\n\n"));
            within(p.open(client.post(p.url("/seen"))).send()).await.expect("an answer");
        }
        // Its last word, to nobody.
        drop(events);
    }
}

#[tokio::test]
async fn a_web_socket_talks_both_ways_while_a_body_is_half_sent() {
    let p = Preview::start().await;
    let mut request = tokio_tungstenite::tungstenite::client::IntoClientRequest::into_client_request(format!(
        "ws://{}:{}/ws",
        p.host,
        p.t.http().port()
    ))
    .expect("a request");
    request.headers_mut().insert("x-stockade-token", p.token.parse().expect("a value"));
    let stream = tokio::net::TcpStream::connect(p.t.http()).await.expect("connects");
    let (mut socket, _) = within(tokio_tungstenite::client_async(request, stream)).await.expect("upgraded");
    let (pieces, body) = mpsc::channel::<Result<Vec<u8>, Infallible>>(1);
    let body = reqwest::Body::wrap_stream(ReceiverStream::new(body));
    let upload = tokio::spawn(p.open(p.client(false).post(p.url("/count"))).body(body).send());
    pieces.send(Ok(vec![b'a'; 10])).await.expect("taken");
    for word in ["one", "two"] {
        within(socket.send(tokio_tungstenite::tungstenite::Message::text(word))).await.expect("sent");
        let answer = within(socket.next()).await.expect("an answer").expect("a message");
        assert_eq!(answer.to_text().expect("text"), word.to_uppercase());
    }
    pieces.send(Ok(vec![b'b'; 5])).await.expect("taken");
    drop(pieces);
    let counted = within(upload).await.expect("a task").expect("an answer");
    assert_eq!(within(counted.text()).await.expect("text"), "15");
    within(socket.close(None)).await.expect("closed");
    tokio::time::timeout(Duration::from_secs(30), socket.next()).await.expect("the other side closes, too");
}
