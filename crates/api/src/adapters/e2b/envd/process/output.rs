//! What a process writes and how it ends, as a stream of `ProcessEvent`s.

use std::time::Duration;

use futures::{Stream, StreamExt, stream};
use serde::Serialize;
use stockade_engine::{EngineError, guest::Events};
use stockade_wire::{event::Event, process};
use tokio::time::{Instant, Interval, MissedTickBehavior};

use super::super::{
    super::connect::{self, Code, ConnectError, Item},
    guest_error::Asked,
};

/// State of one event stream.
struct Running {
    events: Events,
    keep_alive: Interval,
    /// The process's own limit, for the text.
    limit: Option<Duration>,
    /// When this stream ends, whatever the process does.
    until: Option<Instant>,
    done: bool,
}

/// `start`, the events, and an end. `limit` is the process's own, `patience` the stream's.
pub(super) fn items(
    events: Events,
    keep_alive: Duration,
    limit: Option<Duration>,
    patience: Option<Duration>,
) -> Result<impl Stream<Item = Item>, ConnectError> {
    let started = events
        .started
        .as_ref()
        .ok_or_else(|| ConnectError::new(Code::Internal, "the guest did not say which process it started"))?;
    let first = Item::Frame(connect::message_frame(&event(EventJson::Start { pid: started.pid })).freeze());
    let mut keep_alive = tokio::time::interval_at(Instant::now() + keep_alive, keep_alive);
    keep_alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let until = patience.map(|patience| Instant::now() + patience);
    let running = Running { events, keep_alive, limit, until, done: false };
    let rest = stream::unfold(running, |mut running| async move {
        let items = running.next().await?;
        Some((stream::iter(items), running))
    });
    Ok(stream::once(std::future::ready(first)).chain(rest.flatten()))
}

impl Running {
    async fn next(&mut self) -> Option<Vec<Item>> {
        while !self.done {
            let event = tokio::select! {
                biased;
                event = self.events.events.next() => event,
                () = sleep_until(self.until) => {
                    self.done = true;
                    return Some(vec![Item::End(Some(self.late()))]);
                }
                _ = self.keep_alive.tick() => {
                    return Some(vec![Item::Frame(connect::message_frame(&event(EventJson::Keepalive {})).freeze())]);
                }
            };
            if let Some(items) = self.translate(event) {
                return Some(items);
            }
        }
        None
    }

