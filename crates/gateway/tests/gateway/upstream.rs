//! Ways out that are not the host's own: an upstream proxy of the operator's, and proxies that rules forward to.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{Request, header};
use serde_json::{Value, json};
use stockade_gateway::{Asker, Fetcher, UpstreamProxyConfig, broker, tls_towards};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use super::{
    servers::{Http1, get},
    world::{Net, World},
};

const PROXY: &str = "10.9.9.9:3128";
const PASSWORD: &str = "proxy-password-1";

/// A proxy that speaks CONNECT and notes whom it was asked for.
struct Proxy {
    asked: Arc<Mutex<Vec<String>>>,
}

impl Proxy {
    async fn start(net: Arc<Net>) -> (Self, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let notes = Arc::clone(&asked);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, Arc::clone(&net), Arc::clone(&notes)));
            }
        });
        (Self { asked }, address)
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

async fn serve(mut stream: TcpStream, net: Arc<Net>, notes: Arc<Mutex<Vec<String>>>) {
    let mut first = [0];
    if stream.peek(&mut first).await.is_err() {
        return;
    }
    if first == [5] {
        // Clients that are refused or that we refuse go away.
        let _ = serve_socks5(stream, net, notes).await;
        return;
    }
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    let head = String::from_utf8(head).unwrap();
    let target = head.strip_prefix("CONNECT ").unwrap().split(' ').next().unwrap().to_owned();
    notes.lock().unwrap().push(target.clone());
    let wanted = format!("proxy-authorization: Basic {}", STANDARD.encode(format!("me:{PASSWORD}")));
    if !head.to_lowercase().contains(&wanted.to_lowercase()) {
        stream.write_all(b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n").await.unwrap();
        return;
    }
    let mut server = TcpStream::connect(net.dial_target(&target)).await.unwrap();
    stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
    let _ = tokio::io::copy_bidirectional(&mut stream, &mut server).await;
}

/// RFC 1928 and 1929, byte by byte.
async fn serve_socks5(mut stream: TcpStream, net: Arc<Net>, notes: Arc<Mutex<Vec<String>>>) -> std::io::Result<()> {
    let count = {
        stream.read_u8().await?;
        stream.read_u8().await?
    };
    let mut methods = vec![0; count.into()];
    stream.read_exact(&mut methods).await?;
    if !methods.contains(&2) {
        return stream.write_all(&[5, 0xff]).await;
    }
    stream.write_all(&[5, 2]).await?;
    stream.read_u8().await?;
    let mut said = Vec::new();
    for _ in 0..2 {
        let mut text = vec![0; stream.read_u8().await?.into()];
        stream.read_exact(&mut text).await?;
        said.push(String::from_utf8(text).unwrap());
    }
    let known = said == ["me", PASSWORD];
    stream.write_all(&[1, (!known).into()]).await?;
    if !known {
        notes.lock().unwrap().push("a stranger".to_owned());
        return Ok(());
    }
    let mut head = [0; 4];
    stream.read_exact(&mut head).await?;
    assert_eq!(head, [5, 1, 0, 1], "it is asked for IPv4 addresses, never for names");
    let address = std::net::Ipv4Addr::from_bits(stream.read_u32().await?);
    let target = format!("{address}:{}", stream.read_u16().await?);
    notes.lock().unwrap().push(target.clone());
    let mut server = TcpStream::connect(net.dial_target(&target)).await?;
    stream.write_all(&[5, 0, 0, 1, 0, 0, 0, 0, 0, 0]).await?;
    tokio::io::copy_bidirectional(&mut stream, &mut server).await.map(drop)
}

/// A world behind a proxy; `password` is what we say to it.
async fn behind_proxy(password: &str, more: Value) -> (World, Proxy, Fetcher) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), password).unwrap();
    let mut config = json!({"url": "http://proxy.corp.example:3128", "username": "me", "password_file": file.path()});
    for (name, value) in more.as_object().unwrap() {
        config[name] = value.clone();
    }
    let config: UpstreamProxyConfig = serde_json::from_value(config).unwrap();
    let mut fetcher = None;
    let world = World::with(|gateway| {
        let tls = tls_towards(&gateway.upstream_roots, &[b"http/1.1"]).unwrap();
        gateway.upstream_proxy = Some(Arc::new(config.open(tls).unwrap()));
        let routes = [("routed.example".to_owned(), "10.1.1.1".to_owned())].into();
        gateway.routes = stockade_gateway::Routes::parse(&routes).unwrap();
        fetcher = Some(Fetcher::new(gateway, None).unwrap());
    });
    let (proxy, address) = Proxy::start(Arc::clone(&world.net)).await;
    world.name("proxy.corp.example", &["10.9.9.9"]);
    world.serve(PROXY, address);
    (world, proxy, fetcher.unwrap())
}

