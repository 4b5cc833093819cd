//! What callers can ask and change about a sandbox's network.

use std::{collections::BTreeMap, sync::Arc};

use http::{Method, Uri};
use stockade_gateway::{
    HostPort, Stats,
    policy::{Explanation, any_matches},
};
use stockade_model::{SandboxId, SnapshotId, WorkspaceId};
use stockade_store::NetworkRecord;

use super::{Network, NetworkChange, NetworkSpec, Settings, Told};
use crate::{
    Principal, Service, ServiceError,
    core::Core,
    error::store_error,
    identity,
    service::{Found, ended},
};

/// A sandbox's network now.
#[derive(Clone, Debug)]
pub struct NetworkState {
    /// Counts up with each change.
    pub revision: u64,
    /// What its owner wrote.
    pub spec: NetworkSpec,
    /// Its connections and bytes, while it is attached.
    pub stats: Option<Stats>,
}

impl Network {
    /// The settings of a new sandbox. `from`: the snapshot whose memory its guest will have.
    pub(crate) async fn new_settings(
        &self,
        workspace: &WorkspaceId,
        template: Option<&str>,
        spec: Option<NetworkSpec>,
        from: Option<&NetworkRecord>,
    ) -> Result<Settings, ServiceError> {
        let is_new = spec.is_some();
        let settings = match (spec, from) {
            (None, Some(from)) => return Settings::from_json(&from.settings),
            (Some(spec), Some(from)) => {
                let hosts = self.hosts_of(workspace, &spec).await?;
                Settings::from_json(&from.settings)?.changed(spec, &hosts)?
            }
            (spec, None) => {
                let spec = match spec {
                    Some(spec) => spec,
                    None => self.default_for(workspace, template).await?.spec,
                };
                let hosts = self.hosts_of(workspace, &spec).await?;
                Settings::first(spec, hosts)?
            }
        };
        if is_new {
            self.check_new(&settings)?
        } else {
            self.check(&settings)?
        }
        Ok(settings)
    }

    /// Where the secrets a spec uses may go.
    async fn hosts_of(
        &self,
        workspace: &WorkspaceId,
        spec: &NetworkSpec,
    ) -> Result<BTreeMap<String, Vec<String>>, ServiceError> {
        let mut hosts = BTreeMap::new();
        for used in &spec.secrets {
            let known = self.hosts_of_secret(workspace, &used.secret).await?;
            hosts.insert(used.secret.clone(), known.ok_or_else(|| super::secrets::not_found(&used.secret))?);
        }
        Ok(hosts)
    }

    /// Where a secret may go, if there is one of the name.
    async fn hosts_of_secret(&self, workspace: &WorkspaceId, name: &str) -> Result<Option<Vec<String>>, ServiceError> {
        if let Some(minter) = self.minters.get(name) {
            return Ok(minter.is_for(workspace).then(|| minter.config.hosts.clone()));
        }
        let found = self.store.secret(workspace, name).await.map_err(store_error)?;
        Ok(found.map(|(record, _)| record.hosts))
    }

    /// Has an explanation say of secrets what would really become of them: a policy may name one that may not go where
    /// the request goes, or that is no more.
    async fn explain_secrets(&self, workspace: &WorkspaceId, explained: &mut Explanation) -> Result<(), ServiceError> {
        let Some(receiver) = explained.receiver.clone() else { return Ok(()) };
        for name in std::mem::take(&mut explained.secrets) {
            let problem = match self.hosts_of_secret(workspace, &name).await? {
                Some(hosts) if any_matches(&hosts, &receiver) == Ok(true) => {
                    explained.secrets.push(name);
                    continue;
                }
                Some(_) => format!("secret {name} may not be sent to {receiver}"),
                None => format!("secret {name} does not exist"),
            };
            if explained.needed.contains(&name) {
                (explained.allowed, explained.mode, explained.reason) = (false, "refuse", problem);
                explained.secrets.clear();
                break;
            }
        }
        Ok(())
    }

    /// Keeps a sandbox's network for what is made from a snapshot of it. After the snapshot was taken: names its guest
    /// learned since do no harm.
    pub(crate) async fn keep_for(&self, sandbox: &SandboxId, snapshot: &SnapshotId) -> Result<(), ServiceError> {
        self.store_names_of(sandbox).await;
        let Some(record) = self.store.network(sandbox.as_str()).await.map_err(store_error)? else { return Ok(()) };
        self.store.put_network(snapshot.as_str(), &record).await.map_err(store_error)
    }
}

impl Core {
    /// The network, where this server has one.
    pub(crate) fn network(&self) -> Result<&Arc<Network>, ServiceError> {
        self.network.as_ref().ok_or_else(|| ServiceError::Network { problem: "this server has none".to_owned() })
    }
}

#[expect(clippy::missing_errors_doc, reason = "as for the other verbs")]
impl Service {
    /// A sandbox's network.
    pub async fn network(&self, who: &Principal, id: &SandboxId) -> Result<NetworkState, ServiceError> {
        let settings = self.network_settings(who, id).await?;
        let stats = self.handle.core.network()?.control(id).map(|control| control.stats());
        Ok(NetworkState { revision: settings.revision, spec: settings.spec, stats })
    }

