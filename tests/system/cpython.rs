//! Real work: CPython's own tests, in a sandbox and on this host, with the same Python from Debian.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    process::{Command, Stdio},
};

use serde_json::json;
use stockade_system_tests::TestServer;

const PYTHON: &str = "/usr/bin/python3.11";
const LIBRARY: &str = "/usr/lib/python3.11";
const MODULES: &[&str] =
    &["test_json", "test_re", "test_subprocess", "test_signal", "test_pty", "test_os", "test_tarfile"];
const SCRIPT: &str = include_str!("cpython_outcomes.py");

type Outcomes = BTreeMap<String, String>;

#[tokio::test]
async fn cpythons_own_tests_pass_in_a_sandbox_as_they_do_on_debian() {
    sandbox_agrees_with_host(MODULES, 500).await;
}

#[tokio::test]
async fn cpythons_asyncio_tests_pass_in_a_sandbox_as_they_do_on_debian() {
    sandbox_agrees_with_host(&["test_asyncio"], 1000).await;
}

/// Every case that passes on the host passes or is skipped in a sandbox, and at least `expected` cases pass.
async fn sandbox_agrees_with_host(modules: &'static [&'static str], expected: usize) {
    let on_host = tokio::task::spawn_blocking(|| on_host(modules));
    let server = TestServer::start().await;
    let sandbox = server.create("base").await;

    // Another Python would be another test.
    let version = ["-c", "import sys; print(sys.version)"];
    let here = output(Command::new(PYTHON).args(version));
    let there = sandbox.run(json!({ "argv": [PYTHON, version[0], version[1]] })).await.expect_success();
    assert_eq!(String::from_utf8_lossy(&there.stdout), here, "host and sandbox have different Pythons");

    let tar = Command::new("tar")
        .args(["--create", "--exclude=__pycache__", "--directory", LIBRARY, "test"])
        .stderr(Stdio::inherit())
        .output()
        .expect("tar runs");
    assert!(tar.status.success());
    sandbox.write("/tmp/tests.tar", tar.stdout).await;
    sandbox.write("/tmp/outcomes.py", SCRIPT).await;
    sandbox.shell(&format!("sudo tar -C {LIBRARY} -xf /tmp/tests.tar --no-same-owner")).await.expect_success();

    let argv: Vec<_> = [PYTHON, "/tmp/outcomes.py"].iter().chain(modules).collect();
    let ran = sandbox.run(json!({ "argv": argv })).await;
    let in_sandbox = parse(&String::from_utf8_lossy(&ran.stdout));
    assert_eq!(ran.code, Some(0), "{ran}");
    let on_host = on_host.await.expect("the tests ran on the host");

    let differs: Vec<_> = on_host
        .iter()
        .filter_map(|(name, here)| {
            let there = in_sandbox.get(name).map_or("absent", String::as_str);
            (there != here).then(|| format!("{name}: {here} on the host, {there} in the sandbox"))
        })
        .collect();
    let count = |outcomes: &Outcomes, what: &str| outcomes.values().filter(|outcome| *outcome == what).count();
    println!("{} passed in the sandbox, {} on the host", count(&in_sandbox, "pass"), count(&on_host, "pass"));
    println!("{}", differs.join("\n"));
    let worse: Vec<_> = on_host
        .iter()
        .filter(|(name, here)| *here == "pass" && in_sandbox.get(*name).is_none_or(|there| there == "fail"))
        .map(|(name, _)| name)
        .collect();
    assert!(worse.is_empty(), "these pass on the host only: {worse:#?}\n{ran}");
    assert!(count(&in_sandbox, "pass") >= expected, "too few tests ran: {}", count(&in_sandbox, "pass"));
    server.stop().await;
}

/// As an ordinary user, as in the sandbox.
fn on_host(modules: &[&str]) -> Outcomes {
    assert!(Path::new(LIBRARY).join("test/test_json").exists(), "apt-get install libpython3.11-testsuite");
    let scratch = tempfile::tempdir().expect("a temporary directory");
    let script = scratch.path().join("outcomes.py");
    fs::write(&script, SCRIPT).expect("written");
    let mut command = if nix::unistd::geteuid().is_root() {
        let everyone = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        fs::set_permissions(scratch.path(), everyone).expect("it is ours");
        let mut command = Command::new("setpriv");
        command.args(["--reuid=nobody", "--regid=nogroup", "--clear-groups", "--", PYTHON]);
        command
    } else {
        Command::new(PYTHON)
    };
    command.env_clear().env("PATH", "/usr/local/bin:/usr/bin:/bin").env("LANG", "C.UTF-8");
    command.env("HOME", scratch.path()).env("TMPDIR", scratch.path()).current_dir(scratch.path());
    parse(&output(command.arg(&script).args(modules)))
}

fn output(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).stderr(Stdio::piped()).output().expect("it starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

fn parse(lines: &str) -> Outcomes {
    lines.lines().filter_map(|line| line.split_once(' ')).map(|(outcome, name)| (name.into(), outcome.into())).collect()
}
