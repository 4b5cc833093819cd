//! Every verb that moves a sandbox's state, stopped at each of its steps: by a failure of the step, by the death of
//! the server, by a kill of the sandbox, and by the server's stop.

use std::time::Duration;

use stockade_engine::fake::{Moment, Step};
use stockade_model::{SandboxId, SandboxState};
use stockade_service::{
    ForkRequest, PauseMode, Principal, Service, ServiceError, SnapshotFilter, SnapshotRequest, SnapshotScope,
};

use crate::{
    states::{HIBERNATED, STANDBY, STOPPED},
    support::{TestServer, eventually, within},
};

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Verb {
    Pause(PauseMode),
    /// From a pause.
    Resume(PauseMode),
    Snapshot,
    Fork,
    Rollback,
    Promote,
}

const VERBS: [Verb; 10] = [
    Verb::Pause(STANDBY),
    Verb::Pause(HIBERNATED),
    Verb::Pause(STOPPED),
    Verb::Resume(STANDBY),
    Verb::Resume(HIBERNATED),
    Verb::Resume(STOPPED),
    Verb::Snapshot,
    Verb::Fork,
    Verb::Rollback,
    Verb::Promote,
];

const STEPS: [Step; 7] =
    [Step::Pause, Step::Snapshot, Step::Halted, Step::Restore, Step::Resume, Step::Link, Step::Identity];

/// Each verb with each point of the engine's work; not every verb passes every point.
fn points() -> impl Iterator<Item = (Verb, Step, Moment)> {
    let moments = |step| match step {
        Step::Halted | Step::Identity => &[Moment::Before][..],
        _ => &[Moment::Before, Moment::After],
    };
    let of = move |verb| {
        STEPS.into_iter().flat_map(move |step| moments(step).iter().map(move |moment| (verb, step, *moment)))
    };
    VERBS.into_iter().flat_map(of)
}

/// What a sandbox was prepared for a verb with.
struct Scene {
    id: SandboxId,
    child: Option<SandboxId>,
    snapshot: Option<String>,
    /// What its file may say afterwards.
    before: &'static str,
    after: &'static str,
}

async fn prepare(t: &TestServer, verb: Verb) -> Scene {
    let id = t.create().await.id;
    t.says(&id, "echo one > file").await;
    let mut scene = Scene { id: id.clone(), child: None, snapshot: None, before: "one\n", after: "one\n" };
    match verb {
        Verb::Resume(mode) => t.pause(&id, mode).await,
        Verb::Rollback => {
            scene.snapshot = Some(t.snapshot(&id).await.id.to_string());
            t.says(&id, "echo two > file").await;
            scene.before = "two\n";
        }
        Verb::Promote => {
            let child = t.fork(&id, 1).await.remove(0).id;
            t.says(&child, "echo child > file").await;
            scene.child = Some(child);
            scene.after = "child\n";
        }
        _ => {}
    }
    scene
}

async fn perform(service: Service, who: Principal, verb: Verb, scene: &Scene) -> Result<(), ServiceError> {
    let id = &scene.id;
    match verb {
        Verb::Pause(mode) => service.pause(&who, id, mode).await.map(drop),
        Verb::Resume(_) => service.resume(&who, id, None).await.map(drop),
        Verb::Snapshot => {
            let (scope, labels) = (SnapshotScope::MemoryAndDisk, <_>::default());
            let wanted = SnapshotRequest { name: None, labels, scope, expires_after: None };
            service.snapshot(&who, id, wanted).await.map(drop)
        }
        Verb::Fork => {
            let wanted = ForkRequest { count: 2, all_or_nothing: true, ..ForkRequest::default() };
            service.fork(&who, id, wanted).await.map(drop)
        }
        Verb::Rollback => service.rollback(&who, id, scene.snapshot.as_deref().expect("prepared")).await.map(drop),
        Verb::Promote => service.promote(&who, scene.child.as_ref().expect("prepared")).await.map(drop),
    }
}

/// The sandbox is there, at rest or running, holds what it did before or what it should, and works.
async fn check(t: &TestServer, scene: &Scene, told: &str) {
    // A server that comes back goes on with a resume behind our back.
    t.wait_for_rest(&scene.id).await;
    let found = t.get(&scene.id).await;
    let is_at_rest = matches!(found.state, SandboxState::Running | SandboxState::Paused | SandboxState::Stopped);
    assert!(is_at_rest, "{told}: {} {:?}", found.state, found.ending);
    if found.state != SandboxState::Running {
        t.resume(&scene.id).await;
    }
    let says = t.says(&scene.id, "cat file").await;
    assert!([scene.before, scene.after].contains(&says.as_str()), "{told}: {says:?}");
    // Whatever was in the way is no longer: it can be put away and brought back.
    t.pause(&scene.id, HIBERNATED).await;
    t.resume(&scene.id).await;
    assert_eq!(t.says(&scene.id, "cat file").await, says, "{told}");
}

async fn check_nothing_stray(t: &TestServer, told: &str) {
    println!("{told}");
    let all = SnapshotFilter { limit: 100, ..SnapshotFilter::default() };
    let recorded = within(t.service.snapshots(&t.who, &all)).await.expect("a list").items.len();
    eventually("moments between are forgotten", || t.directories("snapshots").len() == recorded).await;
    t.assert_nothing_stray().await;
}

