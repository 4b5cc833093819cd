//! Random sequences of requests, faults and crashes against a model of a few lines.

use std::{collections::BTreeMap, time::Duration};

use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use stockade_engine::{
    MachineExit,
    fake::{Moment, Step},
};
use stockade_model::{EndCause, SandboxId, SandboxState};
use stockade_service::ServiceError;

use crate::support::{TestServer, request, within};

#[derive(Clone, Debug)]
enum Action {
    Create,
    CreateThatFails(usize, bool),
    Kill(usize),
    KillThatFails(usize, bool),
    Extend(usize, u64),
    Set(usize, u64),
    EndNow(usize),
    MachineEnds(usize, u8),
    MachineEndsUnseen(usize),
    Crash,
}

fn action() -> impl Strategy<Value = Action> {
    let nth = 0..8usize;
    prop_oneof![
        4 => Just(Action::Create),
        1 => (0..4usize, any::<bool>()).prop_map(|(step, after)| Action::CreateThatFails(step, after)),
        2 => nth.clone().prop_map(Action::Kill),
        1 => (nth.clone(), any::<bool>()).prop_map(|(nth, after)| Action::KillThatFails(nth, after)),
        2 => (nth.clone(), 1..1000u64).prop_map(|(nth, seconds)| Action::Extend(nth, seconds)),
        2 => (nth.clone(), 1..1000u64).prop_map(|(nth, seconds)| Action::Set(nth, seconds)),
        1 => nth.clone().prop_map(Action::EndNow),
        1 => (nth.clone(), 0..3u8).prop_map(|(nth, how)| Action::MachineEnds(nth, how)),
        1 => nth.prop_map(Action::MachineEndsUnseen),
        1 => Just(Action::Crash),
    ]
}

/// What is expected of each sandbox: still running, or its end.
#[derive(Default)]
struct Model {
    order: Vec<SandboxId>,
    ends: BTreeMap<SandboxId, Option<EndCause>>,
}

impl Model {
    fn nth(&self, nth: usize) -> Option<SandboxId> {
        (!self.order.is_empty()).then(|| self.order[nth % self.order.len()].clone())
    }

    fn is_running(&self, id: &SandboxId) -> bool {
        self.ends[id].is_none()
    }

    fn end(&mut self, id: &SandboxId, cause: EndCause) {
        let end = self.ends.get_mut(id).expect("known");
        end.get_or_insert(cause);
    }
}

