//! What was used, by sandbox, label and time, and what it costs.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use stockade_model::{Costs, Prices, SandboxId, Usage};
use stockade_store::{Metered, UsageQuery, UsageRow};

use crate::{Principal, Service, ServiceError, error::store_error};

/// A longer report is refused: nobody reads it, and it is made in memory.
const MOST_ROWS: usize = 100_000;
const LONGEST_LABEL: usize = 256;

/// Which usage: all conditions hold.
#[derive(Clone, Debug, Default)]
pub struct UsageFilter {
    /// Of this sandbox.
    pub sandbox: Option<SandboxId>,
    /// Of sandboxes with all of these labels.
    pub metadata: BTreeMap<String, String>,
    /// From this time on.
    pub from: Option<Timestamp>,
    /// Before this time.
    pub to: Option<Timestamp>,
    /// What makes a row.
    pub group: UsageGroup,
    /// One row per such stretch of time, counted from midnight UTC; `None`: one for the whole time.
    pub step: Option<UsageStep>,
}

/// What makes a row of a report.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub enum UsageGroup {
    /// One sandbox.
    #[default]
    Sandbox,
    /// All sandboxes with the same value of this label; those without it are one row.
    Label(String),
}

/// A stretch of time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum UsageStep {
    /// From full hour to full hour.
    Hour,
    /// From midnight UTC to midnight UTC.
    Day,
}

impl UsageStep {
    fn length(self) -> Duration {
        match self {
            Self::Hour => Duration::from_secs(3600),
            Self::Day => Duration::from_secs(24 * 3600),
        }
    }

    /// The stretches a time lies in, each cut to it.
    fn cut(self, from: Timestamp, to: Timestamp) -> impl Iterator<Item = (Timestamp, Timestamp)> {
        let length = i64::try_from(self.length().as_millis()).unwrap_or(i64::MAX);
        let (from, to) = (from.as_millisecond(), to.as_millisecond());
        let at = |ms| Timestamp::from_millisecond(ms).unwrap_or(Timestamp::MAX);
        let first = from.div_euclid(length);
        let last = (to - 1).div_euclid(length).max(first);
        (first..=last).map(move |nth| (at((nth * length).max(from)), at(((nth + 1) * length).min(to))))
    }
}

/// What a sandbox, its snapshots included, or all sandboxes of a label's value used in a stretch of time.
#[derive(Clone, Debug)]
pub struct UsageReportRow {
    /// Where sandboxes make the rows: which. Its record may be gone already.
    pub sandbox: Option<UsedBy>,
    /// Where a label makes the rows: its value. `None`: those without it.
    pub label: Option<String>,
    /// The first moment that is counted.
    pub from: Timestamp,
    /// The last.
    pub to: Timestamp,
    /// What was used.
    pub usage: Usage,
    /// What that costs by the server's prices.
    pub costs: Costs,
}

/// Whose a row is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct UsedBy {
    /// Its id.
    pub id: SandboxId,
    /// The template it was made from.
    pub template_name: String,
    /// Its labels.
    pub metadata: BTreeMap<String, String>,
}

/// A row that is being added up.
struct Sum {
    used_by: Option<UsedBy>,
    from: Timestamp,
    to: Timestamp,
    usage: Usage,
}

impl Service {
    /// Usage up to this moment, in order of time within each sandbox or label. Rows of adjoining times add up to
    /// the row of the whole.
    ///
    /// # Errors
    /// The times make no sense, the report would be too long, or the store fails.
    pub async fn usage_report(
        &self,
        who: &Principal,
        filter: &UsageFilter,
    ) -> Result<Vec<UsageReportRow>, ServiceError> {
        check(filter)?;
        let core = &self.handle.core;
        // In a task of its own: a caller that goes away must not cut a transaction off.
        let (task, (done, written)) = (Arc::clone(core), tokio::sync::oneshot::channel());
        core.spawn(async move { drop(done.send(task.meter.flush(&task).await)) });
        written.await.map_err(|_| self.cut_off("report"))?.map_err(store_error)?;
        let query = UsageQuery {
            sandbox: filter.sandbox.clone(),
            metadata: filter.metadata.clone(),
            from: filter.from,
            to: filter.to,
        };
        let found = self.store().usage(&who.workspace, &query).await.map_err(store_error)?;
        add_up(found, filter, &core.config.prices)
    }

    /// What usage costs.
    pub fn prices(&self) -> Prices {
        self.handle.core.config.prices
    }
}

fn check(filter: &UsageFilter) -> Result<(), ServiceError> {
    if let (Some(from), Some(to)) = (filter.from, filter.to)
        && from >= to
    {
        return Err(ServiceError::Invalid { field: "from", problem: "must be before `to`".to_owned() });
    }
    if let UsageGroup::Label(name) = &filter.group
        && (name.is_empty() || name.len() > LONGEST_LABEL)
    {
        let problem = format!("must name a label of 1 to {LONGEST_LABEL} bytes");
        return Err(ServiceError::Invalid { field: "by", problem });
    }
    Ok(())
}

