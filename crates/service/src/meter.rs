//! The meter: what each sandbox and snapshot uses, counted in memory and written every few seconds.
//!
//! A subject has one open row; a change of state closes it, to the millisecond, and opens the next. Processor
//! time is the difference of the machine's own counter, which the row remembers with the machine's id: a server
//! that comes after us goes on where the row ends, so that time in which no server ran is counted once. What
//! became of a sandbox after its last row was written it reads from the sandbox's events, which have the same
//! times. Memory and disk are bytes held times time. What is sent is told by the gateway, each byte once; connections end
//! with the server, and with one that is killed what was sent since the last write. Starting a machine is not charged:
//! its counter is read when it begins to take commands.
//!
//! What memory a machine holds the kernel finds out page by page. That is done between requests, and again only where it
//! may have changed; in a change of state the machine holds what it was last seen to hold.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use jiff::Timestamp;
use stockade_engine::{Machine, MachineCounters};
use stockade_gateway::Traffic;
use stockade_model::{Sandbox, SandboxId, SandboxState, Snapshot, SnapshotId, Tier, Usage};
use stockade_store::{Metered, SandboxEvent, StoreError, UsageRow};
use tokio::time::{MissedTickBehavior, interval};
use tracing::warn;

use crate::{ServiceError, core::Core, error::store_error};

/// The longest row.
const HOUR_MS: i64 = 3_600_000;
/// So much more or less of its own, and a machine's memory is looked at again.
const CHANGED_BYTES: u64 = 1 << 20;
/// After this time in any case: its share of what it holds in common changes with the others.
const LOOK_AGAIN_AFTER: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(crate) struct Meter {
    book: Mutex<Book>,
    /// One writer at a time: an older state of a row must not be written over a newer one.
    writing: tokio::sync::Mutex<()>,
    /// What sandboxes send, told by the gateway.
    traffic: Mutex<HashMap<SandboxId, Arc<Traffic>>>,
}

#[derive(Default)]
struct Book {
    open: HashMap<String, Account>,
    /// Closed, not written yet.
    closed: Vec<UsageRow>,
    /// Not written yet.
    metered: Vec<Metered>,
}

struct Account {
    row: UsageRow,
    machine: Option<Arc<dyn Machine>>,
    /// None: it sends nothing.
    traffic: Option<Arc<Traffic>>,
    held: Held,
    is_snapshot: bool,
}

/// What a subject holds, as last seen.
#[derive(Clone, Copy, Default)]
struct Held {
    memory_bytes: u64,
    disk_bytes: u64,
    looked: Option<Look>,
}

/// When a machine's memory was looked at, and what it then had of its own.
#[derive(Clone, Copy)]
struct Look {
    at: Instant,
    anonymous_bytes: u64,
}

/// What a machine says of itself.
struct Reading {
    counters: MachineCounters,
    /// `None`: not looked at.
    memory_bytes: Option<u64>,
}

