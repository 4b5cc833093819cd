//! A bounded pipe between async code and a thread that reads or writes a tar stream.

use std::io::{self, Read, Write};

use bytes::{Buf as _, Bytes};
use tokio::sync::mpsc;

/// Pieces on their way.
pub(crate) const QUEUE: usize = 16;
const PIECE_BYTES: usize = 64 << 10;

/// Reads what was sent; the end of the channel is the end of the stream.
pub(crate) struct ChannelReader {
    queue: mpsc::Receiver<Bytes>,
    current: Bytes,
}

impl ChannelReader {
    pub(crate) fn new(queue: mpsc::Receiver<Bytes>) -> Self {
        Self { queue, current: Bytes::new() }
    }
}

impl Read for ChannelReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() {
            match self.queue.blocking_recv() {
                Some(next) => self.current = next,
                None => return Ok(0),
            }
        }
        let length = out.len().min(self.current.len());
        self.current.copy_to_slice(&mut out[..length]);
        Ok(length)
    }
}

/// Sends what is written, in pieces; `flush` sends the rest.
pub(crate) struct ChannelWriter {
    queue: mpsc::Sender<Bytes>,
    buffer: Vec<u8>,
}

impl ChannelWriter {
    pub(crate) fn new(queue: mpsc::Sender<Bytes>) -> Self {
        Self { queue, buffer: Vec::with_capacity(PIECE_BYTES) }
    }
}

impl Write for ChannelWriter {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let length = data.len().min(PIECE_BYTES - self.buffer.len());
        self.buffer.extend_from_slice(&data[..length]);
        if self.buffer.len() == PIECE_BYTES {
            self.flush()?;
        }
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let piece = std::mem::replace(&mut self.buffer, Vec::with_capacity(PIECE_BYTES));
        self.queue.blocking_send(piece.into()).map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))
    }
}
