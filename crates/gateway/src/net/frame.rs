//! Ethernet, ARP, IPv4, ICMP and UDP: what is read from a guest's frame and what is built for it.
//!
//! ```text
//! 0      6      12   14            ihl*4 = 20                 total length
//! | dst  | src  |type| IPv4 header |  TCP / UDP / ICMP        | padding |
//! ```

use std::{
    net::Ipv4Addr,
    sync::atomic::{AtomicU64, Ordering},
};

use super::{GATEWAY_MAC, GUEST_ADDRESS};

/// Length of an Ethernet header.
pub const ETHERNET: usize = 14;
const IPV4: usize = 20;
/// Length of the headers of a UDP datagram.
pub const UDP_OVERHEAD: usize = IPV4 + 8;
const TYPE_IPV4: [u8; 2] = [0x08, 0x00];
const TYPE_ARP: [u8; 2] = [0x08, 0x06];

/// TCP flags.
pub mod flags {
    /// No more data.
    pub const FIN: u8 = 0x01;
    /// Opens a connection.
    pub const SYN: u8 = 0x02;
    /// Ends a connection at once.
    pub const RST: u8 = 0x04;
    /// The acknowledgement number counts.
    pub const ACK: u8 = 0x10;
}

/// What a frame is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Frame<'a> {
    /// Asks who has an address.
    ArpRequest {
        /// Who asks.
        sender_mac: [u8; 6],
        /// What for.
        target: Ipv4Addr,
    },
    /// A TCP segment with valid headers.
    Tcp(Segment<'a>),
    /// A UDP datagram.
    Udp(Datagram<'a>),
    /// An echo request.
    Echo {
        /// Who is asked.
        to: Ipv4Addr,
        /// The ICMP message.
        message: &'a [u8],
    },
    /// Not for us.
    Dropped(DropCause),
}

/// A TCP segment with valid headers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Segment<'a> {
    /// The whole IPv4 packet.
    pub packet: &'a [u8],
    /// Where it goes.
    pub to: Ipv4Addr,
    /// The guest's port.
    pub from_port: u16,
    /// The other port.
    pub to_port: u16,
    /// Its flags.
    pub flags: u8,
    /// Sequence number.
    pub sequence: u32,
    /// Acknowledgement number.
    pub acknowledgement: u32,
    /// Length of the data.
    pub data_len: u32,
}

/// A UDP datagram.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Datagram<'a> {
    /// The whole IPv4 packet.
    pub packet: &'a [u8],
    /// Where it goes.
    pub to: Ipv4Addr,
    /// The guest's port.
    pub from_port: u16,
    /// The other port.
    pub to_port: u16,
    /// The data.
    pub data: &'a [u8],
}

/// Why a frame is dropped.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum DropCause {
    /// Shorter than its headers say.
    Malformed,
    /// IPv6.
    Ipv6,
    /// Neither IP nor ARP (VLAN tags included).
    OtherType,
    /// A source address that is not the guest's.
    Spoofed,
    /// A fragment.
    Fragment,
    /// A destination that is no host.
    NotUnicast,
    /// A protocol we do not speak.
    OtherProtocol,
}

/// Dropped frames by cause.
#[derive(Debug, Default)]
pub struct Drops([AtomicU64; 7]);

