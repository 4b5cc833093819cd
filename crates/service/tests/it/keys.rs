use stockade_model::Secret;

use crate::support::TestServer;

#[tokio::test]
async fn a_key_opens_its_workspace_until_it_is_revoked() {
    let mut t = TestServer::start().await;
    let (id, key) = t.service.create_api_key(&t.who.workspace, "ci").await.expect("made");
    assert!(key.expose().starts_with("e2b_") && key.expose().len() == 44);
    let who = t.service.authenticate(key.expose()).await.expect("looked up").expect("known");
    assert_eq!((&who.workspace, &who.key), (&t.who.workspace, &id));
    t.crash().await;
    assert!(t.service.authenticate(key.expose()).await.expect("looked up").is_some(), "kept over a restart");
    assert!(!t.service.revoke_api_key(&t.stranger().await, &id).await.expect("asked"), "not a stranger's to revoke");
    assert!(t.service.revoke_api_key(&who, &id).await.expect("revoked"));
    for bad in [key.expose(), "", "e2b_", &"x".repeat(100_000), "' OR 1=1 --"] {
        assert!(t.service.authenticate(bad).await.expect("looked up").is_none());
    }
}

#[tokio::test]
async fn importing_a_key_again_changes_nothing() {
    let t = TestServer::start().await;
    let key = Secret::random_hex("e2b_", 20);
    let first = t.service.import_api_key(&t.who.workspace, "file", &key).await.expect("imported");
    assert_eq!(t.service.import_api_key(&t.who.workspace, "file", &key).await.expect("again"), first);
    let stranger = t.stranger().await;
    assert!(t.service.import_api_key(&stranger.workspace, "file", &key).await.is_err(), "it has an owner");
}
