//! The little the engine itself says to the guest's agent.

use std::time::Duration;

use stockade_wire::hello::{Hello, Scanner};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

use crate::{EngineError, GuestClient};

/// Opens a session on the link; the time until the agent has answered is the machine's own.
pub(crate) async fn hello(stream: &mut UnixStream, patience: Duration) -> Result<(), EngineError> {
    let mut epoch = [0; 16];
    getrandom::fill(&mut epoch).map_err(|error| EngineError::Emulator { step: "hello", detail: error.to_string() })?;
    let hello = Hello::new(epoch);
    let exchange = async {
        stream.write_all(&hello.encode()).await?;
        let mut scanner = Scanner::default();
        loop {
            if scanner.push(stream.read_u8().await?) == Some(hello) {
                return Ok(());
            }
        }
    };
    match tokio::time::timeout(patience, exchange).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(source)) => Err(EngineError::Host { action: "talk to the guest".to_owned(), source }),
        Err(_) => Err(EngineError::GuestSilent { waited: patience, console: String::new() }),
    }
}

/// Waits for the agent of a booting guest and lets it write the guest's file systems out.
pub(crate) async fn settle(stream: UnixStream, patience: Duration) -> Result<(), EngineError> {
    let client = GuestClient::open(stream, patience).await?;
    let info = client.health().await?;
    client.sync().await?;
    tracing::debug!(agent = info.version, uptime_ms = info.uptime_ms, "guest booted");
    client.close();
    Ok(())
}
