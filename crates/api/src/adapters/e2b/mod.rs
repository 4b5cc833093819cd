//! E2B's API: what their unmodified SDKs send, translated into the verbs of `stockade-service` and the
//! guest client. Nothing here decides anything about a sandbox.
//!
//! ```text
//! api.e2b.<base>            control   create, connect, list, kill, ...      X-API-Key
//! 49983-<id>.e2b.<base>     envd      processes, files (Connect and HTTP)   X-Access-Token or signature
//! <port>-<id>.e2b.<base>    proxy     whatever listens in the guest         none
//! ```
//!
//! Three things are easy to get wrong and cost a client dearly:
//! - the SDKs decide "is the sandbox alive?" by two sentences of [`proxy`] and nothing else;
//! - `Authorization: Basic` on the envd side is a user *name*, not a credential;
//! - a field we cannot honour is refused by name, never ignored.

use axum::Router;

use crate::AppState;

mod access;
mod connect;
mod control;
mod envd;
mod error;
mod proxy;

/// The release of E2B's in-guest server whose behaviour we show: the SDKs switch features on by it.
const ENVD_VERSION: &str = "0.6.13";

/// The port their in-guest server has. Nothing listens there in our guests: [`envd`] answers for it.
const ENVD_PORT: u16 = 49983;

/// The control API: host `api.e2b.<base>`.
pub fn control_router(state: AppState) -> Router {
    control::router(state)
}

/// The sandbox side: host `<port>-<id>.e2b.<base>`. Each request carries a
/// [`SandboxHost`](crate::SandboxHost) in its extensions.
pub fn sandbox_router(state: AppState) -> Router {
    proxy::router(state)
}
