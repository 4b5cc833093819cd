//! The guest's end of its private link: addresses, connections a restore has cut off, whom to trust.
//!
//! All guests have the same addresses (`stockade_wire::network`), so they are set once, when the template boots, and
//! are right in every machine restored from it.

mod interface;
mod keystore;
mod sockets;
mod trust;

pub(crate) use self::{
    interface::{name_server, set_up},
    sockets::reset_connections,
    trust::{Trusted, trust},
};
