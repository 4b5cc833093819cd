//! Interactive processes over a WebSocket.

use futures::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::{
    MaybeTlsStream, WebSocketStream, connect_async,
    tungstenite::{Message, client::IntoClientRequest as _, protocol::frame::coding::CloseCode},
};

use crate::support::{TestServer, within};

struct Socket(WebSocketStream<MaybeTlsStream<TcpStream>>);

/// What the server said until it closed.
#[derive(Debug, Default)]
struct Said {
    texts: Vec<Value>,
    streams: [Vec<u8>; 4],
    close: Option<CloseCode>,
}

impl Socket {
    async fn open(t: &TestServer, path: &str) -> Self {
        let mut request = format!("ws://{}{path}", t.http()).into_client_request().expect("a request");
        let bearer = format!("Bearer {}", t.key).parse().expect("a value");
        request.headers_mut().insert("authorization", bearer);
        let (socket, response) = within(connect_async(request)).await.expect("upgraded");
        assert_eq!(response.status(), 101);
        Self(socket)
    }

    async fn exec(t: &TestServer, id: &str, request: &Value) -> Self {
        let mut socket = Self::open(t, &format!("/v1/sandboxes/{id}/exec/ws")).await;
        socket.tell(request).await;
        socket
    }

    async fn tell(&mut self, text: &Value) {
        within(self.0.send(Message::text(text.to_string()))).await.expect("sent");
    }

    async fn type_in(&mut self, bytes: &'static [u8]) {
        within(self.0.send(Message::binary(bytes))).await.expect("sent");
    }

    /// Reads until `enough`, or the server closes.
    async fn until(&mut self, said: &mut Said, enough: impl Fn(&Said) -> bool) {
        while !enough(said) {
            match within(self.0.next()).await {
                Some(Ok(Message::Text(text))) => said.texts.push(serde_json::from_str(&text).expect("JSON")),
                Some(Ok(Message::Binary(bytes))) => said.streams[usize::from(bytes[0])].extend(&bytes[1..]),
                Some(Ok(Message::Close(frame))) => said.close = frame.map(|frame| frame.code),
                Some(Ok(_)) => {}
                Some(Err(error)) => panic!("{error}: {said:?}"),
                None => return,
            }
        }
    }

    async fn said_to_the_end(mut self) -> Said {
        let mut said = Said::default();
        self.until(&mut said, |_| false).await;
        said
    }
}

#[tokio::test]
async fn input_output_and_exit_travel_over_one_socket() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let mut socket = Socket::exec(&t, &id, &json!({"shell": "cat; echo done >&2; exit 5", "stdin": true})).await;
    socket.type_in(b"one ").await;
    socket.type_in(b"\x00\xff").await;
    socket.tell(&json!({"type": "close_stdin"})).await;
    let said = socket.said_to_the_end().await;
    assert_eq!((&said.streams[1][..], &said.streams[2][..]), (&b"one \x00\xff"[..], &b"done\n"[..]));
    assert_eq!(said.texts[0]["type"], "started");
    assert_eq!((&said.texts.last().expect("exit")["code"], said.close), (&json!(5), Some(CloseCode::Normal)));
}

#[tokio::test]
async fn a_terminal_has_a_size_that_changes() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let request = json!({"argv": ["/bin/sh"], "pty": {"cols": 91, "rows": 31}, "env": {"PS1": "$ "}});
    let mut socket = Socket::exec(&t, &id, &request).await;
    let mut said = Said::default();
    let has = |said: &Said, text: &str| String::from_utf8_lossy(&said.streams[3]).contains(text);
    socket.type_in(b"stty size\n").await;
    socket.until(&mut said, |said| has(said, "31 91")).await;
    socket.tell(&json!({"type": "resize", "cols": 120, "rows": 40})).await;
    socket.type_in(b"stty size\n").await;
    socket.until(&mut said, |said| has(said, "40 120")).await;
    socket.type_in(b"exit 6\n").await;
    let rest = socket.said_to_the_end().await;
    assert_eq!(rest.texts.last().expect("exit")["code"], 6, "{rest:?}");
}

#[tokio::test]
async fn what_makes_no_sense_is_refused_without_ending_the_process() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let mut socket = Socket::exec(&t, &id, &json!({"shell": "read x; exit 7", "stdin": true})).await;
    let mut said = Said::default();
    let bad = [
        json!({"type": "canary"}),
        json!({"type": "signal", "signal": "NOPE"}),
        json!({"type": "resize", "cols": 0, "rows": 1}),
        json!({"type": "resize", "cols": 10, "rows": 10}),
        json!("canary"),
    ];
    for (index, message) in bad.iter().enumerate() {
        socket.tell(message).await;
        socket.until(&mut said, |said| said.texts.len() > index + 1).await;
        let answer = said.texts.last().expect("an answer");
        assert_eq!(answer["type"], "refused", "{message}: {answer}");
        assert!(!answer.to_string().contains("canary"), "{answer}");
    }
    socket.type_in(b"\n").await;
    assert_eq!(socket.said_to_the_end().await.texts.last().expect("exit")["code"], 7);
}

#[tokio::test]
async fn a_request_that_cannot_be_run_closes_with_an_error() {
    let t = TestServer::start().await;
    let id = t.create().await;
    for (request, code) in [
        (json!({"argv": ["/no/such/program"]}), "cannot_execute"),
        (json!({"argv": []}), "invalid_argument"),
        (json!({"nothing": 1}), "invalid_argument"),
    ] {
        let said = Socket::exec(&t, &id, &request).await.said_to_the_end().await;
        assert_eq!((&said.texts[0]["type"], &said.texts[0]["error"]["code"]), (&json!("error"), &json!(code)));
        assert_eq!(said.close, Some(CloseCode::Policy));
    }
    let mut binary = Socket::open(&t, &format!("/v1/sandboxes/{id}/exec/ws")).await;
    binary.type_in(b"x").await;
    assert_eq!(binary.said_to_the_end().await.texts[0]["error"]["code"], "invalid_argument");
}

#[tokio::test]
async fn a_client_that_comes_back_attaches_to_the_same_process() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let request = json!({"shell": "echo one; read x; echo $x; exit 8", "stdin": true, "tag": "back"});
    let mut socket = Socket::exec(&t, &id, &request).await;
    let mut said = Said::default();
    socket.until(&mut said, |said| said.streams[1] == b"one\n").await;
    drop(socket);
    let mut again = Socket::open(&t, &format!("/v1/sandboxes/{id}/processes/tag:back/ws?after=4")).await;
    again.type_in(b"two\n").await;
    let said = again.said_to_the_end().await;
    assert_eq!((&said.streams[1][..], &said.texts.last().expect("exit")["code"]), (&b"two\n"[..], &json!(8)));
}

#[tokio::test]
async fn a_terminal_in_a_sandbox_that_ends_is_told_so() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let request = json!({"argv": ["/bin/sh"], "pty": {"cols": 80, "rows": 24}, "env": {"PS1": "$ "}});
    let mut socket = Socket::exec(&t, &id, &request).await;
    let mut said = Said::default();
    socket.until(&mut said, |said| !said.streams[3].is_empty()).await;
    assert_eq!(t.delete(&format!("/v1/sandboxes/{id}")).await.status, 204);
    let said = socket.said_to_the_end().await;
    let last = said.texts.last().expect("an end");
    assert_eq!((&last["type"], &last["error"]["code"]), (&json!("error"), &json!("sandbox_ended")), "{said:?}");
    assert_eq!(said.close, Some(CloseCode::Policy));
}
