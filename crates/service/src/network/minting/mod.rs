//! Secrets whose values are made when they are needed and live for a while.
//!
//! ```text
//! request needs one ──> cache ── fresh ──────────────────────────> value
//!                         │ none, or about to expire
//!                         └──> one task per key makes it; who comes meanwhile waits for the same
//!                               command.rs   a program of the operator's
//!                               callback.rs  an HTTPS endpoint of the operator's
//!                               oauth.rs     a token endpoint, with client credentials
//! ```
//!
//! What cannot be made is an error and the request is not sent: there is no old value to fall back on. An error says
//! what failed in words of ours, never in those of a program or endpoint, which might hold a value.

mod cache;
mod callback;
mod command;
mod config;
mod oauth;

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use stockade_gateway::broker;
use stockade_model::{SandboxId, Secret, WorkspaceId};

pub(crate) use self::{
    cache::{Cache, Key},
    callback::Callback,
    command::Command,
    config::Minter,
};
pub use self::{
    config::{MintedSecret, SharedBy},
    oauth::{ClientAuth, OAuthClient},
};

/// How long a value is used whose maker does not say.
const UNSAID_LIFETIME: Duration = Duration::from_secs(300);
/// Values are not used in this part of their life, at its end: a request has to arrive, too.
const MARGIN_PART: u32 = 10;
const LONGEST_MARGIN: Duration = Duration::from_secs(60);

/// What a maker is told.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Asked {
    /// The secret's name.
    pub(crate) secret: String,
    /// Where the value will be sent.
    pub(crate) host: String,
    /// For whom; none: the value is one that others get, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) workspace: Option<WorkspaceId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sandbox: Option<SandboxId>,
    /// The sandbox's metadata, as far as the value is for it alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) metadata: Option<BTreeMap<String, String>>,
}

/// A value, just made.
#[derive(Clone, Debug)]
pub(crate) struct Fresh {
    pub(crate) value: Secret,
    pub(crate) lifetime: Duration,
}

impl Fresh {
    /// For how long it may be put into requests.
    fn usable(&self) -> Duration {
        self.lifetime.saturating_sub((self.lifetime / MARGIN_PART).min(LONGEST_MARGIN))
    }
}

/// What a program or callback answers.
#[derive(Deserialize)]
struct Answer {
    value: String,
    /// RFC 3339.
    #[serde(default)]
    expires_at: Option<Timestamp>,
    /// Seconds.
    #[serde(default)]
    expires_in: Option<u64>,
}

/// Reads an answer. No part of it gets into an error.
fn read_answer(bytes: &[u8]) -> Result<Fresh, String> {
    let wrong = "its answer is not {\"value\": …, \"expires_at\": … or \"expires_in\": …}";
    let answer: Answer = serde_json::from_slice(bytes).map_err(|_| wrong.to_owned())?;
    let value = Secret::new(answer.value);
    broker::check_value(&value).map_err(str::to_owned)?;
    let lifetime = match (answer.expires_in, answer.expires_at) {
        (Some(seconds), _) => Duration::from_secs(seconds),
        (None, Some(at)) => Duration::try_from(at.duration_since(Timestamp::now())).unwrap_or_default(),
        (None, None) => UNSAID_LIFETIME,
    };
    if lifetime.is_zero() {
        return Err("the value it gave has expired".to_owned());
    }
    Ok(Fresh { value, lifetime })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_read_and_one_that_is_none_is_told_without_its_text() {
        let fresh = read_answer(br#"{"value": "v-1", "expires_in": 100}"#).expect("an answer");
        assert_eq!((fresh.value.expose(), fresh.usable()), ("v-1", Duration::from_secs(90)));
        let fresh = read_answer(br#"{"value": "v-1", "expires_in": 86400}"#).expect("an answer");
        assert_eq!(fresh.usable(), Duration::from_secs(86340));
        let at = Timestamp::now() + Duration::from_secs(1000);
        let fresh = read_answer(format!(r#"{{"value": "v", "expires_at": "{at}"}}"#).as_bytes()).expect("an answer");
        assert!(fresh.lifetime <= Duration::from_secs(1000) && fresh.lifetime > Duration::from_secs(900));
        for bad in [
            "sk-hidden",
            r#"{"value": 7, "note": "sk-hidden"}"#,
            r#"{"value": "sk-hidden", "expires_in": 0}"#,
            r#"{"value": "sk-hidden", "expires_at": "2020-01-01T00:00:00Z"}"#,
            r#"{"value": "sk-hidden\nx"}"#,
            r#"{"value": ""}"#,
        ] {
            let problem = read_answer(bad.as_bytes()).expect_err(bad);
            assert!(!problem.contains("hidden"), "{problem}");
        }
    }
}
