//! What a long build tells whoever waits for it.

use std::time::{Duration, Instant};

/// Is told how a build comes along: often, from any thread. Must return at once.
pub trait Progress: Send + Sync {
    /// Something has moved.
    fn report(&self, report: &Report);
}

impl<F: Fn(&Report) + Send + Sync> Progress for F {
    fn report(&self, report: &Report) {
        self(report);
    }
}

/// Tells nobody.
pub struct Silent;

impl Progress for Silent {
    fn report(&self, _: &Report) {}
}

/// Where a build is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Report {
    /// What is being done, for people: `installing packages`.
    pub step: &'static str,
    /// What it is about right now: a package, a file; may be empty.
    pub detail: String,
    /// How much of the step is done.
    pub done: u64,
    /// How much there is to do, once known.
    pub total: Option<u64>,
    /// What `done` and `total` count.
    pub unit: Unit,
    /// Since the step began.
    pub elapsed: Duration,
}

/// What a step counts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Things: packages, files.
    Items,
}

/// One step under way.
pub(crate) struct Step<'a> {
    progress: &'a dyn Progress,
    name: &'static str,
    unit: Unit,
    started: Instant,
    done: u64,
    total: Option<u64>,
}

impl<'a> Step<'a> {
    pub(crate) fn begin(progress: &'a dyn Progress, name: &'static str, unit: Unit) -> Self {
        let step = Self { progress, name, unit, started: Instant::now(), done: 0, total: None };
        step.tell("");
        step
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn set_total(&mut self, total: u64) {
        self.total = Some(total);
        self.tell("");
    }

    pub(crate) fn advance(&mut self, by: u64, detail: &str) {
        self.done += by;
        self.tell(detail);
    }

    pub(crate) fn tell(&self, detail: &str) {
        self.progress.report(&Report {
            step: self.name,
            detail: detail.to_owned(),
            done: self.done,
            total: self.total,
            unit: self.unit,
            elapsed: self.started.elapsed(),
        });
    }
}
