//! `stockade up`: from a directory to a server.

pub(crate) mod data_dir;
pub(crate) mod listen;