#[tokio::test]
async fn everything_goes_through_the_operators_proxy_as_an_address_that_was_judged() {
    let (world, proxy, fetcher) = behind_proxy(PASSWORD, json!({"direct_cidrs": ["93.184.217.0/24"]})).await;
    let server = world.https("good.example", "93.184.216.34", &["h2", "http/1.1"]).await;
    world.http("plain.example", "93.184.216.35").await;
    world.http("near.example", "93.184.217.1").await;
    let (guest, _attachment) = world.attach(json!({"intercept": {"always": ["good.example"]}}));
    // Read, passed through, in clear text, and asked by the gateway itself.
    let reply = world.get_inside(&guest, Request::get("/a").header(header::HOST, "good.example")).await;
    assert_eq!((reply.status, server.count()), (http::StatusCode::OK, 1));
    let mut http = Http1::over(guest.connect_name("plain.example", 80).await.unwrap()).await;
    assert_eq!(http.send(get("plain.example", "/b")).await.status, 200);
    let request = Request::post("https://good.example/c").body(Vec::new()).unwrap();
    let answer = fetcher.fetch(Asker::User, std::time::Duration::from_secs(30), request).await.unwrap();
    assert_eq!(answer.status(), 200);
    assert_eq!(proxy.asked(), ["93.184.216.34:443", "93.184.216.35:80", "93.184.216.34:443"]);
    // Networks that need no proxy, and the operator's routes.
    let mut http = Http1::over(guest.connect_name("near.example", 80).await.unwrap()).await;
    assert_eq!(http.send(get("near.example", "/d")).await.status, 200);
    world.serve("10.1.1.1:80", world.net.dial_target("93.184.216.35:80"));
    let mut http = Http1::over(guest.connect_name("routed.example", 80).await.unwrap()).await;
    assert_eq!(http.send(get("routed.example", "/e")).await.status, 200);
    assert_eq!(proxy.asked().len(), 3);
}

#[tokio::test]
async fn a_proxy_reaches_no_address_that_is_closed_and_is_not_passed_by_when_it_fails() {
    let (world, proxy, _) = behind_proxy(PASSWORD, json!({})).await;
    for (name, address) in
        [("inside.example", "10.0.0.7"), ("metadata.example", "169.254.169.254"), ("here.example", "127.0.0.1")]
    {
        world.http(name, address).await;
        let (guest, _attachment) = world.attach(json!({}));
        let mut http = Http1::over(guest.connect_name(name, 80).await.unwrap()).await;
        assert_eq!(http.send(get(name, "/")).await.status, 403, "{name}");
    }
    assert_eq!((proxy.asked().len(), world.net.dialled.lock().unwrap().len()), (0, 0));

    let (world, proxy, _) = behind_proxy("wrong", json!({})).await;
    let server = world.http("plain.example", "93.184.216.35").await;
    let (guest, _attachment) = world.attach(json!({}));
    let mut http = Http1::over(guest.connect_name("plain.example", 80).await.unwrap()).await;
    let reply = http.send(get("plain.example", "/")).await;
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (502, "connect_failed"));
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    assert!(text.contains("407") && !text.contains("wrong") && !text.contains(&STANDARD.encode("me:wrong")), "{text}");
    assert_eq!((server.count(), proxy.asked().len()), (0, 1));
    assert!(world.net.dialled.lock().unwrap().iter().all(|address| address.to_string() == PROXY));
}

fn forwarding(url: &str, more: Value) -> Value {
    json!({
        "rules": [{"action": "allow", "names": ["api.example"]}],
        "http": [{"id": "through ours", "hosts": ["api.example"], "methods": ["POST"], "path": {"prefix": "/v1/"},
                  "action": {"forward": {"url": url, "headers": more}}}],
    })
}

