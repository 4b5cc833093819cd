//! Lets a machine go on whose disk found no room on the host.
//!
//! The emulator halts a machine when a write finds no room, and keeps the write to repeat it: the guest loses nothing and
//! sees nothing. But nobody has asked for the halt, so nobody else would end it.

use std::{
    sync::{Weak, atomic::Ordering},
    time::Duration,
};

use serde_json::json;
use tokio::sync::broadcast::{Receiver, error::RecvError};

use super::{
    machine::Inner,
    qmp::{CLOSED, QmpEvent},
};

/// Between two attempts. Each costs the guest's next write, no more.
const INTERVAL: Duration = Duration::from_secs(1);

/// Watches a machine until its emulator ends.
pub(crate) async fn watch(machine: Weak<Inner>, mut events: Receiver<QmpEvent>) {
    loop {
        match events.recv().await {
            Ok(event) if event.name == CLOSED => return,
            Ok(event) if event.name == "BLOCK_IO_ERROR" && event.data["action"] == "stop" => {}
            Ok(_) => continue,
            // It may have been among those that were missed.
            Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => return,
        }
        let mut is_told = false;
        while let Some(inner) = machine.upgrade() {
            match go_on(&inner).await {
                Ok(true) if !is_told => {
                    is_told = true;
                    tracing::warn!(machine = %inner.id, "its disk found no room on the host: it stands still until there is some");
                }
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(machine = %inner.id, error, "cannot let it go on, trying again");
                }
            }
            if !inner.qmp.is_open() {
                return;
            }
            drop(inner);
            tokio::time::sleep(INTERVAL).await;
        }
    }
}

/// Lets it run if it stands still for want of room. Whether it did.
async fn go_on(inner: &Inner) -> Result<bool, crate::EngineError> {
    let _busy = inner.busy.lock().await;
    // One that was paused meanwhile goes on when it is resumed.
    if !inner.is_meant_to_run.load(Ordering::Acquire) {
        return Ok(false);
    }
    let status = inner.command("query-status", json!({})).await?;
    if status["status"] != "io-error" {
        return Ok(false);
    }
    inner.command("cont", json!({})).await.map(|_| true)
}
