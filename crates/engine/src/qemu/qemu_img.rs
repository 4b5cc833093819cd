//! Disk layers, made by `qemu-img`. Only at the making of a template: a machine copies an empty layer.

use std::path::Path;

use tokio::process::Command;

use crate::EngineError;

/// What lies below a layer: its name in the jail and its format.
pub(crate) type Below<'a> = Option<(&'a str, &'a str)>;

/// Makes an empty layer.
pub(crate) async fn create(program: &Path, layer: &Path, below: Below<'_>, size_mib: u64) -> Result<(), EngineError> {
    let mut command = Command::new(program);
    // `-u`: the layer below has its name in the jail only.
    command.args(["create", "-q", "-u", "-f", "qcow2"]);
    if let Some((name, format)) = below {
        command.args(["-b", name, "-F", format]);
    }
    command.arg(layer).arg(format!("{size_mib}M"));
    let output = command.output().await.map_err(EngineError::host(format!("run {}", program.display())))?;
    if output.status.success() {
        return Ok(());
    }
    let detail = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(EngineError::Emulator { step: "make a disk layer", detail })
}
