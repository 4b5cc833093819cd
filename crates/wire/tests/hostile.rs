//! What the other side sends is hostile: nothing it says panics or makes us allocate without bound.

use bytes::{Bytes, BytesMut};
use proptest::prelude::*;
use stockade_wire::{
    event::{Event, EventCodec, HEADER_BYTES, MAX_PAYLOAD_BYTES, Missed},
    hello::{Hello, MAGIC, Opening, Scanner},
    process::{Exit, Started},
};
use tokio_util::codec::Decoder;

fn event() -> impl Strategy<Value = Event> {
    let bytes = || prop::collection::vec(any::<u8>(), 0..300).prop_map(Bytes::from);
    prop_oneof![
        (any::<u32>(), any::<u64>()).prop_map(|(pid, offset)| Event::Started(Started { pid, offset })),
        bytes().prop_map(Event::Stdout),
        bytes().prop_map(Event::Stderr),
        bytes().prop_map(Event::Pty),
        any::<u8>().prop_map(|code| Event::Exit(Exit { code: Some(code.into()), ..Exit::default() })),
        any::<u64>().prop_map(|bytes| Event::Missed(Missed { bytes })),
        Just(Event::KeepAlive),
        Just(Event::Watching),
        Just(Event::Overflow),
    ]
}

proptest! {
    #[test]
    fn events_survive_the_way_however_they_are_cut(
        events in prop::collection::vec(event(), 0..20),
        cuts in prop::collection::vec(1usize..50, 1..20),
    ) {
        let mut wire = BytesMut::new();
        for event in &events {
            EventCodec::put(event, &mut wire);
        }
        let (mut input, mut seen) = (BytesMut::new(), Vec::new());
        for cut in cuts.iter().cycle() {
            let piece = wire.split_to((*cut).min(wire.len()));
            input.extend_from_slice(&piece);
            while let Some(event) = EventCodec.decode(&mut input).expect("our own frames") {
                seen.push(event);
            }
            if wire.is_empty() {
                break;
            }
        }
        prop_assert_eq!(seen, events);
        prop_assert!(input.is_empty());
    }

    #[test]
    fn random_frames_are_events_or_errors_and_take_bounded_room(bytes in prop::collection::vec(any::<u8>(), 0..4000)) {
        let mut input = BytesMut::from(&bytes[..]);
        while let Ok(Some(_)) = EventCodec.decode(&mut input) {}
        prop_assert!(input.capacity() <= 2 * (HEADER_BYTES + MAX_PAYLOAD_BYTES) + bytes.len());
    }

    #[test]
    fn what_opens_a_session_is_within_what_came(
        magic in prop::sample::select(vec![&b"\xffSTKDMSG"[..], &MAGIC, b""]),
        rest in prop::collection::vec(any::<u8>(), 0..100),
    ) {
        let bytes = [magic, &rest].concat();
        if let Opening::Message(body) = Opening::of(&bytes) {
            prop_assert!(bytes.get(body).is_some());
        }
    }

    #[test]
    fn a_hello_is_found_behind_any_rubbish(
        rubbish in prop::collection::vec(prop_oneof![3 => any::<u8>(), 1 => prop::sample::select(MAGIC.to_vec())], 0..300),
        epoch in any::<[u8; 16]>(),
    ) {
        let hello = Hello::new(epoch);
        let mut scanner = Scanner::default();
        // Rubbish may begin a hello of its own that swallows the first real one: the host repeats it.
        let stream = [&rubbish[..], &hello.encode(), &hello.encode()].concat();
        let found: Vec<_> = stream.iter().filter_map(|byte| scanner.push(*byte)).collect();
        prop_assert!(found.contains(&hello));
    }
}
