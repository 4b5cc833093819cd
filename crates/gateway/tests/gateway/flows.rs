//! Links, flows and raw connections.

use std::net::Ipv4Addr;

use serde_json::json;
use stockade_gateway::net::{GATEWAY_ADDRESS, GATEWAY_MAC, GUEST_ADDRESS, GUEST_MAC, frame::flags};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{
    guest::{ethernet, ipv4, ipv4_from, tcp_segment, udp},
    world::{World, echo_server, read_to_end, source_server},
};

fn raw(name: &str) -> serde_json::Value {
    json!({"default": "deny", "rules": [{"id": "raw", "action": "allow", "names": [name], "ports": [5432]}]})
}

async fn database() -> World {
    let world = World::new();
    world.name("db.example", &["93.184.216.34"]);
    world.serve("93.184.216.34:5432", echo_server().await);
    world
}

#[tokio::test]
async fn bytes_go_both_ways_and_ends_are_passed_on() {
    let world = database().await;
    let traffic = std::sync::Arc::<stockade_gateway::Traffic>::default();
    let counted = std::sync::Arc::clone(&traffic);
    let (guest, attachment) = world.attach_with(raw("db.example"), |spec| spec.traffic = counted);
    let mut stream = guest.connect_name("db.example", 5432).await.unwrap();
    stream.write_all(b"hello").await.unwrap();
    let mut answer = [0; 5];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"hello");
    stream.write_all(b"bye").await.unwrap();
    stream.shutdown().await.unwrap();
    assert_eq!(read_to_end(&mut stream).await, b"bye");
    let closed = world.record("closed").await;
    assert_eq!((closed.facts.bytes_out, closed.facts.bytes_in), (Some(8), Some(8)));
    assert_eq!(closed.facts.name.as_deref(), Some("db.example"));
    guest.settle().await;
    assert_eq!(attachment.stats().flows, 0);
    assert_eq!((traffic.take_sent(), traffic.take_sent()), (8, 0), "each byte is told once");
    // What is refused with an explanation goes nowhere.
    let web = json!({"default": "deny", "rules": []});
    let counted = std::sync::Arc::clone(&traffic);
    let (guest, _attachment) = world.attach_with(web, |spec| spec.traffic = counted);
    let mut stream = guest.connect_name("db.example", 80).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: db.example\r\nConnection: close\r\n\r\n").await.unwrap();
    assert!(String::from_utf8_lossy(&read_to_end(&mut stream).await).starts_with("HTTP/1.1 403"));
    assert_eq!(traffic.take_sent(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_transfers_arrive_whole_in_both_directions() {
    let world = database().await;
    world.name("source.example", &["93.184.216.35"]);
    let count = 20 << 20;
    world.serve("93.184.216.35:5432", source_server(count).await);
    let (guest, _attachment) = world.attach(raw(".example"));
    let mut source = guest.connect_name("source.example", 5432).await.unwrap();
    let got = read_to_end(&mut source).await;
    assert_eq!(got.len(), count);
    assert!(got.iter().enumerate().all(|(at, byte)| *byte == (at % 256) as u8));
    let echo = guest.connect_name("db.example", 5432).await.unwrap();
    let (mut reader, mut writer) = tokio::io::split(echo);
    let sent: Vec<u8> = (0..5_000_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let expected = sent.clone();
    let writing = tokio::spawn(async move {
        writer.write_all(&sent).await.unwrap();
        writer.shutdown().await.unwrap();
        writer
    });
    assert!(read_to_end(&mut reader).await == expected);
    drop(writing.await.unwrap());
}

#[tokio::test]
async fn a_guest_that_closes_first_and_reads_late_gets_everything() {
    let world = World::new();
    world.name("source.example", &["93.184.216.35"]);
    // More than the guest's window and less than what is held for it: the server is long done when the guest reads.
    let count = 200 << 10;
    world.serve("93.184.216.35:5432", source_server(count).await);
    let (guest, _attachment) = world.attach(raw(".example"));
    let mut source = guest.connect_name("source.example", 5432).await.unwrap();
    source.shutdown().await.unwrap();
    // Until after a probe of the closed window.
    tokio::time::sleep(std::time::Duration::from_millis(1_500)).await;
    let got = tokio::time::timeout(std::time::Duration::from_secs(20), read_to_end(&mut source)).await;
    assert_eq!(got.expect("it does not stop in the middle").len(), count);
}

#[tokio::test]
async fn a_refused_connect_upstream_is_a_refused_connect_in_the_guest() {
    let world = World::new();
    world.name("db.example", &["93.184.216.34"]);
    let (guest, _attachment) = world.attach(raw("db.example"));
    let error = guest.connect_name("db.example", 5432).await.err().unwrap();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    assert_eq!(world.record("connect_failed").await.facts.name.as_deref(), Some("db.example"));
}

#[tokio::test]
async fn what_no_rule_allows_is_reset_at_once() {
    let world = database().await;
    let (guest, _attachment) = world.attach(raw("db.example"));
    let address = guest.resolve("db.example").await.unwrap();
    for (address, port) in [
        (address, 22),
        (Ipv4Addr::new(93, 184, 216, 34), 5432),
        (Ipv4Addr::new(93, 184, 216, 34), 443),
        (Ipv4Addr::new(169, 254, 169, 254), 80),
        (Ipv4Addr::LOCALHOST, 80),
        (Ipv4Addr::new(192, 168, 1, 1), 80),
        (Ipv4Addr::new(198, 18, 200, 200), 443),
        (GATEWAY_ADDRESS, 80),
        (Ipv4Addr::new(8, 8, 8, 8), 853),
    ] {
        assert!(guest.connect(address, port).await.is_err(), "{address}:{port}");
    }
    assert!(world.net.dialled.lock().unwrap().is_empty());
}

#[tokio::test]
async fn special_addresses_stay_closed_under_the_widest_policy() {
    let world = World::new();
    let everything = json!({"default": "allow_public", "rules": [{"action": "allow", "cidrs": ["0.0.0.0/0"]}]});
    let (guest, _attachment) = world.attach(everything);
    for address in ["0.1.2.3", "10.0.0.1", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.16.0.1", "192.168.0.1"] {
        assert!(guest.connect(address.parse().unwrap(), 80).await.is_err(), "{address}");
    }
    assert!(world.net.dialled.lock().unwrap().is_empty());
    assert!(world.denials().contains(&"metadata_address"));
}

#[tokio::test]
async fn the_operator_opens_a_private_network_and_never_metadata() {
    let world = World::with(|config| {
        config.floor.open_cidrs = vec!["10.0.0.0/8".to_owned(), "169.254.0.0/15".to_owned()];
    });
    world.serve("10.0.0.1:5432", echo_server().await);
    let opened = json!({"default": "deny", "rules": [{"action": "allow", "cidrs": ["10.0.0.0/8", "169.254.0.0/16"]}]});
    let (guest, _attachment) = world.attach(opened);
    let mut stream = guest.connect(Ipv4Addr::new(10, 0, 0, 1), 5432).await.unwrap();
    stream.write_all(b"x").await.unwrap();
    assert_eq!(stream.read_u8().await.unwrap(), b'x');
    assert!(guest.connect(Ipv4Addr::new(169, 254, 169, 254), 80).await.is_err());
    // An open default does not reach what was opened for those who name it.
    let (guest, _attachment) = world.attach(json!({"default": "allow_public"}));
    assert!(guest.connect(Ipv4Addr::new(10, 0, 0, 1), 5432).await.is_err());
}

#[tokio::test]
async fn mail_is_closed_by_the_operators_floor() {
    let world = World::new();
    world.serve("93.184.216.34:25", echo_server().await);
    let (guest, _attachment) = world.attach(json!({"default": "allow_public"}));
    assert!(guest.connect(Ipv4Addr::new(93, 184, 216, 34), 25).await.is_err());
}

#[tokio::test]
async fn udp_is_refused_at_once_so_that_clients_fall_back_to_tcp() {
    let world = World::new();
    let (guest, _attachment) = world.attach(json!({}));
    let to = Ipv4Addr::new(93, 184, 216, 34);
    let icmp = |frame: &[u8]| frame.len() > 34 && frame[23] == 1;
    for port in [443, 5353, 123] {
        let frame = guest.exchange(ethernet(&udp(5_000, to, port, b"quic")), icmp).await;
        assert_eq!(frame[34..36], [3, 3], "port unreachable");
        assert_eq!(frame[26..30], to.octets());
    }
    assert_eq!(world.record("udp_closed").await.facts.port, Some(443));
}

#[tokio::test]
async fn hostile_frames_are_dropped_and_counted_and_the_link_goes_on() {
    let world = database().await;
    let (guest, attachment) = world.attach(raw("db.example"));
    let to = Ipv4Addr::new(93, 184, 216, 34);
    let syn = |from| ipv4_from(from, to, 6, 0, &tcp_segment(1, to, 80, flags::SYN, &[], &[])[20..]);
    let mut vlan = ethernet(&ipv4(to, 17, &[0; 8]));
    vlan.splice(12..12, [0x81, 0, 0, 5]);
    let mut ipv6 = ethernet(&[0x60; 60]);
    ipv6[12..14].copy_from_slice(&[0x86, 0xdd]);
    let mut options = ipv4(to, 6, &[0; 40]);
    options[0] = 0x46;
    let mut lying = ipv4(to, 6, &[0; 40]);
    lying[2..4].copy_from_slice(&[0xff, 0xff]);
    let hostile = vec![
        vec![],
        vec![0; 13],
        vec![0xff; 60],
        ethernet(&[]),
        ethernet(&[0x45; 10]),
        vlan,
        ipv6,
        ethernet(&options),
        ethernet(&lying),
        ethernet(&syn(Ipv4Addr::new(10, 123, 0, 9))),
        ethernet(&syn(Ipv4Addr::LOCALHOST)),
        ethernet(&syn(Ipv4Addr::UNSPECIFIED)),
        ethernet(&ipv4_from(GUEST_ADDRESS, to, 6, 0x2000, &[0; 40])),
        ethernet(&ipv4_from(GUEST_ADDRESS, to, 17, 0x0005, &[0; 40])),
        ethernet(&ipv4(Ipv4Addr::new(224, 0, 0, 1), 17, &[0; 8])),
        ethernet(&ipv4(GUEST_ADDRESS, 6, &tcp_segment(1, to, 80, flags::SYN, &[], &[])[20..])),
        ethernet(&ipv4(to, 6, &[0; 19])),
        ethernet(&tcp_segment(1, to, 80, flags::SYN, &[2, 0, 0, 0], &[])),
        ethernet(&tcp_segment(1, to, 80, flags::SYN, &[2, 40, 0, 0], &[])),
        ethernet(&tcp_segment(0, to, 80, flags::SYN, &[], &[])),
        ethernet(&tcp_segment(9, to, 0, flags::SYN, &[], &[])),
        ethernet(&ipv4(to, 47, &[0; 20])),
        ethernet(&ipv4(to, 1, &[5, 1, 0, 0, 0, 0, 0, 0])),
    ];
    let count = hostile.len() as u64;
    for frame in hostile {
        guest.send_frame(frame);
    }
    guest.settle().await;
    assert_eq!(attachment.stats().dropped_frames, count);
    let mut stream = guest.connect_name("db.example", 5432).await.unwrap();
    stream.write_all(b"x").await.unwrap();
    assert_eq!(stream.read_u8().await.unwrap(), b'x');
}

#[tokio::test]
async fn a_frame_no_machine_sends_ends_the_link_and_nothing_else() {
    let world = database().await;
    let (guest, mut attachment) = world.attach(raw("db.example"));
    let (other, _other_attachment) = world.attach(raw("db.example"));
    guest.send_frame(vec![0; 70 << 10]);
    attachment.ended().await;
    assert_eq!(world.record("link_ended").await.verdict, stockade_gateway::audit::Verdict::Error);
    other.connect_name("db.example", 5432).await.unwrap();
}

#[tokio::test]
async fn arp_is_answered_for_every_address_but_the_guests() {
    let world = World::new();
    let (guest, attachment) = world.attach(json!({}));
    let arp = |sender: Ipv4Addr, target: Ipv4Addr| {
        let mut frame = vec![0xff; 6];
        frame.extend_from_slice(&GUEST_MAC);
        frame.extend_from_slice(&[8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        frame.extend_from_slice(&GUEST_MAC);
        frame.extend_from_slice(&sender.octets());
        frame.extend_from_slice(&[0; 6]);
        frame.extend_from_slice(&target.octets());
        frame
    };
    let is_arp = |frame: &[u8]| frame[12..14] == [8, 6];
    let reply = guest.exchange(arp(GUEST_ADDRESS, GATEWAY_ADDRESS), is_arp).await;
    assert_eq!(reply[22..28], GATEWAY_MAC);
    assert_eq!(reply[28..32], GATEWAY_ADDRESS.octets());
    // Is my address taken? Nobody says so.
    guest.send_frame(arp(Ipv4Addr::UNSPECIFIED, GUEST_ADDRESS));
    guest.send_frame(arp(Ipv4Addr::new(10, 123, 0, 9), GATEWAY_ADDRESS));
    guest.settle().await;
    assert_eq!(attachment.stats().dropped_frames, 2);
}

#[tokio::test]
async fn segments_of_unknown_flows_are_reset() {
    let world = World::new();
    let (guest, _attachment) = world.attach(json!({}));
    let to = Ipv4Addr::new(93, 184, 216, 34);
    let is_tcp = |frame: &[u8]| frame.len() >= 54 && frame[23] == 6;
    let frame = guest.exchange(ethernet(&tcp_segment(7, to, 80, flags::ACK, &[], b"late")), is_tcp).await;
    assert_eq!(frame[34 + 13] & flags::RST, flags::RST);
    let frame = guest.exchange(ethernet(&tcp_segment(7, to, 80, flags::FIN, &[], &[])), is_tcp).await;
    assert_eq!(frame[34 + 13] & (flags::RST | flags::ACK), flags::RST | flags::ACK);
    assert_eq!(frame[34 + 8..34 + 12], 8_u32.to_be_bytes(), "acknowledges the end");
}

#[tokio::test]
async fn a_syn_flood_is_bounded_and_leaves_room_for_the_honest() {
    let world = database().await;
    let (guest, attachment) = world.attach_with(json!({}), |spec| {
        spec.limits.half_open_flows = 64;
        spec.limits.head_timeout_ms = 200;
    });
    let address = guest.resolve("db.example").await.unwrap();
    for port in 1..2_000 {
        guest.send_packet(&tcp_segment(port, address, 443, flags::SYN, &[], &[]));
    }
    guest.settle().await;
    let stats = attachment.stats();
    assert!(stats.half_open_flows <= 64 && stats.flows <= 64, "{stats:?}");
    // The test's own stack answers the SYN-ACKs it did not ask for with resets, as a kernel would.
    let _open = guest.connect(address, 443).await.unwrap();
}

#[tokio::test]
async fn more_flows_than_allowed_are_reset_with_a_record() {
    let world = database().await;
    let (guest, attachment) = world.attach_with(raw("db.example"), |spec| spec.limits.flows = 10);
    let mut open = Vec::new();
    for _ in 0..10 {
        open.push(guest.connect_name("db.example", 5432).await.unwrap());
    }
    assert!(guest.connect_name("db.example", 5432).await.is_err());
    assert_eq!(world.record("too_many_flows").await.facts.port, Some(5432));
    open.pop().unwrap().reset();
    guest.settle().await;
    assert_eq!(attachment.stats().flows, 9);
    guest.connect_name("db.example", 5432).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_hundred_flows_are_open_at_once_and_all_work() {
    let world = database().await;
    let (guest, attachment) = world.attach(raw("db.example"));
    let address = guest.resolve("db.example").await.unwrap();
    let mut open = Vec::new();
    // The test's own stack looks at all its sockets for each packet; `stockade bench` opens 2,000 from a kernel.
    for _ in 0..20 {
        let batch = (0..25).map(|_| guest.connect(address, 5432));
        open.extend(futures::future::try_join_all(batch).await.unwrap());
    }
    assert_eq!(attachment.stats().flows, 500);
    for (at, stream) in open.iter_mut().enumerate() {
        stream.write_all(&(at as u32).to_be_bytes()).await.unwrap();
    }
    for (at, stream) in open.iter_mut().enumerate() {
        assert_eq!(stream.read_u32().await.unwrap(), at as u32);
    }
    for stream in &open {
        stream.reset();
    }
    while attachment.stats().flows > 0 {
        guest.settle().await;
    }
}

#[tokio::test]
async fn a_reset_by_the_guest_ends_the_connection_outside() {
    let world = World::new();
    world.name("db.example", &["93.184.216.34"]);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    world.serve("93.184.216.34:5432", listener.local_addr().unwrap());
    let (guest, _attachment) = world.attach(raw("db.example"));
    let (stream, accepted) = tokio::join!(guest.connect_name("db.example", 5432), listener.accept());
    let (mut outside, _) = accepted.unwrap();
    stream.unwrap().reset();
    assert_eq!(outside.read(&mut [0; 1]).await.unwrap_or(0), 0);
}

#[tokio::test]
async fn a_guest_without_a_network_any_more_leaves_no_connections_outside() {
    let world = World::new();
    world.name("db.example", &["93.184.216.34"]);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    world.serve("93.184.216.34:5432", listener.local_addr().unwrap());
    let (guest, mut attachment) = world.attach(raw("db.example"));
    let (_stream, accepted) = tokio::join!(guest.connect_name("db.example", 5432), listener.accept());
    let (mut outside, _) = accepted.unwrap();
    drop(guest);
    attachment.ended().await;
    assert_eq!(outside.read(&mut [0; 1]).await.unwrap_or(0), 0);
}

#[tokio::test]
async fn a_policy_change_ends_what_it_no_longer_allows_before_it_returns() {
    let world = database().await;
    world.name("other.example", &["93.184.216.35"]);
    world.serve("93.184.216.35:5432", echo_server().await);
    let (guest, attachment) = world.attach(raw(".example"));
    let mut kept = guest.connect_name("db.example", 5432).await.unwrap();
    let mut ended = guest.connect_name("other.example", 5432).await.unwrap();
    let narrow: stockade_gateway::policy::Policy = serde_json::from_value(raw("db.example")).unwrap();
    assert_eq!(attachment.set_policy(&[narrow]).unwrap(), 1);
    assert!(ended.read(&mut [0; 1]).await.is_err());
    kept.write_all(b"x").await.unwrap();
    assert_eq!(kept.read_u8().await.unwrap(), b'x');
    assert!(guest.connect_name("other.example", 5432).await.is_err());
}

#[tokio::test]
async fn a_policy_change_during_a_dial_counts() {
    let world = database().await;
    let (guest, attachment) = world.attach(raw("db.example"));
    let address = guest.resolve("db.example").await.unwrap();
    let gate = world.net.gate.write().await;
    let connecting = guest.connect(address, 5432);
    let changing = async {
        while world.net.dialled.lock().unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
        let closed = serde_json::from_value(json!({"default": "deny"})).unwrap();
        attachment.set_policy(&[closed]).unwrap();
        drop(gate);
    };
    let (connected, ()) = tokio::join!(connecting, changing);
    assert!(connected.is_err());
}

#[tokio::test]
async fn connections_into_the_guest_reach_its_ports() {
    let world = World::new();
    let (guest, attachment) = world.attach(json!({"default": "deny"}));
    let mut server = guest.listen(3_000);
    let mut stream = attachment.open_inbound(3_000).await.unwrap();
    stream.write_all(b"GET").await.unwrap();
    let mut bytes = [0; 3];
    server.established().await.unwrap();
    server.read_exact(&mut bytes).await.unwrap();
    server.write_all(b"200").await.unwrap();
    server.shutdown().await.unwrap();
    assert_eq!(read_to_end(&mut stream).await, b"200");
    assert!(attachment.open_inbound(3_001).await.is_err());
}

#[tokio::test]
async fn bandwidth_is_limited_in_both_directions() {
    let world = World::new();
    world.name("db.example", &["93.184.216.34"]);
    world.serve("93.184.216.34:5432", source_server(1 << 20).await);
    let (guest, _attachment) =
        world.attach_with(raw("db.example"), |spec| spec.limits.bytes_per_second = Some(4 << 20));
    let start = std::time::Instant::now();
    let mut stream = guest.connect_name("db.example", 5432).await.unwrap();
    assert_eq!(read_to_end(&mut stream).await.len(), 1 << 20);
    // 250 ms less the 100 ms the pace lets run ahead: a lower bound, not a deadline.
    assert!(start.elapsed() > std::time::Duration::from_millis(120), "{:?}", start.elapsed());
}