impl Meter {
    /// Where what a sandbox sends is counted, whatever machine it has.
    pub(crate) fn traffic(&self, sandbox: &SandboxId) -> Arc<Traffic> {
        let mut all = self.traffic.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.entry(sandbox.clone()).or_default())
    }

    /// A sandbox is in another state, or has another machine, from now on. `saved_bytes`: what it holds where it
    /// has no machine.
    pub(crate) fn enter(
        &self,
        sandbox: &Sandbox,
        machine: Option<&Arc<dyn Machine>>,
        saved_bytes: u64,
        now: Timestamp,
    ) {
        let (traffic, id) = (self.traffic(&sandbox.id), machine.map(|machine| machine.id()));
        let mut book = self.lock();
        let subject = sandbox.id.to_string();
        let before = book.close(&subject, now);
        if before.is_none() {
            book.metered.push(metered(sandbox));
        }
        let sequence = before.as_ref().map_or(0, |before| before.row.sequence + 1);
        let (held, cpu_seen) = match (before, machine) {
            (Some(before), Some(machine)) if before.row.machine.as_ref() == Some(machine.id()) => {
                (before.held, before.row.cpu_seen)
            }
            // It is looked at soon, and taken to have held that from its beginning.
            (_, Some(machine)) => (Held::default(), machine.counters().map_or(0, |counters| counters.cpu_micros)),
            (_, None) => (Held::now(None, saved_bytes), 0),
        };
        let row = UsageRow {
            subject: subject.clone(),
            sequence,
            sandbox: sandbox.id.clone(),
            state: word(sandbox.state, sandbox.tier).to_owned(),
            from: now,
            to: now,
            machine: id.cloned(),
            cpu_seen,
            memory_seen: held.memory_bytes,
            disk_seen: held.disk_bytes,
            usage: Usage::default(),
        };
        let account = Account { row, machine: machine.cloned(), traffic: Some(traffic), held, is_snapshot: false };
        book.open.insert(subject, account);
    }

    /// A sandbox is found again. Goes on with its last row, by way of what became of it after that was written.
    pub(crate) fn adopt(
        &self,
        sandbox: &Sandbox,
        machine: Option<&Arc<dyn Machine>>,
        saved_bytes: u64,
        past: Past,
        now: Timestamp,
    ) {
        let mut book = self.lock();
        book.metered.push(metered(sandbox));
        let Some(mut account) = past.catch_up(sandbox, &mut book.closed) else {
            drop(book);
            return self.enter(sandbox, machine, saved_bytes, now);
        };
        let has_its_machine = account.row.machine.as_ref() == machine.map(|machine| machine.id());
        let is_same_state = account.row.state == word(sandbox.state, sandbox.tier);
        if is_same_state && (!has_its_machine || machine.is_none()) {
            // What it holds now it is taken to have held since its row was written.
            account.held = Held::now(machine, saved_bytes);
        }
        let is_same = is_same_state && has_its_machine;
        if is_same {
            account.machine = machine.cloned();
            account.traffic = Some(self.traffic(&sandbox.id));
        }
        book.open.insert(sandbox.id.to_string(), account);
        drop(book);
        if !is_same {
            self.enter(sandbox, machine, saved_bytes, now);
        }
    }

    /// A sandbox of which nothing is left: what it used until the last that is known of it.
    pub(crate) fn adopt_ended(&self, sandbox: &Sandbox, past: Past) {
        let mut book = self.lock();
        book.metered.push(metered(sandbox));
        if let Some(account) = past.catch_up(sandbox, &mut book.closed) {
            book.closed.push(account.row);
        }
    }

    /// A snapshot is kept from now on; it counts for the sandbox it was taken of.
    pub(crate) fn enter_snapshot(&self, snapshot: &Snapshot, bytes: u64) {
        self.adopt_snapshot(snapshot, bytes, None);
    }

    pub(crate) fn adopt_snapshot(&self, snapshot: &Snapshot, bytes: u64, last: Option<UsageRow>) {
        let now = snapshot.created_at;
        let subject = snapshot.id.to_string();
        let row = last.unwrap_or_else(|| UsageRow {
            subject: subject.clone(),
            sequence: 0,
            sandbox: snapshot.sandbox.clone(),
            state: "snapshot".to_owned(),
            from: now,
            to: now,
            machine: None,
            cpu_seen: 0,
            memory_seen: 0,
            disk_seen: bytes,
            usage: Usage::default(),
        });
        let held = Held { disk_bytes: bytes, ..Held::default() };
        self.lock().open.insert(subject, Account { row, machine: None, traffic: None, held, is_snapshot: true });
    }

    /// A sandbox uses nothing any more. To be called while its machine can still be read.
    pub(crate) fn end(&self, id: &SandboxId, now: Timestamp) {
        self.lock().close(id.as_str(), now);
        self.traffic.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
    }

    pub(crate) fn end_snapshot(&self, id: &SnapshotId, now: Timestamp) {
        self.lock().close(id.as_str(), now);
    }

    /// Reads every machine. Reading takes its time: not under the lock, and not on a thread that serves.
    async fn sample(&self, core: &Core) {
        let machines: Vec<_> = {
            let book = self.lock();
            let with = |(subject, account): (&String, &Account)| {
                Some((subject.clone(), account.machine.clone()?, account.held.looked))
            };
            book.open.iter().filter_map(with).collect()
        };
        let read_all = move || {
            let read_one = |(subject, machine, looked): (String, Arc<dyn Machine>, _)| {
                Some((subject, machine.id().clone(), Reading::of(&machine, |now| may_have_changed(looked, now))?))
            };
            machines.into_iter().filter_map(read_one).collect::<Vec<_>>()
        };
        let Ok(readings) = tokio::task::spawn_blocking(read_all).await else { return };
        let mut book = self.lock();
        let now = core.now();
        for (subject, machine, reading) in readings {
            let Some(account) = book.open.get_mut(&subject) else { continue };
            // It may have another machine by now.
            if account.row.machine.as_ref() == Some(&machine) {
                account.note(reading);
            }
        }
        let Book { open, closed, .. } = &mut *book;
        for account in open.values_mut() {
            account.note_traffic();
            account.advance(now, closed);
        }
    }

    /// Reads and writes everything. What fails is kept for the next time.
    pub(crate) async fn flush(&self, core: &Core) -> Result<(), StoreError> {
        let _writing = self.writing.lock().await;
        self.sample(core).await;
        self.write(core, true).await
    }

    /// Writes what is closed: to be called before a subject's record is final, for nobody comes back to it.
    pub(crate) async fn settle(&self, core: &Core) {
        let _writing = self.writing.lock().await;
        if let Err(error) = self.write(core, false).await {
            warn!(error = &error as &dyn std::error::Error, "usage not written, trying again");
        }
    }

    async fn write(&self, core: &Core, open_too: bool) -> Result<(), StoreError> {
        let (metered, closed, rows) = {
            let mut book = self.lock();
            let (metered, closed) = (std::mem::take(&mut book.metered), std::mem::take(&mut book.closed));
            let mut rows = closed.clone();
            if open_too {
                rows.extend(book.open.values().map(|account| account.row.clone()));
            }
            (metered, closed, rows)
        };
        let written = core.store().put_usage(&metered, &rows).await;
        if written.is_err() {
            let mut book = self.lock();
            book.metered.extend(metered);
            book.closed.extend(closed);
        }
        written
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book {
    /// Closes a subject's row and gives its account; `None`: it had none.
    fn close(&mut self, subject: &str, now: Timestamp) -> Option<Account> {
        let mut account = self.open.remove(subject)?;
        let was_seen = account.held.looked.is_some();
        if let Some(reading) = account.machine.as_ref().and_then(|machine| Reading::of(machine, |_| !was_seen)) {
            account.note(reading);
        }
        account.note_traffic();
        account.advance(now, &mut self.closed);
        self.closed.push(account.row.clone());
        Some(account)
    }
}

impl Account {
    /// Goes on with a row by what was seen last.
    fn of_row(row: UsageRow) -> Self {
        let held = Held { memory_bytes: row.memory_seen, disk_bytes: row.disk_seen, looked: None };
        Self { row, machine: None, traffic: None, held, is_snapshot: false }
    }

    /// Takes what was sent since the last time.
    fn note_traffic(&mut self) {
        let sent = self.traffic.as_ref().map_or(0, |traffic| traffic.take_sent());
        self.row.usage.egress_bytes += u128::from(sent);
    }

    /// Takes what a machine says. One that is gone says nothing: what it last said stands.
    fn note(&mut self, reading: Reading) {
        let MachineCounters { cpu_micros: cpu, anonymous_bytes, disk_bytes } = reading.counters;
        // A counter that went back began again.
        let used = cpu.checked_sub(self.row.cpu_seen).unwrap_or(cpu);
        self.row.usage.cpu_micros += u128::from(used);
        self.row.cpu_seen = cpu;
        self.held.disk_bytes = disk_bytes;
        if let Some(memory_bytes) = reading.memory_bytes {
            let looked = Some(Look { at: Instant::now(), anonymous_bytes });
            self.held = Held { memory_bytes, disk_bytes, looked };
        }
        (self.row.memory_seen, self.row.disk_seen) = (self.held.memory_bytes, self.held.disk_bytes);
    }

    /// Counts what is held up to now; a row that has become too long is closed and the next begun.
    fn advance(&mut self, now: Timestamp, closed: &mut Vec<UsageRow>) {
        let now = now.as_millisecond();
        loop {
            let end = self.row.from.as_millisecond() + HOUR_MS;
            self.hold_until(now.min(end));
            if now <= end {
                return;
            }
            let next = UsageRow {
                sequence: self.row.sequence + 1,
                from: self.row.to,
                usage: Usage::default(),
                ..self.row.clone()
            };
            closed.push(std::mem::replace(&mut self.row, next));
        }
    }

    fn hold_until(&mut self, until: i64) {
        // A clock that was set back: what is counted stays counted.
        let Ok(ms) = u128::try_from(until - self.row.to.as_millisecond()) else { return };
        let usage = &mut self.row.usage;
        usage.memory_byte_ms += u128::from(self.held.memory_bytes) * ms;
        let disk = u128::from(self.held.disk_bytes) * ms;
        if self.is_snapshot {
            usage.snapshot_byte_ms += disk;
        } else {
            usage.disk_byte_ms += disk;
        }
        self.row.to = Timestamp::from_millisecond(until).unwrap_or(self.row.to);
    }
}

/// What is known of a sandbox an earlier server metered.
pub(crate) struct Past {
    /// Its last row.
    pub(crate) last: Option<UsageRow>,
    /// All that happened to it, oldest first.
    pub(crate) events: Vec<SandboxEvent>,
}

impl Past {
    pub(crate) async fn of(core: &Core, sandbox: &Sandbox) -> Result<Self, ServiceError> {
        let last = core.store().last_usage(sandbox.id.as_str()).await.map_err(store_error)?;
        let events = core.store().events(&sandbox.workspace, &sandbox.id).await.map_err(store_error)?;
        Ok(Self { last, events })
    }

    /// Bytes it held where it still is, if that was written down.
    pub(crate) fn held(&self, sandbox: &Sandbox) -> Option<u64> {
        let last = self.last.as_ref().filter(|last| last.state == word(sandbox.state, sandbox.tier));
        last.map(|last| last.disk_seen).filter(|bytes| *bytes > 0)
    }

    /// Goes on with the last row up to the last event. `None`: it has not run yet, or uses nothing any more.
    fn catch_up(self, sandbox: &Sandbox, closed: &mut Vec<UsageRow>) -> Option<Account> {
        let counted = self.last.as_ref().map_or(Timestamp::MIN, |last| last.to);
        let mut account = self.last.map(Account::of_row);
        for event in self.events.into_iter().filter(|event| event.at >= counted) {
            let state = match event.state {
                SandboxState::Running | SandboxState::Paused | SandboxState::Stopped => {
                    Some(word(event.state, event.tier))
                }
                SandboxState::Killing | SandboxState::Gone | SandboxState::Failed => None,
                // Until it has arrived it is what it was.
                SandboxState::Creating | SandboxState::Pausing | SandboxState::Resuming => continue,
            };
            if account.as_ref().map(|account| account.row.state.as_str()) == state {
                continue;
            }
            let before = account.take().map(|mut account| {
                account.advance(event.at, closed);
                closed.push(account.row.clone());
                account.row
            });
            account = state.map(|state| Account::of_row(row_after(sandbox, before, state, event.at)));
        }
        account
    }
}

/// The row of a state that nobody has looked at yet, after the row of another.
fn row_after(sandbox: &Sandbox, before: Option<UsageRow>, state: &str, from: Timestamp) -> UsageRow {
    let sequence = before.as_ref().map_or(0, |row| row.sequence + 1);
    // In these it has a machine, the same in a pause and back.
    let has_machine = ["running", "standby"].contains(&state);
    let seen = before.filter(|_| has_machine);
    let (cpu_seen, memory_seen, disk_seen) =
        seen.as_ref().map_or((0, 0, 0), |row| (row.cpu_seen, row.memory_seen, row.disk_seen));
    UsageRow {
        subject: sandbox.id.to_string(),
        sequence,
        sandbox: sandbox.id.clone(),
        state: state.to_owned(),
        from,
        to: from,
        machine: seen.and_then(|row| row.machine),
        cpu_seen,
        memory_seen,
        disk_seen,
        usage: Usage::default(),
    }
}

impl Held {
    /// Where it has a machine, the machine is looked at.
    fn now(machine: Option<&Arc<dyn Machine>>, saved_bytes: u64) -> Self {
        let usage = machine.and_then(|machine| machine.usage().ok()).unwrap_or_default();
        let disk_bytes = if machine.is_some() { usage.disk_bytes } else { saved_bytes };
        Self { memory_bytes: usage.proportional_bytes, disk_bytes, looked: None }
    }
}

impl Reading {
    /// `None`: it is gone. Its memory is looked at where `look` says so.
    fn of(machine: &Arc<dyn Machine>, look: impl FnOnce(&MachineCounters) -> bool) -> Option<Self> {
        let counters = machine.counters().ok()?;
        let memory_bytes = if look(&counters) { Some(machine.usage().ok()?.proportional_bytes) } else { None };
        Some(Self { counters, memory_bytes })
    }
}

fn may_have_changed(looked: Option<Look>, now: &MachineCounters) -> bool {
    looked.is_none_or(|look| {
        look.at.elapsed() >= LOOK_AGAIN_AFTER || look.anonymous_bytes.abs_diff(now.anonymous_bytes) >= CHANGED_BYTES
    })
}

fn word(state: SandboxState, tier: Option<Tier>) -> &'static str {
    match (state, tier) {
        (SandboxState::Paused, Some(Tier::Standby)) => "standby",
        (SandboxState::Paused | SandboxState::Stopped, Some(Tier::Archived)) => "archived",
        (SandboxState::Paused, _) => "hibernated",
        (state, _) => state.as_str(),
    }
}

fn metered(sandbox: &Sandbox) -> Metered {
    Metered {
        sandbox: sandbox.id.clone(),
        workspace: sandbox.workspace.clone(),
        template_name: sandbox.template_name.clone(),
        metadata: sandbox.metadata.clone(),
    }
}

/// Goes on with the rows of snapshots an earlier server kept.
pub(crate) async fn adopt_snapshots(core: &Core, snapshots: Vec<Snapshot>) -> Result<(), ServiceError> {
    for snapshot in snapshots {
        let last = core.store().last_usage(snapshot.id.as_str()).await.map_err(store_error)?;
        let bytes = crate::dirs::bytes_of(&core.dirs.path(crate::dirs::Kind::Snapshot, &snapshot.id));
        core.meter.adopt_snapshot(&snapshot, bytes, last);
    }
    Ok(())
}

/// The meter's task: never ends by itself.
pub(crate) async fn run(core: Arc<Core>, period: Duration) {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Err(error) = core.meter.flush(&core).await {
            warn!(error = &error as &dyn std::error::Error, "usage not written, trying again");
        }
    }
}
