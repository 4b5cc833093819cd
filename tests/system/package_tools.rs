//! git, pip and npm through an allow list, against a mirror of the test's own.

use std::{path::Path, process::Command};

use serde_json::json;
use stockade_system_tests::{TestServer, World};

const NAMES: [&str; 4] = ["git.world.example", "pypi.world.example", "npm.world.example", "evil.example"];

#[tokio::test]
async fn git_pip_and_npm_work_through_an_allow_list() {
    let world = World::start(&NAMES).await;
    fill(&world.files());
    let allow: Vec<_> = NAMES.iter().filter(|name| name.ends_with("world.example")).collect();
    let network = world.network_file(&json!({ "default": { "allow": allow } }));
    let server = TestServer::start_with(&["--pool", "0", "--network", &network]).await;
    let sandbox = server.create("base").await;
    sandbox.write_as("root", "/usr/local/share/ca-certificates/world.crt", world.certificate().into_bytes()).await;
    // Makes the bundle anew: the deployment's own authority must still be in it.
    sandbox.shell("sudo update-ca-certificates").await.expect_success();

    for line in [
        "git clone -q https://git.world.example/repo.git /tmp/repo && test -f /tmp/repo/README",
        "pip install -q --index-url https://pypi.world.example/simple/ tinything && \
         test \"$(python3 -c 'import tinything; print(tinything.ANSWER)')\" = 42",
        "cd /tmp && npm install --silent --registry https://npm.world.example tinything && \
         test \"$(node -p 'require(\"tinything\")')\" = 42",
        // Refused over TLS in another's name: the client must take the certificate to read the reason.
        "curl -sS --max-time 60 https://evil.example/ | grep -q evil.example",
    ] {
        sandbox.shell(line).await.expect_success();
    }
    let ran = sandbox.shell("git clone -q https://evil.example/repo.git /tmp/evil").await;
    assert_ne!(ran.code, Some(0), "{ran}");
    server.stop().await;
}

/// A repository, an index with a wheel, and a registry with a package.
fn fill(files: &Path) {
    let script = r#"
import base64, hashlib, io, json, os, subprocess, sys, tarfile, zipfile
os.chdir(sys.argv[1])
git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com"]
os.makedirs("work")
open("work/README", "w").write("hello\n")
for command in (["init", "-q", "work"], ["-C", "work", "add", "."], ["-C", "work", "commit", "-qm", "one"],
                ["clone", "-q", "--bare", "work", "repo.git"], ["-C", "repo.git", "update-server-info"]):
    subprocess.run(git + command, check=True)
os.makedirs("simple/tinything")
wheel = "tinything-1.0-py3-none-any.whl"
with zipfile.ZipFile(f"simple/tinything/{wheel}", "w") as z:
    z.writestr("tinything.py", "ANSWER = 42\n")
    z.writestr("tinything-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinything\nVersion: 1.0\n")
    z.writestr("tinything-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    z.writestr("tinything-1.0.dist-info/RECORD", "")
open("simple/tinything/index.html", "w").write(f'<!doctype html><a href="{wheel}">{wheel}</a>')
os.makedirs("tarballs")
with tarfile.open("tarballs/tinything-1.0.0.tgz", "w:gz") as t:
    for name, text in (("package.json", '{"name":"tinything","version":"1.0.0"}'), ("index.js", "module.exports = 42")):
        info = tarfile.TarInfo(f"package/{name}")
        info.size = len(text)
        t.addfile(info, io.BytesIO(text.encode()))
data = open("tarballs/tinything-1.0.0.tgz", "rb").read()
dist = {"tarball": "https://npm.world.example/tarballs/tinything-1.0.0.tgz",
        "integrity": "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()}
version = {"name": "tinything", "version": "1.0.0", "dist": dist}
json.dump({"name": "tinything", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}, open("tinything", "w"))
"#;
    let made = Command::new("python3").args(["-c", script]).arg(files).output().expect("python3 runs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}
