//! The network of real guests with real clients in them, against servers of our own under made-up public names.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use stockade_system_tests::{Ran, Sandbox, TestServer, World};

const SECRET: &str = "sk-live-51-not-for-guests";

/// Creates a sandbox with this network.
async fn create<'a>(server: &'a TestServer, network: Value) -> Sandbox<'a> {
    let body = json!({ "template": "base", "lifetime_seconds": 3600, "network": network });
    let sandbox = server.json(Method::POST, "/v1/sandboxes", Some(body)).await;
    Sandbox::new(server, sandbox["id"].as_str().expect("a sandbox has an id"))
}

async fn change(server: &TestServer, sandbox: &Sandbox<'_>, network: Value) {
    server.json(Method::PUT, &format!("/v1/sandboxes/{}/network", sandbox.id()), Some(network)).await;
}

/// The reasons of decisions with this outcome, newest first.
async fn reasons(server: &TestServer, sandbox: &Sandbox<'_>, verdict: &str) -> Vec<String> {
    let path = format!("/v1/audit?limit=1000&sandbox={}&verdict={verdict}", sandbox.id());
    let page = server.json(Method::GET, &path, None).await;
    let items = page["items"].as_array().expect("a list").iter();
    items.map(|item| item["reason"].as_str().expect("a reason").to_owned()).collect()
}

fn text(ran: &Ran) -> String {
    String::from_utf8_lossy(&ran.stdout).into_owned()
}

async fn curl(sandbox: &Sandbox<'_>, arguments: &str) -> Ran {
    sandbox.shell(&format!("curl --silent --show-error --max-time 60 {arguments}")).await
}