    fn translate(&mut self, event: Option<Result<Event, EngineError>>) -> Option<Vec<Item>> {
        let data = |field: &str, bytes: &[u8]| {
            let prefix = format!(r#"{{"event":{{"data":{{"{field}":""#);
            Some(vec![Item::Frame(connect::base64_frame(&prefix, bytes, r#""}}}"#))])
        };
        match event {
            Some(Ok(Event::Stdout(bytes))) => data("stdout", &bytes),
            Some(Ok(Event::Stderr(bytes))) => data("stderr", &bytes),
            Some(Ok(Event::Pty(bytes))) => data("pty", &bytes),
            Some(Ok(Event::Exit(exit))) => {
                self.done = true;
                if exit.timed_out {
                    return Some(vec![Item::End(Some(self.late()))]);
                }
                let end = connect::message_frame(&self::event(end_of(&exit))).freeze();
                Some(vec![Item::Frame(end), Item::End(None)])
            }
            Some(Ok(Event::Missed(missed))) => {
                self.done = true;
                let message = format!("this reader fell behind and {} bytes of output were dropped", missed.bytes);
                Some(vec![Item::End(Some(ConnectError::new(Code::DataLoss, message)))])
            }
            Some(Ok(_)) => None,
            Some(Err(error)) => {
                self.done = true;
                Some(vec![match error {
                    EngineError::Guest(_) => Item::End(Some(Asked::default().connect_error(error))),
                    broken => Item::Break(std::io::Error::other(broken)),
                }])
            }
            None => {
                self.done = true;
                let error = std::io::Error::new(std::io::ErrorKind::UnexpectedEof, "the guest's event stream was cut");
                Some(vec![Item::Break(error)])
            }
        }
    }

    fn late(&self) -> ConnectError {
        let message = match self.limit {
            Some(limit) => format!("the process was killed: its time limit of {} ms passed", limit.as_millis()),
            None => "the time limit of this connection passed; the process goes on".to_owned(),
        };
        ConnectError::new(Code::DeadlineExceeded, message)
    }
}

async fn sleep_until(until: Option<Instant>) {
    match until {
        Some(until) => tokio::time::sleep_until(until).await,
        None => std::future::pending().await,
    }
}

#[derive(Serialize)]
struct EventMessage {
    event: EventJson,
}

fn event(event: EventJson) -> EventMessage {
    EventMessage { event }
}

/// `ProcessEvent` without its data, which is written by hand.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
enum EventJson {
    Start {
        pid: u32,
    },
    Keepalive {},
    End {
        #[serde(rename = "exitCode", skip_serializing_if = "is_zero")]
        exit_code: i32,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        exited: bool,
        status: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
}

fn is_zero(value: &i32) -> bool {
    *value == 0
}

fn end_of(exit: &process::Exit) -> EventJson {
    let (exit_code, exited, status) = match (exit.code, exit.signal) {
        (Some(code), _) => (code, true, format!("exit status {code}")),
        (None, Some(signal)) => (-1, false, format!("signal: {}", signal_words(signal))),
        (None, None) => (-1, false, "the process never ran".to_owned()),
    };
    let failed = exit_code != 0;
    let error = failed.then(|| match exit.out_of_memory {
        true => format!("{status} (the sandbox ran out of memory)"),
        false => status.clone(),
    });
    EventJson::End { exit_code, exited, status, error }
}

/// What Go's runtime calls the signals of Linux on x86-64; clients compare these texts.
fn signal_words(signal: i32) -> String {
    const WORDS: [&str; 31] = [
        "hangup",
        "interrupt",
        "quit",
        "illegal instruction",
        "trace/breakpoint trap",
        "aborted",
        "bus error",
        "floating point exception",
        "killed",
        "user defined signal 1",
        "segmentation fault",
        "user defined signal 2",
        "broken pipe",
        "alarm clock",
        "terminated",
        "stack fault",
        "child exited",
        "continued",
        "stopped (signal)",
        "stopped",
        "stopped (tty input)",
        "stopped (tty output)",
        "urgent I/O condition",
        "CPU time limit exceeded",
        "file size limit exceeded",
        "virtual timer expired",
        "profiling timer expired",
        "window changed",
        "I/O possible",
        "power failure",
        "bad system call",
    ];
    let index = usize::try_from(signal).ok().and_then(|number| number.checked_sub(1));
    index.and_then(|index| WORDS.get(index)).map_or_else(|| format!("signal {signal}"), |word| (*word).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exit(code: Option<i32>, signal: Option<i32>) -> process::Exit {
        process::Exit { code, signal, ..process::Exit::default() }
    }

    fn json(exit: &process::Exit) -> String {
        serde_json::to_string(&event(end_of(exit))).expect("plain data")
    }

    #[test]
    fn ends_have_the_fields_and_texts_of_proto3_json_and_go() {
        assert_eq!(json(&exit(Some(0), None)), r#"{"event":{"end":{"exited":true,"status":"exit status 0"}}}"#);
        assert_eq!(
            json(&exit(Some(3), None)),
            r#"{"event":{"end":{"exitCode":3,"exited":true,"status":"exit status 3","error":"exit status 3"}}}"#
        );
        assert_eq!(
            json(&exit(None, Some(9))),
            r#"{"event":{"end":{"exitCode":-1,"status":"signal: killed","error":"signal: killed"}}}"#
        );
        assert_eq!(signal_words(15), "terminated");
        assert_eq!(signal_words(11), "segmentation fault");
        assert_eq!(signal_words(40), "signal 40");
    }
}
