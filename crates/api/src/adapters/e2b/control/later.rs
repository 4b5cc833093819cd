//! What this release does not have yet, each refused by name. A verb moves from here to a module of its
//! own when it comes.

use axum::{
    Extension,
    extract::{Path, State},
};
use stockade_service::Principal;

use super::{super::error::HttpError, sandbox_id};
use crate::AppState;

/// A sandbox that does not exist is said to be so, whatever was to be done with it.
async fn refuse(state: &AppState, who: &Principal, id: &str, what: &str) -> HttpError {
    let sandbox = match sandbox_id(id) {
        Ok(id) => state.service.get(who, &id).await,
        Err(error) => return error,
    };
    match sandbox {
        Ok(sandbox) if sandbox.ending.is_none() => {
            HttpError::not_supported(format!("{what} is not supported by this release of Stockade"))
        }
        Ok(_) => HttpError::sandbox_not_found(id),
        Err(error) => error.into(),
    }
}

macro_rules! refusals {
    ($($(#[$doc:meta])* $name:ident: $what:literal;)*) => {$(
        $(#[$doc])*
        pub(super) async fn $name(
            State(state): State<AppState>,
            Extension(who): Extension<Principal>,
            Path(id): Path<String>,
        ) -> HttpError {
            refuse(&state, &who, &id, $what).await
        }
    )*};
}

refusals! {
    logs: "keeping a sandbox's logs";
}

/// Areas of E2B's API without any route here.
pub(super) fn area(path: &str) -> Option<HttpError> {
    let mut parts = path.split('/').filter(|part| !part.is_empty() && !matches!(*part, "v1" | "v2" | "v3"));
    let what = match parts.next()? {
        "volumes" | "volumecontent" => "volumes",
        "secrets" => "secrets",
        "templates" => "this way of changing templates",
        "teams" | "api-keys" | "access-tokens" => "managing teams and keys through E2B's API",
        _ => return None,
    };
    Some(HttpError::not_supported(format!("{what}: not supported by this release of Stockade")))
}
