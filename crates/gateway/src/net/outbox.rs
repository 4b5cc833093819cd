//! Frames on their way to the guest. Flows put them in until it is full and are called again when there is room, in
//! the order they asked, so that one flow cannot starve the others.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

use super::Flow;

const FULL_BYTES: usize = 1 << 20;
/// Answers to packets (resets, acknowledgements) may go over it before they are dropped.
const OVERFULL_BYTES: usize = 2 * FULL_BYTES;
const LARGE: usize = 65_600;
const SMALL: usize = 2_048;
const POOLED: usize = 32;

/// A frame in a buffer that may be longer.
pub(super) struct Frame {
    buffer: Vec<u8>,
    len: usize,
}

impl Frame {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[..self.len]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[..self.len]
    }
}

#[derive(Default)]
struct Inner {
    frames: VecDeque<Frame>,
    bytes: usize,
    blocked: VecDeque<Arc<Flow>>,
    small: Vec<Vec<u8>>,
    large: Vec<Vec<u8>>,
}

#[derive(Default)]
pub(super) struct Outbox {
    inner: Mutex<Inner>,
    filled: Notify,
}

impl Outbox {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn has_room(&self) -> bool {
        self.lock().bytes < FULL_BYTES
    }

    /// A buffer for a frame of `len` bytes; its content is arbitrary.
    pub(super) fn frame(&self, len: usize) -> Frame {
        let mut inner = self.lock();
        let (pool, size) = if len <= SMALL { (&mut inner.small, SMALL) } else { (&mut inner.large, len.max(LARGE)) };
        let buffer = pool.pop().filter(|buffer| buffer.len() >= len);
        drop(inner);
        Frame { buffer: buffer.unwrap_or_else(|| vec![0; size]), len }
    }

    pub(super) fn push(&self, frame: Frame) {
        let mut inner = self.lock();
        if inner.bytes >= OVERFULL_BYTES {
            return;
        }
        inner.bytes += frame.len;
        inner.frames.push_back(frame);
        let first = inner.frames.len() == 1;
        drop(inner);
        if first {
            self.filled.notify_one();
        }
    }

    pub(super) fn push_bytes(&self, bytes: Vec<u8>) {
        let len = bytes.len();
        self.push(Frame { buffer: bytes, len });
    }

    /// Calls `flow` when there is room. False if there is by now: whoever found it full before may be the only one who
    /// still has anything to send, and the writer, done with all the rest, would never look again.
    pub(super) fn wait_for_room(&self, flow: &Arc<Flow>) -> bool {
        let mut inner = self.lock();
        let is_full = inner.bytes >= FULL_BYTES;
        if is_full {
            inner.blocked.push_back(Arc::clone(flow));
        }
        is_full
    }

    /// Waits for frames and takes up to `most`.
    pub(super) async fn take(&self, taken: &mut Vec<Frame>, most: usize) {
        loop {
            {
                let mut inner = self.lock();
                let count = inner.frames.len().min(most);
                if count > 0 {
                    taken.extend(inner.frames.drain(..count));
                    return;
                }
            }
            self.filled.notified().await;
        }
    }

    /// Takes back buffers whose frames were written.
    pub(super) fn written(&self, taken: &mut Vec<Frame>) {
        let mut inner = self.lock();
        for frame in taken.drain(..) {
            inner.bytes = inner.bytes.saturating_sub(frame.len);
            let (pool, size) =
                if frame.buffer.len() < LARGE { (&mut inner.small, SMALL) } else { (&mut inner.large, LARGE) };
            if frame.buffer.len() >= size && pool.len() < POOLED {
                pool.push(frame.buffer);
            }
        }
        // Frames that came while these were written were not announced if some were left.
        if !inner.frames.is_empty() {
            self.filled.notify_one();
        }
    }

    /// The flow that waits longest, while there is room.
    pub(super) fn next_blocked(&self) -> Option<Arc<Flow>> {
        let mut inner = self.lock();
        if inner.bytes < FULL_BYTES { inner.blocked.pop_front() } else { None }
    }

    /// Forgets everything; a link that ended has no room.
    pub(super) fn clear(&self) {
        let mut inner = self.lock();
        let gone = std::mem::take(&mut *inner);
        drop(inner);
        drop(gone);
    }
}
