//! Secrets: kept sealed or made when they are needed, given to the gateway alone.

use std::{collections::BTreeMap, sync::Arc};

use async_trait::async_trait;
use futures::FutureExt as _;
use jiff::Timestamp;
use stockade_gateway::{
    Fetcher,
    broker::{self, SecretError, SecretProvider},
    policy::{NamePattern, any_matches},
};
use stockade_model::{LABEL_KEY, SECRET_NAME, Secret, WorkspaceId};
use stockade_store::{NewSecret, SecretRecord, Store};
use tracing::error;

use super::minting::{Asked, Cache, Key, MintedSecret, Minter, OAuthClient, SharedBy};
use crate::{
    Principal, Service, ServiceError,
    error::{check_name, store_error},
};

const MOST_HOSTS: usize = 256;
const LONGEST_VALUE: usize = 64 << 10;
const MOST_LABELS: usize = 32;
const LONGEST_LABEL: usize = 128;
const LONGEST_LABEL_VALUE: usize = 1024;
const LONGEST_LABELS: usize = 8192;

/// The label that tells the gateway whose sandbox it is.
pub(super) const WORKSPACE: &str = "workspace";

/// A secret to be kept.
#[derive(Clone, Debug)]
pub struct SecretRequest {
    /// Its name.
    pub name: String,
    /// Where it may go; name patterns, or `*`.
    pub hosts: Vec<String>,
    /// Its value, or what its values are got with.
    pub content: SecretContent,
    /// Labels; `None`: as they are, or none.
    pub metadata: Option<BTreeMap<String, String>>,
}

/// What is kept of a secret.
#[derive(Clone, Debug)]
pub enum SecretContent {
    /// Its value.
    Value(Secret),
    /// A client whose access tokens are the values.
    OAuth {
        /// The client.
        client: OAuthClient,
        /// The client's secret.
        client_secret: Secret,
    },
}

/// A secret as it is shown: without a value.
#[derive(Clone, Debug)]
pub struct SecretInfo {
    /// Its id, which no later secret of the same name has; the operator's have none.
    pub id: Option<String>,
    /// Its name.
    pub name: String,
    /// Counts up with each change.
    pub version: u64,
    /// Where it may go.
    pub hosts: Vec<String>,
    /// `value`, `oauth`; of the operator's: `command`, `callback`.
    pub source: &'static str,
    /// The client, where there is one.
    pub oauth: Option<OAuthClient>,
    /// Labels.
    pub metadata: BTreeMap<String, String>,
    /// When it was first written; none: by the operator.
    pub created_at: Option<Timestamp>,
    /// When it was last written.
    pub updated_at: Option<Timestamp>,
}

/// Whether a text can be a secret's name.
///
/// # Errors
/// It cannot.
pub fn check_secret_name(name: &str) -> Result<(), ServiceError> {
    check_name("name", SECRET_NAME, name)
}

fn check_hosts(hosts: &[String]) -> Result<(), ServiceError> {
    let invalid = |problem: String| ServiceError::Invalid { field: "hosts", problem };
    if hosts.is_empty() || hosts.len() > MOST_HOSTS {
        let problem = format!("must name 1 to {MOST_HOSTS} hosts the secret may be sent to, or \"*\" for all");
        return Err(invalid(problem));
    }
    for host in hosts {
        NamePattern::parse(host).map_err(|error| invalid(format!("is refused: {error}")))?;
    }
    Ok(())
}

fn check_metadata(metadata: &BTreeMap<String, String>) -> Result<(), ServiceError> {
    let invalid = |problem: String| Err(ServiceError::Invalid { field: "metadata", problem });
    if metadata.len() > MOST_LABELS {
        return invalid(format!("has {} entries, the most is {MOST_LABELS}", metadata.len()));
    }
    metadata.keys().try_for_each(|key| check_name("metadata", LABEL_KEY, key))?;
    if metadata.keys().any(|key| key.len() > LONGEST_LABEL) {
        return invalid(format!("has a key that is longer than {LONGEST_LABEL} bytes"));
    }
    if metadata.values().any(|value| value.len() > LONGEST_LABEL_VALUE) {
        return invalid(format!("has a value that is longer than {LONGEST_LABEL_VALUE} bytes"));
    }
    if metadata.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>() > LONGEST_LABELS {
        return invalid(format!("is longer than {LONGEST_LABELS} bytes in all"));
    }
    Ok(())
}

