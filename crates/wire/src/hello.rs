//! How a link session begins.
//!
//! A serial port keeps bytes of a session that no longer has a reader: in a child of a fork the host
//! may read the tail of a frame that was meant for the parent. So each session opens with a
//! [`Hello`] that carries an epoch nobody has used before. The host writes one; the agent drops its
//! old session when the port hangs up, discards input until it has read a hello, and echoes it; the
//! host discards input until it has read its own epoch back. A byte of an older session can be lost,
//! never mistaken for one of the new. The host repeats its hello until it is answered (the first one
//! may have been eaten by the agent's old session), so either side skips hellos of its own epoch that
//! come before the first byte of HTTP/2; the agent answers each epoch once.
//!
//! Between hello and HTTP/2 the host may say who the machine is, in a message that the agent answers with another: the
//! first thing said to a restored machine is on the path of every fork and resume, and all of HTTP/2 would have to be
//! translated for it by an emulator. [`Opening::of`] tells these apart.

use crate::{MAX_JSON_BYTES, PROTOCOL};

/// Marks the start of a hello. Not valid UTF-8 and not the start of an HTTP/2 frame.
pub const MAGIC: [u8; 8] = *b"\xffSTKDLNK";

/// Bytes of an encoded hello.
pub const HELLO_BYTES: usize = 28;

/// The first thing either side says in a session.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Hello {
    /// The protocol the sender speaks.
    pub protocol: u32,
    /// Random, chosen by the host for this session alone.
    pub epoch: [u8; 16],
}

impl Hello {
    /// A hello of this build's protocol.
    pub fn new(epoch: [u8; 16]) -> Self {
        Self { protocol: PROTOCOL, epoch }
    }

    /// The bytes on the link: magic, protocol (big-endian), epoch.
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.protocol.to_be_bytes());
        bytes[12..].copy_from_slice(&self.epoch);
        bytes
    }

    /// Reads [`HELLO_BYTES`] bytes that begin with the magic; `None` if they are anything else.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let rest = bytes.strip_prefix(&MAGIC)?;
        let (protocol, epoch) = rest.split_first_chunk()?;
        Some(Self { protocol: u32::from_be_bytes(*protocol), epoch: epoch.try_into().ok()? })
    }
}

/// Marks the start of a message before HTTP/2. As long as a hello's, and as impossible elsewhere.
const MESSAGE_MAGIC: [u8; 8] = *b"\xffSTKDMSG";
const MESSAGE_HEADER_BYTES: usize = 12;

/// The bytes on the link of a message before HTTP/2: magic, length (big-endian), body. `None`: it is over
/// [`MAX_JSON_BYTES`].
///
/// The host's is an [`Introduction`](crate::machine::Introduction) as JSON; the agent's is empty if it was taken, else an
/// [`ErrorBody`](crate::ErrorBody).
pub fn message(body: &[u8]) -> Option<Vec<u8>> {
    if body.len() > MAX_JSON_BYTES {
        return None;
    }
    Some([&MESSAGE_MAGIC, &(body.len() as u32).to_be_bytes()[..], body].concat())
}

/// What stands at the start of what follows a hello.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Opening {
    /// More bytes are needed to tell.
    Unclear,
    /// A hello of [`HELLO_BYTES`].
    Hello(Hello),
    /// A message, whole: where its body is, and it ends with it.
    Message(std::ops::Range<usize>),
    /// HTTP/2.
    Http2,
    /// Nothing that belongs there.
    Rubbish,
}

impl Opening {
    /// Looks at the bytes that came behind a hello, none of which were taken.
    pub fn of(bytes: &[u8]) -> Self {
        match bytes.first() {
            None => return Self::Unclear,
            Some(first) if *first != MAGIC[0] => return Self::Http2,
            Some(_) => {}
        }
        if is_prefix(bytes) {
            let hello = bytes.get(..HELLO_BYTES).and_then(Hello::decode);
            return hello.map_or(Self::Unclear, Self::Hello);
        }
        let marked = bytes.len().min(MESSAGE_MAGIC.len());
        if bytes[..marked] != MESSAGE_MAGIC[..marked] {
            return Self::Rubbish;
        }
        let Some(length) = bytes.get(MESSAGE_MAGIC.len()..MESSAGE_HEADER_BYTES) else { return Self::Unclear };
        let length = length.iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
        if length > MAX_JSON_BYTES {
            return Self::Rubbish;
        }
        let end = MESSAGE_HEADER_BYTES + length;
        if bytes.len() < end { Self::Unclear } else { Self::Message(MESSAGE_HEADER_BYTES..end) }
    }
}

/// Finds a hello in a stream of bytes of which the beginning may be rubbish.
#[derive(Debug, Default)]
pub struct Scanner {
    seen: Vec<u8>,
}

impl Scanner {
    /// Takes one more byte; returns the hello that it completes, if it does.
    pub fn push(&mut self, byte: u8) -> Option<Hello> {
        self.seen.push(byte);
        while !self.seen.is_empty() && !is_prefix(&self.seen) {
            self.seen.remove(0);
        }
        if self.seen.len() < HELLO_BYTES {
            return None;
        }
        let hello = Hello::decode(&self.seen);
        self.seen.clear();
        hello
    }
}

fn is_prefix(seen: &[u8]) -> bool {
    let n = seen.len().min(MAGIC.len());
    seen[..n] == MAGIC[..n]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(bytes: &[u8]) -> Vec<Hello> {
        let mut scanner = Scanner::default();
        bytes.iter().filter_map(|byte| scanner.push(*byte)).collect()
    }

    #[test]
    fn a_hello_is_found_behind_the_rest_of_an_old_session() {
        let hello = Hello::new([7; 16]);
        let mut bytes = b"\0\0\x08\x06\0\xff\xffSTKD half a frame \xffSTKDLN".to_vec();
        bytes.extend(hello.encode());
        assert_eq!(scan(&bytes), [hello]);
    }

    #[test]
    fn what_follows_a_hello_is_told_apart_however_little_of_it_is_there() {
        let hello = Hello::new([3; 16]);
        let message = message(b"{}").expect("short");
        for (bytes, whole) in [
            (&hello.encode()[..], Opening::Hello(hello)),
            (&message[..], Opening::Message(12..14)),
            (b"PRI * HTTP/2.0", Opening::Http2),
            (b"\0\0\x12\x04", Opening::Http2),
            (b"\xffSTKDXXX", Opening::Rubbish),
            (b"\xffSTKDMSG\xff\xff\xff\xff", Opening::Rubbish),
        ] {
            assert_eq!(Opening::of(bytes), whole);
            let parts = (0..bytes.len()).map(|length| Opening::of(&bytes[..length]));
            assert!(parts.into_iter().all(|part| part == Opening::Unclear || part == whole), "{bytes:?}");
        }
        assert_eq!(super::message(&vec![0; MAX_JSON_BYTES + 1]), None);
    }

    #[test]
    fn an_epoch_that_looks_like_the_magic_does_not_confuse_the_scanner() {
        let mut epoch = [0; 16];
        epoch[..8].copy_from_slice(&MAGIC);
        epoch[8..].copy_from_slice(&MAGIC);
        let hello = Hello::new(epoch);
        assert_eq!(scan(&[hello.encode(), hello.encode()].concat()), [hello, hello]);
    }
}
