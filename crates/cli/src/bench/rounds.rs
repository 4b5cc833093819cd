//! The measurements themselves. All times in milliseconds.

use std::time::Instant;

use bytes::Bytes;
use futures::{StreamExt as _, pin_mut, stream};
use reqwest::Body;
use serde_json::Value;
use stockade_model::Secret;

use super::{measure::Samples, server::Throwaway};
use crate::{
    client::{Client, CreateRequest, ExecRequest, WriteOptions},
    failure::Failure,
};

const TRANSFER_BYTES: usize = 32 << 20;
/// Longer than any measurement: a slow host must not see its sandboxes end in the middle of one.
const LIFETIME_SECONDS: f64 = 6.0 * 3600.0;
const PIECE_BYTES: usize = 256 << 10;

fn create_request() -> CreateRequest {
    CreateRequest {
        template: "base".to_owned(),
        lifetime_seconds: Some(LIFETIME_SECONDS),
        metadata: Default::default(),
        env: Default::default(),
        rules: Default::default(),
        network: None,
    }
}

fn command(argv: &[&str]) -> ExecRequest {
    ExecRequest { argv: argv.iter().map(|&part| part.to_owned()).collect(), ..ExecRequest::default() }
}

/// A new sandbox, from the request for it.
#[derive(Clone, Copy)]
pub(super) struct Start {
    /// To the answer: the machine is somebody's own, and has said so.
    pub(super) answer: f64,
    /// To the first byte a command in it wrote.
    pub(super) output: f64,
}

/// Makes a sandbox, has a command write in it, and ends it.
pub(super) async fn start(client: &Client) -> Result<Start, Failure> {
    let start = Instant::now();
    let sandbox = client.create(&create_request()).await?;
    let answer = milliseconds(start);
    let result = client.collect(&sandbox.id, &command(&["/bin/echo", "ready"]), true).await;
    let output = milliseconds(start);
    client.kill(&sandbox.id).await?;
    match result?.stdout.as_slice() {
        [] => Err(Failure::new("bench_no_output", "the command wrote nothing")),
        _ => Ok(Start { answer, output }),
    }
}

/// From the request for a sandbox to its answer; the sandbox is left.
pub(super) async fn create(client: &Client) -> Result<(String, f64), Failure> {
    let start = Instant::now();
    let sandbox = client.create(&create_request()).await?;
    Ok((sandbox.id, milliseconds(start)))
}

/// The same from another template.
pub(super) async fn create_from(client: &Client, template: &str) -> Result<(String, f64), Failure> {
    let start = Instant::now();
    let sandbox = client.create(&CreateRequest { template: template.to_owned(), ..create_request() }).await?;
    Ok((sandbox.id, milliseconds(start)))
}

/// The same with a network of its own.
pub(super) async fn create_with(client: &Client, network: Value) -> Result<(String, f64), Failure> {
    let start = Instant::now();
    let sandbox = client.create(&CreateRequest { network: Some(network), ..create_request() }).await?;
    Ok((sandbox.id, milliseconds(start)))
}

/// From the answer to a request for a sandbox with such a network to the first byte a command in it wrote, which must be
/// the right one.
pub(super) async fn answer_to_output(
    client: &Client,
    network: Value,
    argv: &[&str],
    output: &[u8],
) -> Result<f64, Failure> {
    let (id, _) = create_with(client, network).await?;
    let start = Instant::now();
    let result = client.collect(&id, &command(argv), true).await;
    let elapsed = milliseconds(start);
    client.kill(&id).await?;
    match result?.stdout {
        written if !written.is_empty() && output.starts_with(&written) => Ok(elapsed),
        other => Err(Failure::new("bench_output", format!("{argv:?} wrote {:?}", String::from_utf8_lossy(&other)))),
    }
}

/// A command that does nothing, from request to exit.
pub(super) async fn exec_round_trip(client: &Client, id: &str) -> Result<f64, Failure> {
    let start = Instant::now();
    let collected = client.collect(id, &command(&["/bin/true"]), false).await?;
    match collected.exit.and_then(|exit| exit.code) {
        Some(0) => Ok(milliseconds(start)),
        other => Err(Failure::new("bench_exit", format!("true ended with {other:?}"))),
    }
}

