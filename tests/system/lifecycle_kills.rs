//! The server dies without a warning in the middle of each verb that moves a sandbox's state. Afterwards the
//! sandbox is as it was before or as it should have become, with all it had acknowledged, and nothing else is
//! left.

use std::time::Duration;

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use stockade_system_tests::{Sandbox, TestServer};

const ROUNDS_PER_VERB: u32 = 2;
/// About as long as the longest of them takes on an emulated machine.
const LONGEST_MS: u64 = 900;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Verb {
    Standby,
    Hibernate,
    Resume,
    Stop,
    Start,
    Snapshot,
    Fork,
    Rollback,
    Promote,
    DeleteSnapshot,
}

const VERBS: [Verb; 10] = [
    Verb::Standby,
    Verb::Hibernate,
    Verb::Resume,
    Verb::Stop,
    Verb::Start,
    Verb::Snapshot,
    Verb::Fork,
    Verb::Rollback,
    Verb::Promote,
    Verb::DeleteSnapshot,
];

/// What a sandbox holds: on its disk and in its memory.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Held {
    disk: String,
    memory: String,
}

#[tokio::test]
async fn killed_in_the_middle_of_every_verb_the_server_loses_nothing() {
    let seed = stockade_system_tests::seed();
    let mut random = seed | 1;
    let mut server = TestServer::start().await;
    let id = server.create("base").await.id().to_owned();
    let mut unanswered = 0;
    for round in 0..ROUNDS_PER_VERB {
        for verb in VERBS {
            // Xorshift: repeatable from the printed seed.
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let moment = Duration::from_millis(random % LONGEST_MS);
            unanswered += u32::from(!play(&mut server, &id, verb, round, moment).await);
        }
    }
    println!("{unanswered} of {} verbs had no answer", ROUNDS_PER_VERB * 10);
    Sandbox::new(&server, &id).kill().await;
    server.stop().await;
}

/// Prepares, begins the verb, kills the server, and looks at what the next one makes of it. Whether the verb was
/// answered before.
async fn play(server: &mut TestServer, id: &str, verb: Verb, round: u32, moment: Duration) -> bool {
    let told = format!("{verb:?} in round {round}, killed after {moment:?}");
    println!("{told}");
    let marked = mark(&Sandbox::new(server, id), &format!("{round}-{verb:?}")).await;
    let (path, body, [before, after]) = prepare(server, id, verb, marked).await;
    let method = if verb == Verb::DeleteSnapshot { Method::DELETE } else { Method::POST };
    let answer = {
        let request = server.try_json(method, &path, body);
        let end = async {
            // The random moment is the point of the test.
            tokio::time::sleep(moment).await;
            server.send_kill();
        };
        tokio::join!(request, end).0.ok()
    };
    if let Some((status, answer)) = &answer {
        assert!(status.is_success(), "{told}: {status} {answer}");
    }
    server.note_cgroups();
    server.reap().await;
    server.start_again().await;

    let sandbox = Sandbox::new(server, id);
    let (state, info) = settled(&sandbox, &told).await;
    if answer.is_some() {
        let expected = match verb {
            Verb::Standby | Verb::Hibernate => "paused",
            Verb::Stop => "stopped",
            _ => "running",
        };
        assert_eq!(state, expected, "{told}: {info}");
    }
    if state != "running" {
        sandbox.verb("resume", json!({"lifetime_seconds": 3600})).await;
    }
    let now = held(&sandbox).await;
    if answer.is_some() {
        assert_eq!(now, after, "{told}");
    } else {
        assert!([&before, &after].contains(&&now), "{told}: {now:?} is neither {before:?} nor {after:?}");
    }
    assert_eq!(sandbox.says("hostname").await, id, "{told}");
    clear_up(server, id, &told).await;
    answer.is_some()
}

/// What a sandbox is once the new server has ended what the old one had begun.
async fn settled(sandbox: &Sandbox<'_>, told: &str) -> (String, Value) {
    const PATIENCE: Duration = Duration::from_secs(60);
    let begin = std::time::Instant::now();
    loop {
        let info = sandbox.info().await;
        let state = info["state"].as_str().expect("a state").to_owned();
        match state.as_str() {
            "running" | "paused" | "stopped" => return (state, info),
            "pausing" | "resuming" if begin.elapsed() < PATIENCE => tokio::time::sleep(Duration::from_millis(50)).await,
            _ => panic!("{told}: {info}"),
        }
    }
}