#[tokio::test]
async fn a_guest_reaches_what_its_policy_allows_and_nothing_else() {
    let world = World::start(&["api.world.example", "www.world.example", "other.example"]).await;
    let network = world.network_file(&json!({}));
    let server = TestServer::start_with(&["--pool", "0", "--network", &network]).await;
    let sandbox = server.create("base").await;
    sandbox.write_as("root", "/etc/ssl/world.pem", world.certificate().into_bytes()).await;

    // The web is open; the name server answers whatever it is called.
    let ran = curl(&sandbox, "http://api.world.example/echo").await.expect_success();
    assert!(text(&ran).contains("api.world.example"), "{ran}");
    let ran = curl(&sandbox, "--cacert /etc/ssl/world.pem https://www.world.example/echo").await.expect_success();
    assert!(text(&ran).contains("www.world.example"), "TLS passes through to a server the guest trusts itself: {ran}");
    let script = "import socket; print(socket.gethostbyname('api.world.example'))";
    let first = text(&sandbox.run(json!({ "argv": ["python3", "-c", script] })).await.expect_success());
    let ask = "import socket,struct; s=socket.socket(socket.AF_INET,socket.SOCK_DGRAM); s.settimeout(10);\
               q=b'\\1\\2\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0'+b''.join(bytes([len(p)])+p for p in b'api.world.example'.split(b'.'))\
               +b'\\0\\0\\1\\0\\1'; s.sendto(q,('8.8.8.8',53)); print(socket.inet_ntoa(s.recv(512)[-4:]))";
    let other = text(&sandbox.run(json!({ "argv": ["python3", "-c", ask] })).await.expect_success());
    assert_eq!(first, other, "whoever is asked, the same server answers");

    // What is closed is refused at once: metadata, private and own addresses, other ports, names as addresses.
    for place in [
        "169.254.169.254:80",
        "10.0.0.1:443",
        "10.123.0.1:80",
        "10.123.0.1:22",
        "192.168.0.1:80",
        "[fd00:ec2::254]:80",
        "1.1.1.1:22",
    ] {
        let ran = curl(&sandbox, &format!("--max-time 20 http://{place}/")).await;
        assert_ne!(ran.code, Some(0), "{place}: {ran}");
        assert_ne!(ran.code, Some(28), "{place} is refused and not left to time out: {ran}");
    }
    let ran = curl(&sandbox, "--connect-to ::169.254.169.254:80 http://api.world.example/latest/meta-data/").await;
    assert_ne!(ran.code, Some(0), "{ran}");
    let denied = reasons(&server, &sandbox, "deny").await;
    assert!(denied.iter().any(|reason| reason == "metadata_address"), "{denied:?}");
    assert!(denied.iter().any(|reason| reason == "private_address"), "{denied:?}");

    // Narrowed while it runs: the rest is refused with a reason a program can read.
    change(&server, &sandbox, json!({ "allow": ["www.world.example"] })).await;
    let ran = curl(&sandbox, "http://api.world.example/echo").await.expect_success();
    let refusal: Value = serde_json::from_str(&text(&ran)).unwrap_or_else(|_| panic!("JSON: {ran}"));
    assert!(refusal["error"]["message"].as_str().is_some_and(|text| text.contains("api.world.example")), "{ran}");
    let ran = curl(&sandbox, "-o /dev/null -w '%{http_code}' https://other.example/").await;
    assert_eq!(text(&ran), "403", "the refusal comes over TLS the guest trusts: {ran}");
    curl(&sandbox, "http://www.world.example/echo").await.expect_success();
    let explained = server
        .json(
            Method::POST,
            &format!("/v1/sandboxes/{}/network/explain", sandbox.id()),
            Some(json!({ "url": "https://api.world.example/" })),
        )
        .await;
    assert_eq!(explained["allowed"], false, "{explained}");
    change(&server, &sandbox, json!({ "internet": false })).await;
    let ran = curl(&sandbox, "-o /dev/null -w '%{http_code}' http://www.world.example/echo").await;
    assert_eq!(text(&ran), "403", "{ran}");

    // A policy that cannot be honoured is refused and changes nothing.
    let path = format!("/v1/sandboxes/{}/network", sandbox.id());
    let bad = json!({ "policy": { "rules": [{ "action": "allow", "cidrs": ["300.0.0.0/8"] }] } });
    let (status, answer) = server.try_json(Method::PUT, &path, Some(bad)).await.expect("it answers");
    assert_eq!(status, StatusCode::BAD_REQUEST, "{answer}");
    assert!(answer.to_string().contains("policy.rules[0].cidrs[0]"), "{answer}");
    assert_eq!(server.json(Method::GET, &path, None).await["network"], json!({ "internet": false }));
    server.stop().await;
}