#[tokio::test]
async fn chosen_requests_go_to_the_rules_proxy_and_say_where_they_were_meant_to_go() {
    let world = World::new();
    world.secret("PROXY_KEY", "key-of-the-proxy");
    let host = world.https("api.example", "93.184.216.34", &["http/1.1"]).await;
    let proxy = world.https("proxy.example", "93.184.216.40", &["h2", "http/1.1"]).await;
    let mut policy = forwarding("https://proxy.example/in/", json!({"x-key": "${secrets.PROXY_KEY}"}));
    policy["http"][0]["mask_echo"] = json!(true);
    let (guest, _attachment) = world.attach(policy);
    let ask = async |method: &str, path: &str| {
        let request = Request::builder().method(method).uri(path).header(header::HOST, "api.example");
        world
            .get_inside(&guest, request.header("x-stockade-forwarded-host", "forged").header("authorization", "mine"))
            .await
    };
    let reply = ask("POST", "/v1/models?x=1").await;
    assert_eq!((reply.status.as_u16(), &reply.json()["headers"]["x-key"]), (200, &json!(["${secrets.PROXY_KEY}"])));
    let seen = proxy.last();
    assert_eq!((&seen["path"], &seen["method"]), (&json!("/in/v1/models?x=1"), &json!("POST")));
    let header = |name: &str| seen["headers"][name].clone();
    assert_eq!(header("x-stockade-forwarded-host"), json!(["api.example"]));
    assert_eq!(header("x-stockade-forwarded-scheme"), json!(["https"]));
    assert_eq!(header("x-stockade-forwarded-port"), json!(["443"]));
    assert_eq!((header("x-key"), header("authorization")), (json!(["key-of-the-proxy"]), json!(["mine"])));
    assert!(header("x-stockade-sandbox")[0].is_string());
    assert_eq!((host.count(), proxy.count()), (0, 1));
    for (method, path) in [("GET", "/v1/models"), ("POST", "/v2/models"), ("POST", "/v1/../v2")] {
        assert_eq!(ask(method, path).await.status, 200);
    }
    assert_eq!((host.count(), proxy.count()), (3, 1));
    let record = world.records().into_iter().find(|record| record.facts.rule.as_deref() == Some("through ours"));
    assert_eq!(record.unwrap().facts.upstream.unwrap().to_string(), "93.184.216.40:443");
}

#[tokio::test]
async fn a_forward_opens_nothing_and_leads_a_sandboxs_requests_to_no_closed_address() {
    let world = World::new();
    let host = world.https("api.example", "93.184.216.34", &["http/1.1"]).await;
    let inside = world.https("inside.example", "10.0.0.7", &["http/1.1"]).await;
    let post = |path: &str| Request::post(path.to_owned()).header(header::HOST, "api.example");
    let (guest, _attachment) = world.attach(forwarding("https://inside.example/", json!({})));
    let reply = world.get_inside(&guest, post("/v1/x")).await;
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (403, "private_address"));
    // The proxy is not the guest's to reach, and the host has to be allowed.
    let reply = world.get_inside(&guest, Request::get("/").header(header::HOST, "inside.example")).await;
    assert_eq!(reply.status, 403);
    let mut closed = forwarding("https://inside.example/", json!({}));
    closed["rules"] = json!([]);
    closed["default"] = json!("deny");
    let (guest, _attachment) = world.attach(closed);
    assert_eq!(world.get_inside(&guest, post("/v1/x")).await.status, 403);
    assert_eq!((host.count(), inside.count()), (0, 0));

    // The operator's own rule may lead inside.
    let (guest, _attachment) = world.attach_with(json!({}), |spec| {
        let bounds = json!({"default": "allow_web", "http": [{"hosts": ["api.example"],
                            "action": {"forward": {"url": "https://inside.example/"}}}]});
        spec.policy.insert(0, serde_json::from_value(bounds).unwrap());
    });
    assert_eq!(world.get_inside(&guest, post("/v1/x")).await.status, 200);
    assert_eq!((host.count(), inside.count()), (0, 1));
}

#[tokio::test]
async fn a_token_counts_for_whom_the_request_is_really_sent_to() {
    let world = World::new();
    world.secret("API_KEY", "sk-live-for-the-api");
    world.https("api.example", "93.184.216.34", &["http/1.1"]).await;
    let proxy = world.https("proxy.example", "93.184.216.40", &["http/1.1"]).await;
    let token = broker::placeholder();
    let mut policy = forwarding("https://proxy.example/", json!({}));
    policy["substitutions"] = json!([{"placeholder": token, "secret": "API_KEY", "hosts": ["api.example"]}]);
    let post = |token: &str| {
        Request::post("/v1/x").header(header::HOST, "api.example").header("authorization", token.to_owned())
    };
    let (guest, _attachment) = world.attach(policy.clone());
    let reply = world.get_inside(&guest, post(&token)).await;
    assert_eq!((reply.status.as_u16(), reply.code().as_str(), proxy.count()), (403, "token_misplaced", 0));
    policy["substitutions"][0]["hosts"] = json!(["proxy.example"]);
    let (guest, _attachment) = world.attach(policy);
    assert_eq!(world.get_inside(&guest, post(&token)).await.status, 200);
    assert_eq!(proxy.last()["headers"]["authorization"], json!(["sk-live-for-the-api"]));
}

