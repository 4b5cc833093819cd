//! The unmodified E2B SDKs, code interpreters and command line, each in two generations. The suites are in
//! `tests/python/e2b*` and `tests/javascript/e2b*`.
//!
//! The suites record which of the SDK's methods and options, and which commands, their passing tests use. What
//! `tests/compat` says was tested must be so again, and it must say so of all that was; `STOCKADE_WRITE_COMPAT=1` writes
//! what was found there.
//!
//! What takes an emulated kernel minutes and tells nothing about an SDK is marked `long` in the code interpreter's
//! suite, and runs by name. The older code interpreter for Python asks the same of the same kernels: of it runs what is
//! marked `surface`, which are all of its methods and options.

use std::{path::Path, process::Stdio};

use serde_json::{Map, Value, json};
use stockade_system_tests::{TestServer, World, source_directory, target_directory};
use tokio::process::Command;

/// A host that shows guests their own requests.
const TEST_HOST: &str = "api.world.example";

/// The values of secrets that the suites look for at that host.
const SECRETS_BEGIN_WITH: &str = "value-of-the-secret-";

/// What a server for the code interpreter is started with.
const WITH_KERNELS: &[&str] = &["--with", "code-interpreter"];

/// A server that leads guests to a host of the test's own, and whatever keeps that host there.
async fn server_with(arguments: &[&str]) -> (TestServer, World) {
    let world = World::start(&[TEST_HOST]).await;
    let network = world.network_file(&json!({}));
    let server = TestServer::start_with(&[&["--pool", "0", "--network", &network], arguments].concat()).await;
    server.guard(SECRETS_BEGIN_WITH);
    (server, world)
}

async fn python_suite_passes(suite: &str, generation: &str, server_arguments: &[&str], which: &str) {
    let python = target_directory().join(format!("python/{suite}-{generation}/bin/python"));
    assert!(python.exists(), "{} is missing: make test installs it", python.display());
    let (server, _world) = server_with(server_arguments).await;
    let results = tempfile::NamedTempFile::new().expect("a file");
    let mut command = Command::new(python);
    command
        .args([
            "-m",
            "pytest",
            "-q",
            "--durations=10",
            "-p",
            "no:cacheprovider",
            "-p",
            "compat_plugin",
            "-m",
            which,
            ".",
        ])
        .env("PYTHONPATH", source_directory().join("tests/python"))
        .current_dir(source_directory().join("tests/python").join(suite));
    succeeds(command, &server, results.path()).await;
    server.stop().await;
    compare(results.path(), &source_directory().join(format!("tests/compat/python-{suite}-{generation}.json")));
}

/// With the packages `make test` installs per generation.
async fn javascript_suite_passes(suite: &str, generation: &str, server_arguments: &[&str]) {
    let place = target_directory().join(format!("javascript/{suite}-{generation}"));
    assert!(place.join("node_modules").exists(), "{} is missing: make test installs it", place.display());
    let (server, _world) = server_with(server_arguments).await;
    let source = source_directory().join("tests/javascript");
    let mut files = Vec::new();
    for directory in [&source, &source.join(suite)] {
        for entry in std::fs::read_dir(directory).expect("there are suites").flatten() {
            let name = entry.file_name().into_string().expect("a plain name");
            if name.ends_with("js") {
                std::fs::copy(entry.path(), place.join(&name)).expect("the suite is copied");
            }
            files.extend(name.ends_with(".test.mjs").then_some(name));
        }
    }
    let results = tempfile::NamedTempFile::new().expect("a file");
    let mut command = Command::new("node");
    // The SDK's connections, kept for the next request, would hold the program for minutes.
    command.args(["--require", "./localhost.cjs", "--test", "--test-force-exit"]).args(files).current_dir(&place);
    succeeds(command, &server, results.path()).await;
    server.stop().await;
    compare(results.path(), &source_directory().join(format!("tests/compat/javascript-{suite}-{generation}.json")));
}

