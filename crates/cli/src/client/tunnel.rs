//! TCP connections into a sandbox over WebSockets.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::{SinkExt as _, StreamExt as _};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time,
};
use tokio_tungstenite::tungstenite::Message;

use super::{Client, socket::Socket};
use crate::failure::Failure;

const PIECE: usize = 64 << 10;
const PING_EVERY: Duration = Duration::from_secs(20);
const END: &str = "end";

impl Client {
    /// Connects to a port of a sandbox.
    pub(crate) async fn connect_port(&self, id: &str, port: u16) -> Result<Tunnel, Failure> {
        let socket = self.socket(&["v1", "sandboxes", id, "ports", &port.to_string(), "ws"], None).await?;
        Ok(Tunnel { client: self.clone(), socket })
    }
}

/// An open connection to a port of a sandbox.
pub(crate) struct Tunnel {
    client: Client,
    socket: Socket,
}

impl Tunnel {
    /// Moves bytes until both directions have ended.
    pub(crate) async fn join(self, stream: TcpStream) -> Result<(), Failure> {
        let (mut sink, mut source) = self.socket.split();
        let (mut reader, mut writer) = stream.into_split();
        let broken = |error| self.client.broken(&error);
        let local = |error: std::io::Error| Failure::host("use the local connection", error);
        let upwards = async {
            let mut buffer = BytesMut::with_capacity(PIECE);
            let mut ended = false;
            loop {
                let read =
                    async { if ended { std::future::pending().await } else { reader.read_buf(&mut buffer).await } };
                match time::timeout(PING_EVERY, read).await {
                    Err(_) => sink.send(Message::Ping(Bytes::new())).await.map_err(broken)?,
                    Ok(Ok(0)) => {
                        ended = true;
                        sink.send(Message::text(END)).await.map_err(broken)?;
                    }
                    Ok(read) => {
                        read.map_err(local)?;
                        sink.send(Message::Binary(buffer.split().freeze())).await.map_err(broken)?;
                        buffer.reserve(PIECE);
                    }
                }
            }
        };
        let downwards = async {
            while let Some(message) = source.next().await {
                match message.map_err(broken)? {
                    Message::Binary(bytes) => writer.write_all(&bytes).await.map_err(local)?,
                    Message::Text(text) if text.as_str() == END => return writer.shutdown().await.map_err(local),
                    Message::Close(_) => break,
                    _ => {}
                }
            }
            Ok(())
        };
        // The guest's end is the end: what the other side still sends would reach nobody.
        tokio::select! {
            ended = downwards => ended,
            ended = upwards => ended,
        }
    }
}
