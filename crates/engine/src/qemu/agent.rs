//! The little the engine itself says to the guest's agent.

use std::time::Duration;

use futures::StreamExt as _;
use stockade_wire::{
    event::Event,
    hello::{Hello, Scanner},
    machine::Identity,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

use crate::{EngineError, GuestClient, Startup};

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

/// Tells the guest of a template what all machines made from it have in common, and has that written out.
pub(crate) async fn introduce(stream: UnixStream, patience: Duration, identity: &Identity) -> Result<(), EngineError> {
    let client = GuestClient::open(stream, patience).await?;
    client.set_identity(identity).await?;
    client.sync().await?;
    client.close();
    Ok(())
}

/// How often it is asked whether a program is ready.
const READY_INTERVAL: Duration = Duration::from_millis(500);

/// Starts a program, waits until it is ready, and has the guest's file systems written out again.
pub(crate) async fn start_up(stream: UnixStream, patience: Duration, startup: &Startup) -> Result<(), EngineError> {
    let client = GuestClient::open(stream, patience).await?;
    // Dropping its events leaves it running.
    let pid = client.start(&startup.start).await?.started.map(|started| started.pid);
    loop {
        let mut events = client.start(&startup.ready).await?.events;
        let mut exit = None;
        while let Some(event) = events.next().await {
            if let Event::Exit(how) = event? {
                exit = Some(how);
            }
        }
        if exit.is_some_and(|exit| exit.code == Some(0)) {
            break;
        }
        let known = client.processes().await?.processes;
        if let Some(exit) = known.iter().find(|known| Some(known.pid) == pid).and_then(|known| known.exit.as_ref()) {
            let detail = format!("the template's program ended with {exit:?}");
            return Err(EngineError::Emulator { step: "start up", detail });
        }
        tokio::time::sleep(READY_INTERVAL).await;
    }
    client.sync().await?;
    client.close();
    Ok(())
}
