//! Values that are made when they are needed, and the proof that no value stays anywhere.

use std::os::unix::fs::PermissionsExt as _;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use stockade_system_tests::{
    ACCESS_TOKEN, CLIENT_SECRET, Inodes, MINT_BEARER, Needle, Ran, Sandbox, TestServer, World, scan,
};

const NAMES: [&str; 3] = ["api.world.example", "other.example", "login.example"];

async fn create<'a>(server: &'a TestServer, more: Value) -> Sandbox<'a> {
    let mut body = json!({ "template": "base", "lifetime_seconds": 3600 });
    for (name, value) in more.as_object().into_iter().flatten() {
        body[name] = value.clone();
    }
    let sandbox = server.json(Method::POST, "/v1/sandboxes", Some(body)).await;
    Sandbox::new(server, sandbox["id"].as_str().expect("a sandbox has an id"))
}

/// A request with the secret of a variable, and what came of it: the status, then the body.
async fn ask(sandbox: &Sandbox<'_>, variable: &str) -> (String, String) {
    let ran = sandbox
        .shell(&format!(
            "curl -sS --max-time 60 -w '\\n%{{http_code}}' -H \"Authorization: Bearer ${variable}\" \
             https://api.world.example/echo"
        ))
        .await
        .expect_success();
    let text = text(&ran);
    let (body, status) = text.rsplit_once('\n').expect("a line with the status");
    (status.to_owned(), body.to_owned())
}

fn text(ran: &Ran) -> String {
    String::from_utf8_lossy(&ran.stdout).into_owned()
}

fn uses(secrets: &[(&str, &str)]) -> Value {
    let list: Vec<_> = secrets.iter().map(|(env, secret)| json!({ "env": env, "secret": secret })).collect();
    json!({ "secrets": list })
}

/// A program that answers with a file and notes that it was asked.
fn program(directory: &std::path::Path, name: &str, answer: &str) -> String {
    let path = directory.join(name);
    let script = format!("#!/bin/sh\ncat >> {0}.asked; echo >> {0}.asked\n{answer}\n", path.display());
    std::fs::write(&path, script).expect("written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("made executable");
    path.to_string_lossy().into_owned()
}

#[tokio::test]
async fn values_are_made_when_they_are_needed_and_a_request_without_one_is_not_sent() {
    let world = World::start(&NAMES).await;
    let place = tempfile::tempdir().expect("a directory");
    let good = program(place.path(), "good", r#"echo '{"value": "made-by-a-program-31", "expires_in": 600}'"#);
    let broken = program(place.path(), "broken", "echo sk-hidden; echo sk-hidden >&2; exit 3");
    let bearer = place.path().join("bearer");
    std::fs::write(&bearer, format!("{MINT_BEARER}\n")).expect("written");
    let hosts = json!(["api.world.example"]);
    let callback = json!({ "url": "https://login.example/mint", "bearer_file": bearer });
    let network = world.network_file(&json!({ "secrets": {
        "program": { "hosts": hosts, "mint": { "command": [good] } },
        "broken": { "hosts": hosts, "mint": { "command": [broken] } },
        "callback": { "hosts": hosts, "mint": { "callback": callback } },
    }}));
    let server = TestServer::start_with(&["--pool", "0", "--network", &network]).await;
    let oauth = |id: &str, url: &str| json!({ "token_url": url, "client_id": id, "scopes": ["read"] });
    for (name, id, url) in [
        ("oauth", "client", "https://login.example/token"),
        ("stranger", "stranger", "https://login.example/token"),
        ("inside", "client", "https://127.0.0.1:1/token"),
    ] {
        let body = json!({ "hosts": hosts, "oauth": oauth(id, url), "client_secret": CLIENT_SECRET });
        let answer = server.json(Method::PUT, &format!("/v1/secrets/{name}"), Some(body)).await;
        assert_eq!((&answer["source"], &answer["oauth"]["client_id"]), (&json!("oauth"), &json!(id)), "{answer}");
        assert!(!answer.to_string().contains(CLIENT_SECRET), "{answer}");
    }
    let own = json!({ "hosts": hosts, "value": "mine-instead-of-theirs" });
    let (status, answer) = server.try_json(Method::PUT, "/v1/secrets/program", Some(own)).await.expect("it answers");
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::CONFLICT, &json!("operators_secret")), "{answer}");

    let all = [
        ("PROGRAM", "program"),
        ("BROKEN", "broken"),
        ("CALLBACK", "callback"),
        ("OAUTH", "oauth"),
        ("STRANGER", "stranger"),
        ("INSIDE", "inside"),
    ];
    let sandbox = create(&server, json!({ "network": uses(&all), "metadata": { "team": "red" } })).await;
    let minted = format!("minted-for-api.world.example-{}-red", sandbox.id());
    for (variable, value) in
        [("PROGRAM", "made-by-a-program-31"), ("CALLBACK", minted.as_str()), ("OAUTH", ACCESS_TOKEN)]
    {
        let (status, body) = ask(&sandbox, variable).await;
        assert_eq!(status, "200", "{body}");
        assert!(body.contains(&format!("Bearer {value}")), "{variable}: {body}");
    }

    // Made once, however many wait for it.
    let before = world.seen().iter().filter(|request| request["path"] == "/token").count();
    assert_eq!(before, 1);
    let many = "for i in 1 2 3 4 5 6; do curl -sS --max-time 60 -o /dev/null -H \"Authorization: Bearer $OAUTH\" \
                https://api.world.example/echo & done; wait";
    sandbox.shell(many).await.expect_success();
    let other = create(&server, json!({ "network": uses(&all) })).await;
    assert_eq!(ask(&other, "OAUTH").await.0, "200");
    assert_eq!(ask(&sandbox, "PROGRAM").await.0, "200");
    assert_eq!(world.seen().iter().filter(|request| request["path"] == "/token").count(), 1);
    let questions = std::fs::read_to_string(place.path().join("good.asked")).expect("it was asked");
    let asked: Value = serde_json::from_str(questions.trim()).expect("one question");
    assert_eq!((&asked["host"], &asked["sandbox"]), (&json!("api.world.example"), &json!(sandbox.id())));

    // What cannot be made is refused and nothing is sent; nobody is quoted.
    let arrived = |world: &World| world.seen().iter().filter(|request| request["path"] == "/echo").count();
    let before = arrived(&world);
    for (variable, secret) in [("BROKEN", "broken"), ("STRANGER", "stranger"), ("INSIDE", "inside")] {
        let (status, body) = ask(&sandbox, variable).await;
        assert_eq!(status, "502", "{body}");
        assert!(body.contains("secret_unavailable") && body.contains(secret), "{body}");
        assert!(!body.contains("sk-hidden") && !body.contains(&STANDARD.encode("stranger:")[..8]), "{body}");
        let path = format!("/v1/audit?sandbox={}&kind=secret", sandbox.id());
        let records = server.json(Method::GET, &path, None).await;
        let record = &records["items"][0];
        assert_eq!((&record["reason"], &record["secrets"]), (&json!("secret_unavailable"), &json!([secret])));
    }
    assert_eq!(arrived(&world), before);

    // A client whose secret changes asks anew, and one that is wrong has no old token to fall back on.
    let body = json!({ "hosts": hosts, "client_secret": "wrong-secret-now",
                       "oauth": oauth("client", "https://login.example/token") });
    server.json(Method::PUT, "/v1/secrets/oauth", Some(body)).await;
    assert_eq!(ask(&sandbox, "OAUTH").await.0, "502");
    assert!(!server.log().contains("sk-hidden"));
    server.stop().await;
}

