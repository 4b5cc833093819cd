//! What was used and what it costs, in whole numbers: sums of many small parts are exact.

use std::ops::AddAssign;

const GIB: u128 = 1 << 30;
const MS_PER_SECOND: u128 = 1000;
const MS_PER_HOUR: u128 = 3_600_000;

/// What was used in some stretch of time.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Usage {
    /// Processor time really used, microseconds.
    pub cpu_micros: u128,
    /// Memory really held (shared pages counted once), bytes times milliseconds.
    pub memory_byte_ms: u128,
    /// Disk layers of its own, bytes times milliseconds.
    pub disk_byte_ms: u128,
    /// Snapshots, bytes times milliseconds.
    pub snapshot_byte_ms: u128,
    /// Bytes sent to the outside.
    pub egress_bytes: u128,
    /// Milliseconds it took commands.
    pub running_ms: u128,
    /// Milliseconds it was paused, in whatever tier, or stopped.
    pub paused_ms: u128,
}

impl AddAssign for Usage {
    fn add_assign(&mut self, other: Self) {
        self.cpu_micros += other.cpu_micros;
        self.memory_byte_ms += other.memory_byte_ms;
        self.disk_byte_ms += other.disk_byte_ms;
        self.snapshot_byte_ms += other.snapshot_byte_ms;
        self.egress_bytes += other.egress_bytes;
        self.running_ms += other.running_ms;
        self.paused_ms += other.paused_ms;
    }
}

impl Usage {
    /// Each number by itself changed.
    #[must_use]
    pub fn map(self, change: impl Fn(u128) -> u128) -> Self {
        Self {
            cpu_micros: change(self.cpu_micros),
            memory_byte_ms: change(self.memory_byte_ms),
            disk_byte_ms: change(self.disk_byte_ms),
            snapshot_byte_ms: change(self.snapshot_byte_ms),
            egress_bytes: change(self.egress_bytes),
            running_ms: change(self.running_ms),
            paused_ms: change(self.paused_ms),
        }
    }

    /// Active vCPU-seconds, for show.
    pub fn vcpu_seconds(&self) -> f64 {
        self.cpu_micros as f64 / 1e6
    }

    /// Working-set GiB-seconds, for show.
    pub fn memory_gib_seconds(&self) -> f64 {
        self.memory_byte_ms as f64 / (GIB * MS_PER_SECOND) as f64
    }

    /// GiB-hours of disk, for show.
    pub fn disk_gib_hours(&self) -> f64 {
        self.disk_byte_ms as f64 / (GIB * MS_PER_HOUR) as f64
    }

    /// GiB-hours of snapshots, for show.
    pub fn snapshot_gib_hours(&self) -> f64 {
        self.snapshot_byte_ms as f64 / (GIB * MS_PER_HOUR) as f64
    }

    /// What it costs: each part rounded to the nearest nano-dollar.
    pub fn costs(&self, prices: &Prices) -> Costs {
        let cost = |used: u128, price: u64, unit: u128| {
            let exact = used.saturating_mul(u128::from(price));
            u64::try_from(exact.saturating_add(unit / 2) / unit).unwrap_or(u64::MAX)
        };
        Costs {
            cpu: cost(self.cpu_micros, prices.vcpu_second, 1_000_000),
            memory: cost(self.memory_byte_ms, prices.memory_gib_second, GIB * MS_PER_SECOND),
            disk: cost(self.disk_byte_ms, prices.disk_gib_hour, GIB * MS_PER_HOUR),
            snapshots: cost(self.snapshot_byte_ms, prices.snapshot_gib_hour, GIB * MS_PER_HOUR),
            egress: cost(self.egress_bytes, prices.egress_gib, GIB),
        }
    }
}

/// Nano-dollars per unit.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Prices {
    /// An active vCPU-second.
    pub vcpu_second: u64,
    /// A GiB of memory really held, for a second.
    pub memory_gib_second: u64,
    /// A GiB of disk, for an hour.
    pub disk_gib_hour: u64,
    /// A GiB of snapshots, for an hour.
    pub snapshot_gib_hour: u64,
    /// A GiB to the outside.
    pub egress_gib: u64,
}

impl Default for Prices {
    /// $0.000015 an active vCPU-second, $0.0000045 a working-set GiB-second; the rest is free.
    fn default() -> Self {
        Self { vcpu_second: 15_000, memory_gib_second: 4_500, disk_gib_hour: 0, snapshot_gib_hour: 0, egress_gib: 0 }
    }
}

/// Nano-dollars, by what they are for.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Costs {
    /// Active processors.
    pub cpu: u64,
    /// Working set.
    pub memory: u64,
    /// Disk.
    pub disk: u64,
    /// Snapshots.
    pub snapshots: u64,
    /// Bytes to the outside.
    pub egress: u64,
}

impl AddAssign for Costs {
    fn add_assign(&mut self, other: Self) {
        self.cpu = self.cpu.saturating_add(other.cpu);
        self.memory = self.memory.saturating_add(other.memory);
        self.disk = self.disk.saturating_add(other.disk);
        self.snapshots = self.snapshots.saturating_add(other.snapshots);
        self.egress = self.egress.saturating_add(other.egress);
    }
}

impl Costs {
    /// All of it.
    pub fn total(&self) -> u64 {
        [self.cpu, self.memory, self.disk, self.snapshots, self.egress].into_iter().fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_hour_costs_what_the_price_table_says() {
        let usage = Usage { cpu_micros: 3_600_000_000, memory_byte_ms: GIB * MS_PER_HOUR, ..Usage::default() };
        let costs = usage.costs(&Prices::default());
        assert_eq!(costs, Costs { cpu: 54_000_000, memory: 16_200_000, ..Costs::default() });
        assert_eq!(costs.total(), 70_200_000);
    }

    #[test]
    fn standing_by_costs_next_to_nothing() {
        let usage = Usage { memory_byte_ms: (30 << 20) * MS_PER_HOUR, ..Usage::default() };
        assert!(usage.costs(&Prices::default()).total() < 500_000, "under $0.0005 an hour");
    }

    #[test]
    fn parts_are_rounded_to_the_nearest_nano_dollar() {
        let costs = |cpu_micros| Usage { cpu_micros, ..Usage::default() }.costs(&Prices::default()).cpu;
        assert_eq!([costs(0), costs(33), costs(34), costs(100)], [0, 0, 1, 2]);
    }
}
