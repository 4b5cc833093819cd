use std::{io, path::PathBuf};

use stockade_engine::EngineError;

/// Why a kernel, a disk or a template could not be had. The text names the thing and the cause;
/// [`ImageError::hint`] is the next step.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// A program this crate runs is not there.
    #[error("{program} is not installed")]
    MissingProgram {
        /// Its name.
        program: &'static str,
        /// The Debian package that has it.
        package: &'static str,
    },
    /// A program this crate ran did not succeed.
    #[error("cannot {action}: {program} ended with {status}\n{last_lines}")]
    Program {
        /// What it was to do.
        action: String,
        /// Its name.
        program: &'static str,
        /// Exit status or signal.
        status: String,
        /// The last lines it wrote.
        last_lines: String,
    },
    /// The file system of the cache is too full to begin.
    #[error("{} has {available_mib} MiB left, building the template takes {needed_mib} MiB", path.display())]
    NoSpace {
        /// Where the cache is.
        path: PathBuf,
        /// What a build takes.
        needed_mib: u64,
        /// What there is.
        available_mib: u64,
    },
    /// This user may not make root file systems here.
    #[error("cannot build a Debian root file system as this user: {why}")]
    NoRights {
        /// What is missing.
        why: String,
    },
    /// The kernel package does not have what a guest needs.
    #[error("kernel {version} has no {what}")]
    Kernel {
        /// The kernel's release.
        version: String,
        /// What was looked for.
        what: String,
    },
    /// A program's answer made no sense.
    #[error("cannot make sense of {what}")]
    Answer {
        /// What was read.
        what: String,
    },
    /// The host refused something.
    #[error("cannot {action}")]
    Host {
        /// What was tried, with the path it was about.
        action: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The template could not be booted or checked.
    #[error("cannot boot the template")]
    Engine(#[from] EngineError),
}

impl ImageError {
    /// For `map_err` on input and output.
    pub(crate) fn host(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::Host { action, source }
    }

    /// What the reader can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::MissingProgram { package, .. } => Some(format!("install it: apt-get install {package}")),
            Self::Program { last_lines, .. } => program_hint(last_lines).map(str::to_owned),
            Self::NoSpace { .. } => Some("free space, or keep the cache elsewhere: --template-cache DIR".to_owned()),
            Self::NoRights { .. } => Some("run as root, or see what `stockade doctor` says".to_owned()),
            Self::Host { source, .. } if source.kind() == io::ErrorKind::StorageFull => Some(NO_SPACE.to_owned()),
            Self::Host { .. } | Self::Kernel { .. } | Self::Answer { .. } | Self::Engine(_) => None,
        }
    }
}

const NO_SPACE: &str = "the disk is full: free space, or keep the cache elsewhere: --template-cache DIR";

fn program_hint(lines: &str) -> Option<&'static str> {
    let has = |words: &[&str]| words.iter().any(|word| lines.contains(word));
    if has(&["No space left on device", "not have enough free space", "Could not allocate block"]) {
        Some(NO_SPACE)
    } else if has(&["Could not resolve", "Temporary failure resolving", "Unable to connect", "Could not connect"]) {
        Some("the Debian mirror cannot be reached: check the network, name resolution and any proxy in apt's settings")
    } else if has(&["is not valid yet", "Release file expired"]) {
        Some("the clock of this host seems wrong: set it and try again")
    } else if has(&["No module named pip"]) {
        Some("install it: apt-get install python3-pip")
    } else if has(&["NO_PUBKEY", "not signed"]) {
        Some("the archive's key is missing or old: apt-get install debian-archive-keyring")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_download_says_what_to_look_at() {
        let error = ImageError::Program {
            action: "download packages".into(),
            program: "apt-get",
            status: "exit status: 100".into(),
            last_lines: "E: Failed to fetch http://deb.debian.org/x  Temporary failure resolving 'deb.debian.org'"
                .into(),
        };
        assert!(error.hint().is_some_and(|hint| hint.contains("mirror cannot be reached")));
    }
}