#[tokio::test]
async fn each_user_has_values_of_their_own_and_one_value_in_all_of_their_sandboxes() {
    let world = World::start(&NAMES).await;
    let place = tempfile::tempdir().expect("a directory");
    let bearer = place.path().join("bearer");
    std::fs::write(&bearer, format!("{MINT_BEARER}\n")).expect("written");
    let network = world.network_file(&json!({ "secrets": { "personal": {
        "hosts": ["api.world.example"],
        "shared_by": { "metadata": "user" },
        "mint": { "callback": { "url": "https://login.example/mint", "bearer_file": bearer } },
    }}}));
    let server = TestServer::start_with(&["--pool", "0", "--network", &network]).await;
    let network = uses(&[("PERSONAL", "personal")]);
    let of = |metadata: Value| create(&server, json!({ "network": network, "metadata": metadata }));

    let ann = of(json!({ "user": "ann", "team": "red" })).await;
    let bob = of(json!({ "user": "bob", "team": "red" })).await;
    let ann_again = of(json!({ "user": "ann", "team": "blue" })).await;
    for (sandbox, user) in [(&ann, "ann"), (&bob, "bob"), (&ann_again, "ann"), (&bob, "bob"), (&ann, "ann")] {
        let (status, body) = ask(sandbox, "PERSONAL").await;
        assert_eq!(status, "200", "{body}");
        // Neither the sandbox nor what else its metadata says: the value is not for it alone.
        assert!(body.contains(&format!("Bearer minted-for-api.world.example--{user}\"")), "{user}: {body}");
    }
    assert_eq!(world.seen().iter().filter(|request| request["path"] == "/mint").count(), 2);

    let nobody = of(json!({ "team": "red" })).await;
    let (status, body) = ask(&nobody, "PERSONAL").await;
    assert_eq!(status, "502", "{body}");
    assert!(body.contains("secret_unavailable") && body.contains("`user`"), "{body}");
    server.stop().await;
}

