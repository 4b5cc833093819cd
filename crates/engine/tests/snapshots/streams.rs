//! What is under way while a snapshot is taken: it goes on, and no child has it.

use std::{
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use stockade_engine::{GuestClient, Machine, guest::ReadFile};

use crate::{
    counts_on, read, running,
    support::{self, Lines, Rig, raw_disk, work},
    write,
};

#[tokio::test]
async fn a_machine_that_writes_all_the_time_is_caught_at_one_instant() {
    let rig = Rig::new().await;
    let parent = running(&rig).await;
    let guest = parent.guest().await.expect("answers");
    write(&guest, "/churn/.keep", b"").await;
    let mut churn = work(&guest, &["churn", "/churn"]).await;
    let mut count = work(&guest, &["count"]).await;
    let mut last = churn.number().await;
    let mut counted = count.number().await;
    for round in 0..4 {
        let snapshot = rig.snapshot(&parent).await;
        for _ in 0..20 {
            last += 1;
            assert_eq!(churn.number().await, last);
            counted += 1;
            assert_eq!(count.number().await, counted);
        }
        let child = rig.start_from(&snapshot).await;
        let guest = child.guest().await.expect("answers");
        let mut copy = Lines::attach(&guest, "churn").await;
        let first = copy.number().await;
        assert!(first + 1000 > last, "{first}, the parent is at {last}");
        assert_eq!(copy.number().await, first + 1);
        counts_on(&child, 0).await;
        child.kill().await.expect("killed");

        let disk = rig.data.join(format!("disk-{round}"));
        raw_disk(&rig.template, &snapshot, &disk);
        let check =
            |arguments: &[&str]| Command::new("e2fsck").args(arguments).arg(&disk).output().expect("e2fsck runs");
        // The journal is replayed, as the next mount would; nothing is left to mend then.
        assert!(matches!(check(&["-p"]).status.code(), Some(0 | 1)));
        let output = check(&["-f", "-n"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
    parent.kill().await.expect("killed");
}

#[tokio::test]
async fn uploads_streams_and_terminals_run_through_snapshots_and_children_get_none_of_them() {
    let rig = Rig::new().await;
    let parent = Arc::new(running(&rig).await);
    let guest = parent.guest().await.expect("answers");
    let mut count = work(&guest, &["count"]).await;
    let mut terminal = Lines::of(guest.start(&support::terminal(&["count"])).await.expect("started"));
    let (mut counted, mut shown) = (count.number().await, terminal.number().await);
    let bytes: Vec<u8> = (0..12_u32 << 18).flat_map(u32::to_le_bytes).collect();
    let (sender, expected) = (guest.clone(), bytes.clone());
    let upload = tokio::spawn(async move { write(&sender, "/large", &bytes).await });
    let mut snapshots = Vec::new();
    while !upload.is_finished() || snapshots.len() < 3 {
        snapshots.push(rig.snapshot(&parent).await);
        counted += 1;
        assert_eq!(count.number().await, counted);
        shown += 1;
        assert_eq!(terminal.number().await, shown);
        if snapshots.len() > 12 {
            break;
        }
    }
    upload.await.expect("uploaded");
    assert!(read(&guest, "/large").await.is_some_and(|bytes| bytes == expected));
    for _ in 0..100 {
        counted += 1;
        assert_eq!(count.number().await, counted);
    }
    for snapshot in &snapshots {
        let child = rig.start_from(snapshot).await;
        // The agent takes a new session, whatever the old one was in the middle of.
        assert!(counts_on(&child, 0).await > 0);
        child.kill().await.expect("killed");
    }
    parent.kill().await.expect("killed");
    rig.assert_clean().await;
}

#[tokio::test]
async fn a_child_of_a_machine_whose_host_did_not_read_answers() {
    let rig = Rig::new().await;
    let parent = running(&rig).await;
    let deaf = Arc::new(AtomicBool::new(false));
    let stream = support::Deafened::new(parent.connect_link().expect("connects"), deaf.clone());
    let guest = GuestClient::open(stream, Duration::from_secs(60)).await.expect("answers");
    let mut lines = work(&guest, &["count"]).await;
    lines.number().await;
    write(&guest, "/large", &vec![7; 4 << 20]).await;
    deaf.store(true, Ordering::Relaxed);
    let request = ReadFile { path: "/large".to_owned(), user: Some("root".to_owned()), ..ReadFile::default() };
    // More than the socket holds: the emulator has a part of it in hand.
    let unread = guest.read_file(&request);
    assert!(tokio::time::timeout(Duration::from_secs(3), unread).await.is_err(), "nothing is read");
    let snapshot = rig.snapshot(&parent).await;
    let child = rig.start_from(&snapshot).await;
    assert!(counts_on(&child, 0).await > 0);
    child.kill().await.expect("killed");
    parent.kill().await.expect("killed");
    rig.assert_clean().await;
}
