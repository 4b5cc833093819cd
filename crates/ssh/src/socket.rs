//! A connection to a Unix socket in the guest, made by a process of the sandbox's user: who may use the socket is then
//! the guest kernel's decision.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::BytesMut;
use futures::StreamExt as _;
use stockade_engine::{
    EngineError, GuestClient,
    guest::{Events, PortStream, Selector},
};
use stockade_wire::{
    event::Event,
    process::{Command, SignalRequest, StartRequest, Tool},
};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, DuplexStream, ReadBuf, WriteHalf};
use tokio_util::{
    io::ReaderStream,
    sync::{CancellationToken, DropGuard},
};

const BUFFER: usize = 64 << 10;
const LONGEST_REASON: usize = 1024;
const SIGKILL: i32 = 9;

/// Why there is no connection.
pub(crate) enum ConnectError {
    /// The guest's kernel said so.
    Refused(String),
    Guest(EngineError),
}

impl From<EngineError> for ConnectError {
    fn from(error: EngineError) -> Self {
        Self::Guest(error)
    }
}

/// Connects; the process ends with the stream.
pub(crate) async fn connect(guest: GuestClient, path: String) -> Result<Box<dyn PortStream>, ConnectError> {
    let command = Command::Tool(Tool::Connect(path));
    let request = StartRequest { cwd: Some("~".to_owned()), stdin: true, ..StartRequest::new(command) };
    let mut events = guest.start(&request).await?;
    let lost = || ConnectError::Refused("the guest's answer broke off".to_owned());
    let process = Selector::Pid(events.started.take().ok_or_else(lost)?.pid);
    connected(&mut events).await?;
    let (near, far) = tokio::io::duplex(BUFFER);
    let (input, output) = tokio::io::split(far);
    let gone = CancellationToken::new();
    let end = gone.clone();
    tokio::spawn(async move {
        let input = guest.write_stdin(&process, Box::pin(ReaderStream::with_capacity(input, BUFFER)), true);
        let moved = async { tokio::join!(input, write(events, output)) };
        if end.run_until_cancelled(moved).await.is_none() {
            // It may have ended by itself.
            let _ = guest.signal(&process, SignalRequest { signal: SIGKILL, main_only: false }).await;
        }
    });
    Ok(Box::new(Socket { near, _end: gone.drop_guard() }))
}

/// Waits for the line that says so.
async fn connected(events: &mut Events) -> Result<(), ConnectError> {
    let mut said = BytesMut::new();
    loop {
        match events.events.next().await.transpose()? {
            Some(Event::Stderr(bytes)) if said.len() < LONGEST_REASON => said.extend_from_slice(&bytes),
            Some(Event::Exit(_)) | None => {
                return Err(ConnectError::Refused(String::from_utf8_lossy(&said).trim().to_owned()));
            }
            Some(_) => {}
        }
        if said.starts_with(b"connected\n") {
            return Ok(());
        }
    }
}

/// What the socket's other side sends, to its end.
async fn write(mut events: Events, mut output: WriteHalf<DuplexStream>) -> io::Result<()> {
    while let Some(event) = events.events.next().await {
        match event.map_err(io::Error::other)? {
            Event::Stdout(bytes) => output.write_all(&bytes).await?,
            Event::Exit(_) => break,
            _ => {}
        }
    }
    output.shutdown().await
}

struct Socket {
    near: DuplexStream,
    _end: DropGuard,
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.near).poll_read(cx, buf)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.near).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.near).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.near).poll_shutdown(cx)
    }
}
