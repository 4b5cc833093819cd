//! Sandboxes, made and looked at.

use serde_json::Value;

use stockade_engine::fake::{Moment, Step};

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
        (&["tunnel", unknown, "80", "--listen", "127.0.0.1:0", "--json"], "sandbox_not_found", 1),
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
        assert!(error["error"]["hint"].as_str().is_some_and(|hint| hint.starts_with("`stockade ")), "{error}");
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
async fn kill_all_is_not_disturbed_by_sandboxes_that_end_meanwhile() {
    let server = TestServer::start().await;
    let (first, second) = (server.create().await, server.create().await);
    let mut hang = server.host.hang(Step::Kill, Moment::Before);
    let all = tokio::spawn(run(server.stockade(&["kill", "--all"]), b""));
    hang.reached().await;
    server.ok(&["kill", &second]).await;
    hang.release();
    let ran = all.await.expect("ran");
    assert_eq!((ran.code, ran.stdout, ran.stderr.as_str()), (Some(0), format!("{first}\n"), ""));
    let ran = run(server.stockade(&["kill", "--json", &second]), b"").await;
    let error: Value = serde_json::from_str(&ran.stderr).expect("JSON");
    assert_eq!((ran.code, error["error"]["code"].as_str()), (Some(1), Some("sandbox_ended")), "{error}");
}

#[tokio::test]
async fn a_filter_by_an_unknown_template_is_an_error() {
    let server = TestServer::start().await;
    let ran = run(server.stockade(&["ls", "-t", "nope", "--json"]), b"").await;
    assert!(ran.code == Some(1) && ran.stderr.contains("template_not_found"), "{ran:?}");
    assert_eq!(server.ok(&["ls", "-q", "-t", "base"]).await, "");
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
async fn templates_that_cannot_be_removed_are_each_named() {
    let server = TestServer::start().await;
    let ran = run(server.stockade(&["template", "rm", "none", "base"]), b"").await;
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""));
    assert!(ran.stderr.contains("none") && ran.stderr.contains("base"), "{}", ran.stderr);
}

#[tokio::test]
async fn templates_that_were_removed_are_printed_and_gone() {
    let server = TestServer::start().await;
    for name in ["one", "two", "three"] {
        let spec = serde_json::json!({"name": name, "from": "base", "steps": []}).to_string();
        let built = run(server.stockade(&["template", "build", "-"]), spec.as_bytes()).await;
        assert_eq!((built.code, built.stdout), (Some(0), format!("{name}\n")), "{}", built.stderr);
    }
    let ran = run(server.stockade(&["template", "rm", "one", "two"]), b"").await;
    assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.as_str()), (Some(0), "one\ntwo\n", ""));
    let removed: Value = serde_json::from_str(&server.ok(&["template", "rm", "three", "--json"]).await).expect("JSON");
    assert_eq!(removed, serde_json::json!({"deleted": ["three"]}));
    let left: Value = serde_json::from_str(&server.ok(&["template", "ls", "--json"]).await).expect("JSON");
    let names: Vec<_> = left["items"].as_array().into_iter().flatten().map(|item| item["name"].as_str()).collect();
    assert_eq!(names, [Some("base")]);
}

#[tokio::test]
async fn a_console_with_nothing_on_it_says_so_and_not_on_standard_output() {
    let server = TestServer::start().await;
    let id = server.create().await;
    let ran = run(server.stockade(&["logs", &id]), b"").await;
    assert!(ran.code == Some(0) && ran.stdout.starts_with("fake machine ") && ran.stderr.is_empty(), "{ran:?}");
    // It has no machine, and so no console.
    server.ok(&["pause", &id]).await;
    let ran = run(server.stockade(&["logs", &id]), b"").await;
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), ""));
    assert!(ran.stderr.starts_with("the console has nothing on it; ") && ran.stderr.lines().count() == 1, "{ran:?}");
    let ran = run(server.stockade(&["logs", &id, "--json"]), b"").await;
    assert_eq!((ran.stdout.as_str(), ran.stderr.as_str()), ("{\"console\":\"\"}\n", ""));
}

