//! Real machines under QEMU.

mod support;

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use futures::TryStreamExt as _;
use stockade_engine::{
    Engine, EngineError, GuestClient, Machine, MachineExit,
    guest::{ReadFile, WriteFile},
    qemu::{AcceleratorChoice, QemuEngine},
};
use stockade_model::{Accelerator, MachineId};
use support::{DataDir, Rig, config, error_text, hello, in_a_server_that_crashes};

fn nothing() -> BTreeSet<MachineId> {
    BTreeSet::new()
}

#[tokio::test]
async fn a_machine_is_restored_answers_and_leaves_nothing_behind() {
    let rig = Rig::new().await;
    let machine = rig.start().await;
    machine.resume().await.expect("resumed");
    hello(&machine).await;
    let usage = machine.usage().expect("read");
    assert!(usage.private_bytes > 1 << 20 && usage.proportional_bytes >= usage.private_bytes, "{usage:?}");
    assert!(usage.cpu_micros > 0 && usage.disk_bytes > 0, "{usage:?}");
    machine.kill().await.expect("killed");
    machine.kill().await.expect("killing again is fine");
    assert_eq!(machine.exited().await, MachineExit::Killed);
    assert!(matches!(machine.usage(), Err(EngineError::Gone { .. })));
    assert!(matches!(machine.resume().await, Err(EngineError::Gone { .. })));
    rig.assert_clean().await;
}

#[tokio::test]
async fn a_paused_machine_goes_on_where_it_was() {
    let rig = Rig::new().await;
    let machine = rig.start().await;
    machine.resume().await.expect("resumed");
    hello(&machine).await;
    for _ in 0..3 {
        machine.pause().await.expect("paused");
        machine.resume().await.expect("resumed");
        hello(&machine).await;
    }
    machine.kill().await.expect("killed");
}

#[tokio::test]
async fn machines_of_one_template_share_its_memory() {
    let rig = Rig::new().await;
    let mut machines = Vec::new();
    for _ in 0..4 {
        let machine = rig.start().await;
        machine.resume().await.expect("resumed");
        hello(&machine).await;
        machines.push(machine);
    }
    let inodes: BTreeSet<u64> = machines.iter().map(|machine| memory_inode(machine.emulator_pid())).collect();
    assert_eq!(inodes.len(), 1);
    for machine in &machines {
        let usage = machine.usage().expect("read");
        assert!(usage.private_bytes < 128 << 20, "a machine of 256 MiB holds little of its own: {usage:?}");
        machine.kill().await.expect("killed");
    }
    rig.assert_clean().await;
}

#[tokio::test]
async fn an_emulator_that_dies_is_reported_and_its_remains_go_with_kill() {
    let rig = Rig::new().await;
    let machine = rig.start().await;
    let pid = nix::unistd::Pid::from_raw(machine.emulator_pid());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("killed");
    let exit = machine.exited().await;
    assert_eq!(exit, MachineExit::Crashed("the emulator was ended by signal 9".to_owned()));
    assert!(matches!(machine.pause().await, Err(EngineError::Gone { .. })));
    machine.kill().await.expect("removed");
    rig.assert_clean().await;
}

#[test]
fn a_machine_survives_its_server_and_is_adopted_with_its_memory() {
    let data = DataDir::new();
    let id = MachineId::random();
    let pid = in_a_server_that_crashes(async {
        let rig = Rig::on(data.path()).await;
        let machine = rig.engine.start_machine(&id, &rig.template).await.expect("started");
        machine.resume().await.expect("resumed");
        hello(&machine).await;
        machine.emulator_pid()
    });

    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let rig = Rig::on(data.path()).await;
        assert!(rig.engine.sweep(&BTreeSet::from([id.clone()])).await.expect("swept").is_empty());
        let machine = rig.engine.adopt(&id).await.expect("adopted").expect("it runs");
        assert_eq!(machine.id(), &id);
        assert!(machine.usage().expect("read").cpu_micros > 0);
        machine.pause().await.expect("paused");
        machine.resume().await.expect("resumed");

        let sibling = rig.start().await;
        assert_eq!(memory_inode(sibling.emulator_pid()), memory_inode(pid), "the memory is shared across restarts");
        sibling.kill().await.expect("killed");
        machine.kill().await.expect("killed");
        assert_eq!(machine.exited().await, MachineExit::Killed);
        assert!(rig.engine.adopt(&id).await.expect("looked for").is_none());
        rig.assert_clean().await;
    });
}

#[test]
fn a_machine_that_ended_while_no_server_ran_is_not_adopted_and_removed() {
    let data = DataDir::new();
    let id = MachineId::random();
    let pid = in_a_server_that_crashes(async {
        let rig = Rig::on(data.path()).await;
        rig.engine.start_machine(&id, &rig.template).await.expect("started").emulator_pid()
    });
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).expect("killed");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let rig = Rig::on(data.path()).await;
        assert!(rig.engine.adopt(&id).await.expect("looked for").is_none());
        rig.assert_clean().await;
    });
}

