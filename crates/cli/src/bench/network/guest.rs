//! The network from within a machine, to a server on the host's loopback under a name that is made up.
//!
//! ```text
//! program in the guest ── guest's kernel ── emulator ══ gateway ── loopback ── server thread     "gateway"
//! program in the guest ── guest's loopback ── its own child                                      "own loopback"
//! ```

use std::fs;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{
    super::{
        measure::Samples,
        report::Measure,
        rounds::{self, stdout_of},
        server::Throwaway,
    },
    ends,
};
use crate::{client::WriteOptions, failure::Failure, ui::Ui};

const NAME: &str = "guest.bench.example";
const PORT: u16 = 9_000;
const TRAFFIC: &str = include_str!("traffic.py");
const ROUNDS: usize = 5;
const SECONDS: f64 = 1.0;

/// What guests reach, and the file that tells a server of it.
pub(in crate::bench) struct World {
    file: String,
    _directory: TempDir,
}

impl World {
    pub(in crate::bench) fn start() -> Result<Self, Failure> {
        let port = ends::serve().map_err(|error| Failure::host("listen on loopback", error))?;
        let directory =
            TempDir::with_prefix("stockade-bench-world-").map_err(|error| Failure::host("make a directory", error))?;
        let file = directory.path().join("network.json");
        let settings = json!({"routes": {(format!("{NAME}:{PORT}")): format!("127.0.0.1:{port}")}});
        fs::write(&file, settings.to_string())
            .map_err(|error| Failure::host(format!("write {}", file.display()), error))?;
        Ok(Self { file: file.to_string_lossy().into_owned(), _directory: directory })
    }

    /// For `stockade up --network`.
    pub(in crate::bench) fn arguments(&self) -> [&str; 2] {
        ["--network", &self.file]
    }
}

/// The network of a sandbox that may reach it.
fn network() -> Value {
    json!({"allow": [format!("{NAME}:{PORT}")]})
}

/// One flow each way, through the gateway and on the guest's own loopback in turn.
pub(in crate::bench) async fn throughput(server: &Throwaway, ui: Ui) -> Result<Vec<Measure>, Failure> {
    ui.note("one flow from a guest, on its own loopback and through the gateway in turn");
    let client = &server.client;
    let (id, _) = rounds::create_with(client, network()).await?;
    client.write_file(&id, "traffic.py", &WriteOptions::default(), TRAFFIC.into()).await?;
    let (port, rounds, seconds) = (PORT.to_string(), ROUNDS.to_string(), SECONDS.to_string());
    let told = stdout_of(client, &id, &["python3", "traffic.py", NAME, &port, &rounds, &seconds]).await;
    client.kill(&id).await?;
    server.settle(0).await?;
    Ok(traffic_rows(&told?))
}

/// `told`: a line for each sample, `out gateway 812.5`.
fn traffic_rows(told: &str) -> Vec<Measure> {
    let samples = |direction: &str, way: &str| {
        let mut samples = Samples::default();
        let prefix = format!("{direction} {way} ");
        told.lines()
            .filter_map(|line| line.strip_prefix(&prefix))
            .for_each(|rate| samples.push(rate.parse::<f64>().map_err(|error| format!("{rate:?}: {error}"))));
        if samples.values.is_empty() && samples.failures.is_empty() {
            samples.push(Err(format!("the guest told nothing of {prefix:?}")));
        }
        samples
    };
    let mut rows = Vec::new();
    for direction in ["out", "in"] {
        let (own, gateway) = (samples(direction, "own"), samples(direction, "gateway"));
        let ratio = gateway.median() / own.median();
        let name = |what: &str| format!("network of a guest, 1 flow {direction}: {what}");
        rows.push(Measure::new(name("own loopback"), "Mbit/s", own));
        rows.push(Measure::new(name("gateway"), "Mbit/s", gateway));
        rows.push(Measure::single(name("gateway / own loopback (medians)"), "x", ratio));
    }
    rows
}

/// From a create's answer to the first byte of a connection, and the same program without one, in turn. The name is
/// looked up and the connection made by the shell itself: no program starts faster. `pool`: machines the server keeps.
pub(in crate::bench) async fn first_connections(
    server: &Throwaway,
    pool: usize,
    n: usize,
    ui: Ui,
) -> Result<Vec<Measure>, Failure> {
    let after = if pool == 0 { "restore" } else { "claim" };
    ui.note(&format!("the first connection after a {after}, and the same without one in turn: {n} each"));
    let connected = format!("exec 3<>/dev/tcp/{NAME}/{PORT} && printf e1 >&3 && read -rN1 byte <&3 && echo \"$byte\"");
    let ways = [("gateway", connected.as_str()), ("without a connection", "byte=1 && echo \"$byte\"")];
    let mut samples = [Samples::default(), Samples::default()];
    // The first one reads files from disk.
    rounds::answer_to_output(&server.client, network(), &["bash", "-c", &connected], b"1\n").await?;
    for _ in 0..n {
        for (at, (_, program)) in ways.iter().enumerate() {
            server.quiet_pool(pool).await?;
            let argv = ["bash", "-c", program];
            samples[at].push(rounds::answer_to_output(&server.client, network(), &argv, b"1\n").await);
        }
    }
    let added = samples[0].median() - samples[1].median();
    let name = |what: &str| format!("network of a guest, {after} answered to first byte: {what}");
    let mut rows: Vec<_> =
        ways.iter().zip(samples).map(|((way, _), samples)| Measure::new(name(way), "ms", samples)).collect();
    rows.push(Measure::single(name("added by it (medians)"), "ms", added));
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn told(rows: Vec<Measure>) -> Vec<Value> {
        let rows = serde_json::to_value(rows).expect("JSON");
        rows.as_array().expect("a list").clone()
    }

    #[test]
    fn every_row_of_a_guest_is_measured() {
        let port = ends::serve().expect("a server").to_string();
        // No guest, but the same program and server, with nothing between them.
        let program = ["-c", TRAFFIC, "127.0.0.1", &port, "2", "0.1"];
        let output = Command::new("python3").args(program).output().expect("run");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let rows = told(traffic_rows(&String::from_utf8_lossy(&output.stdout)));
        for row in &rows {
            println!("{} {} {}", row["name"], row["p50"], row["unit"]);
            assert!(row["p50"].as_f64().is_some_and(|value| value > 0.0) && row["failures"] == 0, "{row}");
        }
        assert_eq!(rows.len(), 6);
    }

    #[test]
    fn what_a_guest_does_not_tell_has_failed() {
        let rows = told(traffic_rows("out own 2.0\nout gateway none\n"));
        let failures: Vec<_> = rows.iter().map(|row| row["failures"].clone()).collect();
        assert_eq!(failures, [0, 1, 0, 1, 1, 0]);
    }
}
