//! `stockade snapshot`, `stockade snapshot ls | info | rm`.

use std::collections::BTreeMap;

use serde_json::json;

use super::{Context, sandboxes::local_time};
use crate::{
    args::{Snapshot, SnapshotCommand},
    client::{Snapshot as Taken, SnapshotQuery},
    failure::{FAILED, Failure},
    ui::{printable, table},
};

/// Takes one, or does what the subcommand says; the exit code.
pub(super) async fn snapshot(context: &Context, args: Snapshot) -> Result<u8, Failure> {
    match args.command {
        Some(SnapshotCommand::Ls { sandbox, name, labels, quiet }) => {
            ls(context, &SnapshotQuery { sandbox, name, labels }, quiet).await?;
        }
        Some(SnapshotCommand::Info { snapshot }) => {
            let snapshot = context.client.get_snapshot(&snapshot).await?;
            context.ui.data(&snapshot, || describe(&snapshot))?;
        }
        Some(SnapshotCommand::Rm { snapshots }) => return rm(context, snapshots).await,
        None => take(context, args).await?,
    }
    Ok(0)
}

async fn take(context: &Context, args: Snapshot) -> Result<(), Failure> {
    let sandbox = args.sandbox.unwrap_or_default();
    let labels: BTreeMap<_, _> = args.labels.into_iter().collect();
    let body = json!({"name": args.name, "labels": labels, "memory": !args.disk_only,
        "expires_after_seconds": args.expires_after});
    let snapshot = context.client.snapshot(&sandbox, &body).await?;
    context.ui.data(&snapshot, || snapshot.id.clone())
}

async fn ls(context: &Context, query: &SnapshotQuery, quiet: bool) -> Result<(), Failure> {
    let snapshots = context.client.snapshots(query).await?;
    context.ui.data(&json!({"items": snapshots}), || {
        if quiet {
            return snapshots.iter().map(|snapshot| format!("{}\n", snapshot.id)).collect();
        }
        let rows: Vec<_> = snapshots.iter().map(row).collect();
        table(&["ID", "NAME", "SANDBOX", "KEEPS", "MEMORY", "DISK", "CREATED", "EXPIRES"], &rows)
    })
}

fn row(snapshot: &Taken) -> Vec<String> {
    vec![
        snapshot.id.clone(),
        snapshot.name.as_deref().map_or_else(|| "-".to_owned(), printable),
        snapshot.sandbox.clone(),
        keeps(snapshot).to_owned(),
        mib(snapshot.memory_bytes),
        mib(snapshot.disk_bytes),
        local_time(&snapshot.created_at),
        snapshot.expires_at.as_deref().map_or_else(|| "never".to_owned(), local_time),
    ]
}

fn describe(snapshot: &Taken) -> String {
    let mut lines = vec![
        ("id", snapshot.id.clone()),
        ("name", snapshot.name.as_deref().map_or_else(|| "-".to_owned(), printable)),
        ("sandbox", snapshot.sandbox.clone()),
        ("parent", snapshot.parent.clone().unwrap_or_else(|| "-".to_owned())),
        ("template", snapshot.template.name.clone()),
        ("keeps", keeps(snapshot).to_owned()),
        ("memory", mib(snapshot.memory_bytes)),
        ("disk", mib(snapshot.disk_bytes)),
        ("paused", format!("{:.1} ms", snapshot.paused_seconds * 1e3)),
        ("created", local_time(&snapshot.created_at)),
        ("expires", snapshot.expires_at.as_deref().map_or_else(|| "never".to_owned(), local_time)),
    ];
    lines.extend(snapshot.labels.iter().map(|(key, value)| ("label", printable(&format!("{key}={value}")))));
    lines.iter().map(|(name, value)| format!("{name:<10}{value}\n")).collect()
}

fn keeps(snapshot: &Taken) -> &'static str {
    if snapshot.memory { "memory+disk" } else { "disk" }
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Deletes each, of a name the newest; the ones that failed are named, and make the exit code 1.
async fn rm(context: &Context, names: Vec<String>) -> Result<u8, Failure> {
    let mut deleted = Vec::new();
    let mut code = 0;
    for name in names {
        let delete = async {
            let id = context.client.get_snapshot(&name).await?.id;
            context.client.delete_snapshot(&id).await.map(|()| id)
        };
        match delete.await {
            Ok(id) => deleted.push(id),
            Err(failure) => {
                context.ui.failure(&failure);
                code = FAILED;
            }
        }
    }
    context.ui.data(&json!({"deleted": deleted}), || deleted.iter().map(|id| format!("{id}\n")).collect())?;
    Ok(code)
}
