//! TLS that passes through, and hellos that do not.

use std::{net::Ipv4Addr, sync::Arc};

use rustls::pki_types::ServerName;
use serde_json::{Value, json};
use stockade_gateway::proxy::hello::{self, HelloParse};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsConnector;

use super::{
    guest::GuestStream,
    servers::{Http1, get},
    world::World,
};

fn allow(names: &[&str]) -> Value {
    json!({"default": "deny", "rules": [{"id": "web", "action": "allow", "names": names}]})
}

/// A hello for `name`, made by hand.
fn hello(name: Option<&str>, more: &[(u16, &[u8])]) -> Vec<u8> {
    let mut extensions = Vec::new();
    let mut add = |kind: u16, data: &[u8]| {
        extensions.extend_from_slice(&kind.to_be_bytes());
        extensions.extend_from_slice(&(data.len() as u16).to_be_bytes());
        extensions.extend_from_slice(data);
    };
    if let Some(name) = name {
        let mut data = (name.len() as u16 + 3).to_be_bytes().to_vec();
        data.push(0);
        data.extend_from_slice(&(name.len() as u16).to_be_bytes());
        data.extend_from_slice(name.as_bytes());
        add(0, &data);
    }
    for (kind, data) in more {
        add(*kind, data);
    }
    let mut body = vec![3, 3];
    body.extend_from_slice(&[7; 32]);
    body.extend_from_slice(&[0, 0, 2, 0x13, 0x01, 1, 0]);
    body.extend_from_slice(&(extensions.len() as u16).to_be_bytes());
    body.extend_from_slice(&extensions);
    let mut message = (body.len() as u32 | 1 << 24).to_be_bytes().to_vec();
    message.extend_from_slice(&body);
    records(&message, 16 << 10)
}

fn records(message: &[u8], size: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in message.chunks(size) {
        bytes.extend_from_slice(&[22, 3, 1]);
        bytes.extend_from_slice(&(part.len() as u16).to_be_bytes());
        bytes.extend_from_slice(part);
    }
    bytes
}

/// What comes back for some bytes: everything until the end, and whether the end was a reset.
async fn say(stream: &mut GuestStream, bytes: &[u8]) -> (Vec<u8>, bool) {
    // A reset may come before all is written.
    let _ = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    let reset = stream.read_to_end(&mut answer).await.is_err();
    (answer, reset)
}

const UNRECOGNIZED_NAME: [u8; 7] = [21, 3, 3, 0, 2, 2, 112];

#[tokio::test]
async fn allowed_tls_passes_untouched() {
    let world = World::new();
    let server = world.https("good.example", "93.184.216.34", &["http/1.1"]).await;
    let (guest, _attachment) = world.attach(allow(&["good.example"]));
    // The servers' own CA is trusted and the deployment's is not: nobody is in between.
    let tls = world.connect_tls(&guest, "good.example", false, &["http/1.1"]).await.unwrap();
    let reply = Http1::over(tls).await.send(get("good.example", "/a")).await;
    assert_eq!(reply.json()["path"], "/a");
    assert_eq!(server.count(), 1);
    let passed = world.record("rule").await;
    assert_eq!(passed.facts.mode, Some("pass"));
    assert_eq!(passed.facts.server_name.as_deref(), Some("good.example"));
    assert_eq!(passed.facts.rule.as_deref(), Some("web"));
    assert_eq!(passed.facts.upstream, Some("93.184.216.34:443".parse().unwrap()));
}

