//! The API over real sockets, in front of a service on the fake engine.

mod auth;
mod e2b;
mod e2b_secrets;
mod errors;
mod exec;
mod files;
mod hosts;
mod lifecycle;
mod network;
mod previews;
mod sandboxes;
mod ssh_keys;
mod support;
mod tls;
mod ws;