#[tokio::test]
async fn what_is_paused_for_good_is_refused_with_the_way_back() {
    let server = TestServer::start().await;
    let id = server.ok(&["create", "--auto-resume", "false"]).await.trim().to_owned();
    for (down, up) in [(&["pause", &id][..], "resume"), (&["stop", &id], "start")] {
        server.ok(down).await;
        let ran = run(server.stockade(&["exec", &id, "--", "true"]), b"").await;
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(125), ""), "{}", ran.stderr);
        assert!(ran.stderr.contains(&format!("hint: `stockade {up} {id}`")), "{}", ran.stderr);
        let ran = run(server.stockade(&["snapshot", &id, "--json"]), b"").await;
        let error: Value = serde_json::from_str(&ran.stderr).expect("JSON");
        let error = &error["error"];
        let state = if up == "start" { "stopped" } else { "paused" };
        assert_eq!((error["sandbox"].as_str(), error["state"].as_str()), (Some(&*id), Some(state)), "{error}");
        server.ok(&[up, &id]).await;
    }
}

#[tokio::test]
async fn a_spec_that_is_no_object_is_refused() {
    let server = TestServer::start().await;
    for spec in ["[1]", "\"a\"", "7", "null", "{"] {
        for force in [&[][..], &["--force"]] {
            let ran =
                run(server.stockade(&[&["template", "build", "-", "--json"], force].concat()), spec.as_bytes()).await;
            assert_eq!(ran.code, Some(1), "{spec}: {}", ran.stderr);
            let error: Value = serde_json::from_str(&ran.stderr).expect("JSON");
            assert_eq!(error["error"]["code"], "invalid_spec", "{error}");
        }
    }
}