#[tokio::test]
async fn a_hello_for_another_name_than_the_resolved_one_is_refused() {
    let world = World::new();
    world.https("good.example", "93.184.216.34", &[]).await;
    world.https("fine.example", "93.184.216.35", &[]).await;
    let (guest, _attachment) = world.attach(allow(&["good.example", "fine.example"]));
    for (sent, reason) in [
        (hello(Some("evil.example"), &[]), "server_name_mismatch"),
        (hello(Some("fine.example"), &[]), "server_name_mismatch"),
        (hello(None, &[]), "no_server_name"),
    ] {
        let mut stream = guest.connect_name("good.example", 443).await.unwrap();
        assert_eq!(say(&mut stream, &sent).await, (UNRECOGNIZED_NAME.to_vec(), false));
        world.record(reason).await;
    }
    assert!(world.net.dialled.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_name_in_a_hello_grants_nothing_to_an_address() {
    let world = World::new();
    world.https("good.example", "93.184.216.34", &[]).await;
    // /etc/hosts or a hard-coded address.
    let (guest, _attachment) = world.attach(allow(&["good.example"]));
    assert!(guest.connect(Ipv4Addr::new(93, 184, 216, 34), 443).await.is_err());
    // With an open default, a name that is denied is denied by address too, and one with rules has to be used.
    let (guest, _attachment) = world.attach(json!({
        "rules": [{"action": "deny", "names": ["evil.example"]}],
        "http": [{"hosts": ["api.example"], "methods": ["POST"], "action": "deny"}],
    }));
    for (name, reason) in [("evil.example", "name_denied"), ("api.example", "use_the_name")] {
        let mut stream = guest.connect(Ipv4Addr::new(93, 184, 216, 34), 443).await.unwrap();
        assert_eq!(say(&mut stream, &hello(Some(name), &[])).await.0, UNRECOGNIZED_NAME);
        world.record(reason).await;
    }
    assert!(world.net.dialled.lock().unwrap().is_empty());
}

#[tokio::test]
async fn odd_hellos_are_reset() {
    let world = World::new();
    world.https("good.example", "93.184.216.34", &[]).await;
    let (guest, _attachment) = world.attach(allow(&["good.example"]));
    let good = hello(Some("good.example"), &[]);
    let twice = hello(Some("good.example"), &[(0, &[0, 7, 0, 0, 4, b'e', b'v', b'i', b'l'])]);
    let two_names = {
        let mut list = vec![0, 22];
        for name in ["good.exam", "evil.exam"] {
            list.extend_from_slice(&[0, 0, name.len() as u8]);
            list.extend_from_slice(name.as_bytes());
        }
        hello(None, &[(0, list.as_slice())])
    };
    let mut huge = vec![22, 3, 1, 0x40, 0, 1, 1, 0, 1];
    huge.resize(70 << 10, 0);
    let mut left_over = good.clone();
    left_over[4] += 1;
    left_over.push(0);
    for sent in [
        twice,
        two_names,
        hello(Some("good.example."), &[]),
        hello(Some("93.184.216.34"), &[]),
        hello(Some("good.example\0"), &[]),
        huge,
        left_over,
        vec![22, 3, 1, 0, 0],
        vec![22, 2, 0, 0, 5, 1, 0, 0, 1, 0],
        vec![22, 3, 1, 0, 4, 2, 0, 0, 0],
    ] {
        let mut stream = guest.connect_name("good.example", 443).await.unwrap();
        assert_eq!(say(&mut stream, &sent).await, (vec![], true), "{:?}", &sent[..sent.len().min(40)]);
    }
    assert!(world.net.dialled.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_hello_in_many_pieces_is_read_as_one() {
    let world = World::new();
    world.https("good.example", "93.184.216.34", &["http/1.1"]).await;
    let (guest, _attachment) = world.attach(allow(&["good.example"]));
    let (near, mut far) = tokio::io::duplex(1 << 16);
    let mut stream = guest.connect_name("good.example", 443).await.unwrap();
    tokio::spawn(async move {
        // The first thing a client says, in segments of 16 bytes.
        let mut hello = vec![0; 1 << 16];
        let count = far.read(&mut hello).await.unwrap();
        for piece in hello[..count].chunks(16) {
            stream.write_all(piece).await.unwrap();
            tokio::task::yield_now().await;
        }
        let _ = tokio::io::copy_bidirectional(&mut far, &mut stream).await;
    });
    let config = world.client_tls(false, &["http/1.1"]);
    let name = ServerName::try_from("good.example").unwrap();
    let tls = TlsConnector::from(Arc::new(config)).connect(name, near).await.unwrap();
    assert_eq!(Http1::over(tls).await.send(get("good.example", "/")).await.status, 200);
    // And over many records, as long as they make one message.
    let whole = hello(Some("good.example"), &[(21, &[0; 9_000])]);
    let HelloParse::Hello(read) = hello::parse(&records(&whole[5..], 7)) else { panic!("not read") };
    assert_eq!(read.server_name.as_deref(), Some("good.example"));
}

#[tokio::test]
async fn an_encrypted_hello_is_noted_and_refused_where_the_policy_is_strict() {
    let world = World::new();
    world.https("good.example", "93.184.216.34", &[]).await;
    let sent = hello(Some("good.example"), &[(0xfe0d, &[0; 40])]);
    let (guest, _attachment) = world.attach(allow(&["good.example"]));
    let mut stream = guest.connect_name("good.example", 443).await.unwrap();
    say(&mut stream, &sent).await;
    assert!(world.record("rule").await.facts.encrypted_hello);
    let mut strict = allow(&["good.example"]);
    strict["deny_encrypted_client_hello"] = true.into();
    let (guest, _attachment) = world.attach(strict);
    let mut stream = guest.connect_name("good.example", 443).await.unwrap();
    assert_eq!(say(&mut stream, &sent).await.0, UNRECOGNIZED_NAME);
    world.record("encrypted_hello").await;
}

#[tokio::test]
async fn other_protocols_and_silence_on_web_ports_are_reset() {
    let world = World::new();
    world.https("good.example", "93.184.216.34", &[]).await;
    let (guest, _attachment) = world.attach_with(allow(&["good.example"]), |spec| spec.limits.head_timeout_ms = 100);
    for port in [80, 443] {
        for sent in
            [&b"SSH-2.0-OpenSSH_9.2\r\n"[..], b"\r\nGET / HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0\0"]
        {
            let mut stream = guest.connect_name("good.example", port).await.unwrap();
            assert_eq!(say(&mut stream, sent).await, (vec![], true));
        }
        // A client that waits for the server to speak first.
        let mut stream = guest.connect_name("good.example", port).await.unwrap();
        assert_eq!(say(&mut stream, b"").await, (vec![], true));
    }
    assert!(world.net.dialled.lock().unwrap().is_empty());
}

#[tokio::test]
async fn refusals_explain_themselves_over_http_and_tls() {
    let world = World::new();
    let (guest, _attachment) = world.attach(allow(&["good.example"]));
    let stream = guest.connect_name("evil.example", 80).await.unwrap();
    let reply = Http1::over(stream).await.send(get("evil.example", "/")).await;
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (403, "default"));
    assert!(reply.json()["error"]["message"].as_str().unwrap().contains("evil.example"));
    let tls = world.connect_tls(&guest, "evil.example", true, &["http/1.1"]).await.unwrap();
    let reply = Http1::over(tls).await.send(get("evil.example", "/")).await;
    assert_eq!((reply.status.as_u16(), reply.headers["x-stockade-refused"].to_str().unwrap()), (403, "default"));
    let tls = world.connect_tls(&guest, "evil.example", true, &["h2"]).await.unwrap();
    let request = http::Request::get("https://evil.example/").body(super::servers::full("")).unwrap();
    let response = super::servers::http2(tls).await.send_request(request).await.unwrap();
    assert_eq!(response.status(), 403);
    assert!(world.net.asked.lock().unwrap().is_empty() && world.net.dialled.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_name_that_leads_to_a_closed_address_is_refused_with_the_reason() {
    let world = World::new();
    let (guest, _attachment) = world.attach(json!({}));
    for address in ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "::ffff:192.168.0.1", "fd00:ec2::254"] {
        world.name("rebind.example", &[address]);
        let stream = guest.connect_name("rebind.example", 80).await.unwrap();
        let reply = Http1::over(stream).await.send(get("rebind.example", "/")).await;
        assert_eq!(reply.status, 403, "{address}");
        let tls = world.connect_tls(&guest, "rebind.example", true, &["http/1.1"]).await.unwrap();
        let reply = Http1::over(tls).await.send(get("rebind.example", "/")).await;
        assert_eq!(reply.status, 403, "{address}");
        assert!(matches!(reply.code().as_str(), "private_address" | "metadata_address"), "{}", reply.code());
    }
    assert!(world.net.dialled.lock().unwrap().is_empty());
    // Of several addresses, only the good one is tried.
    let server = world.http("mixed.example", "93.184.216.34").await;
    world.name("mixed.example", &["10.0.0.1", "93.184.216.34"]);
    let stream = guest.connect_name("mixed.example", 80).await.unwrap();
    assert_eq!(Http1::over(stream).await.send(get("mixed.example", "/")).await.status, 200);
    assert_eq!(*world.net.dialled.lock().unwrap(), ["93.184.216.34:80".parse().unwrap()]);
    assert_eq!(server.count(), 1);
}

#[tokio::test]
async fn the_hosts_own_addresses_are_closed() {
    let world = World::with(|config| config.host_addresses = vec!["93.184.216.99".parse().unwrap()]);
    world.name("self.example", &["93.184.216.99"]);
    let (guest, _attachment) = world.attach(json!({"default": "allow_public"}));
    assert!(guest.connect(Ipv4Addr::new(93, 184, 216, 99), 443).await.is_err());
    let stream = guest.connect_name("self.example", 80).await.unwrap();
    assert_eq!(Http1::over(stream).await.send(get("self.example", "/")).await.code(), "host_address");
}

#[tokio::test]
async fn an_ipv6_only_host_is_reached_through_ipv4_in_the_guest() {
    let world = World::new();
    let server = world.http("six.example", "93.184.216.34").await;
    world.name("six.example", &["2606:2800:220:1::1"]);
    let loopback = world.net.dial_target("93.184.216.34:80");
    world.serve("[2606:2800:220:1::1]:80", loopback);
    let (guest, _attachment) = world.attach(json!({}));
    let stream = guest.connect_name("six.example", 80).await.unwrap();
    assert_eq!(Http1::over(stream).await.send(get("six.example", "/")).await.status, 200);
    assert_eq!(server.count(), 1);
}

#[tokio::test]
async fn a_raw_rule_means_it_unless_a_rule_has_to_read_the_port() {
    let world = World::new();
    world.secret("API_KEY", "value");
    world.https("git.example", "93.184.216.34", &["http/1.1"]).await;
    let echo = super::world::echo_server().await;
    world.serve("93.184.216.34:22", echo);
    let (guest, attachment) = world.attach_with(
        json!({
            "default": "deny",
            "rules": [{"action": "allow", "names": ["git.example"], "ports": [22, 443], "l7": "raw"}],
            "http": [{"hosts": ["git.example"], "path": {"prefix": "/admin"}, "action": "deny"}],
        }),
        |spec| spec.limits.head_timeout_ms = 100,
    );
    // A server may speak first on 22: nobody waits for the client.
    let mut ssh = guest.connect_name("git.example", 22).await.unwrap();
    ssh.write_all(b"SSH-2.0-x\r\n").await.unwrap();
    let mut banner = [0; 11];
    ssh.read_exact(&mut banner).await.unwrap();
    // On 443 TLS is still read, and waiting does not help.
    let reply = world.get_inside(&guest, http::Request::get("/admin").header("host", "git.example")).await;
    assert_eq!(reply.code(), "http_rule");
    let mut silent = guest.connect_name("git.example", 443).await.unwrap();
    assert_eq!(say(&mut silent, b"").await, (vec![], true));
    // Once a rule names the port, what was never looked at ends.
    let named = json!({
        "default": "deny",
        "rules": [{"action": "allow", "names": ["git.example"], "ports": [22, 443], "l7": "raw"}],
        "http": [{"hosts": ["git.example"], "port": 22, "action": "deny"}],
    });
    assert_eq!(attachment.set_policy(&[serde_json::from_value(named).unwrap()]).unwrap(), 1);
}