#[tokio::test]
async fn a_secret_is_used_by_a_guest_that_never_has_it() {
    let world = World::start(&["api.world.example", "other.example"]).await;
    let network = world.network_file(&json!({}));
    let server = TestServer::start_with(&["--pool", "0", "--network", &network]).await;
    let secret = json!({ "value": SECRET, "hosts": ["api.world.example"] });
    let answer = server.json(Method::PUT, "/v1/secrets/world", Some(secret)).await;
    assert!(!answer.to_string().contains(SECRET), "a value never comes back: {answer}");
    let network = json!({ "secrets": [{ "secret": "world", "env": "WORLD_KEY" }] });
    let sandbox = create(&server, network).await;

    // Clients people have, each in its own way of trusting certificates; `requests` is the copy that comes with pip.
    sandbox.write("/tmp/talk.py", SOCKET).await;
    let clients = [
        r#"curl -sS --max-time 60 -H "Authorization: Bearer $WORLD_KEY" https://api.world.example/echo"#.to_owned(),
        r#"curl -sS --max-time 60 --user "me:$WORLD_KEY" https://api.world.example/echo"#.to_owned(),
        "python3 -c 'import os, urllib.request as u; r = u.Request(\"https://api.world.example/echo\", \
         headers={\"X-Api-Key\": os.environ[\"WORLD_KEY\"]}); print(u.urlopen(r, timeout=60).read().decode())'"
            .to_owned(),
        "node -e 'fetch(\"https://api.world.example/echo\", {headers: {\"x-api-key\": process.env.WORLD_KEY}})\
         .then(r => r.text()).then(console.log)'"
            .to_owned(),
        "python3 -c 'import os; from pip._vendor import requests as r; r.get(\"https://api.world.example/echo\", \
         headers={\"X-Api-Key\": os.environ[\"WORLD_KEY\"]}, timeout=60).raise_for_status()'"
            .to_owned(),
        "(printf 'GET /echo HTTP/1.1\\r\\nHost: api.world.example\\r\\nX-Api-Key: %s\\r\\nConnection: close\\r\\n\\r\\n' \
         $WORLD_KEY; sleep 5) | openssl s_client -quiet -verify_return_error -verify_hostname api.world.example \
         -connect api.world.example:443 | grep -q '200 OK'"
            .to_owned(),
        "python3 /tmp/talk.py".to_owned(),
    ];
    for client in &clients {
        sandbox.shell(client).await.expect_success();
    }
    let seen = world.seen();
    assert_eq!(seen.len(), clients.len());
    for request in &seen {
        let headers = request["headers"].to_string();
        let basic = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, format!("me:{SECRET}"));
        assert!(headers.contains(SECRET) || headers.contains(&basic), "{headers}");
    }

    // It goes nowhere else, nor in clear text, and the guest can find it nowhere.
    let ran = curl(&sandbox, r#""http://other.example/echo?key=$WORLD_KEY""#).await;
    assert!(text(&ran).contains("token_misplaced"), "{ran}");
    let ran = curl(&sandbox, r#"-H "Authorization: Bearer $WORLD_KEY" http://api.world.example/echo"#).await;
    assert!(!text(&ran).contains(SECRET), "{ran}");
    let ran = sandbox.shell(&format!("sudo grep -rl '{SECRET}' /proc/[0-9]*/environ /etc /home /tmp /root /run")).await;
    assert_eq!(text(&ran), "");
    assert!(world.seen()[clients.len()..].iter().all(|request| !request.to_string().contains(SECRET)));

    // The next value is used at once; one whose hosts no longer fit is not.
    let next = json!({ "value": format!("{SECRET}-2"), "hosts": ["api.world.example"] });
    assert_eq!(server.json(Method::PUT, "/v1/secrets/world", Some(next)).await["version"], 2);
    sandbox.shell(&clients[0]).await.expect_success();
    assert!(world.seen().last().expect("one").to_string().contains(&format!("{SECRET}-2")));
    let moved = json!({ "value": SECRET, "hosts": ["elsewhere.example"] });
    server.json(Method::PUT, "/v1/secrets/world", Some(moved)).await;
    let ran = sandbox.shell(&clients[0]).await;
    assert!(text(&ran).contains("secret"), "{ran}");

    // Nothing the server keeps or says holds it.
    let audit = server.json(Method::GET, &format!("/v1/audit?limit=1000&sandbox={}", sandbox.id()), None).await;
    assert!(audit.to_string().contains("\"world\"") && !audit.to_string().contains(SECRET), "{audit}");
    sandbox.kill().await;
    // It looks for the secret in what the server kept.
    server.stop().await;
}

#[tokio::test]
async fn the_network_is_there_again_after_a_fork_a_pause_and_a_crash_of_the_server() {
    let world = World::start(&["api.world.example", "other.example"]).await;
    let network = world.network_file(&json!({}));
    let mut server = TestServer::start_with(&["--pool", "0", "--network", &network]).await;
    let id = {
        let sandbox = create(&server, json!({ "allow": ["api.world.example"] })).await;
        sandbox.write("/tmp/hold.py", HOLD).await;
        sandbox
            .shell("nohup python3 /tmp/hold.py >/tmp/held 2>&1 & until grep -q connected /tmp/held; do sleep 0.1; done")
            .await;
        sandbox.id().to_owned()
    };
    let reaches = async |server: &TestServer, id: &str| {
        let sandbox = Sandbox::new(server, id);
        curl(&sandbox, "http://api.world.example/echo").await.expect_success();
        let ran = curl(&sandbox, "-o /dev/null -w '%{http_code}' http://other.example/echo").await;
        assert_eq!(text(&ran), "403", "the policy came along: {ran}");
    };
    let reconnects = async |server: &TestServer, id: &str| {
        let again =
            "timeout 20 sh -c 'until [ $(grep -c connected /tmp/held) -ge 2 ]; do sleep 0.1; done'; cat /tmp/held";
        let held = text(&Sandbox::new(server, id).shell(again).await);
        let lines: Vec<_> = held.lines().filter(|line| !line.starts_with("not yet")).collect();
        assert!(lines.len() > 2 && lines[1].starts_with("END") && lines[2] == "connected", "{held}");
    };
    reaches(&server, &id).await;

    let forks = server.json(Method::POST, &format!("/v1/sandboxes/{id}/fork"), Some(json!({ "count": 1 }))).await;
    let child = forks["items"][0]["sandbox"]["id"].as_str().expect("a child").to_owned();
    // A child's old connection ends at once, also one that only reads.
    reconnects(&server, &child).await;
    reaches(&server, &child).await;
    let ran = Sandbox::new(&server, &id).shell("grep -c END /tmp/held").await;
    assert_eq!(text(&ran), "0\n", "the parent's connection goes on");
    Sandbox::new(&server, &child).kill().await;

    let pause = format!("/v1/sandboxes/{id}/pause");
    server.json(Method::POST, &pause, Some(json!({ "tier": "standby" }))).await;
    server.json(Method::POST, &format!("/v1/sandboxes/{id}/resume"), Some(json!({}))).await;
    let ran = Sandbox::new(&server, &id).shell("grep -c END /tmp/held").await;
    assert_eq!(text(&ran), "0\n", "a machine in standby keeps its connections");
    reaches(&server, &id).await;
    server.json(Method::POST, &pause, Some(json!({}))).await;
    server.json(Method::POST, &format!("/v1/sandboxes/{id}/resume"), Some(json!({}))).await;
    reconnects(&server, &id).await;
    reaches(&server, &id).await;

    // The server dies; the machine runs on, without a network until the next server.
    server.send_kill();
    server.reap().await;
    server.start_again().await;
    reaches(&server, &id).await;
    server.stop().await;
}

#[tokio::test]
async fn what_a_guest_sends_is_metered_once_over_restarts() {
    const SENT: u64 = 1_000_000;
    let world = World::start(&["api.world.example"]).await;
    let network = world.network_file(&json!({}));
    let mut server =
        TestServer::start_with(&["--pool", "0", "--network", &network, "--price-egress-gib", "1024"]).await;
    let id = server.create("base").await.id().to_owned();
    let path = format!("/v1/usage?sandbox={id}");
    let send = async |server: &TestServer| {
        let sandbox = Sandbox::new(server, &id);
        let upload = "-o /dev/null --data-binary @upload http://api.world.example/echo";
        sandbox.shell(&format!("head -c {SENT} /dev/zero >upload")).await.expect_success();
        curl(&sandbox, upload).await.expect_success();
    };
    let egress = async |server: &TestServer| {
        let usage = server.json(Method::GET, &path, None).await;
        let item = &usage["items"][0];
        let bytes = item["egress_bytes"].as_u64().expect("a number");
        // 1,024 dollars a GiB: bytes and dollars say the same.
        let dollars = item["cost"]["egress"].as_f64().expect("a number");
        assert!((dollars - bytes as f64 / f64::from(1 << 20)).abs() < 0.001, "{usage}");
        bytes
    };
    assert_eq!(egress(&server).await, 0);
    send(&server).await;
    let first = egress(&server).await;
    assert!((SENT..SENT + 10_000).contains(&first), "{first}: the body, and a few headers");
    server.terminate().await;
    server.start_again().await;
    assert_eq!(egress(&server).await, first);
    send(&server).await;
    let second = egress(&server).await;
    assert_eq!(second, 2 * first, "the same again");
    // What goes nowhere is not charged.
    let refused = Sandbox::new(&server, &id);
    curl(&refused, "-X POST -d what http://10.0.0.1/ || true").await;
    assert_eq!(egress(&server).await, second);
    server.kill_all().await;
    assert_eq!(egress(&server).await, second);
    server.stop().await;
}

#[tokio::test]
async fn a_port_of_a_sandbox_is_reached_from_outside_by_those_who_may() {
    let server = TestServer::start().await;
    let sandbox = server.create("base").await;
    sandbox.write("/home/user/site/index.html", "the site").await;
    let serve = "cd /home/user/site && nohup python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 & \
                 until curl -s http://127.0.0.1:8000/ >/dev/null; do sleep 0.1; done";
    sandbox.shell(serve).await.expect_success();
    let host = |port: u16| format!("{port}-{}.stockade.localhost", sandbox.id());
    let look = async |port: u16, path: &str, header: Option<(&str, &str)>| {
        let mut request = server.anonymous(Method::GET, path).header("host", host(port));
        if let Some((name, value)) = header {
            request = request.header(name, value);
        }
        let answer = request.send().await.expect("it answers");
        let cookie = answer.headers().get("set-cookie").map(|value| value.to_str().expect("text").to_owned());
        (answer.status(), cookie, answer.text().await.expect("a body"))
    };

    let (status, _, body) = look(8000, "/", None).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED, "{body}");
    assert!(body.contains("preview_closed"), "{body}");
    let path = format!("/v1/sandboxes/{}/previews", sandbox.id());
    let link = server.json(Method::POST, &path, Some(json!({ "port": 8000 }))).await;
    let token = link["token"].as_str().expect("a token");
    assert!(link["url"].as_str().is_some_and(|url| url.contains(&host(8000)) && url.contains(token)), "{link}");
    let query = format!("/?stockade_token={token}");
    let (status, cookie, body) = look(8000, &query, None).await;
    assert_eq!((status, body.as_str()), (StatusCode::OK, "the site"));
    let cookie = cookie.expect("the token is kept as a cookie");
    let pair = cookie.split(';').next().expect("one part");
    assert_eq!(look(8000, "/index.html", Some(("cookie", pair))).await.0, StatusCode::OK);
    assert_eq!(look(8000, "/", Some(("x-stockade-token", token))).await.0, StatusCode::OK);
    assert_eq!(look(8001, &query, None).await.0, StatusCode::UNAUTHORIZED, "a link is for its port");
    let forged = query.replace(&token[..4], "9999");
    assert_eq!(look(8000, &forged, None).await.0, StatusCode::UNAUTHORIZED, "a link ends when it says");
    let (status, _, body) = look(9, "/", Some(("x-api-key", &server.api_key()))).await;
    assert_eq!(status, StatusCode::BAD_GATEWAY);
    assert!(body.contains("port_closed"), "{body}");
    change(&server, &sandbox, json!({ "previews": "public" })).await;
    assert_eq!(look(8000, "/", None).await.2, "the site");

    // The same port as a TCP port here.
    let (mut tunnel, address) = server.tunnel(sandbox.id(), 8000).await;
    let page = reqwest::get(format!("http://{address}/")).await.expect("it answers").text().await.expect("a body");
    assert_eq!(page, "the site");
    tunnel.kill().await.expect("it runs");
    server.stop().await;
}

