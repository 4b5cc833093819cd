use reqwest::Method;
use serde_json::json;
use stockade_system_tests::TestServer;

#[tokio::test]
async fn run_passes_output_exit_code_and_input() {
    let server = TestServer::start().await;

    let ended = server.cli(&["run", "--", "python3", "-c", "print(6*7)"], b"").await;
    assert_eq!((ended.code, ended.stdout.as_slice()), (Some(0), b"42\n".as_slice()), "{ended:?}");

    let ended = server.cli(&["run", "--", "sh", "-c", "exit 3"], b"").await;
    assert_eq!((ended.code, ended.stdout.as_slice()), (Some(3), b"".as_slice()), "{ended:?}");

    let input = b"one\ntwo\0\xff\n".repeat(10_000);
    let ended = server.cli(&["run", "--", "cat"], &input).await;
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(ended.stdout.len(), input.len());
    assert!(ended.stdout == input, "the bytes differ");

    // `run` cleans up after itself.
    let listed = server.cli(&["ls", "--quiet"], b"").await;
    assert_eq!((listed.code, listed.stdout.as_slice()), (Some(0), b"".as_slice()), "{listed:?}");
    server.stop().await;
}

#[tokio::test]
async fn files_written_through_the_api_are_what_commands_see_and_back() {
    let server = TestServer::start().await;
    let sandbox = server.create("base").await;
    let content: Vec<u8> = (0..=255).cycle().take(3_000_001).collect();
    sandbox.write("/home/user/deep/er/file.bin", content.clone()).await;
    let ran =
        sandbox.shell("cp deep/er/file.bin copy.bin && stat -c '%s %U %G %a' deep/er/file.bin").await.expect_success();
    assert_eq!(ran.stdout, b"3000001 user user 644\n");
    assert!(sandbox.read("/home/user/copy.bin").await == content, "the bytes differ");

    // A command's own pipes can be opened by their names, by its user too.
    let ran =
        sandbox.shell("id -un; echo out >/dev/stdout; echo err | tee /dev/stderr >/dev/null").await.expect_success();
    assert_eq!((ran.stdout.as_slice(), ran.stderr.as_slice()), (b"user\nout\n".as_slice(), b"err\n".as_slice()));
    server.stop().await;
}

#[tokio::test]
async fn a_full_disk_is_told_by_the_api_and_the_cli_and_nothing_half_written_stays() {
    let server = TestServer::start().await;
    let sandbox = server.create("base").await;
    // Reserved, not written: the host's disk does not fill up.
    let fill = "fallocate -l $(( $(df --output=avail -B1 / | tail -1) - 1000000 )) /fill; \
                dd if=/dev/zero of=/fill.rest bs=4k; test $(df --output=avail / | tail -1) -eq 0";
    sandbox.run(json!({ "shell": fill, "user": "root" })).await.expect_success();

    let content = vec![b'x'; 1_000_000];
    let path = format!("/v1/sandboxes/{}/files?path=/home/user/large", sandbox.id());
    let answer = server.request(Method::PUT, &path).body(content.clone()).send().await.expect("it answers");
    assert_eq!(answer.status(), 507);
    let body: serde_json::Value = answer.json().await.expect("JSON");
    assert_eq!(body["error"]["code"], "no_space", "{body}");

    let scratch = tempfile::tempdir().expect("a temporary directory");
    let local = scratch.path().join("large");
    std::fs::write(&local, content).expect("written");
    let target = format!("{}:/home/user/large", sandbox.id());
    let copied = server.cli(&["--json", "cp", local.to_str().expect("text"), &target], b"").await;
    assert_eq!(copied.code, Some(1), "{copied:?}");
    assert!(copied.stderr.contains("\"no_space\""), "{}", copied.stderr);

    let left = sandbox
        .shell("ls -A /home/user | grep -v '^[.][bps]'; sudo rm /fill.rest; echo goes on > note; cat note")
        .await;
    assert_eq!(left.stdout, b"goes on\n", "{left}");
    server.stop().await;
}

#[tokio::test]
async fn a_guest_may_use_all_the_memory_it_has() {
    let server = TestServer::start().await;
    let sandbox = server.create("base").await;
    // The page cache takes what is free, then a program takes it from the cache.
    let line = "dd if=/dev/zero of=/tmp/large bs=1M count=700 status=none && cat /tmp/large | wc -c && \
                python3 -c 'print(len(bytes(1) * (300 << 20)))'";
    let ran = sandbox.shell(line).await.expect_success();
    assert_eq!(ran.stdout, b"734003200\n314572800\n", "{ran}");
    assert_eq!(sandbox.info().await["state"], "running");
    server.stop().await;
}
