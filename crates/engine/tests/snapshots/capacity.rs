//! Snapshots for which the host has no room, or not the usual one.

use std::{fs, path::Path};

use stockade_engine::{Engine, EngineError, Machine, SnapshotScope};
use stockade_model::MachineId;

use crate::{
    counts_on, names, running,
    support::{DataDir, Lines, Rig, error_text, in_a_server_that_crashes, poke, work},
};

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
        // The guest keeps what it needs to write; memory does not fit any more. It is being written already: what was
        // free a moment ago need not be.
        let file = fs::File::create(&filler).expect("created");
        let fill = || {
            let free = nix::sys::statvfs::statvfs(watched.parent().expect("has one")).expect("read");
            let bytes = (free.blocks_available() * free.fragment_size()).saturating_sub(24 << 20);
            nix::fcntl::fallocate(&file, nix::fcntl::FallocateFlags::empty(), 0, bytes.max(1) as i64)
        };
        while let Err(error) = fill() {
            assert_eq!(error, nix::Error::ENOSPC);
        }
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