#[tokio::test]
async fn a_port_takes_the_traffic_token_and_its_server_sees_the_masked_host() {
    let server = TestServer::start().await;
    let sandbox = create(&server, json!({ "previews": "token", "mask_request_host": "localhost:${PORT}" })).await;
    sandbox.write("/tmp/heads.py", HEADS).await;
    let serve = "nohup python3 /tmp/heads.py >/dev/null 2>&1 & \
                 until curl -s http://127.0.0.1:8000/ >/dev/null; do sleep 0.1; done";
    sandbox.shell(serve).await.expect_success();
    let e2b = async |method: Method, path: &str| {
        let request = server.anonymous(method, path).header("host", "api.e2b.stockade.localhost");
        let answer = request.header("x-api-key", server.api_key()).json(&json!({ "timeout": 600 })).send().await;
        answer.expect("it answers").json::<Value>().await.expect("JSON")
    };
    let connected = e2b(Method::POST, &format!("/sandboxes/{}/connect", sandbox.id())).await;
    let token = connected["trafficAccessToken"].as_str().expect("a token").to_owned();
    let host = format!("8000-{}.e2b.stockade.localhost", sandbox.id());
    let look = async |host: &str, header: Option<(&str, &str)>| {
        let mut request = server.anonymous(Method::GET, "/").header("host", host);
        if let Some((name, value)) = header {
            request = request.header(name, value);
        }
        let answer = request.send().await.expect("it answers");
        (answer.status(), answer.text().await.expect("a body"))
    };
    assert_eq!(look(&host, None).await.0, StatusCode::FORBIDDEN);
    assert_eq!(look(&host, Some(("e2b-traffic-access-token", "wrong"))).await.0, StatusCode::FORBIDDEN);
    let (status, heads) = look(&host, Some(("e2b-traffic-access-token", &token))).await;
    assert_eq!(status, StatusCode::OK, "{heads}");
    let heads: Value = serde_json::from_str(&heads).expect("JSON");
    assert_eq!((&heads["host"], &heads["x-forwarded-host"]), (&json!("localhost:8000"), &json!(host)));
    assert!(!heads.to_string().contains(&token), "what opened the door stays outside: {heads}");
    // By its own host name it takes a link or the key, as a private one does.
    let host = format!("8000-{}.stockade.localhost", sandbox.id());
    assert_eq!(look(&host, None).await.0, StatusCode::UNAUTHORIZED);
    let (status, heads) = look(&host, Some(("x-api-key", &server.api_key()))).await;
    assert!(status == StatusCode::OK && heads.contains("localhost:8000"), "{heads}");
    server.stop().await;
}

