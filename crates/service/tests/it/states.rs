//! Pause, resume, stop and start; deadlines and idle rules over them.

use std::time::Duration;

use stockade_engine::{GuestClient, MachineExit};
use stockade_model::{EndCause, IdleRules, OnTimeout, SandboxId, SandboxState, Tier};
use stockade_service::{CreateSandbox, LifeChange, PauseMode, ServiceError};

use crate::{
    lifecycle::run,
    support::{TestServer, eventually, request, within},
};

pub(crate) const STANDBY: PauseMode = PauseMode { memory: true, tier: Tier::Standby };
pub(crate) const HIBERNATED: PauseMode = PauseMode { memory: true, tier: Tier::Hibernated };
pub(crate) const STOPPED: PauseMode = PauseMode { memory: false, tier: Tier::Hibernated };
pub(crate) const MODES: [PauseMode; 3] = [STANDBY, HIBERNATED, STOPPED];

impl TestServer {
    pub(crate) async fn guest(&self, id: &SandboxId) -> GuestClient {
        within(self.service.guest(&self.who, id)).await.expect("guest")
    }

    pub(crate) async fn pause(&self, id: &SandboxId, mode: PauseMode) {
        let paused = within(self.service.pause(&self.who, id, mode)).await.expect("paused");
        let (state, tier) =
            if mode.memory { (SandboxState::Paused, Some(mode.tier)) } else { (SandboxState::Stopped, None) };
        assert_eq!((paused.state, paused.tier), (state, tier));
        assert_eq!((self.get(id).await.state, self.get(id).await.tier), (state, tier));
    }

    pub(crate) async fn resume(&self, id: &SandboxId) {
        let resumed = within(self.service.resume(&self.who, id, None)).await.expect("resumed");
        assert_eq!((resumed.state, resumed.tier), (SandboxState::Running, None));
    }
}

#[tokio::test]
async fn twenty_cycles_through_every_tier_lose_nothing() {
    let t = TestServer::start().await;
    let sandbox = t.create().await;
    let mut expected = String::new();
    for round in 0..20 {
        run(&t.guest(&sandbox.id).await, &format!("echo {round} >> log; rm -f old; mv new old; echo {round} > new"))
            .await;
        expected += &format!("{round}\n");
        t.pause(&sandbox.id, MODES[round % 3]).await;
        t.assert_nothing_stray().await;
        t.resume(&sandbox.id).await;
        assert_eq!(run(&t.guest(&sandbox.id).await, "cat log").await, expected);
        t.assert_nothing_stray().await;
    }
    assert_eq!(run(&t.guest(&sandbox.id).await, "cat old new").await, "18\n19\n");
    let after = t.get(&sandbox.id).await;
    assert_eq!((after.metadata, after.env, after.rules), (sandbox.metadata, sandbox.env, sandbox.rules));
}

#[tokio::test]
async fn a_process_lives_on_in_standby_and_its_machine_stands_still() {
    let t = TestServer::start().await;
    let sandbox = t.create().await;
    let machine = sandbox.machine.expect("machine");
    run(&t.guest(&sandbox.id).await, "sleep 1000 >/dev/null 2>&1 & echo $! > pid").await;
    t.pause(&sandbox.id, STANDBY).await;
    assert!(!t.host.is_running(&machine));
    t.resume(&sandbox.id).await;
    assert!(t.host.is_running(&machine));
    assert_eq!(run(&t.guest(&sandbox.id).await, "kill -0 $(cat pid) && echo same").await, "same\n");
}

