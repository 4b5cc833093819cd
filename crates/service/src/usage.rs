//! What was used, by sandbox and time, and what it costs.

use std::{collections::BTreeMap, sync::Arc};

use jiff::Timestamp;
use stockade_model::{Costs, Prices, SandboxId, Usage};
use stockade_store::{UsageQuery, UsageRow};

use crate::{Principal, Service, ServiceError, error::store_error};

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
}

/// What one sandbox, its snapshots included, used in the time asked for.
#[derive(Clone, Debug)]
pub struct UsageReportRow {
    /// The sandbox; its record may be gone already.
    pub sandbox: SandboxId,
    /// The template it was made from.
    pub template_name: String,
    /// Its labels.
    pub metadata: BTreeMap<String, String>,
    /// The first moment that is counted.
    pub from: Timestamp,
    /// The last.
    pub to: Timestamp,
    /// What it used.
    pub usage: Usage,
    /// What that costs by the server's prices.
    pub costs: Costs,
}

impl Service {
    /// Usage up to this moment, one row per sandbox. Rows of adjoining times add up to the row of the whole.
    ///
    /// # Errors
    /// The times make no sense, or the store fails.
    pub async fn usage_report(
        &self,
        who: &Principal,
        filter: &UsageFilter,
    ) -> Result<Vec<UsageReportRow>, ServiceError> {
        if let (Some(from), Some(to)) = (filter.from, filter.to)
            && from >= to
        {
            return Err(ServiceError::Invalid { field: "from", problem: "must be before `to`".to_owned() });
        }
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
        let rows = found.into_iter().filter_map(|(metered, rows)| {
            let mut parts = rows.iter().map(|row| part(row, filter));
            let (mut from, mut to, mut usage) = parts.next()?;
            for (part_from, part_to, part) in parts {
                (from, to) = (from.min(part_from), to.max(part_to));
                usage += part;
            }
            let (sandbox, template_name, metadata) = (metered.sandbox, metered.template_name, metered.metadata);
            let costs = usage.costs(&core.config.prices);
            Some(UsageReportRow { sandbox, template_name, metadata, from, to, usage, costs })
        });
        Ok(rows.collect())
    }

    /// What usage costs.
    pub fn prices(&self) -> Prices {
        self.handle.core.config.prices
    }
}

/// What of a row falls into the time asked for. Within a row use is taken as even; cutting it at a point gives
/// two parts whose sum is the row.
fn part(row: &UsageRow, filter: &UsageFilter) -> (Timestamp, Timestamp, Usage) {
    let from = filter.from.map_or(row.from, |from| from.clamp(row.from, row.to));
    let to = filter.to.map_or(row.to, |to| to.clamp(from, row.to));
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
            usage: Usage { cpu_micros: 1_000_003, memory_byte_ms: 77_777_777_777, ..Usage::default() },
        };
        for cut in [1000, 1001, 3333, 8918, 8919] {
            let mut sum = part(&row, &UsageFilter { to: Some(at(cut)), ..<_>::default() }).2;
            sum += part(&row, &UsageFilter { from: Some(at(cut)), ..<_>::default() }).2;
            let whole = Usage { running_ms: 7919, ..row.usage };
            assert_eq!(sum, whole, "cut at {cut}");
        }
    }
}
