//! The SSH side of a server.

use std::net::SocketAddr;

use stockade_api::SshEndpoint;
use stockade_service::Service;
use stockade_ssh::HostKey;
use tokio::net::TcpListener;

use super::{data_dir::DataDir, listen::listen};
use crate::failure::{Failure, chain};

/// A port that is taken and a key to answer with: what can go wrong has by now.
pub(super) struct Listening {
    listener: TcpListener,
    key: HostKey,
}

impl Listening {
    pub(super) async fn at(address: SocketAddr, data_dir: &DataDir) -> Result<Self, Failure> {
        let listener = listen(address, "--ssh").await?;
        let key = HostKey::open_or_create(&data_dir.join("ssh-host-key")).map_err(|error| {
            Failure::new("bad_ssh_host_key", chain(&error))
                .hint("put the key back, or remove the file: a new key is made at the next start, and clients will ask")
        })?;
        Ok(Self { listener, key })
    }

    pub(super) fn serve(self, service: Service) -> Result<(stockade_ssh::Server, SshEndpoint), Failure> {
        let (host_key, fingerprint) = (self.key.public.clone(), self.key.fingerprint.clone());
        let server = stockade_ssh::serve(self.listener, self.key, service);
        let server = server.map_err(|error| Failure::host("serve SSH", error))?;
        let endpoint = SshEndpoint { address: server.address(), host_key, fingerprint };
        Ok((server, endpoint))
    }
}
