//! One running machine: its control channel, its link, its end.
//!
//! A task per machine watches for its end and is the only one to say how it ended; everybody else
//! waits for what it says.
//!
//! Snapshots of one machine take turns, and `resume` and `pause` wait while one has the machine halted.

use std::{
    path::Path,
    sync::{
        Arc, Mutex as StdMutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use serde_json::{Value, json};
use stockade_model::MachineId;
use tokio::{
    net::UnixStream,
    process::Child,
    sync::{Mutex, broadcast, watch},
};

use super::{
    Host,
    cgroup::Cgroup,
    images::ImageUse,
    launch::{Launched, SHOWN_LINES},
    link_gate::LinkGate,
    machine_dir::{LINK, MachineDir, Processes, Record},
    memory::SealedMemory,
    network, no_room,
    qmp::{CLOSED, Qmp},
    remains::Remains,
    snapshot,
    snapshot_dir::Keeping,
    tail::Tail,
    usage,
};
use crate::{
    EngineError, GuestClient, Machine, MachineCounters, MachineExit, MachineUsage, SnapshotReport, SnapshotScope,
    guest::Told,
};

/// How long output of an emulator that has ended may take to arrive.
const LAST_WORDS_PATIENCE: Duration = Duration::from_secs(2);
/// How long a first connection to the guest is given; each further one twice as long.
const FIRST_CONNECTION: Duration = Duration::from_secs(1);

/// A machine under this process's control.
pub struct QemuMachine {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) host: Arc<Host>,
    pub(crate) id: MachineId,
    cgroup: Cgroup,
    record: StdMutex<Record>,
    pub(crate) processes: Processes,
    pub(crate) directory: MachineDir,
    pub(crate) qmp: Qmp,
    /// Holds the link still while a snapshot is taken.
    pub(crate) gate: Arc<LinkGate>,
    /// Taken by whoever halts the machine or lets it run.
    pub(crate) busy: Mutex<()>,
    /// Taken by whoever takes a snapshot.
    pub(crate) snapshotting: Mutex<()>,
    console: Tail,
    complaints: Tail,
    was_killed: AtomicBool,
    /// What `resume` and `pause` last asked for.
    pub(crate) is_meant_to_run: AtomicBool,
    exit: watch::Sender<Option<MachineExit>>,
    /// A connection to the link that nobody has used.
    unused_link: StdMutex<Option<UnixStream>>,
    session: Mutex<Option<GuestClient>>,
    told: Told,
    /// Kept as long as a machine maps it, so that the next machine shares it.
    _memory: Option<Arc<SealedMemory>>,
    /// The snapshot it comes from counts its machines.
    _image: Option<ImageUse>,
}

impl QemuMachine {
    /// Takes charge of an emulator that answers. `child`: bubblewrap, where this process started it.
    pub(crate) fn new(
        host: Arc<Host>,
        record: Record,
        directory: MachineDir,
        launched: Launched,
        memory: Arc<SealedMemory>,
        image: Option<ImageUse>,
    ) -> Self {
        let Launched { child, processes, qmp, console, complaints, link } = launched;
        let (child, memory) = (Some(child), Some(memory));
        Self::with_parts(host, record, directory, processes, qmp, console, complaints, link, child, memory, image)
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of one machine, put together in two places")]
    pub(crate) fn with_parts(
        host: Arc<Host>,
        record: Record,
        directory: MachineDir,
        processes: Processes,
        qmp: Qmp,
        console: Tail,
        complaints: Tail,
        link: Option<UnixStream>,
        child: Option<Child>,
        memory: Option<Arc<SealedMemory>>,
        image: Option<ImageUse>,
    ) -> Self {
        let events = qmp.events();
        let inner = Arc::new(Inner {
            host,
            id: record.machine.clone(),
            cgroup: record.cgroup.clone(),
            record: StdMutex::new(record),
            processes,
            directory,
            qmp,
            gate: Arc::default(),
            busy: Mutex::default(),
            snapshotting: Mutex::default(),
            console,
            complaints,
            was_killed: AtomicBool::new(false),
            is_meant_to_run: AtomicBool::new(false),
            exit: watch::channel(None).0,
            unused_link: StdMutex::new(link),
            session: Mutex::new(None),
            told: Told::default(),
            _memory: memory,
            _image: image,
        });
        tokio::spawn(no_room::watch(Arc::downgrade(&inner), inner.qmp.events()));
        tokio::spawn(inner.clone().watch_for_end(events, child));
        Self { inner }
    }

    /// A fresh connection to the guest link's port, for those who speak its protocol themselves.
    ///
    /// # Errors
    /// The emulator is gone.
    pub fn connect_link(&self) -> Result<UnixStream, EngineError> {
        self.inner.connect_link()
    }

    async fn take_snapshot(
        &self,
        directory: &Path,
        scope: SnapshotScope,
        keeping: Keeping,
    ) -> Result<SnapshotReport, EngineError> {
        let (inner, directory) = (self.inner.clone(), directory.to_owned());
        // A task of its own: given up half-way, the machine would stay halted.
        let task = tokio::spawn(async move { snapshot::take(&inner, &directory, scope, keeping).await });
        task.await.map_err(|error| EngineError::host("take a snapshot")(std::io::Error::other(error)))?
    }

    /// Process id of the emulator, as this host sees it.
    pub fn emulator_pid(&self) -> i32 {
        self.inner.processes.emulator.pid
    }
}

impl Inner {
    async fn watch_for_end(
        self: Arc<Self>,
        mut events: broadcast::Receiver<super::qmp::QmpEvent>,
        child: Option<Child>,
    ) {
        match self.processes.emulator.open() {
            Ok(Some(process)) => {
                if let Err(error) = process.wait().await {
                    tracing::error!(machine = %self.id, %error, "cannot wait for the emulator's end");
                }
            }
            Ok(None) => {}
            Err(error) => tracing::error!(machine = %self.id, %error, "cannot watch the emulator"),
        }
        let guest_ended = tokio::time::timeout(LAST_WORDS_PATIENCE, guest_ended(&mut events)).await.unwrap_or(false);
        self.console.finish(LAST_WORDS_PATIENCE).await;
        self.complaints.finish(LAST_WORDS_PATIENCE).await;
        let status = match child {
            Some(mut child) => match tokio::time::timeout(LAST_WORDS_PATIENCE, child.wait()).await {
                Ok(Ok(status)) => describe_status(status),
                _ => "its exit status is unknown".to_owned(),
            },
            None => "its exit status is unknown, another process started it".to_owned(),
        };
        let exit = if self.was_killed.load(Ordering::Acquire) {
            MachineExit::Killed
        } else if guest_ended {
            MachineExit::GuestEnded(self.console.last_lines(SHOWN_LINES))
        } else if self.cgroup.was_out_of_memory() {
            MachineExit::OutOfMemory
        } else {
            let said = self.complaints.last_lines(SHOWN_LINES);
            MachineExit::Crashed(if said.is_empty() { status } else { format!("{status}; it said: {said}") })
        };
        tracing::debug!(machine = %self.id, ?exit, "machine has ended");
        self.exit.send_replace(Some(exit));
    }

    fn connect_link(&self) -> Result<UnixStream, EngineError> {
        if let Some(unused) = self.unused_link.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Ok(unused);
        }
        self.directory.connect(LINK).map_err(|error| self.gone(&format!("its link cannot be connected: {error}")))
    }

    pub(crate) async fn guest(&self) -> Result<GuestClient, EngineError> {
        let mut session = self.session.lock().await;
        if let Some(client) = session.as_ref().filter(|client| client.is_open()) {
            return Ok(client.clone());
        }
        // The port has one place: the old connection must be closed before the new one is taken.
        if let Some(old) = session.take() {
            old.close();
        }
        match self.open_session().await {
            Ok(client) => Ok(session.insert(client).clone()),
            Err(EngineError::LinkBroken { .. }) if self.exit.borrow().is_some() => Err(self.gone("its link broke")),
            Err(error) => Err(error),
        }
    }

    /// Connects, and again where nothing is heard. An emulator whose machine was saved while a part of what the guest
    /// said had no room in the old host's connection goes on with that part as soon as it is loaded, finds nobody
    /// connected, and waits for room in a connection that is not there: it takes whatever is said to the guest and
    /// passes on nothing of what the guest says. The end of a connection makes it give that up.
    async fn open_session(&self) -> Result<GuestClient, EngineError> {
        let patience = self.host.limits.guest_patience;
        let begin = Instant::now();
        let mut slice = FIRST_CONNECTION;
        loop {
            let left = patience.saturating_sub(begin.elapsed());
            let opened = GuestClient::open(self.gate.wrap(self.connect_link()?), slice.min(left)).await;
            match opened {
                Err(EngineError::GuestSilent { .. }) if slice < left => slice *= 2,
                Err(EngineError::GuestSilent { .. }) => {
                    let console = self.console.last_lines(SHOWN_LINES);
                    return Err(EngineError::GuestSilent { waited: begin.elapsed(), console });
                }
                opened => return opened.map(|client| client.of_machine(Arc::clone(&self.told))),
            }
        }
    }

    fn gone(&self, otherwise: &str) -> EngineError {
        let reason = match &*self.exit.borrow() {
            Some(exit) => format!("{exit:?}"),
            None => otherwise.to_owned(),
        };
        EngineError::Gone { machine: self.id.clone(), reason }
    }

    /// What is known of it.
    pub(crate) fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes its own disk layer takes.
    fn disk_bytes(&self) -> u64 {
        let own = self.record().disk.as_ref().map(|disk| disk.own.clone());
        own.map_or(0, |own| self.directory.layer_bytes(&own))
    }

    /// Notes something new about it, for those who come after us.
    pub(crate) fn set_record(&self, record: Record) -> Result<(), EngineError> {
        self.directory.write_record(&record).map_err(EngineError::host("write the machine's record"))?;
        *self.record() = record;
        Ok(())
    }

    pub(crate) async fn command(&self, name: &'static str, arguments: Value) -> Result<Value, EngineError> {
        if !self.qmp.is_open() {
            return Err(self.gone("its emulator closed the control channel"));
        }
        self.qmp.run(name, arguments, self.host.limits.command_patience).await
    }
}

/// Reads events to their end; whether the guest itself ended the machine.
async fn guest_ended(events: &mut broadcast::Receiver<super::qmp::QmpEvent>) -> bool {
    let mut ended = false;
    loop {
        match events.recv().await {
            Ok(event) if event.name == CLOSED => return ended,
            Ok(event) if event.name == "SHUTDOWN" => ended |= event.data["guest"] == true,
            Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
            Err(broadcast::error::RecvError::Closed) => return ended,
        }
    }
}

fn describe_status(status: std::process::ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        // bubblewrap passes a signal on as a shell does.
        (Some(code), _) if code > 128 => format!("the emulator was ended by signal {}", code - 128),
        (Some(code), _) => format!("the emulator exited with status {code}"),
        (None, Some(signal)) => format!("its jail was ended by signal {signal}"),
        (None, None) => "the emulator ended".to_owned(),
    }
}

