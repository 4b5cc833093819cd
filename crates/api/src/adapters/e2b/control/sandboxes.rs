//! Create, info, timeout, kill.
//!
//! There are two generations of create. The first makes unsecured sandboxes unless told
//! otherwise and lives 15 seconds by default; the second always secures and lives 5 minutes.

use std::{collections::BTreeMap, time::Duration};

use axum::{
    Extension, Json,
    extract::{Path, State},
};
use http::{HeaderMap, StatusCode};
use jiff::Timestamp;
use serde::{Deserialize, Serialize, de::IgnoredAny};
use serde_json::Value;
use stockade_model::{OnTimeout, Sandbox, SandboxId, SandboxState, shortened};
use stockade_service::{CreateSandbox, PauseMode, Previews, Principal};

use super::{
    super::{
        ENVD_VERSION,
        access::{OPEN_LABEL, is_secured},
        error::HttpError,
    },
    Body, JsonResult,
    builds::full_name,
    lifecycle::is_paused,
    network::{self, Network, NetworkView},
    sandbox_id,
};
use crate::AppState;

pub(super) const DEFAULT_TIMEOUT_V1: i64 = 15;
pub(super) const DEFAULT_TIMEOUT_V2: i64 = 300;

/// Deprecated, but every client demands some text.
const CLIENT_ID: &str = "stockade";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct NewSandbox {
    #[serde(rename = "templateID")]
    template_id: String,
    timeout: Option<i64>,
    auto_pause: Option<bool>,
    auto_pause_memory: Option<bool>,
    auto_resume: Option<AutoResume>,
    secure: Option<bool>,
    #[serde(rename = "allow_internet_access", alias = "allowInternetAccess")]
    allow_internet_access: Option<bool>,
    network: Option<Network>,
    metadata: Option<BTreeMap<String, String>>,
    env_vars: Option<BTreeMap<String, String>>,
    /// The client itself starts `mcp-gateway` with it, once there is the sandbox.
    #[serde(rename = "mcp")]
    _mcp: Option<BTreeMap<String, IgnoredAny>>,
    iam: Option<Value>,
    volume_mounts: Option<Vec<Value>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AutoResume {
    enabled: bool,
}

impl NewSandbox {
    /// Refuses what this release cannot honour: a sandbox that quietly lacks it would be worse.
    fn check(&self) -> Result<(), HttpError> {
        let filled = |value: &Option<Value>| {
            value.as_ref().is_some_and(|value| !value.is_null() && value != &Value::Object(serde_json::Map::new()))
        };
        let asked = [
            (filled(&self.iam), "iam", "leave it out and pass what the sandbox needs in envVars"),
            (
                self.volume_mounts.as_ref().is_some_and(|mounts| !mounts.is_empty()),
                "volumeMounts",
                "leave it out and upload the files",
            ),
        ];
        match asked.into_iter().find(|(asked, ..)| *asked) {
            Some((_, field, instead)) => {
                Err(HttpError::bad_request(format!("{field} is not supported by this release of Stockade; {instead}")))
            }
            None => Ok(()),
        }
    }

    /// A timeout that keeps the disk alone leads to a reboot, which no request would expect to set off.
    fn on_timeout(&self) -> Result<OnTimeout, HttpError> {
        let pauses = self.auto_pause == Some(true);
        let resumes = self.auto_resume.as_ref().is_some_and(|auto| auto.enabled);
        match self.auto_pause_memory {
            Some(false) if !pauses => Err(HttpError::bad_request("autoPauseMemory false needs autoPause true")),
            Some(false) if resumes => Err(HttpError::bad_request(
                "autoPauseMemory false does not go with autoResume: coming back is a reboot, which only connect does",
            )),
            Some(false) => Ok(OnTimeout::Stop),
            _ if pauses => Ok(OnTimeout::Pause),
            _ => Ok(OnTimeout::Kill),
        }
    }

    fn request(self, default_timeout: i64, secured: bool, headers: &HeaderMap) -> Result<CreateSandbox, HttpError> {
        self.check()?;
        let on_timeout = self.on_timeout()?;
        let timeout = self.timeout.unwrap_or(default_timeout);
        let lifetime = u64::try_from(timeout).ok().filter(|seconds| *seconds > 0);
        let lifetime = lifetime
            .ok_or_else(|| HttpError::bad_request(format!("timeout is {timeout}; it must be over 0 seconds")))?;
        let mut metadata = self.metadata.unwrap_or_default();
        if metadata.contains_key(OPEN_LABEL) {
            return Err(HttpError::bad_request(format!("metadata key '{OPEN_LABEL}' is reserved")));
        }
        let closed = self.network.as_ref().is_some_and(network::Network::is_closed);
        if closed && !secured {
            return Err(HttpError::bad_request("allowPublicTraffic false needs a secured sandbox: set secure to true"));
        }
        if !secured {
            metadata.insert(OPEN_LABEL.to_owned(), "true".to_owned());
        }
        Ok(CreateSandbox {
            template: full_name(&self.template_id)?,
            lifetime: Duration::from_secs(lifetime),
            metadata,
            env: self.env_vars.unwrap_or_default(),
            network: network::spec(self.allow_internet_access, self.network)?,
            on_timeout,
            auto_resume: self.auto_resume.is_some_and(|auto| auto.enabled),
            idempotency_key: idempotency_key(headers)?,
            ..CreateSandbox::default()
        })
    }
}

/// `[namespace/]alias[:tag]` as a name of ours: trimmed, lower case, the tag everyone has left out.
pub(super) fn template_name(text: &str) -> Result<String, HttpError> {
    let name = text.trim().to_ascii_lowercase();
    match name.split_once(':') {
        None => Ok(our_name(&name).to_owned()),
        Some((name, "default")) => Ok(our_name(name).to_owned()),
        Some((name, tag)) => {
            let message = format!("tag '{}' does not exist for template '{}'", shortened(tag), shortened(name));
            Err(HttpError::new(StatusCode::NOT_FOUND, message))
        }
    }
}

/// Templates that E2B's clients name by themselves have other names here.
fn our_name(name: &str) -> &str {
    if name == "code-interpreter-v1" { "code-interpreter" } else { name }
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, HttpError> {
    let Some(value) = headers.get("idempotency-key") else { return Ok(None) };
    let key = value.to_str().unwrap_or_default();
    let valid = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    if key.is_empty() || key.len() > 255 || !key.bytes().all(valid) {
        return Err(HttpError::bad_request("Idempotency-Key must be 1 to 255 letters, digits and dashes"));
    }
    Ok(Some(key.to_owned()))
}

/// `Sandbox`: what create, connect and fork answer.
#[derive(Serialize)]
pub(super) struct SandboxReply {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "clientID")]
    client_id: &'static str,
    alias: String,
    #[serde(rename = "envdVersion")]
    envd_version: &'static str,
    #[serde(rename = "envdAccessToken", skip_serializing_if = "Option::is_none")]
    envd_access_token: Option<String>,
    #[serde(rename = "trafficAccessToken")]
    traffic_access_token: Option<String>,
    domain: Option<String>,
}

