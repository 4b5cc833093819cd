//! What must differ between machines that share a past, and what must be right again after a long time away.

use std::collections::BTreeSet;

use serde_json::json;
use stockade_system_tests::{Sandbox, TestServer};

use crate::{lifecycle::check_clock, lifecycle_forks::fork};

/// Children of one fork; there are two, of a parent and of one of its children.
const CHILDREN: usize = 25;
/// From the kernel's generator, for a program and as an id; and what programs take for this machine's own.
const DRAW: &str = "od -An -tx8 -N16 /dev/urandom; cat /proc/sys/kernel/random/uuid /etc/machine-id /etc/hostname";
const DRAWN: usize = 4;

#[tokio::test]
async fn fifty_children_have_no_number_and_no_id_in_common() {
    let server = TestServer::start().await;
    let parent = server.create("base").await;
    let mut seen = BTreeSet::new();
    draw(&parent, &mut seen).await;
    let mut machines = 1;
    let mut forked_from = parent;
    for _ in 0..2 {
        let mut children = fork(&server, &forked_from, json!({ "count": CHILDREN })).await;
        forked_from.kill().await;
        for child in &children {
            draw(child, &mut seen).await;
        }
        machines += children.len();
        forked_from = children.pop().expect("children");
        for child in children {
            child.kill().await;
        }
    }
    assert_eq!((machines, seen.len()), (1 + 2 * CHILDREN, DRAWN * machines), "{seen:?}");

    // The same machine, twice from the same instant: it does not draw the same again.
    forked_from.verb("snapshots", json!({ "name": "instant" })).await;
    for _ in 0..2 {
        forked_from.verb("rollback", json!({ "snapshot": "instant" })).await;
        let drawn = forked_from.says("od -An -tx8 -N16 /dev/urandom; cat /proc/sys/kernel/random/uuid").await;
        for number in drawn.lines() {
            assert!(seen.insert(number.to_owned()), "{number} was drawn before");
        }
    }
    server.stop().await;
}

/// Draws in a machine; what it draws nobody has drawn before.
async fn draw(machine: &Sandbox<'_>, seen: &mut BTreeSet<String>) {
    let drawn = machine.says(DRAW).await;
    assert_eq!(drawn.lines().count(), DRAWN, "{drawn:?}");
    for number in drawn.lines() {
        assert!(seen.insert(number.to_owned()), "{number} in {} was drawn before", machine.id());
    }
}

/// A guest does not notice how long it was away: its clock stands at the moment it was halted. So an hour away is a
/// clock that is an hour behind when it goes on, and that is what these guests are given before they are halted.
#[tokio::test]
async fn a_clock_is_right_after_an_hour_away() {
    let server = TestServer::start().await;
    let sandbox = server.create("base").await;
    let lose_an_hour = async || {
        let set = json!({ "shell": "date --set '1 hour ago' && date +%s", "user": "root" });
        let ran = sandbox.run(set).await.expect_success();
        assert!(!ran.stdout.is_empty());
    };
    // What waits by the clock of the uptime is not hurried by it.
    sandbox.says("setsid sh -c 'sleep 3000; touch woken' >/dev/null 2>&1 </dev/null &").await;
    for tier in ["standby", "hibernated", "archived"] {
        lose_an_hour().await;
        sandbox.verb("pause", json!({ "tier": tier })).await;
        sandbox.verb("resume", json!({})).await;
        check_clock(&sandbox).await;
    }
    lose_an_hour().await;
    let child = fork(&server, &sandbox, json!({})).await.remove(0);
    check_clock(&child).await;
    let taken = sandbox.verb("snapshots", json!({})).await;
    sandbox.verb("rollback", json!({ "snapshot": taken["id"] })).await;
    check_clock(&sandbox).await;
    assert_eq!(sandbox.says("ls woken 2>/dev/null | wc -l; pgrep -fc '[s]leep 3000'").await, "0\n2");
    server.stop().await;
}
