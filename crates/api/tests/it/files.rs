//! Files through the API, on the guest agent itself.

use futures::StreamExt as _;
use reqwest::{Method, header};
use serde_json::{Value, json};

use crate::support::{Answer, TestServer, within};

/// A directory of the guest for one test. The fake guest shares this host's file system.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().expect("a directory") }
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().expect("UTF-8").to_owned()
    }
}

fn url(id: &str, tail: &str, path: &str) -> String {
    let path: String = path.bytes().map(|byte| format!("%{byte:02x}")).collect();
    format!("/v1/sandboxes/{id}/files{tail}?path={path}")
}

async fn put(t: &TestServer, id: &str, path: &str, more: &str, body: impl Into<reqwest::Body>) -> Answer {
    Answer::of(t.request(Method::PUT, &format!("{}{more}", url(id, "", path))).body(body)).await
}

async fn read(t: &TestServer, id: &str, path: &str) -> Vec<u8> {
    let response = within(t.request(Method::GET, &url(id, "", path)).send()).await.expect("an answer");
    assert_eq!(response.status(), 200, "{path}");
    within(response.bytes()).await.expect("a body").to_vec()
}

#[tokio::test]
async fn every_byte_comes_back_whatever_the_name() {
    let (t, place) = (TestServer::start().await, Place::new());
    let id = t.create().await;
    let all: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    for name in ["plain", "with space", "ünï☕", "a+b&c=d#e?f%41", "-rf", "new\nline"] {
        let path = place.path(name);
        let entry = put(&t, &id, &path, "", all.clone()).await;
        assert_eq!((entry.status.as_u16(), &entry.json["name"]), (200, &json!(name)), "{entry:?}");
        assert_eq!((&entry.json["size_bytes"], &entry.json["kind"]), (&json!(100_000), &json!("file")));
        assert!(read(&t, &id, &path).await == all, "{name}");
    }
    let empty = place.path("empty");
    put(&t, &id, &empty, "", "").await;
    let response = within(t.request(Method::GET, &url(&id, "", &empty)).send()).await.expect("an answer");
    assert_eq!(response.headers()[header::CONTENT_LENGTH], "0");
}

#[tokio::test]
async fn ranges_head_and_lengths_follow_http() {
    let (t, place) = (TestServer::start().await, Place::new());
    let id = t.create().await;
    let path = place.path("f");
    put(&t, &id, &path, "", "0123456789").await;
    let at = url(&id, "", &path);
    let cases = [
        ("bytes=0-3", 206, "0123", "bytes 0-3/10"),
        ("bytes=4-", 206, "456789", "bytes 4-9/10"),
        ("bytes=-3", 206, "789", "bytes 7-9/10"),
        ("bytes=-30", 206, "0123456789", "bytes 0-9/10"),
        ("bytes=8-99", 206, "89", "bytes 8-9/10"),
        ("bytes=3-1", 200, "0123456789", ""),
        ("bytes=0-1,3-4", 200, "0123456789", ""),
    ];
    for (range, status, body, content_range) in cases {
        let response = within(t.request(Method::GET, &at).header("range", range).send()).await.expect("an answer");
        let headers = response.headers().clone();
        assert_eq!(response.status(), status, "{range}");
        assert_eq!(headers.get("content-range").map_or("", |value| value.to_str().expect("text")), content_range);
        assert_eq!(headers["content-length"], body.len().to_string(), "{range}");
        assert_eq!(within(response.text()).await.expect("a body"), body, "{range}");
    }
    let beyond = Answer::of(t.request(Method::GET, &at).header("range", "bytes=10-")).await;
    assert_eq!((beyond.status.as_u16(), beyond.code()), (416, "range_not_satisfiable"));
    assert_eq!(beyond.headers["content-range"], "bytes */10");
    let head = within(t.request(Method::HEAD, &at).send()).await.expect("an answer");
    assert_eq!((head.status().as_u16(), &head.headers()["content-length"]), (200, &header::HeaderValue::from(10)));
    assert!(within(head.bytes()).await.expect("a body").is_empty());
    let proc = read(&t, &id, "/proc/self/status").await;
    assert!(proc.starts_with(b"Name:"), "a file that says it is empty and is not");
}

