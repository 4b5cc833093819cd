//! What the program says when it is used wrongly, and when there is no server.

use std::os::unix::ffi::OsStrExt as _;

use stockade_store::{SecretFile, Store};
use tempfile::TempDir;

use crate::support::{TestServer, run, stockade};

#[tokio::test]
async fn help_names_every_command() {
    let ran = run(stockade(&["--help"]), b"").await;
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
    for command in [
        "up", "run", "create", "ls", "info", "exec", "shell", "ps", "attach", "cp", "logs", "kill", "extend", "pause",
        "resume", "snapshot", "fork", "template", "doctor", "bench", "version", "env",
    ] {
        assert!(ran.stdout.lines().any(|line| line.trim_start().starts_with(&format!("{command} "))), "{command}");
    }
}

#[tokio::test]
async fn wrong_arguments_end_with_code_2_and_say_so_on_standard_error() {
    for arguments in [
        &["nonsense"][..],
        &["run"],
        &["run", "--", ""][..1],
        &["run", "--", ""],
        &["run", "--", "", "argument"],
        &["exec", "sbx", "--", ""],
        &["fork", "sbx", "--", ""],
        &["fork", "sbx", "-n", "0"],
        &["preview", "sbx", "0"],
        &["tunnel", "sbx", "0"],
        &["attach", "sbx", "abc"],
        &["attach", "sbx", "0"],
        &["attach", "sbx", "tag:"],
        &["audit", "-n", "0"],
        &["bench", "-n", "0"],
        &["bench", "--idle", "0"],
        &["bench", "--json", "/nonexistent/report.json"],
        &["usage", "--csv", "--json"],
        &["run", "--timeout", "-3", "--", "true"],
        &["run", "--timeout", "nan", "--", "true"],
        &["run", "--env", "no-value", "--", "true"],
        &["kill"],
        &["extend", "sbx", "soon"],
        &["info", ""],
        &["kill", "sbx", ""],
        &["exec", "", "--", "true"],
        &["snapshot", ""],
        &["snapshot", "sbx", "--name", ""],
        &["snapshot", "rm", ""],
        &["rollback", "sbx", ""],
        &["template", "info", ""],
        &["template", "rm", ""],
        &["secret", "set", "", "--host", "a.example"],
        &["secret", "rm", ""],
        &["secret", "set", "..", "--host", "a.example"],
        &["secret", "set", "a b", "--host", "a.example"],
        &["snapshot", "sbx", "--name", "a\u{1b}"],
        &["snapshot", "sbx", "--name", "sbxaaaaaaaaaaaaaaaaaaaa"],
        &["policy", "explain", "", "http://a.example"],
        &["policy", "set", "", "--no-internet"],
        &["ssh", ""],
        &["ssh-key", "add", "", "file"],
        &["ssh-key", "rm", ""],
        &["audit", ""],
        &["usage", ""],
    ] {
        let ran = run(stockade(arguments), b"").await;
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{arguments:?}");
        let is_json = arguments.contains(&"--json") && !arguments.contains(&"bench");
        assert!(ran.stderr.starts_with(if is_json { "{\"error\":" } else { "error: " }), "{}", ran.stderr);
    }
}

#[tokio::test]
async fn a_timeout_of_a_sandbox_is_led_to_its_lifetime() {
    for (arguments, usage) in [
        (&["create", "--timeout", "60"][..], "Usage: stockade create [OPTIONS]"),
        (&["--url", "http://create", "create", "--timeout=60"], "Usage: stockade create [OPTIONS]"),
        (&["set", "sbx", "--timeout", "60"], "Usage: stockade set [OPTIONS] <SANDBOX>"),
        (&["resume", "sbx", "--timeout", "60"], "Usage: stockade resume [OPTIONS] <SANDBOX>"),
    ] {
        for json in [&[][..], &["--json"]] {
            let ran = run(stockade(&[json, arguments].concat()), b"").await;
            assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{ran:?}");
            let told = "how long a sandbox lives is said with '--lifetime <SECONDS>'";
            assert!(ran.stderr.contains(told) && ran.stderr.contains(usage), "{}", ran.stderr);
            assert!(!ran.stderr.contains("--on-timeout"), "{}", ran.stderr);
        }
    }
    for other in [&["kill", "--timeout", "60"][..], &["create", "--time", "60"]] {
        assert!(!run(stockade(other), b"").await.stderr.contains("how long a sandbox lives"), "{other:?}");
    }
}

