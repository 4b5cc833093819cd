//! What a process has written: kept for a while, read by any number of readers.
//!
//! ```text
//!   dropped        kept (at most RING, whatever the readers do)      to come
//! ------------|===================================================|-----------
//!             ^ start        ^ slow reader        ^ fastest       ^ end
//! ```
//!
//! Offsets count bytes of all outputs together. Output the fastest reader has not read is never dropped:
//! the pump waits instead ([`Log::room`]), so the process itself waits in `write`. Whoever is further
//! behind than what is kept gets a `Missed` and goes on from `start`; no reader ever waits for another.
//! Without readers the oldest is dropped. Chunks are kept as complete frames, so that sending one is
//! handing over a reference.

use std::{
    collections::{BTreeMap, VecDeque},
    convert::Infallible,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::{BufMut, Bytes, BytesMut};
use http_body::{Body, Frame};
use stockade_wire::{
    event::{Event, EventCodec, HEADER_BYTES, Missed, Output},
    process::{Exit, Started},
};
use tokio::{
    sync::Notify,
    time::{Sleep, sleep},
};

/// What is kept of a process's output, small chunks counted with what they cost beyond their bytes.
const RING: u64 = 1 << 20;
/// What a chunk costs beyond its bytes.
const CHUNK_COST: u64 = 128;
/// Small chunks are sent together up to this size.
const JOINED: usize = 32 << 10;
/// A reader hears something after at least one and less than two of these.
const SILENCE: Duration = Duration::from_secs(8);

/// The output of one process. Clones share it.
#[derive(Clone)]
pub(crate) struct Log {
    shared: Arc<Shared>,
}

struct Shared {
    inner: Mutex<Inner>,
    room: Notify,
}

#[derive(Default)]
struct Inner {
    chunks: VecDeque<Chunk>,
    /// Offset of the first byte kept.
    start: u64,
    /// Offset behind the last byte.
    end: u64,
    /// As `start` and `end`, in units of cost.
    start_cost: u64,
    end_cost: u64,
    exit: Option<Exit>,
    readers: BTreeMap<u64, Cursor>,
    next_reader: u64,
    is_pump_waiting: bool,
}

struct Chunk {
    /// Offset and cost of its first byte.
    offset: u64,
    cost: u64,
    frame: Bytes,
}

#[derive(Default)]
struct Cursor {
    offset: u64,
    cost: u64,
    waker: Option<Waker>,
}

impl Chunk {
    fn bytes(&self) -> u64 {
        (self.frame.len() - HEADER_BYTES) as u64
    }
}

impl Inner {
    fn fastest_cost(&self) -> Option<u64> {
        self.readers.values().map(|cursor| cursor.cost).max()
    }

    /// Drops the oldest over the limit, but nothing the fastest reader still needs.
    fn trim(&mut self) {
        let needed = self.fastest_cost().unwrap_or(u64::MAX);
        while self.end_cost - self.start_cost > RING {
            let Some(front) = self.chunks.front() else { break };
            let (next, next_cost) = (front.offset + front.bytes(), front.cost + front.bytes() + CHUNK_COST);
            if next_cost > needed {
                break;
            }
            self.chunks.pop_front();
            (self.start, self.start_cost) = (next, next_cost);
        }
    }

    fn has_room(&self) -> bool {
        self.fastest_cost().is_none_or(|cost| self.end_cost - cost < RING)
    }

    /// Index of the chunk that holds the byte at `offset`, which is neither dropped nor still to come.
    fn index(&self, offset: u64) -> usize {
        self.chunks.partition_point(|chunk| chunk.offset + chunk.bytes() <= offset)
    }

    fn wake_readers(&mut self) {
        for cursor in self.readers.values_mut() {
            if let Some(waker) = cursor.waker.take() {
                waker.wake();
            }
        }
    }
}

impl Log {
    pub(super) fn new() -> Self {
        Self { shared: Arc::new(Shared { inner: Mutex::default(), room: Notify::new() }) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.shared.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the pump should read on.
    pub(super) fn has_room(&self) -> bool {
        self.lock().has_room()
    }

    /// Waits until the fastest reader has read some of what is kept, or nobody reads.
    pub(super) async fn room(&self) {
        loop {
            let notified = self.shared.room.notified();
            {
                let mut inner = self.lock();
                if inner.has_room() {
                    return;
                }
                inner.is_pump_waiting = true;
            }
            notified.await;
        }
    }

    /// Adds what the process wrote. `framed` starts with [`HEADER_BYTES`] bytes that are filled in here.
    pub(super) fn append(&self, output: Output, framed: &mut [u8]) {
        let length = framed.len() - HEADER_BYTES;
        framed[..HEADER_BYTES].copy_from_slice(&EventCodec::output_header(output, length));
        let frame = Bytes::copy_from_slice(framed);
        let mut inner = self.lock();
        let (offset, cost) = (inner.end, inner.end_cost);
        inner.chunks.push_back(Chunk { offset, cost, frame });
        inner.end += length as u64;
        inner.end_cost += length as u64 + CHUNK_COST;
        inner.trim();
        inner.wake_readers();
    }

    /// Says how the process ended; nothing is appended after that.
    pub(super) fn finish(&self, exit: Exit) {
        let mut inner = self.lock();
        inner.exit.get_or_insert(exit);
        inner.wake_readers();
    }

    /// How the process ended, if it has.
    pub(super) fn exit(&self) -> Option<Exit> {
        self.lock().exit.clone()
    }

    /// What is kept, in bytes.
    pub(super) fn kept_bytes(&self) -> u64 {
        let inner = self.lock();
        inner.end_cost - inner.start_cost
    }

    /// Drops all output kept; readers learn that they missed it.
    pub(super) fn forget(&self) {
        let mut inner = self.lock();
        inner.chunks.clear();
        (inner.start, inner.start_cost) = (inner.end, inner.end_cost);
    }

    /// A reader from an offset (one not yet written counts as the end), or from now on.
    pub(super) fn attach(&self, pid: u32, after: Option<u64>) -> Reader {
        let mut inner = self.lock();
        let wanted = after.unwrap_or(inner.end).min(inner.end);
        let from = wanted.max(inner.start);
        let index = inner.index(from);
        let cost = inner.chunks.get(index).map_or(inner.end_cost, |chunk| chunk.cost);
        let id = inner.next_reader;
        inner.next_reader += 1;
        inner.readers.insert(id, Cursor { offset: from, cost, waker: None });
        drop(inner);
        let mut greeting = BytesMut::with_capacity(128);
        EventCodec::put(&Event::Started(Started { pid, offset: wanted }), &mut greeting);
        if from > wanted {
            EventCodec::put(&Event::Missed(Missed { bytes: from - wanted }), &mut greeting);
        }
        Reader { log: self.clone(), id, greeting: Some(greeting), silence: None, has_spoken: false, is_done: false }
    }
}

/// One reader: a body of event frames that ends with the exit.
pub(crate) struct Reader {
    log: Log,
    id: u64,
    greeting: Option<BytesMut>,
    silence: Option<Pin<Box<Sleep>>>,
    has_spoken: bool,
    is_done: bool,
}

impl Reader {
    /// The next frames for this reader; `None` when it has to wait.
    fn take(&mut self, context: &mut Context<'_>) -> Option<Bytes> {
        let mut guard = self.log.lock();
        let inner = &mut *guard;
        let mut cursor = inner.readers.remove(&self.id).unwrap_or_default();
        let mut joined = self.greeting.take().unwrap_or_default();
        let mut single = None;
        if cursor.offset < inner.start {
            EventCodec::put(&Event::Missed(Missed { bytes: inner.start - cursor.offset }), &mut joined);
            (cursor.offset, cursor.cost) = (inner.start, inner.start_cost);
        }
        let mut index = inner.index(cursor.offset);
        while let Some(chunk) = inner.chunks.get(index) {
            let skip = (cursor.offset - chunk.offset) as usize;
            if joined.is_empty() && skip == 0 && chunk.frame.len() >= JOINED {
                single = Some(chunk.frame.clone());
            } else if joined.is_empty() || joined.len() + chunk.frame.len() - skip <= JOINED {
                put_rest(chunk, skip, &mut joined);
            } else {
                break;
            }
            cursor.offset = chunk.offset + chunk.bytes();
            cursor.cost = chunk.cost + chunk.bytes() + CHUNK_COST;
            index += 1;
            if single.is_some() {
                break;
            }
        }
        if cursor.offset == inner.end
            && single.is_none()
            && let Some(exit) = &inner.exit
        {
            EventCodec::put(&Event::Exit(exit.clone()), &mut joined);
            self.is_done = true;
        }
        let frames = single.or_else(|| (!joined.is_empty()).then(|| joined.freeze()));
        if frames.is_none() {
            cursor.waker = Some(context.waker().clone());
        }
        inner.readers.insert(self.id, cursor);
        inner.trim();
        let is_pump_free = inner.is_pump_waiting && inner.has_room();
        if is_pump_free {
            inner.is_pump_waiting = false;
        }
        drop(guard);
        if is_pump_free {
            self.log.shared.room.notify_one();
        }
        frames
    }

    fn poll_silence(&mut self, context: &mut Context<'_>) -> Poll<Bytes> {
        let silence = self.silence.get_or_insert_with(|| Box::pin(sleep(SILENCE)));
        while silence.as_mut().poll(context).is_ready() {
            silence.set(sleep(SILENCE));
            if !std::mem::take(&mut self.has_spoken) {
                let mut frame = BytesMut::new();
                EventCodec::put(&Event::KeepAlive, &mut frame);
                return Poll::Ready(frame.freeze());
            }
        }
        Poll::Pending
    }
}

/// A chunk's frame, without the bytes the reader already has.
fn put_rest(chunk: &Chunk, skip: usize, out: &mut BytesMut) {
    if skip == 0 {
        out.put_slice(&chunk.frame);
        return;
    }
    let rest = &chunk.frame[HEADER_BYTES + skip..];
    out.put_u8(chunk.frame[0]);
    out.put_u32(rest.len() as u32);
    out.put_slice(rest);
}

impl Body for Reader {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let reader = self.get_mut();
        if reader.is_done {
            return Poll::Ready(None);
        }
        if let Some(frames) = reader.take(context) {
            reader.has_spoken = true;
            return Poll::Ready(Some(Ok(Frame::data(frames))));
        }
        reader.poll_silence(context).map(|frame| Some(Ok(Frame::data(frame))))
    }

    fn is_end_stream(&self) -> bool {
        self.is_done
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut inner = self.log.lock();
        inner.readers.remove(&self.id);
        inner.trim();
        drop(inner);
        self.log.shared.room.notify_one();
    }
}
