//! The guest agent: what runs commands, moves files and reports on the machine from inside it.
//!
//! ```text
//! host --virtio-serial--> link (hello, session) --HTTP/2--> routes --> process | files | watch | ports
//!                                                               \----> identity | stats
//! ```
//!
//! The same code serves in two places. In a machine ([`Agent::machine`]) it is root and, started by
//! [`init`], process 1: it switches users, sets the clock and keeps processes in cgroups. Hosted
//! ([`Agent::hosted`]) it serves tests and the fake engine as an ordinary program and leaves the
//! host as it is.

mod account;
mod agent;
mod bulk;
mod failure;
mod fd;
mod files;
mod held;
mod http;
mod identity;
pub mod init;
mod link;
mod network;
mod port;
mod ports;
mod process;
mod routes;
mod stats;
pub mod tools;
mod watch;

pub use agent::Agent;
pub use link::serve;
