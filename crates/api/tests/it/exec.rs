//! Commands, streamed and collected, on the guest agent itself.

use futures::StreamExt as _;
use reqwest::Method;
use serde_json::{Value, json};
use std::time::Duration;

use crate::support::{Answer, TestServer, within};

/// Reads JSON lines one by one.
struct Lines {
    body: futures::stream::BoxStream<'static, reqwest::Result<axum::body::Bytes>>,
    buffer: Vec<u8>,
}

impl Lines {
    async fn of(request: reqwest::RequestBuilder) -> Self {
        let response = within(request.send()).await.expect("an answer");
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "application/x-ndjson");
        Self { body: response.bytes_stream().boxed(), buffer: Vec::new() }
    }

    async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                return Some(serde_json::from_slice(&line).expect("a JSON line"));
            }
            self.buffer.extend(within(self.body.next()).await?.expect("a piece"));
        }
    }

    async fn rest(mut self) -> Vec<Value> {
        let mut lines = Vec::new();
        while let Some(line) = self.next().await {
            lines.push(line);
        }
        lines
    }
}

fn data(lines: &[Value], kind: &str) -> Vec<u8> {
    use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
    let of_kind = lines.iter().filter(|line| line["type"] == kind);
    of_kind.flat_map(|line| BASE64.decode(line["data"].as_str().expect("data")).expect("base64")).collect()
}

fn exec(t: &TestServer, sandbox: &str, body: &Value) -> reqwest::RequestBuilder {
    t.request(Method::POST, &format!("/v1/sandboxes/{sandbox}/exec")).json(body)
}

#[tokio::test]
async fn a_stream_begins_with_its_pid_and_ends_with_the_exit() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let body = json!({"shell": "echo out; echo err >&2; exit 3", "env": {"A": "b"}});
    let lines = Lines::of(exec(&t, &id, &body)).await.rest().await;
    assert_eq!((&lines[0]["type"], &lines[0]["offset"]), (&json!("started"), &json!(0)));
    assert!(lines[0]["pid"].as_u64() > Some(0));
    assert_eq!((data(&lines, "stdout"), data(&lines, "stderr")), (b"out\n".to_vec(), b"err\n".to_vec()));
    let exit = json!({"type": "exit", "code": 3, "timed_out": false, "out_of_memory": false});
    assert_eq!(lines.last(), Some(&exit));
}

#[tokio::test]
async fn binary_frames_carry_the_same() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let request =
        exec(&t, &id, &json!({"argv": ["printf", "\\377"]})).header("accept", "application/vnd.stockade.events");
    let response = within(request.send()).await.expect("an answer");
    assert_eq!(response.headers()["content-type"], "application/vnd.stockade.events");
    let bytes = within(response.bytes()).await.expect("a body");
    let (mut rest, mut kinds, mut stdout) = (&bytes[..], Vec::new(), Vec::new());
    while let Some((header, tail)) = rest.split_first_chunk::<5>() {
        let length = u32::from_be_bytes([header[1], header[2], header[3], header[4]]) as usize;
        let (payload, tail) = tail.split_at(length);
        kinds.push(header[0]);
        if header[0] == 2 {
            stdout.extend(payload);
        }
        rest = tail;
    }
    assert_eq!((kinds.first(), kinds.last(), stdout), (Some(&1), Some(&5), vec![0xff]));
}

#[tokio::test]
async fn run_gives_output_input_and_exit_in_one_answer() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let answer = t.run(&id, &json!({"shell": "cat; echo e >&2; exit 4", "stdin_base64": "AAEC/w=="})).await;
    assert_eq!((answer.status.as_u16(), &answer.json["code"]), (200, &json!(4)), "{answer:?}");
    assert_eq!((answer.bytes("stdout_base64"), answer.text("stderr_base64")), (vec![0, 1, 2, 255], "e\n".into()));
    let empty = t.run(&id, &json!({"shell": "cat; echo rc=$?"})).await;
    assert_eq!(empty.text("stdout_base64"), "rc=0\n");
    let early = t.run(&id, &json!({"argv": ["true"], "stdin_base64": "A".repeat(400_000)})).await;
    assert_eq!(early.json["code"], 0, "a command need not read its input: {early:?}");
    let signal = t.run(&id, &json!({"shell": "kill -9 $$"})).await;
    assert_eq!((&signal.json["code"], &signal.json["signal"]), (&Value::Null, &json!(9)));
}

