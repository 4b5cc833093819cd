//! One record per decision. Records name secrets and never hold a value.
//!
//! Refusals that repeat (a guest in a retry loop, a scan) are counted and written once per interval, so that a guest
//! cannot fill a disk with them.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use jiff::Timestamp;
use serde::Serialize;
use stockade_model::SandboxId;

/// What was decided on.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AuditKind {
    /// The first packet of a connection.
    Connect,
    /// A name.
    Dns,
    /// The end of a connection, with its bytes.
    Closed,
    /// A TLS hello.
    Tls,
    /// One HTTP request.
    Http,
    /// A token where it may not go.
    Token,
    /// A secret's value that was needed and could not be had.
    Secret,
    /// A connection outwards.
    Dial,
    /// UDP.
    Udp,
    /// A policy that was put in force.
    Policy,
    /// The link.
    Link,
}

/// The outcome.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It went on.
    Allow,
    /// It was stopped.
    Deny,
    /// It was allowed and failed.
    Error,
}

/// One decision.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct AuditRecord {
    /// When.
    pub time: Timestamp,
    /// Whose.
    pub sandbox: SandboxId,
    /// The labels given when it was attached.
    #[serde(serialize_with = "inner")]
    pub owner: Arc<std::collections::BTreeMap<String, String>>,
    /// The policy it was judged by.
    pub revision: u64,
    /// What was decided on.
    pub kind: AuditKind,
    /// The outcome.
    pub verdict: Verdict,
    /// A stable word: `rule`, `default`, `private_address`, `sni_mismatch`, ...
    pub reason: &'static str,
    /// How many alike this stands for.
    pub count: u64,
    /// The rest.
    #[serde(flatten)]
    pub facts: Facts,
}

fn inner<T: Serialize, S: serde::Serializer>(shared: &Arc<T>, serializer: S) -> Result<S::Ok, S::Error> {
    T::serialize(shared, serializer)
}

/// What is known about the object of a decision.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Facts {
    /// The connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flow: Option<u64>,
    /// The address the guest used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
    /// The port the guest used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// The name behind the address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The server name of a TLS hello.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_name: Option<String>,
    /// Whether the hello carried an encrypted inner name.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub encrypted_hello: bool,
    /// The host of an HTTP request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub authority: Option<String>,
    /// Its method.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// Its path, without the query.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The status sent to the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// The rule that decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// `pass`, `intercept`, `mediate`, `raw`, `explain`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<&'static str>,
    /// The address that was dialled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream: Option<std::net::SocketAddr>,
    /// Names of the secrets used, or of the one a token stands for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<String>,
    /// Bytes from the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_out: Option<u64>,
    /// Bytes to the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_in: Option<u64>,
    /// How long it lasted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duration_ms: Option<u64>,
    /// More, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

/// Takes records. It is called from the data path: it must not block; a sink that cannot keep up counts what it drops.
pub trait AuditSink: Send + Sync + 'static {
    /// Takes one.
    fn record(&self, record: AuditRecord);
}

/// Forgets everything.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoAudit;

impl AuditSink for NoAudit {
    fn record(&self, _record: AuditRecord) {}
}

/// Keeps everything in memory, for tests.
#[derive(Debug, Default)]
pub struct MemoryAudit(Mutex<Vec<AuditRecord>>);

impl MemoryAudit {
    /// What was taken so far.
    pub fn records(&self) -> Vec<AuditRecord> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl AuditSink for MemoryAudit {
    fn record(&self, record: AuditRecord) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(record);
    }
}

const REPEAT_INTERVAL: Duration = Duration::from_secs(10);
const MAX_REPEATS: usize = 1_024;

/// One sandbox's way to the sink.
pub(crate) struct Auditor {
    sink: Arc<dyn AuditSink>,
    sandbox: SandboxId,
    owner: Arc<std::collections::BTreeMap<String, String>>,
    repeats: Mutex<HashMap<RepeatKey, Repeat>>,
}

type RepeatKey = (AuditKind, &'static str, Facts);

struct Repeat {
    since: Instant,
    more: u64,
    revision: u64,
    verdict: Verdict,
}

impl Auditor {
    pub(crate) fn new(
        sink: Arc<dyn AuditSink>,
        sandbox: SandboxId,
        owner: Arc<std::collections::BTreeMap<String, String>>,
    ) -> Self {
        Self { sink, sandbox, owner, repeats: Mutex::default() }
    }

    /// Writes a record; a refusal like a recent one is only counted.
    pub(crate) fn record(&self, revision: u64, kind: AuditKind, verdict: Verdict, reason: &'static str, facts: Facts) {
        if verdict == Verdict::Deny {
            let key = (kind, reason, Facts { flow: None, ..facts.clone() });
            let mut repeats = self.repeats.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(repeat) = repeats.get_mut(&key).filter(|repeat| repeat.since.elapsed() < REPEAT_INTERVAL) {
                repeat.more += 1;
                return;
            }
            if repeats.len() >= MAX_REPEATS {
                let old: Vec<_> = repeats.drain().collect();
                drop(repeats);
                self.write_repeats(old);
                repeats = self.repeats.lock().unwrap_or_else(PoisonError::into_inner);
            }
            let fresh = Repeat { since: Instant::now(), more: 0, revision, verdict };
            let old = repeats.insert(key.clone(), fresh);
            drop(repeats);
            self.write_repeats(old.map(|repeat| (key, repeat)));
        }
        self.write(revision, kind, verdict, reason, 1, facts);
    }

    /// Writes what was only counted.
    pub(crate) fn flush(&self) {
        let all: Vec<_> = self.repeats.lock().unwrap_or_else(PoisonError::into_inner).drain().collect();
        self.write_repeats(all);
    }

    fn write_repeats(&self, repeats: impl IntoIterator<Item = (RepeatKey, Repeat)>) {
        for ((kind, reason, facts), repeat) in repeats {
            if repeat.more > 0 {
                self.write(repeat.revision, kind, repeat.verdict, reason, repeat.more, facts);
            }
        }
    }

    fn write(&self, revision: u64, kind: AuditKind, verdict: Verdict, reason: &'static str, count: u64, facts: Facts) {
        let (sandbox, owner) = (self.sandbox.clone(), Arc::clone(&self.owner));
        self.sink.record(AuditRecord {
            time: Timestamp::now(),
            sandbox,
            owner,
            revision,
            kind,
            verdict,
            reason,
            count,
            facts,
        });
    }
}