#[tokio::test]
async fn what_is_long_or_drives_a_terminal_is_not_repeated_as_it_is() {
    let server = TestServer::start().await;
    let long = format!("{}\u{1b}[2J", "L".repeat(100_000));
    let escape = "a\u{1b}[2Jb";
    let option = |word: &str| format!("--{word}");
    let path = |word: &str| format!("/nonexistent/{word}");
    let sandbox = "sbxaaaaaaaaaaaaaaaaaaaa:";
    for word in [long.as_str(), escape] {
        for arguments in [
            &["create", "--lifetime", word][..],
            &["audit", "--verdict", word],
            &["up", "--http", word],
            &["snapshot", "sbx", "--name", word],
            &["snapshot", "ls", "sbx", word],
            &[word],
            &["template", word],
            &["ls", &option(word)],
            &["run", &option(word), "--", "true"],
            &["cp", &path(word), sandbox],
            &["cp", &format!("{sandbox}x"), &format!("sbxshort:{word}")],
            &["template", "build", &path(word)],
            &["ssh-key", "add", "mine", &path(word)],
            &["policy", "set", "sbx", "--file", &path(word)],
            &["ls", "--url", word],
            &["ls", "--url", &format!("http://127.0.0.1:1/{word}")],
            &["ls", "--data-dir", &path(word)],
            &["info", word],
            &["logs", "sbx", word],
        ] {
            for json in [&[][..], &["--json"]] {
                let all: Vec<&str> = json.iter().chain(arguments).copied().collect();
                let mut command = server.stockade(&all);
                if arguments.contains(&"--data-dir") {
                    command.env_remove("STOCKADE_URL");
                }
                let ran = run(command, b"").await;
                let said: String = arguments.iter().map(|part| format!("{part:.40} ")).collect();
                assert!(!matches!(ran.code, Some(0) | None), "{said:?}");
                assert!(ran.stderr.len() < 2000, "{said:?}: {} bytes", ran.stderr.len());
                let text = match json {
                    [] => ran.stderr.clone(),
                    _ => {
                        let error: serde_json::Value = serde_json::from_str(&ran.stderr).expect("JSON");
                        let text = |name: &str| error["error"][name].as_str().unwrap_or_default().to_owned();
                        text("message") + &text("hint")
                    }
                };
                assert!(!text.chars().any(|char| char.is_control() && char != '\n'), "{said:?}: {text:?}");
            }
        }
    }
}

#[tokio::test]
async fn an_empty_command_is_refused_with_the_usage_of_what_was_typed() {
    for (arguments, usage) in [
        (&["run", "--", ""][..], "Usage: stockade run [OPTIONS] -- <COMMAND>..."),
        (&["exec", "sbx", "--", ""], "Usage: stockade exec [OPTIONS] <SANDBOX> -- <COMMAND>..."),
    ] {
        let ran = run(stockade(arguments), b"").await;
        assert!(ran.stderr.contains(usage), "{}", ran.stderr);
    }
}

#[tokio::test]
async fn a_variable_for_new_sandboxes_does_not_change_what_is_there() {
    let server = TestServer::start().await;
    let id = server.create().await;
    let mut command = server.stockade(&["ls", "-q"]);
    command.env("STOCKADE_TEMPLATE", "none-such").env("STOCKADE_METADATA", "who=nobody");
    let ran = run(command, b"").await;
    assert_eq!((ran.code, ran.stdout), (Some(0), format!("{id}\n")), "{}", ran.stderr);
    for arguments in [&["set", &id][..], &["policy", "set", &id]] {
        let mut command = server.stockade(arguments);
        command.env("STOCKADE_LIFETIME", "1").env("STOCKADE_ON_TIMEOUT", "pause").env("STOCKADE_NO_INTERNET", "1");
        let ran = run(command, b"").await;
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "nothing is said: {}", ran.stderr);
    }
}

