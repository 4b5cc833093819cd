//! The network: bytes, round trips, new connections and many flows, by clients in a Linux network namespace behind a TAP
//! device, each beside the same client and server without a gateway between them, in turn.
//!
//! ```text
//! client threads ── kernel TCP ── TAP ══ gateway ── loopback ── server threads      "gateway"
//! client threads ───────────────────── loopback ─────────────── server threads      "direct"
//! ```
//!
//! No machine is part of it: this is what a guest that costs nothing would see. What one sees that is there is in
//! [`guest`].

mod ends;
pub(super) mod guest;
mod idle;
mod lab;

use std::{
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use self::{
    ends::{Kind, bulk, fetch, open, ping},
    lab::{INTERCEPTED, Lab, PASSED, Worker},
};
use super::{measure::Samples, report::Measure};
use crate::{failure::Failure, ui::Ui};

/// How much is measured.
#[derive(Clone, Copy)]
struct Scale {
    /// Rounds of what takes its time.
    rounds: usize,
    bulk_time: Duration,
    pings: usize,
    connects: usize,
    flows: usize,
    /// Of which nothing but the memory is looked at.
    idle_flows: usize,
    fetched_bytes: usize,
}

const FULL: Scale = Scale {
    rounds: 5,
    bulk_time: Duration::from_secs(1),
    pings: 1_000,
    connects: 300,
    flows: 2_000,
    idle_flows: 10_000,
    fetched_bytes: 64 << 20,
};

/// Measures, where the host allows to make a namespace and a device; elsewhere it says why not.
pub(super) async fn measure(ui: Ui) -> Result<Vec<Measure>, Failure> {
    ui.note("the network, direct and through the gateway in turn");
    let measured = tokio::task::spawn_blocking(|| {
        let lab = match Lab::start() {
            Ok(lab) => lab,
            Err(error) => return Ok(Err(error)),
        };
        rows(&lab, FULL).map(Ok)
    });
    let failed = |error: io::Error| Failure::host("measure the network", error);
    match measured.await.map_err(|error| failed(io::Error::other(error)))?.map_err(failed)? {
        Ok(rows) => Ok(rows),
        Err(reason) => {
            ui.note(&format!("the network is not measured: it takes root and /dev/net/tun here: {reason}"));
            Ok(Vec::new())
        }
    }
}

/// The same measurement on both ways.
struct Pair {
    direct: Samples,
    gateway: Samples,
}

impl Pair {
    fn take(lab: &Lab, rounds: usize, one: impl Fn(&Worker, SocketAddr) -> io::Result<f64>) -> Self {
        let mut pair = Self { direct: Samples::default(), gateway: Samples::default() };
        for _ in 0..rounds {
            pair.direct.push(one(&lab.host, lab.direct));
            pair.gateway.push(one(&lab.inside, lab.raw));
        }
        pair
    }

    fn rows(self, name: &str, unit: &'static str) -> [Measure; 3] {
        let ratio = self.gateway.median() / self.direct.median();
        [
            Measure::new(format!("network, {name}: direct"), unit, self.direct),
            Measure::new(format!("network, {name}: gateway"), unit, self.gateway),
            Measure::single(format!("network, {name}: gateway / direct (medians)"), "x", ratio),
        ]
    }
}

fn rows(lab: &Lab, scale: Scale) -> io::Result<Vec<Measure>> {
    let idle = idle::memory(lab, scale.idle_flows)?;
    let mut rows = Vec::new();
    for (name, kind, flows) in
        [("1 flow in", Kind::Down, 1), ("1 flow out", Kind::Up, 1), ("8 flows in", Kind::Down, 8)]
    {
        let pair =
            Pair::take(lab, scale.rounds, |worker, to| worker.run(move || bulk(to, kind, flows, scale.bulk_time)));
        rows.extend(pair.rows(name, "Gbit/s"));
    }
    let pair = Pair::take(lab, scale.rounds, |worker, to| worker.run(move || round_trip(to, scale.pings)));
    rows.extend(pair.rows("64 B round trip", "us"));
    let pair = Pair::take(lab, scale.rounds, |worker, to| worker.run(move || connects(to, scale.connects)));
    rows.extend(pair.rows("new connections, one after another", "1/s"));
    rows.extend(many_flows(lab, scale)?);
    rows.extend(idle);
    rows.extend(tls(lab, scale)?);
    Ok(rows)
}

/// Microseconds for 64 bytes there and back, the median of many.
fn round_trip(to: SocketAddr, count: usize) -> io::Result<f64> {
    let mut stream = open(to, Kind::Echo)?;
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        ping(&mut stream, 64)?;
        times.push(start.elapsed());
    }
    times.sort();
    Ok(times[count / 2].as_secs_f64() * 1e6)
}

