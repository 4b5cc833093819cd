//! What was used and what it costs.

use std::collections::BTreeMap;

use axum::{
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use jiff::Timestamp;
use serde::Serialize;
use stockade_model::{Costs, Prices, Usage};
use stockade_service::{UsageFilter, UsageGroup, UsageReportRow, UsageStep};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{query, sandbox_id, show_time};
use crate::{ApiError, AppState, auth::Caller, extract::QueryPairs};

const NANO: f64 = 1e9;

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(usage))
}

/// What was used, in rows, and the sum of them.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct UsageReport {
    items: Vec<UsageItem>,
    total: Used,
    prices: PriceList,
}

/// What one sandbox (its snapshots included) or all sandboxes of a label's value used in a stretch of time.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct UsageItem {
    /// Its id; null where a label makes the rows.
    sandbox: Option<String>,
    /// The template it was made from; null where a label makes the rows.
    template: Option<String>,
    metadata: BTreeMap<String, String>,
    /// The label's value where a label makes the rows; null for those without it.
    label: Option<String>,
    /// The first moment that is counted.
    #[schema(format = DateTime)]
    from: String,
    /// The last.
    #[schema(format = DateTime)]
    to: String,
    #[serde(flatten)]
    used: Used,
}

/// Amounts, and what they cost.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct Used {
    /// Seconds it took commands.
    running_seconds: f64,
    /// Seconds it was paused, in whatever tier, or stopped.
    paused_seconds: f64,
    /// Processor time really used.
    vcpu_seconds: f64,
    /// Memory really held, shared pages counted once.
    memory_gib_seconds: f64,
    /// Disk layers of its own.
    disk_gib_hours: f64,
    /// Its snapshots.
    snapshot_gib_hours: f64,
    /// Sent to the outside.
    egress_bytes: u64,
    cost: CostView,
}

/// Dollars, exact to the nano-dollar.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = Cost)]
struct CostView {
    cpu: f64,
    memory: f64,
    disk: f64,
    snapshots: f64,
    egress: f64,
    total: f64,
}

/// Dollars per unit.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct PriceList {
    vcpu_second: f64,
    memory_gib_second: f64,
    disk_gib_hour: f64,
    snapshot_gib_hour: f64,
    egress_gib: f64,
}

impl Used {
    fn new(usage: &Usage, costs: &Costs) -> Self {
        let dollars = |nano: u64| nano as f64 / NANO;
        Self {
            running_seconds: usage.running_ms as f64 / 1e3,
            paused_seconds: usage.paused_ms as f64 / 1e3,
            vcpu_seconds: usage.vcpu_seconds(),
            memory_gib_seconds: usage.memory_gib_seconds(),
            disk_gib_hours: usage.disk_gib_hours(),
            snapshot_gib_hours: usage.snapshot_gib_hours(),
            egress_bytes: u64::try_from(usage.egress_bytes).unwrap_or(u64::MAX),
            cost: CostView {
                cpu: dollars(costs.cpu),
                memory: dollars(costs.memory),
                disk: dollars(costs.disk),
                snapshots: dollars(costs.snapshots),
                egress: dollars(costs.egress),
                total: dollars(costs.total()),
            },
        }
    }
}

impl From<Prices> for PriceList {
    fn from(prices: Prices) -> Self {
        let dollars = |nano: u64| nano as f64 / NANO;
        Self {
            vcpu_second: dollars(prices.vcpu_second),
            memory_gib_second: dollars(prices.memory_gib_second),
            disk_gib_hour: dollars(prices.disk_gib_hour),
            snapshot_gib_hour: dollars(prices.snapshot_gib_hour),
            egress_gib: dollars(prices.egress_gib),
        }
    }
}

impl From<UsageReportRow> for UsageItem {
    fn from(row: UsageReportRow) -> Self {
        let used = Used::new(&row.usage, &row.costs);
        let (sandbox, template, metadata) = match row.sandbox {
            Some(used_by) => (Some(used_by.id.to_string()), Some(used_by.template_name), used_by.metadata),
            None => (None, None, BTreeMap::new()),
        };
        Self { sandbox, template, metadata, label: row.label, from: show_time(row.from), to: show_time(row.to), used }
    }
}