#[test]
fn a_proxy_that_cannot_be_honoured_is_refused_with_its_field() {
    let world = World::new();
    for url in ["http://proxy.example/", "https://10.0.0.1/", "https://proxy.example/?x=1", "https://u@proxy.example"] {
        let policy = serde_json::from_value(forwarding(url, json!({}))).unwrap();
        let refused = world.gateway.check_policy(&[policy]).expect_err(url);
        assert_eq!(refused.field, "http[0].action.forward.url", "{url}");
    }
}

#[tokio::test]
async fn a_socks_proxy_of_the_operators_is_asked_for_addresses_too() {
    let socks = json!({"url": "socks5://proxy.corp.example:3128"});
    let (world, proxy, _) = behind_proxy(PASSWORD, socks.clone()).await;
    let server = world.https("good.example", "93.184.216.34", &["h2", "http/1.1"]).await;
    world.http("plain.example", "93.184.216.35").await;
    world.http("inside.example", "10.0.0.7").await;
    let (guest, _attachment) = world.attach(json!({"intercept": {"always": ["good.example"]}}));
    let reply = world.get_inside(&guest, Request::get("/a").header(header::HOST, "good.example")).await;
    assert_eq!((reply.status, server.count()), (http::StatusCode::OK, 1));
    let mut http = Http1::over(guest.connect_name("plain.example", 80).await.unwrap()).await;
    assert_eq!(http.send(get("plain.example", "/b")).await.status, 200);
    let mut http = Http1::over(guest.connect_name("inside.example", 80).await.unwrap()).await;
    assert_eq!(http.send(get("inside.example", "/")).await.status, 403);
    assert_eq!(proxy.asked(), ["93.184.216.34:443", "93.184.216.35:80"]);

    let (world, proxy, _) = behind_proxy("wrong", socks).await;
    world.http("plain.example", "93.184.216.35").await;
    let (guest, _attachment) = world.attach(json!({}));
    let mut http = Http1::over(guest.connect_name("plain.example", 80).await.unwrap()).await;
    let reply = http.send(get("plain.example", "/")).await;
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    assert_eq!((reply.status.as_u16(), proxy.asked()), (502, vec!["a stranger".to_owned()]), "{text}");
    assert!(!text.contains("wrong"), "{text}");
}

/// A policy whose connections go through a proxy of its owner's.
fn through(url: &str, password: &str) -> Value {
    json!({"default": "allow_public", "egress_proxy": {"url": url, "username": "me", "password": password},
           "intercept": {"always": ["good.example"]}})
}

#[tokio::test]
async fn a_sandboxs_own_proxy_carries_what_was_allowed_and_is_not_passed_by() {
    let world = World::new();
    let (proxy, address) = Proxy::start(Arc::clone(&world.net)).await;
    world.name("proxy.example", &["93.184.216.50"]);
    world.serve("93.184.216.50:1080", address);
    world.secret("PROXY", PASSWORD);
    let server = world.https("good.example", "93.184.216.34", &["h2", "http/1.1"]).await;
    world.http("plain.example", "93.184.216.35").await;
    world.http("inside.example", "10.0.0.7").await;
    for (url, password) in [
        ("socks5://proxy.example", "${secrets.PROXY}"),
        ("socks5://93.184.216.50:1080", PASSWORD),
        ("http://proxy.example:1080", PASSWORD),
    ] {
        let before = (proxy.asked().len(), server.count());
        let (guest, _attachment) = world.attach(through(url, password));
        let reply = world.get_inside(&guest, Request::get("/a").header(header::HOST, "good.example")).await;
        assert_eq!((reply.status, server.count()), (http::StatusCode::OK, before.1 + 1), "{url}");
        let mut http = Http1::over(guest.connect_name("plain.example", 80).await.unwrap()).await;
        assert_eq!(http.send(get("plain.example", "/b")).await.status, 200);
        // What is closed is not asked for.
        let mut http = Http1::over(guest.connect_name("inside.example", 80).await.unwrap()).await;
        assert_eq!(http.send(get("inside.example", "/")).await.status, 403);
        assert_eq!(proxy.asked()[before.0..], ["93.184.216.34:443", "93.184.216.35:80"], "{url}");
    }
    let ways: Vec<String> = world.net.dialled.lock().unwrap().iter().map(ToString::to_string).collect();
    assert!(ways.iter().all(|way| way == "93.184.216.50:1080"), "{ways:?}");

    // A wrong password, none to be had, a proxy inside, one that is not there: nothing is sent.
    world.name("proxy.inside.example", &["10.0.0.8"]);
    world.serve("10.0.0.8:1080", address);
    for (url, password) in [
        ("socks5://proxy.example", "not-the-password"),
        ("socks5://proxy.example", "${secrets.MISSING}"),
        ("socks5://proxy.inside.example", PASSWORD),
        ("socks5://10.0.0.8", PASSWORD),
        ("socks5://nowhere.example", PASSWORD),
    ] {
        let (guest, _attachment) = world.attach(through(url, password));
        let mut http = Http1::over(guest.connect_name("plain.example", 80).await.unwrap()).await;
        let reply = http.send(get("plain.example", "/c")).await;
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        assert_eq!((reply.status.as_u16(), reply.code().as_str()), (502, "connect_failed"), "{url}: {text}");
        assert!(!text.contains(PASSWORD) && !text.contains("not-the-password"), "{text}");
    }
    let ways: Vec<String> = world.net.dialled.lock().unwrap().iter().map(ToString::to_string).collect();
    assert!(ways.iter().all(|way| way == "93.184.216.50:1080"), "{ways:?}");
    assert!(!serde_json::to_string(&world.records()).unwrap().contains(PASSWORD));
}

