//! The `stockade` program.

pub mod guest_binary;
