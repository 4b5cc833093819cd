//! Samples and what is told of them.

use serde::Serialize;

/// Numbers of one kind, and how often there was none.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Samples {
    pub(super) values: Vec<f64>,
    pub(super) failures: Vec<String>,
}

/// What is told of samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Summary {
    pub(super) count: usize,
    pub(super) failures: usize,
    pub(super) p50: f64,
    pub(super) p95: f64,
    pub(super) max: f64,
}

impl Samples {
    pub(super) fn push<E: std::fmt::Display>(&mut self, value: Result<f64, E>) {
        match value {
            Ok(value) => self.values.push(value),
            Err(error) => self.failures.push(error.to_string()),
        }
    }

    pub(super) fn summary(&self) -> Summary {
        let mut sorted = self.values.clone();
        sorted.sort_by(f64::total_cmp);
        Summary {
            count: sorted.len(),
            failures: self.failures.len(),
            p50: quantile(&sorted, 0.5),
            p95: quantile(&sorted, 0.95),
            max: sorted.last().copied().unwrap_or(f64::NAN),
        }
    }

    pub(super) fn median(&self) -> f64 {
        self.summary().p50
    }
}

/// The smallest value that at least this share of the values does not exceed.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_were_measured() {
        let mut samples = Samples::default();
        (1..=20).rev().for_each(|value| samples.push(Ok::<_, String>(f64::from(value))));
        samples.push(Err("refused"));
        let Summary { count, failures, p50, p95, max } = samples.summary();
        assert_eq!((count, failures), (20, 1));
        assert_eq!((p50, p95, max), (10.0, 19.0, 20.0));
        assert!(Samples::default().summary().p50.is_nan());
    }
}
