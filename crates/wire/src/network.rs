//! The guest's network: one private link between its NIC and the host's gateway.
//!
//! Links are private, so every guest has the same addresses: a snapshot needs no new ones, wherever it is restored.
//! The agent sets them without asking anybody.

use std::net::Ipv4Addr;

/// The name of the guest's NIC.
pub const INTERFACE: &str = "eth0";
/// The guest's address.
pub const GUEST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 123, 0, 2);
/// The guest's router and name server.
pub const GATEWAY_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 123, 0, 1);
/// The length of the link's prefix.
pub const PREFIX_LENGTH: u8 = 30;
/// The MAC address of the guest's NIC.
pub const GUEST_MAC: [u8; 6] = [0x02, 0x53, 0x54, 0x4b, 0x00, 0x02];
/// The MAC address the gateway answers with.
pub const GATEWAY_MAC: [u8; 6] = [0x02, 0x53, 0x54, 0x4b, 0x00, 0x01];
/// The MTU of the guest's NIC; a smaller one works and is slower.
pub const MTU: u16 = 65_520;
/// What the guest's resolver reads. No search domain: names leave as they were asked for.
pub const RESOLV_CONF: &str = "nameserver 10.123.0.1\n";
