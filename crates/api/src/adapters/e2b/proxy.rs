//! `<port>-<id>.e2b.<base>`: finds the sandbox, then hands port 49983 to [`envd`](super::envd) and tunnels
//! every other one to whatever listens in the guest, through the guest link.
//!
//! The SDKs tell a dead sandbox from a closed port by the sentences in [`Reason::message`].

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::{Request, State},
    response::{Html, IntoResponse, Response},
};
use http::{HeaderMap, HeaderName, StatusCode, header};
use serde::Serialize;
use stockade_model::{Sandbox, SandboxId};
use stockade_service::{Ingress, Previews};
use tower::ServiceExt as _;

use super::{
    ENVD_PORT,
    access::check_token,
    envd::{self, Entered, Watchers},
    error::HttpError,
};
use crate::{
    AppState, SandboxHost,
    edge::{Reason, find, forward, keys},
    error::chain,
    native::CODE_INTERPRETER_PORT,
};

/// What opens ports of sandboxes without public traffic.
const TRAFFIC_TOKEN: &str = "e2b-traffic-access-token";

#[derive(Clone)]
struct Edge {
    app: AppState,
    envd: Router,
    watchers: Arc<Watchers>,
}

pub(super) fn router(app: AppState) -> Router {
    let edge = Edge { app, envd: envd::router(), watchers: Arc::default() };
    Router::new().fallback(enter).with_state(edge)
}

async fn enter(State(edge): State<Edge>, mut request: Request) -> Response {
    let Some(SandboxHost { port, sandbox: id }) = request.extensions().get::<SandboxHost>().cloned() else {
        return Refusal::InvalidHost.respond(request.headers());
    };
    let refuse =
        |reason: Reason, headers: &HeaderMap| Refusal::Sandbox { id: id.clone(), port, reason }.respond(headers);
    // A browser asks for leave without a token, and whether or not the sandbox lives.
    if port == ENVD_PORT && request.method() == http::Method::OPTIONS {
        return into_response(edge.envd.oneshot(request).await);
    }
    let ingress = match admit(&edge.app, &id, port, &mut request).await {
        Ok(ingress) => ingress,
        Err(refusal) => return refusal.respond(request.headers()),
    };
    let (sandbox, guest) = match find(&edge.app, &id).await {
        Ok(found) => found,
        Err(reason) => return refuse(reason, request.headers()),
    };
    if port == ENVD_PORT {
        request.extensions_mut().insert(Entered { sandbox, guest, watchers: edge.watchers });
        return into_response(edge.envd.oneshot(request).await);
    }
    if let Err(error) = code_needs_token(&sandbox, port, &request) {
        return error.into_response();
    }
    if let Err(error) = keys::withhold(&edge.app, request.headers_mut()).await {
        return error.into_response();
    }
    let headers = request.headers().clone();
    match forward(&guest, port, ingress.host_for(port), request).await {
        Ok(response) => response,
        Err(reason) => refuse(reason, &headers),
    }
}

/// Whether a request may go to a port, before anything is resumed for it. The guest never sees the token.
async fn admit(app: &AppState, id: &str, port: u16, request: &mut Request) -> Result<Ingress, Refusal> {
    let Ok(sandbox) = id.parse::<SandboxId>() else { return Ok(Ingress::default()) };
    let ingress = app.service.ingress(&sandbox).await.map_err(|error| {
        tracing::error!(sandbox = id, error = chain(&error), "a sandbox's network could not be looked up");
        Refusal::Sandbox { id: id.to_owned(), port, reason: Reason::Internal }
    })?;
    let token = request.headers_mut().remove(TRAFFIC_TOKEN);
    if ingress.previews == Previews::Token && port != ENVD_PORT {
        let right = app.service.traffic_token(&sandbox);
        let shown = token.as_ref().and_then(|token| token.to_str().ok());
        if !shown.is_some_and(|shown| right.matches(shown)) {
            return Err(Refusal::Traffic { id: id.to_owned() });
        }
    }
    Ok(ingress)
}

/// Running code is what a secured sandbox's token is for. E2B's clients send it there, and none to list, make, restart
/// and remove contexts: those are open to whoever knows the address, as other ports are, unless the sandbox has no
/// public traffic.
fn code_needs_token(sandbox: &Sandbox, port: u16, request: &Request) -> Result<(), HttpError> {
    let path = request.uri().path();
    let is_open = path == "/health" || path == "/contexts" || path.starts_with("/contexts/");
    if port == CODE_INTERPRETER_PORT && !is_open && request.method() != http::Method::OPTIONS {
        return check_token(sandbox, request.headers());
    }
    Ok(())
}

