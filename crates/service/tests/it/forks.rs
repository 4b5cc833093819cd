//! Snapshots, forks, promotes and rollbacks.

use std::{collections::BTreeSet, time::Duration};

use stockade_engine::fake::{Moment, Step};
use stockade_model::{EndCause, Sandbox, SandboxId, SandboxState, Snapshot};
use stockade_service::{CreateSandbox, ForkRequest, ServiceError, SnapshotFilter, SnapshotRequest, SnapshotScope};

use crate::{
    lifecycle::run,
    states::{HIBERNATED, MODES},
    support::{TestServer, eventually, labels, request, within},
};

pub(crate) fn snapshot_request() -> SnapshotRequest {
    SnapshotRequest { name: None, labels: <_>::default(), scope: SnapshotScope::MemoryAndDisk, expires_after: None }
}

impl TestServer {
    pub(crate) async fn snapshot(&self, id: &SandboxId) -> Snapshot {
        self.try_snapshot(id).await.expect("taken")
    }

    pub(crate) async fn try_snapshot(&self, id: &SandboxId) -> Result<Snapshot, ServiceError> {
        within(self.service.snapshot(&self.who, id, snapshot_request())).await
    }

    pub(crate) async fn fork(&self, id: &SandboxId, count: u32) -> Vec<Sandbox> {
        let request = ForkRequest { count, ..ForkRequest::default() };
        let children = within(self.service.fork(&self.who, id, request)).await.expect("forked");
        children.into_iter().map(|child| child.expect("a child")).collect()
    }

    pub(crate) async fn says(&self, id: &SandboxId, command: &str) -> String {
        run(&self.guest(id).await, command).await
    }

    async fn listed(&self, filter: SnapshotFilter) -> Vec<Snapshot> {
        let filter = SnapshotFilter { limit: filter.limit.max(1), ..filter };
        within(self.service.snapshots(&self.who, &filter)).await.expect("a list").items
    }
}

#[tokio::test]
async fn a_sandbox_is_made_from_a_snapshot_like_from_a_template() {
    let t = TestServer::start().await;
    let wanted = CreateSandbox { env: labels([("A", "parent"), ("B", "parent")]), ..request() };
    let source = t.try_create(wanted).await.expect("created");
    t.says(&source.id, "echo one > file").await;
    for scope in [SnapshotScope::MemoryAndDisk, SnapshotScope::DiskOnly] {
        let wanted = SnapshotRequest { name: Some("point".to_owned()), scope, ..snapshot_request() };
        let snapshot = within(t.service.snapshot(&t.who, &source.id, wanted)).await.expect("taken");
        assert_eq!(snapshot.has_memory, scope == SnapshotScope::MemoryAndDisk);
        t.says(&source.id, "echo two > file").await;
        for name in ["point", snapshot.id.as_str()] {
            let wanted = CreateSandbox { template: name.to_owned(), env: labels([("B", "child")]), ..request() };
            let child = t.try_create(wanted).await.expect("created");
            assert_eq!(child.lineage.snapshot.as_ref(), Some(&snapshot.id));
            assert_eq!(t.says(&child.id, "cat file; echo $FROM $A $B").await, "one\ntemplate parent child\n");
            let grandchild = t.snapshot(&child.id).await;
            assert_eq!(grandchild.parent.as_ref(), Some(&snapshot.id));
        }
        assert_eq!(t.says(&source.id, "cat file").await, "two\n");
        t.says(&source.id, "echo one > file").await;
    }
    t.assert_nothing_stray().await;
}

