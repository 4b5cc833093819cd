//! Random walks through the tiers, snapshots, forks, promotions and rollbacks, with faults and deaths of the server
//! in between, against a model of what each sandbox's file says.

use std::collections::BTreeMap;

use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use stockade_engine::fake::{Moment, Step};
use stockade_model::{SandboxId, SandboxState};

use crate::{
    states::MODES,
    support::{TestServer, eventually, within},
};

/// More alive at a time would only be slower.
const MOST_ALIVE: usize = 5;

#[derive(Clone, Debug)]
enum Action {
    Create,
    Write(usize),
    Pause(usize, usize),
    Resume(usize),
    Snapshot(usize),
    CreateFrom(usize),
    Rollback(usize),
    DeleteSnapshot(usize),
    Fork(usize),
    Promote(usize),
    Kill(usize),
    Fail(usize),
    Crash,
}

fn action() -> impl Strategy<Value = Action> {
    let nth = || 0..8usize;
    prop_oneof![
        2 => Just(Action::Create),
        4 => nth().prop_map(Action::Write),
        4 => (nth(), 0..3usize).prop_map(|(nth, mode)| Action::Pause(nth, mode)),
        3 => nth().prop_map(Action::Resume),
        2 => nth().prop_map(Action::Snapshot),
        1 => nth().prop_map(Action::CreateFrom),
        2 => nth().prop_map(Action::Rollback),
        1 => nth().prop_map(Action::DeleteSnapshot),
        2 => nth().prop_map(Action::Fork),
        2 => nth().prop_map(Action::Promote),
        1 => nth().prop_map(Action::Kill),
        2 => (0..6usize).prop_map(Action::Fail),
        2 => Just(Action::Crash),
    ]
}

/// A living sandbox as it should be.
#[derive(Clone, Debug)]
struct Known {
    id: SandboxId,
    says: String,
    /// The one it was forked from.
    parent: Option<SandboxId>,
}

#[derive(Default)]
struct Model {
    alive: Vec<Known>,
    /// By id: of which sandbox, and what its file said.
    snapshots: BTreeMap<String, (SandboxId, String)>,
    written: u32,
}

impl Model {
    fn nth(&self, nth: usize) -> Option<usize> {
        (!self.alive.is_empty()).then(|| nth % self.alive.len())
    }
}

