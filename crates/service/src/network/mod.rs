//! The network of all sandboxes: one gateway, one attachment per machine.
//!
//! ```text
//! request --> settings.rs (what the owner wrote, tokens) --> store, sealed
//!   or defaults.rs (template's, workspace's, operator's)
//!                  |
//!                  v layers: the operator's bounds, the sandbox's own policy
//! machine's NIC <--attach.rs--> gateway --asks--> secrets.rs (values) <-- minting/ (those that are made)
//!                                   \----tells--> audit.rs (records)
//! ```
//!
//! A machine's processors run only after it is attached, and it is attached only with its policy: there is no moment
//! without one. Settings are written before they are put in force; an attachment reads them again once it can be
//! found, so that a change at that very moment reaches it one way or the other.

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use serde::Deserialize;
use stockade_gateway::{
    Control, Fetcher, Gateway, GatewayConfig, Limits, Routes, UpstreamProxyConfig,
    policy::{Floor, Policy},
    tls_towards,
};
use stockade_model::{MachineId, SandboxId};
use stockade_store::Store;
use stockade_wire::machine::Authority;
use tokio_util::sync::CancellationToken;

use crate::ServiceError;

mod attach;
mod audit;
mod authority;
mod change;
mod defaults;
mod minting;
mod previews;
mod secrets;
mod settings;
mod verbs;

pub(crate) use attach::{Names, Told};
pub use audit::{AuditFilter, AuditLine};
pub use change::NetworkChange;
pub use defaults::{DefaultNetwork, DefaultOf};
pub use minting::{ClientAuth, MintedSecret, OAuthClient, SharedBy};
pub use previews::{Ingress, PreviewToken};
pub use secrets::{SecretContent, SecretInfo, SecretRequest, check_secret_name};
pub(crate) use settings::Settings;
pub use settings::{NetworkSpec, Previews, SecretUse};
pub use verbs::NetworkState;

/// The network as the operator has it: what the deployment's users start from and cannot leave.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NetworkConfig {
    /// What no policy opens or closes.
    pub floor: Floor,
    /// A policy all sandboxes are under, besides their own.
    pub bounds: Option<Policy>,
    /// The network of a sandbox whose request says nothing about it.
    pub default: NetworkSpec,
    /// What each sandbox may use.
    pub limits: Limits,
    /// Names that lead somewhere of the operator's choosing: `name` or `name:port` to `address` or `address:port`.
    pub routes: BTreeMap<String, String>,
    /// An HTTP proxy that everything but routes is dialled through.
    pub upstream_proxy: Option<UpstreamProxyConfig>,
    /// Secrets whose values are made by programs or callbacks of the operator's.
    pub secrets: BTreeMap<String, MintedSecret>,
    /// Files of certificates (PEM) to be trusted for hosts the gateway speaks to, besides the host's own.
    pub trusted_certificates: Vec<PathBuf>,
    /// How many days decisions are kept.
    pub keep_audit_days: u32,
    /// How many decisions are kept at most.
    pub keep_audit_records: u64,
}

impl Default for NetworkConfig {
    fn default() -> Self {
        Self {
            floor: Floor::default(),
            bounds: None,
            default: NetworkSpec::default(),
            limits: Limits::default(),
            routes: BTreeMap::new(),
            upstream_proxy: None,
            secrets: BTreeMap::new(),
            trusted_certificates: Vec::new(),
            keep_audit_days: 30,
            keep_audit_records: 1_000_000,
        }
    }
}

/// What all sandboxes' networks share.
pub(crate) struct Network {
    pub(crate) gateway: Gateway,
    pub(crate) audit: Arc<audit::Log>,
    pub(crate) keep_audit: (Duration, u64),
    /// The operator's secrets.
    minters: Arc<BTreeMap<String, Arc<minting::Minter>>>,
    store: Store,
    bounds: Option<Policy>,
    pub(crate) default: NetworkSpec,
    limits: Limits,
    /// For guests to trust.
    authority: Authority,
    attached: Mutex<HashMap<MachineId, Attached>>,
    /// Taken by whoever changes settings.
    changes: tokio::sync::Mutex<()>,
}

