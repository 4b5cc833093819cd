//! `stockade pause | resume | stop | start | set | rollback | promote`.

use serde_json::{Map, Value, json};
use stockade_model::shortened;

use super::{Context, sandboxes::local_time};
use crate::{
    args::{Idle, One, Pause, Resume, Rollback, Rules, Set},
    client::Sandbox,
    failure::{BAD_USAGE, Failure},
    waiting::telling,
};

/// A verb of a sandbox, told of for as long as it takes.
async fn change(context: &Context, id: &str, verb: &str, body: &Value, doing: &str) -> Result<Sandbox, Failure> {
    let doing = format!("{doing} {}", shortened(id));
    telling(context.ui, &doing, context.client.change(id, verb, body)).await
}

pub(super) async fn pause(context: &Context, args: Pause) -> Result<(), Failure> {
    let (tier, doing) = match (args.standby, args.archive, args.disk_only) {
        (true, _, _) => ("standby", "halting"),
        (_, true, _) => ("archived", "archiving"),
        (_, _, true) => ("hibernated", "shutting down"),
        _ => ("hibernated", "hibernating"),
    };
    let body = json!({"memory": !args.disk_only, "tier": tier});
    let sandbox = change(context, &args.sandbox, "pause", &body, doing).await?;
    context.ui.data(&sandbox, || sandbox.state.clone())
}

pub(super) async fn resume(context: &Context, args: Resume) -> Result<(), Failure> {
    let body = json!({"lifetime_seconds": args.lifetime});
    let sandbox = change(context, &args.sandbox, "resume", &body, "bringing back").await?;
    context.ui.data(&sandbox, || format!("deadline {}", local_time(&sandbox.deadline)))
}

pub(super) async fn stop(context: &Context, args: One) -> Result<(), Failure> {
    let sandbox = change(context, &args.sandbox, "stop", &json!({}), "shutting down").await?;
    context.ui.data(&sandbox, || sandbox.state.clone())
}

pub(super) async fn start(context: &Context, args: One) -> Result<(), Failure> {
    let sandbox = change(context, &args.sandbox, "start", &json!({}), "booting").await?;
    context.ui.data(&sandbox, || format!("deadline {}", local_time(&sandbox.deadline)))
}

pub(super) async fn rollback(context: &Context, args: Rollback) -> Result<(), Failure> {
    let body = json!({"snapshot": args.snapshot});
    let sandbox = change(context, &args.sandbox, "rollback", &body, "rolling back").await?;
    context.ui.data(&sandbox, || sandbox.id.clone())
}

pub(super) async fn promote(context: &Context, args: One) -> Result<(), Failure> {
    let sandbox = change(context, &args.sandbox, "promote", &json!({}), "promoting").await?;
    context.ui.data(&sandbox, || sandbox.id.clone())
}

pub(super) async fn set(context: &Context, args: Set) -> Result<(), Failure> {
    let mut body = Map::new();
    if args.rules.has_idle() {
        // The API takes all idle rules at once; those that were not typed stay.
        let now = context.client.sandbox(&args.sandbox).await?;
        body.extend(rules(&args.rules, now.field("idle")));
    } else {
        body.extend(rules(&args.rules, &Value::Null));
    }
    body.extend(args.lifetime.map(|seconds| ("lifetime_seconds".to_owned(), json!(seconds))));
    if body.is_empty() {
        return Err(Failure::new("invalid_argument", "nothing is to change")
            .hint("`stockade set --help` lists what can be set")
            .exit(BAD_USAGE));
    }
    let sandbox = context.client.set(&args.sandbox, &Value::Object(body)).await?;
    context.ui.data(&sandbox, || format!("deadline {}", local_time(&sandbox.deadline)))
}

impl Rules {
    fn has_idle(&self) -> bool {
        let Self { standby_after, hibernate_after, archive_after, delete_after, busy_percent, .. } = self;
        let times = [standby_after, hibernate_after, archive_after, delete_after];
        times.iter().any(|time| time.is_some()) || busy_percent.is_some()
    }
}

/// The rules that were typed as fields of a request, over the idle rules there are.
pub(super) fn rules(rules: &Rules, idle: &Value) -> Map<String, Value> {
    let mut fields = Map::new();
    fields.extend(rules.on_timeout.map(|word| ("on_timeout".to_owned(), json!(word.as_str()))));
    fields.extend(rules.auto_resume.map(|is_on| ("auto_resume".to_owned(), json!(is_on))));
    if rules.has_idle() {
        let mut idle = idle.as_object().cloned().unwrap_or_default();
        let mut put = |name: &str, time: Option<Idle>| {
            idle.extend(time.map(|Idle(seconds)| (name.to_owned(), json!(seconds))));
        };
        put("standby_after_seconds", rules.standby_after);
        put("hibernate_after_seconds", rules.hibernate_after);
        put("archive_after_seconds", rules.archive_after);
        put("delete_after_seconds", rules.delete_after);
        let percent = rules.busy_percent.map(|percent| (percent > 0).then_some(percent));
        idle.extend(percent.map(|percent| ("busy_percent".to_owned(), json!(percent))));
        fields.insert("idle".to_owned(), Value::Object(idle));
    }
    fields
}
