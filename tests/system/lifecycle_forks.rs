//! Children of a live sandbox: who they are, what they share, and what of them is kept.

use std::collections::BTreeSet;

use reqwest::Method;
use serde_json::{Value, json};
use stockade_system_tests::{Sandbox, TestServer};

use crate::lifecycle::{check_clock, check_counter, start_counter};

/// Generations of forks.
const DEPTH: usize = 6;

pub(crate) async fn fork<'a>(server: &'a TestServer, parent: &Sandbox<'_>, body: Value) -> Vec<Sandbox<'a>> {
    let forked = parent.verb("fork", body).await;
    let items = forked["items"].as_array().expect("a list");
    items
        .iter()
        .map(|item| {
            assert_eq!(item["error"], Value::Null, "{item}");
            Sandbox::new(server, item["sandbox"]["id"].as_str().expect("an id"))
        })
        .collect()
}

#[tokio::test]
async fn children_are_their_own_and_their_children_too() {
    let server = TestServer::start().await;
    let parent = server.create("base").await;
    start_counter(&parent).await;
    parent.says("echo generation 0 > log").await;

    let children = fork(&server, &parent, json!({"count": 3, "metadata": {"of": "three"}})).await;
    let mut numbers = BTreeSet::new();
    for (index, child) in children.iter().enumerate() {
        check_counter(child, 0).await;
        check_clock(child).await;
        assert_eq!(child.says("hostname; echo $STOCKADE_FORK_INDEX").await, format!("{}\n{index}", child.id()));
        assert_eq!(child.info().await["metadata"], json!({"of": "three"}));
        // From the kernel, and from a program that starts now.
        numbers.insert(child.says("od -An -tx8 -N16 /dev/urandom").await);
        numbers.insert(child.says("cat /proc/sys/kernel/random/uuid").await);
        numbers.insert(child.says("python3 -c 'import uuid; print(uuid.uuid4())'").await);
        child.says(&format!("echo {index} > own")).await;
    }
    assert_eq!(numbers.len(), 9, "{numbers:?}");
    for (index, child) in children.iter().enumerate() {
        assert_eq!(child.says("cat own log").await, format!("{index}\ngeneration 0"));
    }
    assert_eq!(parent.says("ls own 2>/dev/null | wc -l").await, "0");
    check_counter(&parent, 0).await;
    for child in children {
        child.kill().await;
    }

    let mut line = vec![parent];
    let mut log = "generation 0".to_owned();
    for generation in 1..=DEPTH {
        let child = fork(&server, &line[generation - 1], json!({})).await.remove(0);
        child
            .says(&format!("echo generation {generation} >> log; head -c 1M /dev/urandom > random-{generation}"))
            .await;
        log = format!("{log}\ngeneration {generation}");
        assert_eq!(child.says("cat log").await, log);
        check_counter(&child, 0).await;
        assert_eq!(child.says("hostname").await, child.id());
        line.push(child);
    }
    // Every ancestor is as it was when it was forked; the last descendant outlives them all.
    let last = line.pop().expect("the last one");
    let sums = last.says("cat random-* | sha256sum").await;
    for (generation, ancestor) in line.into_iter().enumerate() {
        assert_eq!(ancestor.says("wc -l < log").await, (generation + 1).to_string());
        ancestor.kill().await;
    }
    last.verb("pause", json!({})).await;
    last.verb("resume", json!({})).await;
    assert_eq!(last.says("cat random-* | sha256sum").await, sums);
    check_counter(&last, 0).await;
    server.stop().await;
}

#[tokio::test]
async fn the_best_of_several_copies_takes_the_place_of_the_sandbox() {
    let server = TestServer::start().await;
    let sandbox = server.create("base").await;
    // Loaded once; what it holds in memory every copy has.
    start_counter(&sandbox).await;
    sandbox.says("seq 1 1000 > data").await;

    let try_one = "echo try $STOCKADE_FORK_INDEX; echo err >&2; \
                   [ $STOCKADE_FORK_INDEX != 2 ] && awk -v m=$STOCKADE_FORK_INDEX 'NR % 5 == m' data | wc -l > result; \
                   [ $STOCKADE_FORK_INDEX != 2 ] && echo $STOCKADE_FORK_INDEX > who";
    let arguments = ["fork", sandbox.id(), "-n", "4", "--keep-best", "--score", "cat who", "--", "sh", "-c", try_one];
    let ended = server.cli(&arguments, b"").await;
    let told = String::from_utf8_lossy(&ended.stdout).into_owned();
    assert_eq!(ended.code, Some(0), "{told}{}", ended.stderr);
    for index in 0..4 {
        assert!(told.contains(&format!("[{index}] try {index}\n")), "{told}");
        assert!(ended.stderr.contains(&format!("[{index}] err\n")), "{}", ended.stderr);
    }
    let row = |index: &str| {
        let line = told.lines().find(|line| line.starts_with(&format!("{index} "))).expect("a row");
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        (words[2].to_owned(), words[4].to_owned(), words[5].to_owned())
    };
    let cells = |exit: &str, score: &str, state: &str| (exit.to_owned(), score.to_owned(), state.to_owned());
    assert_eq!(row("0"), cells("0", "0", "ended"), "{told}");
    assert_eq!(row("2"), cells("1", "-", "ended"), "{told}");
    assert_eq!(row("3"), cells("0", "3", "kept"), "{told}");
    assert_eq!(server.cli_ok(&["ls", "-q"]).await, format!("{}\n", sandbox.id()), "the others have ended");
    assert_eq!(
        sandbox.says("cat who result; hostname; echo $STOCKADE_FORK_INDEX").await,
        format!("3\n200\n{}", sandbox.id())
    );
    check_counter(&sandbox, 0).await;
    check_clock(&sandbox).await;

    // Nothing worth keeping: it stays as it was.
    let ended =
        server.cli(&["fork", sandbox.id(), "-n", "2", "--keep-best", "--", "sh", "-c", "rm who; exit 3"], b"").await;
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("as it was"), "{}", ended.stderr);
    assert_eq!(server.cli_ok(&["ls", "-q"]).await, format!("{}\n", sandbox.id()));
    assert_eq!(sandbox.says("cat who").await, "3");

    // By hand, from a paused parent.
    let children = fork(&server, &sandbox, json!({"count": 2})).await;
    children[1].says("echo promoted > who").await;
    sandbox.verb("pause", json!({})).await;
    assert_eq!(server.cli_ok(&["promote", children[1].id()]).await, format!("{}\n", sandbox.id()));
    assert_eq!(sandbox.says("cat who; hostname").await, format!("promoted\n{}", sandbox.id()));
    let ending = children[1].info().await["ending"]["cause"].clone();
    assert_eq!(ending, json!({"kind": "promoted", "into": sandbox.id()}));

    // What it all used is known, and adds up.
    let usage = server.json(Method::GET, &format!("/v1/usage?sandbox={}", sandbox.id()), None).await;
    let used = &usage["items"][0];
    assert!(used["vcpu_seconds"].as_f64() > Some(0.0) && used["memory_gib_seconds"].as_f64() > Some(0.0), "{usage}");
    server.stop().await;
}