#[tokio::test]
async fn run_keeps_a_mebibyte_of_each_stream_and_counts_the_rest() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let answer = t.run(&id, &json!({"shell": "head -c 3000000 /dev/zero; head -c 100 /dev/zero >&2"})).await;
    assert_eq!(answer.bytes("stdout_base64").len(), 1 << 20);
    assert_eq!(answer.json["stdout_truncated_bytes"], 3_000_000 - (1 << 20));
    assert_eq!((answer.bytes("stderr_base64").len(), &answer.json["stderr_truncated_bytes"]), (100, &json!(0)));
}

#[tokio::test]
async fn a_timeout_keeps_what_was_said_before_it() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let body = json!({"shell": "echo first; echo second >&2; sleep 60", "timeout_seconds": 1});
    let answer = t.run(&id, &body).await;
    assert_eq!((&answer.json["timed_out"], &answer.json["code"]), (&json!(true), &Value::Null), "{answer:?}");
    assert_eq!((answer.text("stdout_base64"), answer.text("stderr_base64")), ("first\n".into(), "second\n".into()));
}

#[tokio::test]
async fn what_cannot_be_run_is_an_error_with_a_code_of_its_own() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let cases = [
        (json!({"argv": ["/no/such/program"]}), 400, "cannot_execute"),
        (json!({"shell": "true", "cwd": "/no/such/dir"}), 400, "bad_cwd"),
        (json!({"shell": "true", "user": "nobody-of-this-name"}), 400, "unknown_user"),
        (json!({"shell": "true", "timeout_seconds": -1}), 400, "invalid_argument"),
        (json!({"shell": "true\u{0}"}), 400, "invalid_argument"),
    ];
    for (body, status, code) in cases {
        for verb in ["exec", "run"] {
            let answer = t.post(&format!("/v1/sandboxes/{id}/{verb}"), &body).await;
            assert_eq!((answer.status.as_u16(), answer.code()), (status, code), "{verb} {body}: {answer:?}");
        }
    }
    let long = t.run(&id, &json!({"argv": ["true", "x".repeat(300_000)]})).await;
    assert!(long.status == 200 || long.code() == "too_long", "{long:?}");
}

#[tokio::test]
async fn a_process_outlives_its_client_and_is_attached_to_where_it_was_left() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let body = json!({"shell": "echo one; read line; echo got $line; exit 9", "stdin": true, "tag": "the one"});
    let mut lines = Lines::of(exec(&t, &id, &body)).await;
    let started = lines.next().await.expect("started");
    let first = lines.next().await.expect("a line");
    assert_eq!(data(std::slice::from_ref(&first), "stdout"), b"one\n");
    drop(lines);

    let list = t.get(&format!("/v1/sandboxes/{id}/processes")).await;
    let process = &list.json["items"][0];
    assert_eq!(
        (&process["pid"], &process["tag"], &process["exit"]),
        (&started["pid"], &json!("the one"), &Value::Null)
    );
    assert_eq!(process["shell"], body["shell"]);

    let at = format!("/v1/sandboxes/{id}/processes");
    let attached = Lines::of(t.request(Method::GET, &format!("{at}/tag:the%20one/events?after=4"))).await;
    let written =
        Answer::of(t.request(Method::POST, &format!("{at}/tag:the%20one/stdin?close=true")).body("more\n")).await;
    assert_eq!(written.status, 204, "{written:?}");
    let rest = attached.rest().await;
    assert_eq!((data(&rest, "stdout"), &rest.last().expect("exit")["code"]), (b"got more\n".to_vec(), &json!(9)));

    let pid = &started["pid"];
    let late = Lines::of(t.request(Method::GET, &format!("{at}/{pid}/events?after=0"))).await.rest().await;
    assert_eq!((data(&late, "stdout"), &late.last().expect("exit")["code"]), (b"one\ngot more\n".to_vec(), &json!(9)));
}

#[tokio::test]
async fn signals_reach_the_group_and_unknown_processes_are_404() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let body = json!({"shell": "trap 'exit 12' USR1; echo ready; while :; do sleep 0.05; done", "tag": "s"});
    let mut lines = Lines::of(exec(&t, &id, &body)).await;
    lines.next().await.expect("started");
    lines.next().await.expect("ready");
    let at = format!("/v1/sandboxes/{id}/processes");
    let unknown = t.post(&format!("{at}/tag:s/signal"), &json!({"signal": "NOPE"})).await;
    assert_eq!((unknown.status.as_u16(), unknown.code()), (400, "unknown_signal"));
    assert_eq!(t.post(&format!("{at}/tag:s/signal"), &json!({"signal": "SIGUSR1"})).await.status, 204);
    assert_eq!(lines.rest().await.last().expect("exit")["code"], 12);
    for (path, body) in [("signal", json!({"signal": 15})), ("resize", json!({"cols": 80, "rows": 24}))] {
        let answer = t.post(&format!("{at}/tag:nobody/{path}"), &body).await;
        assert_eq!((answer.status.as_u16(), answer.code()), (404, "no_such_process"), "{path}");
    }
    let name = t.post(&format!("{at}/nonsense/signal"), &json!({"signal": 15})).await;
    assert_eq!((name.status.as_u16(), name.code()), (400, "invalid_argument"));
}

