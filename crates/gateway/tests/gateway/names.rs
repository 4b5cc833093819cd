//! The name server.

use std::net::Ipv4Addr;

use hickory_proto::{op::ResponseCode, rr::RecordType};
use serde_json::json;
use stockade_gateway::net::GATEWAY_ADDRESS;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{
    guest::question,
    world::{World, echo_server},
};

fn allow(name: &str) -> serde_json::Value {
    json!({"default": "deny", "rules": [{"action": "allow", "names": [name]}]})
}

#[tokio::test]
async fn names_get_addresses_of_our_own_whoever_is_asked() {
    let world = World::new();
    world.name("good.example", &["93.184.216.34"]);
    let (guest, attachment) = world.attach(allow("good.example"));
    let address = guest.resolve("good.example").await.unwrap();
    assert_eq!(address.octets()[..2], [198, 18]);
    for server in [Ipv4Addr::new(8, 8, 8, 8), Ipv4Addr::new(192, 0, 2, 53)] {
        let answer = guest.ask(server, "GOOD.example", RecordType::A).await;
        assert_eq!(answer.answers.len(), 1, "{server}");
    }
    assert_eq!(attachment.name_table().names, vec![(0, "good.example".to_owned())]);
}

#[tokio::test]
async fn a_name_that_is_not_allowed_never_leaves() {
    let world = World::new();
    world.name("good.example", &["93.184.216.34"]);
    for mode in ["explain", "nxdomain"] {
        let mut policy = allow("good.example");
        policy["dns"] = json!({"on_deny": mode});
        let (guest, _attachment) = world.attach(policy);
        let long = format!("{}.{}.evil.example", "a".repeat(63), "b".repeat(63));
        for name in ["c2VjcmV0.evil.example", "x.good.example", long.as_str()] {
            for kind in [RecordType::A, RecordType::AAAA, RecordType::TXT, RecordType::MX, RecordType::NULL] {
                let answer = guest.ask(GATEWAY_ADDRESS, name, kind).await;
                match (mode, kind) {
                    ("explain", RecordType::A) => assert_eq!(answer.answers.len(), 1),
                    ("explain", RecordType::AAAA) => {
                        assert_eq!((answer.metadata.response_code, answer.answers.len()), (ResponseCode::NoError, 0));
                    }
                    _ => assert_eq!(answer.metadata.response_code, ResponseCode::NXDomain, "{mode} {name} {kind}"),
                }
            }
        }
    }
    assert!(world.net.asked.lock().unwrap().is_empty());
}

#[tokio::test]
async fn an_allowed_name_has_no_other_records_and_must_exist() {
    let world = World::new();
    world.name("good.example", &["93.184.216.34"]);
    let (guest, _attachment) = world.attach(allow(".example"));
    for kind in [RecordType::AAAA, RecordType::HTTPS, RecordType::SVCB, RecordType::TXT, RecordType::ANY] {
        let answer = guest.ask(GATEWAY_ADDRESS, "good.example", kind).await;
        assert_eq!(answer.metadata.response_code, ResponseCode::NoError, "{kind}");
        assert!(answer.answers.is_empty(), "{kind}");
    }
    assert_eq!(guest.resolve("missing.example").await, Err(ResponseCode::NXDomain));
    let address = guest.resolve("good.example").await.unwrap();
    let [a, b, c, d] = address.octets();
    let answer = guest.ask(GATEWAY_ADDRESS, &format!("{d}.{c}.{b}.{a}.in-addr.arpa"), RecordType::PTR).await;
    assert!(answer.answers[0].data.to_string().starts_with("good.example"));
}

#[tokio::test]
async fn resolving_on_connect_only_sends_no_query_for_a_lookup() {
    let world = World::new();
    world.name("data.zone.example", &["93.184.216.34"]);
    world.serve("93.184.216.34:5432", echo_server().await);
    let (guest, _attachment) = world.attach(json!({
        "default": "deny",
        "rules": [{"action": "allow", "names": ["*.zone.example"], "ports": [5432]}],
        "dns": {"resolve_on_connect": true},
    }));
    let address = guest.resolve("data.zone.example").await.unwrap();
    guest.resolve("c2VjcmV0.zone.example").await.unwrap();
    assert!(world.net.asked.lock().unwrap().is_empty());
    guest.connect(address, 5432).await.unwrap();
    assert_eq!(*world.net.asked.lock().unwrap(), ["data.zone.example"]);
}