#[test]
fn a_sweep_finds_a_machine_whose_record_is_lost() {
    let data = DataDir::new();
    let id = MachineId::random();
    in_a_server_that_crashes(async {
        let rig = Rig::on(data.path()).await;
        rig.engine.start_machine(&id, &rig.template).await.expect("started");
    });
    fs::remove_dir_all(data.path().join("machines").join(id.as_str())).expect("removed");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let rig = Rig::on(data.path()).await;
        assert_eq!(rig.engine.sweep(&nothing()).await.expect("swept"), [id]);
        rig.assert_clean().await;
    });
}

#[tokio::test]
async fn a_start_that_is_given_up_leaves_nothing() {
    let rig = Rig::new().await;
    for millis in [1, 3, 6, 10, 15, 20, 30, 45, 60] {
        let id = MachineId::random();
        let start = rig.engine.start_machine(&id, &rig.template);
        if let Ok(machine) = tokio::time::timeout(Duration::from_millis(millis), start).await {
            machine.expect("started").kill().await.expect("killed");
        }
        rig.wait_until_clean().await;
    }
}

/// The program that the next test kills.
#[test]
#[ignore = "runs until the test that starts it kills it"]
fn starts_machines_for_ever() {
    let Some(data) = std::env::var_os("STOCKADE_TEST_CRASH_DATA") else { return };
    tokio::runtime::Runtime::new().expect("a runtime").block_on(async {
        let rig = Rig::on(Path::new(&data)).await;
        println!("ready");
        loop {
            let machines = futures::future::join_all([rig.start(), rig.start(), rig.start()]).await;
            machines[0].kill().await.expect("killed");
        }
    });
}

#[tokio::test]
async fn a_server_killed_at_any_moment_leaves_nothing_a_sweep_does_not_remove() {
    let data = DataDir::new();
    let rig = Rig::on(data.path()).await;
    for round in 0..8_u64 {
        let mut server = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "starts_machines_for_ever", "--ignored", "--nocapture"])
            .env("STOCKADE_TEST_CRASH_DATA", data.path())
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
        tokio::time::sleep(Duration::from_millis(7 + round * 43)).await;
        server.kill().expect("killed");
        server.wait().expect("reaped");
        rig.engine.sweep(&nothing()).await.expect("swept");
        rig.assert_clean().await;
    }
}

#[tokio::test]
async fn a_damaged_or_foreign_template_is_refused_with_its_reason() {
    let rig = Rig::new().await;
    let refused = async |change: &dyn Fn(&Path)| {
        let copy = rig.copy_of_template();
        change(&copy);
        let error = rig.engine.start_machine(&MachineId::random(), &copy).await.err().expect("refused");
        rig.assert_clean().await;
        error_text(error)
    };
    let text = refused(&|copy| fs::write(copy.join("memory"), "short").expect("written")).await;
    assert!(text.contains("memory is damaged: it has 5 bytes"), "{text}");
    let text = refused(&|copy| {
        let memory = fs::OpenOptions::new().write(true).open(copy.join("memory")).expect("opened");
        std::os::unix::fs::FileExt::write_all_at(&memory, b"altered", 1 << 20).expect("written");
    })
    .await;
    assert!(text.contains("memory is damaged: its contents are not those that were written"), "{text}");
    let text = refused(&|copy| {
        let state = fs::OpenOptions::new().write(true).open(copy.join("device-state")).expect("opened");
        std::os::unix::fs::FileExt::write_all_at(&state, b"altered", 1 << 12).expect("written");
    })
    .await;
    assert!(text.contains("device-state is damaged: its contents are not those that were written"), "{text}");
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
    assert!(text.contains("made with template format version 99"), "{text}");
    // The emulator itself refuses this one.
    let text = refused(&edit("\"memory_mib\": 256", "\"memory_mib\": 128")).await;
    assert!(text.starts_with("emulator failed at migrate-incoming"), "{text}");
    let text = refused(&|copy| fs::remove_dir_all(copy).expect("removed")).await;
    assert!(text.contains("is damaged: it cannot be found"), "{text}");
}

#[tokio::test]
async fn a_guest_that_does_not_come_up_is_told_by_its_console() {
    let data = DataDir::new();
    let broken = data.path().join("initramfs");
    fs::write(&broken, "no file system").expect("written");
    let mut config = config(data.path()).await;
    config.initramfs = broken;
    let engine = QemuEngine::new(config).await.expect("an engine");
    let boot = stockade_engine::TemplateBoot {
        introduction: None,
        startup: None,
        root_disk: support::root_disk(data.path()),
        shape: support::SHAPE,
        directory: data.path().join("template"),
    };
    let error = engine.boot_template(&boot, &|_| {}).await.expect_err("cannot boot");
    let text = error_text(error);
    assert!(text.contains("Kernel panic"), "{text}");
    let left: Vec<PathBuf> =
        fs::read_dir(data.path()).expect("listed").map(|entry| entry.expect("read").path()).collect();
    assert!(left.iter().all(|path| !path.to_string_lossy().contains("template")), "{left:?}");
    assert!(engine.sweep(&nothing()).await.expect("swept").is_empty());
}

