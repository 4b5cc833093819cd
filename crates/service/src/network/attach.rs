//! A machine's link into the gateway, from before its processors run until it ends.

use std::{collections::BTreeMap, sync::Arc};

use stockade_engine::Machine;
use stockade_gateway::{AttachSpec, Attachment, Framing, dns::NameTableRecord};
use stockade_model::{MachineId, Sandbox, SandboxId};
use stockade_store::NetworkRecord;
use stockade_wire::machine;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::{Attached, Network, Settings, secrets::WORKSPACE};
use crate::{
    ServiceError,
    core::Core,
    error::{chain, store_error},
};

const NAMES_PERIOD: std::time::Duration = std::time::Duration::from_secs(1);

/// What a guest is told after its machine was attached.
#[derive(Clone, Debug, Default)]
pub(crate) struct Told {
    pub(crate) network: Option<machine::Network>,
    /// Tokens for its environment.
    pub(crate) env: BTreeMap<String, String>,
}

/// Which names a machine's guest knows.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Names {
    /// Those that were stored last.
    Stored,
    /// Those, and some more: the server that gave them did not end in peace.
    AfterCrash,
}

impl Network {
    /// Attaches a machine as a sandbox's, unless it is already. Its processors must not run yet, or have run as this
    /// sandbox's.
    pub(crate) async fn attach(
        self: &Arc<Self>,
        core: &Core,
        machine: &Arc<dyn Machine>,
        sandbox: &Sandbox,
        names: Names,
    ) -> Result<Told, ServiceError> {
        let record = self.store.network(sandbox.id.as_str()).await.map_err(store_error)?;
        let settings = self.settings_of(record.as_ref())?;
        let mut network = self.for_guest();
        let known = match self.take_over(machine.id(), &sandbox.id) {
            Held::Ours => return Ok(Told { network: Some(network), env: settings.env() }),
            Held::Others(known) => known,
            Held::Nobodys => stored_names(record.as_ref(), names),
        };
        let Some(link) = machine.network().await? else {
            return Ok(Told { network: None, env: settings.env() });
        };
        let spec = AttachSpec {
            sandbox: sandbox.id.clone(),
            owner: BTreeMap::from([(WORKSPACE.to_owned(), sandbox.workspace.to_string())]),
            policy: self.layers(&settings)?,
            names: known,
            limits: self.limits.clone(),
            framing: Framing::LengthPrefixed,
            traffic: core.meter.traffic(&sandbox.id),
        };
        let (reader, writer) = link.into_split();
        let attached = self.gateway.attach_halves(reader, writer, spec);
        let attachment = attached.map_err(|error| ServiceError::Network { problem: chain(&error) })?;
        self.hold(core, machine.id(), &sandbox.id, attachment);
        self.put_in_force(&sandbox.id, settings.revision).await?;
        network.reset_connections = true;
        debug!(machine = %machine.id(), sandbox = %sandbox.id, "network attached");
        Ok(Told { network: Some(network), env: settings.env() })
    }

    /// What a guest whose connections live on is told.
    pub(crate) fn for_guest(&self) -> machine::Network {
        machine::Network { reset_connections: false, authority: Some(self.authority.clone()) }
    }

    /// The settings that are kept, or the deployment's for a sandbox that was made without any.
    pub(crate) fn settings_of(&self, record: Option<&NetworkRecord>) -> Result<Settings, ServiceError> {
        match record {
            Some(record) => Settings::from_json(&record.settings),
            None => Settings::first(self.default.clone(), BTreeMap::new()),
        }
    }

    fn take_over(&self, machine: &MachineId, sandbox: &SandboxId) -> Held {
        let mut all = self.attached();
        match all.get(machine) {
            Some(attached) if attached.sandbox == *sandbox => Held::Ours,
            Some(_) => {
                let attached = all.remove(machine).expect("it is there");
                attached.stop.cancel();
                Held::Others(attached.control.name_table())
            }
            None => Held::Nobodys,
        }
    }

    fn hold(self: &Arc<Self>, core: &Core, machine: &MachineId, sandbox: &SandboxId, attachment: Attachment) {
        let stop = CancellationToken::new();
        let control = attachment.control();
        let attached = Attached { sandbox: sandbox.clone(), control, stop: stop.clone(), stored: 0 };
        self.attached().insert(machine.clone(), attached);
        let (network, machine) = (Arc::clone(self), machine.clone());
        core.spawn(async move {
            let mut attachment = attachment;
            tokio::select! {
                () = stop.cancelled() => {}
                () = attachment.ended() => {
                    network.store_names(&machine).await;
                    let mut all = network.attached();
                    // Another attachment of the same machine may have taken its place.
                    if all.get(&machine).is_some_and(|attached| !attached.stop.is_cancelled()) {
                        all.remove(&machine);
                    }
                }
            }
        });
    }

    /// Applies newer settings than those an attachment was made with.
    async fn put_in_force(&self, sandbox: &SandboxId, revision: u64) -> Result<(), ServiceError> {
        let record = self.store.network(sandbox.as_str()).await.map_err(store_error)?;
        let settings = self.settings_of(record.as_ref())?;
        match self.control(sandbox) {
            Some(control) if settings.revision != revision => {
                control.set_policy(&self.layers(&settings)?).map(drop).map_err(|error| settings.refused(error))
            }
            _ => Ok(()),
        }
    }

    /// Writes the names of machines whose guests have learned new ones; never ends.
    pub(crate) async fn keep_names(self: Arc<Self>) {
        let mut ticks = tokio::time::interval(NAMES_PERIOD);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.store_all_names().await;
        }
    }

    pub(crate) async fn store_all_names(&self) {
        let changed: Vec<_> = {
            let all = self.attached();
            let changed = all.iter().filter(|(_, one)| one.control.name_changes() != one.stored);
            changed.map(|(machine, _)| machine.clone()).collect()
        };
        for machine in changed {
            self.store_names(&machine).await;
        }
    }

    /// Writes the names of a sandbox's guest, so that what is made from its memory knows them.
    pub(crate) async fn store_names_of(&self, sandbox: &SandboxId) {
        let machine = self.attached().iter().find(|(_, one)| one.sandbox == *sandbox).map(|(id, _)| id.clone());
        if let Some(machine) = machine {
            self.store_names(&machine).await;
        }
    }

    async fn store_names(&self, machine: &MachineId) {
        let found = self.attached().get(machine).map(|one| (one.sandbox.clone(), one.control.clone()));
        let Some((sandbox, control)) = found else { return };
        let changes = control.name_changes();
        let names = serde_json::to_string(&control.name_table()).unwrap_or_default();
        match self.store.put_network_names(sandbox.as_str(), &names).await {
            Ok(()) => {
                if let Some(attached) = self.attached().get_mut(machine) {
                    attached.stored = changes;
                }
            }
            Err(error) => warn!(%sandbox, error = &error as &dyn std::error::Error, "names of a guest are not stored"),
        }
    }
}

enum Held {
    /// As this sandbox's.
    Ours,
    /// As another's; its guest knows these names.
    Others(NameTableRecord),
    Nobodys,
}

fn stored_names(record: Option<&NetworkRecord>, names: Names) -> NameTableRecord {
    let text = record.map_or("", |record| &record.names);
    let stored: NameTableRecord = serde_json::from_str(text).unwrap_or_default();
    match names {
        Names::Stored => stored,
        Names::AfterCrash => stored.after_crash(),
    }
}
