use std::{
    fs,
    path::Path,
    process::{Output, Stdio},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use stockade_system_tests::{stockade_program, target_directory};
use tokio::process::Command;

const PATIENCE: Duration = Duration::from_secs(1500);

/// `up --accel kvm` to its end; a server that serves is told to end.
async fn up_with_kvm(data_dir: &Path) -> Output {
    let child = Command::new(stockade_program())
        .args(["up", "--json", "--accel", "kvm", "--pool", "0", "--no-self-check"])
        .args(["--http", "127.0.0.1:0", "--https", "127.0.0.1:0"])
        .env("STOCKADE_DATA_DIR", data_dir)
        .env("STOCKADE_TEMPLATE_CACHE", target_directory().join("template-cache"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("the program starts");
    let pid = i32::try_from(child.id().expect("it runs")).expect("a pid");
    let is_ready = async {
        while !data_dir.join("ready.json").exists() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        kill(Pid::from_raw(pid), Signal::SIGTERM).expect("it is our child");
        std::future::pending::<()>().await;
    };
    let ended = tokio::time::timeout(PATIENCE, async {
        tokio::select! {
            ended = child.wait_with_output() => ended.expect("it is our child"),
            () = is_ready => unreachable!("it never ends"),
        }
    });
    ended.await.expect("it ends in time")
}

/// A host with KVM shows nothing here; one without refuses at once, one whose device runs no guest after a try.
#[tokio::test]
async fn kvm_that_cannot_be_honoured_leaves_the_data_directory_as_it_was() {
    let place = target_directory().join("t");
    fs::create_dir_all(&place).expect("the directory is ours");
    let place = tempfile::tempdir_in(place).expect("it can be created");
    let data_dir = place.path().join("data");
    for was_there in [false, true] {
        if was_there {
            fs::create_dir(&data_dir).expect("it can be created");
        }
        let ended = up_with_kvm(&data_dir).await;
        if ended.status.success() {
            return;
        }
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(said.contains("host_unsupported"), "{said}");
        assert_eq!(data_dir.exists(), was_there, "{said}");
        assert!(!was_there || fs::read_dir(&data_dir).expect("a directory").next().is_none(), "{said}");
    }
}
