//! Watches: what is told of a tree that changes.

mod common;

use std::collections::BTreeSet;

use common::{Guest, bytes, refusal};
use futures::StreamExt;
use stockade_engine::guest::{Events, WriteFile};
use stockade_wire::{
    ErrorCode,
    event::Event,
    files::{FileChange, FileEvent, WatchRequest},
};

async fn watch(guest: &Guest, name: &str, recursive: bool) -> Events {
    let request = WatchRequest { path: guest.path(name), user: None, recursive, entry: true };
    guest.client.watch(&request).await.expect("watched")
}

/// Reads events up to one about a marker file.
async fn until(events: &mut Events, marker: &str) -> Vec<FileEvent> {
    let mut seen = Vec::new();
    while let Some(event) = events.events.next().await {
        match event.expect("the stream holds") {
            Event::File(file) if file.name == marker => return seen,
            Event::File(file) => seen.push(file),
            Event::KeepAlive => {}
            other => panic!("unexpected {other:?}"),
        }
    }
    panic!("the watch ended");
}

#[tokio::test]
async fn one_uploaded_file_gives_exactly_three_events() {
    let guest = Guest::start().await;
    let mut events = watch(&guest, "", false).await;
    guest.write("new.txt", "hello").await;
    guest.write("marker", "").await;
    let seen: Vec<_> = until(&mut events, "marker").await.into_iter().map(|event| (event.name, event.change)).collect();
    let name = || "new.txt".to_owned();
    assert_eq!(seen, [(name(), FileChange::Create), (name(), FileChange::Chmod), (name(), FileChange::Write)]);
}

#[tokio::test]
async fn an_event_carries_its_entry_where_asked_for() {
    let guest = Guest::start().await;
    let mut events = watch(&guest, "", false).await;
    std::fs::write(guest.path("a"), "12345").expect("written");
    guest.write("marker", "").await;
    let seen = until(&mut events, "marker").await;
    let entry = seen[0].entry.as_ref().expect("described");
    assert_eq!((entry.name.as_str(), entry.path.as_str()), ("a", guest.path("a").as_str()));
}

#[tokio::test]
async fn no_path_of_a_tree_that_grows_fast_is_missed_or_told_twice() {
    let guest = Guest::start().await;
    let script = guest.input("file_watch_burst.sh");
    let mut whole = 0;
    for round in 0..20 {
        let name = format!("w{round}");
        std::fs::create_dir(guest.path(&name)).expect("made");
        let mut events = watch(&guest, &name, true).await;
        assert_eq!(guest.shell(&format!("sh {script} {}", guest.path(&name))).await.exit.code, Some(0));
        std::fs::write(guest.path(&format!("{name}/marker")), "").expect("written");
        let seen = until(&mut events, "marker").await;
        let told = |change| seen.iter().filter(move |event| event.change == change).map(|event| event.name.as_str());
        let created: Vec<_> = told(FileChange::Create).collect();
        let count = |path| created.iter().filter(|name| **name == path).count();
        for path in ["a", "a/b", "a/b/c", "a/b/c/first.txt", "d", "d/e", "d/e/third.txt", "moved", "moved/fourth.txt"] {
            assert_eq!(count(path), 1, "round {round}: {path} in {created:?}");
        }
        assert!(told(FileChange::Write).any(|name| name == "a/b/c/first.txt"), "round {round}");
        // On a busy host this file can come and go before its directory can be watched; then it is not told
        // at all. Half of its story would be wrong.
        let removed = told(FileChange::Remove).filter(|name| *name == "d/second.txt").count();
        assert_eq!(count("d/second.txt"), removed, "round {round}");
        whole += removed;
        let unique: BTreeSet<_> = created.iter().collect();
        assert_eq!(unique.len(), created.len(), "round {round}: {created:?}");
    }
    assert!(whole > 0, "the file that is removed at once is seen in most rounds");
}

#[tokio::test]
async fn renames_and_removals_are_told_and_a_moved_out_tree_is_left_alone() {
    let guest = Guest::start().await;
    std::fs::create_dir_all(guest.path("w/sub")).expect("made");
    let mut events = watch(&guest, "w", true).await;
    std::fs::write(guest.path("w/one"), "").expect("written");
    std::fs::rename(guest.path("w/one"), guest.path("w/two")).expect("renamed");
    std::fs::remove_file(guest.path("w/two")).expect("removed");
    std::fs::rename(guest.path("w/sub"), guest.path("out")).expect("moved");
    guest.write("w/settle", "").await;
    std::fs::write(guest.path("out/unseen"), "").expect("written");
    guest.write("w/marker", "").await;
    let seen: Vec<_> = until(&mut events, "marker").await.into_iter().map(|event| (event.name, event.change)).collect();
    for (name, change) in [
        ("one", FileChange::Create),
        ("one", FileChange::Rename),
        ("two", FileChange::Create),
        ("two", FileChange::Remove),
        ("sub", FileChange::Rename),
    ] {
        assert!(seen.contains(&(name.to_owned(), change)), "{name} {change:?} in {seen:?}");
    }
    assert!(!seen.iter().any(|(name, _)| name.contains("unseen")), "{seen:?}");
}

#[tokio::test]
async fn a_watch_ends_with_its_directory() {
    let guest = Guest::start().await;
    std::fs::create_dir(guest.path("w")).expect("made");
    let mut events = watch(&guest, "w", true).await;
    std::fs::remove_dir(guest.path("w")).expect("removed");
    let mut seen = Vec::new();
    while let Some(event) = events.events.next().await {
        seen.push(event.expect("the stream ends well"));
    }
    assert!(matches!(&seen[..], [Event::File(FileEvent { change: FileChange::Remove, .. })]), "{seen:?}");
}

#[tokio::test]
async fn what_cannot_be_watched_says_why() {
    let guest = Guest::start().await;
    guest.write("file", "").await;
    let start = async |name| {
        let request = WatchRequest { path: guest.path(name), user: None, recursive: false, entry: false };
        refusal(guest.client.watch(&request).await.map(|_| ())).0
    };
    assert_eq!(start("missing").await, ErrorCode::NotFound);
    assert_eq!(start("file").await, ErrorCode::NotADirectory);
}

#[tokio::test]
async fn events_are_there_when_the_upload_is_answered() {
    let guest = Guest::start().await;
    let mut events = watch(&guest, "", false).await;
    for round in 0..50 {
        let request = WriteFile { path: guest.path("f"), ..WriteFile::default() };
        guest.client.write_file(&request, bytes(format!("{round}"))).await.expect("written");
        // Whatever comes first is already under way: nothing else will ever change the directory.
        assert!(matches!(events.events.next().await, Some(Ok(Event::File(_)))));
    }
}
