//! Host names over real sockets.

use crate::support::{BASE, TestServer};

async fn ask(t: &TestServer, host: &str, path: &str, more: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n{more}Connection: close\r\n\r\n");
    t.raw(request.as_bytes()).await
}

#[tokio::test]
async fn each_host_name_reaches_its_own_api() {
    let t = TestServer::start().await;
    for host in ["localhost", BASE, "127.0.0.1:1", "[::1]:80", "box.lan", "STOCKADE.LOCALHOST."] {
        let answer = ask(&t, host, "/v1/health", "").await;
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("{\"status\":\"ok\"}"), "{host}: {answer}");
    }
    // E2B's errors carry the number beside the message; ours are wrapped.
    let control = ask(&t, &format!("api.e2b.{BASE}"), "/sandboxes", "").await;
    assert!(control.starts_with("HTTP/1.1 401 ") && control.contains("\"code\":401"), "{control}");
    let native = ask(&t, BASE, "/sandboxes", "").await;
    assert!(native.starts_with("HTTP/1.1 401 ") && native.contains("\"unauthorized\""), "{native}");
    let sandbox = ask(&t, &format!("49983-sbxaaaaaaaaaaaaaaaaaaaa.e2b.{BASE}"), "/health", "").await;
    assert!(!sandbox.contains("{\"status\":\"ok\"}") && !sandbox.contains("\"unauthorized\""), "{sandbox}");
}

#[tokio::test]
async fn single_origin_mode_finds_e2b_by_its_headers() {
    let t = TestServer::start().await;
    let control = ask(&t, "127.0.0.1:3000", "/v2/sandboxes", "X-API-KEY: e2b_00\r\n").await;
    assert!(control.starts_with("HTTP/1.1 401 ") && control.contains("\"code\":401"), "{control}");
    let sandbox = ask(&t, "127.0.0.1:3000", "/health", "E2b-Sandbox-Id: sbxaaaaaaaaaaaaaaaaaaaa\r\n").await;
    assert!(!sandbox.contains("\"unauthorized\""), "{sandbox}");
    let native = ask(&t, "127.0.0.1:3000", "/v1/sandboxes", "X-API-KEY: e2b_00\r\n").await;
    assert!(native.contains("\"unauthorized\""), "{native}");
}

#[tokio::test]
async fn hostile_hosts_get_a_clear_no() {
    let t = TestServer::start().await;
    let cases = [
        ("user@localhost", 400, "invalid_host"),
        ("a..b", 400, "invalid_host"),
        ("localhost:99999", 400, "invalid_host"),
        ("0-x.e2b.stockade.localhost", 400, "Invalid sandbox port"),
        ("80-.e2b.stockade.localhost", 400, "Invalid sandbox ID"),
        ("sandbox.e2b.stockade.localhost", 400, "E2b-Sandbox-Id"),
        ("80-x.stockade.localhost", 401, "preview_closed"),
        ("other.stockade.localhost", 404, "unknown_host"),
    ];
    for (host, status, words) in cases {
        let answer = ask(&t, host, "/v1/health", "").await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains(words), "{host}: {answer}");
    }
    let none = t.raw(b"GET /v1/health HTTP/1.1\r\nConnection: close\r\n\r\n").await;
    assert!(none.starts_with("HTTP/1.1 400 ") && none.contains("invalid_host"), "{none}");
    let two =
        t.raw(b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\nConnection: close\r\n\r\n").await;
    assert!(two.starts_with("HTTP/1.1 400 "), "{two}");
}
