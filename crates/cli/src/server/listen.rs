//! Takes the ports a server listens on.

use std::{io, net::SocketAddr};

use tokio::net::TcpListener;

use crate::failure::Failure;

/// Listens on the address; `option` is what changes it.
pub(crate) async fn listen(address: SocketAddr, option: &str) -> Result<TcpListener, Failure> {
    let variable = option.trim_start_matches('-').to_uppercase();
    TcpListener::bind(address).await.map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => Failure::new("port_taken", format!("{address} is taken by another program"))
            .hint(format!("choose another with {option} or STOCKADE_{variable}; port 0 takes a free one")),
        io::ErrorKind::PermissionDenied => {
            Failure::new("port_forbidden", format!("this user may not listen on {address}"))
                .hint(format!("choose a port over 1023 with {option} or STOCKADE_{variable}"))
        }
        _ => Failure::host(format!("listen on {address}"), error).hint(format!("choose another address with {option}")),
    })
}
