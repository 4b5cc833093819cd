//! UDP through the gateway.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
    time::Duration,
};

use serde_json::{Value, json};
use stockade_gateway::{Routes, net::GATEWAY_ADDRESS};
use tokio::net::UdpSocket;

use super::{
    guest::{Guest, ethernet, ipv4, udp},
    world::World,
};

const PUBLIC: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 34);

/// A server that sends back what it gets.
struct Echo {
    address: SocketAddr,
    /// Who spoke to it last.
    client: Arc<Mutex<Option<SocketAddr>>>,
}

async fn echo() -> Echo {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let echo = Echo { address: socket.local_addr().unwrap(), client: Arc::default() };
    let client = Arc::clone(&echo.client);
    tokio::spawn(async move {
        let mut buffer = vec![0; 65_536];
        while let Ok((length, from)) = socket.recv_from(&mut buffer).await {
            *client.lock().unwrap() = Some(from);
            let _ = socket.send_to(&buffer[..length], from).await;
        }
    });
    echo
}

fn to_udp(name: &str) -> Value {
    json!({"default": "deny", "rules": [{"id": "game", "action": "allow", "names": [name], "ports": [4433], "l7": "udp"}]})
}

/// What the guest gets for a datagram: the data of the answer, or nothing for a refusal.
async fn ask(guest: &Guest, from_port: u16, to: Ipv4Addr, port: u16, data: &[u8]) -> Option<Vec<u8>> {
    let answers = move |frame: &[u8]| {
        let ports = [port.to_be_bytes(), from_port.to_be_bytes()];
        // An answer is from the port that was asked; a refusal quotes the question.
        let is_answer = frame[23] == 17 && frame[34..38] == [ports[0], ports[1]].concat();
        let is_refusal = frame[23] == 1 && frame[34..36] == [3, 3] && frame[62..66] == [ports[1], ports[0]].concat();
        frame.len() >= 42 && frame[26..30] == to.octets() && (is_answer || frame.len() >= 66 && is_refusal)
    };
    let frame = guest.exchange(ethernet(&udp(from_port, to, port, data)), answers).await;
    (frame[23] == 17).then(|| frame[42..].to_vec())
}

