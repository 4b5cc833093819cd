//! The guest agent this build carries along. Made by `build.rs`.

/// A static x86-64 Linux program: pid 1 of every guest.
pub const GUEST_AGENT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/stockade-guest"));
