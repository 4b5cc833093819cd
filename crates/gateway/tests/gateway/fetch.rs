//! Questions the gateway asks by itself.

use std::time::Duration;

use http::Request;
use serde_json::json;
use stockade_gateway::{Asker, FetchError, Fetcher, check_https_url, policy::Policy};

use super::world::World;

const PATIENCE: Duration = Duration::from_secs(30);

fn world(bounds: Option<Policy>) -> (World, Fetcher) {
    let mut fetcher = None;
    let world = World::with(|config| fetcher = Some(Fetcher::new(config, bounds.as_ref()).unwrap()));
    (world, fetcher.unwrap())
}

async fn ask(fetcher: &Fetcher, asker: Asker, url: &str) -> Result<u16, FetchError> {
    let request = Request::post(url).header("authorization", "Basic x").body(b"a=b".to_vec()).unwrap();
    fetcher.fetch(asker, PATIENCE, request).await.map(|answer| answer.status().as_u16())
}

#[tokio::test]
async fn a_question_arrives_as_it_was_asked_and_redirects_are_not_followed() {
    let (world, fetcher) = world(None);
    let server = world.https("login.example", "93.184.216.34", &["h2", "http/1.1"]).await;
    assert_eq!(ask(&fetcher, Asker::User, "https://login.example/token?x=1").await, Ok(200));
    let seen = server.last();
    assert_eq!((&seen["path"], &seen["body"], &seen["method"]), (&json!("/token?x=1"), &json!("a=b"), &json!("POST")));
    assert_eq!(seen["headers"]["host"], json!(["login.example"]));
    assert_eq!(ask(&fetcher, Asker::User, "https://login.example/redirect").await, Ok(302));
    assert_eq!(world.net.dialled.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn a_users_question_goes_where_a_guest_might_and_an_operators_anywhere() {
    let (world, fetcher) = world(None);
    for (name, address) in
        [("inside.example", "10.0.0.7"), ("metadata.example", "169.254.169.254"), ("here.example", "127.0.0.1")]
    {
        let server = world.https(name, address, &["http/1.1"]).await;
        let url = format!("https://{name}/token");
        let refused = ask(&fetcher, Asker::User, &url).await;
        assert!(matches!(refused, Err(FetchError::Denied { .. })), "{name}: {refused:?}");
        let literal = ask(&fetcher, Asker::User, &format!("https://{address}/token")).await;
        assert!(matches!(literal, Err(FetchError::Denied { .. })), "{address}: {literal:?}");
        assert_eq!((server.count(), world.net.dialled.lock().unwrap().len()), (0, 0), "{name}");
        assert_eq!(ask(&fetcher, Asker::Operator, &url).await, Ok(200));
        world.net.dialled.lock().unwrap().clear();
    }
}

#[tokio::test]
async fn the_operators_bounds_hold_for_users_questions() {
    let bounds = serde_json::from_value(json!({
        "default": "allow_public",
        "rules": [{"action": "deny", "names": ["other.example"]}],
        "http": [{"id": "no tokens", "hosts": ["login.example"], "path": {"prefix": "/secret"}, "action": "deny"}],
    }));
    let (world, fetcher) = world(Some(bounds.unwrap()));
    world.https("login.example", "93.184.216.34", &["http/1.1"]).await;
    world.https("other.example", "93.184.216.35", &["http/1.1"]).await;
    assert_eq!(ask(&fetcher, Asker::User, "https://login.example/token").await, Ok(200));
    for url in ["https://other.example/token", "https://login.example/secret/token"] {
        let refused = ask(&fetcher, Asker::User, url).await;
        assert!(matches!(refused, Err(FetchError::Denied { .. })), "{url}: {refused:?}");
    }
}

#[tokio::test]
async fn an_endless_answer_and_silence_end() {
    let (world, fetcher) = world(None);
    let server = world.https("login.example", "93.184.216.34", &["http/1.1"]).await;
    let (send, pieces) = tokio::sync::mpsc::channel(1);
    *server.pieces.lock().unwrap() = Some(pieces);
    let flood = tokio::spawn(async move { while send.send(vec![b'x'; 64 << 10].into()).await.is_ok() {} });
    let failed = ask(&fetcher, Asker::User, "https://login.example/stream").await;
    assert!(matches!(failed, Err(FetchError::Failed { .. })), "{failed:?}");
    flood.await.unwrap();
    let (_send, pieces) = tokio::sync::mpsc::channel(1);
    *server.pieces.lock().unwrap() = Some(pieces);
    let request = Request::post("https://login.example/stream").body(Vec::new()).unwrap();
    let late = fetcher.fetch(Asker::User, Duration::from_millis(300), request).await;
    assert!(matches!(late, Err(FetchError::Late { .. })), "{late:?}");
}

#[test]
fn only_https_urls_with_a_plain_host_are_asked() {
    for good in ["https://a.example", "https://a.example:8443/x?y=1", "https://1.1.1.1/", "https://[2600::1]/"] {
        assert!(check_https_url(good).is_ok(), "{good}");
    }
    for bad in [
        "http://a.example/",
        "a.example",
        "https://u:p@a.example/",
        "https://a.example/#x",
        "https://a b/",
        "",
        "https://a.example:99999/",
        "https://a.example:/",
        "https://a.example:0/",
    ] {
        assert!(check_https_url(bad).is_err(), "{bad}");
    }
}
