use std::collections::BTreeSet;

use stockade_model::SandboxState;
use stockade_service::{ListFilter, ServiceError};

use crate::support::{TestServer, labels, request, within};

fn by_run(run: &str) -> ListFilter {
    ListFilter { metadata: labels([("run", run)]), limit: 3, ..ListFilter::default() }
}

#[tokio::test]
async fn every_survivor_comes_once_while_others_come_and_go() {
    for ascending in [true, false] {
        let t = TestServer::start().await;
        let mut survivors = BTreeSet::new();
        for n in 0..7 {
            let mut wanted = request();
            wanted.metadata = labels([("run", "this"), ("n", &n.to_string())]);
            survivors.insert(t.try_create(wanted).await.expect("created").id);
        }
        t.create().await;
        let mut filter = ListFilter { ascending, ..by_run("this") };
        let mut seen = Vec::new();
        loop {
            let page = within(t.service.list(&t.who, &filter)).await.expect("a page");
            assert!(page.items.len() <= 3);
            seen.extend(page.items.iter().map(|sandbox| sandbox.id.clone()));
            let Some(cursor) = page.cursor else { break };
            filter.cursor = Some(cursor);
            // One that was seen goes, and one comes.
            t.kill(seen.last().expect("a full page")).await.expect("killed");
            let mut wanted = request();
            wanted.metadata = labels([("run", "this")]);
            if seen.len() <= 6 {
                t.try_create(wanted).await.expect("created");
            }
        }
        let once: BTreeSet<_> = seen.iter().cloned().collect();
        assert_eq!(once.len(), seen.len(), "none twice");
        assert!(once.is_superset(&survivors), "none missing");
    }
}

#[tokio::test]
async fn filters_are_applied_all_of_them() {
    let t = TestServer::start().await;
    t.add_template(None, "other").await;
    let mut ids = Vec::new();
    for (run, kind, template) in [("1", "a", "base"), ("1", "b", "base"), ("2", "a", "other")] {
        let mut wanted = request();
        wanted.template = template.to_owned();
        wanted.metadata = labels([("run", run), ("kind", kind)]);
        ids.push(t.try_create(wanted).await.expect("created").id);
    }
    t.kill(&ids[1]).await.expect("killed");
    let count = async |filter: ListFilter| t.list(ListFilter { limit: 1000, ..filter }).await.len();
    let with = |pairs| ListFilter { metadata: pairs, ..ListFilter::default() };
    assert_eq!(count(ListFilter::default()).await, 2, "what has ended is not shown unless asked for");
    assert_eq!(count(ListFilter { states: vec![SandboxState::Gone], ..<_>::default() }).await, 1);
    assert_eq!(
        count(ListFilter { states: vec![SandboxState::Gone, SandboxState::Running], ..<_>::default() }).await,
        3
    );
    assert_eq!(count(with(labels([("run", "1")]))).await, 1);
    assert_eq!(count(with(labels([("run", "1"), ("kind", "b")]))).await, 0);
    assert_eq!(count(with(labels([("run", "none")]))).await, 0);
    assert_eq!(count(with(labels([("run", "%"), ("kind", "a' OR '1'='1")]))).await, 0);
    assert_eq!(count(ListFilter { template: Some("other".to_owned()), ..<_>::default() }).await, 1);
    assert_eq!(count(ListFilter { template: Some(t.template.to_string()), ..<_>::default() }).await, 1);
    let stranger = t.stranger().await;
    let theirs = within(t.service.list(&stranger, &ListFilter { limit: 10, ..<_>::default() })).await.expect("a page");
    assert!(theirs.items.is_empty());
}

#[tokio::test]
async fn limits_and_cursors_that_make_no_sense_are_refused() {
    let t = TestServer::start().await;
    for limit in [0, 1001, u32::MAX] {
        let refused = t.service.list(&t.who, &ListFilter { limit, ..<_>::default() }).await;
        assert!(matches!(refused, Err(ServiceError::Invalid { field: "limit", .. })), "{refused:?}");
    }
    for cursor in ["", "a", "x1", "a-1", "a1 OR 1", "d1", "a99999999999999999999", "\u{1F980}"] {
        let filter = ListFilter { limit: 10, ascending: true, cursor: Some(cursor.to_owned()), ..<_>::default() };
        let refused = t.service.list(&t.who, &filter).await;
        assert!(matches!(refused, Err(ServiceError::Invalid { field: "cursor", .. })), "{cursor}: {refused:?}");
    }
}
