//! Stockade over HTTP: the native `/v1` API, the peers' APIs beside it, and who goes where.
//!
//! ```text
//! socket --> server (h1 / h2, TLS) --> hosts (by name) --+--> native      <base>, localhost, IP
//!                                                        +--> adapters    api.e2b.<base>, <port>-<id>.e2b.<base>
//!                                                        +--> edge        <port>-<id>.<base>
//! ```
//!
//! Everything below this crate speaks in the words of `stockade-model`; field names of any API, ours
//! included, are known here alone.

use std::sync::Arc;

use stockade_service::Service;

pub mod adapters;
mod auth;
mod edge;
mod error;
mod extract;
mod hosts;
mod native;
mod openapi;
mod server;
mod tls;

pub use error::ApiError;
pub use extract::parse_json;
pub use hosts::SandboxHost;
pub use openapi::document;
pub use server::{Lifecycle, Peer, ServeConfig, ServeError, Server, SshEndpoint, check_base_domain, serve};
pub use tls::{Tls, TlsError};

/// What every router holds.
#[derive(Clone)]
pub struct AppState {
    /// The verbs.
    pub service: Service,
    /// The domain all host names end in, lower case, without port or trailing dot.
    pub base_domain: Arc<str>,
    /// Where SSH is spoken, if it is.
    pub ssh: Option<Arc<SshEndpoint>>,
    /// Whether the server is being stopped.
    pub lifecycle: Lifecycle,
}