impl SandboxReply {
    pub(super) async fn of(state: &AppState, sandbox: &Sandbox) -> Result<Self, HttpError> {
        let closed = state.service.ingress(&sandbox.id).await?.previews == Previews::Token;
        let traffic_token = || state.service.traffic_token(&sandbox.id).expose().to_owned();
        Ok(Self {
            template_id: sandbox.template_name.clone(),
            sandbox_id: sandbox.id.to_string(),
            client_id: CLIENT_ID,
            alias: sandbox.template_name.clone(),
            envd_version: ENVD_VERSION,
            envd_access_token: token(sandbox),
            traffic_access_token: closed.then(traffic_token),
            domain: None,
        })
    }
}

fn token(sandbox: &Sandbox) -> Option<String> {
    is_secured(sandbox).then(|| sandbox.access_token.expose().to_owned())
}

/// `ListedSandbox`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ListedSandbox {
    #[serde(rename = "templateID")]
    template_id: String,
    alias: String,
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "clientID")]
    client_id: &'static str,
    started_at: Timestamp,
    end_at: Timestamp,
    cpu_count: u32,
    #[serde(rename = "memoryMB")]
    memory_mb: u64,
    #[serde(rename = "diskSizeMB")]
    disk_size_mb: u64,
    metadata: BTreeMap<String, String>,
    state: &'static str,
    envd_version: &'static str,
    volume_mounts: [(); 0],
}

impl ListedSandbox {
    pub(super) fn of(sandbox: &Sandbox) -> Self {
        let mut metadata = sandbox.metadata.clone();
        metadata.remove(OPEN_LABEL);
        Self {
            template_id: sandbox.template_name.clone(),
            alias: sandbox.template_name.clone(),
            sandbox_id: sandbox.id.to_string(),
            client_id: CLIENT_ID,
            started_at: sandbox.started_at.unwrap_or(sandbox.created_at),
            end_at: sandbox.deadline,
            cpu_count: sandbox.shape.vcpus,
            memory_mb: sandbox.shape.memory_mib,
            disk_size_mb: sandbox.shape.disk_mib,
            metadata,
            state: if is_paused(sandbox.state) { "paused" } else { "running" },
            envd_version: ENVD_VERSION,
            volume_mounts: [],
        }
    }
}