    /// Changes a sandbox's network as a whole. When this returns it is in force: connections it does not allow have
    /// been reset. Processes that run keep their environment; new ones have the tokens of new secrets.
    pub async fn set_network(
        &self,
        who: &Principal,
        id: &SandboxId,
        spec: NetworkSpec,
    ) -> Result<NetworkState, ServiceError> {
        self.replace_network(who, id, |_| spec).await
    }

    /// Changes some of a sandbox's network, as [`Service::set_network`] does all of it.
    pub async fn change_network(
        &self,
        who: &Principal,
        id: &SandboxId,
        change: NetworkChange,
    ) -> Result<NetworkState, ServiceError> {
        self.replace_network(who, id, |old| change.applied_to(old)).await
    }

    async fn replace_network(
        &self,
        who: &Principal,
        id: &SandboxId,
        replace: impl FnOnce(NetworkSpec) -> NetworkSpec,
    ) -> Result<NetworkState, ServiceError> {
        let core = &self.handle.core;
        let network = core.network()?;
        if let Found::Ended(sandbox) = self.find(who, id).await? {
            return Err(ended(*sandbox));
        }
        let _turn = network.changes.lock().await;
        let old = self.network_settings(who, id).await?;
        let spec = replace(old.spec.clone());
        let hosts = network.hosts_of(&who.workspace, &spec).await?;
        let new = old.changed(spec, &hosts)?;
        network.check_new(&new)?;
        let json = new.to_json();
        core.store().put_network_settings(id.as_str(), &json).await.map_err(store_error)?;
        let control = network.control(id);
        if let Some(control) = &control {
            control.set_policy(&network.layers(&new)?).map_err(|error| new.refused(error))?;
        }
        if new.env() != old.env() {
            self.tell_environment(id, new.env()).await?;
        }
        let stats = control.map(|control| control.stats());
        Ok(NetworkState { revision: new.revision, spec: new.spec, stats })
    }

    /// What would happen to a request of the guest, and why. `tcp://host:port` stands for plain TCP.
    pub async fn explain(
        &self,
        who: &Principal,
        id: &SandboxId,
        method: &str,
        url: &str,
    ) -> Result<Explanation, ServiceError> {
        let invalid = |field, problem: &str| ServiceError::Invalid { field, problem: problem.to_owned() };
        let method = Method::from_bytes(method.as_bytes()).map_err(|_| invalid("method", "is no HTTP method"))?;
        let url: Uri = url.parse().map_err(|_| invalid("url", "is no URL"))?;
        if !is_request(&url) {
            return Err(invalid(
                "url",
                "is no http://, https://, tcp:// or udp:// URL with a host and a port up to 65535",
            ));
        }
        let network = self.handle.core.network()?;
        let settings = self.network_settings(who, id).await?;
        let layers = network.layers(&settings)?;
        let explained = network.gateway.explain(&layers, &method, &url).await;
        let mut explained = explained.map_err(|error| settings.refused(error))?;
        network.explain_secrets(&who.workspace, &mut explained).await?;
        Ok(explained)
    }

    /// Has new processes of a running guest find the tokens it may use from now on.
    async fn tell_environment(&self, id: &SandboxId, env: BTreeMap<String, String>) -> Result<(), ServiceError> {
        let core = &self.handle.core;
        let Some(live) = core.registry.get(id) else { return Ok(()) };
        let view = live.view.borrow().clone();
        // One that does not run is told when it does again.
        let Some(machine) = view.machine else { return Ok(()) };
        let sandbox = view.sandbox;
        let template =
            core.store().template(&sandbox.workspace, sandbox.template.as_str()).await.map_err(store_error)?;
        let Some(template) = template else { return Ok(()) };
        let network = Some(core.network()?.for_guest());
        let identity = identity::identity(core, &sandbox, &template.template, Told { network, env });
        machine.guest().await?.set_identity(&identity).await?;
        Ok(())
    }

    async fn network_settings(&self, who: &Principal, id: &SandboxId) -> Result<Settings, ServiceError> {
        // Also tells whether the caller may know of it.
        self.get(who, id).await?;
        let record = self.store().network(id.as_str()).await.map_err(store_error)?;
        self.handle.core.network()?.settings_of(record.as_ref())
    }
}

/// Whether a URL names somewhere a guest could want to go.
fn is_request(url: &Uri) -> bool {
    let scheme = url.scheme_str().is_some_and(|scheme| ["http", "https", "tcp", "udp"].contains(&scheme));
    scheme && url.authority().is_some_and(|authority| HostPort::after_user(authority).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_can_be_asked_for_is_explained() {
        for url in ["http://a", "https://a.example:443/x?y", "tcp://10.0.0.1:5432", "udp://[::1]:53", "http://u@a/"] {
            assert!(is_request(&url.parse().expect("parses")), "{url}");
        }
        for url in ["notaurl", "/x", "ftp://a/", "https://a:99999/", "https://a:0x1/", "https://a:/"] {
            assert!(!url.parse::<Uri>().is_ok_and(|url| is_request(&url)), "{url}");
        }
    }
}