async fn wait_until(what: impl Fn() -> bool) {
    while !what() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn datagrams_go_where_a_rule_lets_them_and_answers_come_from_the_names_own_address() {
    let world = World::new();
    let server = echo().await.address;
    world.name("game.example", &["93.184.216.34"]);
    world.name("other.example", &["93.184.216.35"]);
    world.serve("93.184.216.34:4433", server);
    let (guest, attachment) = world.attach(to_udp("game.example"));
    let address = guest.resolve("game.example").await.unwrap();
    for size in [0, 1, 1_200, 9_000, 40_000] {
        let data: Vec<u8> = (0..size).map(|at| at as u8).collect();
        assert_eq!(ask(&guest, 5_000, address, 4_433, &data).await, Some(data));
    }
    assert_eq!(attachment.stats().udp_flows, 1, "one flow carries them all");
    assert_eq!(ask(&guest, 5_001, address, 4_433, b"x").await, Some(b"x".to_vec()));
    // Another port, its address as such, another name: the rule says nothing of them.
    assert_eq!(ask(&guest, 5_000, address, 443, b"x").await, None);
    assert_eq!(ask(&guest, 5_000, PUBLIC, 4_433, b"x").await, None);
    assert!(guest.connect(address, 4_433).await.is_err(), "and nothing of TCP");
    drop(guest);
    wait_until(|| attachment.stats().udp_flows == 0).await;
    let closed = world.record("closed").await;
    let (facts, bytes) = (closed.facts, (Some(50_201), Some(50_201)));
    assert!(facts.mode == Some("udp") && facts.name.as_deref() == Some("game.example"));
    let flows: Vec<_> = world.records().into_iter().filter(|record| record.reason == "closed").collect();
    assert!(flows.iter().any(|record| (record.facts.bytes_out, record.facts.bytes_in) == bytes), "{flows:?}");
}

#[tokio::test]
async fn no_policy_lets_datagrams_to_a_closed_address() {
    let world = World::new();
    let server = echo().await.address;
    for (name, address) in
        [("inside.example", "10.0.0.7"), ("meta.example", "169.254.169.254"), ("here.example", "127.0.0.1")]
    {
        world.name(name, &[address]);
        world.serve(&format!("{address}:4433"), server);
    }
    world.serve("93.184.216.34:4433", server);
    let (guest, attachment) = world.attach(json!({"default": "allow_public_udp",
        "rules": [{"action": "allow", "cidrs": ["0.0.0.0/0"], "l7": "udp"}]}));
    assert_eq!(ask(&guest, 6_000, PUBLIC, 4_433, b"open").await.as_deref(), Some(&b"open"[..]));
    let closed: [[u8; 4]; 8] = [
        [10, 0, 0, 7],
        [10, 123, 0, 6], // a neighbour, if there were a way
        [127, 0, 0, 1],
        [169, 254, 169, 254],
        [192, 168, 1, 1],
        [100, 64, 0, 1],
        [198, 18, 77, 77], // of the pool, and nobody's
        GATEWAY_ADDRESS.octets(),
    ];
    for address in closed {
        assert_eq!(ask(&guest, 6_001, address.into(), 4_433, b"x").await, None, "{address:?}");
    }
    for name in ["inside.example", "meta.example", "here.example"] {
        let address = guest.resolve(name).await.unwrap();
        assert_eq!(ask(&guest, 6_002, address, 4_433, b"x").await, None, "{name}");
    }
    // To all and to groups: no host, no frame is even looked at.
    for address in [[255, 255, 255, 255], [224, 0, 0, 251], [239, 1, 2, 3]] {
        guest.send_packet(&udp(6_003, address.into(), 4_433, b"x"));
    }
    guest.settle().await;
    assert!(attachment.stats().dropped_frames >= 3);
    assert_eq!(*world.net.dialled.lock().unwrap(), ["93.184.216.34:4433".parse().unwrap()]);
    let reasons = world.denials();
    for reason in ["private_address", "metadata_address"] {
        assert!(reasons.contains(&reason), "{reasons:?}");
    }
}

#[tokio::test]
async fn nobody_but_the_one_that_was_asked_answers() {
    let world = World::new();
    let server = echo().await;
    world.serve("93.184.216.34:4433", server.address);
    let (guest, _attachment) = world.attach(json!({"default": "allow_public_udp"}));
    let mut seen = guest.watch();
    assert!(ask(&guest, 7_000, PUBLIC, 4_433, b"hello").await.is_some());
    // Another port of the very host that was asked.
    let ours = server.client.lock().unwrap().unwrap();
    let stranger = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    stranger.send_to(b"forged", ours).await.unwrap();
    assert_eq!(ask(&guest, 7_000, PUBLIC, 4_433, b"again").await.as_deref(), Some(&b"again"[..]));
    while let Ok(frame) = seen.try_recv() {
        assert!(!frame.ends_with(b"forged"));
    }
}

#[tokio::test]
async fn floods_and_hostile_datagrams_are_bounded_and_the_rest_goes_on() {
    let world = World::new();
    let server = echo().await.address;
    for port in 1..200 {
        world.serve(&format!("93.184.216.34:{port}"), server);
    }
    let (guest, attachment) =
        world.attach_with(json!({"default": "allow_public_udp"}), |spec| spec.limits.udp_flows = 8);
    for port in 100..108 {
        assert!(ask(&guest, 8_000, PUBLIC, port, b"x").await.is_some());
    }
    for port in 108..200 {
        assert_eq!(ask(&guest, 8_000, PUBLIC, port, b"x").await, None);
    }
    assert_eq!(attachment.stats().udp_flows, 8);
    assert!(world.denials().contains(&"too_many_flows"));
    // Lengths that lie, ports that are none, headers that are cut.
    let mut lies = udp(8_001, PUBLIC, 100, b"1234");
    lies[24..26].copy_from_slice(&60_000_u16.to_be_bytes());
    let mut short = udp(8_001, PUBLIC, 100, b"1234");
    short[24..26].copy_from_slice(&3_u16.to_be_bytes());
    for packet in [lies, short, ipv4(PUBLIC, 17, &[0; 7]), udp(0, PUBLIC, 100, b"x"), udp(8_001, PUBLIC, 0, b"x")] {
        guest.send_packet(&packet);
    }
    // More than any queue holds, while nothing can leave.
    for _ in 0..5_000 {
        guest.send_packet(&udp(8_000, PUBLIC, 100, &[7; 1_000]));
    }
    guest.settle().await;
    assert_eq!(attachment.stats().udp_flows, 8);
    assert!(ask(&guest, 8_000, PUBLIC, 101, b"still here").await.is_some());
}

#[tokio::test]
async fn flows_end_when_they_are_idle_and_with_what_allowed_them() {
    let world = World::new();
    let server = echo().await.address;
    world.serve("93.184.216.34:4433", server);
    let open = json!({"default": "allow_public_udp"});
    let (guest, attachment) = world.attach_with(open.clone(), |spec| spec.limits.udp_idle_timeout_ms = 50);
    assert!(ask(&guest, 9_000, PUBLIC, 4_433, b"x").await.is_some());
    wait_until(|| attachment.stats().udp_flows == 0).await;
    assert!(ask(&guest, 9_000, PUBLIC, 4_433, b"anew").await.is_some());
    let (guest, attachment) = world.attach(open);
    assert!(ask(&guest, 9_000, PUBLIC, 4_433, b"x").await.is_some());
    let narrower = serde_json::from_value(json!({"default": "allow_public"})).unwrap();
    assert_eq!(attachment.set_policy(&[narrower]).unwrap(), 1);
    assert_eq!(attachment.stats().udp_flows, 0);
    assert_eq!(ask(&guest, 9_000, PUBLIC, 4_433, b"x").await, None);
    world.record("policy_changed").await;
}

#[tokio::test]
async fn a_policy_change_while_a_flow_is_opened_counts() {
    let world = World::new();
    let server = echo().await.address;
    world.serve("93.184.216.34:4433", server);
    let (guest, attachment) = world.attach(json!({"default": "allow_public_udp"}));
    let gate = world.net.gate.write().await;
    guest.send_packet(&udp(9_100, PUBLIC, 4_433, b"early"));
    wait_until(|| !world.net.dialled.lock().unwrap().is_empty()).await;
    let mut seen = guest.watch();
    attachment.set_policy(&[serde_json::from_value(json!({})).unwrap()]).unwrap();
    drop(gate);
    guest.settle().await;
    assert_eq!(attachment.stats().udp_flows, 0);
    while let Ok(frame) = seen.try_recv() {
        assert!(!frame.ends_with(b"early"), "nothing was sent, so nothing comes back");
    }
}

#[tokio::test]
async fn a_port_nobody_listens_on_is_refused_and_the_operators_proxy_is_not_passed_by() {
    let world = World::new();
    // The kernel gives the port to nobody while this is being tested; then nobody has it.
    let gone = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    world.serve("93.184.216.34:4433", gone.local_addr().unwrap());
    drop(gone);
    let open = json!({"default": "allow_public_udp"});
    let (guest, _attachment) = world.attach(open.clone());
    assert_eq!(ask(&guest, 9_200, PUBLIC, 4_433, b"x").await, None);

    let proxied = World::with(|config| {
        let proxy: stockade_gateway::UpstreamProxyConfig =
            serde_json::from_value(json!({"url": "http://93.184.216.99:3128", "direct_cidrs": ["93.184.216.35/32"]}))
                .unwrap();
        let tls = stockade_gateway::tls_towards(&config.upstream_roots, &[b"http/1.1"]).unwrap();
        config.upstream_proxy = Some(Arc::new(proxy.open(tls).unwrap()));
        let routes = [("routed.example:4433".to_owned(), "93.184.216.36:4433".to_owned())].into();
        config.routes = Routes::parse(&routes).unwrap();
    });
    let server = echo().await.address;
    for address in ["93.184.216.34", "93.184.216.35", "93.184.216.36"] {
        proxied.serve(&format!("{address}:4433"), server);
    }
    let (guest, _attachment) = proxied.attach(open);
    assert_eq!(ask(&guest, 9_300, PUBLIC, 4_433, b"x").await, None);
    assert!(ask(&guest, 9_300, [93, 184, 216, 35].into(), 4_433, b"direct").await.is_some());
    let routed = guest.resolve("routed.example").await.unwrap();
    assert!(ask(&guest, 9_300, routed, 4_433, b"the operator's word").await.is_some());
    let refused = proxied.record("connect_failed").await;
    assert!(refused.facts.detail.unwrap().contains("takes no UDP"));
}