#[tokio::test]
async fn a_sandbox_is_paused_resumed_forked_and_started_from_its_snapshot() {
    let server = TestServer::start().await;
    let id = server.create().await;
    let ways = [
        (&["--standby"][..], "paused", "paused (standby)"),
        (&[], "paused", "paused (hibernated)"),
        (&["--archive"], "paused", "paused (archived)"),
        (&["--disk-only"], "stopped", "stopped"),
    ];
    for (arguments, state, told) in ways {
        let pause = [&["pause", &id], arguments].concat();
        assert_eq!(server.ok(&pause).await.trim(), state);
        assert_eq!(server.ok(&["ls", "-q", "--state", state]).await, format!("{id}\n"));
        assert!(server.ok(&["info", &id]).await.contains(&format!("state     {told}\n")), "{told}");
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

#[tokio::test]
async fn snapshots_are_labelled_listed_shown_rolled_back_to_and_deleted() {
    let server = TestServer::start().await;
    let id = server.create().await;
    server.ok(&["exec", "-n", &id, "--", "sh", "-c", "echo before > file"]).await;
    let take = ["snapshot", &id, "--name", "point", "--label", "a=1", "--expires-after", "3600"];
    let snapshot = server.ok(&take).await.trim().to_owned();
    assert_eq!(server.ok(&["snapshot", "ls", "-q"]).await, format!("{snapshot}\n"));
    assert_eq!(server.ok(&["snapshot", "ls", "-q", "--label", "a=2"]).await, "");
    let table = server.ok(&["snapshot", "ls", &id, "--label", "a=1"]).await;
    assert!(table.starts_with("ID ") && table.contains("point") && table.contains("memory+disk"), "{table}");
    let info: Value = serde_json::from_str(&server.ok(&["snapshot", "info", "point", "--json"]).await).expect("JSON");
    assert_eq!((info["id"].as_str(), &info["labels"]["a"]), (Some(snapshot.as_str()), &"1".into()));
    assert!(server.ok(&["snapshot", "info", &snapshot]).await.contains("label     a=1"));

    server.ok(&["exec", "-n", &id, "--", "sh", "-c", "echo after > file"]).await;
    assert_eq!(server.ok(&["rollback", &id, "point"]).await, format!("{id}\n"));
    assert_eq!(server.ok(&["exec", "-n", &id, "--", "cat", "file"]).await, "before\n");
    let ran = run(server.stockade(&["snapshot", "rm", "snapaaaaaaaaaaaaaaaaaaaa", &snapshot, "--json"]), b"").await;
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("snapshot_not_found") && ran.stdout.contains(&snapshot), "{ran:?}");
    assert_eq!(server.ok(&["snapshot", "ls", "-q"]).await, "");
    let named = server.ok(&["snapshot", &id, "--name", "named"]).await;
    assert_eq!(server.ok(&["snapshot", "rm", "named"]).await, named);
    let ran = run(server.stockade(&["snapshot"]), b"").await;
    assert_eq!(ran.code, Some(2), "{ran:?}");
}

#[tokio::test]
async fn a_sandbox_is_stopped_started_and_its_rules_are_set() {
    let server = TestServer::start().await;
    let create = ["create", "--on-timeout", "pause", "--auto-resume", "--standby-after", "60", "--json"];
    let made: Value = serde_json::from_str(&server.ok(&create).await).expect("JSON");
    assert_eq!((made["on_timeout"].as_str(), &made["auto_resume"]), (Some("pause"), &true.into()));
    assert_eq!(made["idle"]["standby_after_seconds"], 60.0);
    let id = made["id"].as_str().expect("an id");
    assert_eq!(server.ok(&["stop", id]).await, "stopped\n");
    let set = ["set", id, "--hibernate-after", "600", "--busy-percent", "5", "--on-timeout", "stop", "--json"];
    let set: Value = serde_json::from_str(&server.ok(&set).await).expect("JSON");
    assert_eq!((set["state"].as_str(), set["on_timeout"].as_str()), (Some("stopped"), Some("stop")));
    let idle = serde_json::json!({"standby_after_seconds": 60.0, "hibernate_after_seconds": 600.0,
        "archive_after_seconds": null, "delete_after_seconds": null, "busy_percent": 5});
    assert_eq!(set["idle"], idle, "what was not typed stays");
    assert!(server.ok(&["start", id]).await.starts_with("deadline "));
    let never = server.ok(&["set", id, "--standby-after", "never", "--busy-percent", "0", "--json"]).await;
    let never: Value = serde_json::from_str(&never).expect("JSON");
    assert_eq!((&never["idle"]["standby_after_seconds"], &never["idle"]["busy_percent"]), (&Value::Null, &Value::Null));
    for (arguments, exit) in [
        (&["set", id][..], 2),
        (&["set", id, "--standby-after", "soon"], 2),
        (&["set", id, "--standby-after", "700"], 1),
        (&["set", id, "--busy-percent", "101"], 2),
    ] {
        assert_eq!(run(server.stockade(arguments), b"").await.code, Some(exit), "{arguments:?}");
    }
}

#[tokio::test]
async fn a_command_runs_in_every_copy_and_the_best_is_kept() {
    let server = TestServer::start().await;
    let id = server.create().await;
    let line = "echo $STOCKADE_FORK_INDEX > mine; printf 'no end '; echo of $STOCKADE_FORK_INDEX; echo bad >&2; \
                exit $((STOCKADE_FORK_INDEX % 2))";
    let fork = |more: &[&str]| {
        let all = [&["fork", &id, "-n", "4"], more, &["--", "sh", "-c", line]].concat();
        run(server.stockade(&all), b"")
    };
    let ran = fork(&["--rm"]).await;
    assert_eq!(ran.code, Some(1), "two of them failed: {ran:?}");
    for index in 0..4 {
        assert!(ran.stdout.contains(&format!("[{index}] no end of {index}\n")), "{}", ran.stdout);
        assert!(ran.stderr.contains(&format!("[{index}] bad\n")), "{}", ran.stderr);
    }
    assert_eq!(ran.stdout.lines().filter(|line| line.ends_with(" ended")).count(), 4, "{}", ran.stdout);
    assert_eq!(server.ok(&["ls", "-q"]).await, format!("{id}\n"));

    let ran = fork(&["--keep-best", "--score", "cat mine", "--json"]).await;
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let last: Value = serde_json::from_str(ran.stdout.lines().last().expect("a line")).expect("JSON");
    assert_eq!(
        (last["type"].as_str(), &last["kept"]),
        (Some("result"), &2.into()),
        "the highest of those that succeeded"
    );
    assert_eq!(last["items"].as_array().map(Vec::len), Some(4));
    assert_eq!(server.ok(&["exec", "-n", &id, "--", "cat", "mine"]).await, "2\n");
    assert_eq!(fork(&["--keep-best", "--score", "cat mine", "--lowest"]).await.code, Some(0));
    assert_eq!(server.ok(&["exec", "-n", &id, "--", "cat", "mine"]).await, "0\n");
    assert_eq!(server.ok(&["ls", "-q"]).await, format!("{id}\n"));

    // A score that is no number, and a command that is not there: nothing is kept, and it is said why.
    let ran = fork(&["--keep-best", "--score", "echo high"]).await;
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("\"high\", not a number") && ran.stderr.contains("as it was"), "{}", ran.stderr);
    let ran = run(server.stockade(&["fork", &id, "--keep-best", "--", "no-such-command"]), b"").await;
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.stdout.lines().any(|line| line.split_ascii_whitespace().nth(2) == Some("127")), "{ran:?}");
    assert_eq!(server.ok(&["exec", "-n", &id, "--", "cat", "mine"]).await, "0\n");
    assert_eq!(server.ok(&["ls", "-q"]).await, format!("{id}\n"));
    for wrong in [&["--keep-best"][..], &["--rm"], &["--score", "x", "--", "true"], &["-n", "0", "--", "true"]] {
        let ran = run(server.stockade(&[&["fork", &id], wrong].concat()), b"").await;
        assert!(matches!(ran.code, Some(1 | 2)), "{wrong:?} {ran:?}");
    }
}

