//! Time for flows: one clock per link, timers that may fire too early and never too late.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    sync::{Mutex, PoisonError},
};

use smoltcp::time::Instant;
use tokio::sync::Notify;

use super::FlowKey;

pub(super) struct Clock {
    start: tokio::time::Instant,
    timers: Mutex<BinaryHeap<Reverse<(Instant, FlowKey)>>>,
    earlier: Notify,
}

impl Clock {
    pub(super) fn new() -> Self {
        Self { start: tokio::time::Instant::now(), timers: Mutex::default(), earlier: Notify::new() }
    }

    pub(super) fn now(&self) -> Instant {
        Instant::from_micros(self.start.elapsed().as_micros() as i64)
    }

    pub(super) fn set(&self, at: Instant, key: FlowKey) {
        let mut timers = self.timers.lock().unwrap_or_else(PoisonError::into_inner);
        let first = timers.peek().is_none_or(|Reverse((first, _))| at < *first);
        timers.push(Reverse((at, key)));
        drop(timers);
        if first {
            self.earlier.notify_one();
        }
    }

    /// Waits for the next timer that is due.
    pub(super) async fn due(&self) -> (Instant, FlowKey) {
        loop {
            let next = {
                let mut timers = self.timers.lock().unwrap_or_else(PoisonError::into_inner);
                let next = timers.peek().map(|Reverse((at, _))| *at);
                if next.is_some_and(|at| at <= self.now())
                    && let Some(Reverse(due)) = timers.pop()
                {
                    return due;
                }
                next
            };
            let earlier = self.earlier.notified();
            match next {
                Some(at) => {
                    let micros = at.total_micros().max(0) as u64;
                    let deadline = self.start + std::time::Duration::from_micros(micros + 1);
                    tokio::select! { () = tokio::time::sleep_until(deadline) => (), () = earlier => () }
                }
                None => earlier.await,
            }
        }
    }
}
