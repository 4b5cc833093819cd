//! A small internet on loopback: servers of the tests' own under made-up public names, for guests to reach through
//! the gateway. The operator's routes lead the names there.

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use axum::{
    Json, Router,
    body::Bytes,
    extract::{Query, Request, State, WebSocketUpgrade, ws::Message},
    http::{HeaderMap, Method, StatusCode, Uri},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{any, get, post},
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{ServerConfig, crypto::ring, pki_types::PrivateKeyDer},
};

/// Servers under made-up names.
pub struct World {
    directory: TempDir,
    routes: BTreeMap<String, String>,
    seen: Seen,
}

type Seen = Arc<Mutex<Vec<Value>>>;

impl World {
    /// HTTP on port 80 and HTTPS on port 443 of each name, answered by the same server: `/echo` shows the request,
    /// `/bytes?count=N` sends bytes, `/socket` is a WebSocket that echoes, `/token` gives access tokens to OAuth clients
    /// whose secret is `CLIENT_SECRET`, `/mint` makes values for a broker that says `MINT_BEARER`, anything else is a
    /// file of `files()`.
    pub async fn start(names: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        fs::create_dir(directory.path().join("files")).expect("made");
        let (certificate, acceptor) = tls(names);
        fs::write(directory.path().join("ca.pem"), certificate).expect("written");
        let seen = Seen::default();
        let router = router(seen.clone(), &directory.path().join("files"));
        let http = serve(router.clone(), None).await;
        let https = serve(router, Some(acceptor)).await;
        let routes = names
            .iter()
            .flat_map(|name| [(format!("{name}:80"), http.to_string()), (format!("{name}:443"), https.to_string())])
            .collect();
        Self { directory, routes, seen }
    }

    /// Files the servers give.
    pub fn files(&self) -> PathBuf {
        self.directory.path().join("files")
    }

    /// The certificate of whoever signed the servers' ones, for guests that are to trust them by themselves.
    pub fn certificate(&self) -> String {
        fs::read_to_string(self.directory.path().join("ca.pem")).expect("there")
    }

    /// Leads a name and port to a server of the test's own.
    pub fn route(&mut self, from: &str, to: SocketAddr) {
        self.routes.insert(from.to_owned(), to.to_string());
    }

    /// The file for `stockade up --network`. `more`: further settings of the operator's.
    pub fn network_file(&self, more: &Value) -> String {
        let mut settings = json!({
            "routes": self.routes,
            "trusted_certificates": [self.directory.path().join("ca.pem")],
        });
        for (name, value) in more.as_object().into_iter().flatten() {
            settings[name] = value.clone();
        }
        let path = self.directory.path().join("network.json");
        fs::write(&path, settings.to_string()).expect("written");
        path.to_string_lossy().into_owned()
    }

    /// The requests there were, in order: `method`, `host`, `path`, `headers`, `body`.
    pub fn seen(&self) -> Vec<Value> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn tls(names: &[&str]) -> (String, TlsAcceptor) {
    let mut authority = CertificateParams::default();
    authority.distinguished_name.push(DnType::CommonName, "the world's own");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().expect("a key");
    let certificate = authority.self_signed(&key).expect("a certificate");
    let issuer = Issuer::new(authority, key);
    let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
    let leaf_key = KeyPair::generate().expect("a key");
    let leaf = CertificateParams::new(names).expect("names").signed_by(&leaf_key, &issuer).expect("a certificate");
    let key = PrivateKeyDer::Pkcs8(leaf_key.serialize_der().into());
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![leaf.der().clone()], key)
        .expect("a certificate with its key");
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    (certificate.pem(), TlsAcceptor::from(Arc::new(config)))
}

fn router(seen: Seen, files: &Path) -> Router {
    Router::new()
        .route("/echo", any(echo))
        .route("/bytes", get(bytes))
        .route("/socket", get(socket))
        .route("/token", post(token))
        .route("/mint", post(mint))
        .fallback_service(tower_http::services::ServeDir::new(files))
        .layer(middleware::from_fn_with_state(seen, see))
}

