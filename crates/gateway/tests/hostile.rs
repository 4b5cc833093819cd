//! Parsers that meet a guest's bytes: whatever comes, they answer and stay within bounds. Short runs with `cargo
//! test`; `PROPTEST_CASES=1000000` for long ones.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;
use stockade_gateway::{
    dns,
    net::{GUEST_ADDRESS, frame},
    policy::normalize_name,
    proxy::{
        hello::{self, HelloParse},
        sniff,
    },
};

/// A frame that starts well and goes on as it likes: plain noise never gets past the first check.
fn near_frame() -> impl Strategy<Value = Vec<u8>> {
    (prop_oneof![Just(6_u8), Just(17), Just(1), any::<u8>()], prop::collection::vec(any::<u8>(), 0..200), any::<bool>())
        .prop_map(|(protocol, body, honest)| {
            let mut frame = vec![0; 12];
            frame.extend_from_slice(&[8, 0]);
            let mut header = vec![0x45, 0];
            let length = if honest { 20 + body.len() as u16 } else { u16::from(body.first().copied().unwrap_or(0)) };
            header.extend_from_slice(&length.to_be_bytes());
            header.extend_from_slice(&[0, 0, 0, 0, 64, protocol, 0, 0]);
            header.extend_from_slice(&GUEST_ADDRESS.octets());
            header.extend_from_slice(&[93, 184, 216, 34]);
            let sum = frame::checksum(&header, 0);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
            frame.extend_from_slice(&header);
            frame.extend_from_slice(&body);
            frame
        })
}

/// A hello with some bytes changed.
fn near_hello() -> impl Strategy<Value = Vec<u8>> {
    let name = b"good.example";
    let mut extension = vec![0, 0, 0, name.len() as u8 + 5, 0, name.len() as u8 + 3, 0, 0, name.len() as u8];
    extension.extend_from_slice(name);
    extension.extend_from_slice(&[0xfe, 0x0d, 0, 2, 1, 2]);
    let mut body = vec![3, 3];
    body.extend_from_slice(&[9; 32]);
    body.extend_from_slice(&[0, 0, 2, 0x13, 1, 1, 0, 0, extension.len() as u8]);
    body.extend_from_slice(&extension);
    let mut hello = vec![22, 3, 1, 0, body.len() as u8 + 4, 1, 0, 0, body.len() as u8];
    hello.extend_from_slice(&body);
    assert!(matches!(hello::parse(&hello), HelloParse::Hello(read) if read.encrypted));
    prop::collection::vec((0..hello.len(), any::<u8>()), 0..4).prop_map(move |changes| {
        let mut hello = hello.clone();
        for (at, byte) in changes {
            hello[at] = byte;
        }
        hello
    })
}

/// A question with some bytes changed.
fn near_question() -> impl Strategy<Value = Vec<u8>> {
    let mut question = vec![1, 2, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1, 4];
    question.extend_from_slice(b"good\x07example\0\0\x01\0\x01\0\0\x29\x04\xd0\0\0\0\0\0\0");
    assert!(dns::read(&question).is_ok());
    (prop::collection::vec((0..question.len(), any::<u8>()), 0..5), 0..question.len() + 1).prop_map(
        move |(changes, length)| {
            let mut question = question.clone();
            for (at, byte) in changes {
                question[at] = byte;
            }
            question.truncate(length.max(1));
            question
        },
    )
}

fn look(frame_bytes: &[u8]) {
    if let frame::Frame::Tcp(segment) = frame::parse(frame_bytes) {
        assert!(segment.packet.len() <= frame_bytes.len());
        assert!(segment.from_port != 0 && segment.to_port != 0);
        let reset = frame::reset([2; 6], &segment);
        assert_eq!(reset.is_none(), segment.flags & frame::flags::RST != 0);
    }
}

fn ask(packet: &[u8]) {
    match dns::read(packet) {
        Ok(question) => {
            for answer in
                [dns::Answer::Address(GUEST_ADDRESS), dns::Answer::Nxdomain, dns::Answer::Name("a.example".into())]
            {
                let answer = dns::answer(&question, &answer).unwrap_or_default();
                assert!(answer.len() < 1_232, "an answer of {} bytes", answer.len());
            }
        }
        Err(Some(refusal)) => assert!(refusal.len() <= 512 && refusal[2] & 0x80 != 0),
        Err(None) => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.max(3_000), ..ProptestConfig::default() })]

    #[test]
    fn frames(noise in prop::collection::vec(any::<u8>(), 0..120), near in near_frame()) {
        look(&noise);
        look(&near);
    }

    #[test]
    fn hellos(noise in prop::collection::vec(any::<u8>(), 0..200), near in near_hello(), cut in any::<prop::sample::Index>()) {
        for bytes in [&noise, &near] {
            let whole = hello::parse(bytes);
            if let HelloParse::Hello(hello) = &whole {
                let name = hello.server_name.as_deref();
                prop_assert!(name.is_none_or(|name| normalize_name(name).as_deref() == Some(name)));
            }
            // What comes first never decides otherwise than the whole, only later.
            let first = hello::parse(&bytes[..cut.index(bytes.len() + 1)]);
            prop_assert!(matches!(first, HelloParse::More | HelloParse::Bad(_)) || first == whole);
            let _ = sniff::sniff(bytes, false);
            prop_assert!(sniff::sniff(bytes, true).is_some());
        }
    }

    #[test]
    fn questions(noise in prop::collection::vec(any::<u8>(), 0..600), near in near_question()) {
        ask(&noise);
        ask(&near);
    }

    #[test]
    fn names(text in ".{0,300}") {
        if let Some(name) = normalize_name(&text) {
            prop_assert_eq!(normalize_name(&name), Some(name.clone()));
            prop_assert!(name.len() <= 253 && !name.ends_with('.'));
        }
    }
}
