//! Frames of a process's or a watch's event stream: `kind u8, length u32 big-endian, payload`.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};
use tokio_util::codec::{Decoder, Encoder};

use crate::{files::FileEvent, process::Exit, process::Started};

/// Largest payload of one frame, in bytes. Output comes in pieces of at most 32 KiB.
pub const MAX_PAYLOAD_BYTES: usize = 256 << 10;

/// One thing that happened, in the order it happened.
#[expect(clippy::large_enum_variant, reason = "file events are rare and short-lived; boxing would burden every user")]
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The process runs (first frame of a start or an attach).
    Started(Started),
    /// Bytes the process wrote to its standard output.
    Stdout(Bytes),
    /// Bytes the process wrote to its standard error.
    Stderr(Bytes),
    /// Bytes the process wrote to its terminal.
    Pty(Bytes),
    /// The main process ended; the last frame.
    Exit(Exit),
    /// Nothing happened for a while; keeps idle connections open.
    KeepAlive,
    /// This reader was too slow or came too late and missed bytes; the stream goes on after them.
    Missed(Missed),
    /// Something changed under a watched path.
    File(FileEvent),
    /// The watch stands; changes from now on are reported (first frame of a watch).
    Watching,
    /// The kernel dropped watch events; look at the tree again.
    Overflow,
}

/// Output a reader did not get.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Missed {
    /// How many bytes of output were skipped.
    pub bytes: u64,
}

/// Why a frame could not be read.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// A kind this build does not know.
    #[error("event frame of unknown kind {0}")]
    UnknownKind(u8),
    /// A length over [`MAX_PAYLOAD_BYTES`].
    #[error("event frame of {0} bytes is over the limit of {MAX_PAYLOAD_BYTES}")]
    TooLong(usize),
    /// A payload that is not the JSON it should be.
    #[error("event frame of kind {kind} holds malformed JSON")]
    Malformed {
        /// The frame's kind.
        kind: u8,
        /// What the parser said.
        #[source]
        source: serde_json::Error,
    },
    /// The stream ended or failed.
    #[error("event stream failed")]
    Io(#[from] std::io::Error),
}

/// Turns [`Event`]s into frames and back.
#[derive(Clone, Copy, Debug, Default)]
pub struct EventCodec;

/// Bytes in front of a frame's payload.
pub const HEADER_BYTES: usize = 5;

/// Which of a process's outputs bytes came from.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Output {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// The terminal.
    Pty,
}

impl EventCodec {
    /// The header of a frame that carries `length` bytes of output; the bytes follow it.
    pub fn output_header(output: Output, length: usize) -> [u8; HEADER_BYTES] {
        let kind = match output {
            Output::Stdout => 2,
            Output::Stderr => 3,
            Output::Pty => 4,
        };
        let [a, b, c, d] = (length as u32).to_be_bytes();
        [kind, a, b, c, d]
    }

    /// Appends one event's frame.
    pub fn put(event: &Event, out: &mut BytesMut) {
        let json = |value: serde_json::Result<Vec<u8>>| value.map(Bytes::from).unwrap_or_default();
        let (kind, payload) = match event {
            Event::Started(started) => (1, json(serde_json::to_vec(started))),
            Event::Stdout(bytes) => (2, bytes.clone()),
            Event::Stderr(bytes) => (3, bytes.clone()),
            Event::Pty(bytes) => (4, bytes.clone()),
            Event::Exit(exit) => (5, json(serde_json::to_vec(exit))),
            Event::KeepAlive => (6, Bytes::new()),
            Event::Missed(missed) => (7, json(serde_json::to_vec(missed))),
            Event::File(file) => (8, json(serde_json::to_vec(file))),
            Event::Watching => (9, Bytes::new()),
            Event::Overflow => (10, Bytes::new()),
        };
        out.reserve(HEADER_BYTES + payload.len());
        out.put_u8(kind);
        out.put_u32(payload.len() as u32);
        out.put_slice(&payload);
    }
}

impl Encoder<Event> for EventCodec {
    type Error = FrameError;

    fn encode(&mut self, event: Event, out: &mut BytesMut) -> Result<(), FrameError> {
        Self::put(&event, out);
        Ok(())
    }
}

impl Decoder for EventCodec {
    type Item = Event;
    type Error = FrameError;

    fn decode(&mut self, input: &mut BytesMut) -> Result<Option<Event>, FrameError> {
        if input.len() < HEADER_BYTES {
            return Ok(None);
        }
        let kind = input[0];
        let length = u32::from_be_bytes([input[1], input[2], input[3], input[4]]) as usize;
        if length > MAX_PAYLOAD_BYTES {
            return Err(FrameError::TooLong(length));
        }
        if input.len() < HEADER_BYTES + length {
            input.reserve(HEADER_BYTES + length - input.len());
            return Ok(None);
        }
        input.advance(HEADER_BYTES);
        let payload = input.split_to(length).freeze();
        let malformed = |source| FrameError::Malformed { kind, source };
        Ok(Some(match kind {
            1 => Event::Started(serde_json::from_slice(&payload).map_err(malformed)?),
            2 => Event::Stdout(payload),
            3 => Event::Stderr(payload),
            4 => Event::Pty(payload),
            5 => Event::Exit(serde_json::from_slice(&payload).map_err(malformed)?),
            6 => Event::KeepAlive,
            7 => Event::Missed(serde_json::from_slice(&payload).map_err(malformed)?),
            8 => Event::File(serde_json::from_slice(&payload).map_err(malformed)?),
            9 => Event::Watching,
            10 => Event::Overflow,
            other => return Err(FrameError::UnknownKind(other)),
        }))
    }
}
