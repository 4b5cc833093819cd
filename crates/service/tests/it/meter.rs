//! What is counted is what was used: no moment twice, none left out, whatever happens to the server.

use std::time::Duration;

use jiff::Timestamp;
use stockade_model::{Costs, Prices, SandboxId, SandboxState};
use stockade_service::{CreateSandbox, ForkRequest, UsageFilter, UsageGroup, UsageReportRow, UsageStep};

use crate::{
    states::{HIBERNATED, MODES, STANDBY},
    support::{TestServer, labels, request, within},
};

impl TestServer {
    async fn used(&self, filter: &UsageFilter) -> Vec<UsageReportRow> {
        within(self.service.usage_report(&self.who, filter)).await.expect("a report")
    }

    async fn used_by(&self, id: &SandboxId) -> UsageReportRow {
        let filter = UsageFilter { sandbox: Some(id.clone()), ..UsageFilter::default() };
        let mut rows = self.used(&filter).await;
        assert_eq!(rows.len(), 1, "{rows:?}");
        rows.remove(0)
    }

    /// When it came into and went out of each state that is counted, by its record.
    async fn times(&self, id: &SandboxId) -> Vec<(SandboxState, Timestamp)> {
        let events = self.service.events(&self.who, id).await.expect("events");
        let is_counted = |state| {
            !matches!(
                state,
                SandboxState::Creating | SandboxState::Pausing | SandboxState::Resuming | SandboxState::Gone
            )
        };
        events.into_iter().filter(|event| is_counted(event.state)).map(|event| (event.state, event.at)).collect()
    }
}

/// Milliseconds in which it took commands, and in which it did not.
fn lengths(times: &[(SandboxState, Timestamp)]) -> (u128, u128) {
    let (mut running, mut paused) = (0, 0);
    for pair in times.windows(2) {
        let ms = u128::try_from(pair[1].1.as_millisecond() - pair[0].1.as_millisecond()).expect("in order");
        if pair[0].0 == SandboxState::Running { running += ms } else { paused += ms }
    }
    (running, paused)
}

