//! What a request is at that takes its time, on standard error: a line that changes on a terminal, a line now and then
//! elsewhere. What is soon done is not mentioned.

use std::{
    io::{self, IsTerminal as _},
    pin::pin,
    time::Duration,
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::time::{Instant, sleep_until};

use crate::ui::Ui;

/// Without a terminal, a request that takes longer is worth a line.
const WORTH_A_LINE: Duration = Duration::from_secs(2);
/// On a terminal, where nothing is left of it.
const WORTH_A_LOOK: Duration = Duration::from_millis(300);
/// Without a terminal, what takes long says so often that it is alive.
pub(crate) const SAY_EVERY: Duration = Duration::from_secs(15);

/// A line that changes, if there is a terminal for people to see it on.
pub(crate) fn spinner(ui: Ui) -> Option<ProgressBar> {
    (io::stderr().is_terminal() && !ui.json).then(|| {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{spinner} {msg} ({elapsed})");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
        bar.enable_steady_tick(Duration::from_millis(200));
        bar
    })
}

/// What comes of `work`; `doing` says to those who wait what it is.
pub(crate) async fn telling<T>(ui: Ui, doing: &str, work: impl Future<Output = T>) -> T {
    let begun = Instant::now();
    let mut next = begun + if io::stderr().is_terminal() { WORTH_A_LOOK } else { WORTH_A_LINE };
    let mut shown = None;
    let mut work = pin!(work);
    let done = loop {
        tokio::select! {
            biased;
            done = &mut work => break done,
            () = sleep_until(next) => {}
        }
        next += SAY_EVERY;
        shown = shown.or_else(|| spinner(ui));
        match &shown {
            Some(bar) => bar.set_message(doing.to_owned()),
            None => ui.note(&format!("{doing} ({} s)", begun.elapsed().as_secs())),
        }
    };
    if let Some(bar) = shown {
        bar.finish_and_clear();
    }
    done
}
