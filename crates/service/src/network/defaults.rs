//! What sandboxes start from whose request says nothing about the network.
//!
//! ```text
//! the request's > its template's > its workspace's > the operator's        (the first that is there, as a whole)
//!                                   all of them under the operator's floor and bounds
//! ```
//!
//! A sandbox keeps what it started from: a default that is changed later changes nothing for it, its snapshots and
//! forks. A template's default is kept by the template's name, for each workspace, so that a new build has it, too.

use stockade_model::WorkspaceId;
use stockade_store::NetworkRecord;

use super::{Network, NetworkSpec, Settings};
use crate::{Principal, Service, ServiceError, error::store_error};

/// Whose default.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum DefaultOf<'a> {
    /// The caller's workspace's.
    Workspace,
    /// A template's in the caller's workspace, by name or id.
    Template(&'a str),
}

/// A default and who says so.
#[derive(Clone, Debug)]
pub struct DefaultNetwork {
    /// `template`, `workspace` or `operator`.
    pub from: &'static str,
    /// What sandboxes start from.
    pub spec: NetworkSpec,
}

/// No workspace's id and no template's name has a colon in it.
fn subject(workspace: &WorkspaceId, template: Option<&str>) -> String {
    match template {
        Some(template) => format!("default:{workspace}:{template}"),
        None => format!("default:{workspace}"),
    }
}

impl Network {
    /// What a new sandbox starts from.
    pub(super) async fn default_for(
        &self,
        workspace: &WorkspaceId,
        template: Option<&str>,
    ) -> Result<DefaultNetwork, ServiceError> {
        let levels = template.map(|template| ("template", Some(template))).into_iter().chain([("workspace", None)]);
        for (from, template) in levels {
            let found = self.store.network(&subject(workspace, template)).await.map_err(store_error)?;
            if let Some(record) = found {
                return Ok(DefaultNetwork { from, spec: Settings::from_json(&record.settings)?.spec });
            }
        }
        Ok(DefaultNetwork { from: "operator", spec: self.default.clone() })
    }
}

#[expect(clippy::missing_errors_doc, reason = "as for the other verbs")]
impl Service {
    /// What sandboxes of a template, or of the workspace, start from.
    pub async fn default_network(&self, who: &Principal, of: DefaultOf<'_>) -> Result<DefaultNetwork, ServiceError> {
        let template = self.template_of(who, of).await?;
        self.handle.core.network()?.default_for(&who.workspace, template.as_deref()).await
    }

    /// Changes it, for sandboxes that are made from now on. It is refused where it could not be a sandbox's.
    pub async fn set_default_network(
        &self,
        who: &Principal,
        of: DefaultOf<'_>,
        spec: NetworkSpec,
    ) -> Result<DefaultNetwork, ServiceError> {
        let template = self.template_of(who, of).await?;
        let network = self.handle.core.network()?;
        // As it was written: where its secrets may go is looked up for each sandbox.
        let kept = Settings::unbound(spec.clone());
        network.new_settings(&who.workspace, None, Some(spec), None).await?;
        let record = NetworkRecord { settings: kept.to_json(), names: String::new() };
        let subject = subject(&who.workspace, template.as_deref());
        self.store().put_network(&subject, &record).await.map_err(store_error)?;
        let from = if template.is_some() { "template" } else { "workspace" };
        Ok(DefaultNetwork { from, spec: kept.spec })
    }

    /// Forgets it: the next wider one counts again.
    pub async fn remove_default_network(&self, who: &Principal, of: DefaultOf<'_>) -> Result<(), ServiceError> {
        let template = self.template_of(who, of).await?;
        let subject = subject(&who.workspace, template.as_deref());
        self.store().remove_network(&subject).await.map(drop).map_err(store_error)
    }

    async fn template_of(&self, who: &Principal, of: DefaultOf<'_>) -> Result<Option<String>, ServiceError> {
        match of {
            DefaultOf::Workspace => Ok(None),
            DefaultOf::Template(name) => Ok(Some(self.template(who, name).await?.name)),
        }
    }
}
