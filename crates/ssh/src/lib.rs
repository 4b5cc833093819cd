//! SSH into sandboxes: `ssh ID@host`, and with it `scp`, `sftp`, `rsync` and editors that work over SSH.
//!
//! ```text
//! ssh client --TCP--> Intake --> russh --> Client (who, which channel) --> process: shell, command, sftp
//!                                                                     \--> forward: port, socket in the guest
//! ```
//!
//! The user's name is the sandbox's id. Public keys alone let in. Everything a channel does goes through the
//! guest link: a paused sandbox is brought back by the first channel, and is in use while one is open.
//!
//! Bounded: connections in all, those that have not said who they are, those of one sandbox, the time to say it,
//! keys offered, signatures tried, channels, what a client sends ahead of a program that does not read.

mod client;
mod forward;
mod intake;
mod keys;
mod process;
mod server;
mod socket;

pub use keys::{HostKey, KeyError, KeyPair};
pub use server::{Server, serve};
