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
async fn the_key_in_the_file_counts_and_the_one_it_replaced_does_not() {
    let t = TestServer::start().await;
    let [first, second] = [(); 2].map(|()| Secret::random_hex("e2b_", 20));
    let opens = async |key: &Secret| t.service.authenticate(key.expose()).await.expect("looked up").is_some();
    let (_, other) = t.service.create_api_key(&t.who.workspace, "ci").await.expect("made");
    let id = t.service.take_key_file(&t.who.workspace, &first).await.expect("taken");
    assert_eq!(t.service.take_key_file(&t.who.workspace, &first).await.expect("again"), id);
    t.service.take_key_file(&t.who.workspace, &second).await.expect("replaced");
    assert_eq!((opens(&first).await, opens(&second).await, opens(&other).await), (false, true, true));
    assert_eq!(t.service.take_key_file(&t.who.workspace, &first).await.expect("put back"), id);
    assert_eq!((opens(&first).await, opens(&second).await, opens(&other).await), (true, false, true));

    // Of a key that was made otherwise the file takes nothing away when it leaves it again.
    t.service.take_key_file(&t.who.workspace, &other).await.expect("taken");
    t.service.take_key_file(&t.who.workspace, &first).await.expect("put back");
    assert_eq!((opens(&first).await, opens(&other).await), (true, true));
    let stranger = t.stranger().await;
    assert!(t.service.take_key_file(&stranger.workspace, &first).await.is_err(), "it has an owner");
    assert!(t.service.create_api_key(&t.who.workspace, "first").await.is_err(), "the name is the file's");
}
