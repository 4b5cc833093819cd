//! Trees between host and guest, as tar streams: links stay links, modes and empty directories are kept.
//!
//! [`pack`] reads the host's tree, [`unpack`] writes one. What comes from a guest is hostile: see there.

pub(crate) mod channel;
pub(crate) mod pack;
pub(crate) mod unpack;
