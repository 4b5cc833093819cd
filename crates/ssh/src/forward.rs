//! A channel joined with a server in the guest: `ssh -L`, `-D`, `-W`.

use std::net::IpAddr;

use russh::{ChannelOpenFailure, server::ChannelOpenHandle};
use stockade_engine::{EngineError, guest::PortStream};
use stockade_model::SandboxId;
use stockade_service::Service;
use stockade_wire::ErrorCode;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, ReadHalf, WriteHalf};

use crate::{
    client::{Input, Inputs, Out},
    process::tell,
    socket,
};

const PIECE: usize = 32 << 10;
const CONNECT_FAILED: u32 = 2;

/// Where in the guest.
#[derive(Debug, Eq, PartialEq)]
pub(crate) enum Target {
    Port(u16),
    /// The path of a Unix socket, opened with the rights of the sandbox's user.
    Socket(String),
}

impl Target {
    /// A port of the guest itself. What lies beyond it is reached by programs in it, under the sandbox's policy.
    pub(crate) fn port(host: &str, port: u32) -> Result<Self, String> {
        let name = host.trim_end_matches('.').to_ascii_lowercase();
        let is_local = match name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>() {
            Ok(address) => address.to_canonical().is_loopback() || address.to_canonical().is_unspecified(),
            Err(_) => name == "localhost" || name.ends_with(".localhost"),
        };
        if !is_local {
            return Err("only ports of the sandbox's own localhost are forwarded".to_owned());
        }
        match u16::try_from(port) {
            Ok(port) if port > 0 => Ok(Self::Port(port)),
            _ => Err(format!("{port} is not a port")),
        }
    }
}

/// Connects, says so, and moves bytes until both directions have ended.
pub(crate) async fn run(
    service: &Service,
    sandbox: &SandboxId,
    target: Target,
    reply: ChannelOpenHandle,
    out: Out,
    inputs: Inputs,
) {
    let guest = match service.guest_by_token(sandbox, None).await {
        Ok((_, guest)) => guest,
        Err(error) => return refuse(reply, tell(sandbox, &error)).await,
    };
    let connected = match target {
        Target::Port(port) => match guest.connect_port(port).await {
            Err(EngineError::Guest(error)) if error.code == ErrorCode::PortClosed => {
                Err(format!("nothing listens on port {port}"))
            }
            connected => connected.map_err(|error| tell(sandbox, &error.into())),
        },
        Target::Socket(path) => socket::connect(guest, path).await.map_err(|error| match error {
            socket::ConnectError::Refused(why) => why,
            socket::ConnectError::Guest(error) => tell(sandbox, &error.into()),
        }),
    };
    let stream = match connected {
        Ok(stream) => stream,
        Err(why) => return refuse(reply, why).await,
    };
    reply.accept().await;
    let (reader, writer) = tokio::io::split(stream);
    let moved = join(outwards(reader, &out), inwards(inputs, writer)).await;
    if moved.is_ok() {
        let _ = out.close().await;
    }
}

async fn refuse(reply: ChannelOpenHandle, reason: String) {
    reply.reject(ChannelOpenFailure::Other { code: CONNECT_FAILED, reason }).await;
}

/// Until both directions have ended, or the client has gone.
async fn join(
    outwards: impl Future<Output = Result<(), Broken>>,
    inwards: impl Future<Output = Result<Inputs, Broken>>,
) -> Result<(), Broken> {
    tokio::pin!(outwards, inwards);
    tokio::select! {
        ended = &mut outwards => {
            ended?;
            inwards.await.map(drop)
        }
        ended = &mut inwards => {
            let mut inputs = ended?;
            tokio::select! {
                ended = outwards => ended,
                // Nothing comes after the end but that the client goes.
                _ = inputs.recv() => Err(Broken),
            }
        }
    }
}

/// From the guest to the client.
async fn outwards(mut reader: ReadHalf<Box<dyn PortStream>>, out: &Out) -> Result<(), Broken> {
    let mut buffer = bytes::BytesMut::with_capacity(PIECE);
    while reader.read_buf(&mut buffer).await.map_err(|_| Broken)? > 0 {
        out.data_bytes(buffer.split()).await.map_err(|_| Broken)?;
        buffer.reserve(PIECE);
    }
    out.eof().await.map_err(|_| Broken)
}

/// From the client to the guest.
async fn inwards(mut inputs: Inputs, mut writer: WriteHalf<Box<dyn PortStream>>) -> Result<Inputs, Broken> {
    loop {
        match inputs.recv().await {
            Some(Input::Data(piece)) => writer.write_all(piece.bytes()).await.map_err(|_| Broken)?,
            Some(Input::End) => return writer.shutdown().await.map(|()| inputs).map_err(|_| Broken),
            None => return Err(Broken),
        }
    }
}

/// One side has gone; the other hears of it when the channel or the connection is dropped.
struct Broken;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_sandbox_itself_is_a_target() {
        for host in
            ["localhost", "LOCALHOST.", "a.localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]", "0.0.0.0", "::"]
        {
            assert_eq!(Target::port(host, 80), Ok(Target::Port(80)), "{host}");
        }
        for host in ["example.com", "localhost.example.com", "10.0.0.1", "169.254.169.254", "::2", "", "1"] {
            assert!(Target::port(host, 80).is_err(), "{host}");
        }
        assert_eq!(Target::port("::ffff:127.0.0.1", 65_535), Ok(Target::Port(65_535)));
        assert!(Target::port("localhost", 0).is_err() && Target::port("localhost", 65_536).is_err());
    }
}
