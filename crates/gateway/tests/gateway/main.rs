//! The gateway with guests that are no machines and servers on loopback.
#![allow(missing_docs, unreachable_pub, clippy::unwrap_used, reason = "tests")]

mod attacks;
mod datagrams;
mod fetch;
mod flows;
mod guest;
mod kernel;
mod names;
mod requests;
mod secrets;
mod servers;
mod tls;
mod upstream;
mod world;