#[tokio::test]
async fn every_millisecond_is_counted_once_whatever_becomes_of_the_server() {
    // Without crashes; with crashes after which the last rows are not written; with rows written in between.
    for (crashes, is_written) in [(false, false), (true, false), (true, true)] {
        let mut t = TestServer::start().await;
        let sandbox = t.create().await;
        let mut cpu = 0;
        for mode in MODES.into_iter().chain(MODES) {
            tokio::time::sleep(Duration::from_millis(7)).await;
            t.host.use_cpu(&t.get(&sandbox.id).await.machine.expect("machine"), 1_000);
            if is_written || !crashes {
                // Counted only where it is read before its machine is gone with a crash.
                t.used_by(&sandbox.id).await;
                cpu += 1_000;
            }
            t.pause(&sandbox.id, mode).await;
            if crashes {
                t.crash().await;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
            t.resume(&sandbox.id).await;
            if crashes {
                t.crash().await;
            }
        }
        t.kill(&sandbox.id).await.expect("killed");
        if crashes {
            t.crash().await;
        }
        let used = t.used_by(&sandbox.id).await;
        let times = t.times(&sandbox.id).await;
        let told = format!("crashes {crashes}, written {is_written}: {times:?}");
        let (running, paused) = lengths(&times);
        assert_eq!((used.usage.running_ms, used.usage.paused_ms), (running, paused), "{told}");
        assert_eq!((used.from, used.to), (times[0].1, times.last().expect("some").1), "{told}");
        if is_written || !crashes {
            assert_eq!(used.usage.cpu_micros, cpu, "{told}");
        }
        // The fake machine holds 2 MiB while it is there, which is at least while the sandbox runs. After a crash it is
        // known what was written last.
        let seen = if is_written || !crashes { running } else { 0 };
        assert!(used.usage.memory_byte_ms >= (2 << 20) * seen, "{told}: {used:?}");
        assert!(used.usage.memory_byte_ms <= (2 << 20) * (running + paused), "{told}: {used:?}");
    }
}

#[tokio::test]
async fn processor_time_is_the_machines_own_and_survives_a_crash() {
    let mut t = TestServer::start().await;
    let sandbox = t.create().await;
    let machine = sandbox.machine.clone().expect("machine");
    let mut cpu = 0;
    for step in 1..=4 {
        t.host.use_cpu(&machine, step * 1_500_000);
        cpu += u128::from(step) * 1_500_000;
        if step % 2 == 0 {
            // What it used while no server looked, and whatever was not written, is in its own counter.
            t.crash().await;
        }
        assert_eq!(t.used_by(&sandbox.id).await.usage.cpu_micros, cpu);
    }
    let used = t.used_by(&sandbox.id).await;
    let prices = Prices::default();
    assert_eq!(used.costs.cpu, u64::try_from(cpu).expect("small") * prices.vcpu_second / 1_000_000);
    assert_eq!(used.costs, used.usage.costs(&prices));
    // A restored machine's counter begins again, and making it is not charged.
    t.pause(&sandbox.id, HIBERNATED).await;
    t.resume(&sandbox.id).await;
    assert_eq!(t.used_by(&sandbox.id).await.usage.cpu_micros, cpu);
    t.host.use_cpu(&t.get(&sandbox.id).await.machine.expect("machine"), 7);
    t.pause(&sandbox.id, STANDBY).await;
    assert_eq!(t.used_by(&sandbox.id).await.usage.cpu_micros, cpu + 7);
}

#[tokio::test]
async fn usage_adds_up_by_label_hour_and_time() {
    let t = TestServer::start().await;
    let make = async |team: &str| {
        let wanted = CreateSandbox { metadata: labels([("team", team)]), ..request() };
        t.try_create(wanted).await.expect("created")
    };
    let (one, two, other) = (make("a").await, make("a").await, make("b").await);
    let lone = t.create().await;
    for (nth, sandbox) in [&one, &two, &other, &lone].into_iter().enumerate() {
        t.host.use_cpu(sandbox.machine.as_ref().expect("machine"), 1_000 * (nth as u64 + 1));
    }
    let children = ForkRequest { count: 2, ..ForkRequest::default() };
    within(t.service.fork(&t.who, &one.id, children)).await.expect("forked");
    tokio::time::sleep(Duration::from_millis(5)).await;
    for sandbox in t.everything().await {
        t.kill(&sandbox.id).await.expect("killed");
    }
    let by_sandbox = t.used(&UsageFilter::default()).await;
    assert_eq!(by_sandbox.len(), 6, "the children are counted for themselves");
    let by_label = t.used(&UsageFilter { group: UsageGroup::Label("team".to_owned()), ..<_>::default() }).await;
    let found: Vec<_> = by_label.iter().map(|row| (row.label.as_deref(), row.usage.cpu_micros)).collect();
    assert_eq!(found, [(None, 4_000), (Some("a"), 3_000), (Some("b"), 3_000)]);

    let of_a = UsageFilter { metadata: labels([("team", "a")]), ..UsageFilter::default() };
    assert_eq!(t.used(&of_a).await.len(), 4);
    let whole = t.used_by(&one.id).await;
    let middle =
        Timestamp::from_millisecond((whole.from.as_millisecond() + whole.to.as_millisecond()) / 2).expect("a time");
    let half = |from, to| UsageFilter { sandbox: Some(one.id.clone()), from, to, ..UsageFilter::default() };
    let mut sum = stockade_model::Usage::default();
    for filter in [half(None, Some(middle)), half(Some(middle), None)] {
        sum += t.used(&filter).await.remove(0).usage;
    }
    assert_eq!(sum, whole.usage);
    for step in [UsageStep::Hour, UsageStep::Day] {
        let rows = t.used(&UsageFilter { sandbox: Some(one.id.clone()), step: Some(step), ..<_>::default() }).await;
        let mut sum = stockade_model::Usage::default();
        rows.iter().for_each(|row| sum += row.usage);
        assert_eq!(sum, whole.usage);
    }
    let stranger = t.stranger().await;
    assert!(within(t.service.usage_report(&stranger, &UsageFilter::default())).await.expect("a report").is_empty());
    let backwards = half(Some(whole.to), Some(whole.from));
    assert!(within(t.service.usage_report(&t.who, &backwards)).await.is_err());
}

#[tokio::test]
async fn an_hour_in_standby_costs_next_to_nothing() {
    // A clock that is an hour ahead once the sandbox stands by: the meter reads the time from it alone.
    let clock = crate::deadlines::SetClock::default();
    let ahead = clock.clone();
    let t = TestServer::start_with(move |config| config.clock = std::sync::Arc::new(ahead.clone())).await;
    let sandbox = t.create().await;
    t.pause(&sandbox.id, STANDBY).await;
    let before = t.used_by(&sandbox.id).await;
    clock.set_off(jiff::SignedDuration::from_hours(1));
    let used = t.used_by(&sandbox.id).await;
    assert!(used.usage.paused_ms >= 3_600_000, "{used:?}");
    assert_eq!(used.usage.cpu_micros, before.usage.cpu_micros);
    let Costs { cpu, memory, .. } = used.costs;
    // Two MiB for an hour; an active processor would be 54 million.
    assert!(cpu + memory < 100_000, "{used:?}");
}
