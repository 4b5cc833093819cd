//! The speed of the host's time stamp counter, which an emulated guest's kernel must be told.

use std::{
    sync::OnceLock,
    time::{Duration, Instant},
};

const SAMPLE: Duration = Duration::from_millis(25);

/// Ticks of the time stamp counter in a millisecond. Measured once: the frequency that `/proc/cpuinfo`
/// shows is the processor's current one on most hosts, not the counter's.
pub(crate) fn tsc_khz() -> u64 {
    static KHZ: OnceLock<u64> = OnceLock::new();
    *KHZ.get_or_init(measure)
}

fn measure() -> u64 {
    // The best of a few: a sample during which we were not running is too long, never too short.
    (0..3).map(|_| sample()).min().unwrap_or(1_000_000)
}

#[cfg(target_arch = "x86_64")]
fn sample() -> u64 {
    // SAFETY: every x86-64 processor has the instruction.
    let ticks = || unsafe { core::arch::x86_64::_rdtsc() };
    let (before, start) = (ticks(), Instant::now());
    std::thread::sleep(SAMPLE);
    let (after, elapsed) = (ticks(), start.elapsed());
    let micros = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX).max(1);
    (after.wrapping_sub(before) / micros).saturating_mul(1000) + (after.wrapping_sub(before) % micros) * 1000 / micros
}

#[cfg(not(target_arch = "x86_64"))]
fn sample() -> u64 {
    let _ = (Instant::now(), SAMPLE);
    1_000_000
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_counter_has_a_plausible_speed() {
        let khz = super::tsc_khz();
        assert!((100_000..20_000_000).contains(&khz), "{khz}");
    }
}
