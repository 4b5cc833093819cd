//! Shares and ceilings, so that one guest's load stays its own.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// What one sandbox may use.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// TCP connections at a time; more are reset.
    pub flows: usize,
    /// Connections whose handshake is under way; more are ignored until some are done.
    pub half_open_flows: usize,
    /// New connections and flows of datagrams per second, with bursts of as many; more are ignored.
    pub new_flows_per_second: u32,
    /// Bytes per second in each direction; none: no limit.
    pub bytes_per_second: Option<u64>,
    /// Names asked for per second, with bursts of as many; more are not answered.
    pub dns_queries_per_second: u32,
    /// Names looked up at a time.
    pub dns_lookups: usize,
    /// Names remembered with their addresses.
    pub names: usize,
    /// HTTP/2 streams per connection.
    pub http2_streams: u32,
    /// Bytes of a request head.
    pub head_bytes: usize,
    /// Bytes of a request body in which tokens are replaced.
    pub substituted_body_bytes: usize,
    /// For a TLS hello or the first bytes of a request to arrive, and for TLS handshakes.
    pub head_timeout_ms: u64,
    /// For a whole request head to arrive on a connection, counted from the end of the request before.
    pub idle_timeout_ms: u64,
    /// For a connection outwards.
    pub dial_timeout_ms: u64,
    /// Flows of datagrams at a time; more are refused.
    pub udp_flows: usize,
    /// A flow of datagrams ends when nothing came either way for so long.
    pub udp_idle_timeout_ms: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            flows: 4_096,
            half_open_flows: 256,
            new_flows_per_second: 2_000,
            bytes_per_second: None,
            dns_queries_per_second: 500,
            dns_lookups: 128,
            names: 16_384,
            http2_streams: 100,
            head_bytes: 64 << 10,
            substituted_body_bytes: 16 << 20,
            head_timeout_ms: 10_000,
            idle_timeout_ms: 60_000,
            dial_timeout_ms: 10_000,
            udp_flows: 256,
            udp_idle_timeout_ms: 120_000,
        }
    }
}

impl Limits {
    pub(crate) fn head_timeout(&self) -> Duration {
        Duration::from_millis(self.head_timeout_ms)
    }

    pub(crate) fn idle_timeout(&self) -> Duration {
        Duration::from_millis(self.idle_timeout_ms)
    }

    pub(crate) fn udp_idle_timeout(&self) -> Duration {
        Duration::from_millis(self.udp_idle_timeout_ms)
    }

    pub(crate) fn dial_timeout(&self) -> Duration {
        Duration::from_millis(self.dial_timeout_ms)
    }
}

/// A token bucket that refuses.
pub(crate) struct Bucket {
    per_second: f64,
    state: Mutex<(f64, Instant)>,
}

impl Bucket {
    pub(crate) fn new(per_second: u32) -> Self {
        let per_second = f64::from(per_second);
        Self { per_second, state: Mutex::new((per_second, Instant::now())) }
    }

    pub(crate) fn take(&self) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (tokens, last) = &mut *state;
        let now = Instant::now();
        *tokens = (*tokens + now.duration_since(*last).as_secs_f64() * self.per_second).min(self.per_second);
        *last = now;
        let there = *tokens >= 1.0;
        if there {
            *tokens -= 1.0;
        }
        there
    }
}

/// A rate that makes its callers wait; they may run ahead by a tenth of a second.
pub(crate) struct Pace {
    bytes_per_second: Option<u64>,
    paid_until: Mutex<Option<Instant>>,
}

impl Pace {
    pub(crate) fn new(bytes_per_second: Option<u64>) -> Self {
        Self { bytes_per_second: bytes_per_second.map(|rate| rate.max(1)), paid_until: Mutex::new(None) }
    }

    pub(crate) async fn take(&self, bytes: u64) {
        let Some(rate) = self.bytes_per_second else { return };
        let wait_until = {
            let mut paid = self.paid_until.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            let start = paid.unwrap_or(now).max(now);
            let end = start + Duration::from_secs_f64(bytes as f64 / rate as f64);
            *paid = Some(end);
            end.checked_sub(Duration::from_millis(100)).filter(|until| *until > now)
        };
        if let Some(until) = wait_until {
            tokio::time::sleep_until(until).await;
        }
    }
}
