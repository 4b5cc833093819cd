use stockade_system_tests::TestServer;

/// What agents expect of a machine, each a command that must succeed as the default user.
const EXPECTATIONS: [(&str, &str); 18] = [
    ("the user", r#"test "$(id -un) $(id -u) $HOME $PWD" = "user 1000 /home/user /home/user""#),
    ("sudo without a password", r#"test "$(sudo -n id -u)" = 0"#),
    ("sudo keeps standard error clean", r#"test -z "$(sudo -n true 2>&1)""#),
    (
        "the tools",
        "for tool in bash git curl wget tar unzip xz jq rg gcc make ssh node npm python3 pip ps ip sudo; do \
                   command -v $tool >/dev/null || { echo no $tool; exit 1; }; done",
    ),
    ("a C compiler that makes programs", "echo 'int main(void){return 0;}' | gcc -x c - -o /tmp/a && /tmp/a"),
    ("Node.js", r#"test "$(node -e 'console.log(6*7)')" = 42"#),
    (
        "virtual environments",
        "python3 -m venv --without-pip /tmp/venv && /tmp/venv/bin/python -c 'import ssl, sqlite3, ctypes'",
    ),
    ("pip into the system", "test ! -e /usr/lib/python3.11/EXTERNALLY-MANAGED && pip --version"),
    (
        "UTF-8",
        r#"test "$(python3 -c 'import sys; print(sys.getfilesystemencoding(), sys.stdout.encoding)')" = "utf-8 utf-8""#,
    ),
    ("its own names", "getent hosts localhost && getent hosts \"$(hostname)\""),
    (
        "a table of hosts that is the user's",
        "echo '10.9.8.7 their-own' | sudo tee -a /etc/hosts && getent hosts their-own | grep -w 10.9.8.7",
    ),
    ("names of services", "getent services http | grep -w 80/tcp"),
    ("places to write to", "touch /code/x /usr/local/bin/x /tmp/x && rm /code/x /usr/local/bin/x /tmp/x"),
    (
        "extended attributes",
        "cd /tmp && touch attr && python3 -c \"import os; os.setxattr('attr', 'user.k', b'v'); \
                             assert os.getxattr('attr', 'user.k') == b'v'\"",
    ),
    ("certificates", "python3 -c 'import ssl; assert len(ssl.create_default_context().get_ca_certs()) > 50'"),
    ("overlayfs and modules", "sudo modprobe overlay && sudo modprobe fuse && grep -q overlay /proc/filesystems"),
    (
        "no traces of the build",
        "test ! -s /var/log/dpkg.log && test -z \"$(ls /var/cache/apt/archives/*.deb 2>/dev/null)\"",
    ),
    ("a terminal for those who ask", "python3 -c 'import pty; pty.openpty()' && test -c /dev/ptmx"),
];

#[tokio::test]
async fn the_base_template_has_what_agents_expect() {
    let server = TestServer::start().await;
    let sandbox = server.create("base").await;
    let mut failures = Vec::new();
    for (what, command) in EXPECTATIONS {
        let ran = sandbox.shell(command).await;
        if ran.code != Some(0) {
            failures.push(format!("{what}: {ran}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));

    // The file system fills the disk of the template's shape, which is sparse on the host.
    let disk_mib = sandbox.info().await["shape"]["disk_mib"].as_u64().expect("a shape has a disk");
    let ran = sandbox.shell("df --output=size -BM / | tail -1 | tr -dc 0-9").await.expect_success();
    let seen_mib: u64 = String::from_utf8_lossy(&ran.stdout).parse().expect("a number");
    assert!(seen_mib * 100 >= disk_mib * 90, "{seen_mib} of {disk_mib} MiB");
    server.stop().await;
}

#[tokio::test]
async fn a_second_start_builds_nothing() {
    let mut server = TestServer::start().await;
    let before = server.json(reqwest::Method::GET, "/v1/templates/base", None).await;
    server.terminate().await;
    server.start_again().await;
    let after = server.json(reqwest::Method::GET, "/v1/templates/base", None).await;
    assert_eq!(before, after);
    server.stop().await;
}
