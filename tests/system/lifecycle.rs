//! Down and up again on real machines: what a sandbox was doing it goes on doing.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use stockade_system_tests::{Sandbox, TestServer};

const CYCLES: usize = 20;
/// How far a guest's clock may be from the host's after a resume.
const CLOCK_ERROR: Duration = Duration::from_secs(1);

/// Counts over a connection to itself, and looks each time whether its random memory is still what it was.
const COUNTER: &str = r#"
import hashlib, os, socket, time
data = os.urandom(256 << 10)
first = hashlib.sha256(data).hexdigest()
server = socket.create_server(("127.0.0.1", 0))
here = socket.create_connection(server.getsockname())
there, _ = server.accept()
with open("/home/user/count", "w") as out:
    number = 0
    while True:
        here.sendall(b"+")
        number += len(there.recv(1))
        same = hashlib.sha256(data).hexdigest() == first
        print(number, os.getpid(), same, file=out, flush=True)
        time.sleep(0.05)
"#;

/// Starts the counter in a sandbox and waits until it counts.
pub(crate) async fn start_counter(sandbox: &Sandbox<'_>) {
    sandbox.write("/home/user/counter.py", COUNTER).await;
    sandbox.says("setsid python3 counter.py >/dev/null 2>&1 </dev/null &").await;
    sandbox.says("until [ -s count ]; do sleep 0.1; done").await;
}

/// Waits until the counter has counted on, and checks all it wrote: no number is missing or twice, one process
/// wrote them all, and its memory never changed. Returns the last number.
pub(crate) async fn check_counter(sandbox: &Sandbox<'_>, after: u64) -> u64 {
    // The line that is being written is not looked at.
    let wait = format!("until [ \"$(tail -n 2 count | head -n 1 | cut -d' ' -f1)\" -gt {after} ]; do sleep 0.1; done");
    sandbox.says(&wait).await;
    let text = String::from_utf8(sandbox.read("/home/user/count").await).expect("text");
    let whole = text.rsplit_once('\n').expect("lines").0;
    let mut last = 0;
    let mut process = None;
    for line in whole.lines() {
        let mut words = line.split(' ');
        let number: u64 = words.next().and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{line:?}"));
        assert_eq!(number, last + 1, "{line:?} after {last}");
        let pid = words.next().expect("a pid").to_owned();
        assert_eq!(*process.get_or_insert_with(|| pid.clone()), pid, "another process counts");
        assert_eq!(words.next(), Some("True"), "memory changed at {line:?}");
        last = number;
    }
    assert!(last > after, "{last} is not after {after}");
    last
}

/// The guest's clock is the host's.
pub(crate) async fn check_clock(sandbox: &Sandbox<'_>) {
    let host = || SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    let before = host();
    let nanos: u64 = sandbox.says("date +%s%N").await.parse().expect("a number");
    let (guest, after) = (Duration::from_nanos(nanos), host());
    assert!(guest + CLOCK_ERROR >= before && guest <= after + CLOCK_ERROR, "{guest:?} not in {before:?} to {after:?}");
}

async fn boot_id(sandbox: &Sandbox<'_>) -> String {
    sandbox.says("cat /proc/sys/kernel/random/boot_id").await
}

/// The names it goes by, to others and to its own programs.
async fn names(sandbox: &Sandbox<'_>) -> String {
    sandbox.says("hostname; cat /etc/machine-id /etc/hosts; hostname --all-ip-addresses").await
}

#[tokio::test]
async fn a_counting_process_and_files_survive_twenty_pauses_and_the_death_of_the_server() {
    let mut server = TestServer::start().await;
    let id = {
        let sandbox = server.create("base").await;
        start_counter(&sandbox).await;
        let (boot, named) = (boot_id(&sandbox).await, names(&sandbox).await);
        let mut count = 0;
        for cycle in 0..CYCLES {
            let content = format!("cycle {cycle}\n").repeat(1000);
            sandbox.write(&format!("/home/user/files/{cycle}"), content.clone()).await;
            match cycle % 4 {
                0 => assert_eq!(server.cli_ok(&["pause", sandbox.id()]).await, "paused\n"),
                1 => assert_eq!(server.cli_ok(&["pause", "--standby", sandbox.id()]).await, "paused\n"),
                2 => assert_eq!(server.cli_ok(&["pause", "--archive", sandbox.id()]).await, "paused\n"),
                // Through standby into hibernation.
                _ => {
                    sandbox.verb("pause", json!({"tier": "standby"})).await;
                    let paused = sandbox.verb("pause", json!({"tier": "hibernated"})).await;
                    assert_eq!((&paused["state"], &paused["tier"]), (&json!("paused"), &json!("hibernated")));
                }
            }
            sandbox.verb("resume", json!({})).await;
            check_clock(&sandbox).await;
            count = check_counter(&sandbox, count).await;
            assert!(sandbox.read(&format!("/home/user/files/{cycle}")).await == content.as_bytes(), "cycle {cycle}");
        }
        assert_eq!(sandbox.says("ls files | wc -l").await, CYCLES.to_string());
        assert_eq!((boot_id(&sandbox).await, names(&sandbox).await), (boot, named));
        sandbox.id().to_owned()
    };
    kill_and_come_back(&mut server, &id).await;
    stop_really_reboots(&Sandbox::new(&server, &id)).await;
    server.stop().await;
}