#[tokio::test]
async fn snapshots_are_found_by_sandbox_name_and_label_and_page_by_page() {
    let t = TestServer::start().await;
    let (one, other) = (t.create().await, t.create().await);
    let mut made = Vec::new();
    for (nth, id) in [&one.id, &other.id, &one.id, &one.id].into_iter().enumerate() {
        let wanted = SnapshotRequest {
            name: Some(if nth == 2 { "odd" } else { "even" }.to_owned()),
            labels: labels([("nth", &nth.to_string())]),
            ..snapshot_request()
        };
        made.push(within(t.service.snapshot(&t.who, id, wanted)).await.expect("taken").id);
    }
    let ids = |found: Vec<Snapshot>| found.into_iter().map(|snapshot| snapshot.id).collect::<Vec<_>>();
    let all = SnapshotFilter { limit: 10, ascending: true, ..<_>::default() };
    assert_eq!(ids(t.listed(all.clone()).await), made);
    let of_one = SnapshotFilter { sandbox: Some(one.id.clone()), ..all.clone() };
    assert_eq!(ids(t.listed(of_one).await), [made[0].clone(), made[2].clone(), made[3].clone()]);
    let odd = SnapshotFilter { name: Some("odd".to_owned()), ..all.clone() };
    assert_eq!(ids(t.listed(odd).await), [made[2].clone()]);
    let third = SnapshotFilter { labels: labels([("nth", "3")]), ..all.clone() };
    assert_eq!(ids(t.listed(third).await), [made[3].clone()]);
    let newest = within(t.service.get_snapshot(&t.who, "even")).await.expect("found");
    assert_eq!(newest.id, made[3]);
    let mut paged = Vec::new();
    let mut cursor = None;
    loop {
        let filter = SnapshotFilter { limit: 3, ascending: true, cursor, ..<_>::default() };
        let page = within(t.service.snapshots(&t.who, &filter)).await.expect("a page");
        paged.extend(ids(page.items));
        cursor = page.cursor;
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(paged, made);
    let stranger = t.stranger().await;
    for name in ["even", made[0].as_str()] {
        let refused = t.service.get_snapshot(&stranger, name).await;
        assert!(matches!(refused, Err(ServiceError::SnapshotNotFound { .. })), "{refused:?}");
        let wanted = CreateSandbox { template: name.to_owned(), ..request() };
        let refused = t.service.create(&stranger, wanted).await;
        assert!(matches!(refused, Err(ServiceError::TemplateNotFound { .. })), "{refused:?}");
    }
    let refused = t.service.delete_snapshot(&stranger, &made[0]).await;
    assert!(matches!(refused, Err(ServiceError::SnapshotNotFound { .. })), "{refused:?}");
}

#[tokio::test]
async fn a_snapshot_is_deleted_and_what_was_made_from_it_lives_on() {
    let t = TestServer::start().await;
    let source = t.create().await;
    t.says(&source.id, "echo one > file").await;
    let snapshot = t.snapshot(&source.id).await;
    let wanted = CreateSandbox { template: snapshot.id.to_string(), ..request() };
    let mut hang = t.host.hang(Step::Restore, Moment::Before);
    let child = t.create_in_background(wanted);
    within(hang.reached()).await;
    let refused = within(t.service.delete_snapshot(&t.who, &snapshot.id)).await;
    assert!(matches!(refused, Err(ServiceError::SnapshotInUse { .. })), "{refused:?}");
    hang.release();
    let child = within(child).await.expect("joined").expect("created");
    t.kill(&source.id).await.expect("killed");
    within(t.service.delete_snapshot(&t.who, &snapshot.id)).await.expect("deleted");
    let again = within(t.service.delete_snapshot(&t.who, &snapshot.id)).await;
    assert!(matches!(again, Err(ServiceError::SnapshotNotFound { .. })), "{again:?}");
    assert_eq!(t.says(&child.id, "cat file").await, "one\n");
    t.pause(&child.id, HIBERNATED).await;
    t.resume(&child.id).await;
    assert_eq!(t.says(&child.id, "cat file").await, "one\n");
    t.assert_nothing_stray().await;
}

#[tokio::test]
async fn a_snapshot_that_has_expired_is_gone_at_once() {
    let t = TestServer::start().await;
    let sandbox = t.create().await;
    let wanted = SnapshotRequest { expires_after: Some(Duration::from_millis(1)), ..snapshot_request() };
    let snapshot = within(t.service.snapshot(&t.who, &sandbox.id, wanted)).await.expect("taken");
    tokio::time::sleep(Duration::from_millis(5)).await;
    let gone = t.service.get_snapshot(&t.who, snapshot.id.as_str()).await;
    assert!(matches!(gone, Err(ServiceError::SnapshotNotFound { .. })), "{gone:?}");
    let mut t = t;
    t.crash().await;
    eventually("its directory is removed", || t.directories("snapshots").is_empty()).await;
}

#[tokio::test]
async fn forks_have_all_of_the_parent_and_an_identity_of_their_own() {
    let t = TestServer::start().await;
    let wanted = CreateSandbox { metadata: labels([("run", "1")]), auto_resume: true, ..request() };
    let parent = t.try_create(wanted).await.expect("created");
    t.says(&parent.id, "echo shared > file").await;
    let stream = t.guest(&parent.id).await;
    let children = t.fork(&parent.id, 8).await;
    within(stream.health()).await.expect("the parent's link goes on");
    let ids: BTreeSet<_> = children.iter().map(|child| child.id.clone()).collect();
    assert_eq!(ids.len(), 8);
    for (index, child) in children.iter().enumerate() {
        assert_eq!(child.lineage.parent.as_ref(), Some(&parent.id));
        assert_eq!(child.lineage.fork_index, Some(index as u32));
        assert_eq!((&child.metadata, child.rules), (&parent.metadata, parent.rules));
        t.says(&child.id, &format!("echo {index} >> file")).await;
    }
    for (index, child) in children.iter().enumerate() {
        assert_eq!(t.says(&child.id, "cat file").await, format!("shared\n{index}\n"));
        assert!(!child.access_token.matches(parent.access_token.expose()));
    }
    assert_eq!(t.says(&parent.id, "cat file").await, "shared\n");
    eventually("the moment between is forgotten", || t.directories("snapshots").is_empty()).await;
    t.assert_nothing_stray().await;
}

#[tokio::test]
async fn forks_of_forks_to_depth_ten_and_many_forks_of_one_parent_at_once() {
    let t = TestServer::start().await;
    let mut parent = t.create().await;
    for depth in 0..10 {
        t.says(&parent.id, &format!("echo {depth} >> file")).await;
        parent = t.fork(&parent.id, 1).await.remove(0);
    }
    assert_eq!(t.says(&parent.id, "cat file | tr -d '\\n'").await, "0123456789");
    let forks = futures::future::join_all((0..5).map(|_| t.fork(&parent.id, 3))).await;
    let ids: BTreeSet<_> = forks.iter().flatten().map(|child| &child.id).collect();
    assert_eq!(ids.len(), 15);
    eventually("the moments between are forgotten", || t.directories("snapshots").is_empty()).await;
    t.assert_nothing_stray().await;
}

#[tokio::test]
async fn a_fork_that_cannot_be_is_refused_before_anything_changes() {
    let t = TestServer::start_with(|config| config.max_sandboxes = 10).await;
    let parent = t.create().await;
    let fork = async |count| within(t.service.fork(&t.who, &parent.id, ForkRequest { count, ..<_>::default() })).await;
    for count in [0, 101] {
        assert!(matches!(fork(count).await, Err(ServiceError::Invalid { field: "count", .. })));
    }
    assert!(matches!(fork(10).await, Err(ServiceError::Busy { .. })));
    t.host.set_full(true);
    assert!(matches!(fork(2).await, Err(ServiceError::Engine(_))));
    t.host.set_full(false);
    for mode in MODES {
        t.pause(&parent.id, mode).await;
        assert!(matches!(fork(1).await, Err(ServiceError::WrongState { .. })));
        let refused = within(t.service.snapshot(&t.who, &parent.id, snapshot_request())).await;
        assert!(matches!(refused, Err(ServiceError::WrongState { .. })), "{refused:?}");
        t.resume(&parent.id).await;
    }
    assert_eq!(t.everything().await.len(), 1);
    assert_eq!(fork(9).await.expect("there is room for nine").len(), 9);
}

#[tokio::test]
async fn of_a_fork_that_fails_in_part_the_rest_is_told_apart_or_undone() {
    let t = TestServer::start().await;
    let parent = t.create().await;
    t.host.fail(Step::Restore, Moment::After, 1);
    let request = ForkRequest { count: 4, ..ForkRequest::default() };
    let children = within(t.service.fork(&t.who, &parent.id, request.clone())).await.expect("forked");
    assert_eq!(children.iter().filter(|child| child.is_ok()).count(), 3);
    t.host.fail(Step::Restore, Moment::Before, 1);
    let request = ForkRequest { all_or_nothing: true, ..request };
    let refused = within(t.service.fork(&t.who, &parent.id, request)).await;
    assert!(matches!(refused, Err(ServiceError::Engine(_))), "{refused:?}");
    let alive = t.everything().await.into_iter().filter(|sandbox| !sandbox.state.is_final()).count();
    assert_eq!(alive, 4, "the parent and the three of the first fork");
    eventually("the moments between are forgotten", || t.directories("snapshots").is_empty()).await;
    t.assert_nothing_stray().await;
}

#[tokio::test]
async fn a_promoted_child_has_the_parents_id_and_its_own_files() {
    let mut t = TestServer::start().await;
    for mode in [None, Some(MODES[0]), Some(MODES[1]), Some(MODES[2])] {
        let parent = t.create().await;
        t.says(&parent.id, "echo parent > file").await;
        let children = t.fork(&parent.id, 2).await;
        t.says(&children[1].id, "echo best > file").await;
        if let Some(mode) = mode {
            t.pause(&parent.id, mode).await;
        }
        let promoted = within(t.service.promote(&t.who, &children[1].id)).await.expect("promoted");
        assert_eq!((&promoted.id, promoted.state), (&parent.id, SandboxState::Running));
        assert_eq!(promoted.machine, children[1].machine);
        assert_eq!(t.says(&parent.id, "cat file").await, "best\n");
        assert_eq!(t.cause(&children[1].id).await, EndCause::Promoted { into: parent.id.clone() });
        assert!(matches!(t.kill(&children[1].id).await, Err(ServiceError::SandboxEnded { .. })));
        eventually("the moment between is forgotten", || t.directories("snapshots").is_empty()).await;
        t.assert_nothing_stray().await;
        t.crash().await;
        assert_eq!(t.says(&parent.id, "cat file").await, "best\n");
        t.kill(&children[0].id).await.expect("killed");
        t.kill(&parent.id).await.expect("killed");
    }
    let lone = t.create().await;
    let refused = within(t.service.promote(&t.who, &lone.id)).await;
    assert!(matches!(refused, Err(ServiceError::Invalid { .. })), "{refused:?}");
}

#[tokio::test]
async fn a_rollback_keeps_the_id_and_forgets_what_came_after() {
    let t = TestServer::start().await;
    for mode in [None, Some(MODES[0]), Some(MODES[1]), Some(MODES[2])] {
        let sandbox = t.create().await;
        t.says(&sandbox.id, "echo before > file").await;
        let snapshot = t.snapshot(&sandbox.id).await;
        t.says(&sandbox.id, "echo after > file").await;
        if let Some(mode) = mode {
            t.pause(&sandbox.id, mode).await;
        }
        let back = within(t.service.rollback(&t.who, &sandbox.id, snapshot.id.as_str())).await.expect("rolled back");
        assert_eq!((&back.id, back.state, &back.metadata), (&sandbox.id, SandboxState::Running, &sandbox.metadata));
        assert_eq!(back.lineage.snapshot.as_ref(), Some(&snapshot.id));
        assert_eq!(t.says(&sandbox.id, "cat file").await, "before\n");
        t.assert_nothing_stray().await;
        let other = t.create().await;
        let refused = within(t.service.rollback(&t.who, &other.id, snapshot.id.as_str())).await;
        assert!(matches!(refused, Err(ServiceError::Invalid { field: "snapshot", .. })), "{refused:?}");
    }
}

#[tokio::test]
async fn a_host_without_room_refuses_a_fork_before_anything_changes() {
    let t = TestServer::start().await;
    let parent = t.create().await;
    t.host.set_full(true);
    let wanted = ForkRequest { count: 3, ..ForkRequest::default() };
    let refused = within(t.service.fork(&t.who, &parent.id, wanted)).await;
    let no_capacity =
        |error: &ServiceError| matches!(error, ServiceError::Engine(stockade_engine::EngineError::NoCapacity { .. }));
    assert!(refused.as_ref().err().is_some_and(no_capacity), "{refused:?}");
    t.host.set_full(false);
    assert_eq!(t.everything().await.len(), 1);
    assert_eq!(t.service.events(&t.who, &parent.id).await.expect("events").len(), 2);
    t.assert_nothing_stray().await;
}
