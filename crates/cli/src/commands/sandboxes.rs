//! `stockade create | ls | info | logs | kill | extend`.

use jiff::{Timestamp, tz::TimeZone};
use serde_json::{Value, json};

use super::{Context, lifecycle::rules, network::spec};
use crate::{
    args::{Create, Extend, Kill, Ls, One},
    client::{CreateRequest, ListQuery, Sandbox},
    failure::{FAILED, Failure},
    ui::{printable, table},
};

const ALL_STATES: &str = "creating,running,pausing,paused,resuming,stopped,failed,killing,gone";

pub(super) async fn create(context: &Context, args: Create) -> Result<(), Failure> {
    let request = CreateRequest {
        template: args.making.template,
        lifetime_seconds: args.making.lifetime,
        metadata: args.making.metadata.into_iter().collect(),
        env: args.making.env.into_iter().collect(),
        rules: rules(&args.rules, &Value::Null),
        network: spec(&args.making.network),
    };
    let sandbox = context.client.create(&request).await?;
    context.ui.data(&sandbox, || sandbox.id.clone())
}

pub(super) async fn ls(context: &Context, args: Ls) -> Result<(), Failure> {
    let states = args.state.or_else(|| args.all.then(|| ALL_STATES.to_owned()));
    let query = ListQuery { states, template: args.template, metadata: args.metadata };
    let sandboxes = context.client.sandboxes(&query).await?;
    context.ui.data(&json!({"items": sandboxes}), || {
        if args.quiet {
            return sandboxes.iter().map(|sandbox| format!("{}\n", sandbox.id)).collect();
        }
        let rows: Vec<_> = sandboxes.iter().map(row).collect();
        table(&["ID", "TEMPLATE", "STATE", "CREATED", "DEADLINE", "METADATA"], &rows)
    })
}

fn row(sandbox: &Sandbox) -> Vec<String> {
    let labels: Vec<_> = sandbox.metadata.iter().map(|(key, value)| format!("{key}={value}")).collect();
    vec![
        sandbox.id.clone(),
        sandbox.template.name.clone(),
        sandbox.state.clone(),
        local_time(&sandbox.created_at),
        local_time(&sandbox.deadline),
        printable(&labels.join(" ")),
    ]
}

pub(super) async fn info(context: &Context, args: One) -> Result<(), Failure> {
    let sandbox = context.client.sandbox(&args.sandbox).await?;
    context.ui.data(&sandbox, || describe(&sandbox))
}

pub(super) async fn extend(context: &Context, args: Extend) -> Result<(), Failure> {
    let sandbox = context.client.extend(&args.sandbox, args.seconds).await?;
    context.ui.data(&sandbox, || format!("deadline {}", local_time(&sandbox.deadline)))
}

pub(super) async fn logs(context: &Context, args: One) -> Result<(), Failure> {
    let console = context.client.console(&args.sandbox).await?;
    if console.trim().is_empty() {
        context.ui.note("the console has nothing on it; it shows what the guest's kernel and init print, not commands");
    }
    context.ui.data(&json!({"console": console}), || printable(&console.replace("\r\n", "\n")))
}

/// Ends each; the ones that failed are named, and make the exit code 1.
pub(super) async fn kill(context: &Context, args: Kill) -> Result<u8, Failure> {
    let ids = if args.all {
        context.client.sandboxes(&ListQuery::default()).await?.into_iter().map(|sandbox| sandbox.id).collect()
    } else {
        args.sandboxes
    };
    let mut killed = Vec::new();
    let mut code = 0;
    for id in ids {
        match context.client.kill(&id).await {
            Ok(()) => killed.push(id),
            // Its time was up, or somebody else was faster.
            Err(failure) if args.all && ["sandbox_ended", "sandbox_not_found"].contains(&&*failure.code) => {}
            Err(failure) => {
                context.ui.failure(&failure);
                code = FAILED;
            }
        }
    }
    context.ui.data(&json!({"killed": killed}), || killed.iter().map(|id| format!("{id}\n")).collect())?;
    Ok(code)
}

fn describe(sandbox: &Sandbox) -> String {
    let shape = &sandbox.shape;
    let state = match sandbox.field("tier").as_str() {
        Some(tier) => format!("{} ({})", sandbox.state, printable(tier)),
        None => sandbox.state.clone(),
    };
    let mut lines = vec![
        ("id", sandbox.id.clone()),
        ("template", format!("{} ({})", sandbox.template.name, sandbox.template.id)),
        ("state", state),
        ("shape", format!("{} vCPU, {} MiB memory, {} MiB disk", shape.vcpus, shape.memory_mib, shape.disk_mib)),
        ("created", local_time(&sandbox.created_at)),
        ("started", sandbox.started_at.as_deref().map_or_else(|| "-".to_owned(), local_time)),
        ("deadline", local_time(&sandbox.deadline)),
    ];
    lines.extend(sandbox.metadata.iter().map(|(key, value)| ("metadata", printable(&format!("{key}={value}")))));
    if let Some(ending) = &sandbox.ending {
        lines.push(("ended", local_time(&ending.at)));
        lines.push(("cause", ending.cause.kind.clone()));
        lines.push(("detail", printable(&ending.detail)));
    }
    lines.iter().map(|(name, value)| format!("{name:<10}{value}\n")).collect()
}

/// A time of the API in the user's zone; as it is, if it is none.
pub(super) fn local_time(text: &str) -> String {
    match text.parse::<Timestamp>() {
        Ok(time) => time.to_zoned(TimeZone::system()).strftime("%Y-%m-%d %H:%M:%S%:z").to_string(),
        Err(_) => printable(text),
    }
}
