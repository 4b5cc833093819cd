//! The wire between a link client and an agent in the same process, which a test can cut or freeze.

use std::{
    future::poll_fn,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
};

use tokio::{
    io::{DuplexStream, copy_bidirectional, duplex},
    task::JoinHandle,
};

use stockade_guest::Agent;

const BUFFER_BYTES: usize = 64 << 10;

/// Cut when dropped.
pub(super) struct Wire {
    frozen: Arc<AtomicBool>,
    tasks: [JoinHandle<()>; 2],
}

impl Wire {
    /// Connects to an agent; the stream is the host's end. Nothing passes while the machine is silent.
    pub(super) fn connect(agent: &Agent, is_silent: &Arc<AtomicBool>) -> (Self, DuplexStream) {
        let (host, mut near) = duplex(BUFFER_BYTES);
        let (mut far, guest) = duplex(BUFFER_BYTES);
        let frozen = Arc::new(AtomicBool::new(false));
        let gates = [Arc::clone(&frozen), Arc::clone(is_silent)];
        let pump = tokio::spawn(async move {
            let mut copy = pin!(copy_bidirectional(&mut near, &mut far));
            let is_shut = || gates.iter().any(|gate| gate.load(Ordering::SeqCst));
            poll_fn(|cx| if is_shut() { Poll::Pending } else { copy.as_mut().poll(cx).map(drop) }).await;
        });
        let agent = agent.clone();
        let agent = tokio::spawn(async move {
            // However it ends, the host sees it on its own side.
            stockade_guest::serve(guest, agent).await.ok();
        });
        (Self { frozen, tasks: [pump, agent] }, host)
    }

    /// Nothing passes any more, and nobody learns of it.
    pub(super) fn freeze(&self) {
        self.frozen.store(true, Ordering::SeqCst);
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}