#[tokio::test]
async fn a_step_that_fails_leaves_the_sandbox_as_it_was_and_nothing_else() {
    for (verb, step, moment) in points() {
        let told = format!("{verb:?} {step:?} {moment:?}");
        let t = TestServer::start().await;
        let scene = prepare(&t, verb).await;
        t.host.fail(step, moment, 1);
        let done = within(perform(t.service.clone(), t.who.clone(), verb, &scene)).await;
        t.host.clear_faults();
        assert!(matches!(done, Ok(()) | Err(ServiceError::Engine(_))), "{told}: {done:?}");
        check(&t, &scene, &told).await;
        if let Some(child) = &scene.child
            && done.is_err()
        {
            assert_eq!(t.says(child, "cat file").await, "child\n", "{told}: the child lives on");
        }
        check_nothing_stray(&t, &told).await;
    }
}

#[tokio::test]
async fn a_server_that_dies_at_any_step_leaves_the_next_one_a_whole_sandbox() {
    for (verb, step, moment) in points() {
        let told = format!("{verb:?} {step:?} {moment:?}");
        let mut t = TestServer::start().await;
        let scene = prepare(&t, verb).await;
        let mut hang = t.host.hang(step, moment);
        let reached = {
            let work = perform(t.service.clone(), t.who.clone(), verb, &scene);
            tokio::select! {
                biased;
                () = hang.reached() => true,
                done = within(work) => {
                    done.unwrap_or_else(|error| panic!("{told}: {error}"));
                    false
                }
            }
        };
        t.host.clear_faults();
        if !reached {
            continue;
        }
        t.crash().await;
        check(&t, &scene, &told).await;
        check_nothing_stray(&t, &told).await;
    }
}

#[tokio::test]
async fn a_kill_cuts_every_verb_short_and_leaves_nothing() {
    for (verb, step, moment) in points() {
        let told = format!("{verb:?} {step:?} {moment:?}");
        // A guest that has fallen silent is not waited for.
        let t = TestServer::start_with(|config| config.step_patience = Duration::from_millis(500)).await;
        let scene = prepare(&t, verb).await;
        let mut hang = t.host.hang(step, moment);
        let work = {
            let (service, who) = (t.service.clone(), t.who.clone());
            let scene =
                Scene { id: scene.id.clone(), child: scene.child.clone(), snapshot: scene.snapshot.clone(), ..scene };
            tokio::spawn(async move { perform(service, who, verb, &scene).await })
        };
        let reached = tokio::select! {
            () = hang.reached() => true,
            () = async { while !work.is_finished() { tokio::time::sleep(Duration::from_millis(1)).await } } => false,
        };
        if reached {
            // A child that is being made hangs on for as long as the step does; the others go at once.
            let killed = t.service.kill(&t.who, &scene.id);
            let released = async {
                tokio::time::sleep(Duration::from_millis(20)).await;
                hang.release();
            };
            within(async { tokio::join!(killed, released).0 }).await.unwrap_or_else(|error| panic!("{told}: {error}"));
            within(work).await.expect("joined").ok();
        } else {
            work.abort();
            t.kill(&scene.id).await.unwrap_or_else(|error| panic!("{told}: {error}"));
        }
        assert_eq!(t.get(&scene.id).await.state, SandboxState::Gone, "{told}");
        for sandbox in t.everything().await.into_iter().filter(|sandbox| !sandbox.state.is_final()) {
            t.wait_for_rest(&sandbox.id).await;
            t.kill(&sandbox.id).await.unwrap_or_else(|error| panic!("{told}: {error}"));
        }
        eventually("all machines are gone", || t.host.machines().is_empty()).await;
        check_nothing_stray(&t, &told).await;
    }
}

#[tokio::test]
async fn a_stop_of_the_server_waits_for_a_pause_that_is_under_way() {
    for mode in [STANDBY, HIBERNATED, STOPPED] {
        let mut t = TestServer::start().await;
        let sandbox = t.create().await;
        t.says(&sandbox.id, "echo kept > file").await;
        let step = if mode == STANDBY { Step::Pause } else { Step::Snapshot };
        let mut hang = t.host.hang(step, Moment::Before);
        let (service, who, id) = (t.service.clone(), t.who.clone(), sandbox.id.clone());
        let pause = tokio::spawn(async move { service.pause(&who, &id, mode).await });
        within(hang.reached()).await;
        let stop = t.service.shutdown();
        let release = async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            hang.release();
        };
        within(async { tokio::join!(stop, release) }).await;
        within(pause).await.expect("joined").expect("paused before the server ended");
        t.restart().await;
        let found = t.get(&sandbox.id).await.state;
        assert_eq!(found == SandboxState::Stopped, mode == STOPPED, "{found}");
        assert_ne!(found, SandboxState::Running);
        t.resume(&sandbox.id).await;
        assert_eq!(t.says(&sandbox.id, "cat file").await, "kept\n");
        t.assert_nothing_stray().await;
    }
}

impl TestServer {
    /// Waits until it is on its way nowhere.
    async fn wait_for_rest(&self, id: &SandboxId) {
        let at_rest = async {
            loop {
                let state = self.get(id).await.state;
                let is_moving =
                    matches!(state, SandboxState::Creating | SandboxState::Pausing | SandboxState::Resuming);
                if !is_moving {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        within(at_rest).await;
    }
}
