//! Guests and hosts in trouble while a sandbox is snapshotted, forked or paused: a clear error, nothing half there, and
//! the sandbox as it was.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use stockade_system_tests::{Sandbox, TestServer};

use crate::lifecycle::{check_counter, start_counter};

/// Tries a verb; its status and, where it is refused, the error's code.
async fn attempt(server: &TestServer, sandbox: &Sandbox<'_>, verb: &str, body: Value) -> (StatusCode, Value) {
    let path = format!("/v1/sandboxes/{}/{verb}", sandbox.id());
    server.try_json(Method::POST, &path, Some(body)).await.expect("it answers")
}

/// No directory, record or machine besides this sandbox's.
async fn nothing_half_there(server: &TestServer, sandboxes: usize) {
    for kind in ["paused", "snapshots"] {
        let directory = server.data_dir().join(kind);
        let gone = async {
            while std::fs::read_dir(&directory).expect("a directory").count() > 0 {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let gone = tokio::time::timeout(Duration::from_secs(60), gone).await;
        assert!(gone.is_ok(), "{kind} holds what nobody needs:\n{}", server.log());
    }
    let page = server.json(Method::GET, "/v1/snapshots", None).await;
    assert_eq!(page["items"], json!([]));
    let page = server.json(Method::GET, "/v1/sandboxes", None).await;
    assert_eq!(page["items"].as_array().map(Vec::len), Some(sandboxes), "{page}");
}

/// The emulator's process of the only machine there is; others wait for theirs.
fn emulator(server: &TestServer) -> Pid {
    let records =
        std::fs::read_dir(server.data_dir().join("machines")).expect("a directory").flatten().filter_map(|machine| {
            let record = std::fs::read_to_string(machine.path().join("machine.json")).ok()?;
            Some(serde_json::from_str::<Value>(&record).expect("JSON"))
        });
    let machines: Vec<_> = records.filter(|record| record["is_complete"] == true).collect();
    assert_eq!(machines.len(), 1, "{machines:?}");
    let record = &machines[0];
    let pid = record["processes"]["emulator"]["pid"].as_i64().unwrap_or_else(|| panic!("no pid in {record}"));
    Pid::from_raw(i32::try_from(pid).expect("a pid"))
}

#[tokio::test]
async fn a_frozen_machine_is_an_error_and_goes_on_where_it_stood() {
    // Each waits for the emulator's answer in vain: side by side that takes no longer than once.
    tokio::join!(
        frozen_during("snapshots", json!({})),
        frozen_during("fork", json!({ "count": 2 })),
        frozen_during("pause", json!({})),
    );
}

async fn frozen_during(verb: &str, body: Value) {
    let server = TestServer::start().await;
    let sandbox = server.create("base").await;
    start_counter(&sandbox).await;
    let emulator = emulator(&server);
    kill(emulator, Signal::SIGSTOP).expect("it runs");
    // Until the error is known; then the server tries for a while to have the machine run.
    let thaw = async {
        while !server.log().contains("machine not resumed") {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        kill(emulator, Signal::SIGCONT).expect("it runs");
    };
    let ((status, refused), ()) = tokio::join!(attempt(&server, &sandbox, verb, body.clone()), thaw);
    assert!(status.is_server_error(), "{verb}: {status} {refused}");
    assert_eq!(refused["error"]["code"], "emulator_failed", "{verb}: {refused}");
    assert!(refused["error"]["hint"].as_str().is_some_and(|hint| !hint.is_empty()), "{verb}: {refused}");
    assert_eq!(sandbox.info().await["state"], "running", "{verb}");
    let count = check_counter(&sandbox, 0).await;
    nothing_half_there(&server, 1).await;
    // What failed works now.
    let (status, answer) = attempt(&server, &sandbox, verb, body).await;
    assert!(status.is_success(), "{verb}: {status} {answer}");
    if verb == "pause" {
        sandbox.verb("resume", json!({})).await;
    }
    check_counter(&sandbox, count).await;
    server.stop().await;
}

#[tokio::test]
async fn a_kernel_that_panics_ends_its_sandbox_and_leaves_nothing() {
    let server = TestServer::start().await;
    for (verb, body) in [("snapshots", json!({})), ("fork", json!({})), ("pause", json!({}))] {
        let sandbox = server.create("base").await;
        // In the middle of the verb or soon after it, also where the guest was away in between.
        let panic = "setsid sh -c 'sleep 0.5; echo c > /proc/sysrq-trigger' >/dev/null 2>&1 </dev/null &";
        sandbox.run(json!({ "shell": panic, "user": "root" })).await.expect_success();
        let (status, answer) = attempt(&server, &sandbox, verb, body).await;
        // It may have been done before the panic; a child of that instant panics by itself.
        assert!(status.is_success() || !answer["error"]["code"].is_null(), "{verb}: {status} {answer}");
        if verb == "pause" && status.is_success() {
            let (status, answer) = attempt(&server, &sandbox, "resume", json!({})).await;
            assert!(status.is_success() || !answer["error"]["code"].is_null(), "{status} {answer}");
        }
        let ended = async {
            loop {
                let info = sandbox.info().await;
                if info["state"] == "gone" {
                    break info;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let info = tokio::time::timeout(Duration::from_secs(60), ended).await;
        let info = info.unwrap_or_else(|_| panic!("{verb}: it never ended:\n{}", server.log()));
        assert!(info["ending"]["detail"].as_str().is_some_and(|told| told.contains("panic")), "{verb}: {info}");
        server.kill_all().await;
        let page = server.json(Method::GET, "/v1/snapshots", None).await;
        for snapshot in page["items"].as_array().expect("a list") {
            let path = format!("/v1/snapshots/{}", snapshot["id"].as_str().expect("an id"));
            server.json(Method::DELETE, &path, None).await;
        }
        nothing_half_there(&server, 0).await;
    }
    server.stop().await;
}

/// Takes all memory again and again; the kernel ends it each time.
const GREEDY: &str = "while :; do python3 -c 'held = []\nwhile True: held.append(bytes(b\"x\" * (4 << 20)))'; done";

#[tokio::test]
async fn a_guest_out_of_memory_is_kept_as_it_is() {
    let server = TestServer::start().await;
    let sandbox = server.create("base").await;
    start_counter(&sandbox).await;
    sandbox.write("/home/user/greedy.sh", GREEDY).await;
    sandbox
        .says("setsid sh greedy.sh >/dev/null 2>killed </dev/null & until grep -qi kill killed; do sleep 0.1; done")
        .await;
    let count = check_counter(&sandbox, 0).await;
    let taken = sandbox.verb("snapshots", json!({})).await;
    let child = crate::lifecycle_forks::fork(&server, &sandbox, json!({})).await.remove(0);
    check_counter(&child, count).await;
    child.kill().await;
    for tier in ["standby", "hibernated"] {
        sandbox.verb("pause", json!({ "tier": tier })).await;
        sandbox.verb("resume", json!({})).await;
    }
    check_counter(&sandbox, count).await;
    let path = format!("/v1/snapshots/{}", taken["id"].as_str().expect("an id"));
    server.json(Method::DELETE, &path, None).await;
    nothing_half_there(&server, 1).await;
    server.stop().await;
}

/// A file system in memory, mounted for one test, whose room changes at once.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// Room for a template, a sandbox and its snapshots.
    const BYTES: u64 = 4 << 30;

    fn mount() -> Self {
        let disk = Self(tempfile::tempdir().expect("a directory"));
        disk.set_size(Self::BYTES, MsFlags::empty()).expect("this test mounts a file system: run it as root");
        disk
    }

    fn set_size(&self, bytes: u64, flags: MsFlags) -> nix::Result<()> {
        let size = format!("size={bytes}");
        mount(Some("stockade-test"), self.0.path(), Some("tmpfs"), flags, Some(size.as_str()))
    }

    /// Leaves so many bytes free.
    fn leave(&self, bytes: u64) {
        loop {
            let space = nix::sys::statvfs::statvfs(self.0.path()).expect("a file system");
            let used = (space.blocks() - space.blocks_free()) * space.fragment_size();
            match self.set_size(used + bytes, MsFlags::MS_REMOUNT) {
                Ok(()) => return,
                // More has been written meanwhile.
                Err(Errno::EINVAL) => {}
                Err(error) => panic!("cannot change the size of {}: {error}", self.0.path().display()),
            }
        }
    }

    fn make_room(&self) {
        self.set_size(Self::BYTES, MsFlags::MS_REMOUNT).expect("it is mounted");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // A test that failed may have left processes behind that have files open.
        let _ = nix::mount::umount2(self.0.path(), nix::mount::MntFlags::MNT_DETACH);
    }
}

/// Whether the only machine's snapshot is being written.
fn is_writing(machines: &Path) -> bool {
    let entries = |path: &Path| std::fs::read_dir(path).into_iter().flatten().flatten();
    entries(machines).any(|machine| entries(&machine.path().join("snapshot.new")).next().is_some())
}

#[tokio::test]
async fn a_disk_that_fills_up_in_the_middle_costs_nothing_but_the_attempt() {
    let disk = Arc::new(SmallDisk::mount());
    let server = TestServer::start_in(disk.0.path(), &["--pool", "0"], &[]).await;
    let sandbox = server.create("base").await;
    start_counter(&sandbox).await;
    // What a snapshot has to write, and its writing takes long enough to be caught.
    sandbox.says("head -c 80M /dev/urandom > /dev/shm/held; sha256sum /dev/shm/held > sum").await;

    let machines = server.data_dir().join("machines");
    for verb in ["snapshots", "fork", "pause"] {
        // Refused before anything is changed.
        disk.leave(100 << 20);
        let (status, refused) = attempt(&server, &sandbox, verb, json!({})).await;
        let expected = (StatusCode::SERVICE_UNAVAILABLE, &json!("no_capacity"));
        assert_eq!((status, &refused["error"]["code"]), expected, "{verb}: {refused}");
        disk.make_room();

        // Full once its files are being written.
        let is_over = Arc::new(AtomicBool::new(false));
        let filler = std::thread::spawn({
            let (disk, machines, is_over) = (disk.clone(), machines.clone(), is_over.clone());
            move || {
                while !is_writing(&machines) && !is_over.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                disk.leave(0);
            }
        });
        let (status, refused) = attempt(&server, &sandbox, verb, json!({})).await;
        is_over.store(true, Ordering::Relaxed);
        filler.join().expect("it has filled the disk");
        assert_eq!((status, &refused["error"]["code"]), expected, "{verb}: {refused}");
        disk.make_room();
        assert_eq!(sandbox.info().await["state"], "running", "{verb}");
        nothing_half_there(&server, 1).await;
        check_counter(&sandbox, 0).await;
    }

    // A guest that writes while there is no room stands still, and loses nothing.
    disk.leave(1 << 20);
    let write = async { sandbox.says("head -c 20M /dev/urandom > big && sync && sha256sum < big").await };
    let room = async {
        let stands = async {
            while !server.log().contains("found no room") {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        assert!(tokio::time::timeout(Duration::from_secs(60), stands).await.is_ok(), "{}", server.log());
        disk.make_room();
    };
    let (sum, ()) = tokio::join!(write, room);
    sandbox.verb("pause", json!({})).await;
    sandbox.verb("resume", json!({})).await;
    assert_eq!(sandbox.says("sha256sum < big").await, sum);
    sandbox.says("sha256sum --check --quiet sum").await;
    check_counter(&sandbox, 0).await;
    server.stop().await;
}
