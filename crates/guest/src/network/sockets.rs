//! Ends connections whose other end is gone.
//!
//! A machine restored from memory remembers connections that its gateway has never heard of. One that is written to is
//! reset by the gateway; one that is only read from would wait for ever. So the kernel is asked to end all of them, as
//! `ss --kill` does.

use std::{
    io,
    net::Ipv4Addr,
    os::fd::{AsRawFd, OwnedFd},
};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, connect, recv, send, socket,
};
use stockade_wire::network::GUEST_ADDRESS;

const HEADER: usize = 16;
const BY_FAMILY: u16 = 20;
const DESTROY: u16 = 21;
const DONE: u16 = libc::NLMSG_DONE as u16;
const ERROR: u16 = libc::NLMSG_ERROR as u16;
/// Established, both halves of closing, handshakes: everything but listening, closed and waiting for late packets.
const LIVE_STATES: u32 = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 11;
/// `struct inet_diag_sockid`, which names one socket.
const ID: usize = 48;
/// Where it is in an answer.
const ID_AT: usize = 4;
const MOST: usize = 100_000;

/// Ends every TCP connection over the NIC; those within the guest go on. Returns how many.
pub(crate) fn reset_connections() -> io::Result<usize> {
    let kernel = Kernel::open()?;
    let mut ended = 0;
    for family in [libc::AF_INET as u8, libc::AF_INET6 as u8] {
        for id in kernel.connections(family)? {
            // It may have ended by itself.
            ended += usize::from(kernel.destroy(family, &id).is_ok());
        }
    }
    Ok(ended)
}

/// The kernel's socket monitor.
struct Kernel(OwnedFd);

impl Kernel {
    fn open() -> io::Result<Self> {
        let fd = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkSockDiag)?;
        connect(fd.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
        Ok(Self(fd))
    }

    fn connections(&self, family: u8) -> io::Result<Vec<[u8; ID]>> {
        let dump = (libc::NLM_F_REQUEST | libc::NLM_F_DUMP) as u16;
        self.send(&message(BY_FAMILY, dump, family, &[0; ID]))?;
        let mut found = Vec::new();
        let mut buffer = vec![0; 64 << 10];
        loop {
            let length = recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            for (kind, body) in Messages(&buffer[..length]) {
                match kind {
                    DONE => return Ok(found),
                    ERROR => return Err(refusal(body)),
                    _ => found.extend(body.get(ID_AT..ID_AT + ID).and_then(|id| id.try_into().ok()).filter(is_ours)),
                }
            }
            if found.len() > MOST {
                return Err(io::Error::other("too many connections"));
            }
        }
    }

    fn destroy(&self, family: u8, id: &[u8; ID]) -> io::Result<()> {
        self.send(&message(DESTROY, (libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16, family, id))?;
        let mut buffer = [0; 1024];
        let length = recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        match Messages(&buffer[..length]).next() {
            Some((ERROR, body)) if !body.starts_with(&[0; 4]) => Err(refusal(body)),
            Some(_) => Ok(()),
            None => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    fn send(&self, message: &[u8]) -> io::Result<()> {
        send(self.0.as_raw_fd(), message, MsgFlags::empty())?;
        Ok(())
    }
}

/// `struct nlmsghdr` and `struct inet_diag_req_v2`.
fn message(kind: u16, flags: u16, family: u8, id: &[u8; ID]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + 8 + ID);
    bytes.extend(((HEADER + 8 + ID) as u32).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend([0; 8]);
    bytes.extend([family, libc::IPPROTO_TCP as u8, 0, 0]);
    bytes.extend(LIVE_STATES.to_ne_bytes());
    bytes.extend(id);
    bytes
}

/// Whether a socket's own address is the NIC's, also as IPv6 writes it.
fn is_ours(id: &[u8; ID]) -> bool {
    let source = &id[4..20];
    let ours = GUEST_ADDRESS.octets();
    let mapped = Ipv4Addr::from(ours).to_ipv6_mapped().octets();
    source == mapped || source[..4] == ours && source[4..].iter().all(|byte| *byte == 0)
}

fn refusal(body: &[u8]) -> io::Error {
    let code = body.first_chunk::<4>().map_or(0, |bytes| i32::from_ne_bytes(*bytes));
    io::Error::from_raw_os_error(code.wrapping_neg())
}

/// The messages in what the kernel sent: kind and body.
struct Messages<'a>(&'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let length = u32::from_ne_bytes(*self.0.first_chunk::<4>()?) as usize;
        let kind = u16::from_ne_bytes(self.0.get(4..6)?.try_into().ok()?);
        let body = self.0.get(HEADER..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, body))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_lists_connections_and_those_within_the_host_are_left_alone() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
        let _client = std::net::TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
        match reset_connections() {
            Ok(ended) => assert_eq!(ended, 0, "no connection of this host is over a guest's NIC"),
            // A kernel without the monitor.
            Err(error) => assert!(error.raw_os_error().is_some(), "{error}"),
        }
    }

    #[test]
    fn addresses_are_recognised_in_both_families() {
        let mut id = [0; ID];
        id[4..8].copy_from_slice(&GUEST_ADDRESS.octets());
        assert!(is_ours(&id));
        id[19] = 1;
        assert!(!is_ours(&id));
        id[4..20].copy_from_slice(&GUEST_ADDRESS.to_ipv6_mapped().octets());
        assert!(is_ours(&id));
    }

    #[test]
    fn messages_that_are_cut_end_the_list() {
        let whole = message(BY_FAMILY, 0, 2, &[7; ID]);
        assert_eq!(Messages(&[whole.clone(), whole.clone()].concat()).count(), 2);
        assert_eq!(Messages(&whole[..40]).count(), 0);
        assert_eq!(Messages(&[0; 64]).count(), 0);
    }
}