#[tokio::test]
async fn kvm_is_judged_by_running_a_kernel_and_the_verdict_is_kept() {
    let data = DataDir::new();
    let mut config = config(data.path()).await;
    config.accelerator = AcceleratorChoice::Auto;
    let first = QemuEngine::new(config.clone()).await.expect("an engine").info();
    let machines = fs::read_dir(data.path().join("machines")).expect("listed").count();
    assert_eq!(machines, 0, "the machine that was tried is gone");
    let again = QemuEngine::new(config.clone()).await.expect("an engine").info();
    assert_eq!(first.accelerator, again.accelerator);
    config.accelerator = AcceleratorChoice::Kvm;
    match (QemuEngine::new(config).await, first.accelerator) {
        (Ok(_), Accelerator::Kvm) | (Err(EngineError::Unsupported { .. }), Accelerator::Tcg) => {}
        (result, accelerator) => panic!("{accelerator} was chosen, asking for KVM gives {:?}", result.err()),
    }
}

#[tokio::test]
async fn the_bare_emulator_restores_the_same_template() {
    let rig = Rig::new().await;
    let took = rig.engine.bare_times(&rig.template).await.expect("restored").restore;
    assert!(took > Duration::ZERO);
}

#[tokio::test]
async fn machines_have_disks_and_guests_of_their_own() {
    let rig = Rig::new().await;
    let (one, other) = (rig.start().await, rig.start().await);
    one.resume().await.expect("resumed");
    other.resume().await.expect("resumed");
    let (guest, foreign) = (one.guest().await.expect("answers"), other.guest().await.expect("answers"));
    let disk_before = one.usage().expect("read").disk_bytes;
    let text = vec![7; 1 << 20];
    write(&guest, "/note", &text).await.expect("written");
    guest.sync().await.expect("synced");
    assert!(one.usage().expect("read").disk_bytes >= disk_before + (1 << 20));
    let path = stockade_wire::files::PathRequest { path: "/note".to_owned(), user: Some("root".to_owned()) };
    assert_eq!(guest.stat(&path).await.expect("there").size, 1 << 20);
    assert!(foreign.stat(&path).await.is_err(), "the other machine has a disk of its own");

    // Calls share a session; a broken one is replaced.
    assert!(guest.is_open());
    guest.close();
    let again = one.guest().await.expect("answers");
    assert_eq!(again.stat(&path).await.expect("there").size, 1 << 20);
    one.kill().await.expect("killed");
    other.kill().await.expect("killed");
    rig.assert_clean().await;
}

#[tokio::test]
async fn a_guest_that_powers_off_or_panics_has_ended_itself_and_its_last_words_are_kept() {
    let rig = Rig::new().await;
    for (key, words) in [("o", "Power"), ("c", "Kernel panic")] {
        let machine = rig.start().await;
        machine.resume().await.expect("resumed");
        let guest = machine.guest().await.expect("answers");
        write(&guest, "/proc/sys/kernel/printk", b"7").await.expect("written");
        // Whether the answer still comes is open.
        let _ = write(&guest, "/proc/sysrq-trigger", key.as_bytes()).await;
        let exit = machine.exited().await;
        let MachineExit::GuestEnded(console) = &exit else { panic!("{exit:?}: {}", machine.console_tail()) };
        assert!(console.contains(words), "{console}");
        assert!(machine.guest().await.is_err());
        machine.kill().await.expect("removed");
        rig.assert_clean().await;
    }
}

#[tokio::test]
async fn an_emulated_processor_does_not_say_that_its_string_instructions_are_fast() {
    let rig = Rig::new().await;
    if rig.engine.info().accelerator == Accelerator::Kvm {
        return eprintln!("skipped: this host's own processor runs the guests");
    }
    let machine = rig.start().await;
    machine.resume().await.expect("resumed");
    let guest = machine.guest().await.expect("answers");
    let request = ReadFile { path: "/proc/cpuinfo".to_owned(), user: Some("root".to_owned()), ..ReadFile::default() };
    let pieces: Vec<_> = guest.read_file(&request).await.expect("opened").body.try_collect().await.expect("read");
    let text = String::from_utf8(pieces.concat()).expect("text");
    let flags: BTreeSet<_> = text.lines().find(|line| line.starts_with("flags")).expect("has").split(' ').collect();
    assert!(flags.contains("rep_good") && !flags.contains("erms") && !flags.contains("fsrm"), "{flags:?}");
    machine.kill().await.expect("removed");
}

/// Writes a file in the guest, in place.
async fn write(guest: &GuestClient, path: &str, bytes: &[u8]) -> Result<(), EngineError> {
    let user = Some("root".to_owned());
    let request = WriteFile { path: path.to_owned(), user, ..WriteFile::default() };
    let body = futures::stream::iter([Ok(bytes::Bytes::copy_from_slice(bytes))]);
    guest.write_file(&request, Box::pin(body)).await.map(drop)
}

/// Which memory an emulator's guest lives on.
fn memory_inode(pid: i32) -> u64 {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).expect("listed");
    entries
        .map(|entry| entry.expect("read").path())
        .find(|path| fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("memfd:stockade-memory")))
        .map(|path| fs::metadata(path).expect("there").ino())
        .expect("it has shared memory")
}
