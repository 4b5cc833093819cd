//! E2B's API.

use axum::{Router, http::StatusCode};

use crate::AppState;

/// The control API: host `api.e2b.<base>`.
pub fn control_router(state: AppState) -> Router {
    Router::new().fallback(|| async { StatusCode::NOT_FOUND }).with_state(state)
}

/// The sandbox side: host `<port>-<id>.e2b.<base>`. Each request carries a
/// [`SandboxHost`](crate::SandboxHost) in its extensions.
pub fn sandbox_router(state: AppState) -> Router {
    Router::new().fallback(|| async { StatusCode::NOT_FOUND }).with_state(state)
}
