//! A running machine's disk: which layers it has, according to its emulator, and how they change.

use std::{fs::File, io, path::Path, time::Duration};

use serde_json::{Value, json};

use super::{
    Host,
    command_line::{ROOT_DEVICE, TEMPLATE_NODE, frozen_layer_path, own_layer_path},
    config::joined,
    layers::{DiskChain, Frozen, FrozenLayer, LayerId, MOST_FROZEN, merge_from},
    machine::Inner,
    machine_dir::{MachineDir, Record, remove_tree},
    memory,
    qmp::{CLOSED, Qmp},
};
use crate::EngineError;

/// The job that shortens a chain.
const SHORTEN_JOB: &str = "shorten";
/// It copies what may be gigabytes, while the guest goes on.
const SHORTEN_PATIENCE: Duration = Duration::from_secs(3600);
/// The template's disk and the file below it.
const TEMPLATE_LAYERS: u64 = 2;

/// Brings the record in line with the emulator. After this no layer is about to be switched to.
pub(crate) async fn settle(inner: &Inner) -> Result<(), EngineError> {
    let mut record = inner.record().clone();
    let was = serde_json::to_vec(&record.disk).unwrap_or_default();
    let unused = reconcile(&inner.host, &inner.qmp, &mut record).await?;
    if serde_json::to_vec(&record.disk).unwrap_or_default() != was {
        inner.set_record(record)?;
    }
    remove_unused(&inner.host, &inner.qmp, &inner.directory, &unused).await?;
    close_frozen(&inner.directory, &inner.record().clone())
}

/// What an earlier server left half-done is finished or taken back; for a machine that is being adopted.
pub(crate) async fn recover(
    host: &Host,
    qmp: &Qmp,
    directory: &MachineDir,
    record: &mut Record,
) -> Result<(), EngineError> {
    cancel_jobs(host, qmp).await?;
    let unused = reconcile(host, qmp, record).await?;
    directory.write_record(record).map_err(EngineError::host("write the machine's record"))?;
    remove_unused(host, qmp, directory, &unused).await?;
    close_frozen(directory, record)?;
    remove_tree(&directory.unfinished_snapshot()).map_err(EngineError::host("remove an unfinished snapshot"))
}

async fn reconcile(host: &Host, qmp: &Qmp, record: &mut Record) -> Result<Vec<LayerId>, EngineError> {
    let Some(disk) = &mut record.disk else { return Ok(Vec::new()) };
    let blocks = qmp.run("query-block", json!({}), host.limits.command_patience).await?;
    let strange = |detail: String| EngineError::Emulator { step: "query-block", detail };
    let (top, depth) = top_of(&blocks).ok_or_else(|| strange("it shows no root disk".to_owned()))?;
    let below = depth.checked_sub(TEMPLATE_LAYERS).and_then(|below| usize::try_from(below).ok());
    let below = below.ok_or_else(|| strange(format!("the root disk has {depth} lower layers only")))?;
    disk.reconcile(top, below).map_err(strange)
}

/// The node the root disk is written to, and how many lie below it.
fn top_of(blocks: &Value) -> Option<(&str, u64)> {
    let is_root =
        |block: &&Value| block["qdev"].as_str().is_some_and(|name| name.split('/').any(|part| part == ROOT_DEVICE));
    let inserted = &blocks.as_array()?.iter().find(is_root)?["inserted"];
    Some((inserted["node-name"].as_str()?, inserted["backing_file_depth"].as_u64()?))
}

async fn remove_unused(host: &Host, qmp: &Qmp, directory: &MachineDir, unused: &[LayerId]) -> Result<(), EngineError> {
    for layer in unused {
        // It may not have been opened yet.
        let _ = qmp.run("blockdev-del", json!({ "node-name": layer.node() }), host.limits.command_patience).await;
        directory.remove_layer(layer).map_err(EngineError::host("remove a disk layer that is not used"))?;
    }
    Ok(())
}

/// Takes frozen layers away from the emulator whose snapshot went no further than the switch.
fn close_frozen(directory: &MachineDir, record: &Record) -> Result<(), EngineError> {
    let mut frozen = record.disk.iter().flat_map(|disk| &disk.frozen).filter(|layer| layer.known.is_none());
    frozen.try_for_each(|layer| directory.freeze_layer(&layer.id)).map_err(EngineError::host("freeze a disk layer"))
}