#[async_trait]
impl Machine for QemuMachine {
    fn id(&self) -> &MachineId {
        &self.inner.id
    }

    async fn resume(&self) -> Result<(), EngineError> {
        let _busy = self.inner.busy.lock().await;
        self.inner.is_meant_to_run.store(true, Ordering::Release);
        self.inner.command("cont", json!({})).await.map(drop)
    }

    async fn pause(&self) -> Result<(), EngineError> {
        let _busy = self.inner.busy.lock().await;
        self.inner.is_meant_to_run.store(false, Ordering::Release);
        self.inner.command("stop", json!({})).await.map(drop)
    }

    async fn guest(&self) -> Result<GuestClient, EngineError> {
        self.inner.guest().await
    }

    async fn network(&self) -> Result<Option<UnixStream>, EngineError> {
        let inner = &self.inner;
        let connected =
            network::connect(&inner.directory, inner.processes.emulator, inner.host.limits.command_patience).await;
        connected.map(Some).map_err(|error| inner.gone(&format!("its network interface cannot be connected: {error}")))
    }

    async fn snapshot(&self, directory: &Path, scope: SnapshotScope) -> Result<SnapshotReport, EngineError> {
        self.take_snapshot(directory, scope, Keeping::Durable).await
    }

    async fn snapshot_for_forks(&self, directory: &Path) -> Result<SnapshotReport, EngineError> {
        self.take_snapshot(directory, SnapshotScope::MemoryAndDisk, Keeping::Passing).await
    }