#[tokio::test]
async fn a_slow_reader_slows_the_process_and_gets_every_byte() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let body = json!({"shell": "head -c 8000000 /dev/zero; echo end"});
    let mut lines = Lines::of(exec(&t, &id, &body)).await;
    lines.next().await.expect("started");
    let (mut bytes, mut missed, mut pause) = (0, 0, 3);
    loop {
        let line = lines.next().await.expect("an exit before the end");
        if pause > 0 {
            pause -= 1;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        match line["type"].as_str() {
            Some("stdout") => bytes += data(std::slice::from_ref(&line), "stdout").len() as u64,
            Some("missed") => missed += line["bytes"].as_u64().expect("a count"),
            Some("exit") => break,
            other => assert_eq!(other, Some("keep_alive")),
        }
    }
    assert_eq!(bytes + missed, 8_000_004);
    assert_eq!(missed, 0, "an attached reader holds the process back");
}

#[tokio::test]
async fn a_stop_of_the_server_ends_streams_with_an_error_and_leaves_the_process() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let mut lines = Lines::of(exec(&t, &id, &json!({"shell": "echo up; sleep 60"}))).await;
    lines.next().await.expect("started");
    lines.next().await.expect("up");
    let stop = tokio::spawn(t.server.stop(Duration::from_secs(20)));
    let last = lines.rest().await.pop().expect("a last line");
    assert_eq!((&last["type"], &last["error"]["code"]), (&json!("error"), &json!("server_stopping")));
    assert!(within(stop).await.expect("no panic"), "all had ended within the grace time");
    // The process is there still: it goes with its machine.
    let machines = t.host.machines();
    assert_eq!(machines.len(), 1);
    t.host.end(&machines[0], stockade_engine::MachineExit::Killed);
}

#[tokio::test]
async fn a_machine_that_dies_gives_an_error_line_and_never_an_exit() {
    let t = TestServer::start().await;
    let id = t.create().await;
    let mut lines = Lines::of(exec(&t, &id, &json!({"shell": "echo up; sleep 60"}))).await;
    lines.next().await.expect("started");
    lines.next().await.expect("up");
    assert_eq!(t.delete(&format!("/v1/sandboxes/{id}")).await.status, 204);
    let rest = lines.rest().await;
    assert_eq!(rest.last().expect("a last line")["type"], "error", "{rest:?}");
    assert!(rest.iter().all(|line| line["type"] != "exit"), "{rest:?}");
}

#[tokio::test]
async fn who_attends_a_sandbox_that_ends_is_told_when_and_why() {
    let t = TestServer::start().await;
    for by_itself in [false, true] {
        let id = t.create().await;
        let machine = t.host.machines().remove(0);
        let mut lines = Lines::of(exec(&t, &id, &json!({"shell": "echo begun; exec sleep 600"}))).await;
        while lines.next().await.expect("a line")["type"] != "stdout" {}
        let started = t.host.guest_dir(&machine).join("started");
        let waiting = json!({"shell": format!("touch {}; exec sleep 600", started.display())});
        let run = t.run(&id, &waiting);
        let end = async {
            while !started.exists() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            if by_itself {
                t.host.end(&machine, stockade_engine::MachineExit::OutOfMemory);
            } else {
                assert_eq!(t.delete(&format!("/v1/sandboxes/{id}")).await.status, 204);
            }
        };
        let (run, ()) = within(futures::future::join(run, end)).await;
        assert_eq!((run.status.as_u16(), run.code()), (409, "sandbox_ended"), "{run:?}");
        let cause = if by_itself { "out_of_memory" } else { "killed" };
        assert!(run.message().contains(&id) && run.message().ends_with(cause), "{run:?}");
        let rest = lines.rest().await;
        let last = rest.last().expect("an end");
        assert_eq!((&last["type"], &last["error"]["code"]), (&json!("error"), &json!("sandbox_ended")), "{rest:?}");
        assert_eq!(last["error"]["message"], run.json["error"]["message"]);
    }
}
