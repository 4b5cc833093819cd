//! What a bench tells: a table for people, JSON for programs.

use std::{fs, path::Path};

use serde::Serialize;

use super::{
    measure::{Samples, Summary},
    server::Throwaway,
};
use crate::{
    failure::{BAD_USAGE, Failure},
    ui::{Ui, table},
};

/// Where it was measured.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Host {
    processor: String,
    processors: usize,
    memory_mib: u64,
    kernel: String,
    accelerator: String,
    emulator: String,
    stockade: String,
}

impl Host {
    pub(super) async fn look(server: &Throwaway) -> Result<Self, Failure> {
        let version = server.client.version().await?;
        let first = |path: &str, name: &str| {
            let text = fs::read_to_string(path).unwrap_or_default();
            let value = text.lines().find(|line| line.starts_with(name)).and_then(|line| line.split_once(':'));
            value.map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
        };
        let memory_kib = first("/proc/meminfo", "MemTotal").split(' ').next().and_then(|kib| kib.parse::<u64>().ok());
        Ok(Self {
            processor: first("/proc/cpuinfo", "model name"),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            memory_mib: memory_kib.unwrap_or(0) / 1024,
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
            accelerator: server.accel.clone(),
            emulator: format!("{} {}", version.engine.name, version.engine.version),
            stockade: version.version,
        })
    }
}

/// One thing measured.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Measure {
    name: String,
    unit: &'static str,
    #[serde(flatten)]
    summary: Summary,
    samples: Samples,
}

impl Measure {
    pub(super) fn new(name: impl Into<String>, unit: &'static str, samples: Samples) -> Self {
        Self { name: name.into(), unit, summary: samples.summary(), samples }
    }

    pub(super) fn single(name: impl Into<String>, unit: &'static str, value: f64) -> Self {
        Self::new(name, unit, Samples { values: vec![value], failures: Vec::new() })
    }
}

/// Everything measured.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    host: Host,
    n: usize,
    at: String,
    measures: Vec<Measure>,
}

impl Report {
    pub(super) fn new(host: Host, n: usize, measures: Vec<Measure>) -> Self {
        Self { host, n, at: jiff::Timestamp::now().to_string(), measures }
    }

    pub(super) fn failures(&self) -> usize {
        self.measures.iter().map(|measure| measure.summary.failures).sum()
    }

    pub(super) fn tell(&self, file: Option<&Path>, ui: Ui) -> Result<(), Failure> {
        if let Some(path) = file {
            let json = serde_json::to_vec_pretty(self).map_err(|error| Failure::new("internal", error.to_string()))?;
            fs::write(path, json).map_err(|error| Failure::host(format!("write {}", path.display()), error))?;
        }
        ui.data(self, || self.text())
    }

    fn text(&self) -> String {
        let Host { processor, processors, memory_mib, kernel, accelerator, emulator, stockade } = &self.host;
        let mut text = format!(
            "machine   {processors} x {processor}, {memory_mib} MiB, Linux {kernel}\n\
             accel     {accelerator}\nversions  stockade {stockade}, {emulator}\n\n"
        );
        let rows: Vec<_> = self.measures.iter().map(row).collect();
        text.push_str(&table(&["MEASURE", "UNIT", "P50", "P95", "MAX", "COUNT", "FAILED"], &rows));
        for measure in &self.measures {
            if let Some(failure) = measure.samples.failures.first() {
                text.push_str(&format!("\n{}: {failure}\n", measure.name));
            }
        }
        text
    }
}

/// Whether a report can be written there. What is there stays as it is, and what is not there is not made.
pub(super) fn check_writable(path: &Path) -> Result<(), Failure> {
    let is_there = path.exists();
    let opened = fs::OpenOptions::new().append(true).create(true).open(path);
    opened.map_err(|error| {
        Failure::host(format!("write {}", path.display()), error)
            .hint("--json takes a file that can be written, or none: then the report goes to standard output")
            .exit(BAD_USAGE)
    })?;
    if !is_there {
        let _ = fs::remove_file(path);
    }
    Ok(())
}

fn row(measure: &Measure) -> Vec<String> {
    let Summary { count, failures, p50, p95, max } = measure.summary;
    let number = |value: f64| if value.is_nan() { "-".to_owned() } else { format!("{value:.1}") };
    let several = |value: f64| if count > 1 { number(value) } else { String::new() };
    let exact = if measure.unit == "x" { format!("{p50:.2}") } else { number(p50) };
    let counts = [count.to_string(), failures.to_string()];
    [measure.name.clone(), measure.unit.to_owned(), exact, several(p95), several(max)]
        .into_iter()
        .chain(counts)
        .collect()
}
