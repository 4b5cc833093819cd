//! The host's kernel as the guest: a network namespace whose only way out is a TAP device into the gateway, and the
//! programs people use inside. Needs root, /dev/net/tun, `ip` and `curl`; says so and passes where they are missing.

use std::{
    os::fd::OwnedFd,
    process::{Command, Output},
    sync::mpsc,
    thread,
};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use serde_json::json;
use stockade_gateway::{
    AttachSpec, Attachment, Framing,
    net::{GATEWAY_ADDRESS, tap},
};
use stockade_model::SandboxId;

use super::world::{World, source_server};

type Job = (Vec<String>, tokio::sync::oneshot::Sender<Output>);

/// A namespace and the thread that runs programs in it.
struct Namespace {
    jobs: mpsc::Sender<Job>,
    _files: tempfile::TempDir,
    ca: String,
}

fn enter(resolv_conf: &std::path::Path) -> Result<OwnedFd, String> {
    let text = |error: nix::Error| error.to_string();
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).map_err(text)?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).map_err(text)?;
    mount(Some(resolv_conf), "/etc/resolv.conf", None::<&str>, MsFlags::MS_BIND, None::<&str>).map_err(text)?;
    tap::open_as_guest().map_err(|error| error.to_string())
}

impl Namespace {
    /// `None` where the host cannot make one.
    async fn start(world: &World, policy: serde_json::Value) -> Option<(Self, Attachment)> {
        if Command::new("curl").arg("--version").output().is_err() {
            eprintln!("skipped: no curl");
            return None;
        }
        let files = tempfile::tempdir().unwrap();
        let resolv_conf = files.path().join("resolv.conf");
        std::fs::write(&resolv_conf, format!("nameserver {GATEWAY_ADDRESS}\n")).unwrap();
        let ca = files.path().join("ca.pem");
        std::fs::write(&ca, world.gateway.certificate_pem()).unwrap();
        let (jobs, todo) = mpsc::channel::<Job>();
        let (send_device, device) = tokio::sync::oneshot::channel();
        thread::spawn(move || {
            let entered = enter(&resolv_conf);
            let failed = entered.is_err();
            if send_device.send(entered).is_err() || failed {
                return;
            }
            for (arguments, answer) in todo {
                let output = Command::new(&arguments[0]).args(&arguments[1..]).output();
                let _ = answer.send(output.expect("a program that was looked for"));
            }
        });
        let device = match device.await.unwrap() {
            Ok(device) => device,
            Err(error) => {
                eprintln!("skipped: no namespace: {error}");
                return None;
            }
        };
        let mut spec = AttachSpec::new(SandboxId::random(), serde_json::from_value(policy).unwrap());
        spec.framing = Framing::OnePerCallWithVnetHeader;
        let (reader, writer) = tap::split(device).unwrap();
        let attachment = world.gateway.attach_halves(reader, writer, spec).unwrap();
        let ca = ca.to_str().unwrap().to_owned();
        Some((Self { jobs, _files: files, ca }, attachment))
    }

    /// Runs a program: its exit code and output.
    async fn run(&self, arguments: &[&str]) -> (i32, String) {
        let (answer, answered) = tokio::sync::oneshot::channel();
        let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        self.jobs.send((arguments, answer)).unwrap();
        let output = answered.await.unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.code().unwrap_or(-1), String::from_utf8_lossy(&text).into_owned())
    }

    async fn curl(&self, arguments: &[&str]) -> (i32, String) {
        let common = ["curl", "-sS", "--max-time", "300", "--cacert", &self.ca];
        self.run(&[&common, arguments].concat()).await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kernel_and_curl_are_content_with_the_network() {
    let world = World::new();
    world.secret("API_KEY", "sk-live-8f3b");
    let api = world.https("api.example", "93.184.216.34", &["h2", "http/1.1"]).await;
    let plain = world.http("plain.example", "93.184.216.35").await;
    world.name("source.example", &["93.184.216.36"]);
    world.serve("93.184.216.36:5000", source_server(30 << 20).await);
    world.name("rebind.example", &["169.254.169.254"]);
    let token = stockade_gateway::broker::placeholder();
    let policy = json!({
        "default": "deny",
        "rules": [
            {"action": "allow", "names": ["api.example", "plain.example", "rebind.example"]},
            {"action": "allow", "names": ["source.example"], "ports": [5000]},
        ],
        "substitutions": [{"placeholder": token, "secret": "API_KEY", "hosts": ["api.example"]}],
    });
    let Some((guest, attachment)) = Namespace::start(&world, policy).await else { return };

    let bearer = format!("Authorization: Bearer {token}");
    for version in ["--http1.1", "--http2"] {
        let (code, text) = guest.curl(&[version, "-H", &bearer, "https://api.example/v1"]).await;
        assert_eq!(code, 0, "{text}");
        assert_eq!(api.last()["headers"]["authorization"], json!(["Bearer sk-live-8f3b"]), "{version}");
    }
    let big = "x".repeat(3_000_000);
    let file = guest._files.path().join("big");
    std::fs::write(&file, &big).unwrap();
    let upload = format!("@{}", file.display());
    let (code, _) = guest.curl(&["--data-binary", &upload, "-o", "/dev/null", "https://api.example/"]).await;
    assert_eq!((code, api.last()["body"].as_str().map(str::len)), (0, Some(big.len())));
    assert_eq!(guest.curl(&["http://plain.example/"]).await.0, 0);
    // A token in clear text is stopped, and the reason is readable.
    let (_, text) = guest.curl(&["-H", &bearer, "http://plain.example/"]).await;
    assert!(text.contains("token_misplaced"), "{text}");
    assert_eq!(plain.count(), 1);
    for url in ["http://evil.example/", "https://evil.example/"] {
        let (code, text) = guest.curl(&[url]).await;
        assert!(code == 0 && text.contains("no rule of the policy allows it"), "{url}: {code} {text}");
    }
    let (_, text) = guest.curl(&["https://rebind.example/"]).await;
    assert!(text.contains("metadata_address"), "{text}");
    // Addresses are refused at once: 7 is curl's "could not connect".
    for url in ["http://169.254.169.254/", "http://93.184.216.35/", "http://10.0.0.1/", "http://10.123.0.1/"] {
        assert_eq!(guest.curl(&[url]).await.0, 7, "{url}");
    }
    // Telling curl where a name is does not make it so.
    let resolve = ["--resolve", "api.example:443:93.184.216.35"];
    assert_eq!(guest.curl(&[&resolve[..], &["https://api.example/"]].concat()).await.0, 7);
    let (code, text) =
        guest.curl(&["http://source.example:5000/", "--http0.9", "-o", "/dev/null", "-w", "%{size_download}"]).await;
    assert_eq!((code, text.as_str()), (0, "31457280"));
    assert_eq!(guest.run(&["getent", "ahosts", "missing.api.example"]).await.0, 0, "explained, not hidden");
    if Command::new("ping").arg("-V").output().is_ok() {
        let (code, text) = guest.run(&["ping", "-c", "1", "-W", "5", "10.123.0.1"]).await;
        assert_eq!(code, 0, "{text}");
    }
    // No IPv6 but the kernel's own attempts, which go nowhere.
    assert_ne!(guest.curl(&["http://[2606:2800:220:1::1]/"]).await.0, 0);
    assert!(attachment.stats().bytes_to_guest > 30 << 20);
    attachment.detach();
    assert_ne!(guest.curl(&["--max-time", "1", "http://plain.example/"]).await.0, 0);
}