/// Connections with one byte there and back, per second.
fn connects(to: SocketAddr, count: usize) -> io::Result<f64> {
    let start = Instant::now();
    for _ in 0..count {
        ping(&mut open(to, Kind::Echo)?, 1)?;
    }
    Ok(count as f64 / start.elapsed().as_secs_f64())
}

/// What stays of speed beside many connections that do nothing.
fn many_flows(lab: &Lab, scale: Scale) -> io::Result<Vec<Measure>> {
    let (to, flows) = (lab.raw, scale.flows);
    let (opened, idle) = lab.inside.run(move || {
        let start = Instant::now();
        let mut idle = Vec::with_capacity(flows);
        for _ in 0..flows {
            idle.push(open(to, Kind::Echo)?);
        }
        let opened = flows as f64 / start.elapsed().as_secs_f64();
        for stream in &mut idle {
            ping(stream, 1)?;
        }
        Ok((opened, idle))
    })?;
    let mut beside = Samples::default();
    for _ in 0..scale.rounds {
        beside.push(lab.inside.run(move || bulk(to, Kind::Down, 1, scale.bulk_time)));
    }
    let trip = lab.inside.run(move || round_trip(to, scale.pings))?;
    drop(idle);
    Ok(vec![
        Measure::single(format!("network, {flows} flows opened: gateway"), "1/s", opened),
        Measure::new(format!("network, 1 flow in beside {flows} idle: gateway"), "Gbit/s", beside),
        Measure::single(format!("network, 64 B round trip beside {flows} idle: gateway"), "us", trip),
    ])
}

/// The same download over TLS: direct, passed through, and read on the way.
fn tls(lab: &Lab, scale: Scale) -> io::Result<Vec<Measure>> {
    let ways = [
        ("direct", &lab.host, lab.direct_tls, PASSED, &lab.servers_tls),
        ("passed through", &lab.inside, lab.passed, PASSED, &lab.servers_tls),
        ("intercepted", &lab.inside, lab.intercepted, INTERCEPTED, &lab.guests_tls),
    ];
    let mut speeds = [Samples::default(), Samples::default(), Samples::default()];
    let mut starts = [Samples::default(), Samples::default(), Samples::default()];
    for _ in 0..scale.rounds {
        for (at, (_, worker, to, name, tls)) in ways.iter().enumerate() {
            let (to, name, tls) = (*to, *name, std::sync::Arc::clone(tls));
            let (first, speed) = worker.run(move || fetch(to, name, tls, scale.fetched_bytes))?;
            starts[at].push(Ok::<_, io::Error>(first));
            speeds[at].push(Ok::<_, io::Error>(speed));
        }
    }
    let ratio = speeds[2].median() / speeds[0].median();
    let names = ways.map(|(name, ..)| name);
    let mut rows = Vec::new();
    for (name, samples) in names.iter().zip(speeds) {
        rows.push(Measure::new(format!("network, TLS download: {name}"), "MB/s", samples));
    }
    rows.push(Measure::single("network, TLS download: intercepted / direct (medians)", "x", ratio));
    for (name, samples) in names.iter().zip(starts) {
        rows.push(Measure::new(format!("network, TLS connect to first byte: {name}"), "ms", samples));
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_measured() {
        let lab = match Lab::start() {
            Ok(lab) => lab,
            Err(error) => return eprintln!("skipped: no namespace: {error}"),
        };
        let scale = Scale {
            rounds: 2,
            bulk_time: Duration::from_millis(200),
            pings: 20,
            connects: 20,
            flows: 50,
            idle_flows: 200,
            fetched_bytes: 1 << 20,
        };
        let rows = serde_json::to_value(rows(&lab, scale).expect("measured")).expect("JSON");
        for row in rows.as_array().expect("a list") {
            println!("{} {} {}", row["name"], row["p50"], row["unit"]);
            assert!(row["p50"].as_f64().is_some_and(|value| value > 0.0) && row["failures"] == 0, "{row}");
        }
        assert_eq!(rows.as_array().map(Vec::len), Some(27));
    }
}
