use std::time::Duration;

use stockade_engine::fake::{Moment, Step};
use stockade_model::SandboxState;
use stockade_service::{CreateSandbox, ServiceConfig, ServiceError};

use crate::support::{TestServer, labels, request, within};

fn under(key: &str) -> CreateSandbox {
    CreateSandbox { idempotency_key: Some(key.to_owned()), ..request() }
}

#[tokio::test]
async fn the_same_request_gives_the_same_sandbox_also_after_a_restart() {
    let mut t = TestServer::start().await;
    let first = t.try_create(under("a")).await.expect("created");
    assert_eq!(t.try_create(under("a")).await.expect("again").id, first.id);
    t.crash().await;
    assert_eq!(t.try_create(under("a")).await.expect("again").id, first.id);
    assert_ne!(t.try_create(under("b")).await.expect("another").id, first.id);
    assert_ne!(t.create().await.id, first.id);
    t.kill(&first.id).await.expect("killed");
    let ended = t.try_create(under("a")).await.expect("the same, though ended");
    assert_eq!((ended.id, ended.state), (first.id, SandboxState::Gone));
}

#[tokio::test]
async fn another_request_under_the_key_is_refused_and_another_workspace_is_not_in_the_way() {
    let t = TestServer::start().await;
    let first = t.try_create(under("a")).await.expect("created");
    let spoil: [fn(&mut CreateSandbox); 3] = [
        |r| r.lifetime = Duration::from_secs(301),
        |r| r.metadata = labels([("a", "b")]),
        |r| r.env = labels([("a", "b")]),
    ];
    for spoil in spoil {
        let mut other = under("a");
        spoil(&mut other);
        assert!(matches!(t.try_create(other).await, Err(ServiceError::IdempotencyConflict)));
    }
    let stranger = t.stranger().await;
    let theirs = within(t.service.create(&stranger, under("a"))).await.expect("created");
    assert_ne!(theirs.id, first.id);
}

#[tokio::test]
async fn of_many_at_once_one_makes_it_and_all_get_it() {
    for pool_size in [0, 4] {
        let t = TestServer::start_with(move |config| config.pool_size = pool_size).await;
        let made = futures::future::join_all((0..20).map(|_| t.try_create(under("a")))).await;
        let first = made[0].as_ref().expect("created");
        for sandbox in &made {
            let sandbox = sandbox.as_ref().expect("created");
            assert_eq!((&sandbox.id, sandbox.state), (&first.id, SandboxState::Running));
        }
        assert_eq!(t.everything().await.len(), 1);
        within(t.service.shutdown()).await;
        assert_eq!(t.host.machines().len(), 1);
    }
}

#[tokio::test]
async fn a_create_that_failed_gives_its_key_back() {
    let t = TestServer::start().await;
    t.host.fail(Step::Start, Moment::Before, 1);
    assert!(t.try_create(under("a")).await.is_err());
    let second = t.try_create(under("a")).await.expect("created");
    assert_eq!(second.state, SandboxState::Running);
    assert_eq!(t.everything().await.len(), 2);
}

#[tokio::test]
async fn whoever_waits_for_a_create_that_fails_is_told() {
    let t = TestServer::start().await;
    let mut hang = t.host.hang(Step::Resume, Moment::Before);
    let first = t.create_in_background(under("a"));
    within(hang.reached()).await;
    let second = t.create_in_background(under("a"));
    t.host.fail(Step::Link, Moment::Before, 1);
    tokio::task::yield_now().await;
    hang.release();
    assert!(within(first).await.expect("joined").is_err());
    // It either waited with the first, or came after it had failed and made one of its own.
    match within(second).await.expect("joined") {
        Ok(sandbox) => assert_eq!(sandbox.state, SandboxState::Running),
        Err(error) => assert!(matches!(error, ServiceError::Engine(_)), "{error:?}"),
    }
    t.assert_nothing_stray().await;
}

#[tokio::test]
async fn limits_refuse_with_a_time_to_come_back() {
    let t = TestServer::start_with(|config: &mut ServiceConfig| {
        config.max_sandboxes = 2;
        config.max_creates_in_flight = 1;
    })
    .await;
    let mut hang = t.host.hang(Step::Start, Moment::Before);
    let first = t.create_in_background(request());
    within(hang.reached()).await;
    assert!(matches!(t.try_create(request()).await, Err(ServiceError::Busy { .. })), "one create at a time");
    hang.release();
    let first = within(first).await.expect("joined").expect("created");
    let second = t.create().await;
    match t.try_create(request()).await {
        Err(ServiceError::Busy { what, retry_after }) => {
            assert!(what.contains("2 sandboxes") && !retry_after.is_zero(), "{what}");
        }
        other => panic!("{other:?}"),
    }
    t.kill(&first.id).await.expect("killed");
    t.create().await;
    t.kill(&second.id).await.expect("killed");
    t.assert_nothing_stray().await;
}