/// Bytes that shortening the chain would copy; 0 where it is short enough.
pub(crate) fn bytes_to_merge(inner: &Inner) -> u64 {
    let sizes = frozen_bytes(inner);
    if sizes.len() < MOST_FROZEN { 0 } else { sizes[merge_from(&sizes)..].iter().sum() }
}

fn frozen_bytes(inner: &Inner) -> Vec<u64> {
    let frozen = inner.record().disk.as_ref().map(|disk| disk.frozen.clone()).unwrap_or_default();
    frozen.iter().map(|layer| inner.directory.layer_bytes(&layer.id)).collect()
}

/// Merges the upper layers into the machine's own where the chain is too long. The guest goes on meanwhile.
pub(crate) async fn shorten(inner: &Inner) -> Result<(), EngineError> {
    let sizes = frozen_bytes(inner);
    let Some(disk) = inner.record().disk.clone().filter(|_| sizes.len() >= MOST_FROZEN) else { return Ok(()) };
    let base = match merge_from(&sizes).checked_sub(1).and_then(|index| disk.frozen.get(index)) {
        Some(layer) => layer.id.node(),
        None => TEMPLATE_NODE.to_owned(),
    };
    let mut events = inner.qmp.events();
    let arguments = json!({ "job-id": SHORTEN_JOB, "device": disk.own.node(), "base-node": base });
    inner.command("block-stream", arguments).await?;
    let failed = |detail: String| EngineError::Emulator { step: "block-stream", detail };
    let done = async {
        loop {
            match events.recv().await {
                Ok(event) if event.name == CLOSED => return Err(failed("the emulator ended".to_owned())),
                Ok(event) if event.data["device"] != SHORTEN_JOB => {}
                Ok(event) if event.name == "BLOCK_JOB_COMPLETED" => match event.data["error"].as_str() {
                    Some(error) => return Err(failed(error.to_owned())),
                    None => return Ok(()),
                },
                Ok(event) if event.name == "BLOCK_JOB_CANCELLED" => return Err(failed("cancelled".to_owned())),
                Ok(_) => {}
                Err(_) => return Err(failed("too many events".to_owned())),
            }
        }
    };
    match tokio::time::timeout(SHORTEN_PATIENCE, done).await {
        Ok(Ok(())) => settle(inner).await,
        Ok(Err(error)) => cancel_jobs(&inner.host, &inner.qmp).await.and(Err(error)),
        Err(_) => {
            cancel_jobs(&inner.host, &inner.qmp).await.and(Err(failed(format!("not done within {SHORTEN_PATIENCE:?}"))))
        }
    }
}

async fn cancel_jobs(host: &Host, qmp: &Qmp) -> Result<(), EngineError> {
    let patience = host.limits.command_patience;
    let cancelled = async {
        loop {
            let mut events = qmp.events();
            let jobs = qmp.run("query-block-jobs", json!({}), patience).await?;
            if jobs.as_array().is_none_or(Vec::is_empty) {
                return Ok(());
            }
            // It may just have ended by itself.
            let _ = qmp.run("block-job-cancel", json!({ "device": SHORTEN_JOB, "force": true }), patience).await;
            let _ = tokio::time::timeout(Duration::from_millis(100), events.recv()).await;
        }
    };
    match tokio::time::timeout(patience, cancelled).await {
        Ok(result) => result,
        Err(_) => {
            Err(EngineError::Emulator { step: "block-job-cancel", detail: format!("not done within {patience:?}") })
        }
    }
}

/// Makes the layer the machine will write to and has the emulator open it. What was written so far goes to
/// disk, so that little is left to write when the machine is halted.
pub(crate) async fn add_next(inner: &Inner, empty: &Path) -> Result<LayerId, EngineError> {
    let mut record = inner.record().clone();
    let disk = record.disk.as_mut().ok_or_else(|| EngineError::no_snapshots("its disk has no layers; this"))?;
    let next = LayerId::random().map_err(EngineError::host("name a disk layer"))?;
    let own = disk.own.clone();
    disk.next = Some(next.clone());
    inner.set_record(record)?;
    let added = async {
        let (directory, empty) = (inner.directory.clone(), empty.to_owned());
        let (id, below) = (next.clone(), own);
        let work = move || {
            directory.add_layer(&empty, &id, Some(&below))?;
            File::open(directory.layer(&below))?.sync_data()
        };
        joined(tokio::task::spawn_blocking(work).await).map_err(EngineError::host("make a disk layer"))?;
        inner.command("blockdev-add", own_layer(&next, Value::Null)).await
    };
    match added.await {
        Ok(_) => Ok(next),
        Err(error) => {
            settle(inner).await?;
            Err(error)
        }
    }
}