/// What was used up to this moment, and what it costs by this server's prices. All conditions hold. Rows of
/// adjoining times add up to the row of the whole.
#[utoipa::path(
    get,
    path = "/v1/usage",
    tag = "usage",
    params(
        ("sandbox" = Option<String>, Query, description = "Of this sandbox; also one whose record is gone."),
        ("metadata" = Option<Vec<String>>, Query, description = "`KEY=VALUE`; may be repeated, all must match."),
        ("from" = Option<String>, Query, description = "From this time on (RFC 3339)."),
        ("to" = Option<String>, Query, description = "Before this time (RFC 3339)."),
        ("by" = Option<String>, Query, description = "What makes a row: `sandbox` (the default) or `label:KEY`."),
        ("step" = Option<String>, Query, description = "A row per `hour` or `day`, UTC; left out: one for the whole time."),
        ("format" = Option<String>, Query, description = "`json` (the default) or `csv`."),
    ),
    responses((status = 200, content((UsageReport = "application/json"), (String = "text/csv"))))
)]
async fn usage(
    State(state): State<AppState>,
    caller: Caller,
    QueryPairs(pairs): QueryPairs,
) -> Result<Response, ApiError> {
    let (filter, is_csv) = usage_filter(pairs)?;
    let rows = state.service.usage_report(&caller.0, &filter).await?;
    if is_csv {
        return Ok(([(header::CONTENT_TYPE, "text/csv; charset=utf-8")], csv(&rows)).into_response());
    }
    let (mut usage, mut costs) = (Usage::default(), Costs::default());
    for row in &rows {
        usage += row.usage;
        costs += row.costs;
    }
    let total = Used::new(&usage, &costs);
    let items = rows.into_iter().map(UsageItem::from).collect();
    Ok(axum::Json(UsageReport { items, total, prices: state.service.prices().into() }).into_response())
}

/// The conditions, and whether CSV is wanted.
fn usage_filter(pairs: Vec<(String, String)>) -> Result<(UsageFilter, bool), ApiError> {
    let (mut filter, mut is_csv) = (UsageFilter::default(), false);
    let mut seen = Vec::new();
    for (name, value) in pairs {
        query::once(&mut seen, &name, "metadata")?;
        match name.as_str() {
            "sandbox" => filter.sandbox = Some(sandbox_id(&value)?),
            "metadata" => query::add_label(&mut filter.metadata, &name, &value)?,
            "from" => filter.from = Some(time("from", &value)?),
            "to" => filter.to = Some(time("to", &value)?),
            "by" => {
                filter.group = match value.strip_prefix("label:") {
                    Some(key) => UsageGroup::Label(key.to_owned()),
                    None if value == "sandbox" => UsageGroup::Sandbox,
                    None => return Err(ApiError::invalid("query: `by` must be `sandbox` or `label:KEY`")),
                }
            }
            "step" => {
                filter.step = match value.as_str() {
                    "hour" => Some(UsageStep::Hour),
                    "day" => Some(UsageStep::Day),
                    _ => return Err(ApiError::invalid("query: `step` must be `hour` or `day`")),
                }
            }
            "format" => {
                is_csv = match value.as_str() {
                    "csv" => true,
                    "json" => false,
                    _ => return Err(ApiError::invalid("query: `format` must be `json` or `csv`")),
                }
            }
            _ => {
                return Err(query::unknown("`sandbox`, `metadata`, `from`, `to`, `by`, `step`, `format`"));
            }
        }
    }
    Ok((filter, is_csv))
}

fn time(name: &str, text: &str) -> Result<Timestamp, ApiError> {
    let problem = || ApiError::invalid(format!("query: `{name}` must be a time like 2026-01-31T12:00:00Z"));
    text.parse().map_err(|_| problem())
}

