//! Sandboxes, made and looked at.

use serde_json::Value;

use crate::support::{TestServer, run};

#[tokio::test]
async fn a_sandbox_is_created_listed_shown_extended_and_killed() {
    let server = TestServer::start().await;
    let id = server.ok(&["create", "--metadata", "who=me", "--lifetime", "60"]).await.trim().to_owned();
    assert!(id.starts_with("sbx") && id.len() == 23, "{id}");
    assert_eq!(server.ok(&["ls", "-q"]).await, format!("{id}\n"));
    assert_eq!(server.ok(&["ls", "-q", "--metadata", "who=you"]).await, "");
    let table = server.ok(&["ls"]).await;
    assert!(table.starts_with("ID ") && table.contains("running") && table.contains("who=me"), "{table}");
    let before: Value = serde_json::from_str(&server.ok(&["info", &id, "--json"]).await).expect("JSON");
    assert_eq!((before["id"].as_str(), before["state"].as_str()), (Some(id.as_str()), Some("running")));
    server.ok(&["extend", &id, "600"]).await;
    let after: Value = serde_json::from_str(&server.ok(&["info", &id, "--json"]).await).expect("JSON");
    assert!(after["deadline"].as_str() > before["deadline"].as_str());
    assert_eq!(server.ok(&["kill", &id]).await, format!("{id}\n"));
    assert_eq!(server.ok(&["ls", "-q"]).await, "");
    let gone = server.ok(&["info", &id]).await;
    assert!(gone.contains("state     gone") && gone.contains("cause     killed"), "{gone}");
    assert_eq!(server.ok(&["ls", "-q", "--all"]).await, format!("{id}\n"));
}

#[tokio::test]
async fn what_is_unknown_is_named_with_a_stable_code() {
    let server = TestServer::start().await;
    let unknown = "sbxaaaaaaaaaaaaaaaaaaaa";
    for (arguments, code, exit) in [
        (&["info", unknown, "--json"][..], "sandbox_not_found", 1),
        (&["kill", unknown, "--json"], "sandbox_not_found", 1),
        (&["logs", unknown, "--json"], "sandbox_not_found", 1),
        (&["exec", unknown, "--json", "--", "true"], "sandbox_not_found", 125),
        (&["shell", unknown, "--json"], "sandbox_not_found", 125),
        (&["cp", "--json", "/etc/hostname", "sbxaaaaaaaaaaaaaaaaaaaa:/tmp/x"], "sandbox_not_found", 1),
        (&["create", "--template", "nope", "--json"], "template_not_found", 1),
        (&["run", "--template", "nope", "--json", "--", "true"], "template_not_found", 125),
        (&["template", "info", "nope", "--json"], "template_not_found", 1),
    ] {
        let ran = run(server.stockade(arguments), b"").await;
        let error: Value = serde_json::from_str(ran.stderr.trim()).expect("JSON");
        assert_eq!((error["error"]["code"].as_str(), ran.code), (Some(code), Some(exit)), "{arguments:?} {error}");
    }
}

#[tokio::test]
async fn one_unknown_sandbox_does_not_keep_the_others_from_being_killed() {
    let server = TestServer::start().await;
    let (first, second) = (server.create().await, server.create().await);
    let ran = run(server.stockade(&["kill", &first, "sbxaaaaaaaaaaaaaaaaaaaa", &second]), b"").await;
    assert_eq!((ran.code, ran.stdout), (Some(1), format!("{first}\n{second}\n")));
    assert_eq!(server.ok(&["ls", "-q"]).await, "");
}

#[tokio::test]
async fn templates_and_versions_are_told() {
    let server = TestServer::start().await;
    let templates = server.ok(&["template", "ls"]).await;
    assert!(templates.contains("base") && templates.contains("64 MiB"), "{templates}");
    let template: Value =
        serde_json::from_str(&server.ok(&["template", "info", "base", "--json"]).await).expect("JSON");
    assert_eq!(template["name"], "base");
    let version: Value = serde_json::from_str(&server.ok(&["version", "--json"]).await).expect("JSON");
    assert_eq!(version["server"]["engine"]["name"], "fake");
}

#[tokio::test]
async fn a_sandbox_is_paused_resumed_forked_and_started_from_its_snapshot() {
    let server = TestServer::start().await;
    let id = server.create().await;
    for (arguments, state) in [(&["--standby"][..], "paused"), (&[], "paused"), (&["--disk-only"], "stopped")] {
        let pause = [&["pause", &id], arguments].concat();
        assert_eq!(server.ok(&pause).await.trim(), state);
        assert_eq!(server.ok(&["ls", "-q", "--state", state]).await, format!("{id}\n"));
        assert!(server.ok(&["resume", &id, "--lifetime", "60"]).await.starts_with("deadline "));
        assert_eq!(server.ok(&["ls", "-q", "--state", "running"]).await, format!("{id}\n"));
    }
    let snapshot = server.ok(&["snapshot", &id, "--name", "mine"]).await.trim().to_owned();
    for name in [snapshot.as_str(), "mine"] {
        let made: Value =
            serde_json::from_str(&server.ok(&["create", "--template", name, "--json"]).await).expect("JSON");
        assert_eq!(made["snapshot"], snapshot.as_str());
    }
    let children = server.ok(&["fork", &id, "--count", "2"]).await;
    assert_eq!(children.lines().filter(|child| child.starts_with("sbx") && *child != id).count(), 2, "{children}");
    assert_eq!(server.ok(&["ls", "-q"]).await.lines().count(), 5);
}
