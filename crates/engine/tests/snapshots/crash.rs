//! Servers that die, and what the next one finds.

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use stockade_engine::{Engine, Machine, SnapshotScope};
use stockade_model::MachineId;

use crate::{
    counts_on, names, running,
    support::{DataDir, Lines, Rig, in_a_server_that_crashes, poke, work},
};

/// The program that the next test kills.
#[test]
#[ignore = "runs until the test that starts it kills it"]
fn snapshots_and_forks_for_ever() {
    let Some(data) = std::env::var_os("STOCKADE_TEST_CRASH_DATA") else { return };
    tokio::runtime::Runtime::new().expect("a runtime").block_on(async {
        let rig = Rig::on(Path::new(&data)).await;
        let id: MachineId = std::env::var("STOCKADE_TEST_CRASH_MACHINE").expect("set").parse().expect("an id");
        let parent = rig.engine.adopt(&id).await.expect("adopted").expect("it runs");
        parent.resume().await.expect("resumed");
        println!("ready");
        loop {
            let directory = rig.snapshot_dir();
            parent.snapshot(&directory, SnapshotScope::MemoryAndDisk).await.expect("taken");
            let child = rig.start_from(&directory).await;
            child.kill().await.expect("killed");
        }
    });
}

#[test]
fn a_server_killed_at_any_moment_of_a_snapshot_or_fork_harms_no_machine() {
    let data = DataDir::new();
    let id = MachineId::random();
    in_a_server_that_crashes(async {
        let rig = Rig::on(data.path()).await;
        let parent = rig.engine.start_machine(&id, &rig.template).await.expect("started");
        parent.resume().await.expect("resumed");
        work(&parent.guest().await.expect("answers"), &["count"]).await.number().await;
    });
    let mut last = 0;
    for round in 0..16_u64 {
        let mut server = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "crash::snapshots_and_forks_for_ever", "--ignored", "--nocapture"])
            .env("STOCKADE_TEST_CRASH_DATA", data.path())
            .env("STOCKADE_TEST_CRASH_MACHINE", id.as_str())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("started");
        let mut output = std::io::BufReader::new(server.stdout.take().expect("piped"));
        let mut line = String::new();
        while !line.contains("ready") {
            line.clear();
            assert!(std::io::BufRead::read_line(&mut output, &mut line).expect("read") > 0, "it ended");
        }
        // Not a wait for anything: the moment of the blow.
        std::thread::sleep(Duration::from_millis(3 + round * 17));
        server.kill().expect("killed");
        server.wait().expect("reaped");
        last = in_a_server_that_crashes(is_unharmed(&data, &id, last, round % 4 == 3));
    }
    in_a_server_that_crashes(async {
        let rig = Rig::on(data.path()).await;
        rig.engine.sweep(&BTreeSet::new()).await.expect("swept");
        rig.assert_clean().await;
    });
}

async fn is_unharmed(data: &DataDir, id: &MachineId, last: u64, with_child: bool) -> u64 {
    let rig = Rig::on(data.path()).await;
    rig.engine.sweep(&BTreeSet::from([id.clone()])).await.expect("swept");
    let parent = rig.engine.adopt(id).await.expect("adopted").expect("it runs");
    parent.resume().await.expect("resumed");
    assert_eq!(names(&data.path().join("machines")), [id.as_str()]);
    let directory = data.path().join("machines").join(id.as_str());
    assert!(!directory.join("snapshot.new").exists());
    let own = names(&directory.join("disk"));
    assert_eq!(own.len(), 1, "one layer is written to: {own:?}");
    let guest = parent.guest().await.expect("answers");
    let mut lines = Lines::attach(&guest, "count").await;
    let first = lines.number().await;
    assert!(first > last, "{first} after {last}");
    assert_eq!(lines.number().await, first + 1);
    // Whatever has its name is whole.
    for name in names(&data.path().join("snapshots")) {
        let snapshot = data.path().join("snapshots").join(name);
        rig.engine.check_snapshot(&rig.template, &snapshot).await.unwrap_or_else(|error| panic!("{error}"));
        fs::remove_dir_all(&snapshot).expect("removed");
    }
    if with_child {
        let snapshot = rig.snapshot_dir();
        parent.snapshot(&snapshot, SnapshotScope::MemoryAndDisk).await.unwrap_or_else(|error| panic!("{error}"));
        let child = rig.start_from(&snapshot).await;
        counts_on(&child, first).await;
        child.kill().await.expect("killed");
    }
    first + 1
}

#[test]
fn children_are_adopted_and_snapshotted_again_by_the_next_server() {
    let data = DataDir::new();
    let (first, second, sum) = in_a_server_that_crashes(async {
        let rig = Rig::on(data.path()).await;
        let parent = running(&rig).await;
        let guest = parent.guest().await.expect("answers");
        work(&guest, &["count"]).await.number().await;
        let sum = work(&guest, &["hold", "80"]).await.next().await;
        let snapshot = rig.snapshot(&parent).await;
        let mut children = Vec::new();
        for _ in 0..3 {
            children.push(rig.start_from(&snapshot).await);
        }
        parent.kill().await.expect("killed");
        fs::remove_dir_all(snapshot).expect("removed");
        children[1].kill().await.expect("killed");
        (children[0].id().clone(), children[2].id().clone(), sum)
    });
    let record = |id: &MachineId| {
        fs::read_to_string(data.path().join("machines").join(id.as_str()).join("machine.json")).expect("read")
    };
    assert!(record(&first).contains("\"memory\":\"template\""));
    assert!(record(&second).contains("\"memory\":\"image\""), "the last one shares an image");
    in_a_server_that_crashes(async {
        let rig = Rig::on(data.path()).await;
        for id in [first, second] {
            let child = rig.engine.adopt(&id).await.expect("adopted").expect("it runs");
            let snapshot = rig.snapshot_dir();
            child.snapshot(&snapshot, SnapshotScope::MemoryAndDisk).await.unwrap_or_else(|error| panic!("{error}"));
            child.kill().await.expect("killed");
            let grandchild = rig.start_from(&snapshot).await;
            counts_on(&grandchild, 0).await;
            let guest = grandchild.guest().await.expect("answers");
            let mut hold = Lines::attach(&guest, "hold").await;
            poke(&guest, "hold").await;
            assert_eq!(hold.next().await, sum);
            grandchild.kill().await.expect("killed");
        }
        rig.assert_clean().await;
    });
}
