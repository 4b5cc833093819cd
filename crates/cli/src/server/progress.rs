//! Shows how the preparation comes along, on standard error: a line that changes on a terminal, a line per
//! step elsewhere. Steps that take no time are not mentioned: a second start is quiet.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use indicatif::{HumanBytes, ProgressBar};
use stockade_images::progress::{Progress, Report, Unit};

use crate::{
    ui::Ui,
    waiting::{SAY_EVERY, spinner},
};

/// Steps below this are not told of.
const WORTH_TELLING: Duration = Duration::from_millis(500);

pub(super) struct Display {
    ui: Ui,
    bar: Option<ProgressBar>,
    current: Mutex<Option<Current>>,
}

struct Current {
    step: String,
    begun: Instant,
    said: Instant,
    amount: String,
}

impl Display {
    pub(super) fn new(ui: Ui) -> Self {
        Self { ui, bar: spinner(ui), current: Mutex::new(None) }
    }

    /// A step of our own, which says no more than its name.
    pub(super) fn begin(&self, step: &str) {
        self.show(step, String::new(), "");
    }

    /// All is done.
    pub(super) fn finish(&self) {
        if let Ok(mut current) = self.current.lock() {
            self.tell_end(current.take());
        }
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn show(&self, step: &str, amount: String, detail: &str) {
        let Ok(mut current) = self.current.lock() else { return };
        if current.as_ref().is_none_or(|current| current.step != step) {
            self.tell_end(current.take());
            let now = Instant::now();
            *current = Some(Current { step: step.to_owned(), begun: now, said: now, amount: String::new() });
            if let Some(bar) = &self.bar {
                bar.reset_elapsed();
            }
        }
        let Some(current) = current.as_mut() else { return };
        current.amount = amount;
        let text = [step, &current.amount, detail].into_iter().filter(|part| !part.is_empty());
        let text = text.collect::<Vec<_>>().join("  ");
        match &self.bar {
            Some(bar) => bar.set_message(text),
            None if current.said.elapsed() >= SAY_EVERY => {
                current.said = Instant::now();
                self.ui.note(&format!("      {text}  ({} s)", current.begun.elapsed().as_secs()));
            }
            None => {}
        }
    }

    fn tell_end(&self, current: Option<Current>) {
        let Some(Current { step, begun, amount, .. }) = current else { return };
        if begun.elapsed() < WORTH_TELLING {
            return;
        }
        let amount = if amount.is_empty() { String::new() } else { format!("  {amount}") };
        let line = format!("done  {step}{amount}  ({:.1} s)", begun.elapsed().as_secs_f64());
        match &self.bar {
            Some(bar) => bar.suspend(|| self.ui.note(&line)),
            None => self.ui.note(&line),
        }
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl Progress for Display {
    fn report(&self, report: &Report) {
        let Report { step, detail, done, total, unit, .. } = report;
        let count = |number: u64| match unit {
            Unit::Bytes => HumanBytes(number).to_string(),
            Unit::Items => number.to_string(),
        };
        let amount = match total {
            Some(total) => format!("{} of {}", count(*done), count(*total)),
            None if *done > 0 => count(*done),
            None => String::new(),
        };
        self.show(step, amount, detail);
    }
}
