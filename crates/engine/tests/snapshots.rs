//! Snapshots of real machines under QEMU, and machines started from them.

mod support;

use std::time::Duration;

use stockade_engine::{Engine, Machine, SnapshotScope};
use support::{Lines, Rig, error_text, work};

#[tokio::test]
async fn a_snapshot_leaves_its_machine_alone_and_children_go_on_from_it() {
    let rig = Rig::new().await;
    let parent = rig.start().await;
    parent.resume().await.expect("resumed");
    let guest = parent.guest().await.expect("answers");
    let mut lines = work(&guest, &["count"]).await;
    let mut expected = 1;
    while expected < 50 {
        assert_eq!(lines.number().await, expected);
        expected += 1;
    }
    let directory = rig.snapshot_dir();
    let report = parent.snapshot(&directory, SnapshotScope::MemoryAndDisk).await;
    let report = report.unwrap_or_else(|error| panic!("{}", error_text(error)));
    assert!(report.memory_bytes > 1 << 20 && report.disk_bytes > 0 && report.paused > Duration::ZERO, "{report:?}");
    // The session and the stream are those from before.
    for _ in 0..200 {
        assert_eq!(lines.number().await, expected);
        expected += 1;
    }
    assert!(guest.is_open());
    let checked = rig.engine.check_snapshot(&rig.template, &directory).await.expect("is whole");
    assert_eq!(
        (checked.scope, checked.memory_bytes, checked.disk_bytes),
        (report.scope, report.memory_bytes, report.disk_bytes)
    );

    let child = rig.start_from(&directory).await;
    let other = child.guest().await.expect("answers");
    let mut copy = Lines::attach(&other, "count").await;
    let first = copy.number().await;
    assert!(first >= 49, "{first}");
    for next in first + 1..first + 200 {
        assert_eq!(copy.number().await, next);
    }
    parent.kill().await.expect("killed");
    assert_eq!(copy.number().await, first + 200);
    child.kill().await.expect("killed");
    rig.assert_clean().await;
}
