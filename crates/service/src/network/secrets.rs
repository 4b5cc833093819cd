//! Secrets: kept sealed, given to the gateway alone.

use async_trait::async_trait;
use stockade_gateway::{
    broker::{self, SecretError, SecretProvider},
    policy::{NamePattern, any_matches},
};
use stockade_model::{Secret, WorkspaceId};
use stockade_store::{SecretRecord, Store};
use tracing::error;

use crate::{Principal, Service, ServiceError, error::store_error};

const MOST_HOSTS: usize = 256;
const LONGEST_NAME: usize = 128;
const LONGEST_VALUE: usize = 64 << 10;

/// The label that tells the gateway whose sandbox it is.
pub(super) const WORKSPACE: &str = "workspace";

/// A secret to be kept.
#[derive(Clone, Debug)]
pub struct SecretRequest {
    /// Its name.
    pub name: String,
    /// Where it may go; name patterns, or `*`.
    pub hosts: Vec<String>,
    /// Its value.
    pub value: Secret,
}

/// Whether a text can be a secret's name.
///
/// # Errors
/// It cannot.
pub fn check_secret_name(name: &str) -> Result<(), ServiceError> {
    let known = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    if name.is_empty() || name.len() > LONGEST_NAME || !name.bytes().all(known) {
        let problem = format!("must have 1 to {LONGEST_NAME} characters of A-Z a-z 0-9 _ - .");
        return Err(ServiceError::Invalid { field: "name", problem });
    }
    Ok(())
}

/// Gives the gateway values.
pub(super) struct Provider {
    store: Store,
}

impl Provider {
    pub(super) fn new(store: Store) -> Self {
        Self { store }
    }
}

#[async_trait]
impl SecretProvider for Provider {
    async fn value(&self, request: &broker::SecretRequest) -> Result<Secret, SecretError> {
        let name = &request.secret;
        let workspace = request.owner.get(WORKSPACE).and_then(|id| id.parse::<WorkspaceId>().ok());
        let workspace = workspace.ok_or_else(|| SecretError::Forbidden(name.clone()))?;
        match self.store.secret(&workspace, name).await {
            Ok(None) => Err(SecretError::Unknown(name.clone())),
            // The hosts as they are now, whatever they were when the policy was written.
            Ok(Some((record, value))) => match any_matches(&record.hosts, &request.host) {
                Ok(true) => Ok(value),
                _ => Err(SecretError::Forbidden(name.clone())),
            },
            Err(problem) => {
                error!(secret = name, error = &problem as &dyn std::error::Error, "a secret cannot be read");
                Err(SecretError::Unavailable { name: name.clone(), problem: "it cannot be read".to_owned() })
            }
        }
    }
}

#[expect(clippy::missing_errors_doc, reason = "as for the other verbs")]
impl Service {
    /// Keeps a secret, or its next value; sandboxes that use it send the new one from now on.
    pub async fn put_secret(&self, who: &Principal, request: SecretRequest) -> Result<SecretRecord, ServiceError> {
        check_secret_name(&request.name)?;
        let invalid = |field, problem: String| ServiceError::Invalid { field, problem };
        broker::check_value(&request.value).map_err(|problem| invalid("value", format!("is refused: {problem}")))?;
        if request.value.expose().len() > LONGEST_VALUE {
            return Err(invalid("value", format!("is longer than {LONGEST_VALUE} bytes")));
        }
        if request.hosts.is_empty() || request.hosts.len() > MOST_HOSTS {
            let problem = format!("must name 1 to {MOST_HOSTS} hosts the secret may be sent to, or \"*\" for all");
            return Err(invalid("hosts", problem));
        }
        for host in &request.hosts {
            NamePattern::parse(host).map_err(|error| invalid("hosts", format!("is refused: {error}")))?;
        }
        let now = self.handle.core.now();
        let SecretRequest { name, hosts, value } = request;
        self.store().put_secret(&who.workspace, &name, &hosts, &value, now).await.map_err(store_error)
    }

    /// The secrets there are, without values.
    pub async fn secrets(&self, who: &Principal) -> Result<Vec<SecretRecord>, ServiceError> {
        self.store().secrets(&who.workspace).await.map_err(store_error)
    }

    /// One secret, without its value.
    pub async fn secret(&self, who: &Principal, name: &str) -> Result<SecretRecord, ServiceError> {
        let found = self.store().secret(&who.workspace, name).await.map_err(store_error)?;
        found.map(|(record, _)| record).ok_or_else(|| not_found(name))
    }

    /// Forgets a secret. Requests that need it fail from now on.
    pub async fn remove_secret(&self, who: &Principal, name: &str) -> Result<(), ServiceError> {
        let was_there = self.store().remove_secret(&who.workspace, name).await.map_err(store_error)?;
        if was_there { Ok(()) } else { Err(not_found(name)) }
    }
}

pub(super) fn not_found(name: &str) -> ServiceError {
    ServiceError::SecretNotFound { name: name.chars().take(LONGEST_NAME).collect() }
}
