//! Each step of a create and of a kill fails, once and for good.

use std::time::Duration;

use stockade_engine::fake::{Moment, Step};
use stockade_model::{EndCause, SandboxState};
use stockade_service::ServiceError;

use crate::support::{TestServer, eventually, request};

#[tokio::test]
async fn a_create_that_fails_at_any_step_leaves_a_record_and_nothing_else() {
    for step in Step::CREATE {
        for moment in [Moment::Before, Moment::After] {
            if (step, moment) == (Step::Identity, Moment::After) {
                continue;
            }
            let t = TestServer::start().await;
            t.host.fail(step, moment, 1);
            let failed = t.try_create(request()).await;
            assert!(matches!(failed, Err(ServiceError::Engine(_))), "{step:?} {moment:?}: {failed:?}");
            assert!(t.host.machines().is_empty(), "{step:?} {moment:?}");
            let records = t.everything().await;
            assert_eq!(records.len(), 1);
            assert_eq!(records[0].state, SandboxState::Failed, "{step:?} {moment:?}");
            let ending = records[0].ending.clone().expect("ending");
            assert_eq!(ending.cause, EndCause::CreateFailed);
            assert!(!ending.detail.is_empty());
            // The same again works: the failure has left nothing in the way.
            t.create().await;
            t.assert_nothing_stray().await;
        }
    }
}

#[tokio::test]
async fn a_guest_that_never_answers_fails_the_create_in_bounded_time() {
    for step in Step::CREATE {
        let t = TestServer::start_with(|config| config.step_patience = Duration::from_millis(500)).await;
        let _hang = t.host.hang(step, Moment::Before);
        let failed = t.try_create(request()).await;
        assert!(matches!(failed, Err(ServiceError::Engine(_))), "{step:?}: {failed:?}");
        eventually("nothing left", || t.host.machines().is_empty()).await;
        assert_eq!(t.everything().await[0].state, SandboxState::Failed);
        t.create().await;
    }
}

#[tokio::test]
async fn a_guest_that_gave_up_its_first_session_answers_in_another() {
    let t = TestServer::start_with(|config| config.first_answer_patience = Duration::from_millis(50)).await;
    // Its link has answered a hello and then nothing more; the next ones work.
    let mut lost = t.host.hang(Step::Identity, Moment::Before);
    let sandbox = t.create().await;
    lost.reached().await;
    t.service.guest(&t.who, &sandbox.id).await.expect("guest").health().await.expect("healthy");
    t.assert_nothing_stray().await;
}

#[tokio::test]
async fn a_start_that_takes_too_long_is_reaped_behind_the_callers_back() {
    let t = TestServer::start_with(|config| config.step_patience = Duration::from_millis(50)).await;
    let _hang = t.host.hang(Step::Start, Moment::After);
    t.host.fail(Step::Adopt, Moment::Before, 2);
    assert!(t.try_create(request()).await.is_err());
    eventually("nothing left", || t.host.machines().is_empty()).await;
}

#[tokio::test]
async fn a_failed_create_whose_machine_resists_is_cleaned_up_in_the_end() {
    let t = TestServer::start().await;
    t.host.fail(Step::Resume, Moment::Before, 1);
    t.host.fail(Step::Kill, Moment::Before, 4);
    assert!(t.try_create(request()).await.is_err());
    eventually("nothing left", || t.host.machines().is_empty()).await;
}

#[tokio::test]
async fn a_kill_that_fails_says_so_and_is_carried_through() {
    for moment in [Moment::Before, Moment::After] {
        let t = TestServer::start().await;
        let sandbox = t.create().await;
        t.host.fail(Step::Kill, moment, 1);
        let failed = t.kill(&sandbox.id).await;
        assert!(matches!(failed, Err(ServiceError::Engine(_))), "{failed:?}");
        let again = t.kill(&sandbox.id).await;
        assert!(matches!(again, Ok(()) | Err(ServiceError::SandboxEnded { .. })), "{again:?}");
        assert_eq!(t.cause(&sandbox.id).await, EndCause::Killed { key: t.who.key.clone() });
        t.assert_nothing_stray().await;
    }
}

#[tokio::test]
async fn what_is_being_ended_takes_no_other_request() {
    let t = TestServer::start().await;
    let sandbox = t.create().await;
    let mut hang = t.host.hang(Step::Kill, Moment::Before);
    let (service, who, id) = (t.service.clone(), t.who.clone(), sandbox.id.clone());
    let kill = tokio::spawn(async move { service.kill(&who, &id).await });
    crate::support::within(hang.reached()).await;
    assert_eq!(t.get(&sandbox.id).await.state, SandboxState::Killing);
    let extend = t.service.extend(&t.who, &sandbox.id, Duration::from_secs(100));
    let release = async {
        tokio::task::yield_now().await;
        hang.release();
    };
    let (extended, ()) = futures::future::join(extend, release).await;
    assert!(matches!(extended, Err(ServiceError::SandboxEnded { .. })), "{extended:?}");
    kill.await.expect("joined").expect("killed");
}