/// Opens a snapshot's layers and puts them between the template and the machine's own layer, which nothing has been
/// read from or written to.
pub(crate) async fn put_below(qmp: &Qmp, disk: &DiskChain, patience: Duration) -> Result<(), EngineError> {
    let mut below = json!(TEMPLATE_NODE);
    for layer in &disk.frozen {
        let file = json!({ "driver": "file", "filename": frozen_layer_path(&layer.id) });
        let node = layer.id.node();
        below = json!({ "driver": "qcow2", "node-name": node, "read-only": true, "file": file, "backing": below });
    }
    let Some(highest) = disk.frozen.last() else { return Ok(()) };
    qmp.run("blockdev-add", below, patience).await?;
    let options = own_layer(&disk.own, json!(highest.id.node()));
    qmp.run("blockdev-reopen", json!({ "options": [options] }), patience).await.map(drop)
}

/// The node of a layer that a machine writes to.
fn own_layer(id: &LayerId, backing: Value) -> Value {
    let file = json!({ "driver": "file", "filename": own_layer_path(id), "discard": "unmap" });
    json!({ "driver": "qcow2", "node-name": id.node(), "discard": "unmap", "file": file, "backing": backing })
}

/// From here on the machine writes to `next`.
pub(crate) async fn switch(inner: &Inner, next: &LayerId) -> Result<(), EngineError> {
    let own = inner.record().disk.as_ref().map(|disk| disk.own.node()).unwrap_or_default();
    inner.command("blockdev-snapshot", json!({ "node": own, "overlay": next.node() })).await.map(drop)
}

/// Makes all lower layers unchangeable and takes the checksums that are not known yet.
pub(crate) async fn freeze(inner: &Inner) -> Result<Vec<FrozenLayer>, EngineError> {
    let mut record = inner.record().clone();
    let Some(disk) = &mut record.disk else { return Ok(Vec::new()) };
    let directory = inner.directory.clone();
    let mut frozen = std::mem::take(&mut disk.frozen);
    let work = move || {
        let mut fresh = Vec::new();
        for layer in &mut frozen {
            if layer.known.is_none() {
                layer.known = Some(freeze_layer(&directory, &layer.id)?);
                fresh.extend(layer.known.clone());
            }
        }
        Ok((frozen, fresh))
    };
    let (frozen, fresh): (Vec<Frozen>, Vec<FrozenLayer>) =
        joined(tokio::task::spawn_blocking(work).await).map_err(EngineError::host("freeze a disk layer"))?;
    for layer in &fresh {
        inner.host.checked_files.note(&inner.directory.layer(&layer.id), &layer.digest);
    }
    let layers = frozen.iter().filter_map(|layer| layer.known.clone()).collect();
    disk.frozen = frozen;
    inner.set_record(record)?;
    Ok(layers)
}

fn freeze_layer(directory: &MachineDir, id: &LayerId) -> io::Result<FrozenLayer> {
    directory.freeze_layer(id)?;
    let path = directory.layer(id);
    let file = File::open(&path)?;
    file.sync_all()?;
    let digest = memory::sparse_digest(&path)?;
    Ok(FrozenLayer { id: id.clone(), bytes: file.metadata()?.len(), digest })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_disk_is_found_among_others() {
        let inserted = json!({ "node-name": "layer-x", "backing_file_depth": 3 });
        let blocks = json!([{ "qdev": "other" }, { "qdev": "/machine/peripheral/root-disk/virtio-backend", "inserted": inserted }]);
        assert_eq!(top_of(&blocks), Some(("layer-x", 3)));
        assert_eq!(top_of(&json!([{ "qdev": "not-root-disk", "inserted": inserted }])), None);
    }
}