#[tokio::test]
async fn another_proxy_ends_what_goes_through_the_one_before() {
    let world = World::new();
    let (_proxy, address) = Proxy::start(Arc::clone(&world.net)).await;
    world.serve("93.184.216.50:1080", address);
    let server = world.http("plain.example", "93.184.216.35").await;
    let (guest, attachment) = world.attach(through("socks5://93.184.216.50", PASSWORD));
    let mut http = Http1::over(guest.connect_name("plain.example", 80).await.unwrap()).await;
    assert_eq!(http.send(get("plain.example", "/")).await.status, 200);
    let same = serde_json::from_value(through("socks5://93.184.216.50", PASSWORD)).unwrap();
    assert_eq!(attachment.set_policy(&[same]).unwrap(), 0);
    assert_eq!(attachment.set_policy(&[serde_json::from_value(json!({})).unwrap()]).unwrap(), 1);
    let late = http.0.send_request(get("plain.example", "/late"));
    assert!(late.await.is_err(), "the connection through the old proxy ended");
    assert_eq!(server.count(), 1);
}

#[test]
fn a_proxy_that_cannot_be_honoured_is_refused_by_its_field() {
    let world_of =
        |proxy: Value| serde_json::from_value::<stockade_gateway::policy::Policy>(json!({"egress_proxy": proxy}));
    let compile = |proxy: Value| {
        let policy = world_of(proxy).map_err(|error| error.to_string())?;
        let floor = stockade_gateway::policy::Floor::default();
        let compiled = stockade_gateway::policy::CompiledPolicy::compile(&floor, &policy);
        compiled.map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(compile(json!({"url": "socks5://a.example", "username": "u", "password": "p"})), Ok(()));
    for (proxy, field) in [
        (json!({"url": "socks4://a.example"}), "egress_proxy.url"),
        (json!({"url": "socks5://u:p@a.example"}), "egress_proxy.url"),
        (json!({"url": "socks5://a.example:99999"}), "egress_proxy.url"),
        (json!({"url": "http://a.example:"}), "egress_proxy.url"),
        (json!({"url": "socks5://a.example", "username": "u"}), "egress_proxy.password"),
        (json!({"url": "socks5://a.example", "password": "p"}), "egress_proxy.username"),
        (json!({"url": "socks5://a.example", "username": "u", "password": "$p"}), "egress_proxy.password"),
        (json!({"url": "socks5://a.example", "username": "u", "password": "x".repeat(256)}), "egress_proxy"),
        (json!({"url": "socks5://a.example", "tls": {}}), "tls"),
    ] {
        let problem = compile(proxy.clone()).unwrap_err();
        assert!(problem.contains(field), "{proxy}: {problem}");
    }
    let with = || world_of(json!({"url": "socks5://a.example"})).unwrap();
    let floor = stockade_gateway::policy::Floor::default();
    let layers = stockade_gateway::policy::CompiledPolicy::compile_layers(&floor, &[with(), with()]);
    assert_eq!(layers.unwrap_err().field, "egress_proxy");
}