#[tokio::test]
async fn odd_questions_get_errors_and_answers_get_none() {
    let world = World::new();
    let (guest, _attachment) = world.attach(json!({}));
    let base = question("good.example", RecordType::A);
    let mut two = base.clone();
    two[5] = 2;
    two.extend_from_slice(&base[12..]);
    let mut chaos = base.clone();
    *chaos.last_mut().unwrap() = 3;
    let mut update = base.clone();
    update[2] |= 5 << 3;
    let mut pointer = base[..12].to_vec();
    pointer.extend_from_slice(&[0xc0, 0x0c, 0, 1, 0, 1]);
    let mut cut = base.clone();
    cut.truncate(20);
    for (packet, code) in [
        (&two, ResponseCode::FormErr),
        (&chaos, ResponseCode::Refused),
        (&update, ResponseCode::NotImp),
        (&pointer, ResponseCode::FormErr),
        (&cut, ResponseCode::FormErr),
    ] {
        let answer = guest.ask_packet(GATEWAY_ADDRESS, packet).await;
        assert_eq!(answer.metadata.response_code, code);
        assert!(answer.answers.is_empty());
    }
    // An answer is not answered: the next frame is the one to a question.
    let mut answer = base.clone();
    answer[2] |= 0x80;
    let mut seen = guest.watch();
    guest.send_packet(&super::guest::udp(999, GATEWAY_ADDRESS, 53, &answer));
    guest.settle().await;
    assert_eq!(seen.recv().await.unwrap()[23], 1, "only the ping is answered");
    assert!(world.net.asked.lock().unwrap().is_empty());
}

#[tokio::test]
async fn tcp_serves_the_same_names() {
    let world = World::new();
    world.name("good.example", &["93.184.216.34"]);
    let (guest, _attachment) = world.attach(allow("good.example"));
    let mut stream = guest.connect(Ipv4Addr::new(1, 1, 1, 1), 53).await.unwrap();
    for _ in 0..2 {
        let question = question("good.example", RecordType::A);
        stream.write_u16(question.len() as u16).await.unwrap();
        stream.write_all(&question).await.unwrap();
        let mut answer = vec![0; stream.read_u16().await.unwrap().into()];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(hickory_proto::op::Message::from_vec(&answer).unwrap().answers.len(), 1);
    }
}

#[tokio::test]
async fn a_flood_of_questions_is_bounded() {
    let world = World::new();
    let (guest, attachment) = world.attach_with(allow("good.example"), |spec| {
        spec.limits.dns_queries_per_second = 10;
        spec.limits.names = 5;
    });
    for number in 0..200 {
        let packet = question(&format!("n{number}.evil.example"), RecordType::A);
        guest.send_packet(&super::guest::udp(5_000 + number, GATEWAY_ADDRESS, 53, &packet));
    }
    guest.settle().await;
    world.record("too_many_questions").await;
    assert!(attachment.stats().names <= 5);
}

#[tokio::test]
async fn names_survive_a_restore_and_old_addresses_still_work() {
    let world = World::new();
    world.name("db.example", &["93.184.216.34"]);
    world.serve("93.184.216.34:5432", echo_server().await);
    let policy = json!({"default": "deny", "rules": [{"action": "allow", "names": ["db.example"], "ports": [5432]}]});
    let (guest, attachment) = world.attach(policy.clone());
    let address = guest.resolve("db.example").await.unwrap();
    let names = attachment.name_table();
    attachment.detach();
    drop(guest);
    let (guest, _attachment) = world.attach_with(policy, |spec| spec.names = names);
    guest.connect(address, 5432).await.unwrap();
}

#[tokio::test]
async fn a_name_the_operator_leads_somewhere_is_judged_by_name_and_by_nothing_else() {
    let routes = [("mirror.example:5432", "10.0.0.9:7777"), ("other.example", "127.0.0.1")];
    let routes = routes.iter().map(|(from, to)| ((*from).to_owned(), (*to).to_owned())).collect();
    let world = World::with(|config| config.routes = stockade_gateway::Routes::parse(&routes).unwrap());
    world.serve("10.0.0.9:7777", echo_server().await);
    let rule = json!({"id": "raw", "action": "allow", "names": ["mirror.example"], "ports": [5432, 5433]});
    let (guest, attachment) = world.attach(json!({"default": "deny", "rules": [rule]}));
    let mut stream = guest.connect_name("mirror.example", 5432).await.unwrap();
    stream.write_all(b"hello").await.unwrap();
    let mut answer = [0; 5];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"hello");
    assert!(world.net.asked.lock().unwrap().is_empty(), "nobody else is asked for it");
    // Another port of the name leads nowhere, another name is not allowed, and a change of policy ends what was open.
    assert!(guest.connect_name("other.example", 5432).await.is_err());
    let closed: stockade_gateway::policy::Policy = serde_json::from_value(json!({"default": "deny"})).unwrap();
    assert_eq!(attachment.set_policy(&[closed]).unwrap(), 1);
    assert_eq!(world.net.dialled.lock().unwrap().len(), 1);
}