/// Writes every request down before it is answered.
async fn see(State(seen): State<Seen>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 64 << 20).await.unwrap_or_default();
    let shown = show(&parts.method, &parts.uri, &parts.headers, &body);
    seen.lock().unwrap_or_else(PoisonError::into_inner).push(shown);
    next.run(Request::from_parts(parts, body.into())).await
}

fn show(method: &Method, uri: &Uri, headers: &HeaderMap, body: &[u8]) -> Value {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let list: BTreeMap<_, _> = headers.iter().map(|(name, value)| (name.to_string(), text(value.as_bytes()))).collect();
    let host = uri.host().map(str::to_owned).or_else(|| list.get("host").cloned());
    let path = uri.path_and_query().map(ToString::to_string);
    json!({ "method": method.as_str(), "host": host, "path": path, "headers": list, "body": text(body) })
}

async fn echo(method: Method, uri: Uri, headers: HeaderMap, body: Bytes) -> Json<Value> {
    Json(show(&method, &uri, &headers, &body))
}

async fn bytes(Query(query): Query<BTreeMap<String, usize>>) -> Bytes {
    vec![b'x'; query.get("count").copied().unwrap_or(0)].into()
}

/// The secret of OAuth clients.
pub const CLIENT_SECRET: &str = "client-secret-4d1f";
/// What the server says to `/mint`.
pub const MINT_BEARER: &str = "bearer-of-the-server-9c";
/// The value of `/token`.
pub const ACCESS_TOKEN: &str = "access-token-of-the-world-77";

/// A token endpoint. It says more than it should when it refuses, as some do.
async fn token(headers: HeaderMap, body: String) -> Response {
    let basic = |id: &str| format!("Basic {}", base64(format!("{id}:{CLIENT_SECRET}")));
    let said = headers.get("authorization").and_then(|value| value.to_str().ok()).unwrap_or_default();
    if said != basic("client") || !body.contains("grant_type=client_credentials") {
        let error = json!({"error": "invalid_client", "error_description": format!("{said} is wrong")});
        return (StatusCode::UNAUTHORIZED, Json(error)).into_response();
    }
    Json(json!({"access_token": ACCESS_TOKEN, "token_type": "bearer", "expires_in": 3600})).into_response()
}

/// Makes a value of what it is told.
async fn mint(headers: HeaderMap, Json(asked): Json<Value>) -> Response {
    if headers.get("authorization").is_none_or(|said| said != &format!("Bearer {MINT_BEARER}")) {
        return StatusCode::FORBIDDEN.into_response();
    }
    let text = |name: &str| asked[name].as_str().unwrap_or_default().to_owned();
    let said: Vec<_> =
        asked["metadata"].as_object().into_iter().flatten().filter_map(|(_, said)| said.as_str()).collect();
    let value = format!("minted-for-{}-{}-{}", text("host"), text("sandbox"), said.join("-"));
    Json(json!({"value": value, "expires_in": 600})).into_response()
}

fn base64(text: String) -> String {
    base64::Engine::encode(&base64::engine::general_purpose::STANDARD, text)
}

async fn socket(upgrade: WebSocketUpgrade) -> impl IntoResponse {
    upgrade.on_upgrade(async |mut socket| {
        while let Some(Ok(message)) = socket.recv().await {
            if !matches!(message, Message::Text(_) | Message::Binary(_)) || socket.send(message).await.is_err() {
                return;
            }
        }
    })
}

async fn serve(router: Router, tls: Option<TlsAcceptor>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve_one(stream, router.clone(), tls.clone()));
        }
    });
    address
}

async fn serve_one(stream: TcpStream, router: Router, tls: Option<TlsAcceptor>) {
    let builder = auto::Builder::new(TokioExecutor::new());
    let service = TowerToHyperService::new(router);
    // Clients that go away are no concern of the server's.
    match tls {
        None => drop(builder.serve_connection_with_upgrades(TokioIo::new(stream), service).await),
        Some(tls) => {
            if let Ok(stream) = tls.accept(stream).await {
                drop(builder.serve_connection_with_upgrades(TokioIo::new(stream), service).await);
            }
        }
    }
}