/// The server dies while one sandbox is hibernated, one in standby and one stopped.
async fn kill_and_come_back(server: &mut TestServer, hibernated: &str) {
    let count = check_counter(&Sandbox::new(server, hibernated), 0).await;
    let standby = server.create("base").await.id().to_owned();
    start_counter(&Sandbox::new(server, &standby)).await;
    let stopped = server.create("base").await.id().to_owned();
    Sandbox::new(server, &stopped).says("echo kept > file").await;
    Sandbox::new(server, hibernated).verb("pause", json!({})).await;
    Sandbox::new(server, &standby).verb("pause", json!({"tier": "standby"})).await;
    Sandbox::new(server, &stopped).verb("stop", json!({})).await;
    server.note_cgroups();
    server.send_kill();
    server.reap().await;
    server.start_again().await;
    for (id, state, tier) in [
        (hibernated, "paused", json!("hibernated")),
        (&standby, "paused", json!("standby")),
        (&stopped, "stopped", Value::Null),
    ] {
        let info = Sandbox::new(server, id).info().await;
        assert_eq!((&info["state"], &info["tier"]), (&json!(state), &tier), "{info}");
        Sandbox::new(server, id).verb("resume", json!({"lifetime_seconds": 3600})).await;
        check_clock(&Sandbox::new(server, id)).await;
    }
    check_counter(&Sandbox::new(server, hibernated), count).await;
    check_counter(&Sandbox::new(server, &standby), 0).await;
    assert_eq!(Sandbox::new(server, &stopped).says("cat file").await, "kept");
    Sandbox::new(server, &standby).kill().await;
    Sandbox::new(server, &stopped).kill().await;
}

/// A stop keeps the disk and nothing else.
async fn stop_really_reboots(sandbox: &Sandbox<'_>) {
    let (boot, named) = (boot_id(sandbox).await, names(sandbox).await);
    // Not written out by anybody but the stop itself.
    sandbox.says("echo last > unsynced; echo gone > /tmp/../dev/shm/memory").await;
    let stopped = sandbox.verb("stop", json!({})).await;
    assert_eq!((&stopped["state"], &stopped["tier"]), (&json!("stopped"), &Value::Null));
    sandbox.verb("start", json!({})).await;
    assert_ne!(boot_id(sandbox).await, boot);
    assert_eq!(names(sandbox).await, named);
    assert_eq!(sandbox.says("cat unsynced; hostname").await, format!("last\n{}", sandbox.id()));
    assert_eq!(sandbox.says("pgrep -f '[c]ounter.py' || ls /dev/shm/memory 2>&1 | grep -c 'No such'").await, "1");
    check_clock(sandbox).await;
}

#[tokio::test]
async fn an_idle_sandbox_goes_down_tier_by_tier_and_a_command_brings_it_back() {
    let server = TestServer::start().await;
    let idle = json!({"standby_after_seconds": 1, "hibernate_after_seconds": 3});
    let body = json!({"lifetime_seconds": 3600, "auto_resume": true, "idle": idle, "metadata": {"team": "idle"}});
    let made = server.json(Method::POST, "/v1/sandboxes", Some(body)).await;
    let sandbox = Sandbox::new(&server, made["id"].as_str().expect("an id"));
    start_counter(&sandbox).await;
    let deadline = sandbox.info().await["deadline"].clone();

    // A stream that is open is use, however long nothing comes of it.
    let mut stream = server.start_cli(&["exec", "-n", sandbox.id(), "--", "sleep", "6"]);
    wait_for(&sandbox, "paused", "standby", Some(&mut stream)).await;
    let count = check_counter(&sandbox, 0).await;
    assert_eq!(sandbox.info().await["state"], "running");
    wait_for(&sandbox, "paused", "hibernated", None).await;
    check_counter(&sandbox, count).await;
    check_clock(&sandbox).await;

    // Rules are changed while it is down, and deadlines and labels are what they were.
    wait_for(&sandbox, "paused", "standby", None).await;
    let set =
        server.cli_ok(&["set", sandbox.id(), "--standby-after", "never", "--auto-resume", "false", "--json"]).await;
    let set: Value = serde_json::from_str(&set).expect("JSON");
    assert_eq!((&set["auto_resume"], &set["idle"]["standby_after_seconds"]), (&json!(false), &Value::Null), "{set}");
    assert_eq!((&set["idle"]["hibernate_after_seconds"], &set["metadata"]["team"]), (&json!(3.0), &json!("idle")));
    let (status, refused) = server
        .try_json(Method::POST, &format!("/v1/sandboxes/{}/run", sandbox.id()), Some(json!({"shell": "true"})))
        .await
        .expect("it answers");
    assert_eq!((status, &refused["error"]["code"]), (StatusCode::CONFLICT, &json!("wrong_state")), "{refused}");
    server.cli_ok(&["set", sandbox.id(), "--hibernate-after", "never"]).await;
    sandbox.verb("resume", json!({})).await;
    let later = sandbox.info().await["deadline"].clone();
    assert!(later.as_str() >= deadline.as_str(), "the deadline stood still while it was down: {later} {deadline}");
    check_counter(&sandbox, count).await;
    server.stop().await;
}

/// Waits for a state and tier. `not_before`: it must not come while this runs.
async fn wait_for(sandbox: &Sandbox<'_>, state: &str, tier: &str, mut not_before: Option<&mut tokio::process::Child>) {
    let patience = Duration::from_secs(120);
    let reached = async {
        loop {
            let runs = match &mut not_before {
                Some(child) => child.try_wait().expect("it is our child").is_none(),
                None => false,
            };
            let info = sandbox.info().await;
            if info["state"] == state && info["tier"] == tier {
                assert!(!runs, "went down while a stream was open");
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    assert!(tokio::time::timeout(patience, reached).await.is_ok(), "never {state} {tier}: {}", sandbox.info().await);
}