#[tokio::test]
async fn large_files_stream_both_ways() {
    const PIECE: usize = 1 << 20;
    const PIECES: u8 = 64;
    let (t, place) = (TestServer::start().await, Place::new());
    let id = t.create().await;
    let path = place.path("large");
    let pieces = futures::stream::iter((0..PIECES).map(|index| Ok::<_, std::io::Error>(vec![index; PIECE])));
    let entry = put(&t, &id, &path, "&atomic=true", reqwest::Body::wrap_stream(pieces)).await;
    assert_eq!(entry.json["size_bytes"], PIECE * usize::from(PIECES));
    let response = within(t.request(Method::GET, &url(&id, "", &path)).send()).await.expect("an answer");
    let mut body = response.bytes_stream();
    let mut seen = 0;
    while let Some(piece) = within(body.next()).await {
        for byte in piece.expect("a piece") {
            assert_eq!(usize::from(byte), seen / PIECE);
            seen += 1;
        }
    }
    assert_eq!(seen, PIECE * usize::from(PIECES));
}

#[tokio::test]
async fn an_upload_that_is_cut_off_leaves_the_old_file() {
    let (t, place) = (TestServer::start().await, Place::new());
    let id = t.create().await;
    let path = place.path("f");
    put(&t, &id, &path, "", "old").await;
    let pieces = futures::stream::iter([Ok(vec![b'x'; 100_000]), Err(std::io::Error::other("gone"))]);
    let request = t.request(Method::PUT, &format!("{}&atomic=true", url(&id, "", &path)));
    assert!(within(request.body(reqwest::Body::wrap_stream(pieces)).send()).await.is_err());
    assert_eq!(read(&t, &id, &path).await, b"old");
}

#[tokio::test]
async fn a_refusal_in_the_middle_of_an_upload_reaches_the_client() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let body = vec![b'x'; 20 << 20];
    let refused = put(&t, &id, "/proc/nothing/here", "", body.clone()).await;
    assert!(refused.status.is_client_error() || refused.status.is_server_error(), "{refused:?}");
    refused.code();
    let directory = put(&t, &id, "/tmp", "", body).await;
    assert_eq!((directory.status.as_u16(), directory.code()), (400, "is_a_directory"));
}

#[tokio::test]
async fn directories_links_and_attributes() {
    let (t, place) = (TestServer::start().await, Place::new());
    let id = t.create().await;
    let at = |verb: &str| format!("/v1/sandboxes/{id}/files/{verb}");
    let (dir, file, link) = (place.path("a/b"), place.path("a/b/f"), place.path("a/l"));

    let made = t.post(&at("mkdir"), &json!({"path": dir, "parents": true, "mode": "0750"})).await;
    assert_eq!((&made.json["kind"], &made.json["mode"]), (&json!("directory"), &json!("0750")), "{made:?}");
    let again = t.post(&at("mkdir"), &json!({"path": dir})).await;
    assert_eq!((again.status.as_u16(), again.code()), (409, "already_exists"));

    let written = put(&t, &id, &file, "&mode=0640", "x").await;
    assert_eq!(written.json["mode"], "0640", "{written:?}");
    let linked = t.post(&at("symlink"), &json!({"target": "b/f", "path": link})).await;
    assert_eq!((&linked.json["kind"], &linked.json["link_target"]), (&json!("symlink"), &json!("b/f")));
    assert_eq!(t.get(&url(&id, "/stat", &link)).await.json["kind"], "symlink");
    assert_eq!(read(&t, &id, &link).await, b"x");

    let changed = t.post(&at("attributes"), &json!({"path": file, "mode": "0600"})).await;
    assert_eq!(changed.json["mode"], "0600");
    let list = t.get(&format!("{}&depth=2", url(&id, "/list", &place.path("a")))).await;
    let names: Vec<_> =
        list.json["items"].as_array().expect("items").iter().map(|item| item["name"].as_str()).collect();
    assert_eq!(names, [Some("b"), Some("f"), Some("l")]);

    let moved = place.path("a/g");
    assert_eq!(t.post(&at("rename"), &json!({"from": file, "to": moved})).await.json["name"], "g");
    let gone = t.get(&url(&id, "/stat", &file)).await;
    assert_eq!((gone.status.as_u16(), gone.code()), (404, "not_found"));
    assert!(gone.message().contains(&file), "the error names the path: {gone:?}");

    let full = t.delete(&url(&id, "", &place.path("a"))).await;
    assert_eq!((full.status.as_u16(), full.code()), (409, "not_empty"));
    assert_eq!(t.delete(&format!("{}&recursive=true", url(&id, "", &place.path("a")))).await.status, 204);
    assert_eq!(t.delete(&url(&id, "", &moved)).await.status, 404);
}