impl Drops {
    pub(super) fn count(&self, cause: DropCause) {
        self.0[cause as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// How many were dropped for `cause`.
    pub fn of(&self, cause: DropCause) -> u64 {
        self.0[cause as usize].load(Ordering::Relaxed)
    }

    /// How many were dropped.
    pub fn total(&self) -> u64 {
        self.0.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn address_at(bytes: &[u8], at: usize) -> Ipv4Addr {
    Ipv4Addr::from_bits(u32_at(bytes, at))
}

/// The sender's MAC address.
pub fn source_mac(frame: &[u8]) -> Option<[u8; 6]> {
    frame.get(6..12)?.try_into().ok()
}

/// Reads a guest's frame.
pub fn parse(frame: &[u8]) -> Frame<'_> {
    if frame.len() < ETHERNET {
        return Frame::Dropped(DropCause::Malformed);
    }
    let payload = &frame[ETHERNET..];
    match [frame[12], frame[13]] {
        TYPE_IPV4 => parse_ipv4(payload).unwrap_or_else(Frame::Dropped),
        TYPE_ARP => parse_arp(payload).unwrap_or(Frame::Dropped(DropCause::Malformed)),
        [0x86, 0xdd] => Frame::Dropped(DropCause::Ipv6),
        _ => Frame::Dropped(DropCause::OtherType),
    }
}

fn parse_arp(arp: &[u8]) -> Option<Frame<'_>> {
    const REQUEST_OVER_ETHERNET: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 1];
    let arp = arp.get(..28).filter(|arp| arp[..8] == REQUEST_OVER_ETHERNET)?;
    let sender_mac = arp[8..14].try_into().ok()?;
    // The guest's own address is asked for to find out whether somebody else has it: nobody has.
    let sender_ok = matches!(address_at(arp, 14), GUEST_ADDRESS | Ipv4Addr::UNSPECIFIED);
    let target = address_at(arp, 24);
    (sender_ok && target != GUEST_ADDRESS).then_some(Frame::ArpRequest { sender_mac, target })
}

fn parse_ipv4(packet: &[u8]) -> Result<Frame<'_>, DropCause> {
    // Options (source routes among them) have no use on a private link.
    if packet.len() < IPV4 || packet[0] != 0x45 {
        return Err(DropCause::Malformed);
    }
    let total = usize::from(u16_at(packet, 2));
    let packet = packet.get(..total).filter(|_| total >= IPV4).ok_or(DropCause::Malformed)?;
    if checksum(&packet[..IPV4], 0) != 0 {
        return Err(DropCause::Malformed);
    }
    if u16_at(packet, 6) & 0x3fff != 0 {
        return Err(DropCause::Fragment);
    }
    if address_at(packet, 12) != GUEST_ADDRESS {
        return Err(DropCause::Spoofed);
    }
    let to = address_at(packet, 16);
    if to.is_unspecified() || to.is_multicast() || to.is_broadcast() || to == GUEST_ADDRESS {
        return Err(DropCause::NotUnicast);
    }
    let body = &packet[IPV4..];
    match packet[9] {
        6 => parse_tcp(packet, body, to),
        17 => parse_udp(packet, body, to),
        1 if body.len() >= 8 && body[..2] == [8, 0] => Ok(Frame::Echo { to, message: body }),
        _ => Err(DropCause::OtherProtocol),
    }
}

fn parse_tcp<'a>(packet: &'a [u8], tcp: &'a [u8], to: Ipv4Addr) -> Result<Frame<'a>, DropCause> {
    if tcp.len() < 20 {
        return Err(DropCause::Malformed);
    }
    let header = usize::from(tcp[12] >> 4) * 4;
    let (from_port, to_port) = (u16_at(tcp, 0), u16_at(tcp, 2));
    if header < 20 || header > tcp.len() || from_port == 0 || to_port == 0 || !tcp_options_are_sound(&tcp[20..header]) {
        return Err(DropCause::Malformed);
    }
    Ok(Frame::Tcp(Segment {
        packet,
        to,
        from_port,
        to_port,
        flags: tcp[13],
        sequence: u32_at(tcp, 4),
        acknowledgement: u32_at(tcp, 8),
        data_len: (tcp.len() - header) as u32,
    }))
}

/// Options whose lengths add up. The stack behind checks them too; here they never reach it.
fn tcp_options_are_sound(mut options: &[u8]) -> bool {
    while let Some((kind, rest)) = options.split_first() {
        match kind {
            0 => return true,
            1 => options = rest,
            _ => match rest.first().map(|length| usize::from(*length)) {
                Some(length) if length >= 2 && length <= options.len() => options = &options[length..],
                _ => return false,
            },
        }
    }
    true
}

fn parse_udp<'a>(packet: &'a [u8], udp: &'a [u8], to: Ipv4Addr) -> Result<Frame<'a>, DropCause> {
    if udp.len() < 8 {
        return Err(DropCause::Malformed);
    }
    let length = usize::from(u16_at(udp, 4));
    let data = udp.get(8..length).ok_or(DropCause::Malformed)?;
    Ok(Frame::Udp(Datagram { packet, to, from_port: u16_at(udp, 0), to_port: u16_at(udp, 2), data }))
}

