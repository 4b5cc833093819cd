//! `stockade pause | resume | snapshot | fork`.

use serde_json::json;

use super::{Context, sandboxes::local_time};
use crate::{
    args::{Fork, Pause, Resume, Snapshot},
    failure::Failure,
};

pub(super) async fn pause(context: &Context, args: Pause) -> Result<(), Failure> {
    let tier = if args.standby { "standby" } else { "hibernated" };
    let body = json!({"memory": !args.disk_only, "tier": tier});
    let sandbox = context.client.pause(&args.sandbox, &body).await?;
    context.ui.data(&sandbox, || sandbox.state.clone())
}

pub(super) async fn resume(context: &Context, args: Resume) -> Result<(), Failure> {
    let body = json!({"lifetime_seconds": args.lifetime});
    let sandbox = context.client.resume(&args.sandbox, &body).await?;
    context.ui.data(&sandbox, || format!("deadline {}", local_time(&sandbox.deadline)))
}

pub(super) async fn snapshot(context: &Context, args: Snapshot) -> Result<(), Failure> {
    let body = json!({"name": args.name, "memory": !args.disk_only});
    let snapshot = context.client.snapshot(&args.sandbox, &body).await?;
    context.ui.data(&snapshot, || snapshot.id.clone())
}

pub(super) async fn fork(context: &Context, args: Fork) -> Result<(), Failure> {
    let body = json!({"count": args.count, "lifetime_seconds": args.lifetime, "all_or_nothing": true});
    let children = context.client.fork(&args.sandbox, &body).await?;
    context.ui.data(&json!({"items": children}), || children.iter().map(|child| format!("{}\n", child.id)).collect())
}