#[tokio::test]
async fn wrong_arguments_are_told_in_json_where_json_is_spoken() {
    for arguments in [
        &["--json"][..],
        &["nonsense", "--json"],
        &["--json", "kill"],
        &["run", "--json", "--timeout", "-3", "--", "true"],
        &["extend", "sbx", "soon", "--json"],
        &["secret", "--json"],
    ] {
        let ran = run(stockade(arguments), b"").await;
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{arguments:?}");
        let error: serde_json::Value = serde_json::from_str(&ran.stderr).expect("JSON");
        assert_eq!(error["error"]["code"], "bad_usage", "{error}");
        for part in ["message", "hint"] {
            let text = error["error"][part].as_str().expect("a text");
            assert!(!text.is_empty() && !text.contains('\n') && !text.starts_with("error"), "{error}");
        }
    }
    let mut command = stockade(&["kill"]);
    command.env("STOCKADE_JSON", "1");
    let ran = run(command, b"").await;
    assert!(ran.stderr.starts_with("{\"error\":"), "{ran:?}");
    // What follows `--` is somebody else's.
    let ran = run(stockade(&["run", "--nonsense", "--", "--json"]), b"").await;
    assert!(ran.stderr.starts_with("error: "), "{ran:?}");
    let ran = run(stockade(&["--json", "--help"]), b"").await;
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
}

#[tokio::test]
async fn without_a_server_the_hint_says_how_to_get_one() {
    let ran = run(stockade(&["ls"]), b"").await;
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""));
    assert_eq!(
        ran.stderr,
        "error: no server is running here: there is no /nonexistent/stockade/ready.json\n\n\
         hint: `stockade up` starts one; or name one with --url and --api-key, or its data directory with --data-dir\n"
    );
    let ran = run(stockade(&["run", "--json", "--", "true"]), b"").await;
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(125), ""), "125: Stockade failed, not the command");
    let error: serde_json::Value = serde_json::from_str(&ran.stderr).expect("JSON");
    assert_eq!(error["error"]["code"], "no_server");
}

#[tokio::test]
async fn a_server_that_does_not_answer_is_named() {
    let ran = run(stockade(&["ls", "--url", "http://127.0.0.1:1", "--api-key", "e2b_1"]), b"").await;
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.starts_with("error: cannot reach the server at http://127.0.0.1:1: "), "{}", ran.stderr);
    let ran = run(stockade(&["ls", "--url", "http://127.0.0.1:1"]), b"").await;
    assert!(ran.stderr.starts_with("error: no API key for http://127.0.0.1:1\n\nhint: "), "{}", ran.stderr);
}

#[tokio::test]
async fn a_wrong_key_is_refused_and_not_shown() {
    let server = TestServer::start().await;
    let mut command = server.stockade(&["ls", "--json"]);
    command.env("STOCKADE_API_KEY", "e2b_0000000000000000000000000000000000000000");
    let ran = run(command, b"").await;
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""));
    let error: serde_json::Value = serde_json::from_str(&ran.stderr).expect("JSON");
    assert_eq!(error["error"]["code"], "unauthorized", "{error}");
    assert!(!ran.stderr.contains("e2b_0000"));
}