#[tokio::test]
async fn a_deadline_stands_still_while_paused_and_is_as_asked_for_at_the_resume() {
    let t = TestServer::start().await;
    let seconds = Duration::from_secs;
    for mode in MODES {
        let sandbox = t.create().await;
        within(t.service.set_lifetime(&t.who, &sandbox.id, seconds(100))).await.expect("set");
        t.pause(&sandbox.id, mode).await;
        let remaining = t.get(&sandbox.id).await.remaining.expect("it has time left");
        // A deadline is recorded rounded up and the moment of the pause rounded down, to whole milliseconds each.
        let most = seconds(100) + Duration::from_millis(1);
        assert!(remaining <= most && remaining > seconds(70), "{remaining:?}");
        let before = jiff::Timestamp::now();
        t.resume(&sandbox.id).await;
        let after = t.get(&sandbox.id).await;
        assert_eq!(after.remaining, None);
        assert!(after.deadline >= before + remaining, "{} is before {}", after.deadline, before + remaining);
        // Connecting to one that runs extends at most.
        let same = within(t.service.resume(&t.who, &sandbox.id, Some(seconds(1)))).await.expect("running");
        assert_eq!(same.deadline, after.deadline);
        t.pause(&sandbox.id, mode).await;
        let before = jiff::Timestamp::now();
        let longer = within(t.service.resume(&t.who, &sandbox.id, Some(seconds(1000)))).await.expect("resumed");
        assert!(longer.deadline >= before + seconds(1000));
    }
}

#[tokio::test]
async fn at_its_deadline_a_sandbox_is_put_away_if_its_rules_say_so_again_and_again() {
    let t = TestServer::start().await;
    for (on_timeout, state) in [(OnTimeout::Pause, SandboxState::Paused), (OnTimeout::Stop, SandboxState::Stopped)] {
        let wanted = CreateSandbox { lifetime: Duration::from_millis(200), on_timeout, ..request() };
        let sandbox = t.try_create(wanted).await.expect("created");
        for _ in 0..2 {
            let put_away = t.wait_for(&sandbox.id, state).await;
            assert_eq!(put_away.remaining, Some(Duration::ZERO));
            within(t.service.resume(&t.who, &sandbox.id, None)).await.expect("resumed");
        }
        t.wait_for(&sandbox.id, state).await;
        eventually("its machine is gone", || t.host.machines().is_empty()).await;
        t.assert_nothing_stray().await;
    }
}

#[tokio::test]
async fn a_request_brings_a_sandbox_back_if_its_rules_say_so_and_never_twice() {
    let t = TestServer::start().await;
    for mode in MODES {
        let sandbox = t.try_create(CreateSandbox { auto_resume: true, ..request() }).await.expect("created");
        run(&t.guest(&sandbox.id).await, "echo kept > file").await;
        t.pause(&sandbox.id, mode).await;
        let started = t.host.started().len();
        let guests = futures::future::join_all((0..10).map(|_| t.service.guest(&t.who, &sandbox.id)));
        for guest in within(guests).await {
            assert_eq!(run(&guest.expect("guest"), "cat file").await, "kept\n");
        }
        assert!(t.host.started().len() <= started + 1);
        let manual = t.create().await;
        t.pause(&manual.id, mode).await;
        let refused = within(t.service.guest(&t.who, &manual.id)).await;
        assert!(matches!(refused, Err(ServiceError::WrongState { .. })), "{refused:?}");
    }
}

#[tokio::test]
async fn idle_rules_take_a_sandbox_down_tier_by_tier_and_a_stream_keeps_it_up() {
    let t = TestServer::start().await;
    let ms = Duration::from_millis;
    let idle = IdleRules {
        standby_after: Some(ms(50)),
        hibernate_after: Some(ms(250)),
        delete_after: Some(ms(900)),
        ..IdleRules::default()
    };
    let sandbox = t.try_create(CreateSandbox { idle, auto_resume: true, ..request() }).await.expect("created");
    let guest = t.guest(&sandbox.id).await;
    tokio::time::sleep(ms(150)).await;
    assert_eq!(t.get(&sandbox.id).await.state, SandboxState::Running, "somebody holds its guest");
    drop(guest);
    let gone = t.wait_for(&sandbox.id, SandboxState::Gone).await;
    assert_eq!(gone.ending.expect("ending").cause, EndCause::Idle);
    let events = t.service.events(&t.who, &sandbox.id).await.expect("events");
    let tiers: Vec<_> = events.iter().filter_map(|event| event.tier).collect();
    assert!(tiers.ends_with(&[Tier::Standby, Tier::Hibernated, Tier::Hibernated]), "{tiers:?}");
    t.assert_nothing_stray().await;
}

