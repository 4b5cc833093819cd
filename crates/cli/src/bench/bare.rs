//! The bare emulator: the same machine restored from the same template, without our service.

use std::path::PathBuf;

use super::server::Throwaway;
use crate::failure::Failure;

/// What is restored.
pub(super) struct Emulator {
    template: PathBuf,
}

impl Emulator {
    pub(super) async fn of(server: &Throwaway) -> Result<Self, Failure> {
        let template = server.client.template("base").await?;
        Ok(Self { template: server.data_dir().join("templates").join(template.id) })
    }

    /// From the start of the emulator's process to the guest agent's first reply, in milliseconds.
    pub(super) async fn restore(&self) -> Result<f64, Failure> {
        Err(Failure::new("not_available", format!("no bare restore of {}", self.template.display())))
    }
}
