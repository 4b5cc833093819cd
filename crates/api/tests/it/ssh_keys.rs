//! Keys that open sandboxes over SSH, as the API shows them.

use serde_json::json;

use crate::support::{Answer, TestServer};

const KEY: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGLwVRLRY3dZmJxmUSCPGr6bRYbGHUXDIlAF2uQ5PDQf";

#[tokio::test]
async fn keys_are_added_listed_and_removed_each_in_its_workspace() {
    let t = TestServer::start().await;
    let sandbox = t.create().await;
    let added = t.post("/v1/ssh-keys", &json!({"name": "laptop", "public_key": format!("{KEY} me@laptop\n")})).await;
    assert_eq!(added.status, 201, "{added:?}");
    assert_eq!(added.json["public_key"], KEY);
    assert_eq!(added.json["fingerprint"], "SHA256:fbiy2Cd5VZo0qGk+sM/znSoP7KuwUQh80Hg11IU40mY");
    assert!(added.json["sandbox"].is_null() && added.json["expires_at"].is_null(), "{added:?}");
    let again = t.post("/v1/ssh-keys", &json!({"name": "other", "public_key": KEY})).await;
    assert_eq!((again.status.as_u16(), again.code()), (409, "ssh_key_exists"));

    let key = added.json["id"].as_str().expect("an id");
    let foreign = t.client.delete(t.url(&format!("/v1/ssh-keys/{key}"))).bearer_auth(&t.stranger);
    let foreign = Answer::of(foreign).await;
    assert_eq!((foreign.status.as_u16(), foreign.code()), (404, "ssh_key_not_found"));
    let theirs = Answer::of(t.client.get(t.url("/v1/ssh-keys")).bearer_auth(&t.stranger)).await;
    assert_eq!(theirs.json["items"], json!([]));
    assert_eq!(t.get("/v1/ssh-keys").await.json["items"][0]["name"], "laptop");
    assert_eq!(t.delete(&format!("/v1/ssh-keys/{key}")).await.status, 204);
    assert_eq!(t.delete(&format!("/v1/ssh-keys/{key}")).await.status, 404);

    let bound = json!({"name": "once", "public_key": KEY, "sandbox": sandbox, "lifetime_seconds": 60});
    let bound = t.post("/v1/ssh-keys", &bound).await;
    assert_eq!((&bound.json["sandbox"], bound.json["expires_at"].is_string()), (&json!(sandbox), true), "{bound:?}");
}

#[tokio::test]
async fn what_is_no_key_is_refused_with_the_field_and_the_reason() {
    let t = TestServer::start().await;
    for (body, code, part) in [
        (json!({"name": "k", "public_key": "ssh-rsa AAAAB3NzaC1yc2E="}), "invalid_argument", "ssh-keygen -t ed25519"),
        (json!({"name": "k", "public_key": "-----BEGIN OPENSSH PRIVATE KEY-----"}), "invalid_argument", "private key"),
        (json!({"name": "", "public_key": KEY}), "invalid_argument", "name"),
        (json!({"name": "k", "public_key": KEY, "lifetime_seconds": 0}), "invalid_argument", "lifetime"),
        (json!({"name": "k", "public_key": KEY, "sandbox": "sbxaaaaaaaaaaaaaaaaaaaa"}), "sandbox_not_found", "sbx"),
    ] {
        let answer = t.post("/v1/ssh-keys", &body).await;
        assert_eq!(answer.code(), code, "{body}: {answer:?}");
        assert!(answer.message().contains(part), "{body}: {answer:?}");
    }
    let endpoint = t.get("/v1/ssh").await;
    assert_eq!((endpoint.status.as_u16(), endpoint.code()), (404, "ssh_off"), "this server speaks none");
}
