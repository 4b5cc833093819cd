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

use std::collections::BTreeMap;

use axum::Router;
use stockade_service::ServiceConfig;

use crate::AppState;

mod access;
mod connect;
mod control;
mod envd;
mod error;
mod extract;
mod proxy;

/// The release of E2B's in-guest server whose behaviour we show: the SDKs switch features on by it.
const ENVD_VERSION: &str = "0.6.13";

/// The port their in-guest server has. Nothing listens there in our guests: [`envd`] answers for it.
const ENVD_PORT: u16 = 49983;

/// What programs written for E2B's guests look for, in the words of [`ServiceConfig::guest_files`].
pub fn guest_files() -> BTreeMap<String, String> {
    let file = |name: &str, text: &str| (format!("/run/e2b/.{name}"), text.to_owned());
    BTreeMap::from([
        file("E2B_SANDBOX", "true"),
        file("E2B_SANDBOX_ID", ServiceConfig::SANDBOX),
        file("E2B_TEMPLATE_ID", ServiceConfig::TEMPLATE),
    ])
}

/// The control API: host `api.e2b.<base>`.
pub fn control_router(state: AppState) -> Router {
    control::router(state)
}

/// The sandbox side: host `<port>-<id>.e2b.<base>`. Each request carries a
/// [`SandboxHost`](crate::SandboxHost) in its extensions.
pub fn sandbox_router(state: AppState) -> Router {
    proxy::router(state)
}
