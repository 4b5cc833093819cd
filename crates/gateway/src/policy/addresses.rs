//! Addresses no policy of a tenant reaches: private, special and the host's own.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net};

/// What kind of place an address is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum AddressClass {
    /// Reached by ordinary rules.
    Public,
    /// Closed unless the operator opens it.
    Private,
    /// Closed always: where clouds hand out credentials.
    Metadata,
}

const PRIVATE_V4: &[(Ipv4Addr, u8)] = &[
    (Ipv4Addr::new(0, 0, 0, 0), 8),
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    (Ipv4Addr::new(127, 0, 0, 0), 8),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 0, 0, 0), 24),
    (Ipv4Addr::new(192, 0, 2, 0), 24),
    (Ipv4Addr::new(192, 88, 99, 0), 24),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
    (Ipv4Addr::new(198, 18, 0, 0), 15),
    (Ipv4Addr::new(198, 51, 100, 0), 24),
    (Ipv4Addr::new(203, 0, 113, 0), 24),
    (Ipv4Addr::new(224, 0, 0, 0), 4),
    (Ipv4Addr::new(240, 0, 0, 0), 4),
];

const PRIVATE_V6: &[(Ipv6Addr, u8)] = &[
    (Ipv6Addr::UNSPECIFIED, 96), // also ::1 and the old IPv4-compatible form
    (Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0), 96),
    (Ipv6Addr::new(0x64, 0xff9b, 1, 0, 0, 0, 0, 0), 48),
    (Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 0), 64),
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 32),
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32),
    (Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16),
    (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20),
    (Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 0), 7),
    (Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10),
    (Ipv6Addr::new(0xfec0, 0, 0, 0, 0, 0, 0, 0), 10),
    (Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0), 8),
];

const METADATA_V4: &[(Ipv4Addr, u8)] = &[
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    (Ipv4Addr::new(168, 63, 129, 16), 32),
    (Ipv4Addr::new(100, 100, 100, 200), 32),
    (Ipv4Addr::new(192, 0, 0, 192), 32),
];

/// AWS, and the form used on Oracle's and Google's networks.
const METADATA_V6: [Ipv6Addr; 2] =
    [Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254), Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254)];

/// Of an IPv4 address written as an IPv6 one, those before it.
const MAPPED_BITS: u8 = 96;

/// Names under which clouds serve metadata.
pub(super) const METADATA_NAMES: &[&str] =
    &["metadata.google.internal", "metadata.goog", "metadata", "instance-data", "instance-data.ec2.internal"];

fn in_v4(address: Ipv4Addr, (network, bits): (Ipv4Addr, u8)) -> bool {
    let mask = u32::MAX.checked_shl(32 - u32::from(bits)).unwrap_or(0);
    address.to_bits() & mask == network.to_bits() & mask
}

fn in_v6(address: Ipv6Addr, (network, bits): (Ipv6Addr, u8)) -> bool {
    let mask = u128::MAX.checked_shl(128 - u32::from(bits)).unwrap_or(0);
    address.to_bits() & mask == network.to_bits() & mask
}

/// The address a packet really goes to: an IPv4-mapped IPv6 address is the IPv4 one.
pub(crate) fn unmapped(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or(address, IpAddr::V4),
        IpAddr::V4(_) => address,
    }
}

/// What kind of place `address` is.
pub fn classify(address: IpAddr) -> AddressClass {
    match unmapped(address) {
        IpAddr::V4(v4) if METADATA_V4.iter().any(|net| in_v4(v4, *net)) => AddressClass::Metadata,
        IpAddr::V4(v4) if PRIVATE_V4.iter().any(|net| in_v4(v4, *net)) => AddressClass::Private,
        IpAddr::V6(v6) if METADATA_V6.contains(&v6) => AddressClass::Metadata,
        IpAddr::V6(v6) if PRIVATE_V6.iter().any(|net| in_v6(v6, *net)) => AddressClass::Private,
        _ => AddressClass::Public,
    }
}

/// Whether all of `network` is metadata, so that opening it would do nothing.
pub(super) fn is_all_metadata(network: &IpNet) -> bool {
    is_within(network, METADATA_V4, &METADATA_V6.map(|address| (address, 128)))
}

/// Whether all of `network` is private or special.
pub(super) fn is_all_private(network: &IpNet) -> bool {
    is_within(network, PRIVATE_V4, PRIVATE_V6)
}

fn is_within(network: &IpNet, v4: &[(Ipv4Addr, u8)], v6: &[(Ipv6Addr, u8)]) -> bool {
    match network {
        IpNet::V4(network) => {
            v4.iter().any(|(start, bits)| *bits <= network.prefix_len() && in_v4(network.network(), (*start, *bits)))
        }
        IpNet::V6(network) => match network.network().to_ipv4_mapped() {
            Some(start) if network.prefix_len() >= MAPPED_BITS => {
                Ipv4Net::new(start, network.prefix_len() - MAPPED_BITS)
                    .is_ok_and(|network| is_within(&network.into(), v4, v6))
            }
            _ => v6
                .iter()
                .any(|(start, bits)| *bits <= network.prefix_len() && in_v6(network.network(), (*start, *bits))),
        },
    }
}

/// Every address of this host's interfaces.
pub fn host_addresses() -> std::io::Result<Vec<IpAddr>> {
    let mut found = Vec::new();
    for interface in nix::ifaddrs::getifaddrs()? {
        let Some(address) = interface.address else { continue };
        if let Some(v4) = address.as_sockaddr_in() {
            found.push(IpAddr::V4(v4.ip()));
        } else if let Some(v6) = address.as_sockaddr_in6() {
            found.push(IpAddr::V6(v6.ip()));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_addresses_are_never_public() {
        for text in [
            "0.0.0.0",
            "10.1.2.3",
            "100.64.0.1",
            "127.0.0.1",
            "172.31.255.255",
            "192.0.0.1",
            "192.0.2.1",
            "192.168.0.1",
            "198.18.0.1",
            "198.51.100.7",
            "203.0.113.10",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::7f00:1",
            "::ffff:10.0.0.1",
            "::ffff:127.0.0.1",
            "64:ff9b::a00:1",
            "2002:a00:1::",
            "2001::1",
            "2001:db8::1",
            "fc00::1",
            "fe80::1",
            "ff02::1",
        ] {
            assert_eq!(classify(text.parse().expect(text)), AddressClass::Private, "{text}");
        }
        for text in ["169.254.169.254", "::ffff:169.254.169.254", "fd00:ec2::254", "168.63.129.16", "100.100.100.200"] {
            assert_eq!(classify(text.parse().expect(text)), AddressClass::Metadata, "{text}");
        }
        for text in ["1.1.1.1", "93.184.216.34", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "::ffff:8.8.8.8"] {
            assert_eq!(classify(text.parse().expect(text)), AddressClass::Public, "{text}");
        }
    }

    #[test]
    fn the_host_knows_its_loopback() {
        assert!(host_addresses().expect("interfaces").contains(&IpAddr::V4(Ipv4Addr::LOCALHOST)));
    }
}
