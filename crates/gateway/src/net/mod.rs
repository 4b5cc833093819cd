//! The guest's side of the network: frames in, byte streams out. Nothing here knows a policy.
//!
//! ```text
//! link ── frames ──> read::Reader ──> frame::parse ──┬─ ARP, echo ──────────> answered here
//!   ^                                                ├─ UDP 53 ─────────────> Guard::dns
//!   │                                                ├─ other UDP ──────────> Guard::udp, or ICMP port unreachable
//!   │                                                └─ TCP ─> flow by 4-tuple, or Guard::syn for a new one
//!   └── write::Outbox <── frames of all flows              │ accepted
//!                                                          └─> FlowStream ─> Guard::serve (a task per flow)
//! ```
//!
//! Each flow has a smoltcp interface and socket of its own, so that a packet costs the same with one flow as with ten
//! thousand. A flow is driven by whoever has something for it: the reader (a segment), its handler (bytes read or
//! written), the writer (room in the outbox), the clock (a timer). All of them hold the flow's lock while they do.
//!
//! Rules that hold for every frame: IPv4 only, source address the guest's, no options, no fragments, valid headers.
//! Others are dropped and counted. A frame longer than QEMU sends ends the link.

mod buffer;
mod clock;
mod flow;
pub mod frame;
mod link;
mod outbox;
mod stream;
pub mod tap;

pub(crate) use self::{
    flow::{Flow, FlowFacts, FlowKey, Mode, Upgraded},
    link::{Guard, Link, LinkOptions, Syn},
    stream::{FlowStream, splice},
};
pub use self::{frame::Drops, link::Framing};

pub use stockade_wire::network::{GATEWAY_ADDRESS, GATEWAY_MAC, GUEST_ADDRESS, GUEST_MAC, MTU, PREFIX_LENGTH};
