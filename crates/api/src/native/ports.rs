//! Ports of a sandbox: links for people, tunnels for programs.
//!
//! ```text
//! client  -- binary: bytes ----->  server --guest link--> 127.0.0.1:port in the guest
//!         <----- binary: bytes --
//!         <---- text "end" ---->   one direction has ended; the other goes on
//! ```

use std::time::Duration;

use axum::{
    extract::{
        State,
        ws::{Message, WebSocket, WebSocketUpgrade, rejection::WebSocketUpgradeRejection},
    },
    http::{HeaderMap, StatusCode, header},
    response::Response,
};
use bytes::{Bytes, BytesMut};
use futures::{
    SinkExt as _, StreamExt as _,
    stream::{SplitSink, SplitStream},
};
use serde::{Deserialize, Serialize};
use stockade_engine::guest::PortStream;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, ReadHalf, WriteHalf};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{guest, sandbox_id, show_time};
use crate::{
    ApiError, AppState, Peer,
    auth::Caller,
    edge::{self, Reason},
    extract::{Json, Path},
};

const DEFAULT_SECONDS: f64 = 3600.0;
const PIECE: usize = 64 << 10;
const PING_INTERVAL: Duration = Duration::from_secs(20);
const END: &str = "end";

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(preview)).routes(routes!(tunnel))
}

/// A link to be made.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct PreviewRequest {
    /// The port in the sandbox.
    port: u16,
    /// How long the link works, in seconds.
    #[serde(default = "default_seconds")]
    #[schema(default = 3600.0)]
    lifetime_seconds: f64,
}

fn default_seconds() -> f64 {
    DEFAULT_SECONDS
}

/// A link to a port of a sandbox.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct Preview {
    /// Opens the port in a browser, which then keeps the token as a cookie.
    url: String,
    /// For programs: send it as `X-Stockade-Token`.
    token: String,
    #[schema(format = DateTime)]
    expires_at: String,
}

/// Make a link to a port of a sandbox.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/previews", tag = "network", params(("id" = String, Path)),
    request_body = PreviewRequest, responses((status = 200, body = Preview))
)]
async fn preview(
    State(state): State<AppState>,
    caller: Caller,
    axum::Extension(peer): axum::Extension<Peer>,
    headers: HeaderMap,
    Path(id): Path<String>,
    Json(request): Json<PreviewRequest>,
) -> Result<axum::Json<Preview>, ApiError> {
    let id = sandbox_id(&id)?;
    let lifetime = super::sandboxes::lifetime(request.lifetime_seconds)?;
    let made = state.service.preview_token(&caller.0, &id, request.port, lifetime).await?;
    let scheme = if peer.is_secure { "https" } else { "http" };
    // The port the server was reached at, whatever stands in front of it.
    let host = headers.get(header::HOST).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let port = host.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok());
    let port = port.map(|(_, port)| format!(":{port}")).unwrap_or_default();
    let token = made.token.expose();
    let url = format!("{scheme}://{}-{id}.{}{port}/?stockade_token={token}", request.port, state.base_domain);
    Ok(axum::Json(Preview { url, token: token.to_owned(), expires_at: show_time(made.expires_at) }))
}

/// A TCP connection to a port of a sandbox over a WebSocket: binary messages are bytes, the text `end` ends one
/// direction.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/ports/{port}/ws", tag = "network",
    params(("id" = String, Path), ("port" = u16, Path)),
    responses((status = 101, description = "Binary messages are bytes of the connection."))
)]
async fn tunnel(
    State(state): State<AppState>,
    caller: Caller,
    Path((id, port)): Path<(String, u16)>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    let upgrade = super::ws::checked(upgrade)?;
    let guest = guest(&state, &caller, &id).await?;
    let stream = edge::connect(&guest, port).await.map_err(|reason| match reason {
        Reason::PortClosed => {
            ApiError::new(StatusCode::BAD_GATEWAY, "port_closed", format!("nothing listens on port {port}"))
                .hint("start a server there; one that listens on localhost alone is fine")
        }
        _ => ApiError::new(StatusCode::BAD_GATEWAY, "guest_link_broken", "the guest cannot be reached now"),
    })?;
    Ok(super::ws::start(upgrade, state, async move |socket, _| {
        // The sandbox is in use while the tunnel is open.
        let _guest = guest;
        join(socket, stream).await;
    }))
}

async fn join(socket: WebSocket, stream: Box<dyn PortStream>) {
    let (sink, source) = socket.split();
    let (reader, writer) = tokio::io::split(stream);
    // Each direction ends by itself; an error ends both.
    let _ = tokio::try_join!(outwards(reader, sink), inwards(source, writer));
}

/// From the guest to the client.
async fn outwards(
    mut reader: ReadHalf<Box<dyn PortStream>>,
    mut sink: SplitSink<WebSocket, Message>,
) -> Result<(), Broken> {
    let mut buffer = BytesMut::with_capacity(PIECE);
    let mut ended = false;
    loop {
        let read = async { if ended { std::future::pending().await } else { reader.read_buf(&mut buffer).await } };
        match tokio::time::timeout(PING_INTERVAL, read).await {
            // Also after the end: the other direction may be a long one.
            Err(_) => sink.send(Message::Ping(Bytes::new())).await.map_err(|_| Broken)?,
            Ok(Ok(0)) => {
                ended = true;
                sink.send(Message::text(END)).await.map_err(|_| Broken)?;
            }
            Ok(Ok(_)) => {
                sink.send(Message::Binary(buffer.split().freeze())).await.map_err(|_| Broken)?;
                buffer.reserve(PIECE);
            }
            Ok(Err(_)) => return Err(Broken),
        }
    }
}

/// From the client to the guest.
async fn inwards(mut source: SplitStream<WebSocket>, mut writer: WriteHalf<Box<dyn PortStream>>) -> Result<(), Broken> {
    while let Some(message) = source.next().await {
        match message.map_err(|_| Broken)? {
            Message::Binary(bytes) => writer.write_all(&bytes).await.map_err(|_| Broken)?,
            Message::Text(text) if text.as_str() == END => writer.shutdown().await.map_err(|_| Broken)?,
            Message::Ping(_) | Message::Pong(_) => {}
            Message::Text(_) | Message::Close(_) => return Err(Broken),
        }
    }
    Err(Broken)
}

/// The client or the server in the guest has gone; there is nobody to tell.
struct Broken;