#[tokio::test]
async fn what_up_cannot_use_is_named_before_anything_is_made() {
    let place = TempDir::new().expect("a directory");
    let data_dir = place.path().join("data");
    let data = data_dir.to_str().expect("UTF-8");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let ran = run(stockade(&["up", "--data-dir", data, "--http", &address]), b"").await;
    assert_eq!(ran.code, Some(1));
    assert_eq!(
        ran.stderr,
        format!(
            "error: {address} is taken by another program\n\n\
             hint: choose another with --http or STOCKADE_HTTP; port 0 takes a free one\n"
        )
    );
    assert!(!data_dir.exists(), "nothing is left behind");
    let port = ["--http", "127.0.0.1:0", "--https", "127.0.0.1:0"];
    let nothing = place.path().join("nothing");
    let nothing = nothing.to_str().expect("UTF-8");
    for (more, code, exit) in [
        (&["--base-domain", "not a domain"][..], "invalid_argument", 2),
        (&["--base-domain", "http://x.example"], "invalid_argument", 2),
        (&["--http", "127.0.0.1:9", "--https", "127.0.0.1:9"], "invalid_argument", 2),
        (&["--archive", "gs://bucket"], "invalid_argument", 2),
        (&["--network", nothing], "host_error", 1),
        (&["--tls-cert", nothing, "--tls-key", nothing], "cannot_serve", 1),
    ] {
        let addresses = if more.contains(&"--http") { &[][..] } else { &port };
        let all = [&["up", "--json", "--data-dir", data], addresses, more].concat();
        let ran = run(stockade(&all), b"").await;
        let error: serde_json::Value = serde_json::from_str(&ran.stderr).expect("JSON");
        assert_eq!((ran.code, error["error"]["code"].as_str()), (Some(exit), Some(code)), "{more:?} {error}");
        assert!(!data_dir.exists(), "{more:?}");
    }
    let mut command = stockade(&[&["up", "--json"][..], &port].concat());
    command.arg("--data-dir").arg(place.path().join(std::ffi::OsStr::from_bytes(b"\xff")));
    let ran = run(command, b"").await;
    assert!(ran.code == Some(2) && ran.stderr.contains("is not UTF-8"), "{ran:?}");
    assert_eq!(std::fs::read_dir(place.path()).expect("a directory").count(), 0);
}

#[tokio::test]
async fn a_data_directory_that_cannot_be_used_is_refused_and_left_alone() {
    let place = TempDir::new().expect("a directory");
    let data_dir = place.path();
    let data = data_dir.to_str().expect("UTF-8");
    let up = async || {
        let all = ["up", "--json", "--data-dir", data, "--http", "127.0.0.1:0", "--https", "127.0.0.1:0"];
        let ran = run(stockade(&all), b"").await;
        let error: serde_json::Value = serde_json::from_str(&ran.stderr).expect("JSON");
        assert_eq!(ran.code, Some(1), "{error}");
        error["error"]["code"].as_str().expect("a code").to_owned()
    };
    let there = || std::fs::read_dir(data_dir).expect("a directory").count();
    std::fs::write(data_dir.join("format"), "99\n").expect("a file");
    assert_eq!((up().await.as_str(), there()), ("data_dir_too_new", 1));
    std::fs::write(data_dir.join("format"), "1\n").expect("a file");
    std::fs::write(data_dir.join("api-key"), "short\n").expect("a file");
    assert_eq!((up().await.as_str(), there()), ("bad_api_key", 2));
    std::fs::remove_file(data_dir.join("api-key")).expect("removed");

    // Records of a newer version.
    let secret = SecretFile::open_or_create(&data_dir.join("secret")).expect("a secret");
    let database = data_dir.join("stockade.db");
    Store::open(&database, secret).await.expect("a store").close().await;
    let pool = sqlx::SqlitePool::connect(&format!("sqlite://{}", database.display())).await.expect("connected");
    let later = "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
                 VALUES (9999, 'later', 1, x'00', 0)";
    sqlx::query(later).execute(&pool).await.expect("written");
    pool.close().await;
    assert_eq!(up().await, "data_dir_too_new");
    assert!(!data_dir.join("cache").exists());

    let ran = run(stockade(&["up", "--data-dir", "/proc/stockade"]), b"").await;
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("/proc/stockade") && ran.stderr.contains("hint: name a directory"), "{}", ran.stderr);
}