/// A WebSocket: the handshake carries the token, and what is sent then comes back.
const SOCKET: &str = "
import os, socket, ssl
host = 'api.world.example'
s = ssl.create_default_context().wrap_socket(socket.create_connection((host, 443), 60), server_hostname=host)
heads = ['GET /socket HTTP/1.1', 'Host: ' + host, 'Connection: Upgrade', 'Upgrade: websocket',
         'Sec-WebSocket-Version: 13', 'Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==',
         'Authorization: Bearer ' + os.environ['WORLD_KEY'], '', '']
s.sendall('\\r\\n'.join(heads).encode())
answer = b''
while not answer.endswith(b'\\r\\n\\r\\n'):
    answer += s.recv(1)
assert answer.startswith(b'HTTP/1.1 101'), answer
s.sendall(b'\\x81\\x82\\0\\0\\0\\0hi')
assert s.recv(1) + s.recv(1) + s.recv(1) + s.recv(1) == b'\\x81\\x02hi'
";

/// Answers with the headers it was asked with.
const HEADS: &str = "
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
class Heads(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({name.lower(): value for name, value in self.headers.items()}).encode()
        self.send_response(200)
        self.send_header('content-length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
HTTPServer(('127.0.0.1', 8000), Heads).serve_forever()
";

/// Keeps a connection on which nothing ever comes, and makes another one when it ends.
const HOLD: &str = "
import socket, time
while True:
    try:
        s = socket.create_connection(('api.world.example', 80), 10)
    except OSError as error:
        print('not yet', error, flush=True)
        time.sleep(0.2)
        continue
    s.settimeout(None)
    print('connected', flush=True)
    try:
        print('END', s.recv(1), flush=True)
    except OSError as error:
        print('END', error, flush=True)
";
