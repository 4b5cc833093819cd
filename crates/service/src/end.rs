//! Ending a sandbox.
//!
//! ```text
//! record `killing` + why -> machine killed and removed -> saved state removed -> record `gone`
//! ```
//!
//! Each step may be repeated, by us or by the next server. When the machine has ended by itself the
//! record comes first and what the machine left is removed after it.

use std::{pin::pin, sync::Arc};

use stockade_engine::{Machine, MachineExit};
use stockade_model::{EndCause, Ending, SandboxState, Tier};
use tracing::warn;

use crate::{
    ServiceError,
    core::Pauses,
    create,
    error::store_error,
    live::{Reply, Verb},
    owner::Owner,
};

impl Owner {
    /// Ends the sandbox, however often that has to be tried. Callers are answered when nothing is left,
    /// or when a try has failed. Of several callers one is told it ended the sandbox.
    pub(crate) async fn end(mut self, machine: Option<Arc<dyn Machine>>, ending: Ending, caller: Option<Reply<()>>) {
        let mut callers: Vec<_> = caller.into_iter().collect();
        let mut pauses = Pauses::default();
        while let Err(error) = self.try_end(machine.as_ref(), &ending).await {
            warn!(error = &error as &dyn std::error::Error, "not ended yet, trying again");
            let pause = pauses.next();
            let busy = format!("sandbox {} could not be ended yet; the server goes on trying", self.sandbox.id);
            let mut told = Some(error);
            for caller in callers.drain(..) {
                let error = told.take();
                let error = error.unwrap_or_else(|| ServiceError::Busy { what: busy.clone(), retry_after: pause });
                caller.send(Err(error)).ok();
            }
            let mut pause = pin!(tokio::time::sleep(pause));
            loop {
                tokio::select! {
                    () = &mut pause => break,
                    Some(verb) = self.inbox.recv() => match verb {
                        Verb::Kill { reply, .. } => callers.push(reply),
                        verb => verb.refuse(&self.sandbox),
                    },
                }
            }
        }
        self.leave();
        // The others find the record when their senders are dropped.
        if let Some(first) = callers.into_iter().next() {
            first.send(Ok(())).ok();
        }
    }

    async fn try_end(&mut self, machine: Option<&Arc<dyn Machine>>, ending: &Ending) -> Result<(), ServiceError> {
        if self.sandbox.state != SandboxState::Killing {
            self.core.meter.end(&self.sandbox.id, ending.at);
            self.core.store().begin_end(&self.sandbox.id, ending).await.map_err(store_error)?;
            self.sandbox.state = SandboxState::Killing;
            // Whoever loses the guest now asks why.
            self.sandbox.ending = Some(ending.clone());
            self.show(None);
        }
        if let Some(machine) = machine {
            machine.kill().await?;
        }
        if let Some(saved) = &self.sandbox.saved {
            // Whatever its record says: it may have been on its way in or out of the archive.
            self.core.forget_saved(saved, Some(Tier::Archived)).await?;
        }
        self.core.meter.settle(&self.core).await;
        self.finish(SandboxState::Gone, ending).await
    }

    /// The machine has ended by itself.
    pub(crate) async fn machine_ended(mut self, machine: Arc<dyn Machine>, exit: MachineExit) {
        let (cause, detail) = match exit {
            MachineExit::GuestEnded(console) => (EndCause::GuestEnded, console),
            MachineExit::OutOfMemory => (EndCause::OutOfMemory, String::new()),
            MachineExit::Crashed(how) => (EndCause::Crashed, how),
            MachineExit::Killed => (EndCause::Crashed, "its machine was killed, not by its owner".to_owned()),
        };
        let ending = self.ending(cause, detail);
        self.core.meter.end(&self.sandbox.id, ending.at);
        self.core.meter.settle(&self.core).await;
        self.finish_for_certain(SandboxState::Gone, &ending).await;
        let core = Arc::clone(&self.core);
        create::remove_soon(&core, machine).await;
        self.leave();
    }
}
