//! What a sandbox has sent to the world.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of payload on connections that were let out, one counter for all attachments of a sandbox.
#[derive(Debug, Default)]
pub struct Traffic {
    sent: AtomicU64,
}

impl Traffic {
    pub(crate) fn add_sent(&self, bytes: u64) {
        self.sent.fetch_add(bytes, Ordering::Relaxed);
    }

    /// What was sent since this was asked last: each byte is told once.
    pub fn take_sent(&self) -> u64 {
        self.sent.swap(0, Ordering::Relaxed)
    }
}
