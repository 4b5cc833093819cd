//! Snapshots of running machines, children of them, and children of those.

use std::{fs, path::Path, time::Duration};

use stockade_engine::{Engine, Machine, SnapshotScope, qemu::QemuMachine};

use crate::{
    counts_on, names, read, running,
    support::{Lines, Rig, error_text, poke, work},
    write,
};

#[tokio::test]
async fn a_snapshot_leaves_its_machine_alone_and_children_go_on_from_it() {
    let rig = Rig::new().await;
    let parent = running(&rig).await;
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
    let first = counts_on(&child, 0).await;
    assert!(first >= 49, "{first}");
    parent.kill().await.expect("killed");
    counts_on(&child, first).await;
    child.kill().await.expect("killed");
    rig.assert_clean().await;
}

#[tokio::test]
async fn twenty_snapshots_of_one_machine_are_each_where_it_was_and_its_disk_stays_shallow() {
    let rig = Rig::new().await;
    let parent = running(&rig).await;
    let guest = parent.guest().await.expect("answers");
    let mut lines = work(&guest, &["count"]).await;
    let mut hold = work(&guest, &["hold", "8"]).await;
    let sum = hold.next().await;
    let mut expected = 1;
    let mut snapshots = Vec::new();
    for round in 0..20_u8 {
        write(&guest, &format!("/file-{round}"), &vec![round; 100_000]).await;
        for _ in 0..50 {
            assert_eq!(lines.number().await, expected);
            expected += 1;
        }
        snapshots.push((expected, rig.snapshot(&parent).await));
    }
    let layers = |directory: &Path| names(directory).iter().filter(|name| name.ends_with(".qcow2")).count();
    assert!(snapshots.iter().all(|(_, directory)| layers(directory) <= 9), "chains are shortened");
    for index in [0, 7, 8, 19] {
        let (least, directory) = &snapshots[index];
        rig.engine.check_snapshot(&rig.template, directory).await.expect("is whole");
        let child = rig.start_from(directory).await;
        // How far ahead of its reader the count was is the host's affair; which snapshot it is, the files say.
        counts_on(&child, *least - 1).await;
        let guest = child.guest().await.expect("answers");
        for round in 0..20_u8 {
            let there = usize::from(round) <= index;
            assert_eq!(read(&guest, &format!("/file-{round}")).await, there.then(|| vec![round; 100_000]));
        }
        let mut hold = Lines::attach(&guest, "hold").await;
        poke(&guest, "hold").await;
        assert_eq!(hold.next().await, sum);
        child.kill().await.expect("killed");
    }
    assert_eq!(lines.number().await, expected);
    parent.kill().await.expect("killed");
    rig.assert_clean().await;
}

#[tokio::test]
async fn ten_generations_of_forks_skip_nothing_and_hold_what_each_wrote() {
    let rig = Rig::new().await;
    let mut machine = running(&rig).await;
    let guest = machine.guest().await.expect("answers");
    work(&guest, &["count"]).await.number().await;
    let sum = work(&guest, &["hold", "8"]).await.next().await;
    work(&guest, &["dirty", "4"]).await.next().await;
    let mut changing = String::new();
    let mut last = 0;
    for generation in 0..10_u8 {
        let guest = machine.guest().await.expect("answers");
        write(&guest, &format!("/generation-{generation}"), &vec![generation; 50_000]).await;
        let mut dirty = Lines::attach(&guest, "dirty").await;
        poke(&guest, "dirty").await;
        let changed = dirty.next().await;
        assert_ne!(changed, changing, "each generation changes it");
        changing = changed;
        let snapshot = rig.snapshot(&machine).await;
        machine.kill().await.expect("killed");
        machine = rig.start_from(&snapshot).await;
        // Nothing but the machine holds on to its layers.
        fs::remove_dir_all(&snapshot).expect("removed");
        last = counts_on(&machine, last).await;
        let guest = machine.guest().await.expect("answers");
        for earlier in 0..=generation {
            let bytes = read(&guest, &format!("/generation-{earlier}")).await;
            assert!(bytes.is_some_and(|bytes| bytes == vec![earlier; 50_000]), "{earlier} of {generation}");
        }
        let mut hold = Lines::attach(&guest, "hold").await;
        poke(&guest, "hold").await;
        assert_eq!(hold.next().await, sum);
    }
    machine.kill().await.expect("killed");
    rig.assert_clean().await;
}

