//! E2B's SDK for Python beside our own API, in turn, on one server. The SDK runs in a Python of the caller's: one process
//! for all samples, so that no start of an interpreter is counted, as in an agent that goes on.

use std::{path::Path, process::Stdio, time::Instant};

use serde::Deserialize;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
};

use super::{
    measure::Samples,
    report::Measure,
    rounds::{self, milliseconds},
    server::Throwaway,
};
use crate::{
    client::{CodeEvent, CodeRequest},
    failure::Failure,
    ui::Ui,
};

const SCRIPT: &str = include_str!("e2b.py");
const CODE: &str = "1+1";

/// Which of E2B's packages a Python has, by release.
#[derive(Debug, Deserialize)]
pub(super) struct Packages {
    e2b: Option<String>,
    code_interpreter: Option<String>,
}

impl Packages {
    pub(super) fn have_code_interpreter(&self) -> bool {
        self.code_interpreter.is_some()
    }
}

/// What the script says of one sample.
#[derive(Debug, Deserialize)]
struct Said {
    ms: Vec<f64>,
    error: Option<String>,
}

/// The script, waiting for the next word.
struct Sdk {
    _child: Child,
    words: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Sdk {
    async fn start(python: &Path, environment: &[(&'static str, String)]) -> Result<(Self, Packages), Failure> {
        let failed = |error| Failure::host(format!("start {}", python.display()), error);
        let mut child = Command::new(python)
            .args(["-c", SCRIPT])
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(failed)?;
        let (words, output) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        let mut sdk = Self { _child: child, words, answers: BufReader::new(output).lines() };
        let packages = sdk.answer().await?;
        Ok((sdk, packages))
    }

    async fn answer<T: serde::de::DeserializeOwned>(&mut self) -> Result<T, Failure> {
        let line = self.answers.next_line().await.map_err(|error| Failure::host("read from python", error))?;
        let line = line.ok_or_else(|| Failure::new("bench_python", "python ended"))?;
        serde_json::from_str(&line).map_err(|error| Failure::new("bench_python", format!("{line}: {error}")))
    }

    /// One sample: milliseconds, one for each point of time it counts from.
    async fn sample(&mut self, word: &str) -> Result<Vec<f64>, Failure> {
        let failed = |error| Failure::host("write to python", error);
        self.words.write_all(format!("{word}\n").as_bytes()).await.map_err(failed)?;
        let Said { ms, error } = self.answer().await?;
        error.map_or(Ok(ms), |error| Err(Failure::new("bench_sdk", error)))
    }
}

/// What a Python has, without a server.
pub(super) async fn packages(python: &Path) -> Result<Packages, Failure> {
    let (_, packages) = Sdk::start(python, &[]).await?;
    if packages.e2b.is_none() {
        let message = format!("{} has no package e2b", python.display());
        return Err(Failure::new("bench_python", message)
            .hint("python3 -m venv V && V/bin/pip install e2b-code-interpreter, then --e2b V/bin/python"));
    }
    Ok(packages)
}

/// On a server without a pool.
pub(super) async fn measure(server: &Throwaway, python: &Path, n: usize, ui: Ui) -> Result<Vec<Measure>, Failure> {
    let (mut sdk, packages) = Sdk::start(python, &server.e2b_variables()?).await?;
    let release = packages.e2b.as_deref().unwrap_or_default();
    ui.note(&format!("create to first command, our own API and E2B's SDK {release} in turn: {n} each"));
    let (mut ours, mut theirs) = (Samples::default(), Samples::default());
    // The first ones read files from disk and open connections.
    rounds::start(&server.client).await?;
    sdk.sample("command").await?;
    for _ in 0..n {
        server.quiet(0).await?;
        ours.push(rounds::start(&server.client).await.map(|start| start.output));
        server.quiet(0).await?;
        theirs.push(sdk.sample("command").await.map(|ms| ms[0]));
    }
    let ratio = theirs.median() / ours.median();
    let mut measures = vec![
        Measure::new("our API: create to first command", "ms", ours),
        Measure::new(format!("E2B SDK {release}: create to first command"), "ms", theirs),
        Measure::single("create to first command, E2B SDK / ours (medians)", "x", ratio),
    ];
    if packages.have_code_interpreter() {
        measures.extend(code(server, &mut sdk, 0, n, ui).await?);
    }
    Ok(measures)
}

/// Code on sandboxes out of a pool that keeps `machines` in all.
pub(super) async fn measure_pooled(
    server: &Throwaway,
    python: &Path,
    machines: usize,
    n: usize,
    ui: Ui,
) -> Result<Vec<Measure>, Failure> {
    let (mut sdk, _) = Sdk::start(python, &server.e2b_variables()?).await?;
    code(server, &mut sdk, machines, n, ui).await
}

async fn code(server: &Throwaway, sdk: &mut Sdk, pool: usize, n: usize, ui: Ui) -> Result<Vec<Measure>, Failure> {
    ui.note(&format!("run_code(\"{CODE}\") on fresh sandboxes, our own API and E2B's SDK in turn: {n} each"));
    let mut all = [Samples::default(), Samples::default(), Samples::default(), Samples::default()];
    native_code(server).await?;
    sdk.sample("code").await?;
    for _ in 0..n {
        for (at, theirs) in [(0, false), (2, true)] {
            server.quiet_pool(pool).await?;
            let sample = if theirs { sdk.sample("code").await } else { native_code(server).await };
            match sample {
                Ok(ms) => ms.iter().enumerate().for_each(|(index, ms)| all[at + index].push(Ok::<_, Failure>(*ms))),
                Err(failure) => all[at].push(Err(failure)),
            }
        }
    }
    let names = ["our API: create to first result", "our API: run_code(\"1+1\") on a fresh sandbox"];
    let sdks = ["E2B SDK: create to first result", "E2B SDK: run_code(\"1+1\") on a fresh sandbox"];
    let names = names.into_iter().chain(sdks);
    let from = if pool == 0 { "" } else { ", out of the pool" };
    Ok(names.zip(all).map(|(name, samples)| Measure::new(format!("{name}{from}"), "ms", samples)).collect())
}

/// From the request for a sandbox, and from its answer, to the value of the code.
async fn native_code(server: &Throwaway) -> Result<Vec<f64>, Failure> {
    let begin = Instant::now();
    let (id, _) = rounds::create_from(&server.client, "code-interpreter").await?;
    let created = Instant::now();
    let value = value_of(server, &id).await;
    let ms = vec![milliseconds(begin), milliseconds(created)];
    server.client.kill(&id).await?;
    match value?.as_deref() {
        Some("2") => Ok(ms),
        other => Err(Failure::new("bench_code", format!("{CODE} gave {other:?}"))),
    }
}

async fn value_of(server: &Throwaway, id: &str) -> Result<Option<String>, Failure> {
    let request = CodeRequest { code: CODE.to_owned(), ..CodeRequest::default() };
    let mut run = server.client.run_code(id, &request).await?;
    let mut value = None;
    loop {
        match run.next().await?.0 {
            CodeEvent::Result { is_main: true, data } => {
                value = data.get("text/plain").and_then(|text| text.as_str()).map(str::to_owned);
            }
            CodeEvent::End => return Ok(value),
            _ => {}
        }
    }
}
