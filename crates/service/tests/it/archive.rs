//! Into the archive and back, with the archive or the server failing in between.

use std::time::Duration;

use stockade_engine::fake::{Moment, Step};
use stockade_model::{IdleRules, OnTimeout, SandboxState, Tier};
use stockade_service::{CreateSandbox, PauseMode, ServiceError, StateOf};

use crate::{
    states::{HIBERNATED, STANDBY, STOPPED},
    support::{TestServer, eventually, request, within},
};

const ARCHIVED: PauseMode = PauseMode { memory: true, tier: Tier::Archived };

#[tokio::test]
async fn a_sandbox_goes_into_the_archive_from_each_tier_and_comes_back_as_it_was() {
    let mut t = TestServer::start().await;
    let sandbox = t.try_create(CreateSandbox { auto_resume: true, ..request() }).await.expect("created");
    for (round, by_way_of) in [None, Some(STANDBY), Some(HIBERNATED), None].into_iter().enumerate() {
        t.says(&sandbox.id, &format!("echo {round} >> file")).await;
        if let Some(mode) = by_way_of {
            t.pause(&sandbox.id, mode).await;
        }
        t.pause(&sandbox.id, ARCHIVED).await;
        assert!(t.directories("paused").is_empty(), "nothing of it is on this host");
        t.assert_nothing_stray().await;
        let again = within(t.service.pause(&t.who, &sandbox.id, ARCHIVED)).await;
        assert!(matches!(again, Err(ServiceError::WrongState { .. })), "{again:?}");
        if round % 2 == 1 {
            t.crash().await;
            assert_eq!(t.get(&sandbox.id).await.tier, Some(Tier::Archived));
        }
        // A request to its guest brings it back.
        let expected: String = (0..=round).map(|round| format!("{round}\n")).collect();
        assert_eq!(t.says(&sandbox.id, "cat file").await, expected);
        eventually("the archive has forgotten it", || t.directories("archive").is_empty()).await;
        t.assert_nothing_stray().await;
    }
    // What is stopped stays so there.
    t.pause(&sandbox.id, STOPPED).await;
    for round in 0..2 {
        within(t.service.pause(&t.who, &sandbox.id, ARCHIVED)).await.expect("archived");
        if round == 1 {
            t.crash().await;
        }
        let there = t.get(&sandbox.id).await;
        assert_eq!((there.state, there.tier), (SandboxState::Stopped, Some(Tier::Archived)));
        assert!(t.directories("paused").is_empty(), "nothing of it is on this host");
        t.assert_nothing_stray().await;
        // A machine that cannot be made leaves it stopped, and here.
        t.host.fail(Step::Restore, Moment::Before, 1);
        assert!(within(t.service.resume(&t.who, &sandbox.id, None)).await.is_err());
        let here = t.get(&sandbox.id).await;
        assert_eq!((here.state, here.tier), (SandboxState::Stopped, None));
        eventually("the archive has forgotten it", || t.directories("archive").is_empty()).await;
        t.assert_nothing_stray().await;
    }
    t.resume(&sandbox.id).await;
    t.pause(&sandbox.id, ARCHIVED).await;
    t.kill(&sandbox.id).await.expect("killed");
    assert!(t.directories("archive").is_empty());
    t.assert_nothing_stray().await;
}

#[tokio::test]
async fn idle_rules_lead_into_the_archive() {
    let t = TestServer::start().await;
    let ms = Duration::from_millis;
    let idle = IdleRules {
        hibernate_after: Some(ms(50)),
        archive_after: Some(ms(200)),
        delete_after: Some(ms(1500)),
        ..IdleRules::default()
    };
    let wanted = CreateSandbox { idle, on_timeout: OnTimeout::Pause, ..request() };
    let sandbox = t.try_create(wanted).await.expect("created");
    let in_archive = async {
        while t.get(&sandbox.id).await.tier != Some(Tier::Archived) {
            tokio::time::sleep(ms(2)).await;
        }
    };
    within(in_archive).await;
    t.wait_for(&sandbox.id, SandboxState::Gone).await;
    assert!(t.directories("archive").is_empty());
    t.assert_nothing_stray().await;
    let no_way = IdleRules { archive_after: Some(ms(200)), ..IdleRules::default() };
    let refused = t.try_create(CreateSandbox { idle: no_way, ..request() }).await;
    assert!(matches!(refused, Err(ServiceError::Invalid { field: "idle", .. })), "{refused:?}");
}