    async fn kill(&self) -> Result<(), EngineError> {
        self.inner.was_killed.store(true, Ordering::Release);
        if let Some(session) = self.inner.session.lock().await.take() {
            session.close();
        }
        let inner = &self.inner;
        let remains = Remains::of_record(&inner.host, inner.directory.clone(), &inner.record());
        remains.remove().await?;
        self.exited().await;
        Ok(())
    }

    async fn exited(&self) -> MachineExit {
        let mut exit = self.inner.exit.subscribe();
        match exit.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(exit)) => exit.clone(),
            // The sender lives in `inner`, which lives as long as this.
            Ok(None) | Err(_) => MachineExit::Crashed("its watcher has ended".to_owned()),
        }
    }

    fn counters(&self) -> Result<MachineCounters, EngineError> {
        let counters = usage::counters(&self.inner.processes.emulator, self.inner.disk_bytes());
        counters.map_err(|error| self.inner.gone(&format!("what it has used cannot be read: {error}")))
    }

    fn usage(&self) -> Result<MachineUsage, EngineError> {
        usage::read(&self.inner.processes.emulator, self.inner.disk_bytes())
            .map_err(|error| self.inner.gone(&format!("what it holds cannot be read: {error}")))
    }

    fn console_tail(&self) -> String {
        self.inner.console.last_lines(SHOWN_LINES)
    }
}
