//! Makes progress of what mmdebstrap, apt and dpkg write.

use crate::{
    debian,
    progress::{Progress, Step, Unit},
};

const FETCH: &str = "fetching packages";
const INSTALL: &str = "installing packages";
const IMAGE: &str = "writing the root file system";

pub(super) struct Messages<'a> {
    progress: &'a dyn Progress,
    step: Step<'a>,
    packages: u64,
}

impl<'a> Messages<'a> {
    pub(super) fn new(progress: &'a dyn Progress) -> Self {
        Self { progress, step: Step::begin(progress, "fetching Debian's package lists", Unit::Bytes), packages: 0 }
    }

    pub(super) fn read(&mut self, line: &str) {
        tracing::debug!(target: "stockade_images::mmdebstrap", "{line}");
        if let Some(phase) = line.strip_prefix("I: ") {
            self.phase(phase);
        } else if let Some(count) =
            line.split_once(" newly installed").and_then(|(before, _)| before.rsplit(' ').next())
        {
            // Essential packages are installed apart from the rest; the first count is of all.
            self.packages = self.packages.max(count.parse().unwrap_or(0));
        } else if let Some(size) = line.strip_prefix("Need to get ").and_then(|rest| rest.split_once(" of ")) {
            let size = size.0.rsplit('/').next().unwrap_or(size.0);
            if let Some(bytes) = debian::bytes(size) {
                self.step.set_total(bytes);
            }
        } else if let Some(package) = line.strip_prefix("Setting up ").and_then(|rest| rest.split(' ').next()) {
            self.begin(INSTALL, Unit::Items);
            self.step.advance(1, package);
        } else {
            debian::report_fetched(&mut self.step, line);
        }
    }

    pub(super) fn finish(&self) {
        self.step.tell("");
    }

    fn phase(&mut self, phase: &str) {
        if phase.starts_with("downloading packages") {
            self.begin(FETCH, Unit::Bytes);
        } else if phase.starts_with("installing") || phase.starts_with("extracting") {
            self.begin(INSTALL, Unit::Items);
        } else if phase.starts_with("running --customize-hook") {
            self.begin(IMAGE, Unit::Bytes);
        }
    }

    fn begin(&mut self, name: &'static str, unit: Unit) {
        if self.step.name() == name {
            return;
        }
        self.step = Step::begin(self.progress, name, unit);
        if unit == Unit::Items && self.packages > 0 {
            self.step.set_total(self.packages);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::progress::Report;

    #[test]
    fn a_builds_output_becomes_steps_with_bytes_and_counts() {
        let seen = Mutex::new(Vec::new());
        let progress = |report: &Report| seen.lock().expect("nobody panicked").push(report.clone());
        let mut messages = Messages::new(&progress);
        for line in [
            "I: running apt-get update...",
            "Get:1 http://deb.debian.org/debian bookworm InRelease [151 kB]",
            "I: downloading packages with apt...",
            "0 upgraded, 69 newly installed, 0 to remove and 0 not upgraded.",
            "Need to get 29.7 MB of archives.",
            "Get:4 http://deb.debian.org/debian bookworm/main amd64 libc6 amd64 2.36-9+deb12u14 [2759 kB]",
            "I: extracting archives...",
            "I: installing essential packages...",
            "Setting up libc6:amd64 (2.36-9+deb12u14) ...",
            "I: running --customize-hook in shell: sh -c ...",
        ] {
            messages.read(line);
        }
        let seen = seen.into_inner().expect("nobody panicked");
        let find = |step: &str| seen.iter().rfind(|report| report.step == step).expect("the step was begun");
        let fetch = find(FETCH);
        assert_eq!((fetch.done, fetch.total, fetch.detail.as_str()), (2_759_000, Some(29_700_000), "libc6"));
        let install = find(INSTALL);
        assert_eq!((install.done, install.total, install.unit), (1, Some(69), Unit::Items));
        assert_eq!(seen.last().map(|report| report.step), Some(IMAGE));
    }
}