fn check_text(field: &'static str, value: &Secret) -> Result<(), ServiceError> {
    let invalid = |problem: String| ServiceError::Invalid { field, problem };
    broker::check_value(value).map_err(|problem| invalid(format!("is refused: {problem}")))?;
    if value.expose().len() > LONGEST_VALUE {
        return Err(invalid(format!("is longer than {LONGEST_VALUE} bytes")));
    }
    Ok(())
}

/// Gives the gateway values.
pub(super) struct Provider {
    store: Store,
    /// The operator's own, which no workspace's can stand in for.
    minters: Arc<BTreeMap<String, Arc<Minter>>>,
    fetcher: Arc<Fetcher>,
    cache: Arc<Cache>,
}

/// Checks the operator's minted secrets.
pub(super) fn minters(written: BTreeMap<String, MintedSecret>) -> Result<BTreeMap<String, Arc<Minter>>, String> {
    written.into_iter().map(|(name, config)| Ok((name.clone(), Minter::new(&name, config)?))).collect()
}

impl Provider {
    pub(super) fn new(store: Store, minters: Arc<BTreeMap<String, Arc<Minter>>>, fetcher: Fetcher) -> Self {
        Self { store, minters, fetcher: Arc::new(fetcher), cache: Cache::new() }
    }

    /// A value of the operator's.
    async fn minted(
        &self,
        minter: &Arc<Minter>,
        workspace: WorkspaceId,
        request: &broker::SecretRequest,
    ) -> Result<Secret, SecretError> {
        let name = &request.secret;
        if !minter.is_for(&workspace) {
            return Err(SecretError::Unknown(name.clone()));
        }
        allow(name, &minter.config.hosts, &request.host)?;
        let shared_by = &minter.config.shared_by;
        let (metadata, said) = match shared_by {
            SharedBy::Sandbox => (Some(self.metadata(&workspace, request).await?), None),
            SharedBy::Metadata(key) => {
                let said = self.metadata(&workspace, request).await?.remove(key).ok_or_else(|| untold(name, key))?;
                (Some(BTreeMap::from([(key.clone(), said.clone())])), Some(said))
            }
            SharedBy::Workspace | SharedBy::Deployment => (None, None),
        };
        let key = Key {
            secret: name.clone(),
            version: 0,
            workspace: (*shared_by != SharedBy::Deployment).then_some(workspace),
            sandbox: (*shared_by == SharedBy::Sandbox).then(|| request.sandbox.clone()),
            said,
            host: Some(request.host.clone()),
        };
        let asked = Asked {
            secret: name.clone(),
            host: request.host.clone(),
            workspace: key.workspace.clone(),
            sandbox: key.sandbox.clone(),
            metadata,
        };
        let (minter, fetcher) = (Arc::clone(minter), Arc::clone(&self.fetcher));
        let make = || async move { minter.make(&fetcher, &asked).await }.boxed();
        self.cache.value(&request.sandbox, key, make).await
    }

    async fn metadata(
        &self,
        workspace: &WorkspaceId,
        request: &broker::SecretRequest,
    ) -> Result<BTreeMap<String, String>, SecretError> {
        let sandbox = self.store.sandbox(workspace, &request.sandbox).await;
        let sandbox = sandbox.map_err(|problem| unreadable(&request.secret, &problem))?;
        sandbox.map(|sandbox| sandbox.metadata).ok_or_else(|| SecretError::Forbidden(request.secret.clone()))
    }

    /// An access token.
    async fn token(
        &self,
        record: &SecretRecord,
        client_secret: Secret,
        workspace: WorkspaceId,
        request: &broker::SecretRequest,
    ) -> Result<Secret, SecretError> {
        let client: OAuthClient =
            serde_json::from_str(&record.origin).map_err(|problem| unreadable(&record.name, &problem))?;
        let key = Key {
            secret: record.name.clone(),
            version: record.version,
            workspace: Some(workspace),
            sandbox: None,
            said: None,
            host: None,
        };
        let fetcher = Arc::clone(&self.fetcher);
        let make = || async move { client.make(&fetcher, &client_secret).await }.boxed();
        self.cache.value(&request.sandbox, key, make).await
    }
}

