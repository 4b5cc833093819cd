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

use crate::PROTOCOL;

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
    fn an_epoch_that_looks_like_the_magic_does_not_confuse_the_scanner() {
        let mut epoch = [0; 16];
        epoch[..8].copy_from_slice(&MAGIC);
        epoch[8..].copy_from_slice(&MAGIC);
        let hello = Hello::new(epoch);
        assert_eq!(scan(&[hello.encode(), hello.encode()].concat()), [hello, hello]);
    }
}