#[tokio::test]
async fn no_secret_is_found_in_anything_the_server_keeps_or_says() {
    const KEPT: &str = "sk-live-kept-5c1e77a0";
    const HEADER: &str = "sk-live-header-91bb42";
    const CANARY: &str = "canary-in-the-guest-08d3";
    let world = World::start(&NAMES).await;
    let place = tempfile::tempdir().expect("a directory");
    let made = "made-by-a-program-e0a94f";
    let program = program(place.path(), "mint", &format!(r#"echo '{{"value": "{made}", "expires_in": 600}}'"#));
    let network = world.network_file(&json!({ "secrets": {
        "program": { "hosts": ["api.world.example"], "mint": { "command": [program] } },
    }}));
    let mut server = TestServer::start_with(&["--pool", "0", "--network", &network]).await;
    let hosts = json!(["api.world.example"]);
    for (name, content) in [
        ("kept", json!({ "hosts": hosts, "value": KEPT })),
        ("header", json!({ "hosts": hosts, "value": HEADER })),
        (
            "oauth",
            json!({ "hosts": hosts, "client_secret": CLIENT_SECRET, "oauth":
            { "token_url": "https://login.example/token", "client_id": "client" } }),
        ),
    ] {
        server.json(Method::PUT, &format!("/v1/secrets/{name}"), Some(content)).await;
    }
    let mut said = String::new();
    {
        // Both ways: by tokens, and by headers that rules set.
        let network = json!({
            "policy": {
                "default": "deny",
                "rules": [{ "id": "web", "action": "allow", "names": ["*.example"] }],
                "http": [{ "hosts": ["api.world.example"], "action":
                    { "set_headers": { "x-injected": "Key ${secrets.header}" } } }],
            },
            "secrets": [
                { "env": "KEPT", "secret": "kept", "mask_echo": true, "in": { "headers": true, "query": true, "body": true } },
                { "env": "PROGRAM", "secret": "program", "mask_echo": true },
                { "env": "OAUTH", "secret": "oauth", "mask_echo": true },
            ],
        });
        let sandbox = create(&server, json!({ "network": network })).await;
        sandbox.write("/dev/shm/canary", CANARY).await;
        for request in [
            "-H \"Authorization: Bearer $KEPT\" https://api.world.example/bytes?count=10",
            "--user \"me:$KEPT\" https://api.world.example/bytes?count=10",
            "-H \"Authorization: Bearer $PROGRAM\" https://api.world.example/bytes?count=10",
            "-H \"Authorization: Bearer $OAUTH\" https://api.world.example/bytes?count=10",
            "-d \"key=$KEPT\" \"https://api.world.example/missing?key=$KEPT\"",
            "\"http://api.world.example/bytes?key=$KEPT\"",
            "\"https://other.example/bytes?key=$KEPT\"",
        ] {
            let ran = sandbox.shell(&format!("curl -sS --max-time 60 {request}")).await;
            said.push_str(&format!("{}\n{}\n", text(&ran), String::from_utf8_lossy(&ran.stderr)));
        }
        let seen: String = world.seen().iter().map(ToString::to_string).collect();
        for value in [KEPT, HEADER, made, ACCESS_TOKEN] {
            assert!(seen.contains(value), "{value} was used");
        }
        // Errors of the API that have to do with values.
        for (path, body) in [
            ("/v1/secrets/kept", json!({ "hosts": [], "value": KEPT })),
            ("/v1/secrets/kept", json!({ "hosts": ["*"], "value": format!("{KEPT}\nx") })),
            ("/v1/secrets/a b", json!({ "hosts": ["*"], "value": KEPT })),
            ("/v1/secrets/kept", json!({ "hosts": "*", "value": [KEPT] })),
            ("/v1/secrets/kept", json!({ "hosts": ["*"], "value": KEPT, "more": HEADER })),
        ] {
            let (status, answer) = server.try_json(Method::PUT, path, Some(body)).await.expect("it answers");
            assert!(status.is_client_error(), "{answer}");
            said.push_str(&answer.to_string());
        }
        for path in ["/v1/secrets", "/v1/audit?limit=1000"] {
            said.push_str(&server.json(Method::GET, path, None).await.to_string());
        }
        let path = format!("/v1/sandboxes/{}/network", sandbox.id());
        said.push_str(&server.json(Method::GET, &path, None).await.to_string());
        // Memory and disk, in a snapshot and in a hibernated sandbox.
        let path = format!("/v1/sandboxes/{}", sandbox.id());
        server.json(Method::POST, &format!("{path}/snapshots"), Some(json!({}))).await;
        server.json(Method::POST, &format!("{path}/pause"), Some(json!({}))).await;
    }
    std::fs::write(server.data_dir().join("said"), said).expect("written");
    server.terminate().await;
    let needles = [
        Needle::new("kept", KEPT),
        Needle::new("header", HEADER),
        Needle::new("made", made),
        Needle::new("access token", ACCESS_TOKEN),
        Needle::new("client secret", CLIENT_SECRET),
        Needle::new("canary", CANARY),
    ];
    let findings = scan(server.data_dir(), &needles, &Inodes::default());
    let (canaries, secrets): (Vec<_>, Vec<_>) = findings.into_iter().partition(|finding| finding.name == "canary");
    assert_eq!(secrets, []);
    let of_snapshots = canaries.iter().filter(|finding| finding.path.to_string_lossy().contains("snap"));
    assert!(of_snapshots.count() > 0, "the guest's memory was looked at: {canaries:?}");
    server.start_again().await;
    server.stop().await;
}
