//! The engine a server runs on.

use std::{path::Path, sync::Arc};

use stockade_engine::{
    EngineError,
    qemu::{AcceleratorChoice, QemuConfig, QemuEngine},
};

use crate::{
    args::Accel,
    failure::{Failure, chain},
};

/// Code of what this host cannot do, however often it is tried.
pub(crate) const UNSUPPORTED: &str = "host_unsupported";

/// The QEMU engine with its machines in `data_dir`, booting what is in `kernel_dir`; at most `spares` emulators of a
/// template wait for a machine.
pub(crate) async fn open(
    data_dir: &Path,
    kernel_dir: &Path,
    accel: Accel,
    spares: usize,
) -> Result<Arc<QemuEngine>, Failure> {
    let mut config = QemuConfig::new(data_dir, kernel_dir.join("vmlinuz"), kernel_dir.join("initramfs"));
    config.limits.spare_emulators = spares;
    config.accelerator = match accel {
        Accel::Auto => AcceleratorChoice::Auto,
        Accel::Kvm => AcceleratorChoice::Kvm,
        Accel::Tcg => AcceleratorChoice::Tcg,
    };
    QemuEngine::new(config).await.map(Arc::new).map_err(|error| engine_failure(&error))
}

/// What the engine says, with where to look.
pub(crate) fn engine_failure(error: &EngineError) -> Failure {
    match error {
        // Its text says what mends it.
        EngineError::Unsupported { .. } => Failure::new(UNSUPPORTED, chain(error)),
        _ => Failure::new("engine_failed", chain(error)).hint("`stockade doctor` looks at everything the engine needs"),
    }
}
