//! The NIC: address, route, the gateway's place on the link.

use std::{
    fs, io, mem,
    net::{Ipv4Addr, UdpSocket},
    os::fd::AsRawFd,
    path::Path,
};

use stockade_wire::network::{GATEWAY_ADDRESS, GATEWAY_MAC, GUEST_ADDRESS, INTERFACE, MTU, PREFIX_LENGTH, RESOLV_CONF};

use crate::failure::check;

const RESOLV_CONF_PATH: &str = "/etc/resolv.conf";

/// Brings the NIC up with its addresses. `false`: the machine has none.
pub(crate) fn set_up() -> io::Result<bool> {
    if !Path::new("/sys/class/net").join(INTERFACE).exists() {
        return Ok(false);
    }
    // There is no IPv6 on the link; without an address of its own the guest's programs do not try it either.
    let _ = fs::write(format!("/proc/sys/net/ipv6/conf/{INTERFACE}/disable_ipv6"), "1");
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    let mut request = request();
    request.ifr_ifru.ifru_mtu = MTU.into();
    set(&socket, libc::SIOCSIFMTU as libc::Ioctl, &request)?;
    request.ifr_ifru.ifru_addr = address(GUEST_ADDRESS);
    set(&socket, libc::SIOCSIFADDR as libc::Ioctl, &request)?;
    request.ifr_ifru.ifru_netmask = address(Ipv4Addr::from_bits(u32::MAX << (32 - u32::from(PREFIX_LENGTH))));
    set(&socket, libc::SIOCSIFNETMASK as libc::Ioctl, &request)?;
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    set(&socket, libc::SIOCSIFFLAGS as libc::Ioctl, &request)?;
    add_neighbour(&socket)?;
    add_default_route(&socket)?;
    Ok(true)
}

/// Names the gateway as name server, unless the file system names one already: that one is answered by the gateway, too.
pub(crate) fn name_server() -> io::Result<()> {
    let there = fs::read_to_string(RESOLV_CONF_PATH).unwrap_or_default();
    if there.lines().any(|line| line.trim_start().starts_with("nameserver")) {
        return Ok(());
    }
    // It may be a link into a directory that is empty until some service fills it.
    let _ = fs::remove_file(RESOLV_CONF_PATH);
    fs::write(RESOLV_CONF_PATH, RESOLV_CONF)
}

fn request() -> libc::ifreq {
    // SAFETY: all zero is a valid value of this plain struct.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(INTERFACE.bytes()) {
        *to = from as libc::c_char;
    }
    request
}

fn address(address: Ipv4Addr) -> libc::sockaddr {
    let internet = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: 0,
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.octets()) },
        sin_zero: [0; 8],
    };
    // SAFETY: both are plain structs of the same size.
    unsafe { mem::transmute(internet) }
}

fn set<T>(socket: &UdpSocket, what: libc::Ioctl, value: &T) -> io::Result<()> {
    // SAFETY: each caller passes the struct its request reads, which lives over the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), what, std::ptr::from_ref(value)) }.into()).map(drop)
}

/// The gateway never moves: the first packet after a restore need not ask where it is.
fn add_neighbour(socket: &UdpSocket) -> io::Result<()> {
    // SAFETY: all zero is a valid value of this plain struct.
    let mut entry: libc::arpreq = unsafe { mem::zeroed() };
    entry.arp_pa = address(GATEWAY_ADDRESS);
    entry.arp_ha.sa_family = libc::ARPHRD_ETHER;
    for (to, from) in entry.arp_ha.sa_data.iter_mut().zip(GATEWAY_MAC) {
        *to = from as libc::c_char;
    }
    entry.arp_flags = libc::ATF_PERM | libc::ATF_COM;
    for (to, from) in entry.arp_dev.iter_mut().zip(INTERFACE.bytes()) {
        *to = from as libc::c_char;
    }
    set(socket, libc::SIOCSARP as libc::Ioctl, &entry)
}

fn add_default_route(socket: &UdpSocket) -> io::Result<()> {
    // SAFETY: all zero is a valid value of this plain struct.
    let mut route: libc::rtentry = unsafe { mem::zeroed() };
    route.rt_dst = address(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = address(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = address(GATEWAY_ADDRESS);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    match set(socket, libc::SIOCADDRT as libc::Ioctl, &route) {
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        other => other,
    }
}
