//! HTTP servers of the tests and clients that speak to them from a guest.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    body::{Frame, Incoming},
    client::conn,
    service::service_fn,
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use rustls::{ClientConfig, ServerConfig, pki_types::ServerName};
use serde_json::{Value, json};
use stockade_gateway::Io;
use tokio::{net::TcpListener, sync::mpsc};
use tokio_rustls::{TlsAcceptor, TlsConnector, client::TlsStream};

use super::{
    guest::{Guest, GuestStream},
    world::{World, roots},
};

pub type Body = UnsyncBoxBody<Bytes, std::convert::Infallible>;

pub fn full(text: impl Into<Bytes>) -> Body {
    Full::new(text.into()).boxed_unsync()
}

/// A server that tells what it was asked; some paths do more.
#[derive(Clone, Default)]
pub struct Server {
    /// What was asked, in order.
    pub seen: Arc<Mutex<Vec<Value>>>,
    /// What `/stream` sends, piece by piece.
    pub pieces: Arc<Mutex<Option<mpsc::Receiver<Bytes>>>>,
    /// Bodies of `/sink`, piece by piece.
    pub sunk: Arc<Mutex<Option<mpsc::UnboundedSender<Bytes>>>>,
}

impl Server {
    async fn answer(self, mut request: Request<Incoming>) -> Response<Body> {
        let mut headers = BTreeMap::<String, Vec<String>>::new();
        for (name, value) in request.headers() {
            headers.entry(name.to_string()).or_default().push(String::from_utf8_lossy(value.as_bytes()).into_owned());
        }
        let mut seen = json!({
            "method": request.method().as_str(),
            "uri": request.uri().to_string(),
            "path": request.uri().path_and_query().map(ToString::to_string),
            "version": format!("{:?}", request.version()),
            "headers": headers,
        });
        match request.uri().path() {
            "/ws" => {
                let upgrade = hyper::upgrade::on(&mut request);
                tokio::spawn(async move {
                    let mut io = TokioIo::new(upgrade.await.unwrap());
                    let (mut reader, mut writer) = tokio::io::split(&mut io);
                    let _ = tokio::io::copy(&mut reader, &mut writer).await;
                });
                self.seen.lock().unwrap().push(seen);
                let response = Response::builder().status(101).header("connection", "upgrade");
                return response.header("upgrade", "websocket").body(full("")).unwrap();
            }
            "/stream" => {
                let pieces = self.pieces.lock().unwrap().take().unwrap();
                let frames = futures::stream::unfold(pieces, async |mut pieces| {
                    pieces.recv().await.map(|piece| (Ok(Frame::data(piece)), pieces))
                });
                return Response::new(StreamBody::new(frames).boxed_unsync());
            }
            "/sink" => {
                let sink = self.sunk.lock().unwrap().take().unwrap();
                let mut body = request.into_body();
                while let Some(Ok(frame)) = body.frame().await {
                    if let Ok(data) = frame.into_data() {
                        let _ = sink.send(data);
                    }
                }
                return Response::new(full("sunk"));
            }
            "/redirect" => {
                let response = Response::builder().status(302).header("location", "https://other.example/");
                return response.header("alt-svc", "h3=\":443\"").body(full("")).unwrap();
            }
            _ => {}
        }
        let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
        seen["body"] = String::from_utf8_lossy(&body).into();
        self.seen.lock().unwrap().push(seen.clone());
        let echoed = seen["headers"]["authorization"][0].as_str().unwrap_or("none").to_owned();
        Response::builder().header("x-echo", echoed).body(full(seen.to_string())).unwrap()
    }

    /// The last request.
    pub fn last(&self) -> Value {
        self.seen.lock().unwrap().last().cloned().unwrap()
    }

    pub fn count(&self) -> usize {
        self.seen.lock().unwrap().len()
    }

