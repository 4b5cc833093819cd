//! The bare emulator: the same machine restored from the same template, without our service.

use std::{path::PathBuf, sync::Arc};

use stockade_engine::qemu::{BareMachine, QemuEngine};
use tempfile::TempDir;

use super::server::Throwaway;
use crate::{
    args::Accel,
    failure::Failure,
    server::engine::{self, engine_failure},
};

/// What is restored.
pub(super) struct Emulator {
    engine: Arc<QemuEngine>,
    template: PathBuf,
    _directory: TempDir,
}

/// Milliseconds; see the engine's own.
pub(super) struct Times {
    pub(super) restore: f64,
    pub(super) snapshot_pause: f64,
    pub(super) wake: f64,
}

impl Emulator {
    /// The emulator on the server's template.
    pub(super) async fn of(server: &Throwaway) -> Result<Self, Failure> {
        let directory =
            TempDir::with_prefix("stockade-bare-").map_err(|error| Failure::host("make a directory", error))?;
        let accel = if server.accel == "kvm" { Accel::Kvm } else { Accel::Tcg };
        let data_dir = server.data_dir();
        let engine = engine::open(directory.path(), &data_dir.join("kernel"), accel, 0).await?;
        let template = server.client.template("base").await?;
        Ok(Self { engine, template: data_dir.join("templates").join(template.id), _directory: directory })
    }

    /// A restore and two halts, in milliseconds.
    pub(super) async fn times(&self) -> Result<Times, Failure> {
        let times = self.engine.bare_times(&self.template).await.map_err(|error| engine_failure(&error))?;
        let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
        Ok(Times { restore: ms(times.restore), snapshot_pause: ms(times.snapshot_pause), wake: ms(times.wake) })
    }

    /// From the start of the emulator's process to the guest agent's first reply, in milliseconds.
    pub(super) async fn restore(&self) -> Result<f64, Failure> {
        Ok(self.times().await?.restore)
    }

    /// From the start of the emulator's process to a first command's output, in milliseconds.
    pub(super) async fn first_output(&self) -> Result<f64, Failure> {
        let elapsed = self.engine.bare_first_output(&self.template).await;
        elapsed.map(|elapsed| elapsed.as_secs_f64() * 1e3).map_err(|error| engine_failure(&error))
    }

    /// A restored machine.
    pub(super) async fn start(&self) -> Result<BareMachine, Failure> {
        self.engine.start_bare(&self.template).await.map_err(|error| engine_failure(&error))
    }
}
