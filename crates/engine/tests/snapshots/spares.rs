//! Emulators that wait for a machine.

use std::{collections::BTreeSet, time::Duration};

use stockade_engine::{Engine, Machine, SnapshotScope, Urgency, qemu::QemuMachine};
use stockade_model::MachineId;

use crate::{
    counts_on, names, read, running,
    support::{DataDir, Rig, hello, in_a_server_that_crashes, work},
    write,
};

const MOST: usize = 3;

async fn rig(data: &DataDir) -> Rig {
    Rig::with(data.path(), |config| config.limits.spare_emulators = MOST).await
}

/// Waits until so many wait.
async fn until_waiting(rig: &Rig, count: usize) {
    let waiting = async {
        while rig.engine.spare_emulators() != count {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let patience = Duration::from_secs(60);
    tokio::time::timeout(patience, waiting).await.unwrap_or_else(|_| panic!("{}", rig.engine.spare_emulators()));
}

/// The name its emulator was started with is that of another machine.
fn was_waiting(machine: &QemuMachine) -> bool {
    let arguments = std::fs::read(format!("/proc/{}/cmdline", machine.emulator_pid())).expect("it runs");
    !String::from_utf8_lossy(&arguments).contains(machine.id().as_str())
}

#[tokio::test]
async fn machines_snapshots_and_their_machines_are_made_of_emulators_that_waited() {
    let data = DataDir::new();
    let rig = rig(&data).await;
    let parent = running(&rig).await;
    assert!(!was_waiting(&parent), "nobody had asked for one");
    until_waiting(&rig, 2).await;

    let from_template = running(&rig).await;
    assert!(was_waiting(&from_template));
    hello(&from_template).await;
    let guest = parent.guest().await.expect("answers");
    work(&guest, &["count"]).await.number().await;
    write(&guest, "/file", &vec![7; 1 << 20]).await;
    until_waiting(&rig, 2).await;

    // Three generations: each one's disk has one layer more than the emulator was started with.
    let mut snapshot = rig.snapshot(&parent).await;
    for generation in 1..=3_u8 {
        until_waiting(&rig, 2).await;
        let child = rig.start_from(&snapshot).await;
        assert!(was_waiting(&child));
        counts_on(&child, 0).await;
        let guest = child.guest().await.expect("answers");
        assert_eq!(read(&guest, "/file").await, Some(vec![7; 1 << 20]));
        assert_eq!(
            read(&guest, "/generation").await.unwrap_or_default(),
            vec![generation - 1; usize::from(generation) - 1]
        );
        write(&guest, "/generation", &vec![generation; usize::from(generation)]).await;
        let disk_only = rig.snapshot_dir();
        child.snapshot(&disk_only, SnapshotScope::DiskOnly).await.expect("taken");
        snapshot = rig.snapshot(&child).await;
        rig.engine.check_snapshot(&rig.template, &snapshot).await.expect("whole");
        let files = names(&data.path().join("machines").join(child.id().as_str()).join("disk"));
        assert_eq!(files.len(), 1, "it writes to one layer: {files:?}");
        child.kill().await.expect("killed");
        if generation == 3 {
            let booted = rig.engine.boot_machine_from(&MachineId::random(), &rig.template, &disk_only).await;
            let booted = booted.expect("the layers are one disk");
            let guest = booted.guest().await.expect("answers");
            assert_eq!(read(&guest, "/generation").await, Some(vec![3; 3]));
            booted.kill().await.expect("killed");
        }
    }
    parent.kill().await.expect("killed");
    from_template.kill().await.expect("killed");
    rig.engine.close().await;
    rig.assert_clean().await;
}

#[tokio::test]
async fn one_more_waits_after_each_start_that_found_none_and_none_goes_to_who_has_time() {
    let data = DataDir::new();
    let rig = rig(&data).await;
    let template = rig.template.clone();
    let start = async || rig.engine.start(&MachineId::random(), &template, Urgency::Ahead).await.expect("started");
    let ahead = start().await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(rig.engine.spare_emulators(), 0, "nobody waited for that one");

    let burst = futures::future::join_all((0..MOST + 2).map(|_| rig.start())).await;
    until_waiting(&rig, MOST).await;
    let again = start().await;
    assert_eq!(rig.engine.spare_emulators(), MOST);
    let dead = rig.start().await;
    assert!(was_waiting(&dead));
    for machine in burst.iter().chain([&dead]) {
        machine.kill().await.expect("killed");
    }
    ahead.kill().await.expect("killed");
    again.kill().await.expect("killed");
    drop(rig);
    // What waited ends with its engine.
    let rig = self::rig(&data).await;
    rig.wait_until_clean().await;
}

#[tokio::test]
async fn one_that_died_while_it_waited_is_nobodys_machine() {
    let data = DataDir::new();
    let rig = rig(&data).await;
    let first = rig.start().await;
    until_waiting(&rig, 2).await;
    for name in names(&data.path().join("machines")).iter().filter(|name| **name != first.id().as_str()) {
        let record = std::fs::read(data.path().join("machines").join(name).join("machine.json")).expect("read");
        let record: serde_json::Value = serde_json::from_slice(&record).expect("JSON");
        let pid = record["processes"]["emulator"]["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
        let pid = nix::unistd::Pid::from_raw(pid.expect("a process"));
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("killed");
        while std::path::Path::new(&format!("/proc/{pid}")).exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    let second = running(&rig).await;
    hello(&second).await;
    first.kill().await.expect("killed");
    second.kill().await.expect("killed");
    rig.engine.close().await;
    rig.wait_until_clean().await;
}

#[test]
fn the_next_server_adopts_the_machine_and_sweeps_what_still_waited() {
    let data = DataDir::new();
    let (id, pid) = in_a_server_that_crashes(async {
        let rig = rig(&data).await;
        let first = rig.start().await;
        until_waiting(&rig, 2).await;
        let machine = running(&rig).await;
        assert!(was_waiting(&machine));
        hello(&machine).await;
        first.kill().await.expect("killed");
        until_waiting(&rig, 2).await;
        let known = (machine.id().clone(), machine.emulator_pid());
        // Dropped, it would end what waits.
        std::mem::forget(rig);
        known
    });
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let rig = Rig::on(data.path()).await;
        let swept = rig.engine.sweep(&BTreeSet::from([id.clone()])).await.expect("swept");
        assert_eq!(swept.len(), 2, "{swept:?}");
        let machine = rig.engine.adopt(&id).await.expect("adopted").expect("it runs");
        machine.pause().await.expect("paused");
        machine.resume().await.expect("resumed");
        machine.guest().await.expect("answers");
        assert!(std::path::Path::new(&format!("/proc/{pid}")).exists());
        machine.kill().await.expect("killed");
        rig.assert_clean().await;
    });
}
