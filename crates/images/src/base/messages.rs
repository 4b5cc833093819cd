//! Makes progress of what mmdebstrap, apt and dpkg write.
//!
//! apt fetches and dpkg installs twice: the essential packages, then the rest. The counts go on.

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
    /// Announced so far.
    packages: u64,
    bytes: u64,
    /// Done so far.
    installed: u64,
    fetched: u64,
}

impl<'a> Messages<'a> {
    pub(super) fn new(progress: &'a dyn Progress) -> Self {
        let step = Step::begin(progress, "fetching Debian's package lists", Unit::Bytes);
        Self { progress, step, packages: 0, bytes: 0, installed: 0, fetched: 0 }
    }

    pub(super) fn read(&mut self, line: &str) {
        tracing::debug!(target: "stockade_images::mmdebstrap", "{line}");
        if line.starts_with("I: running --customize-hook") {
            self.begin(IMAGE, Unit::Bytes, 0, 0);
        } else if let Some(count) = number_before(line, " newly installed") {
            self.packages += count;
        } else if let Some(bytes) = announced(line) {
            self.bytes += bytes;
            self.begin(FETCH, Unit::Bytes, self.fetched, self.bytes);
        } else if let Some(package) = line.strip_prefix("Unpacking ").and_then(|rest| rest.split(' ').next()) {
            self.begin(INSTALL, Unit::Items, self.installed, self.packages);
            self.step.tell(package);
        } else if let Some(package) = line.strip_prefix("Setting up ").and_then(|rest| rest.split(' ').next()) {
            self.begin(INSTALL, Unit::Items, self.installed, self.packages);
            self.installed += 1;
            self.step.advance(1, package);
        } else if let Some((name, bytes)) = debian::fetched(line) {
            if self.bytes > 0 {
                self.fetched += bytes;
            }
            self.step.advance(bytes, name);
        }
    }

    pub(super) fn finish(&self) {
        self.step.tell("");
    }

    fn begin(&mut self, name: &'static str, unit: Unit, done: u64, total: u64) {
        if self.step.name() == name {
            return;
        }
        self.step = Step::begin(self.progress, name, unit);
        if total > 0 {
            self.step.set_total(total);
            self.step.advance(done, "");
        }
    }
}

/// `0 upgraded, 69 newly installed, ...` → 69.
fn number_before(line: &str, words: &str) -> Option<u64> {
    line.split_once(words)?.0.rsplit(' ').next()?.parse().ok()
}

/// `Need to get 29.7 MB of archives.`, `Need to get 1 kB/29.7 MB of archives.` → bytes.
fn announced(line: &str) -> Option<u64> {
    let size = line.strip_prefix("Need to get ")?.split_once(" of ")?.0;
    debian::bytes(size.rsplit('/').next()?)
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
            "I: installing essential packages...",
            "Unpacking libc6:amd64 (2.36-9+deb12u14) ...",
            "Setting up libc6:amd64 (2.36-9+deb12u14) ...",
            "0 upgraded, 2 newly installed, 0 to remove and 0 not upgraded.",
            "Need to get 1000 kB of archives.",
            "Get:1 http://deb.debian.org/debian bookworm/main amd64 jq amd64 1.6 [1000 kB]",
            "Setting up jq (1.6) ...",
            "I: running --customize-hook in shell: sh -c ...",
        ] {
            messages.read(line);
        }
        let seen = seen.into_inner().expect("nobody panicked");
        let last = |step: &str| seen.iter().rfind(|report| report.step == step).expect("the step was begun");
        let fetch = last(FETCH);
        assert_eq!((fetch.done, fetch.total, fetch.detail.as_str()), (3_759_000, Some(30_700_000), "jq"));
        let install = last(INSTALL);
        assert_eq!((install.done, install.total, install.unit), (2, Some(71), Unit::Items));
        assert_eq!(seen.last().map(|report| report.step), Some(IMAGE));
    }
}