#[async_trait]
impl SecretProvider for Provider {
    async fn value(&self, request: &broker::SecretRequest) -> Result<Secret, SecretError> {
        let name = &request.secret;
        let workspace = request.owner.get(WORKSPACE).and_then(|id| id.parse::<WorkspaceId>().ok());
        let workspace = workspace.ok_or_else(|| SecretError::Forbidden(name.clone()))?;
        if let Some(minter) = self.minters.get(name) {
            return self.minted(minter, workspace, request).await;
        }
        let found = self.store.secret(&workspace, name).await.map_err(|problem| unreadable(name, &problem))?;
        let (record, kept) = found.ok_or_else(|| SecretError::Unknown(name.clone()))?;
        // The hosts as they are now, whatever they were when the policy was written.
        allow(name, &record.hosts, &request.host)?;
        if record.origin.is_empty() { Ok(kept) } else { self.token(&record, kept, workspace, request).await }
    }
}

fn allow(name: &str, hosts: &[String], host: &str) -> Result<(), SecretError> {
    if any_matches(hosts, host) == Ok(true) { Ok(()) } else { Err(SecretError::Forbidden(name.to_owned())) }
}

/// Nothing tells whose value it should be.
fn untold(name: &str, key: &str) -> SecretError {
    let problem = format!("it is made per `{key}` of a sandbox's metadata, and this one's has none");
    SecretError::Unavailable { name: name.to_owned(), problem }
}