/// Runs a suite against the server; what it tested is in `results` then.
async fn succeeds(mut command: Command, server: &TestServer, results: &Path) {
    let environment = server.e2b_environment();
    let ca_file = environment.iter().find(|(name, _)| name == "SSL_CERT_FILE").map(|(_, value)| value.clone());
    let output = command
        .env("NODE_EXTRA_CA_CERTS", ca_file.expect("the server has a CA"))
        .env("STOCKADE_TEST_HOST", TEST_HOST)
        .env("STOCKADE_COMPAT_OUT", results)
        .envs(environment)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .expect("the program starts");
    println!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "the suite ended with {}", output.status);
}

/// What a suite found: of which release, and by name of a method or an option whether it was tested.
fn read(path: &Path) -> (String, Map<String, Value>) {
    let text = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let value: Value = serde_json::from_slice(&text).expect("JSON");
    let mut used = value["methods"].as_object().expect("methods").clone();
    used.extend(value["options"].as_object().into_iter().flatten().map(|(name, state)| (name.clone(), state.clone())));
    (value["sdk"].as_str().expect("a release").to_owned(), used)
}

/// Whether all that was tested is so again, and what is committed says what is so.
fn compare(found: &Path, committed: &Path) {
    if std::env::var_os("STOCKADE_WRITE_COMPAT").is_some() {
        std::fs::copy(found, committed).expect("the results are written");
        return;
    }
    let ((release, found), (committed_release, committed)) = (read(found), read(committed));
    let lost: Vec<_> =
        committed.iter().filter(|(name, state)| *state == "tested" && found.get(*name) != Some(state)).collect();
    assert!(lost.is_empty(), "no longer tested: {lost:?}; if that is meant, run with STOCKADE_WRITE_COMPAT=1");
    if release != committed_release {
        // Not this change's doing: a newer one was published, and may have more.
        println!("the table is about {committed_release}, this was {release}: run with STOCKADE_WRITE_COMPAT=1");
        return;
    }
    let told_otherwise: Vec<_> = found.iter().filter(|(name, state)| committed.get(*name) != Some(state)).collect();
    assert!(
        told_otherwise.is_empty(),
        "tests/compat does not say so: {told_otherwise:?}; run with STOCKADE_WRITE_COMPAT=1, then scripts/compatibility"
    );
}

#[tokio::test]
async fn the_current_e2b_sdk_for_javascript_works_unmodified() {
    javascript_suite_passes("e2b", "current", &[]).await;
}

#[tokio::test]
async fn the_e2b_sdk_for_javascript_of_the_2_45_generation_works_unmodified() {
    javascript_suite_passes("e2b", "2.45", &[]).await;
}

#[tokio::test]
async fn the_current_e2b_sdk_works_unmodified() {
    python_suite_passes("e2b", "current", &[], "").await;
}

#[tokio::test]
async fn the_e2b_sdk_of_the_2_45_generation_works_unmodified() {
    python_suite_passes("e2b", "2.45", &[], "").await;
}

#[tokio::test]
async fn the_current_code_interpreter_sdk_works_unmodified() {
    python_suite_passes("e2b_code", "current", WITH_KERNELS, "not long").await;
}

#[tokio::test]
async fn the_code_interpreter_sdk_of_the_2_9_generation_works_unmodified() {
    python_suite_passes("e2b_code", "2.9", WITH_KERNELS, "surface and not long").await;
}

#[tokio::test]
async fn the_current_code_interpreter_sdk_for_javascript_works_unmodified() {
    javascript_suite_passes("e2b_code", "current", WITH_KERNELS).await;
}

#[tokio::test]
async fn the_code_interpreter_sdk_for_javascript_of_the_2_7_generation_works_unmodified() {
    javascript_suite_passes("e2b_code", "2.7", WITH_KERNELS).await;
}

#[tokio::test]
async fn the_current_e2b_command_line_works_unmodified() {
    javascript_suite_passes("e2b_cli", "current", &[]).await;
}

#[tokio::test]
async fn the_e2b_command_line_of_the_2_16_generation_works_unmodified() {
    javascript_suite_passes("e2b_cli", "2.16", &[]).await;
}

#[tokio::test]
#[ignore = "half an hour where kernels are emulated: run it by name with --run-ignored all"]
async fn the_long_part_of_the_code_interpreters_suite_passes() {
    python_suite_passes("e2b_code", "current", WITH_KERNELS, "").await;
}