#[tokio::test]
async fn the_senseless_is_refused_in_every_state() {
    let t = TestServer::start().await;
    let sandbox = t.create().await;
    for (first, then) in [(STANDBY, STANDBY), (HIBERNATED, STANDBY), (HIBERNATED, HIBERNATED), (STOPPED, HIBERNATED)] {
        t.pause(&sandbox.id, first).await;
        let refused = within(t.service.pause(&t.who, &sandbox.id, then)).await;
        assert!(matches!(refused, Err(ServiceError::WrongState { .. })), "{refused:?}");
        t.resume(&sandbox.id).await;
    }
    let ms = Duration::from_millis;
    for idle in [
        IdleRules { standby_after: Some(ms(2)), hibernate_after: Some(ms(1)), ..IdleRules::default() },
        IdleRules { standby_after: Some(ms(0)), ..IdleRules::default() },
    ] {
        let refused = t.try_create(CreateSandbox { idle, ..request() }).await;
        assert!(matches!(refused, Err(ServiceError::Invalid { field: "idle", .. })), "{refused:?}");
    }
}

#[tokio::test]
async fn one_in_standby_goes_deeper_and_its_machine_goes() {
    let t = TestServer::start().await;
    for deeper in [HIBERNATED, STOPPED] {
        let sandbox = t.create().await;
        run(&t.guest(&sandbox.id).await, "echo kept > file").await;
        t.pause(&sandbox.id, STANDBY).await;
        t.pause(&sandbox.id, deeper).await;
        t.assert_nothing_stray().await;
        t.resume(&sandbox.id).await;
        assert_eq!(run(&t.guest(&sandbox.id).await, "cat file").await, "kept\n");
    }
}

#[tokio::test]
async fn what_is_paused_can_be_killed_and_nothing_is_left() {
    let t = TestServer::start().await;
    for mode in MODES {
        let sandbox = t.create().await;
        t.pause(&sandbox.id, mode).await;
        t.kill(&sandbox.id).await.expect("killed");
        assert!(matches!(t.kill(&sandbox.id).await, Err(ServiceError::SandboxEnded { .. })));
        assert!(t.host.machines().is_empty());
        t.assert_nothing_stray().await;
    }
    let lost = t.create().await;
    t.pause(&lost.id, STANDBY).await;
    t.host.end(&t.get(&lost.id).await.machine.expect("machine"), MachineExit::OutOfMemory);
    assert_eq!(t.cause(&lost.id).await, EndCause::OutOfMemory);
    eventually("remains removed", || t.host.machines().is_empty()).await;
}

#[tokio::test]
async fn streams_end_with_the_pause_and_not_as_a_success() {
    let t = TestServer::start().await;
    for mode in MODES {
        let sandbox = t.create().await;
        let guest = t.guest(&sandbox.id).await;
        t.pause(&sandbox.id, mode).await;
        assert!(guest.health().await.is_err(), "{mode:?}");
        t.resume(&sandbox.id).await;
        within(t.guest(&sandbox.id).await.health()).await.expect("the first request after a resume");
    }
}

#[tokio::test]
async fn a_full_host_refuses_a_resume_and_the_sandbox_stays_paused() {
    let t = TestServer::start().await;
    let sandbox = t.create().await;
    t.pause(&sandbox.id, HIBERNATED).await;
    t.host.set_full(true);
    let refused = within(t.service.resume(&t.who, &sandbox.id, None)).await;
    assert!(matches!(refused, Err(ServiceError::Engine(_))), "{refused:?}");
    assert_eq!(t.get(&sandbox.id).await.state, SandboxState::Paused);
    t.host.set_full(false);
    t.resume(&sandbox.id).await;
    t.assert_nothing_stray().await;
}