    async fn run(self, tls: Option<ServerConfig>) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let acceptor = tls.map(|config| TlsAcceptor::from(Arc::new(config)));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (server, acceptor) = (self.clone(), acceptor.clone());
                tokio::spawn(async move {
                    let io: Box<dyn Io> = match acceptor {
                        None => Box::new(stream),
                        Some(acceptor) => match acceptor.accept(stream).await {
                            Ok(stream) => Box::new(stream),
                            Err(_) => return,
                        },
                    };
                    let service = service_fn(move |request| {
                        let server = server.clone();
                        async move { Ok::<_, std::convert::Infallible>(server.answer(request).await) }
                    });
                    let builder = auto::Builder::new(TokioExecutor::new());
                    let _ = builder.serve_connection_with_upgrades(TokioIo::new(io), service).await;
                });
            }
        });
        address
    }
}

impl World {
    /// A server in clear text on port 80 of a made-up name.
    pub async fn http(&self, name: &str, address: &str) -> Server {
        let server = Server::default();
        self.name(name, &[address]);
        self.serve(&format!("{address}:80"), server.clone().run(None).await);
        server
    }

    /// A TLS server on port 443 of a made-up name.
    pub async fn https(&self, name: &str, address: &str, protocols: &[&str]) -> Server {
        let server = Server::default();
        self.name(name, &[address]);
        let mut config = self.server_tls(name);
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        self.serve(&format!("{address}:443"), server.clone().run(Some(config)).await);
        server
    }

    pub fn server_tls(&self, name: &str) -> ServerConfig {
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.server_ca).unwrap();
        let key = rustls::pki_types::PrivatePkcs8KeyDer::from(key.serialize_der()).into();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        builder.with_no_client_auth().with_single_cert(vec![certificate.der().clone()], key).unwrap()
    }

    /// TLS from the guest, trusting the deployment's CA (`inside`) or the servers' own.
    pub fn client_tls(&self, inside: bool, protocols: &[&str]) -> ClientConfig {
        let pem = if inside { self.gateway.certificate_pem() } else { &self.server_ca_pem };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let mut config = builder.with_root_certificates(roots(pem)).with_no_client_auth();
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        config
    }

    pub async fn connect_tls(
        &self,
        guest: &Guest,
        name: &str,
        inside: bool,
        protocols: &[&str],
    ) -> std::io::Result<TlsStream<GuestStream>> {
        let stream = guest.connect_name(name, 443).await?;
        let config = self.client_tls(inside, protocols);
        TlsConnector::from(Arc::new(config)).connect(ServerName::try_from(name.to_owned()).unwrap(), stream).await
    }

    /// One request over TLS that is opened by the gateway, with HTTP/1.1.
    pub async fn get_inside(&self, guest: &Guest, request: http::request::Builder) -> Reply {
        let request = request.body(full("")).unwrap();
        let name = request.headers()[header::HOST].to_str().unwrap().to_owned();
        let tls = self.connect_tls(guest, &name, true, &["http/1.1"]).await.unwrap();
        Http1::over(tls).await.send(request).await
    }
}

pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Reply {
    pub async fn read(response: Response<Incoming>) -> Self {
        let (head, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Self { status: head.status, headers: head.headers, body }
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {:?}", self.body))
    }

    /// The code of a refusal.
    pub fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap().to_owned()
    }
}

pub struct Http1(pub conn::http1::SendRequest<Body>);

impl Http1 {
    pub async fn over(io: impl Io + 'static) -> Self {
        let (sender, connection) = conn::http1::handshake(TokioIo::new(io)).await.unwrap();
        tokio::spawn(connection.with_upgrades());
        Self(sender)
    }

    pub async fn send(&mut self, request: Request<Body>) -> Reply {
        self.0.ready().await.unwrap();
        Reply::read(self.0.send_request(request).await.unwrap()).await
    }
}

pub async fn http2(io: impl Io + 'static) -> conn::http2::SendRequest<Body> {
    let (sender, connection) = conn::http2::handshake(TokioExecutor::new(), TokioIo::new(io)).await.unwrap();
    tokio::spawn(connection);
    sender
}

pub fn get(host: &str, path: &str) -> Request<Body> {
    Request::builder().uri(path).header(header::HOST, host).body(full("")).unwrap()
}