/// `SandboxDetail`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SandboxDetail {
    #[serde(flatten)]
    listed: ListedSandbox,
    #[serde(skip_serializing_if = "Option::is_none")]
    envd_access_token: Option<String>,
    allow_internet_access: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    network: Option<NetworkView>,
    domain: Option<String>,
    lifecycle: Lifecycle,
    /// What the pause it is in has kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pause_mode: Option<&'static str>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Lifecycle {
    auto_resume: bool,
    on_timeout: &'static str,
}

pub(super) async fn create_v1(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    headers: HeaderMap,
    Body(new): Body<NewSandbox>,
) -> Result<(StatusCode, Json<SandboxReply>), HttpError> {
    let new = with_secrets(&state, &who, new).await?;
    let secured = new.secure.unwrap_or(false);
    create(&state, &who, new.request(DEFAULT_TIMEOUT_V1, secured, &headers)?).await
}

pub(super) async fn create_v2(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    headers: HeaderMap,
    Body(new): Body<NewSandbox>,
) -> Result<(StatusCode, Json<SandboxReply>), HttpError> {
    let new = with_secrets(&state, &who, new).await?;
    if new.secure == Some(false) {
        return Err(HttpError::bad_request(
            "secure cannot be false: sandboxes made by /v2/sandboxes are always secured",
        ));
    }
    create(&state, &who, new.request(DEFAULT_TIMEOUT_V2, true, &headers)?).await
}

async fn with_secrets(state: &AppState, who: &Principal, mut new: NewSandbox) -> Result<NewSandbox, HttpError> {
    if let Some(network) = &mut new.network {
        super::secrets::spell(state, who, network).await?;
    }
    Ok(new)
}

async fn create(
    state: &AppState,
    who: &Principal,
    request: CreateSandbox,
) -> Result<(StatusCode, Json<SandboxReply>), HttpError> {
    let sandbox = state.service.create(who, request).await?;
    Ok((StatusCode::CREATED, Json(SandboxReply::of(state, &sandbox).await?)))
}

/// A sandbox that still lives.
pub(super) async fn live(state: &AppState, who: &Principal, id: &SandboxId) -> Result<Sandbox, HttpError> {
    let sandbox = state.service.get(who, id).await?;
    match sandbox.ending {
        None => Ok(sandbox),
        Some(_) => Err(HttpError::sandbox_not_found(id.as_str())),
    }
}

pub(super) async fn info(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
) -> JsonResult<SandboxDetail> {
    let sandbox = live(&state, &who, &sandbox_id(&id)?).await?;
    let (allow_internet_access, network) = network::view(&state.service.network(&who, &sandbox.id).await?.spec);
    Ok(Json(SandboxDetail {
        listed: ListedSandbox::of(&sandbox),
        envd_access_token: token(&sandbox),
        allow_internet_access,
        network,
        domain: None,
        lifecycle: Lifecycle {
            auto_resume: sandbox.rules.auto_resume,
            on_timeout: if sandbox.rules.on_timeout == OnTimeout::Kill { "kill" } else { "pause" },
        },
        pause_mode: match sandbox.state {
            SandboxState::Paused => Some("full"),
            SandboxState::Stopped => Some("filesystem"),
            _ => None,
        },
    }))
}