#[tokio::test]
async fn a_guest_that_works_by_itself_is_in_use_if_its_rules_say_so() {
    let t = TestServer::start().await;
    let idle = IdleRules { standby_after: Some(Duration::from_millis(20)), ..IdleRules::default() };
    let busy = IdleRules { busy_percent: Some(10), ..idle };
    let make = async |idle| t.try_create(CreateSandbox { idle, ..request() }).await.expect("created");
    let (counted, not) = (make(busy).await, make(idle).await);
    let works = async {
        // Two looks long: it uses a whole processor.
        for _ in 0..100 {
            for sandbox in [&counted, &not] {
                t.host.use_cpu(sandbox.machine.as_ref().expect("machine"), 50_000);
            }
            tokio::time::sleep(Duration::from_millis(40)).await;
        }
    };
    works.await;
    assert_eq!(t.get(&counted.id).await.state, SandboxState::Running);
    assert_eq!(t.get(&not.id).await.tier, Some(Tier::Standby));
    t.wait_for(&counted.id, SandboxState::Paused).await;
}

#[tokio::test]
async fn rules_are_changed_in_every_state_and_obeyed_from_then_on() {
    let mut t = TestServer::start().await;
    let sandbox = t.create().await;
    let idle = |ms| IdleRules { hibernate_after: Some(Duration::from_millis(ms)), ..IdleRules::default() };
    let change = |idle| LifeChange { idle: Some(idle), auto_resume: Some(true), ..LifeChange::default() };
    t.pause(&sandbox.id, STANDBY).await;
    let set = within(t.service.set_rules(&t.who, &sandbox.id, change(idle(30)))).await.expect("set");
    assert_eq!((set.state, set.rules.idle), (SandboxState::Paused, idle(30)));
    let deeper = async {
        while t.get(&sandbox.id).await.tier != Some(Tier::Hibernated) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    within(deeper).await;
    t.crash().await;
    assert_eq!(t.get(&sandbox.id).await.rules.idle, idle(30), "it is recorded");
    within(t.service.set_rules(&t.who, &sandbox.id, change(IdleRules::default()))).await.expect("set");
    t.guest(&sandbox.id).await.health().await.expect("a request brings it back");
    let nonsense = change(IdleRules { busy_percent: Some(0), ..IdleRules::default() });
    let refused = within(t.service.set_rules(&t.who, &sandbox.id, nonsense)).await;
    assert!(matches!(refused, Err(ServiceError::Invalid { field: "idle", .. })), "{refused:?}");
}

#[tokio::test]
async fn what_stands_by_for_long_gives_its_memory_back_without_a_rule_of_its_own() {
    let ms = Duration::from_millis;
    let t = TestServer::start_with(move |config| config.longest_standby = Some(ms(100))).await;
    let ruled = IdleRules { hibernate_after: Some(Duration::from_secs(3600)), ..IdleRules::default() };
    let ruled = t.try_create(CreateSandbox { idle: ruled, ..request() }).await.expect("created");
    let plain = t.create().await;
    for sandbox in [&ruled, &plain] {
        t.pause(&sandbox.id, STANDBY).await;
    }
    let deeper = async {
        loop {
            let sandbox = t.get(&plain.id).await;
            if (sandbox.state, sandbox.tier) == (SandboxState::Paused, Some(Tier::Hibernated)) {
                return;
            }
            tokio::time::sleep(ms(2)).await;
        }
    };
    within(deeper).await;
    assert_eq!(t.get(&ruled.id).await.tier, Some(Tier::Standby), "its own rule comes first");
    t.assert_nothing_stray().await;
    t.resume(&plain.id).await;
}