#[tokio::test]
async fn usage_is_shown_summed_and_exported() {
    let server = TestServer::start().await;
    for team in ["a", "a", "b"] {
        server.ok(&["create", "--metadata", &format!("team={team}")]).await;
    }
    let id = server.create().await;
    server.ok(&["kill", &id]).await;
    let report: Value = serde_json::from_str(&server.ok(&["usage", "--json"]).await).expect("JSON");
    assert_eq!(report["items"].as_array().map(Vec::len), Some(4));
    assert_eq!(report["prices"]["vcpu_second"], 0.000015);
    let table = server.ok(&["usage", &id]).await;
    assert!(table.contains(&id) && table.lines().last().is_some_and(|line| line.starts_with("total")), "{table}");
    let by_label = server.ok(&["usage", "--by-label", "team"]).await;
    assert_eq!(by_label.lines().count(), 5, "{by_label}");
    let csv = server.ok(&["usage", "--csv", "--metadata", "team=a", "--step", "day"]).await;
    assert!(csv.starts_with("sandbox,template,label,metadata,from,to,") && csv.lines().count() >= 3, "{csv}");
    let ran = run(server.stockade(&["usage", "--from", "yesterday", "--json"]), b"").await;
    assert!(ran.code == Some(1) && ran.stderr.contains("invalid_argument"), "{ran:?}");
}

#[tokio::test]
async fn decisions_are_exported_as_json_lines_however_many_there_are() {
    let server = TestServer::start().await;
    let id = server.create().await;
    // More than the server gives at once.
    server.decide(&id, 2_500).await;
    let exported = server.ok(&["audit", &id, "--export"]).await;
    let numbers = exported.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON")["number"].as_u64());
    assert!(numbers.eq((0..2_500).rev().map(Some)), "each once, the newest first");
    assert_eq!(server.ok(&["audit", "--export"]).await, exported);
    assert_eq!(server.ok(&["audit", "--export", "--verdict", "deny"]).await, "");
}

#[tokio::test]
async fn a_network_keeps_what_a_change_does_not_name() {
    let server = TestServer::start().await;
    let id = server.create().await;
    let network = async || {
        let got: Value = serde_json::from_str(&server.ok(&["policy", "get", &id, "--json"]).await).expect("JSON");
        got["network"].clone()
    };
    let file = r#"{"previews": "public", "policy": {"default": "deny"}}"#;
    let set = run(server.stockade(&["policy", "set", &id, "--file", "-"]), file.as_bytes()).await;
    assert_eq!(set.code, Some(0), "{set:?}");
    server.ok(&["policy", "set", &id, "--allow-out", "a.example"]).await;
    let open = serde_json::json!({"internet": true, "allow": ["a.example"], "previews": "public"});
    assert_eq!(network().await, open);
    let set = run(server.stockade(&["policy", "set", &id, "--file", "-"]), b"{}").await;
    assert_eq!((set.code, network().await), (Some(0), serde_json::json!({})), "a file is the whole of it");
}

#[tokio::test]
async fn a_network_is_not_changed_by_saying_nothing_and_a_mistyped_verdict_is_none() {
    let server = TestServer::start().await;
    let id = server.create().await;
    for (arguments, code) in [
        (&["policy", "set", &id, "--json"][..], "invalid_argument"),
        (&["policy", "set-default", "--json"], "invalid_argument"),
        (&["audit", "--verdict", "denied", "--json"], "bad_usage"),
    ] {
        let ran = run(server.stockade(arguments), b"").await;
        let error: Value = serde_json::from_str(&ran.stderr).expect("JSON");
        assert_eq!((ran.code, error["error"]["code"].as_str()), (Some(2), Some(code)), "{arguments:?}");
    }
}