/// Adds a mark to the disk and to the memory.
async fn mark(sandbox: &Sandbox<'_>, mark: &str) -> Held {
    sandbox.says(&format!("echo {mark} >> log; echo {mark} >> /dev/shm/log")).await;
    held(sandbox).await
}

async fn held(sandbox: &Sandbox<'_>) -> Held {
    Held { disk: sandbox.says("cat log").await, memory: sandbox.says("cat /dev/shm/log 2>/dev/null || true").await }
}

/// The request, and what the sandbox holds if it is not carried out and if it is.
async fn prepare(server: &TestServer, id: &str, verb: Verb, marked: Held) -> (String, Option<Value>, [Held; 2]) {
    let sandbox = Sandbox::new(server, id);
    let path = |verb: &str| format!("/v1/sandboxes/{id}/{verb}");
    let rebooted = Held { memory: String::new(), ..marked.clone() };
    let same = [marked.clone(), marked.clone()];
    match verb {
        Verb::Standby => (path("pause"), Some(json!({"tier": "standby"})), same),
        Verb::Hibernate => (path("pause"), Some(json!({})), same),
        Verb::Resume => {
            sandbox.verb("pause", json!({})).await;
            (path("resume"), Some(json!({"lifetime_seconds": 3600})), same)
        }
        Verb::Stop => (path("stop"), Some(json!({})), [marked, rebooted]),
        Verb::Start => {
            sandbox.verb("stop", json!({})).await;
            (path("start"), Some(json!({})), [rebooted.clone(), rebooted])
        }
        Verb::Snapshot => (path("snapshots"), Some(json!({"name": "killed"})), same),
        Verb::Fork => (path("fork"), Some(json!({"count": 2})), same),
        Verb::Rollback => {
            sandbox.verb("snapshots", json!({"name": "back"})).await;
            let later = mark(&sandbox, "later").await;
            (path("rollback"), Some(json!({"snapshot": "back"})), [later, marked])
        }
        Verb::Promote => {
            let forked = sandbox.verb("fork", json!({})).await;
            let child = Sandbox::new(server, forked["items"][0]["sandbox"]["id"].as_str().expect("an id"));
            let of_child = mark(&child, "of-the-child").await;
            (format!("/v1/sandboxes/{}/promote", child.id()), Some(json!({})), [marked, of_child])
        }
        Verb::DeleteSnapshot => {
            let taken = sandbox.verb("snapshots", json!({"name": "deleted"})).await;
            (format!("/v1/snapshots/{}", taken["id"].as_str().expect("an id")), None, same)
        }
    }
}

/// Every snapshot there is can be started from; then they and all other sandboxes go.
async fn clear_up(server: &TestServer, id: &str, told: &str) {
    let page = server.json(Method::GET, "/v1/snapshots", None).await;
    for snapshot in page["items"].as_array().expect("a list") {
        let snapshot = snapshot["id"].as_str().expect("an id");
        let child = server.create(snapshot).await;
        assert!(!child.says("cat log").await.is_empty(), "{told}");
        server.json(Method::DELETE, &format!("/v1/snapshots/{snapshot}"), None).await;
    }
    let page = server.json(Method::GET, "/v1/sandboxes", None).await;
    for other in page["items"].as_array().expect("a list").iter().filter(|other| other["id"] != id) {
        let path = format!("/v1/sandboxes/{}", other["id"].as_str().expect("an id"));
        let (status, answer) = server.try_json(Method::DELETE, &path, None).await.expect("it answers");
        assert!(status.is_success() || status == StatusCode::NOT_FOUND, "{told}: {answer}");
    }
    let kept = server.data_dir();
    for kind in ["paused", "snapshots"] {
        let left = std::fs::read_dir(kept.join(kind)).expect("a directory").count();
        assert_eq!(left, 0, "{told}: {kind} holds {left} directories that nobody needs");
    }
}