fn add_up(
    found: Vec<(Metered, Vec<UsageRow>)>,
    filter: &UsageFilter,
    prices: &Prices,
) -> Result<Vec<UsageReportRow>, ServiceError> {
    let mut sums: BTreeMap<(Option<String>, Timestamp), Sum> = BTreeMap::new();
    for (metered, rows) in found {
        let (group, used_by) = group(metered, &filter.group);
        for row in &rows {
            let (from, to, _) = part(row, filter.from, filter.to);
            let stretches: Vec<_> = match filter.step {
                Some(step) => step.cut(from, to).collect(),
                None => vec![(from, to)],
            };
            for (from, to) in stretches {
                let (from, to, usage) = part(row, Some(from), Some(to));
                // Rows of the whole time have one place; rows of a stretch are told apart by its number.
                let place = filter.step.map_or(Timestamp::UNIX_EPOCH, |step| begin(step, from));
                let sum = sums.entry((group.clone(), place)).or_insert_with(|| Sum {
                    used_by: used_by.clone(),
                    from,
                    to,
                    usage: Usage::default(),
                });
                (sum.from, sum.to) = (sum.from.min(from), sum.to.max(to));
                sum.usage += usage;
            }
            if sums.len() > MOST_ROWS {
                let problem = format!("gives over {MOST_ROWS} rows: ask for a shorter time or longer steps");
                return Err(ServiceError::Invalid { field: "step", problem });
            }
        }
    }
    let is_by_label = matches!(filter.group, UsageGroup::Label(_));
    let rows = sums.into_iter().map(|((group, _), sum)| UsageReportRow {
        sandbox: sum.used_by,
        label: group.filter(|_| is_by_label),
        from: sum.from,
        to: sum.to,
        costs: sum.usage.costs(prices),
        usage: sum.usage,
    });
    Ok(rows.collect())
}

/// In which row a sandbox's usage goes.
fn group(metered: Metered, group: &UsageGroup) -> (Option<String>, Option<UsedBy>) {
    match group {
        UsageGroup::Sandbox => {
            let Metered { sandbox: id, template_name, metadata, .. } = metered;
            (Some(id.to_string()), Some(UsedBy { id, template_name, metadata }))
        }
        UsageGroup::Label(name) => (metered.metadata.get(name).cloned(), None),
    }
}

/// The begin of the stretch a moment lies in.
fn begin(step: UsageStep, at: Timestamp) -> Timestamp {
    let length = i64::try_from(step.length().as_millis()).unwrap_or(i64::MAX);
    Timestamp::from_millisecond(at.as_millisecond().div_euclid(length) * length).unwrap_or(at)
}

/// What of a row falls into the time asked for. Within a row use is taken as even; cutting it at a point gives
/// two parts whose sum is the row.
fn part(row: &UsageRow, from: Option<Timestamp>, to: Option<Timestamp>) -> (Timestamp, Timestamp, Usage) {
    let from = from.map_or(row.from, |from| from.clamp(row.from, row.to));
    let to = to.map_or(row.to, |to| to.clamp(from, row.to));
    let since = |at: Timestamp| u128::try_from(at.as_millisecond() - row.from.as_millisecond()).unwrap_or_default();
    let (whole, begin, end) = (since(row.to), since(from), since(to));
    let mut usage = if begin == 0 && end == whole {
        row.usage
    } else {
        row.usage.map(|total| total * end / whole.max(1) - total * begin / whole.max(1))
    };
    match row.state.as_str() {
        "running" => usage.running_ms = end - begin,
        "snapshot" => {}
        _ => usage.paused_ms = end - begin,
    }
    (from, to, usage)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_cut_anywhere_adds_up_to_itself() {
        let at = |ms| Timestamp::from_millisecond(ms).expect("in range");
        let row = UsageRow {
            subject: "s".to_owned(),
            sequence: 0,
            sandbox: SandboxId::random(),
            state: "running".to_owned(),
            from: at(1000),
            to: at(8919),
            machine: None,
            cpu_seen: 0,
            memory_seen: 0,
            disk_seen: 0,
            usage: Usage { cpu_micros: 1_000_003, memory_byte_ms: 77_777_777_777, ..Usage::default() },
        };
        for cut in [1000, 1001, 3333, 8918, 8919] {
            let mut sum = part(&row, None, Some(at(cut))).2;
            sum += part(&row, Some(at(cut)), None).2;
            let whole = Usage { running_ms: 7919, ..row.usage };
            assert_eq!(sum, whole, "cut at {cut}");
        }
    }

    #[test]
    fn stretches_begin_and_end_on_the_full_hour_and_leave_nothing_out() {
        let at = |text: &str| text.parse::<Timestamp>().expect("a time");
        let cut = |from: &str, to: &str| UsageStep::Hour.cut(at(from), at(to)).collect::<Vec<_>>();
        let (one, two) = ("2026-01-01T00:59:59.5Z", "2026-01-01T02:00:00Z");
        let (hour, next) = (at("2026-01-01T01:00:00Z"), at("2026-01-01T02:00:00Z"));
        assert_eq!(cut(one, two), [(at(one), hour), (hour, next)]);
        assert_eq!(cut(two, two), [(next, next)]);
    }
}