/// A machine's link in our hands.
struct Attached {
    sandbox: SandboxId,
    control: Control,
    stop: CancellationToken,
    /// The names as they are in the store.
    stored: u64,
}

impl Network {
    /// Gets ready: reads or makes the deployment's certificate authority.
    pub(crate) fn open(config: NetworkConfig, store: Store, directory: &std::path::Path) -> Result<Self, ServiceError> {
        let failed = |problem: String| ServiceError::Network { problem };
        let authority = authority::open_or_create(&directory.join("network-ca")).map_err(|e| failed(e.to_string()))?;
        let roots = authority::upstream_roots(&config.trusted_certificates).map_err(failed)?;
        let audit = audit::Log::new();
        let mut gateway = GatewayConfig::new(authority, roots);
        gateway.floor = config.floor;
        gateway.audit = Arc::clone(&audit) as _;
        if let Some(proxy) = &config.upstream_proxy {
            let tls =
                tls_towards(&gateway.upstream_roots, &[b"http/1.1"]).map_err(|error| failed(error.to_string()))?;
            gateway.upstream_proxy = Some(Arc::new(proxy.open(tls).map_err(failed)?));
        }
        gateway.routes = Routes::parse(&config.routes).map_err(|error| failed(error.to_string()))?;
        let minters = Arc::new(secrets::minters(config.secrets).map_err(failed)?);
        let fetcher = Fetcher::new(&gateway, config.bounds.as_ref());
        let fetcher = fetcher.map_err(|error| failed(crate::error::chain(&error)))?;
        gateway.secrets = Arc::new(secrets::Provider::new(store.clone(), Arc::clone(&minters), fetcher));
        let gateway = Gateway::new(gateway).map_err(|error| failed(crate::error::chain(&error)))?;
        let authority = Authority {
            certificate: gateway.certificate_pem().to_owned(),
            subject_hash: gateway.certificate_subject_hash().unwrap_or_default(),
        };
        let days = Duration::from_secs(u64::from(config.keep_audit_days) * 24 * 3600);
        let network = Self {
            gateway,
            audit,
            keep_audit: (days, config.keep_audit_records),
            minters,
            store,
            bounds: config.bounds,
            default: config.default,
            limits: config.limits,
            authority,
            attached: Mutex::default(),
            changes: tokio::sync::Mutex::default(),
        };
        network
            .check(&Settings::first(network.default.clone(), BTreeMap::new())?)
            .map_err(|error| failed(format!("the operator's settings: {error}")))?;
        Ok(network)
    }

    /// The layers a sandbox is judged by, outermost first.
    pub(crate) fn layers(&self, settings: &Settings) -> Result<Vec<Policy>, ServiceError> {
        Ok(self.bounds.iter().cloned().chain([settings.policy()?]).collect())
    }

    /// Whether the gateway can honour them.
    pub(crate) fn check(&self, settings: &Settings) -> Result<(), ServiceError> {
        self.gateway.check_policy(&self.layers(settings)?).map_err(|error| settings.refused(error))
    }

    /// The same of what somebody has just written.
    pub(crate) fn check_new(&self, settings: &Settings) -> Result<(), ServiceError> {
        self.gateway.check_new_policy(&self.layers(settings)?).map_err(|error| settings.refused(error))
    }

    fn attached(&self) -> MutexGuard<'_, HashMap<MachineId, Attached>> {
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The way to a sandbox's link, if it has one now.
    pub(crate) fn control(&self, sandbox: &SandboxId) -> Option<Control> {
        self.attached().values().find(|attached| attached.sandbox == *sandbox).map(|attached| attached.control.clone())
    }
}
