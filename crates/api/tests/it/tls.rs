//! HTTPS by a client that trusts our CA and nothing else.

use reqwest::{Certificate, Client, Version};

use crate::support::{BASE, TestServer};

fn client(t: &TestServer) -> reqwest::ClientBuilder {
    let pem = std::fs::read(t.server.ca_file().expect("our CA")).expect("ca.pem");
    let address = t.server.https_address().expect("HTTPS");
    let names =
        [BASE.to_owned(), format!("api.e2b.{BASE}"), format!("49983-sbx1.e2b.{BASE}"), format!("80-sbx1.{BASE}")];
    let builder = Client::builder()
        .tls_built_in_root_certs(false)
        .add_root_certificate(Certificate::from_pem(&pem).expect("a certificate"));
    names.iter().fold(builder, |builder, name| builder.resolve(name, address))
}

#[tokio::test]
async fn every_name_we_serve_is_in_the_certificate() {
    let t = TestServer::start().await;
    let port = t.server.https_address().expect("HTTPS").port();
    let client = client(&t).build().expect("a client");
    for name in [BASE, "localhost", "127.0.0.1"] {
        let answer = client.get(format!("https://{name}:{port}/v1/health")).send().await.expect(name);
        assert_eq!((answer.status().as_u16(), answer.version()), (200, Version::HTTP_2), "{name}");
    }
    for name in ["api.e2b", "49983-sbx1.e2b", "80-sbx1"] {
        client.get(format!("https://{name}.{BASE}:{port}/")).send().await.expect(name);
    }
}

#[tokio::test]
async fn http_1_is_spoken_where_the_client_wants_it() {
    let t = TestServer::start().await;
    let port = t.server.https_address().expect("HTTPS").port();
    let client = client(&t).http1_only().build().expect("a client");
    let answer = client.get(format!("https://{BASE}:{port}/v1/health")).send().await.expect("an answer");
    assert_eq!((answer.status().as_u16(), answer.version()), (200, Version::HTTP_11));
}

#[tokio::test]
async fn plain_http_takes_http_2_with_prior_knowledge() {
    let t = TestServer::start().await;
    let client = Client::builder().http2_prior_knowledge().build().expect("a client");
    let answer = client.get(t.url("/v1/health")).send().await.expect("an answer");
    assert_eq!((answer.status().as_u16(), answer.version()), (200, Version::HTTP_2));
}

#[tokio::test]
async fn a_client_that_does_not_trust_the_ca_is_not_served() {
    let t = TestServer::start().await;
    let port = t.server.https_address().expect("HTTPS").port();
    let stranger = Client::builder().tls_built_in_root_certs(false).build().expect("a client");
    assert!(stranger.get(format!("https://localhost:{port}/v1/health")).send().await.is_err());
}
