//! Time, and when a deadline has passed.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use tokio::time::Instant;

/// A wall clock; tests have one that jumps.
pub trait Clock: Send + Sync + 'static {
    /// Now.
    fn now(&self) -> Timestamp;
}

/// The host's.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        Timestamp::now()
    }
}

/// How often the wall clock is looked at again when it lags behind the monotonic one.
const RECHECK: Duration = Duration::from_millis(500);

/// The end of a life, never early by either clock: the wall clock may be set forward while we run, or
/// backward after a client has read the deadline. Across a restart there is the wall clock only.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    wall: Timestamp,
    monotonic: Instant,
}

impl Deadline {
    /// A deadline that was recorded as a time of day.
    pub(crate) fn at(wall: Timestamp, clock: &dyn Clock) -> Self {
        let left = Duration::try_from(wall.duration_since(clock.now())).unwrap_or_default();
        Self { wall, monotonic: Instant::now() + left }
    }

    /// Waits for it. Cancel-safe.
    pub(crate) async fn passed(&self, clock: &dyn Clock) {
        tokio::time::sleep_until(self.monotonic).await;
        loop {
            let left = Duration::try_from(self.wall.duration_since(clock.now())).unwrap_or_default();
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left.min(RECHECK)).await;
        }
    }
}

/// Now + `lifetime` in whole milliseconds, rounded up: as it is recorded and shown.
pub(crate) fn deadline_after(now: Timestamp, lifetime: Duration) -> Timestamp {
    let lifetime = SignedDuration::try_from(lifetime).unwrap_or(SignedDuration::MAX);
    let exact = now.saturating_add(lifetime).unwrap_or(Timestamp::MAX);
    let ms = exact.as_millisecond();
    match Timestamp::from_millisecond(ms) {
        Ok(cut) if cut < exact => Timestamp::from_millisecond(ms + 1).unwrap_or(Timestamp::MAX),
        Ok(cut) => cut,
        Err(_) => Timestamp::MAX,
    }
}

/// A time as it is recorded: whole milliseconds.
pub(crate) fn whole_millis(at: Timestamp) -> Timestamp {
    Timestamp::from_millisecond(at.as_millisecond()).unwrap_or(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_rounded_up_and_never_overflows() {
        let now: Timestamp = "2026-01-01T00:00:00.0000001Z".parse().expect("a time");
        assert_eq!(deadline_after(now, Duration::from_millis(5)).to_string(), "2026-01-01T00:00:00.006Z");
        assert_eq!(deadline_after(now, Duration::MAX), Timestamp::MAX);
    }
}
