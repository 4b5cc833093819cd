use stockade_engine::{
    MachineExit,
    fake::{Moment, Step},
};
use stockade_model::SandboxState;
use stockade_service::CreateSandbox;

use crate::support::{TestServer, eventually, request, within};

async fn full(size: usize) -> TestServer {
    let t = TestServer::start_with(move |config| config.pool_size = size).await;
    eventually("pool is full", || t.service.pool_ready(&t.template) == size).await;
    t
}

#[tokio::test]
async fn a_create_claims_a_ready_machine_and_the_pool_is_filled_up_again() {
    let t = full(2).await;
    let ready = t.host.started();
    let sandbox = t.create().await;
    assert!(ready.contains(sandbox.machine.as_ref().expect("machine")));
    eventually("filled up", || t.service.pool_ready(&t.template) == 2).await;
    assert_eq!(t.host.started().len(), 3);
}

#[tokio::test]
async fn a_dead_pool_machine_is_noticed_at_the_claim_and_replaced() {
    let t = full(1).await;
    let dead = t.host.machines()[0].clone();
    t.host.end(&dead, MachineExit::OutOfMemory);
    let sandbox = t.create().await;
    assert_ne!(sandbox.machine.as_ref(), Some(&dead));
    assert_eq!(t.get(&sandbox.id).await.machine, sandbox.machine, "the record names the machine it has");
    eventually("the dead one is removed", || !t.host.machines().contains(&dead)).await;
}

#[tokio::test]
async fn a_pool_machine_that_fails_at_any_step_is_replaced_by_a_fresh_one() {
    for step in [Step::Resume, Step::Link, Step::Identity] {
        let t = full(1).await;
        let bad = t.host.machines()[0].clone();
        t.host.fail(step, Moment::Before, 1);
        let sandbox = t.create().await;
        assert_eq!(sandbox.state, SandboxState::Running, "{step:?}");
        assert_ne!(sandbox.machine.as_ref(), Some(&bad), "{step:?}");
        eventually("the bad one is removed", || !t.host.machines().contains(&bad)).await;
    }
}

#[tokio::test]
async fn a_refill_that_fails_is_tried_again_and_hinders_no_create() {
    let t = full(1).await;
    t.host.fail(Step::Start, Moment::Before, 2);
    t.create().await;
    eventually("filled up", || t.service.pool_ready(&t.template) == 1).await;
}

#[tokio::test]
async fn a_refill_waits_for_creates_under_way() {
    let t = full(1).await;
    let mut hang = t.host.hang(Step::Resume, Moment::Before);
    let caller = t.create_in_background(request());
    within(hang.reached()).await;
    tokio::time::sleep(std::time::Duration::from_millis(250)).await;
    assert_eq!(t.host.started().len(), 1);
    hang.release();
    within(caller).await.expect("joined").expect("created");
    eventually("filled up", || t.service.pool_ready(&t.template) == 1).await;
}

#[tokio::test]
async fn a_replaced_template_gives_its_pool_up() {
    let t = full(2).await;
    let old = t.template.clone();
    let new = t.add_template(None, "base").await;
    assert_eq!(t.service.pool_ready(&old), 0);
    eventually("the new one's is filled", || t.service.pool_ready(&new) == 2).await;
    eventually("the old one's is gone", || t.host.machines().len() == 2).await;
    assert_eq!(t.create().await.template, new);
}

#[tokio::test]
async fn a_snapshot_that_is_asked_for_gets_machines_of_its_own_and_gives_them_up_when_it_goes() {
    let t = full(1).await;
    let source = t.create().await;
    let snapshot = t.snapshot(&source.id).await;
    let from_it = || CreateSandbox { template: snapshot.id.to_string(), ..request() };
    assert_eq!(t.service.pool_ready_of(&snapshot.id), 0, "nobody has asked for it yet");
    t.try_create(from_it()).await.expect("created");
    eventually("one is ready", || t.service.pool_ready_of(&snapshot.id) == 1).await;
    let ready = t.host.started();
    let claimed = t.try_create(from_it()).await.expect("created");
    assert!(ready.contains(claimed.machine.as_ref().expect("machine")), "it was ready");
    assert_eq!(claimed.lineage.snapshot.as_ref(), Some(&snapshot.id));
    // Two at once never get the same one.
    let both = tokio::join!(t.try_create(from_it()), t.try_create(from_it()));
    assert_ne!(both.0.expect("created").machine, both.1.expect("created").machine);
    eventually("one is ready again", || t.service.pool_ready_of(&snapshot.id) >= 1).await;
    within(t.service.delete_snapshot(&t.who, &snapshot.id)).await.expect("deleted");
    assert_eq!(t.service.pool_ready_of(&snapshot.id), 0);
    let sandboxes = t.everything().await.len();
    eventually("its machines are gone", || t.host.machines().len() == sandboxes + 1).await;
}

#[tokio::test]
async fn the_pool_grows_with_demand_and_stays_within_its_budget() {
    // The fake machine holds one MiB of its own.
    let t = TestServer::start_with(|config| (config.pool_size, config.pool_memory_mib) = (1, 3)).await;
    for _ in 0..12 {
        t.create().await;
    }
    eventually("as many as the budget allows", || t.service.pool_ready(&t.template) == 3).await;
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    assert_eq!(t.service.pool_ready(&t.template), 3, "12 were asked for lately, there is memory for 3");
    assert_eq!(t.host.machines().len(), 12 + 3);
}
