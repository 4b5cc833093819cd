//! What E2B's in-guest server answers on port 49983, answered by the host: the routes are E2B's, the
//! work is the guest agent's.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{DefaultBodyLimit, Request},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use base64::Engine as _;
use http::{HeaderMap, header};
use stockade_engine::GuestClient;
use stockade_model::Sandbox;
use tower_http::{cors::CorsLayer, decompression::RequestDecompressionLayer};

use super::{access, connect, connect::ConnectError};

mod files;
mod filesystem;
mod guest_error;
mod misc;
mod process;
mod range;
mod uploads;
mod watchers;

pub(super) use watchers::Watchers;

/// Keep-alive events when a client asks for none in particular.
const DEFAULT_KEEP_ALIVE: Duration = Duration::from_secs(90);

/// A request that has found its sandbox; in the extensions of every request that gets here.
#[derive(Clone)]
pub(super) struct Entered {
    pub(super) sandbox: Sandbox,
    pub(super) guest: GuestClient,
    pub(super) watchers: Arc<Watchers>,
}

/// Who calls, in which sandbox, and how long it will wait.
pub(super) struct Caller {
    pub(super) sandbox: Sandbox,
    pub(super) guest: GuestClient,
    pub(super) watchers: Arc<Watchers>,
    /// The user named in `Authorization: Basic`; nobody is authenticated by it.
    pub(super) user: Option<String>,
    /// `Connect-Timeout-Ms`.
    pub(super) timeout: Option<Duration>,
    /// `Keepalive-Ping-Interval`.
    pub(super) keep_alive: Duration,
}

impl Caller {
    pub(super) fn of(request: &Request) -> Result<Self, ConnectError> {
        let Entered { sandbox, guest, watchers } =
            request.extensions().get::<Entered>().cloned().expect("the proxy lets nothing in without a sandbox");
        let headers = request.headers();
        Ok(Self {
            sandbox,
            guest,
            watchers,
            user: basic_user(headers),
            timeout: connect::timeout(headers)?,
            keep_alive: keep_alive(headers),
        })
    }
}

/// Routes of the in-guest server. What else its HTTP server has (`/init`, freezing) is for its host alone.
pub(super) fn router() -> Router {
    let with_token = Router::new()
        .route("/process.Process/List", post(process::list))
        .route("/process.Process/Start", post(process::start))
        .route("/process.Process/Connect", post(process::connect))
        .route("/process.Process/Update", post(process::update))
        .route("/process.Process/SendInput", post(process::send_input))
        .route("/process.Process/StreamInput", post(process::stream_input))
        .route("/process.Process/SendSignal", post(process::send_signal))
        .route("/process.Process/CloseStdin", post(process::close_stdin))
        .route("/filesystem.Filesystem/Stat", post(filesystem::stat))
        .route("/filesystem.Filesystem/MakeDir", post(filesystem::make_dir))
        .route("/filesystem.Filesystem/Move", post(filesystem::rename))
        .route("/filesystem.Filesystem/ListDir", post(filesystem::list_dir))
        .route("/filesystem.Filesystem/Remove", post(filesystem::remove))
        .route("/filesystem.Filesystem/WatchDir", post(filesystem::watch_dir))
        .route("/filesystem.Filesystem/CreateWatcher", post(filesystem::create_watcher))
        .route("/filesystem.Filesystem/GetWatcherEvents", post(filesystem::get_watcher_events))
        .route("/filesystem.Filesystem/RemoveWatcher", post(filesystem::remove_watcher))
        .route("/files/compose", post(files::compose))
        .route("/metrics", get(misc::metrics))
        .route("/envs", get(misc::envs))
        .route_layer(middleware::from_fn(require_token));
    let files = Router::new()
        .route("/files", get(files::download).post(uploads::upload))
        // What it does not know is refused by the handler, in words.
        .layer(RequestDecompressionLayer::new().pass_through_unaccepted(true));
    Router::new()
        .route("/health", get(misc::health))
        .merge(files)
        .merge(with_token)
        .layer(DefaultBodyLimit::disable())
        .layer(CorsLayer::permissive())
}

async fn require_token(request: Request, next: Next) -> Response {
    let entered = request.extensions().get::<Entered>().expect("the proxy lets nothing in without a sandbox");
    match access::check_token(&entered.sandbox, request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

/// The name in `Basic base64("<name>:")`; nothing if there is none or it cannot be read.
fn basic_user(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, encoded) = value.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = base64::engine::general_purpose::STANDARD.decode(encoded.trim()).ok()?;
    let text = String::from_utf8(decoded).ok()?;
    let name = text.split_once(':').map_or(text.as_str(), |(name, _)| name);
    (!name.is_empty()).then(|| name.to_owned())
}

fn keep_alive(headers: &HeaderMap) -> Duration {
    let seconds = headers.get("keepalive-ping-interval").and_then(|value| value.to_str().ok()?.trim().parse().ok());
    seconds.filter(|seconds| (1..=86_400).contains(seconds)).map_or(DEFAULT_KEEP_ALIVE, Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn user_of(value: &str) -> Option<String> {
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, HeaderValue::from_str(value).expect("ascii"));
        basic_user(&headers)
    }

    #[test]
    fn basic_authorization_names_the_user_and_nothing_else() {
        assert_eq!(user_of("Basic dXNlcjo="), Some("user".to_owned()));
        assert_eq!(user_of("basic cm9vdDppZ25vcmVk"), Some("root".to_owned()));
        assert_eq!(user_of("Basic Og=="), None);
        assert_eq!(user_of("Bearer dXNlcjo="), None);
        assert_eq!(user_of("Basic ???"), None);
    }
}
