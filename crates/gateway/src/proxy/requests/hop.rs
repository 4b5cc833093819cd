//! What belongs to one hop and is not passed on, and the one upgrade that is.

use http::{HeaderMap, HeaderValue, header, request};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;

use crate::net::Upgraded;

/// An upgrade the guest asks for.
pub(super) struct Upgrade {
    pub(super) protocol: HeaderValue,
    pub(super) guest: OnUpgrade,
    pub(super) asked: Option<Upgraded>,
}

/// A WebSocket handshake; other upgrades are dropped, which the protocol allows.
pub(super) fn take_upgrade(head: &mut request::Parts) -> Option<Upgrade> {
    let guest = head.extensions.remove::<OnUpgrade>()?;
    let protocol = head.headers.get(header::UPGRADE)?;
    let asked = head.headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    let mut asked = asked.flat_map(|value| value.split(',')).map(str::trim);
    let is_websocket = protocol.as_bytes().eq_ignore_ascii_case(b"websocket");
    (is_websocket && asked.any(|token| token.eq_ignore_ascii_case("upgrade"))).then(|| Upgrade {
        protocol: protocol.clone(),
        guest,
        asked: None,
    })
}

/// Removes what belongs to one hop.
pub(super) fn strip_hop_headers(headers: &mut HeaderMap) {
    let named: Vec<header::HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    let keeps_trailers = headers.get(header::TE).is_some_and(|te| te.as_bytes().eq_ignore_ascii_case(b"trailers"));
    for name in named {
        // Not those that say what the message is, whatever the guest claims.
        if name != header::HOST && name != header::CONTENT_LENGTH && name != header::AUTHORIZATION {
            headers.remove(name);
        }
    }
    for name in [
        header::CONNECTION,
        header::PROXY_AUTHENTICATE,
        header::PROXY_AUTHORIZATION,
        header::TE,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
    ] {
        headers.remove(name);
    }
    headers.remove("keep-alive");
    headers.remove("proxy-connection");
    headers.remove("http2-settings");
    if keeps_trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
}

/// Moves bytes between two upgraded connections until both are done.
pub(super) async fn relay(guest: OnUpgrade, host: OnUpgrade) {
    let (Ok(guest), Ok(host)) = tokio::join!(guest, host) else { return };
    let (mut guest, mut host) = (TokioIo::new(guest), TokioIo::new(host));
    // Either end may break at any time; the flow's end is recorded.
    let _ = tokio::io::copy_bidirectional(&mut guest, &mut host).await;
}
