//! Snapshots of real machines under QEMU, and machines started from them.

mod support;

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::StreamExt;
use stockade_engine::{
    Engine, EngineError, GuestClient, Machine, SnapshotScope,
    guest::{ReadFile, WriteFile},
    qemu::QemuMachine,
};
use stockade_model::MachineId;
use support::{DataDir, Lines, Rig, error_text, in_a_server_that_crashes, poke, raw_disk, work};

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
        assert!(counts_on(&child, *least - 1).await < expected + 1000);
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

#[test]
fn a_host_without_room_refuses_before_anything_changes() {
    let data = DataDir::new();
    let (id, snapshot) = in_a_server_that_crashes(async {
        let rig = Rig::on(data.path()).await;
        let parent = running(&rig).await;
        let guest = parent.guest().await.expect("answers");
        work(&guest, &["count"]).await.number().await;
        (parent.id().clone(), rig.snapshot(&parent).await)
    });
    in_a_server_that_crashes(refuses_for_lack_of_room(&data, &id, &snapshot));
}

async fn refuses_for_lack_of_room(data: &DataDir, id: &MachineId, snapshot: &Path) {
    let poor = Rig::with(data.path(), |config| config.limits.disk_reserve_mib = 1 << 40).await;
    let parent = poor.engine.adopt(id).await.expect("adopted").expect("it runs");
    let record =
        || fs::read_to_string(data.path().join("machines").join(id.as_str()).join("machine.json")).expect("read");
    let before = record();
    let directory = poor.snapshot_dir();
    let error = parent.snapshot(&directory, SnapshotScope::MemoryAndDisk).await.expect_err("no room");
    assert!(matches!(error, EngineError::NoCapacity { resource: "disk", .. }), "{error}");
    assert_eq!(record(), before);
    let error = poor.engine.start_machine_from(&MachineId::random(), &poor.template, snapshot).await;
    assert!(matches!(error, Err(EngineError::NoCapacity { resource: "disk", .. })));
    assert!(!directory.exists());
    let guest = parent.guest().await.expect("answers");
    Lines::attach(&guest, "count").await.number().await;
    parent.kill().await.expect("killed");
    poor.assert_clean().await;
}

/// A file system of its own, unmounted when the test is over.
struct SmallDisk(DataDir);

impl SmallDisk {
    /// `None`: only root can mount.
    fn new(mib: u32) -> Option<Self> {
        let data = DataDir::new();
        let options = format!("size={mib}m");
        let flags = nix::mount::MsFlags::empty();
        nix::mount::mount(Some("small"), data.path(), Some("tmpfs"), flags, Some(options.as_str())).ok()?;
        Some(Self(data))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        self.0.end_machines();
        let _ = nix::mount::umount2(self.0.path(), nix::mount::MntFlags::MNT_DETACH);
    }
}

#[tokio::test]
async fn a_disk_that_fills_up_in_the_middle_leaves_nothing_and_its_machine_runs_on() {
    let Some(small) = SmallDisk::new(160) else { return };
    let data = small.0.path();
    let rig = Rig::with(data, |config| config.limits.disk_reserve_mib = 0).await;
    let parent = running(&rig).await;
    let guest = parent.guest().await.expect("answers");
    work(&guest, &["hold", "32"]).await.next().await;
    let mut count = work(&guest, &["count"]).await;
    let mut last = count.number().await;
    let unfinished = data.join("machines").join(parent.id().as_str()).join("snapshot.new");
    let (filler, watched) = (data.join("filler"), unfinished.with_file_name("layers"));
    let hog = std::thread::spawn(move || {
        // What is needed was counted before the next layer was made.
        while names(&watched).len() < 2 {
            std::thread::yield_now();
        }
        // The guest keeps what it needs to write; memory does not fit any more.
        let free = nix::sys::statvfs::statvfs(watched.parent().expect("has one")).expect("read");
        let bytes = free.blocks_available() * free.fragment_size() - (24 << 20);
        let file = fs::File::create(&filler).expect("created");
        nix::fcntl::fallocate(&file, nix::fcntl::FallocateFlags::empty(), 0, bytes as i64).expect("filled");
        filler
    });
    let directory = rig.snapshot_dir();
    let error = parent.snapshot(&directory, SnapshotScope::MemoryAndDisk).await.expect_err("no room");
    let filler = hog.join().expect("ran");
    let text = error_text(error);
    assert!(text.contains("No space left"), "{text}");
    assert!(!unfinished.exists() && !directory.exists());
    for _ in 0..100 {
        last += 1;
        assert_eq!(count.number().await, last);
    }
    fs::remove_file(filler).expect("removed");
    let snapshot = rig.snapshot(&parent).await;
    let child = rig.start_from(&snapshot).await;
    counts_on(&child, last - 1).await;
    child.kill().await.expect("killed");
    parent.kill().await.expect("killed");
    rig.assert_clean().await;
}

#[tokio::test]
async fn memory_for_which_there_is_no_room_goes_to_the_file_at_once() {
    let data = DataDir::new();
    let rig = Rig::with(data.path(), |config| config.limits.snapshot_buffers_mib = 0).await;
    let parent = running(&rig).await;
    let guest = parent.guest().await.expect("answers");
    work(&guest, &["count"]).await.number().await;
    let sum = work(&guest, &["hold", "40"]).await.next().await;
    let snapshot = rig.snapshot(&parent).await;
    rig.engine.check_snapshot(&rig.template, &snapshot).await.expect("is whole");
    let child = rig.start_from(&snapshot).await;
    counts_on(&child, 0).await;
    let guest = child.guest().await.expect("answers");
    let mut hold = Lines::attach(&guest, "hold").await;
    poke(&guest, "hold").await;
    assert_eq!(hold.next().await, sum);
    child.kill().await.expect("killed");
    parent.kill().await.expect("killed");
    rig.assert_clean().await;
}

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
            .args(["--exact", "snapshots_and_forks_for_ever", "--ignored", "--nocapture"])
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

async fn running(rig: &Rig) -> QemuMachine {
    let machine = rig.start().await;
    machine.resume().await.expect("resumed");
    machine
}

/// The counting process of a machine is past a number, goes on and skips none; where it is now.
async fn counts_on(machine: &QemuMachine, past: u64) -> u64 {
    let guest = machine.guest().await.unwrap_or_else(|error| panic!("{}", error_text(error)));
    let mut lines = Lines::attach(&guest, "count").await;
    let first = lines.number().await;
    assert!(first > past, "{first} is not past {past}");
    for next in first + 1..first + 60 {
        assert_eq!(lines.number().await, next);
    }
    first + 59
}

async fn write(guest: &GuestClient, path: &str, bytes: &[u8]) {
    let user = Some("root".to_owned());
    let request = WriteFile { path: path.to_owned(), user, ..WriteFile::default() };
    let pieces: Vec<_> = bytes.chunks(32 << 10).map(|piece| Ok(bytes::Bytes::copy_from_slice(piece))).collect();
    let written = guest.write_file(&request, Box::pin(futures::stream::iter(pieces))).await;
    written.unwrap_or_else(|error| panic!("{path}: {}", error_text(error)));
}

/// A file's contents; `None`: there is none.
async fn read(guest: &GuestClient, path: &str) -> Option<Vec<u8>> {
    let request = ReadFile { path: path.to_owned(), user: Some("root".to_owned()), ..ReadFile::default() };
    let mut body = guest.read_file(&request).await.ok()?.body;
    let mut bytes = Vec::new();
    while let Some(piece) = body.next().await {
        bytes.extend_from_slice(&piece.expect("whole"));
    }
    Some(bytes)
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}