/// A request the guest answers itself, from request to answer.
pub(super) async fn stat_round_trip(client: &Client, id: &str) -> Result<f64, Failure> {
    let start = Instant::now();
    client.probe_stat(id, "/").await?;
    Ok(milliseconds(start))
}

/// A file there and back again; MB/s each way. What comes back must be what was sent.
pub(super) async fn transfer(client: &Client, id: &str) -> Result<(f64, f64), Failure> {
    let piece = random_piece();
    let pieces = TRANSFER_BYTES / PIECE_BYTES;
    let options = WriteOptions { length: Some(TRANSFER_BYTES as u64), ..WriteOptions::default() };
    let body = Body::wrap_stream(stream::iter(vec![piece.clone(); pieces]).map(Ok::<_, std::io::Error>));
    let start = Instant::now();
    client.write_file(id, "bench-file", &options, body).await?;
    let up = milliseconds(start);
    let start = Instant::now();
    let (_, body) = client.read_file(id, "bench-file", None).await?;
    pin_mut!(body);
    let mut received = 0;
    while let Some(data) = body.next().await {
        let data = data?;
        let is_same = data.iter().enumerate().all(|(index, byte)| *byte == piece[(received + index) % PIECE_BYTES]);
        if !is_same {
            return Err(Failure::new("bench_corrupt", format!("the file came back with other bytes after {received}")));
        }
        received += data.len();
    }
    if received != TRANSFER_BYTES {
        return Err(Failure::new("bench_corrupt", format!("{received} of {TRANSFER_BYTES} bytes came back")));
    }
    let megabytes = TRANSFER_BYTES as f64 / 1e6;
    Ok((megabytes / (up / 1e3), megabytes / (milliseconds(start) / 1e3)))
}

fn random_piece() -> Bytes {
    // Hex digits of the kernel's generator: different all over, which is all that matters here.
    Bytes::from(Secret::random_hex("", PIECE_BYTES / 2).expose().to_owned())
}

/// Many creates with so many under way at once.
pub(super) struct Burst {
    pub(super) latency: Samples,
    pub(super) per_second: f64,
}

pub(super) async fn burst(server: &Throwaway, count: usize, in_flight: usize) -> Result<Burst, Failure> {
    let client = &server.client;
    let start = Instant::now();
    let results: Vec<_> = stream::iter(0..count).map(|_| create(client)).buffer_unordered(in_flight).collect().await;
    let seconds = start.elapsed().as_secs_f64();
    let mut latency = Samples::default();
    let mut ids = Vec::new();
    for result in results {
        latency.push(result.as_ref().map(|(_, elapsed)| *elapsed));
        ids.extend(result.map(|(id, _)| id));
    }
    let per_second = ids.len() as f64 / seconds;
    for id in ids {
        client.kill(&id).await?;
    }
    Ok(Burst { latency, per_second })
}

/// Runs a command that must write something and succeed; from the request to its exit, in milliseconds.
pub(super) async fn output_of(client: &Client, id: &str, argv: &[&str]) -> Result<f64, Failure> {
    let start = Instant::now();
    let collected = client.collect(id, &command(argv), false).await?;
    match collected.exit.and_then(|exit| exit.code) {
        Some(0) if !collected.stdout.is_empty() => Ok(milliseconds(start)),
        other => Err(Failure::new("bench_exit", format!("{argv:?} ended with {other:?}"))),
    }
}

/// What a command that succeeds writes.
pub(super) async fn stdout_of(client: &Client, id: &str, argv: &[&str]) -> Result<String, Failure> {
    let collected = client.collect(id, &command(argv), false).await?;
    match collected.exit.and_then(|exit| exit.code) {
        Some(0) => Ok(String::from_utf8_lossy(&collected.stdout).into_owned()),
        other => Err(Failure::new("bench_exit", format!("{argv:?} ended with {other:?}"))),
    }
}

pub(super) fn milliseconds(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}
