//! Snapshots that are not what was written, or have no place to go to.

use std::{fs, os::unix::fs::FileExt, path::Path, process::Command};

use stockade_engine::{Engine, EngineError, Machine, SnapshotScope};
use stockade_model::MachineId;

use crate::{
    counts_on, names, read, running,
    support::{Rig, error_text, work},
    write,
};

#[tokio::test]
async fn a_damaged_or_foreign_snapshot_is_refused_by_name_and_its_siblings_go_on() {
    let rig = Rig::new().await;
    let parent = running(&rig).await;
    let guest = parent.guest().await.expect("answers");
    work(&guest, &["count"]).await.number().await;
    write(&guest, "/note", b"note").await;
    guest.sync().await.expect("synced");
    let snapshot = rig.snapshot(&parent).await;
    let sibling = rig.start_from(&snapshot).await;
    let refused = async |change: &dyn Fn(&Path)| {
        let copy = rig.snapshot_dir();
        assert!(Command::new("cp").arg("-r").arg(&snapshot).arg(&copy).status().expect("runs").success());
        change(&copy);
        let checked = rig.engine.check_snapshot(&rig.template, &copy).await.expect_err("refused");
        let started = rig.engine.start_machine_from(&MachineId::random(), &rig.template, &copy).await;
        let started = started.err().expect("refused");
        assert_eq!(checked.to_string(), started.to_string());
        error_text(started)
    };
    let layer = names(&snapshot).into_iter().find(|name| name.ends_with(".qcow2")).expect("a layer");
    for name in ["devices.state", "memory.map", "memory.pages", layer.as_str()] {
        let path = |copy: &Path| {
            fs::set_permissions(copy.join(name), std::os::unix::fs::PermissionsExt::from_mode(0o644)).expect("set");
            copy.join(name)
        };
        let text = refused(&|copy| {
            let file = fs::OpenOptions::new().read(true).write(true).open(path(copy)).expect("opened");
            let middle = file.metadata().expect("read").len() / 2;
            let mut byte = [0];
            file.read_exact_at(&mut byte, middle).expect("read");
            file.write_all_at(&[byte[0] ^ 1], middle).expect("written");
        })
        .await;
        assert!(text.contains(&format!("{name} is damaged: its contents are not")), "{text}");
        let text = refused(&|copy| {
            let file = fs::OpenOptions::new().write(true).open(path(copy)).expect("opened");
            file.set_len(file.metadata().expect("read").len() - 1).expect("cut");
        })
        .await;
        assert!(text.contains(&format!("{name} is damaged: it has ")), "{text}");
        let text = refused(&|copy| fs::remove_file(copy.join(name)).expect("removed")).await;
        assert!(text.contains(&format!("{name} is damaged: it cannot be read")), "{text}");
    }
    let edit = |from: &'static str, to: &'static str| {
        move |copy: &Path| {
            let path = copy.join("manifest.json");
            let text = fs::read_to_string(&path).expect("read");
            assert!(text.contains(from), "{text}");
            fs::write(&path, text.replace(from, to)).expect("written");
        }
    };
    let text = refused(&edit("QEMU emulator version", "QEMU emulator version 0")).await;
    assert!(text.starts_with("made with emulator QEMU emulator version 0"), "{text}");
    let text = refused(&edit("\"version\": 1", "\"version\": 99")).await;
    assert!(text.contains("made with snapshot format version 99"), "{text}");
    let text = refused(&edit("\"template\": \"", "\"template\": \"other")).await;
    assert!(text.contains("made with template other"), "{text}");
    let text = refused(&edit("\"id\": \"", "\"id\": \"../")).await;
    assert!(text.contains("manifest.json is damaged"), "{text}");
    let text = refused(&|copy| fs::write(copy.join("manifest.json"), "{").expect("written")).await;
    assert!(text.contains("manifest.json is damaged"), "{text}");
    let text = refused(&|copy| fs::remove_file(copy.join("manifest.json")).expect("removed")).await;
    assert!(text.contains("manifest.json is damaged: it cannot be read"), "{text}");

    // The way out of a mismatch: its disk can be booted from.
    let copy = rig.snapshot_dir();
    assert!(Command::new("cp").arg("-r").arg(&snapshot).arg(&copy).status().expect("runs").success());
    edit("QEMU emulator version", "QEMU emulator version 0")(&copy);
    fs::remove_file(copy.join("memory.pages")).expect("removed");
    let booted = rig.engine.boot_machine_from(&MachineId::random(), &rig.template, &copy).await;
    let booted = booted.unwrap_or_else(|error| panic!("{}", error_text(error)));
    let guest = booted.guest().await.expect("it runs");
    assert_eq!(read(&guest, "/note").await.as_deref(), Some(&b"note"[..]));
    booted.kill().await.expect("killed");

    counts_on(&sibling, 0).await;
    counts_on(&parent, 0).await;
    let another = rig.start_from(&snapshot).await;
    counts_on(&another, 0).await;
    for machine in [&parent, &sibling, &another] {
        machine.kill().await.expect("killed");
    }
    rig.assert_clean().await;
}

#[tokio::test]
async fn a_snapshot_that_cannot_be_put_in_place_leaves_nothing_and_its_machine_runs_on() {
    let rig = Rig::new().await;
    let parent = running(&rig).await;
    let guest = parent.guest().await.expect("answers");
    let mut count = work(&guest, &["count"]).await;
    let mut last = count.number().await;

    let there = rig.snapshot_dir();
    fs::create_dir(&there).expect("made");
    let error = parent.snapshot(&there, SnapshotScope::MemoryAndDisk).await.expect_err("it exists");
    assert!(error_text(error).contains("exists"));
    let elsewhere = Path::new("/dev/shm").join(format!("stockade-{}", MachineId::random()));
    let error = parent.snapshot(&elsewhere, SnapshotScope::MemoryAndDisk).await.expect_err("cannot be linked to");
    assert!(error_text(error).contains("on the file system of the machines' directory"));
    let error = parent.snapshot(&rig.data.join("no/where"), SnapshotScope::DiskOnly).await.expect_err("no parent");
    assert!(matches!(error, EngineError::Host { .. }));

    // Somebody takes the name while the snapshot is being taken.
    let directory = rig.snapshot_dir();
    let unfinished = rig.data.join("machines").join(parent.id().as_str()).join("snapshot.new");
    let thief = {
        let (directory, unfinished) = (directory.clone(), unfinished.clone());
        std::thread::spawn(move || {
            while !unfinished.exists() {
                std::thread::yield_now();
            }
            fs::create_dir(directory).expect("made");
        })
    };
    let error = parent.snapshot(&directory, SnapshotScope::MemoryAndDisk).await.expect_err("the name is taken");
    thief.join().expect("ran");
    assert!(error_text(error).contains("exists"));
    assert!(!unfinished.exists() && names(&directory).is_empty());
    for _ in 0..100 {
        last += 1;
        assert_eq!(count.number().await, last);
    }
    let snapshot = rig.snapshot(&parent).await;
    let child = rig.start_from(&snapshot).await;
    counts_on(&child, last - 1).await;
    child.kill().await.expect("killed");
    parent.kill().await.expect("killed");
    rig.assert_clean().await;
}
