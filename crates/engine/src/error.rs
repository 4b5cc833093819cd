use std::{io, path::PathBuf, time::Duration};

use stockade_model::MachineId;
use stockade_wire::ErrorBody;

/// What can go wrong between the service and a machine.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The host has not enough of something; nothing was changed.
    #[error("not enough {resource} on this host: {needed} needed, {available} available")]
    NoCapacity {
        /// `memory`, `disk`, ...
        resource: &'static str,
        /// With unit.
        needed: String,
        /// With unit.
        available: String,
    },
    /// The template or snapshot was made by another emulator, machine type, processor model or kernel.
    #[error("made with {what} {made_with}, this host has {here}")]
    Mismatch {
        /// What differs.
        what: &'static str,
        /// What it was made with.
        made_with: String,
        /// What is here.
        here: String,
    },
    /// A file of a template is missing, truncated or altered.
    #[error("{} is damaged: {reason}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The guest agent did not answer.
    #[error("guest did not answer within {waited:?}; last console lines: {console}")]
    GuestSilent {
        /// How long was waited.
        waited: Duration,
        /// What the guest's console said last.
        console: String,
    },
    /// The machine has ended.
    #[error("machine {machine} has ended: {reason}")]
    Gone {
        /// Which.
        machine: MachineId,
        /// How it ended.
        reason: String,
    },
    /// The emulator refused a command or ended while starting.
    #[error("emulator failed at {step}: {detail}")]
    Emulator {
        /// What was being done.
        step: &'static str,
        /// What it said.
        detail: String,
    },
    /// The host lacks a program or feature the engine cannot do without.
    #[error("{missing} is not usable on this host: {why}")]
    Unsupported {
        /// What is missing.
        missing: String,
        /// Why, and what would mend it.
        why: String,
    },
    /// The host's kernel refused something.
    #[error("cannot {action}")]
    Host {
        /// What was tried, with the path or process it was about.
        action: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The guest agent refused the request; nothing is wrong with the machine.
    #[error(transparent)]
    Guest(#[from] ErrorBody),
    /// The link session broke while a request was under way. Whether the guest acted on it is unknown
    /// unless `started` is false.
    #[error("connection to the guest broke")]
    LinkBroken {
        /// The request may have reached the guest.
        started: bool,
        /// What the transport said.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl EngineError {
    /// What an engine answers that cannot take snapshots.
    pub(crate) fn no_snapshots(engine: &str) -> Self {
        let why = format!("{engine} engine cannot take them");
        Self::Unsupported { missing: "snapshot".to_owned(), why }
    }

    /// For `map_err` on input and output of the host.
    pub fn host(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::Host { action, source }
    }
}