#[tokio::test]
async fn eight_children_at_once_are_alike_at_first_and_independent_afterwards() {
    let rig = Rig::new().await;
    let parent = running(&rig).await;
    let guest = parent.guest().await.expect("answers");
    work(&guest, &["count"]).await.number().await;
    // Enough for an image of its own to be worth it half-way through.
    let mut dirty = work(&guest, &["dirty", "24"]).await;
    let before = dirty.next().await;
    let snapshot = rig.snapshot(&parent).await;
    let children = futures::future::join_all((0..8).map(|_| rig.start_from(&snapshot))).await;
    for (index, child) in children.iter().enumerate() {
        let guest = child.guest().await.expect("answers");
        write(&guest, "/mine", &[index as u8; 1000]).await;
        let mut lines = Lines::attach(&guest, "dirty").await;
        for _ in 0..=index {
            poke(&guest, "dirty").await;
            assert_ne!(lines.next().await, before);
        }
    }
    let private: Vec<u64> = children.iter().map(|child| child.usage().expect("read").private_bytes >> 20).collect();
    assert!(private.iter().any(|mib| *mib > 24) && private.iter().min() < private.iter().max(), "{private:?}");
    // One whose memory is an image, and one whose is not.
    let extremes = [private.iter().min(), private.iter().max()];
    for (index, child) in children.iter().enumerate() {
        let guest = child.guest().await.expect("answers");
        assert_eq!(read(&guest, "/mine").await, Some(vec![index as u8; 1000]));
        counts_on(child, 0).await;
        if extremes.contains(&private.get(index)) {
            let snapshot = rig.snapshot(child).await;
            let mut sum = Lines::attach(&guest, "dirty").await;
            poke(&guest, "dirty").await;
            let grandchild = rig.start_from(&snapshot).await;
            let guest = grandchild.guest().await.expect("answers");
            let mut copy = Lines::attach(&guest, "dirty").await;
            poke(&guest, "dirty").await;
            assert_eq!(copy.next().await, sum.next().await, "the same memory, changed in the same way");
            counts_on(&grandchild, 0).await;
            grandchild.kill().await.expect("killed");
        }
    }
    assert!(read(&guest, "/mine").await.is_none(), "the parent has a disk of its own");
    poke(&guest, "dirty").await;
    dirty.next().await;
    futures::future::join_all(children.iter().map(|child| child.kill())).await;
    parent.kill().await.expect("killed");
    rig.assert_clean().await;
}

#[tokio::test]
async fn a_paused_machine_stays_paused_and_a_snapshot_of_it_runs() {
    let rig = Rig::new().await;
    let parent = running(&rig).await;
    let guest = parent.guest().await.expect("answers");
    let mut count = work(&guest, &["count"]).await;
    let last = count.number().await;
    parent.pause().await.expect("paused");
    let cpu = |machine: &QemuMachine| machine.usage().expect("read").cpu_micros;
    let snapshot = rig.snapshot(&parent).await;
    let error = parent.snapshot(&rig.snapshot_dir(), SnapshotScope::DiskOnly).await.expect_err("cannot");
    assert!(error.to_string().contains("resume it first"), "{error}");
    let child = rig.start_from(&snapshot).await;
    let before = cpu(&parent);
    counts_on(&child, last - 1).await;
    assert!(cpu(&parent) - before < cpu(&child), "the paused one does not run");
    child.kill().await.expect("killed");
    parent.resume().await.expect("resumed");
    counts_on(&parent, last).await;
    parent.kill().await.expect("killed");
    rig.assert_clean().await;
}
