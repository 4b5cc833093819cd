//! The server is killed at each step and comes back.

use std::time::Duration;

use stockade_engine::{
    MachineExit,
    fake::{Moment, Step},
};
use stockade_model::{EndCause, SandboxState};
use stockade_service::ServiceError;

use crate::support::{TestServer, request, within};

#[tokio::test]
async fn a_running_sandbox_is_adopted_with_its_deadline_and_env() {
    let mut t = TestServer::start().await;
    let before = t.create().await;
    let token = before.access_token.clone();
    for _ in 0..3 {
        t.crash().await;
        let after = t.get(&before.id).await;
        assert_eq!((after.state, &after.machine), (SandboxState::Running, &before.machine));
        assert_eq!((after.deadline, after.started_at), (before.deadline, before.started_at));
        t.service.guest(&t.who, &before.id).await.expect("guest").health().await.expect("healthy");
        within(t.service.guest_by_token(&before.id, Some(&token))).await.expect("the token still opens it");
    }
    assert_eq!(t.host.started().len(), 1, "nothing was started twice");
    t.kill(&before.id).await.expect("killed");
    t.assert_nothing_stray().await;
}

#[tokio::test]
async fn a_create_cut_off_at_any_step_is_reaped_and_marked() {
    for pool_size in [0, 1] {
        for step in Step::CREATE {
            for moment in [Moment::Before, Moment::After] {
                if (step, moment) == (Step::Identity, Moment::After) || (pool_size > 0 && step == Step::Start) {
                    continue;
                }
                let mut t = TestServer::start_with(move |config| config.pool_size = pool_size).await;
                let (service, template) = (t.service.clone(), t.template.clone());
                crate::support::eventually("pool is full", || service.pool_ready(&template) == pool_size).await;
                drop(service);
                let mut hang = t.host.hang(step, moment);
                let caller = t.create_in_background(request());
                within(hang.reached()).await;
                t.crash().await;
                let told = within(caller).await.expect("joined");
                assert!(told.is_err(), "{step:?} {moment:?}");
                let records = t.everything().await;
                assert_eq!(records.len(), 1);
                assert_eq!(records[0].state, SandboxState::Failed, "{step:?} {moment:?}");
                assert_eq!(records[0].ending.as_ref().expect("ending").cause, EndCause::CreateFailed);
                t.create().await;
                within(t.service.shutdown()).await;
                t.restart_without_pool().await;
                t.assert_nothing_stray().await;
            }
        }
    }
}

#[tokio::test]
async fn a_kill_cut_off_at_any_step_is_finished_with_its_cause() {
    for moment in [Moment::Before, Moment::After] {
        let mut t = TestServer::start().await;
        let sandbox = t.create().await;
        let mut hang = t.host.hang(Step::Kill, moment);
        let (service, who, id) = (t.service.clone(), t.who.clone(), sandbox.id.clone());
        let kill = tokio::spawn(async move { service.kill(&who, &id).await });
        within(hang.reached()).await;
        t.crash().await;
        assert!(kill.await.expect("joined").is_err(), "nobody saw it end");
        let after = t.get(&sandbox.id).await;
        assert_eq!(after.state, SandboxState::Gone);
        assert_eq!(after.ending.expect("ending").cause, EndCause::Killed { key: t.who.key.clone() });
        assert!(t.host.machines().is_empty());
        assert!(matches!(t.kill(&sandbox.id).await, Err(ServiceError::SandboxEnded { .. })));
    }
}

#[tokio::test]
async fn a_machine_that_ended_while_no_server_ran_is_marked_lost() {
    let mut t = TestServer::start().await;
    let (lost, kept) = (t.create().await, t.create().await);
    t.service.cut().await;
    t.host.end(lost.machine.as_ref().expect("machine"), MachineExit::Crashed("signal 9".to_owned()));
    t.crash().await;
    let ending = t.get(&lost.id).await.ending.expect("ending");
    assert_eq!(ending.cause, EndCause::HostLost);
    assert_eq!(t.get(&kept.id).await.state, SandboxState::Running);
    t.assert_nothing_stray().await;
}

#[tokio::test]
async fn a_machine_that_cannot_be_taken_over_is_ended_with_a_reason() {
    let mut t = TestServer::start().await;
    let sandbox = t.create().await;
    t.host.fail(Step::Adopt, Moment::Before, 1);
    t.crash().await;
    let ending = t.get(&sandbox.id).await.ending.expect("ending");
    assert_eq!(ending.cause, EndCause::HostLost);
    assert!(ending.detail.contains("could not be taken over"), "{}", ending.detail);
    assert!(t.host.machines().is_empty());
}

#[tokio::test]
async fn a_deadline_that_passed_while_no_server_ran_ends_the_sandbox_at_start() {
    let mut t = TestServer::start().await;
    let mut short = request();
    short.lifetime = Duration::from_millis(300);
    let short = t.try_create(short).await.expect("created");
    let long = t.create().await;
    t.service.cut().await;
    let left = short.deadline.duration_since(jiff::Timestamp::now());
    tokio::time::sleep(Duration::try_from(left).unwrap_or_default() + Duration::from_millis(1)).await;
    t.crash().await;
    let after = t.get(&short.id).await;
    assert_eq!(after.state, SandboxState::Gone, "when the start returns it is done");
    assert_eq!(after.ending.expect("ending").cause, EndCause::Expired);
    assert_eq!(t.get(&long.id).await.state, SandboxState::Running);
    t.assert_nothing_stray().await;
}

#[tokio::test]
async fn pool_machines_of_a_server_that_died_are_swept() {
    let mut t = TestServer::start_with(|config| config.pool_size = 3).await;
    let (service, template) = (t.service.clone(), t.template.clone());
    crate::support::eventually("pool is full", || service.pool_ready(&template) == 3).await;
    drop(service);
    t.service.cut().await;
    let old = t.host.machines();
    t.restart_without_pool().await;
    assert_eq!(old.len(), 3);
    assert!(t.host.machines().is_empty());
}

#[tokio::test]
async fn dropping_the_last_handle_stops_all_work() {
    let t = TestServer::start().await;
    let mut hang = t.host.hang(Step::Start, Moment::Before);
    let caller = t.create_in_background(request());
    within(hang.reached()).await;
    caller.abort();
    caller.await.ok();
    let host = t.host.clone();
    drop(t);
    hang.release();
    tokio::task::yield_now().await;
    assert!(host.machines().is_empty());
}
