//! The unmodified E2B SDKs, each in two generations. The suites are in `tests/python/e2b*` and `tests/javascript/e2b`.
//!
//! The Python suites record which of the SDK's methods their passing tests call. What `tests/compat` says was tested
//! must be so again; `STOCKADE_WRITE_COMPAT=1` writes what was found there.

use std::{path::Path, process::Stdio};

use serde_json::Value;
use stockade_system_tests::{TestServer, source_directory, target_directory};
use tokio::process::Command;

async fn suite_passes(suite: &str, generation: &str, server_arguments: &[&str]) {
    let python = target_directory().join(format!("python/{suite}-{generation}/bin/python"));
    assert!(python.exists(), "{} is missing: make test installs it", python.display());
    let server = TestServer::start_with(&[&["--pool", "0"], server_arguments].concat()).await;
    let results = tempfile::NamedTempFile::new().expect("a file");
    let output = Command::new(python)
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "compat_plugin", "."])
        .env("PYTHONPATH", source_directory().join("tests/python"))
        .env("STOCKADE_COMPAT_OUT", results.path())
        .current_dir(source_directory().join("tests/python").join(suite))
        .envs(server.e2b_environment())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .expect("python starts");
    println!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "pytest ended with {}", output.status);
    server.stop().await;
    compare(results.path(), &source_directory().join(format!("tests/compat/python-{suite}-{generation}.json")));
}

/// Whether all that was tested is so again.
fn compare(found: &Path, committed: &Path) {
    if std::env::var_os("STOCKADE_WRITE_COMPAT").is_some() {
        std::fs::copy(found, committed).expect("the results are written");
        return;
    }
    if !committed.exists() {
        println!("{} is not there: nothing to compare with", committed.display());
        return;
    }
    let read = |path: &Path| {
        let text = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let value: Value = serde_json::from_slice(&text).expect("JSON");
        value["methods"].as_object().expect("methods").clone()
    };
    let (found, committed) = (read(found), read(committed));
    let lost: Vec<_> =
        committed.iter().filter(|(name, state)| *state == "tested" && found.get(*name) != Some(state)).collect();
    assert!(lost.is_empty(), "no longer tested: {lost:?}; if that is meant, run with STOCKADE_WRITE_COMPAT=1");
}

/// The JavaScript suite, with the packages `make test` installs per generation.
async fn javascript_suite_passes(generation: &str) {
    let place = target_directory().join(format!("javascript/e2b-{generation}"));
    assert!(place.join("node_modules").exists(), "{} is missing: make test installs it", place.display());
    let server = TestServer::start().await;
    let source = source_directory().join("tests/javascript/e2b");
    for file in ["suite.test.mjs", "cli.test.mjs", "localhost.cjs"] {
        std::fs::copy(source.join(file), place.join(file)).expect("the suite is copied");
    }
    let environment = server.e2b_environment();
    let ca_file = environment.iter().find(|(name, _)| name == "SSL_CERT_FILE").map(|(_, value)| value.clone());
    let output = Command::new("node")
        .args(["--require", "./localhost.cjs", "--test", "suite.test.mjs", "cli.test.mjs"])
        .current_dir(&place)
        .env("NODE_EXTRA_CA_CERTS", ca_file.expect("the server has a CA"))
        .envs(environment)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .expect("node starts");
    println!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "node ended with {}", output.status);
    server.stop().await;
}

#[tokio::test]
async fn the_current_e2b_sdk_for_javascript_works_unmodified() {
    javascript_suite_passes("current").await;
}

#[tokio::test]
async fn the_current_e2b_sdk_works_unmodified() {
    suite_passes("e2b", "current", &[]).await;
}

#[tokio::test]
async fn the_e2b_sdk_of_the_2_45_generation_works_unmodified() {
    suite_passes("e2b", "2.45", &[]).await;
}

#[tokio::test]
#[ignore = "its template and suite take half an hour emulated: run it by name with --run-ignored all"]
async fn the_current_code_interpreter_sdk_works_unmodified() {
    suite_passes("e2b_code", "current", &["--with", "code-interpreter"]).await;
}

#[tokio::test]
#[ignore = "its template and suite take half an hour emulated: run it by name with --run-ignored all"]
async fn the_code_interpreter_sdk_of_the_2_9_generation_works_unmodified() {
    suite_passes("e2b_code", "2.9", &["--with", "code-interpreter"]).await;
}
