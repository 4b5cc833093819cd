//! The unmodified E2B Python SDK, in two generations. The suite is in `tests/python/e2b`.

use std::process::Stdio;

use stockade_system_tests::{TestServer, source_directory, target_directory};
use tokio::process::Command;

async fn suite_passes(generation: &str) {
    let python = target_directory().join(format!("python/e2b-{generation}/bin/python"));
    assert!(python.exists(), "{} is missing: make test installs it", python.display());
    let server = TestServer::start().await;
    let output = Command::new(python)
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "."])
        .current_dir(source_directory().join("tests/python/e2b"))
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

#[tokio::test]
async fn the_current_e2b_sdk_works_unmodified() {
    suite_passes("current").await;
}

#[tokio::test]
async fn the_e2b_sdk_of_the_2_45_generation_works_unmodified() {
    suite_passes("2.45").await;
}