#[test]
fn random_walks_through_all_states_lose_nothing() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("runtime");
    // Failures print the shrunk sequence and are kept beside this file as a seed.
    let mut runner = TestRunner::new(Config { cases: 24, max_shrink_iters: 100, ..Config::default() });
    runner
        .run(&prop::collection::vec(action(), 1..25), |actions| {
            runtime.block_on(play(actions));
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

async fn play(actions: Vec<Action>) {
    let mut t = TestServer::start().await;
    let mut model = Model::default();
    for action in actions {
        step(&mut t, &mut model, action).await;
    }
    t.host.clear_faults();
    check(&t, &model).await;
    t.crash().await;
    check(&t, &model).await;
    eventually("moments between are forgotten", || t.directories("snapshots").len() == model.snapshots.len()).await;
    t.assert_nothing_stray().await;
}

/// One action. Each may meet a fault that was set before: what it did not do must not show.
async fn step(t: &mut TestServer, model: &mut Model, action: Action) {
    match action {
        Action::Create if model.alive.len() < MOST_ALIVE => {
            if let Ok(made) = t.try_create(crate::support::request()).await {
                model.alive.push(Known { id: made.id, says: String::new(), parent: None });
            }
        }
        Action::Create => {}
        Action::Write(nth) => {
            let Some(at) = model.nth(nth) else { return };
            let known = &mut model.alive[at];
            if t.get(&known.id).await.state == SandboxState::Running
                && let Ok(guest) = within(t.service.guest(&t.who, &known.id)).await
            {
                model.written += 1;
                crate::lifecycle::run(&guest, &format!("echo {} > file", model.written)).await;
                known.says = format!("{}\n", model.written);
            }
        }
        Action::Pause(nth, mode) => {
            let Some(at) = model.nth(nth) else { return };
            within(t.service.pause(&t.who, &model.alive[at].id, MODES[mode])).await.ok();
        }
        Action::Resume(nth) => {
            let Some(at) = model.nth(nth) else { return };
            within(t.service.resume(&t.who, &model.alive[at].id, None)).await.ok();
        }
        Action::Snapshot(nth) => {
            let Some(at) = model.nth(nth) else { return };
            let known = &model.alive[at];
            if let Ok(taken) = t.try_snapshot(&known.id).await {
                model.snapshots.insert(taken.id.to_string(), (known.id.clone(), known.says.clone()));
            }
        }
        Action::CreateFrom(nth) => {
            let Some((snapshot, (_, says))) = model.snapshots.iter().nth(nth % model.snapshots.len().max(1)) else {
                return;
            };
            if model.alive.len() < MOST_ALIVE {
                let wanted =
                    stockade_service::CreateSandbox { template: snapshot.clone(), ..crate::support::request() };
                if let Ok(made) = t.try_create(wanted).await {
                    model.alive.push(Known { id: made.id, says: says.clone(), parent: None });
                }
            }
        }
        Action::Rollback(nth) => {
            let Some(at) = model.nth(nth) else { return };
            let known = &mut model.alive[at];
            let own = model.snapshots.iter().find(|(_, (of, _))| *of == known.id);
            if let Some((snapshot, (_, says))) = own
                && within(t.service.rollback(&t.who, &known.id, snapshot)).await.is_ok()
            {
                known.says.clone_from(says);
            }
        }
        Action::DeleteSnapshot(nth) => {
            let Some(snapshot) = model.snapshots.keys().nth(nth % model.snapshots.len().max(1)).cloned() else {
                return;
            };
            within(t.service.delete_snapshot(&t.who, &snapshot.parse().expect("an id"))).await.expect("deleted");
            model.snapshots.remove(&snapshot);
        }
        Action::Fork(nth) => {
            let Some(at) = model.nth(nth) else { return };
            let parent = model.alive[at].clone();
            let wanted = stockade_service::ForkRequest { count: 2, all_or_nothing: true, ..<_>::default() };
            if model.alive.len() + 2 <= MOST_ALIVE
                && let Ok(children) = within(t.service.fork(&t.who, &parent.id, wanted)).await
            {
                let known = |child: stockade_model::Sandbox| Known {
                    id: child.id,
                    says: parent.says.clone(),
                    parent: Some(parent.id.clone()),
                };
                model.alive.extend(children.into_iter().map(|child| known(child.expect("all or nothing"))));
            }
        }
        Action::Promote(nth) => {
            let Some(at) = model.nth(nth) else { return };
            let child = model.alive[at].clone();
            let Some(parent) = model.alive.iter().position(|known| Some(&known.id) == child.parent.as_ref()) else {
                return;
            };
            if within(t.service.promote(&t.who, &child.id)).await.is_ok() {
                model.alive[parent].says = child.says;
                model.alive.remove(at);
            }
        }
        Action::Kill(nth) => {
            let Some(at) = model.nth(nth) else { return };
            let killed = model.alive.remove(at);
            within(t.service.kill(&t.who, &killed.id)).await.expect("killed");
        }
        Action::Fail(nth) => {
            let steps = [Step::Pause, Step::Snapshot, Step::Halted, Step::Restore, Step::Resume, Step::Link];
            t.host.fail(steps[nth], Moment::Before, 1);
        }
        Action::Crash => {
            t.host.clear_faults();
            t.crash().await;
        }
    }
}

/// Each living sandbox says what it should, after it was brought back if need be.
async fn check(t: &TestServer, model: &Model) {
    let mut alive: Vec<_> = t.everything().await.into_iter().filter(|sandbox| !sandbox.state.is_final()).collect();
    alive.sort_by(|one, other| one.id.cmp(&other.id));
    let mut known: Vec<_> = model.alive.iter().collect();
    known.sort_by(|one, other| one.id.cmp(&other.id));
    assert!(alive.iter().map(|sandbox| &sandbox.id).eq(known.iter().map(|known| &known.id)), "{alive:?} {known:?}");
    for (sandbox, known) in alive.iter().zip(known) {
        if sandbox.state != SandboxState::Running {
            within(t.service.resume(&t.who, &known.id, None)).await.expect("resumed");
        }
        assert_eq!(t.says(&known.id, "cat file 2>/dev/null || true").await, known.says, "{}", known.id);
    }
    let all = stockade_service::SnapshotFilter { limit: 100, ..<_>::default() };
    let snapshots = within(t.service.snapshots(&t.who, &all)).await.expect("a list").items;
    let mut ids: Vec<_> = snapshots.into_iter().map(|snapshot| snapshot.id.to_string()).collect();
    ids.sort();
    assert!(ids.iter().eq(model.snapshots.keys()), "{ids:?}");
}