fn into_response(result: Result<Response, std::convert::Infallible>) -> Response {
    result.unwrap_or_else(|never| match never {})
}

enum Refusal {
    InvalidHost,
    /// The traffic token is missing or another's.
    Traffic {
        id: String,
    },
    Sandbox {
        id: String,
        port: u16,
        reason: Reason,
    },
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct RefusalJson<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox_id: Option<&'a str>,
    message: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    code: u16,
}

impl Refusal {
    fn status(&self) -> StatusCode {
        match self {
            Self::InvalidHost => StatusCode::BAD_REQUEST,
            Self::Traffic { .. } => StatusCode::FORBIDDEN,
            Self::Sandbox { reason, .. } => reason.status(),
        }
    }

    fn message(&self) -> &'static str {
        match self {
            Self::InvalidHost => "Invalid host",
            Self::Traffic { .. } => "Missing or invalid traffic access token: send it as E2b-Traffic-Access-Token",
            Self::Sandbox { reason, .. } => reason.message(),
        }
    }

    fn respond(&self, headers: &HeaderMap) -> Response {
        let status = self.status();
        let mut json = RefusalJson { sandbox_id: None, message: self.message(), port: None, code: status.as_u16() };
        match self {
            Self::Sandbox { id, port, reason } => {
                json.sandbox_id = Some(id);
                json.port = (*reason == Reason::PortClosed).then_some(*port);
            }
            Self::Traffic { id } => json.sandbox_id = Some(id),
            Self::InvalidHost => {}
        }
        if is_navigation(headers) && matches!(self, Self::Sandbox { .. }) {
            return (status, Html(page(&json))).into_response();
        }
        (status, Json(json)).into_response()
    }
}

/// A person looking at a page, as opposed to a program: a browser that does not fetch for a script.
fn is_navigation(headers: &HeaderMap) -> bool {
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let browser = text(header::USER_AGENT).contains("Mozilla/");
    let json = text(header::ACCEPT).contains("application/json");
    let script = text(HeaderName::from_static("sec-fetch-mode")) == "cors";
    browser && !json && !script
}

/// Everything shown is ours or of `[a-z0-9]`, so nothing needs escaping.
fn page(json: &RefusalJson<'_>) -> String {
    let id = json.sandbox_id.unwrap_or_default();
    let hint = match json.port {
        Some(port) => format!("Nothing listens on port {port}. Start a server there and load this page again."),
        None => "It has ended, or its address is wrong.".to_owned(),
    };
    format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>{message}</title>\
         <style>body{{font:16px/1.5 system-ui,sans-serif;max-width:36rem;margin:20vh auto;padding:0 1rem}}\
         code{{color:#666}}</style><h1>{message}</h1><p>{hint}</p><p><code>{id}</code></p></html>\n",
        message = json.message,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        use http::HeaderValue;
        let pair = |(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        pairs.iter().map(pair).collect()
    }

    async fn body_of(response: Response) -> String {
        let bytes = axum::body::to_bytes(response.into_body(), 1 << 16).await.expect("a short body");
        String::from_utf8(bytes.to_vec()).expect("text")
    }

    #[tokio::test]
    async fn the_two_sentences_the_sdks_look_for_are_as_they_expect() {
        let refusal = |reason| Refusal::Sandbox { id: "sbx1".to_owned(), port: 8080, reason };
        let gone = refusal(Reason::NotFound).respond(&HeaderMap::new());
        assert_eq!(gone.status(), 502);
        assert_eq!(body_of(gone).await, r#"{"sandboxId":"sbx1","message":"The sandbox was not found","code":502}"#);
        let closed = body_of(refusal(Reason::PortClosed).respond(&HeaderMap::new())).await;
        let expected =
            r#"{"sandboxId":"sbx1","message":"The sandbox is running but port is not open","port":8080,"code":502}"#;
        assert_eq!(closed, expected);
    }

    #[tokio::test]
    async fn people_get_a_page_and_programs_get_json() {
        let browser = ("user-agent", "Mozilla/5.0 (X11)");
        let refusal = Refusal::Sandbox { id: "sbx1".to_owned(), port: 80, reason: Reason::PortClosed };
        let page = refusal.respond(&headers(&[browser, ("accept", "text/html,*/*")]));
        assert_eq!(page.status(), 502);
        assert!(body_of(page).await.contains("port is not open"));
        for pairs in [
            &[("user-agent", "curl/8")][..],
            &[browser, ("accept", "application/json")],
            &[browser, ("sec-fetch-mode", "cors")],
        ] {
            assert!(body_of(refusal.respond(&headers(pairs))).await.starts_with('{'), "{pairs:?}");
        }
    }
}
