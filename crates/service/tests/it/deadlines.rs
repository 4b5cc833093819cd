use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, Instant},
};

use jiff::{SignedDuration, Timestamp};
use stockade_model::{EndCause, SandboxState};
use stockade_service::{Clock, ServiceError};

use crate::support::{TestServer, request, within};

/// The host's clock, set forward or back.
#[derive(Clone, Default)]
pub(crate) struct SetClock(Arc<AtomicI64>);

impl SetClock {
    pub(crate) fn set_off(&self, by: SignedDuration) {
        self.0.store(by.as_millis() as i64, Ordering::SeqCst);
    }
}

impl Clock for SetClock {
    fn now(&self) -> Timestamp {
        Timestamp::now() + SignedDuration::from_millis(self.0.load(Ordering::SeqCst))
    }
}

fn lasting(lifetime: Duration) -> stockade_service::CreateSandbox {
    let mut wanted = request();
    wanted.lifetime = lifetime;
    wanted
}

#[tokio::test]
async fn no_sandbox_is_ended_before_its_deadline() {
    let t = TestServer::start().await;
    let mut made = Vec::new();
    for ms in (20..420).step_by(20) {
        let before = Instant::now();
        made.push((
            before,
            Duration::from_millis(ms),
            t.try_create(lasting(Duration::from_millis(ms))).await.expect("created"),
        ));
    }
    for (before, lifetime, sandbox) in made {
        let gone = t.wait_for(&sandbox.id, SandboxState::Gone).await;
        assert!(before.elapsed() >= lifetime);
        let ending = gone.ending.expect("ending");
        assert_eq!(ending.cause, EndCause::Expired);
        assert!(ending.at >= gone.deadline, "{} is before {}", ending.at, gone.deadline);
    }
    t.assert_nothing_stray().await;
}

#[tokio::test]
async fn a_clock_set_forward_ends_nothing_early_and_one_set_back_neither() {
    let clock = SetClock::default();
    let theirs = clock.clone();
    let t = TestServer::start_with(move |config| config.clock = Arc::new(theirs.clone())).await;
    let before = Instant::now();
    let sandbox = t.try_create(lasting(Duration::from_millis(300))).await.expect("created");
    clock.set_off(SignedDuration::from_hours(5));
    let gone = t.wait_for(&sandbox.id, SandboxState::Gone).await;
    assert!(before.elapsed() >= Duration::from_millis(300));
    assert_eq!(gone.ending.expect("ending").cause, EndCause::Expired);

    clock.set_off(SignedDuration::ZERO);
    let sandbox = t.try_create(lasting(Duration::from_millis(50))).await.expect("created");
    clock.set_off(SignedDuration::from_hours(-5));
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(t.get(&sandbox.id).await.state, SandboxState::Running, "by the clock the client sees it is not yet due");
    clock.set_off(SignedDuration::ZERO);
    t.wait_for(&sandbox.id, SandboxState::Gone).await;
}

#[tokio::test]
async fn setting_may_shorten_and_extending_may_not() {
    let t = TestServer::start_with(|config| config.max_lifetime = Duration::from_secs(3600)).await;
    let sandbox = t.create().await;
    let seconds = Duration::from_secs;
    // Deadlines are rounded up to whole milliseconds.
    let left = |deadline: Timestamp| deadline.duration_since(Timestamp::now()).as_secs_f64() - 0.001;
    let shorter = within(t.service.set_lifetime(&t.who, &sandbox.id, seconds(60))).await.expect("set");
    assert!((50.0..=60.0).contains(&left(shorter.deadline)), "{}", shorter.deadline);
    let same = within(t.service.extend(&t.who, &sandbox.id, seconds(30))).await.expect("extended");
    assert_eq!(same.deadline, shorter.deadline);
    let longer = within(t.service.extend(&t.who, &sandbox.id, seconds(600))).await.expect("extended");
    assert!((590.0..=600.0).contains(&left(longer.deadline)), "{}", longer.deadline);
    assert_eq!(t.get(&sandbox.id).await.deadline, longer.deadline);
    match within(t.service.extend(&t.who, &sandbox.id, seconds(3601))).await {
        Err(ServiceError::Invalid { field: "lifetime", problem }) => assert!(problem.contains("3600"), "{problem}"),
        other => panic!("{other:?}"),
    }
    let ended = within(t.service.set_lifetime(&t.who, &sandbox.id, Duration::ZERO)).await.expect("set");
    assert_eq!(ended.ending.expect("ended at once").cause, EndCause::Expired);
    assert!(t.host.machines().is_empty());
}

#[tokio::test]
async fn extensions_and_kills_at_once_end_in_one_story() {
    let t = TestServer::start().await;
    for _ in 0..20 {
        let sandbox = t.create().await;
        let extends = (0..10).map(|nth| t.service.extend(&t.who, &sandbox.id, Duration::from_secs(300 + nth)));
        let (extends, killed) = futures::future::join(futures::future::join_all(extends), t.kill(&sandbox.id)).await;
        killed.expect("killed");
        for extended in extends {
            match extended {
                Ok(_) | Err(ServiceError::SandboxEnded { .. } | ServiceError::WrongState { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(t.get(&sandbox.id).await.state, SandboxState::Gone);
    }
    t.assert_nothing_stray().await;
}

#[tokio::test]
async fn a_sandbox_that_is_extended_in_time_lives_on() {
    let t = TestServer::start().await;
    let sandbox = t.try_create(lasting(Duration::from_millis(200))).await.expect("created");
    within(t.service.extend(&t.who, &sandbox.id, Duration::from_secs(100))).await.expect("extended");
    let left = sandbox.deadline.duration_since(Timestamp::now());
    tokio::time::sleep(Duration::try_from(left).unwrap_or_default() + Duration::from_millis(50)).await;
    assert_eq!(t.get(&sandbox.id).await.state, SandboxState::Running);
}
