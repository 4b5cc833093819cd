//! The HTTP server towards the guest, with its ceilings.

use std::{convert::Infallible, io, sync::Arc};

use http::{Method, Request, Response, Version, header};
use http_body_util::BodyExt;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::BufReader;
use tokio_rustls::server::TlsStream;

use super::{BoxBody, lingering::Lingering, refuse::Refusal, requests::Session};
use crate::{limits::Limits, net::FlowStream, upstream::Io};

const MAX_HEADERS: usize = 256;

/// Serves requests judged one by one.
pub(super) async fn serve_requests(io: impl Io + 'static, http2: bool, session: Arc<Session>) -> io::Result<()> {
    let limits = session.limits().clone();
    let answer = move |request| {
        let session = Arc::clone(&session);
        async move { session.answer(request).await }
    };
    serve(io, http2, &limits, answer).await
}

/// Gives every request the same answer.
pub(super) async fn answer_all(stream: FlowStream, limits: &Limits, refusal: Refusal) -> io::Result<()> {
    answer_with(stream, false, limits, refusal).await
}

/// Gives every request the same answer.
pub(super) async fn answer_all_tls(
    stream: TlsStream<BufReader<FlowStream>>,
    limits: &Limits,
    refusal: Refusal,
) -> io::Result<()> {
    let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    answer_with(stream, http2, limits, refusal).await
}

async fn answer_with(io: impl Io + 'static, http2: bool, limits: &Limits, refusal: Refusal) -> io::Result<()> {
    let answer = move |_: Request<BoxBody>| {
        let mut response = refusal.response();
        // The next one may be allowed, on a connection of its own.
        response.headers_mut().insert(header::CONNECTION, header::HeaderValue::from_static("close"));
        std::future::ready(response)
    };
    serve(io, http2, limits, answer).await
}

async fn serve<F, R>(io: impl Io + 'static, http2: bool, limits: &Limits, answer: F) -> io::Result<()>
where
    F: Fn(Request<BoxBody>) -> R,
    R: Future<Output = Response<BoxBody>> + Send + 'static,
{
    let patience = limits.head_timeout();
    let service = service_fn(|request: Request<Incoming>| {
        let (version, is_head) = (request.version(), request.method() == Method::HEAD);
        let response = answer(request.map(|body| match version {
            Version::HTTP_2 => Lingering::new(body, patience).boxed_unsync(),
            _ => body.map_err(Into::into).boxed_unsync(),
        }));
        async move {
            let mut response = response.await;
            if version == Version::HTTP_2 {
                response.headers_mut().remove(header::CONNECTION);
                // HTTP/1's server leaves it out by itself.
                if is_head {
                    *response.body_mut() = BoxBody::default();
                }
            }
            Ok::<_, Infallible>(response)
        }
    });
    let io = TokioIo::new(io);
    let served = if http2 {
        hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_concurrent_streams(limits.http2_streams)
            .max_header_list_size(limits.head_bytes as u32)
            .max_send_buf_size(256 << 10)
            .serve_connection(io, service)
            .await
    } else {
        hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.idle_timeout())
            .max_buf_size(limits.head_bytes.max(8 << 10))
            .max_headers(MAX_HEADERS)
            .serve_connection(io, service)
            .with_upgrades()
            .await
    };
    served.map_err(io::Error::other)
}
