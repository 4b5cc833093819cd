//! The unmodified E2B SDKs, each in two generations. The suites are in `tests/python/e2b*` and `tests/javascript/e2b`.

use std::process::Stdio;

use stockade_system_tests::{TestServer, source_directory, target_directory};
use tokio::process::Command;

async fn suite_passes(suite: &str, generation: &str, server_arguments: &[&str]) {
    let python = target_directory().join(format!("python/{suite}-{generation}/bin/python"));
    assert!(python.exists(), "{} is missing: make test installs it", python.display());
    let server = TestServer::start_with(&[&["--pool", "0"], server_arguments].concat()).await;
    let output = Command::new(python)
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "."])
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
}

/// The JavaScript suite, with the packages `make test` installs per generation.
async fn javascript_suite_passes(generation: &str) {
    let place = target_directory().join(format!("javascript/e2b-{generation}"));
    assert!(place.join("node_modules").exists(), "{} is missing: make test installs it", place.display());
    let server = TestServer::start().await;
    let source = source_directory().join("tests/javascript/e2b");
    for file in ["suite.test.mjs", "localhost.cjs"] {
        std::fs::copy(source.join(file), place.join(file)).expect("the suite is copied");
    }
    let environment = server.e2b_environment();
    let ca_file = environment.iter().find(|(name, _)| name == "SSL_CERT_FILE").map(|(_, value)| value.clone());
    let output = Command::new("node")
        .args(["--require", "./localhost.cjs", "--test", "suite.test.mjs"])
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
async fn the_current_code_interpreter_sdk_works_unmodified() {
    suite_passes("e2b_code", "current", &["--with", "code-interpreter"]).await;
}

#[tokio::test]
async fn the_code_interpreter_sdk_of_the_2_9_generation_works_unmodified() {
    suite_passes("e2b_code", "2.9", &["--with", "code-interpreter"]).await;
}