/// The Internet checksum of `bytes` on top of `start`; 0 when a checksum inside is right.
pub fn checksum(bytes: &[u8], start: u32) -> u16 {
    let mut sum = u64::from(start);
    let mut words = bytes.chunks_exact(2);
    for word in &mut words {
        sum += u64::from(u16_at(word, 0));
    }
    if let [last] = words.remainder() {
        sum += u64::from(*last) << 8;
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

fn pseudo_header(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, length: usize) -> u32 {
    let halves = |address: Ipv4Addr| (address.to_bits() >> 16) + (address.to_bits() & 0xffff);
    halves(from) + halves(to) + u32::from(protocol) + length as u32
}

/// An Ethernet header from the gateway to the guest.
pub(super) fn ethernet_header(guest_mac: [u8; 6]) -> [u8; ETHERNET] {
    let mut header = [0; ETHERNET];
    header[..6].copy_from_slice(&guest_mac);
    header[6..12].copy_from_slice(&GATEWAY_MAC);
    header[12..].copy_from_slice(&TYPE_IPV4);
    header
}

/// The answer to an ARP request, as a frame.
pub fn arp_reply(sender_mac: [u8; 6], target: Ipv4Addr) -> Vec<u8> {
    let mut frame = Vec::with_capacity(ETHERNET + 28);
    frame.extend_from_slice(&sender_mac);
    frame.extend_from_slice(&GATEWAY_MAC);
    frame.extend_from_slice(&TYPE_ARP);
    frame.extend_from_slice(&[0, 1, 8, 0, 6, 4, 0, 2]);
    frame.extend_from_slice(&GATEWAY_MAC);
    frame.extend_from_slice(&target.octets());
    frame.extend_from_slice(&sender_mac);
    frame.extend_from_slice(&GUEST_ADDRESS.octets());
    frame
}

fn ipv4_frame(guest_mac: [u8; 6], from: Ipv4Addr, protocol: u8, body: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(ETHERNET + IPV4 + body.len());
    frame.extend_from_slice(&ethernet_header(guest_mac));
    frame.extend_from_slice(&[0x45, 0]);
    frame.extend_from_slice(&((IPV4 + body.len()) as u16).to_be_bytes());
    frame.extend_from_slice(&[0, 0, 0x40, 0, 64, protocol, 0, 0]);
    frame.extend_from_slice(&from.octets());
    frame.extend_from_slice(&GUEST_ADDRESS.octets());
    let sum = checksum(&frame[ETHERNET..], 0);
    frame[ETHERNET + 10..ETHERNET + 12].copy_from_slice(&sum.to_be_bytes());
    frame.extend_from_slice(body);
    frame
}

/// A UDP datagram to the guest, as a frame.
pub fn udp(guest_mac: [u8; 6], from: Ipv4Addr, from_port: u16, to_port: u16, data: &[u8]) -> Vec<u8> {
    let length = 8 + data.len();
    let mut body = Vec::with_capacity(length);
    body.extend_from_slice(&from_port.to_be_bytes());
    body.extend_from_slice(&to_port.to_be_bytes());
    body.extend_from_slice(&(length as u16).to_be_bytes());
    body.extend_from_slice(&[0, 0]);
    body.extend_from_slice(data);
    let sum = match checksum(&body, pseudo_header(from, GUEST_ADDRESS, 17, length)) {
        0 => 0xffff,
        sum => sum,
    };
    body[6..8].copy_from_slice(&sum.to_be_bytes());
    ipv4_frame(guest_mac, from, 17, &body)
}

fn icmp(guest_mac: [u8; 6], from: Ipv4Addr, kind: u8, code: u8, rest: &[u8]) -> Vec<u8> {
    let mut body = vec![kind, code, 0, 0];
    body.extend_from_slice(rest);
    let sum = checksum(&body, 0);
    body[2..4].copy_from_slice(&sum.to_be_bytes());
    ipv4_frame(guest_mac, from, 1, &body)
}

/// The answer to an echo request, as a frame.
pub fn echo_reply(guest_mac: [u8; 6], from: Ipv4Addr, message: &[u8]) -> Vec<u8> {
    icmp(guest_mac, from, 0, 0, &message[4..])
}

/// Tells the guest that nothing listens there, so that clients fall back at once (to TCP, for QUIC).
pub fn port_unreachable(guest_mac: [u8; 6], from: Ipv4Addr, packet: &[u8]) -> Vec<u8> {
    let mut rest = vec![0; 4];
    rest.extend_from_slice(&packet[..packet.len().min(IPV4 + 8)]);
    icmp(guest_mac, from, 3, 3, &rest)
}

/// The reset that answers a segment, as a frame; none for a reset.
pub fn reset(guest_mac: [u8; 6], segment: &Segment<'_>) -> Option<Vec<u8>> {
    if segment.flags & flags::RST != 0 {
        return None;
    }
    let count = |flag: u8| u32::from(segment.flags & flag != 0);
    let (sequence, acknowledgement, flags) = if segment.flags & flags::ACK != 0 {
        (segment.acknowledgement, 0, flags::RST)
    } else {
        let length = segment.data_len + count(flags::SYN) + count(flags::FIN);
        (0, segment.sequence.wrapping_add(length), flags::RST | flags::ACK)
    };
    let mut body = Vec::with_capacity(20);
    body.extend_from_slice(&segment.to_port.to_be_bytes());
    body.extend_from_slice(&segment.from_port.to_be_bytes());
    body.extend_from_slice(&sequence.to_be_bytes());
    body.extend_from_slice(&acknowledgement.to_be_bytes());
    body.extend_from_slice(&[0x50, flags, 0, 0, 0, 0, 0, 0]);
    let sum = checksum(&body, pseudo_header(segment.to, GUEST_ADDRESS, 6, body.len()));
    body[16..18].copy_from_slice(&sum.to_be_bytes());
    Some(ipv4_frame(guest_mac, segment.to, 6, &body))
}