#[test]
fn random_requests_faults_and_crashes_follow_the_model() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("runtime");
    // Failures print the shrunk sequence and are kept beside this file as a seed.
    let mut runner = TestRunner::new(Config { cases: 40, max_shrink_iters: 200, ..Config::default() });
    runner
        .run(&(prop::collection::vec(action(), 1..30), 0..3usize), |(actions, pool_size)| {
            runtime.block_on(play(actions, pool_size));
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

async fn play(actions: Vec<Action>, pool_size: usize) {
    let mut t = TestServer::start_with(move |config| config.pool_size = pool_size).await;
    let mut model = Model::default();
    for action in actions {
        step(&mut t, &mut model, action).await;
        check(&t, &model).await;
    }
    within(t.service.shutdown()).await;
    t.restart_without_pool().await;
    check(&t, &model).await;
    t.assert_nothing_stray().await;
}

async fn step(t: &mut TestServer, model: &mut Model, action: Action) {
    let target = |nth| model.nth(nth).filter(|id| model.is_running(id));
    match action {
        Action::Create => {
            let id = t.create().await.id;
            model.order.push(id.clone());
            model.ends.insert(id, None);
        }
        Action::CreateThatFails(step, after) => create_with_fault(t, model, step, after).await,
        Action::Kill(nth) => {
            let Some(id) = model.nth(nth) else { return };
            let killed = t.kill(&id).await;
            assert_eq!(killed.is_ok(), model.is_running(&id), "{killed:?}");
            model.end(&id, EndCause::Killed { key: t.who.key.clone() });
        }
        Action::KillThatFails(nth, after) => {
            let Some(id) = target(nth) else { return };
            t.host.fail(Step::Kill, if after { Moment::After } else { Moment::Before }, 1);
            // The fault may hit a pool machine or an earlier end instead.
            t.kill(&id).await.ok();
            t.wait_for(&id, SandboxState::Gone).await;
            model.end(&id, EndCause::Killed { key: t.who.key.clone() });
        }
        Action::Extend(nth, seconds) => {
            let Some(id) = model.nth(nth) else { return };
            let before = t.get(&id).await;
            match within(t.service.extend(&t.who, &id, Duration::from_secs(seconds))).await {
                Ok(after) => assert!(model.is_running(&id) && after.deadline >= before.deadline),
                Err(error) => assert!(!model.is_running(&id), "{error}"),
            }
        }
        Action::Set(nth, seconds) => {
            let Some(id) = model.nth(nth) else { return };
            match within(t.service.set_lifetime(&t.who, &id, Duration::from_secs(seconds))).await {
                Ok(after) => assert_eq!(t.get(&id).await.deadline, after.deadline),
                Err(error) => assert!(!model.is_running(&id), "{error}"),
            }
        }
        Action::EndNow(nth) => {
            let Some(id) = target(nth) else { return };
            within(t.service.set_lifetime(&t.who, &id, Duration::ZERO)).await.expect("ended");
            model.end(&id, EndCause::Expired);
        }
        Action::MachineEnds(nth, how) => {
            let Some(id) = target(nth) else { return };
            let (exit, cause) = match how {
                0 => (MachineExit::GuestEnded("off".to_owned()), EndCause::GuestEnded),
                1 => (MachineExit::OutOfMemory, EndCause::OutOfMemory),
                _ => (MachineExit::Crashed("signal 9".to_owned()), EndCause::Crashed),
            };
            t.host.end(&t.get(&id).await.machine.expect("machine"), exit);
            t.wait_for(&id, SandboxState::Gone).await;
            model.end(&id, cause);
        }
        Action::MachineEndsUnseen(nth) => {
            let Some(id) = target(nth) else { return };
            let machine = t.get(&id).await.machine.expect("machine");
            t.service.cut().await;
            t.host.end(&machine, MachineExit::OutOfMemory);
            t.restart().await;
            model.end(&id, EndCause::HostLost);
        }
        Action::Crash => t.crash().await,
    }
}

async fn create_with_fault(t: &TestServer, model: &mut Model, step: usize, after: bool) {
    let step = Step::CREATE[step];
    let moment = if after && step != Step::Identity { Moment::After } else { Moment::Before };
    t.host.fail(step, moment, 1);
    // With a pool the fault may hit a pool machine, which is replaced, or the refill.
    let id = match t.try_create(request()).await {
        Ok(sandbox) => {
            model.ends.insert(sandbox.id.clone(), None);
            sandbox.id
        }
        Err(error) => {
            assert!(matches!(error, ServiceError::Engine(_)), "{error}");
            let known = |id: &SandboxId| model.ends.contains_key(id);
            let id =
                t.everything().await.into_iter().map(|sandbox| sandbox.id).find(|id| !known(id)).expect("a record");
            model.ends.insert(id.clone(), Some(EndCause::CreateFailed));
            id
        }
    };
    model.order.push(id);
    t.host.clear_faults();
}

async fn check(t: &TestServer, model: &Model) {
    let records = t.everything().await;
    assert!(records.iter().map(|sandbox| &sandbox.id).eq(model.order.iter()), "listed in the order of creation");
    for sandbox in records {
        let expected = &model.ends[&sandbox.id];
        assert_eq!(sandbox.ending.as_ref().map(|ending| &ending.cause), expected.as_ref());
        let state = match expected {
            None => SandboxState::Running,
            Some(EndCause::CreateFailed) => SandboxState::Failed,
            Some(_) => SandboxState::Gone,
        };
        assert_eq!(sandbox.state, state);
        let guest = within(t.service.guest(&t.who, &sandbox.id)).await;
        match guest {
            Ok(guest) => {
                assert!(expected.is_none());
                guest.health().await.expect("healthy");
            }
            Err(ServiceError::SandboxEnded { .. }) => assert!(expected.is_some()),
            Err(error) => panic!("{error}"),
        }
    }
}