pub(super) async fn kill(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
) -> Result<StatusCode, HttpError> {
    state.service.kill(&who, &sandbox_id(&id)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Timeout {
    timeout: i64,
}

pub(super) async fn set_timeout(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
    Body(Timeout { timeout }): Body<Timeout>,
) -> Result<StatusCode, HttpError> {
    let id = sandbox_id(&id)?;
    // Zero and below: at once.
    let seconds = u64::try_from(timeout).unwrap_or(0);
    if seconds == 0 {
        expire(&state, &who, &id).await?;
    } else {
        state.service.set_lifetime(&who, &id, Duration::from_secs(seconds)).await?;
    }
    Ok(StatusCode::NO_CONTENT)
}

/// What the timeout would do, now. One that is paused has no timeout to run out.
async fn expire(state: &AppState, who: &Principal, id: &SandboxId) -> Result<(), HttpError> {
    let sandbox = live(state, who, id).await?;
    let memory = match sandbox.rules.on_timeout {
        OnTimeout::Kill => {
            state.service.set_lifetime(who, id, Duration::ZERO).await?;
            return Ok(());
        }
        OnTimeout::Pause => true,
        OnTimeout::Stop => false,
    };
    if !is_paused(sandbox.state) {
        state.service.pause(who, id, PauseMode { memory, ..PauseMode::default() }).await?;
    }
    Ok(())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Refresh {
    duration: Option<u64>,
}

pub(super) async fn refresh(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
    Body(Refresh { duration }): Body<Refresh>,
) -> Result<StatusCode, HttpError> {
    let seconds = duration.unwrap_or(DEFAULT_TIMEOUT_V1.unsigned_abs());
    if seconds > 3600 {
        return Err(HttpError::bad_request(format!("duration is {seconds}; at most 3600 seconds are possible")));
    }
    let id = sandbox_id(&id)?;
    match seconds {
        0 => live(&state, &who, &id).await?,
        seconds => state.service.extend(&who, &id, Duration::from_secs(seconds)).await?,
    };
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::{super::parse, *};

    fn request(json: &str) -> Result<CreateSandbox, HttpError> {
        parse::<NewSandbox>(json.as_bytes())?.request(300, true, &HeaderMap::new())
    }

    #[test]
    fn what_both_generations_of_sdks_send_is_accepted() {
        for json in [
            r#"{"templateID":"base","timeout":300,"secure":true,"allow_internet_access":true}"#,
            r#"{"templateID":"base","metadata":{},"envVars":{}}"#,
            r#"{"templateID":"base"}"#,
            r#"{"templateID":"base","autoPauseMemory":true,"autoPause":false,"autoResume":{"enabled":false},"mcp":null,"network":{}}"#,
            r#"{"templateID":"base","mcp":{"exa":{"apiKey":"k"}}}"#,
            r#"{"templateID":" Base:default ","allow_internet_access":false}"#,
        ] {
            let request = request(json).unwrap_or_else(|error| panic!("{json}: {}", error.message));
            assert_eq!(request.template, "base");
        }
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_by_its_name() {
        for (field, value) in [
            ("network", r#"{"httpsPorts":[8443]}"#),
            ("mcp", r#""exa""#),
            ("iam", r#"{"tokens":{}}"#),
            ("volumeMounts", r#"[{"name":"v","path":"/v"}]"#),
            ("somethingNew", "1"),
        ] {
            let error = request(&format!(r#"{{"templateID":"base","{field}":{value}}}"#)).expect_err(field);
            assert_eq!(error.status, StatusCode::BAD_REQUEST);
            assert!(error.message.contains(field), "{}", error.message);
        }
    }

    #[test]
    fn what_happens_at_the_timeout_is_as_asked_for() {
        let plain = request(r#"{"templateID":"base"}"#).expect("valid");
        assert_eq!((plain.on_timeout, plain.auto_resume), (OnTimeout::Kill, false));
        let pausing = request(r#"{"templateID":"base","autoPause":true,"autoResume":{"enabled":true}}"#);
        let pausing = pausing.expect("valid");
        assert_eq!((pausing.on_timeout, pausing.auto_resume), (OnTimeout::Pause, true));
        let stopping = request(r#"{"templateID":"base","autoPause":true,"autoPauseMemory":false}"#).expect("valid");
        assert_eq!((stopping.on_timeout, stopping.auto_resume), (OnTimeout::Stop, false));
    }

    #[test]
    fn a_timeout_that_keeps_the_disk_alone_is_a_pause_that_nobody_undoes_by_accident() {
        for (with, reason) in [
            ("", "needs autoPause"),
            (r#","autoPause":false"#, "needs autoPause"),
            (r#","autoPause":true,"autoResume":{"enabled":true}"#, "does not go with autoResume"),
        ] {
            let error = request(&format!(r#"{{"templateID":"base","autoPauseMemory":false{with}}}"#)).expect_err(with);
            assert_eq!(error.status, StatusCode::BAD_REQUEST);
            assert!(error.message.contains(reason), "{}", error.message);
        }
    }

    #[test]
    fn timeouts_and_tags_that_make_no_sense_are_refused() {
        assert!(request(r#"{"templateID":"base","timeout":0}"#).is_err());
        assert!(request(r#"{"templateID":"base","timeout":-5}"#).is_err());
        assert_eq!(request(r#"{"templateID":"Mine:V9"}"#).expect("a tag").template, "mine:v9");
    }

    #[test]
    fn the_label_that_opens_a_sandbox_cannot_be_set_by_a_client() {
        let error = request(&format!(r#"{{"templateID":"base","metadata":{{"{OPEN_LABEL}":"true"}}}}"#));
        assert!(error.expect_err("reserved").message.contains("reserved"));
    }
}
