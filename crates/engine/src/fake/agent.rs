//! The guest's side of a fake machine: a stub that answers health, identity and stats, or the real agent,
//! hosted in this process.

use std::{convert::Infallible, path::PathBuf, time::Instant};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde::Serialize;
use stockade_wire::{
    ErrorBody, ErrorCode, MAX_JSON_BYTES, PROTOCOL,
    hello::Scanner,
    machine::{AgentInfo, Identity, Stats},
    route,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

/// One guest's agent. Clones are the same agent.
#[derive(Clone)]
pub(super) struct FakeAgent {
    started: Instant,
    dir: PathBuf,
    hosted: Option<stockade_guest::Agent>,
}

impl FakeAgent {
    pub(super) fn new(dir: PathBuf) -> Self {
        Self { started: Instant::now(), dir, hosted: None }
    }

    /// The real agent, with `dir` as its user's home.
    pub(super) fn hosted(dir: PathBuf) -> Self {
        let hosted = Some(stockade_guest::Agent::hosted(dir.clone()));
        Self { hosted, ..Self::new(dir) }
    }

    /// Kills what runs, as the end of a machine would.
    pub(super) fn end(&self) {
        if let Some(agent) = &self.hosted {
            agent.end();
        }
    }

    /// Serves one link session to its end.
    pub(super) async fn serve(self, mut stream: DuplexStream) {
        if let Some(agent) = self.hosted {
            // However it ends, the host sees it on its own side.
            stockade_guest::serve(stream, agent).await.ok();
            return;
        }
        let mut scanner = Scanner::default();
        let hello = loop {
            match stream.read_u8().await.map(|byte| scanner.push(byte)) {
                Ok(Some(hello)) => break hello,
                Ok(None) => {}
                Err(_) => return,
            }
        };
        if stream.write_all(&hello.encode()).await.is_err() {
            return;
        }
        let service = service_fn(move |request| {
            let agent = self.clone();
            async move { Ok::<_, Infallible>(agent.answer(request).await) }
        });
        // However it ends, the host sees it on its own side.
        http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await.ok();
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        match request.uri().path() {
            route::HEALTH => json(
                StatusCode::OK,
                &AgentInfo {
                    protocol: PROTOCOL,
                    version: env!("CARGO_PKG_VERSION").to_owned(),
                    boot_id: self.dir.display().to_string(),
                    uptime_ms: self.started.elapsed().as_millis() as u64,
                },
            ),
            route::IDENTITY => match Limited::new(request.into_body(), MAX_JSON_BYTES).collect().await {
                Ok(body) => self.identity(&body.to_bytes()),
                Err(error) => refuse(ErrorCode::InvalidArgument, error.to_string()),
            },
            route::STATS => json(StatusCode::OK, &Stats { cpu_count: 1, ..Stats::default() }),
            route::SYNC => json(StatusCode::OK, &serde_json::json!({})),
            path => refuse(ErrorCode::NotFound, format!("no route {path}")),
        }
    }

    fn identity(&self, body: &[u8]) -> Response<Full<Bytes>> {
        let kept = serde_json::from_slice::<Identity>(body)
            .map_err(|error| error.to_string())
            .and_then(|_| std::fs::write(self.dir.join("identity"), body).map_err(|error| error.to_string()));
        match kept {
            Ok(()) => json(StatusCode::OK, &serde_json::json!({})),
            Err(error) => refuse(ErrorCode::InvalidArgument, error),
        }
    }
}

fn refuse(code: ErrorCode, message: String) -> Response<Full<Bytes>> {
    let status = StatusCode::from_u16(code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    json(status, &ErrorBody::new(code, message))
}

fn json(status: StatusCode, value: &impl Serialize) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(serde_json::to_vec(value).unwrap_or_default()));
    *response.status_mut() = status;
    response
}
