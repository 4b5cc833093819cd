//! Secrets: values that header rules put on the wire as `${e2b.secrets.NAME}`. Values go in and never come out.
//!
//! As on E2B, names are kept in lower case, and a secret is named by its id or its name. One made here may be sent to
//! whatever host a rule of its workspace names; one made through our own API keeps its hosts through updates made here.

use std::collections::{BTreeMap, BTreeSet};

use axum::{
    Extension, Json,
    extract::{Path, State},
    response::Response,
};
use http::StatusCode;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use stockade_model::Secret;
use stockade_service::{Principal, SecretContent, SecretInfo, SecretRequest};

use super::{super::error::HttpError, Body, JsonResult, Query, network::Network, paging};
use crate::AppState;

const LONGEST_NAME: usize = 128;
/// Ids begin with it; no name may.
const ID_PREFIX: &str = "sec_";

/// `Secret`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SecretView {
    #[serde(rename = "secretID")]
    secret_id: String,
    name: String,
    current_version: u64,
    metadata: BTreeMap<String, String>,
    created_at: Timestamp,
    updated_at: Timestamp,
}

impl SecretView {
    /// The operator's are not shown: they are no workspace's, and have neither id nor times.
    fn of(secret: SecretInfo) -> Option<Self> {
        Some(Self {
            secret_id: secret.id?,
            name: secret.name,
            current_version: secret.version,
            metadata: secret.metadata,
            created_at: secret.created_at?,
            updated_at: secret.updated_at?,
        })
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NewSecret {
    name: String,
    value: String,
    metadata: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SecretUpdate {
    value: String,
    metadata: Option<BTreeMap<String, String>>,
}

pub(super) async fn create(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Body(NewSecret { name, value, metadata }): Body<NewSecret>,
) -> Result<(StatusCode, Json<SecretView>), HttpError> {
    let request = SecretRequest {
        name: new_name(&name)?,
        hosts: vec!["*".to_owned()],
        content: SecretContent::Value(Secret::new(value)),
        metadata,
    };
    let made = state.service.create_secret(&who, request).await?;
    let view = SecretView::of(made).ok_or_else(|| not_found(&name))?;
    Ok((StatusCode::CREATED, Json(view)))
}

pub(super) async fn update(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(reference): Path<String>,
    Body(SecretUpdate { value, metadata }): Body<SecretUpdate>,
) -> JsonResult<SecretView> {
    let found = find(&state, &who, &reference).await?;
    let updated = state.service.update_secret(&who, &found.secret_id, Secret::new(value), metadata).await?;
    SecretView::of(updated).map(Json).ok_or_else(|| not_found(&reference))
}

pub(super) async fn one(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(reference): Path<String>,
) -> JsonResult<SecretView> {
    find(&state, &who, &reference).await.map(Json)
}

pub(super) async fn remove(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(reference): Path<String>,
) -> Result<StatusCode, HttpError> {
    let found = find(&state, &who, &reference).await?;
    state.service.remove_secret(&who, &found.name).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct ListQuery {
    limit: Option<u32>,
    next_token: Option<String>,
}

pub(super) async fn list(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Query(query): Query<ListQuery>,
) -> Result<Response, HttpError> {
    let limit = paging::limit(query.limit.map(i64::from))?;
    // The token is the last name of the page before.
    let after = query.next_token.unwrap_or_default();
    let mut page = state.service.kept_secrets(&who, &after, limit + 1).await?;
    let more = page.len() > limit as usize;
    page.truncate(limit as usize);
    let next = page.last().filter(|_| more).map(|last| last.name.clone());
    let items: Vec<_> = page.into_iter().filter_map(SecretView::of).collect();
    Ok(paging::answer(items, next.as_deref()))
}

/// By id or name, as it is written or in lower case.
async fn find(state: &AppState, who: &Principal, reference: &str) -> Result<SecretView, HttpError> {
    for reference in [reference.to_owned(), reference.to_ascii_lowercase()] {
        match state.service.find_secret(who, &reference).await {
            Ok(found) => return SecretView::of(found).ok_or_else(|| not_found(&reference)),
            Err(stockade_service::ServiceError::SecretNotFound { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(not_found(reference))
}

fn not_found(reference: &str) -> HttpError {
    stockade_service::ServiceError::SecretNotFound { name: reference.to_owned() }.into()
}

fn new_name(text: &str) -> Result<String, HttpError> {
    let known = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    let name = text.to_ascii_lowercase();
    if name.is_empty() || name.len() > LONGEST_NAME || !name.bytes().all(known) {
        let message = format!("invalid secret name: use 1 to {LONGEST_NAME} characters of a-z A-Z 0-9 _ -");
        return Err(HttpError::bad_request(message));
    }
    if name.starts_with(ID_PREFIX) {
        return Err(HttpError::bad_request(format!("invalid secret name: {ID_PREFIX} is reserved for ids")));
    }
    Ok(name)
}

/// Puts placeholders in the spelling secrets are kept in: as it is written where there is such a secret (our own API
/// keeps upper case), else in lower case. A secret may also be made after the rule that names it.
pub(super) async fn spell(state: &AppState, who: &Principal, network: &mut Network) -> Result<(), HttpError> {
    if !network.header_values().any(|value| value.contains(PLACEHOLDER)) {
        return Ok(());
    }
    let known: BTreeSet<_> = state.service.secrets(who).await?.into_iter().map(|secret| secret.name).collect();
    network.header_values().for_each(|value| *value = spelled(value, &known));
    Ok(())
}

const PLACEHOLDER: &str = "${e2b.secrets.";

fn spelled(value: &str, known: &BTreeSet<String>) -> String {
    let mut parts = value.split(PLACEHOLDER);
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        text.push_str(PLACEHOLDER);
        match part.split_once('}') {
            Some((name, rest)) if !known.contains(name) => {
                text.push_str(&format!("{}}}{rest}", name.to_ascii_lowercase()));
            }
            _ => text.push_str(part),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_e2bs() {
        assert_eq!(new_name("OpenAI-key_1").map_err(|error| error.message), Ok("openai-key_1".to_owned()));
        for bad in ["", "a.b", "a b", "é", "sec_1", "SEC_1", &"a".repeat(129)] {
            assert_eq!(new_name(bad).expect_err(bad).status, StatusCode::BAD_REQUEST);
        }
    }

    #[test]
    fn placeholders_find_secrets_however_they_are_spelled() {
        let known = BTreeSet::from(["UPPER".to_owned(), "lower".to_owned()]);
        let spelled = |value: &str| spelled(value, &known);
        assert_eq!(
            spelled("a ${e2b.secrets.UPPER}${e2b.secrets.Lower} b"),
            "a ${e2b.secrets.UPPER}${e2b.secrets.lower} b"
        );
        assert_eq!(spelled("${e2b.secrets.Late}"), "${e2b.secrets.late}");
        for same in ["", "plain", "${e2b.secrets.", "${e2b.identity.tokens.X}", "${OTHER}"] {
            assert_eq!(spelled(same), same);
        }
    }
}
