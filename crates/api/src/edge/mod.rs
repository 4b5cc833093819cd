//! Ports of guests as hosts of our own: what the native previews and the adapters' share.

mod forward;
pub(crate) mod keys;
mod preview;

pub(crate) use forward::{Reason, connect, find, forward};
pub(crate) use preview::router;
