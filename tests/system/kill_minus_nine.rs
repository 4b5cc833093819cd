//! The server dies without a warning at random moments, under load. Nothing acknowledged may be lost,
//! nothing unacknowledged may stay.

use std::{collections::BTreeMap, sync::Mutex, time::Duration};

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use stockade_system_tests::{Sandbox, TestServer};

const ROUNDS: u64 = 50;
const WORKERS: u64 = 3;
/// Sandboxes a worker keeps at most.
const KEPT: usize = 2;
const LONGEST_ROUND_MS: u64 = 1500;

/// What is known of a sandbox from answers that were read to their end.
#[derive(Clone, Debug, Eq, PartialEq)]
enum Known {
    Alive,
    /// Alive, and a command wrote its id into a file.
    Marked,
    /// Its end was asked for; no answer came.
    Ending,
    Ended,
}

#[derive(Default)]
struct Ledger {
    sandboxes: BTreeMap<String, Known>,
    /// Creates without an answer: idempotency keys.
    unanswered: Vec<String>,
}

#[tokio::test]
async fn killed_fifty_times_the_server_loses_nothing_and_leaves_nothing() {
    let seed = stockade_system_tests::seed();
    let mut random = Random(seed | 1);

    let mut server = TestServer::start_with(&["--pool", "1"]).await;
    let ledger = Mutex::new(Ledger::default());
    for round in 0..ROUNDS {
        let moment = Duration::from_millis(random.below(LONGEST_ROUND_MS));
        let seeds: [u64; WORKERS as usize] = std::array::from_fn(|_| random.below(u64::MAX) | 1);
        let load = async {
            let [one, two, three] = seeds;
            tokio::join!(
                work(&server, &ledger, round, 0, Random(one)),
                work(&server, &ledger, round, 1, Random(two)),
                work(&server, &ledger, round, 2, Random(three)),
            );
        };
        let end = async {
            // The random moment is the point of the test.
            tokio::time::sleep(moment).await;
            server.send_kill();
        };
        tokio::join!(load, end);
        server.reap().await;
        server.start_again().await;
        server.note_cgroups();
        verify(&server, &ledger, round).await;
    }
    let sandboxes = ledger.into_inner().expect("nobody panicked").sandboxes;
    println!("{} sandboxes were acknowledged", sandboxes.len());
    assert!(!sandboxes.is_empty(), "the load made no sandbox at all");
    server.stop().await;
}

/// Creates, uses and ends sandboxes until the server is gone.
async fn work(server: &TestServer, ledger: &Mutex<Ledger>, round: u64, worker: u64, mut random: Random) {
    let mut mine: Vec<String> = Vec::new();
    for n in 0.. {
        let key = format!("{round}-{worker}-{n}");
        ledger.lock().expect("nobody panicked").unanswered.push(key.clone());
        let Some((status, sandbox)) = create(server, &key).await else { return };
        assert_eq!(status, StatusCode::CREATED, "{sandbox}");
        let id = sandbox["id"].as_str().expect("an id").to_owned();
        {
            let mut ledger = ledger.lock().expect("nobody panicked");
            ledger.unanswered.retain(|other| *other != key);
            ledger.sandboxes.insert(id.clone(), Known::Alive);
        }
        mine.push(id.clone());
        let mark = json!({ "shell": format!("echo {id} > id && sync id") });
        match server.try_json(Method::POST, &format!("/v1/sandboxes/{id}/run"), Some(mark)).await {
            Err(_) => return,
            Ok((status, answer)) => {
                assert!(status.is_success() && answer["code"] == 0, "{status} {answer}");
                ledger.lock().expect("nobody panicked").sandboxes.insert(id, Known::Marked);
            }
        }
        while mine.len() > KEPT || (!mine.is_empty() && random.below(3) == 0) {
            let at = usize::try_from(random.below(mine.len() as u64)).expect("an index");
            if end(server, ledger, &mine.swap_remove(at)).await.is_none() {
                return;
            }
        }
    }
}

/// `None`: the server is gone.
async fn create(server: &TestServer, key: &str) -> Option<(StatusCode, Value)> {
    let body = json!({ "template": "base", "lifetime_seconds": 3600, "metadata": { "key": key } });
    let request = server.request(Method::POST, "/v1/sandboxes").header("Idempotency-Key", key).json(&body);
    let answer = request.send().await.ok()?;
    let status = answer.status();
    Some((status, answer.json().await.ok()?))
}

async fn end(server: &TestServer, ledger: &Mutex<Ledger>, id: &str) -> Option<()> {
    ledger.lock().expect("nobody panicked").sandboxes.insert(id.to_owned(), Known::Ending);
    let (status, answer) = server.try_json(Method::DELETE, &format!("/v1/sandboxes/{id}"), None).await.ok()?;
    assert!(status.is_success(), "{status} {answer}");
    ledger.lock().expect("nobody panicked").sandboxes.insert(id.to_owned(), Known::Ended);
    Some(())
}

/// Compares the restarted server with what is known, and clears up for the next round.
async fn verify(server: &TestServer, ledger: &Mutex<Ledger>, round: u64) {
    let known = ledger.lock().expect("nobody panicked").sandboxes.clone();
    for (id, known) in known {
        let sandbox = Sandbox::new(server, &id);
        let info = sandbox.info().await;
        let state = info["state"].as_str().expect("a state");
        let told = format!("round {round}, {known:?}: {info}");
        match known {
            Known::Alive => assert_eq!(state, "running", "{told}"),
            Known::Marked => {
                assert_eq!(state, "running", "{told}");
                assert_eq!(sandbox.read("/home/user/id").await, format!("{id}\n").as_bytes(), "{told}");
            }
            Known::Ending => assert!(["running", "killing", "gone"].contains(&state), "{told}"),
            Known::Ended => assert_eq!(state, "gone", "{told}"),
        }
        assert_eq!(state == "gone", !info["ending"].is_null(), "{told}");
        if matches!(known, Known::Alive | Known::Marked | Known::Ending) && state == "running" {
            // The next round starts afresh; the workers' own lists died with the round.
            end(server, ledger, &id).await.expect("the server stands");
        }
    }
    // A create that got no answer may be repeated and gives one sandbox, whether it had happened or not.
    let unanswered = std::mem::take(&mut ledger.lock().expect("nobody panicked").unanswered);
    for key in unanswered {
        let (status, sandbox) = create(server, &key).await.expect("the server stands");
        assert!(status.is_success(), "{status} {sandbox}");
        let page = server.json(Method::GET, &format!("/v1/sandboxes?metadata=key%3D{key}"), None).await;
        let items = page["items"].as_array().expect("a list");
        assert_eq!(items.len(), 1, "round {round}, {key}: {page}");
        let id = sandbox["id"].as_str().expect("an id");
        assert_eq!(items[0]["id"], *id, "round {round}, {key}: {page}");
        ledger.lock().expect("nobody panicked").sandboxes.insert(id.to_owned(), Known::Alive);
        end(server, ledger, id).await.expect("the server stands");
    }
    // Long ended ones have been seen to stay so; looking at each in every round would take most of the time.
    let mut ledger = ledger.lock().expect("nobody panicked");
    while ledger.sandboxes.len() > 20 {
        ledger.sandboxes.pop_first();
    }
}

/// Xorshift: repeatable from a printed seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}
