//! What users of other sandbox platforms have reported as broken, tried here: the catalogue is
//! `tests/cases/cases.md`.

use std::process::Stdio;

use stockade_system_tests::{TestServer, source_directory, target_directory};
use tokio::process::Command;

/// The time bounds in the catalogue are for hardware virtualisation.
const SLOWER: &str = "20";

/// EXEC-12 waits for seven minutes and so runs beside the others.
const CASES: [&str; 15] = [
    "EXEC-0", "EXEC-10", "EXEC-11", "EXEC-13", "EXEC-14", "EXEC-15", "EXEC-16", "PTY", "FILE-01", "FILE-02", "FILE-03",
    "FILE-05", "FILE-07", "FILE-08", "FILE-09",
];

#[tokio::test]
async fn field_cases_of_exec_terminals_and_files_come_out_right() {
    let server = TestServer::start().await;
    let (told, silent) = tokio::join!(run_cases(&server, &CASES), run_cases(&server, &["EXEC-12"]));
    let lines: Vec<_> = told.lines().chain(silent.lines()).collect();
    println!("{}", lines.join("\n"));
    let count = |outcome: &str| lines.iter().filter(|line| line.starts_with(outcome)).count();
    // A case that is skipped proves nothing.
    assert_eq!((count("FAIL"), count("SKIP")), (0, 0));
    assert!(count("PASS") >= 23, "only {} cases ran", count("PASS"));
    server.stop().await;
}

/// What the runner printed: a line per case.
async fn run_cases(server: &TestServer, cases: &[&str]) -> String {
    let python = target_directory().join("python/e2b-current/bin/python");
    assert!(python.exists(), "{} is missing: make test installs it", python.display());
    let output = Command::new(python)
        .arg(source_directory().join("tests/cases/run_cases.py"))
        .args(["--on", "e2b", "--slow", SLOWER])
        .args(cases)
        .envs(server.e2b_environment())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .expect("python starts");
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}
