//! Disks without memory, and the layers that machines and snapshots share.

use std::{fs, os::unix::fs::MetadataExt, time::Duration};

use stockade_engine::{Engine, Machine, SnapshotScope};
use stockade_model::MachineId;

use crate::{
    counts_on, names, read, running,
    support::{Rig, error_text, work},
    write,
};

#[tokio::test]
async fn a_disk_only_snapshot_boots_cold_with_its_files_and_can_be_snapshotted_again() {
    let rig = Rig::new().await;
    let parent = running(&rig).await;
    let guest = parent.guest().await.expect("answers");
    work(&guest, &["count"]).await.number().await;
    write(&guest, "/kept", b"kept").await;
    let directory = rig.snapshot_dir();
    let report = parent.snapshot(&directory, SnapshotScope::DiskOnly).await.unwrap_or_else(|e| panic!("{e:?}"));
    assert_eq!((report.memory_bytes, report.paused), (0, Duration::ZERO));
    assert_eq!(
        rig.engine.check_snapshot(&rig.template, &directory).await.expect("whole").scope,
        SnapshotScope::DiskOnly
    );
    parent.kill().await.expect("killed");

    let id = MachineId::random();
    let booted = rig.engine.start_machine_from(&id, &rig.template, &directory).await;
    let booted = booted.unwrap_or_else(|error| panic!("{}", error_text(error)));
    let guest = booted.guest().await.expect("it runs");
    assert_eq!(read(&guest, "/kept").await.as_deref(), Some(&b"kept"[..]));
    assert!(guest.processes().await.expect("listed").processes.is_empty(), "it was booted");
    work(&guest, &["count"]).await.number().await;
    let live = rig.snapshot(&booted).await;
    rig.engine.check_snapshot(&rig.template, &live).await.expect("is whole");
    // The first has the pages written into it, the others share an image.
    let children = futures::future::join_all((0..3).map(|_| rig.start_from(&live))).await;
    for child in &children {
        counts_on(child, 0).await;
    }
    let again = rig.snapshot(&children[2]).await;
    let grandchild = rig.start_from(&again).await;
    counts_on(&grandchild, 0).await;
    for machine in children.iter().chain([&grandchild, &booted]) {
        machine.kill().await.expect("killed");
    }
    rig.assert_clean().await;
}

#[tokio::test]
async fn layers_are_shared_and_go_with_the_last_who_needs_them() {
    let rig = Rig::new().await;
    let parent = running(&rig).await;
    let guest = parent.guest().await.expect("answers");
    write(&guest, "/file", &vec![1; 3 << 20]).await;
    guest.sync().await.expect("synced");
    assert!(parent.usage().expect("read").disk_bytes > 3 << 20);
    let snapshot = rig.snapshot(&parent).await;
    assert!(parent.usage().expect("read").disk_bytes < 1 << 20, "its own layer is a new one");
    let children = futures::future::join_all((0..2).map(|_| rig.start_from(&snapshot))).await;
    let layer = names(&snapshot).into_iter().find(|name| name.ends_with(".qcow2")).expect("a layer");
    let file = fs::File::open(snapshot.join(layer)).expect("opened");
    let (links, mode) = {
        let metadata = file.metadata().expect("read");
        (metadata.nlink(), metadata.mode() & 0o777)
    };
    assert_eq!((links, mode), (4, 0o444), "the snapshot, the parent, two children");
    assert_eq!(file.metadata().expect("read").uid(), nix::unistd::geteuid().as_raw());
    for machine in children.iter().chain([&parent]) {
        machine.kill().await.expect("killed");
    }
    fs::remove_dir_all(&snapshot).expect("removed");
    assert_eq!(file.metadata().expect("read").nlink(), 0);
    rig.assert_clean().await;
}