#[tokio::test]
async fn paths_that_are_none_are_refused() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let long = format!("/tmp/{}", "x".repeat(5000));
    let cases = [
        (format!("/v1/sandboxes/{id}/files"), 400, "invalid_argument"),
        (format!("/v1/sandboxes/{id}/files?path="), 400, "invalid_argument"),
        (format!("/v1/sandboxes/{id}/files?path=/tmp/%ff"), 400, "invalid_argument"),
        (format!("/v1/sandboxes/{id}/files?path=/tmp/a%00b"), 400, "invalid_argument"),
        (format!("/v1/sandboxes/{id}/files?path=/tmp&unknown=1"), 400, "invalid_argument"),
        (format!("/v1/sandboxes/{id}/files?path=/tmp"), 400, "is_a_directory"),
        (format!("/v1/sandboxes/{id}/files?path=/no/such"), 404, "not_found"),
        (format!("/v1/sandboxes/{id}/files?path={long}"), 400, "too_long"),
        (format!("/v1/sandboxes/{id}/files?path=/tmp/x&user=nobody-of-this-name"), 400, "unknown_user"),
        (format!("/v1/sandboxes/{id}/files/list?path=/etc/passwd"), 400, "not_a_directory"),
    ];
    for (path, status, code) in cases {
        let answer = t.get(&path).await;
        assert_eq!(
            (answer.status.as_u16(), answer.code()),
            (status, code),
            "{}: {answer:?}",
            &path[..path.len().min(120)]
        );
    }
}

#[tokio::test]
async fn a_watch_says_when_it_stands_and_what_changes() {
    let (t, place) = (TestServer::start().await, Place::new());
    let id = t.create().await;
    let request = t.request(Method::GET, &url(&id, "/watch", place.dir.path().to_str().expect("UTF-8")));
    let response = within(request.send()).await.expect("an answer");
    if response.status() != 200 {
        panic!("not watched: {:?}", within(response.text()).await);
    }
    let mut body = response.bytes_stream();
    let (mut buffer, mut seen) = (Vec::new(), Vec::new());
    while !seen.iter().any(|line: &Value| line["type"] == "change" && line["name"] == "new") {
        let Some(piece) = within(body.next()).await else {
            panic!("the stream ended: {seen:?}");
        };
        buffer.extend(piece.expect("a piece"));
        while let Some(end) = buffer.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = buffer.drain(..=end).collect();
            let line: Value = serde_json::from_slice(&line).expect("a JSON line");
            if line["type"] == "watching" {
                std::fs::write(place.path("new"), "x").expect("a file");
            }
            seen.push(line);
        }
    }
    assert_eq!(seen[0], json!({"type": "watching"}));
    assert_eq!(seen[1], json!({"type": "change", "name": "new", "change": "create"}));
}

#[tokio::test]
async fn a_path_that_ends_with_a_slash_is_no_file_to_write() {
    let (t, place) = (TestServer::start().await, Place::new());
    let id = t.create().await;
    for path in [place.path("new/"), place.path("new//"), place.path("new/.")] {
        let refused = put(&t, &id, &path, "", "x").await;
        assert_eq!((refused.status.as_u16(), refused.code()), (400, "is_a_directory"), "{path}: {refused:?}");
    }
    assert!(!std::path::Path::new(&place.path("new")).exists());
}

#[tokio::test]
async fn a_write_into_a_sandbox_that_ends_is_told_so() {
    let (t, place) = (TestServer::start().await, Place::new());
    let id = t.create().await;
    let path = place.path("half");
    let (pieces, queue) = tokio::sync::mpsc::channel::<std::io::Result<Vec<u8>>>(1);
    let body = reqwest::Body::wrap_stream(tokio_stream::wrappers::ReceiverStream::new(queue));
    let write = put(&t, &id, &path, "", body);
    let end = async {
        pieces.send(Ok(vec![0; 1 << 20])).await.expect("taken");
        while !std::path::Path::new(&path).exists() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        assert_eq!(t.delete(&format!("/v1/sandboxes/{id}")).await.status, 204);
        drop(pieces);
    };
    let (written, ()) = within(futures::future::join(write, end)).await;
    assert_eq!((written.status.as_u16(), written.code()), (409, "sandbox_ended"), "{written:?}");
}