const COLUMNS: &str = "sandbox,template,label,metadata,from,to,running_seconds,paused_seconds,vcpu_seconds,\
memory_gib_seconds,disk_gib_hours,snapshot_gib_hours,egress_bytes,cost_cpu,cost_memory,cost_disk,cost_snapshots,\
cost_egress,cost_total\r\n";

/// One line per row below a line of names, as RFC 4180 has it. Costs are decimal dollars, exact.
fn csv(rows: &[UsageReportRow]) -> String {
    let mut text = COLUMNS.to_owned();
    for row in rows {
        let (usage, costs) = (&row.usage, &row.costs);
        let (sandbox, template, metadata) = match &row.sandbox {
            Some(used_by) => {
                let labels = serde_json::to_string(&used_by.metadata).unwrap_or_default();
                (used_by.id.to_string(), used_by.template_name.clone(), labels)
            }
            None => Default::default(),
        };
        let words = [sandbox, template, row.label.clone().unwrap_or_default(), metadata];
        let times = [show_time(row.from), show_time(row.to)];
        let amounts = [
            milli(usage.running_ms),
            milli(usage.paused_ms),
            usage.vcpu_seconds().to_string(),
            usage.memory_gib_seconds().to_string(),
            usage.disk_gib_hours().to_string(),
            usage.snapshot_gib_hours().to_string(),
            usage.egress_bytes.to_string(),
        ];
        let dollars =
            [costs.cpu, costs.memory, costs.disk, costs.snapshots, costs.egress, costs.total()].map(decimal_dollars);
        let cells: Vec<_> = words.iter().map(|word| cell(word)).chain(times).chain(amounts).chain(dollars).collect();
        text.push_str(&cells.join(","));
        text.push_str("\r\n");
    }
    text
}

/// Free text as a cell. One that a spreadsheet would take for a formula is marked as text.
fn cell(text: &str) -> String {
    let guarded = if text.starts_with(['=', '+', '-', '@', '\t', '\r']) { format!("'{text}") } else { text.to_owned() };
    if guarded.contains([',', '"', '\n', '\r']) { format!("\"{}\"", guarded.replace('"', "\"\"")) } else { guarded }
}

fn milli(ms: u128) -> String {
    format!("{}.{:03}", ms / 1000, ms % 1000)
}

fn decimal_dollars(nano: u64) -> String {
    format!("{}.{:09}", nano / 1_000_000_000, nano % 1_000_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(pairs: &[(&str, &str)]) -> Result<(UsageFilter, bool), String> {
        let pairs = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        usage_filter(pairs).map_err(|error| error.message)
    }

    #[test]
    fn conditions_are_read_and_nonsense_is_named() {
        let (found, is_csv) =
            filter(&[("metadata", "team=a"), ("by", "label:team"), ("step", "day"), ("format", "csv")])
                .expect("a filter");
        assert_eq!((found.group, found.step), (UsageGroup::Label("team".to_owned()), Some(UsageStep::Day)));
        assert!(is_csv && found.metadata["team"] == "a");
        let bad = [
            ("sandbox", "x"),
            ("from", "yesterday"),
            ("to", "12:00"),
            ("by", "team"),
            ("step", "minute"),
            ("format", "xml"),
            ("metadata", "a"),
            ("x", ""),
        ];
        for pair in bad {
            assert!(filter(&[pair]).is_err(), "{pair:?}");
        }
        assert!(filter(&[("step", "day"), ("step", "hour")]).is_err());
    }

    #[test]
    fn a_label_is_a_cell_whatever_it_holds() {
        assert_eq!(cell("plain"), "plain");
        assert_eq!(cell("a,\"b\"\n"), "\"a,\"\"b\"\"\n\"");
        assert_eq!(cell("=cmd()"), "'=cmd()");
        assert_eq!((milli(61_007), decimal_dollars(4_500)), ("61.007".to_owned(), "0.000004500".to_owned()));
    }
}