fn unreadable(name: &str, problem: &(dyn std::error::Error + 'static)) -> SecretError {
    error!(secret = name, error = problem, "a secret cannot be read");
    SecretError::Unavailable { name: name.to_owned(), problem: "it cannot be read".to_owned() }
}

#[expect(clippy::missing_errors_doc, reason = "as for the other verbs")]
impl Service {
    /// Keeps a secret, or its next value; sandboxes that use it send the new one from now on.
    pub async fn put_secret(&self, who: &Principal, request: SecretRequest) -> Result<SecretInfo, ServiceError> {
        let (origin, value) = self.read_secret(&request)?;
        let now = self.handle.core.now();
        let record = self.store().put_secret(&who.workspace, &written(&request, &origin, &value), now).await;
        Ok(kept_info(record.map_err(store_error)?))
    }

    /// Keeps a secret whose name is free.
    pub async fn create_secret(&self, who: &Principal, request: SecretRequest) -> Result<SecretInfo, ServiceError> {
        let (origin, value) = self.read_secret(&request)?;
        let now = self.handle.core.now();
        let record = self.store().insert_secret(&who.workspace, &written(&request, &origin, &value), now).await;
        let record = record.map_err(store_error)?;
        record.map(kept_info).ok_or(ServiceError::SecretExists { name: request.name })
    }

    /// Gives a secret, named by its id or name, its next value and, where there are any, new labels. It may go where it
    /// might go before.
    pub async fn update_secret(
        &self,
        who: &Principal,
        reference: &str,
        value: Secret,
        metadata: Option<BTreeMap<String, String>>,
    ) -> Result<SecretInfo, ServiceError> {
        check_text("value", &value)?;
        metadata.as_ref().map(check_metadata).transpose()?;
        let found = self.find_secret(who, reference).await?;
        let Some(id) = found.id.as_deref().filter(|_| found.oauth.is_none()) else {
            let problem = format!("is not kept but made ({}): it cannot be given", found.source);
            return Err(ServiceError::Invalid { field: "value", problem });
        };
        let place = (id, found.name.as_str());
        let now = self.handle.core.now();
        let record = self.store().update_secret(&who.workspace, place, &value, metadata.as_ref(), now).await;
        record.map_err(store_error)?.map(kept_info).ok_or_else(|| not_found(reference))
    }

    /// One secret by its id or name, without its value.
    pub async fn find_secret(&self, who: &Principal, reference: &str) -> Result<SecretInfo, ServiceError> {
        if self.minters().is_some_and(|all| all.contains_key(reference)) {
            return self.secret(who, reference).await;
        }
        let found = self.store().find_secret(&who.workspace, reference).await.map_err(store_error)?;
        found.map(kept_info).ok_or_else(|| not_found(reference))
    }

    /// The secrets the workspace keeps, by name: those after `after`, at most `limit`.
    pub async fn kept_secrets(
        &self,
        who: &Principal,
        after: &str,
        limit: u32,
    ) -> Result<Vec<SecretInfo>, ServiceError> {
        let kept = self.store().secrets_after(&who.workspace, after, limit).await.map_err(store_error)?;
        Ok(kept.into_iter().map(kept_info).collect())
    }

    /// Checks a secret to be kept: where its values come from, and what is sealed.
    fn read_secret(&self, request: &SecretRequest) -> Result<(String, Secret), ServiceError> {
        check_secret_name(&request.name)?;
        self.refuse_operators(&request.name)?;
        check_hosts(&request.hosts)?;
        request.metadata.as_ref().map(check_metadata).transpose()?;
        match &request.content {
            SecretContent::Value(value) => {
                check_text("value", value)?;
                Ok((String::new(), value.clone()))
            }
            SecretContent::OAuth { client, client_secret } => {
                client.check()?;
                check_text("client_secret", client_secret)?;
                let origin = serde_json::to_string(client).expect("texts and no failing serialisers");
                Ok((origin, client_secret.clone()))
            }
        }
    }

    /// The secrets the caller's sandboxes can use, without values.
    pub async fn secrets(&self, who: &Principal) -> Result<Vec<SecretInfo>, ServiceError> {
        let kept = self.store().secrets(&who.workspace).await.map_err(store_error)?;
        let minters = self.minters();
        let hidden = |record: &SecretRecord| minters.is_some_and(|all| all.contains_key(&record.name));
        let mut all: Vec<_> = kept.into_iter().filter(|record| !hidden(record)).map(kept_info).collect();
        let ours = minters.into_iter().flatten().filter(|(_, minter)| minter.is_for(&who.workspace));
        all.extend(ours.map(|(name, minter)| minted_info(name, minter)));
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// One secret, without its value.
    pub async fn secret(&self, who: &Principal, name: &str) -> Result<SecretInfo, ServiceError> {
        if let Some(minter) = self.minters().and_then(|all| all.get(name)) {
            return if minter.is_for(&who.workspace) { Ok(minted_info(name, minter)) } else { Err(not_found(name)) };
        }
        let found = self.store().secret(&who.workspace, name).await.map_err(store_error)?;
        found.map(|(record, _)| kept_info(record)).ok_or_else(|| not_found(name))
    }

    /// Forgets a secret. Requests that need it fail from now on.
    pub async fn remove_secret(&self, who: &Principal, name: &str) -> Result<(), ServiceError> {
        self.refuse_operators(name)?;
        let was_there = self.store().remove_secret(&who.workspace, name).await.map_err(store_error)?;
        if was_there { Ok(()) } else { Err(not_found(name)) }
    }

    fn minters(&self) -> Option<&BTreeMap<String, Arc<Minter>>> {
        self.handle.core.network.as_ref().map(|network| &*network.minters)
    }

    /// A workspace's secret under the name of an operator's one would never be used.
    fn refuse_operators(&self, name: &str) -> Result<(), ServiceError> {
        match self.minters().is_some_and(|all| all.contains_key(name)) {
            true => Err(ServiceError::OperatorsSecret { name: name.to_owned() }),
            false => Ok(()),
        }
    }
}

fn written<'a>(request: &'a SecretRequest, origin: &'a str, value: &'a Secret) -> NewSecret<'a> {
    let SecretRequest { name, hosts, metadata, .. } = request;
    NewSecret { name, hosts, origin, metadata: metadata.as_ref(), value }
}

fn kept_info(record: SecretRecord) -> SecretInfo {
    let oauth: Option<OAuthClient> = serde_json::from_str(&record.origin).ok();
    SecretInfo {
        id: Some(record.id),
        name: record.name,
        version: record.version,
        hosts: record.hosts,
        source: if oauth.is_some() { "oauth" } else { "value" },
        oauth,
        metadata: record.metadata,
        created_at: Some(record.created_at),
        updated_at: Some(record.updated_at),
    }
}

fn minted_info(name: &str, minter: &Minter) -> SecretInfo {
    SecretInfo {
        id: None,
        name: name.to_owned(),
        version: 0,
        hosts: minter.config.hosts.clone(),
        source: minter.kind(),
        oauth: None,
        metadata: BTreeMap::new(),
        created_at: None,
        updated_at: None,
    }
}

pub(super) fn not_found(name: &str) -> ServiceError {
    ServiceError::SecretNotFound { name: name.to_owned() }
}