#[tokio::test]
async fn damage_is_found_when_it_is_brought_back_and_its_siblings_are_not_harmed() {
    let t = TestServer::start().await;
    let (spoilt, whole) = (t.create().await, t.create().await);
    for sandbox in [&spoilt, &whole] {
        t.says(&sandbox.id, "echo kept > file").await;
        t.pause(&sandbox.id, ARCHIVED).await;
    }
    let saved = t.get(&spoilt.id).await.saved.expect("saved");
    let directory = t.path().join("archive").join(saved.as_str());
    let file = std::fs::read_dir(&directory).expect("there").next().expect("a file").expect("a file").path();
    let kept = std::fs::read(&file).expect("read");
    std::fs::write(&file, b"spoilt").expect("written");
    let refused = within(t.service.resume(&t.who, &spoilt.id, None)).await;
    let of = StateOf::Sandbox(spoilt.id.clone());
    assert!(matches!(&refused, Err(ServiceError::StateUnusable { of: named, .. }) if *named == of), "{refused:?}");
    assert_eq!(t.get(&spoilt.id).await.tier, Some(Tier::Archived));
    t.assert_nothing_stray().await;
    t.resume(&whole.id).await;
    assert_eq!(t.says(&whole.id, "cat file").await, "kept\n");
    // What is mended is whole again.
    std::fs::write(&file, kept).expect("written");
    t.resume(&spoilt.id).await;
    assert_eq!(t.says(&spoilt.id, "cat file").await, "kept\n");
}

#[tokio::test]
async fn an_archive_that_fails_leaves_the_sandbox_hibernated() {
    let t = TestServer::start().await;
    let sandbox = t.create().await;
    t.says(&sandbox.id, "echo kept > file").await;
    t.pause(&sandbox.id, HIBERNATED).await;
    // A file where the archive's directory should be: nothing can be written there.
    let saved = t.get(&sandbox.id).await.saved.expect("saved");
    let in_the_way = t.path().join("archive").join(saved.as_str());
    std::fs::write(&in_the_way, b"").expect("written");
    let refused = within(t.service.pause(&t.who, &sandbox.id, ARCHIVED)).await;
    assert!(matches!(refused, Err(ServiceError::Archive(_))), "{refused:?}");
    assert_eq!(t.get(&sandbox.id).await.tier, Some(Tier::Hibernated));
    std::fs::remove_file(&in_the_way).expect("removed");
    t.pause(&sandbox.id, ARCHIVED).await;
    t.resume(&sandbox.id).await;
    assert_eq!(t.says(&sandbox.id, "cat file").await, "kept\n");
}

#[tokio::test]
async fn a_server_that_dies_on_the_way_back_finds_it_whole() {
    for (step, moment) in
        [(Step::Restore, Moment::Before), (Step::Restore, Moment::After), (Step::Resume, Moment::Before)]
    {
        let mut t = TestServer::start().await;
        let sandbox = t.create().await;
        t.says(&sandbox.id, "echo kept > file").await;
        t.pause(&sandbox.id, ARCHIVED).await;
        let mut hang = t.host.hang(step, moment);
        let (service, who, id) = (t.service.clone(), t.who.clone(), sandbox.id.clone());
        let resume = tokio::spawn(async move { service.resume(&who, &id, None).await });
        within(hang.reached()).await;
        t.crash().await;
        assert!(within(resume).await.expect("joined").is_err());
        let rests = async {
            while matches!(t.get(&sandbox.id).await.state, SandboxState::Resuming) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        within(rests).await;
        within(t.service.resume(&t.who, &sandbox.id, None)).await.expect("resumed");
        assert_eq!(t.says(&sandbox.id, "cat file").await, "kept\n", "{step:?} {moment:?}");
        t.assert_nothing_stray().await;
    }
}
