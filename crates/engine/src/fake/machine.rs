use std::{
    path::Path,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use async_trait::async_trait;
use stockade_model::MachineId;
use tokio::sync::Mutex;

use super::{
    host::{FakeHost, Process},
    link::Wire,
    script::{Moment, Step},
    snapshot,
};
use crate::{
    EngineError, GuestClient, Machine, MachineCounters, MachineExit, MachineUsage, SnapshotReport, SnapshotScope,
};

const PATIENCE: Duration = Duration::from_secs(10);

/// One server's hold on a machine.
pub(super) struct FakeMachine {
    host: FakeHost,
    process: Arc<Process>,
    session: Arc<Mutex<Option<Session>>>,
}

struct Session {
    client: GuestClient,
    /// Cut when dropped.
    wire: Wire,
}

impl FakeMachine {
    pub(super) fn new(host: FakeHost, process: Arc<Process>) -> Self {
        let session = Arc::new(Mutex::new(None));
        tokio::spawn(cut_at_end(Arc::clone(&process), Arc::downgrade(&session)));
        Self { host, process, session }
    }

    fn check_alive(&self) -> Result<(), EngineError> {
        match self.process.exit() {
            None => Ok(()),
            Some(exit) => Err(EngineError::Gone { machine: self.process.id.clone(), reason: format!("{exit:?}") }),
        }
    }

    async fn connect(&self) -> Result<Session, EngineError> {
        if !self.process.is_running.load(Ordering::SeqCst) {
            return Err(EngineError::GuestSilent { waited: Duration::ZERO, console: self.console_tail() });
        }
        self.host.script().pass(Step::Link, Moment::Before).await?;
        let (wire, stream) = Wire::connect(&self.process.agent, &self.process.is_silent);
        let client = GuestClient::open(stream, PATIENCE).await?;
        self.host.script().pass(Step::Link, Moment::After).await?;
        Ok(Session { client, wire })
    }
}

/// A machine that ends takes its link with it.
async fn cut_at_end(process: Arc<Process>, session: std::sync::Weak<Mutex<Option<Session>>>) {
    let mut exits = process.exits();
    if exits.wait_for(Option::is_some).await.is_err() {
        return;
    }
    if let Some(session) = session.upgrade() {
        session.lock().await.take();
    }
}

#[async_trait]
impl Machine for FakeMachine {
    fn id(&self) -> &MachineId {
        &self.process.id
    }

    async fn resume(&self) -> Result<(), EngineError> {
        self.check_alive()?;
        self.host.script().pass(Step::Resume, Moment::Before).await?;
        self.process.is_running.store(true, Ordering::SeqCst);
        self.host.script().pass(Step::Resume, Moment::After).await
    }

    async fn pause(&self) -> Result<(), EngineError> {
        self.check_alive()?;
        self.host.script().pass(Step::Pause, Moment::Before).await?;
        self.process.is_running.store(false, Ordering::SeqCst);
        self.host.script().pass(Step::Pause, Moment::After).await
    }

    async fn snapshot(&self, directory: &Path, scope: SnapshotScope) -> Result<SnapshotReport, EngineError> {
        self.check_alive()?;
        self.host.script().pass(Step::Snapshot, Moment::Before).await?;
        let was_running = self.process.is_running.swap(false, Ordering::SeqCst);
        let home = self.host.guest_dir(&self.process.id);
        let taken = snapshot::take(&home, directory, scope, self.host.script()).await;
        self.process.is_running.store(was_running, Ordering::SeqCst);
        let report = taken?;
        if let Err(error) = self.host.script().pass(Step::Snapshot, Moment::After).await {
            snapshot::remove(directory);
            return Err(error);
        }
        Ok(report)
    }

    async fn guest(&self) -> Result<GuestClient, EngineError> {
        self.check_alive()?;
        let mut session = self.session.lock().await;
        if let Some(session) = &*session
            && session.client.is_open()
        {
            return Ok(session.client.clone());
        }
        *session = None;
        let new = self.connect().await?;
        let client = new.client.clone();
        match self.host.script().at_identity() {
            None => *session = Some(new),
            Some(Ok(silence)) => {
                new.wire.freeze();
                silence.reach();
                *session = Some(new);
            }
            Some(Err(())) => drop(new),
        }
        Ok(client)
    }

    async fn kill(&self) -> Result<(), EngineError> {
        self.host.script().pass(Step::Kill, Moment::Before).await?;
        self.session.lock().await.take();
        self.host.remove(&self.process.id);
        self.host.script().pass(Step::Kill, Moment::After).await
    }

    async fn exited(&self) -> MachineExit {
        let mut exits = self.process.exits();
        let exit = exits.wait_for(Option::is_some).await.map(|exit| exit.clone());
        exit.ok().flatten().unwrap_or(MachineExit::Killed)
    }

    fn counters(&self) -> Result<MachineCounters, EngineError> {
        self.check_alive()?;
        let cpu_micros = self.process.cpu_micros.load(Ordering::SeqCst);
        Ok(MachineCounters { cpu_micros, anonymous_bytes: 1 << 20, disk_bytes: 4096 })
    }

    fn usage(&self) -> Result<MachineUsage, EngineError> {
        let MachineCounters { cpu_micros, disk_bytes, .. } = self.counters()?;
        Ok(MachineUsage { private_bytes: 1 << 20, proportional_bytes: 2 << 20, cpu_micros, disk_bytes })
    }

    fn console_tail(&self) -> String {
        format!("fake machine {}", self.process.id)
    }
}
