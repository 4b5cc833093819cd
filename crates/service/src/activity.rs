//! Who uses a sandbox: each handle to its guest counts from when it is asked for until it, and every stream
//! opened with it, is dropped.

use std::{sync::Arc, time::Duration};

use stockade_engine::guest::Hold;
use tokio::{sync::watch, time::Instant};

#[derive(Clone, Copy)]
struct Seen {
    open: usize,
    last: Instant,
}

pub(crate) struct Activity {
    seen: watch::Sender<Seen>,
}

/// One user, until dropped.
struct User(Arc<Activity>);

impl Drop for User {
    fn drop(&mut self) {
        self.0.seen.send_modify(|seen| *seen = Seen { open: seen.open - 1, last: Instant::now() });
    }
}

impl Activity {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { seen: watch::Sender::new(Seen { open: 0, last: Instant::now() }) })
    }

    /// One more user, until what is returned is dropped.
    pub(crate) fn begin(self: &Arc<Self>) -> Hold {
        self.seen.send_modify(|seen| *seen = Seen { open: seen.open + 1, last: Instant::now() });
        Arc::new(User(Arc::clone(self)))
    }

    /// A sign of life without a user.
    pub(crate) fn touch(&self) {
        self.seen.send_modify(|seen| seen.last = Instant::now());
    }

    /// How long nobody has used it.
    pub(crate) fn idle(&self) -> Duration {
        let seen = self.seen.borrow();
        if seen.open > 0 { Duration::ZERO } else { seen.last.elapsed() }
    }

    /// Waits until nobody has used it for so long. Cancel-safe.
    pub(crate) async fn idle_for(&self, time: Duration) {
        let mut changes = self.seen.subscribe();
        loop {
            let seen = *changes.borrow_and_update();
            let Some(due) = seen.last.checked_add(time).filter(|_| seen.open == 0) else {
                if changes.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
                continue;
            };
            tokio::select! {
                () = tokio::time::sleep_until(due) => return,
                _ = changes.changed() => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[tokio::test]
    async fn an_open_handle_keeps_the_time_from_running() {
        let activity = Activity::new();
        let hold = activity.begin();
        let clone = Arc::clone(&hold);
        drop(hold);
        let mut idle = Box::pin(activity.idle_for(Duration::from_millis(1)));
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert!(idle.as_mut().now_or_never().is_none());
        assert_eq!(activity.idle(), Duration::ZERO);
        let before = Instant::now();
        drop(clone);
        activity.idle_for(Duration::from_millis(20)).await;
        assert!(before.elapsed() >= Duration::from_millis(20));
        idle.await;
    }
}
