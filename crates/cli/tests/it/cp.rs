//! Files and trees, there and back again.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

use crate::support::{TestServer, end_by, run};

#[tokio::test]
async fn files_of_any_name_come_back_as_they_were() {
    let server = TestServer::start().await;
    let id = server.create().await;
    let place = server.directory.path();
    let remote_dir = place.join("guest").display().to_string();
    let here = place.join("here").display().to_string();
    let back = place.join("back").display().to_string();
    fs::write(&here, "content").expect("a file");
    fs::set_permissions(&here, fs::Permissions::from_mode(0o750)).expect("a mode");
    for name in ["plain", "あ 🤣.txt", "a#b?c%20d&e=f+g", "it's \"quoted\"", "back\\slash", "-rf", "new\nline", "a:b"]
    {
        let remote = format!("{id}:{remote_dir}/{name}");
        server.ok(&["cp", &here, &remote]).await;
        assert_eq!(fs::read(Path::new(&remote_dir).join(name)).expect("in the guest"), b"content", "{name}");
        server.ok(&["cp", &remote, &back]).await;
        assert_eq!(fs::read(&back).expect("back"), b"content", "{name}");
        assert_eq!(fs::metadata(&back).expect("back").permissions().mode() & 0o777, 0o750, "{name}");
        assert_eq!(server.ok(&["cp", &remote, "-"]).await, "content", "{name}");
    }
}

#[tokio::test]
async fn a_tree_goes_there_and_back_with_links_modes_and_empty_directories() {
    let server = TestServer::start().await;
    let id = server.create().await;
    let place = server.directory.path();
    let path = |name: &str| place.join(name).display().to_string();
    fs::create_dir_all(place.join("tree/real/empty")).expect("directories");
    fs::write(place.join("tree/real/tool.sh"), "#!/bin/sh\n").expect("a file");
    fs::set_permissions(place.join("tree/real/tool.sh"), fs::Permissions::from_mode(0o755)).expect("a mode");
    for (target, name) in [("nowhere", "dangling"), ("/etc/hostname", "absolute"), ("loop", "loop"), ("real", "to_dir")]
    {
        std::os::unix::fs::symlink(target, place.join("tree").join(name)).expect("a link");
    }
    let remote = format!("{id}:{}", path("guest"));
    server.ok(&["cp", &path("tree"), &remote]).await;
    server.ok(&["cp", &remote, &path("back")]).await;
    let list = |root: &str| {
        let arguments = format!("cd '{root}' && find . -printf '%P %y %m %l\\n' | sort");
        std::process::Command::new("sh").args(["-c", &arguments]).output().expect("listed").stdout
    };
    assert_eq!(list(&path("guest")), list(&path("tree")));
    assert_eq!(list(&path("back")), list(&path("tree")));
    // An existing directory takes the copy into it; `/.` means what is in it.
    server.ok(&["cp", &path("tree"), &remote]).await;
    assert!(place.join("guest/tree/real/tool.sh").is_file());
    fs::create_dir(place.join("into")).expect("a directory");
    server.ok(&["cp", &format!("{remote}/."), &path("into")]).await;
    assert!(place.join("into/real/tool.sh").is_file());
}

#[tokio::test]
async fn what_cannot_be_copied_is_named_and_nothing_is_left_half_made() {
    let server = TestServer::start().await;
    let id = server.create().await;
    let place = server.directory.path();
    let target = place.join("target").display().to_string();
    let ran = run(server.stockade(&["cp", &format!("{id}:/no/such/file"), &target]), b"").await;
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("/no/such/file") && !Path::new(&target).exists(), "{}", ran.stderr);
    let ran = run(server.stockade(&["cp", "/no/such/file", &format!("{id}:/tmp/x")]), b"").await;
    assert_eq!(ran.stderr, "error: cannot read /no/such/file: No such file or directory (os error 2)\n");
    for (from, to) in [("/a", "/b"), ("-", "-"), (&format!("{id}:/a")[..], &format!("{id}:/b")[..])] {
        let ran = run(server.stockade(&["cp", from, to]), b"").await;
        assert_eq!(ran.code, Some(2), "{from} {to}");
        assert!(ran.stderr.contains("\n\nhint: "), "{}", ran.stderr);
    }
}

#[tokio::test]
async fn a_copy_of_one_file_ends_when_it_is_told_to() {
    let server = TestServer::start().await;
    let id = server.create().await;
    let place = server.directory.path();
    let (pipe, target) = (place.join("pipe"), place.join("target"));
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    let remote = format!("{id}:{}", target.display());
    for (signal, code) in [(libc::SIGINT, 130), (libc::SIGTERM, 143)] {
        let child = server.stockade(&["cp", &pipe.display().to_string(), &remote]).spawn().expect("started");
        // Opens once the copy has opened its side; what it waits for never comes.
        let writer = tokio::fs::OpenOptions::new().write(true).open(&pipe).await.expect("opened");
        assert_eq!(end_by(child, signal).await, Some(code));
        drop(writer);
        assert!(!target.exists());
    }
}

#[tokio::test]
async fn a_file_that_says_it_is_empty_is_read_to_its_end() {
    let server = TestServer::start().await;
    let id = server.create().await;
    let target = server.directory.path().join("version").display().to_string();
    server.ok(&["cp", "/proc/version", &format!("{id}:{target}")]).await;
    assert_eq!(fs::read(&target).expect("there"), fs::read("/proc/version").expect("read"));
}
