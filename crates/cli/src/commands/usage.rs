//! `stockade usage`.

use super::{Context, sandboxes::local_time};
use crate::{
    args::{Step, Usage},
    client::{UsageItem, Used},
    failure::Failure,
    ui::{printable, table},
};

pub(super) async fn usage(context: &Context, args: Usage) -> Result<(), Failure> {
    let mut pairs: Vec<(&str, String)> = Vec::new();
    pairs.extend(args.sandbox.map(|id| ("sandbox", id)));
    pairs.extend(args.metadata.iter().map(|(key, value)| ("metadata", format!("{key}={value}"))));
    pairs.extend(args.from.map(|time| ("from", time)));
    pairs.extend(args.to.map(|time| ("to", time)));
    pairs.extend(args.by_label.as_ref().map(|key| ("by", format!("label:{key}"))));
    pairs.extend(args.step.map(|step| ("step", if step == Step::Day { "day" } else { "hour" }.to_owned())));
    if args.csv {
        pairs.push(("format", "csv".to_owned()));
        let text = context.client.usage_csv(&pairs).await?;
        return context.ui.data(&text, || text.clone());
    }
    let report = context.client.usage(&pairs).await?;
    context.ui.data(&report, || {
        let what = args.by_label.as_deref().unwrap_or("SANDBOX");
        let mut rows: Vec<_> = report.items.iter().map(row).collect();
        rows.push(cells("total".to_owned(), String::new(), &report.total));
        let head =
            [&printable(what), "FROM", "RUNNING", "PAUSED", "VCPU-S", "GIB-S", "DISK", "SNAPSHOTS", "EGRESS", "COST"];
        table(&head, &rows)
    })
}

fn row(item: &UsageItem) -> Vec<String> {
    let name = item.sandbox.clone().or_else(|| item.label.as_deref().map(printable));
    cells(name.unwrap_or_else(|| "-".to_owned()), local_time(&item.from), &item.used)
}

fn cells(name: String, from: String, used: &Used) -> Vec<String> {
    vec![
        name,
        from,
        format!("{:.1} s", used.running_seconds),
        format!("{:.1} s", used.paused_seconds),
        format!("{:.2}", used.vcpu_seconds),
        format!("{:.2}", used.memory_gib_seconds),
        format!("{:.4} GiB h", used.disk_gib_hours),
        format!("{:.4} GiB h", used.snapshot_gib_hours),
        format!("{} B", used.egress_bytes),
        format!("${:.6}", used.cost.total),
    ]
}
