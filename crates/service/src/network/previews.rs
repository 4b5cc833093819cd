//! Who may look at a port of a sandbox from outside.
//!
//! A link's token is `<expiry>.<tag>`: seconds since the epoch in decimal, and a tag only this deployment can compute
//! over sandbox, port and expiry. Nothing of it is kept.

use std::time::Duration;

use http::HeaderValue;
use jiff::Timestamp;
use stockade_model::{SandboxId, Secret};

use super::{Previews, settings::masked_host};
use crate::{Principal, Service, ServiceError, error::store_error};

const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// How requests to a sandbox's ports are let in, and what they are changed to.
#[derive(Clone, Debug, Default)]
pub struct Ingress {
    /// Who may ask.
    pub previews: Previews,
    mask_request_host: Option<String>,
}

impl Ingress {
    /// What the server behind a port sees as `Host`, if not what was asked for.
    pub fn host_for(&self, port: u16) -> Option<HeaderValue> {
        self.mask_request_host.as_deref().and_then(|mask| masked_host(mask, port))
    }
}

/// A token that opens one port until a time.
#[derive(Clone, Debug)]
pub struct PreviewToken {
    /// The token.
    pub token: Secret,
    /// Until when.
    pub expires_at: Timestamp,
}

#[expect(clippy::missing_errors_doc, reason = "as for the other verbs")]
impl Service {
    /// A token for a port of a sandbox.
    pub async fn preview_token(
        &self,
        who: &Principal,
        id: &SandboxId,
        port: u16,
        lifetime: Duration,
    ) -> Result<PreviewToken, ServiceError> {
        self.get(who, id).await?;
        let invalid = |field, problem: String| Err(ServiceError::Invalid { field, problem });
        if port == 0 {
            return invalid("port", "must be 1 to 65535".to_owned());
        }
        if lifetime.is_zero() || lifetime > LONGEST {
            return invalid("lifetime", format!("must be over zero and at most {} s", LONGEST.as_secs()));
        }
        let expires = self.handle.core.now().as_second().saturating_add(lifetime.as_secs() as i64);
        let tag = self.store().preview_token(id, port, expires);
        let expires_at = Timestamp::from_second(expires).unwrap_or(Timestamp::MAX);
        Ok(PreviewToken { token: Secret::new(format!("{expires}.{}", tag.expose())), expires_at })
    }

    /// Whether a token opens a port of a sandbox now.
    pub fn check_preview_token(&self, id: &SandboxId, port: u16, token: &str) -> bool {
        let Some((expires, tag)) = token.split_once('.') else { return false };
        let Ok(expires) = expires.parse::<i64>() else { return false };
        // Exactly as it was written: a header is made of it again.
        let is_plain = token.len() < 80 && tag.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_plain
            && expires > self.handle.core.now().as_second()
            && self.store().preview_token(id, port, expires).matches(tag)
    }

    /// How requests to a sandbox's ports are let in. One that is not there is private.
    pub async fn ingress(&self, id: &SandboxId) -> Result<Ingress, ServiceError> {
        let Some(network) = &self.handle.core.network else { return Ok(Ingress::default()) };
        let record = self.store().network(id.as_str()).await.map_err(store_error)?;
        let Some(record) = record else { return Ok(Ingress::default()) };
        let spec = network.settings_of(Some(&record))?.spec;
        Ok(Ingress { previews: spec.previews, mask_request_host: spec.mask_request_host })
    }

    /// The token that opens a sandbox's ports where its network asks for one.
    pub fn traffic_token(&self, id: &SandboxId) -> Secret {
        self.store().traffic_token(id)
    }
}
