//! The speed of the host's time stamp counter, which an emulated guest's kernel must be told.

use std::{
    sync::OnceLock,
    time::{Duration, Instant},
};

#[cfg(target_arch = "x86_64")]
const SAMPLE: Duration = Duration::from_millis(25);
#[cfg(any(test, target_arch = "x86_64"))]
const READINGS: usize = 8;

/// Ticks of the time stamp counter in a millisecond. Measured once: the frequency that `/proc/cpuinfo`
/// shows is the processor's current one on most hosts, not the counter's.
pub(crate) fn tsc_khz() -> u64 {
    static KHZ: OnceLock<u64> = OnceLock::new();
    *KHZ.get_or_init(measure)
}

#[cfg(target_arch = "x86_64")]
fn measure() -> u64 {
    let mut read = || {
        let before = Instant::now();
        // SAFETY: every x86-64 processor has the instruction.
        let ticks = unsafe { core::arch::x86_64::_rdtsc() };
        Reading { before, ticks, after: Instant::now() }
    };
    let first = Reading::best_of(&mut read);
    std::thread::sleep(SAMPLE);
    Reading::best_of(&mut read).khz_since(&first)
}

#[cfg(not(target_arch = "x86_64"))]
fn measure() -> u64 {
    1_000_000
}

/// The counter, read between two looks at the clock.
#[cfg(any(test, target_arch = "x86_64"))]
#[derive(Clone, Copy, Debug)]
struct Reading {
    before: Instant,
    ticks: u64,
    after: Instant,
}

#[cfg(any(test, target_arch = "x86_64"))]
impl Reading {
    /// The one of a few that was interrupted least. A process that has to wait for a processor between the
    /// clock and the counter would see a counter that is too fast or too slow.
    fn best_of(read: &mut impl FnMut() -> Self) -> Self {
        let mut best = read();
        for _ in 1..READINGS {
            let one = read();
            best = if one.width() < best.width() { one } else { best };
        }
        best
    }

    fn width(&self) -> Duration {
        self.after - self.before
    }

    fn khz_since(&self, earlier: &Self) -> u64 {
        let micros = (self.before + self.width() / 2) - (earlier.before + earlier.width() / 2);
        let micros = micros.as_micros().max(1);
        let khz = u128::from(self.ticks.wrapping_sub(earlier.ticks)) * 1000 / micros;
        u64::try_from(khz).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counter_has_a_plausible_speed() {
        let khz = tsc_khz();
        assert!((100_000..20_000_000).contains(&khz), "{khz}");
    }

    #[test]
    fn a_process_that_had_to_wait_between_clock_and_counter_measures_the_same_speed() {
        let begin = Instant::now();
        let at = |micros: u64| begin + Duration::from_micros(micros);
        // Two ticks in a microsecond. All readings but one are interrupted, before or after the counter is read.
        let reading = |micros: u64, late: bool, wait: u64| {
            let ticks = 2 * (micros + if late { wait } else { 0 });
            Reading { before: at(micros), ticks, after: at(micros + wait) }
        };
        for late in [false, true] {
            let mut number = 0;
            let mut read = |start: u64| {
                number += 1;
                reading(start + number * 9000, late, if number % READINGS as u64 == 3 { 1 } else { number * 1000 })
            };
            let first = Reading::best_of(&mut || read(0));
            let second = Reading::best_of(&mut || read(25_000));
            let khz = second.khz_since(&first);
            assert!((1995..=2005).contains(&khz), "{khz}");
        }
    }
}
