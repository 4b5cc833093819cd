//! `stockade ssh | ssh-key`.
//!
//! `ssh` makes a key pair for this one login, has the server take it for a minute and for this sandbox alone, and runs
//! the host's own `ssh` with the server's host key pinned. Nothing of it stays.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    os::unix::{fs::OpenOptionsExt as _, process::ExitStatusExt as _},
    path::{Path, PathBuf},
    process::ExitStatus,
};

use serde_json::json;
use stockade_ssh::KeyPair;
use tempfile::TempDir;
use tokio::process::Command;

use super::{
    Context,
    attend::{Signals, code_of_signal},
    sandboxes::local_time,
};

use crate::{
    args,
    client::{AddSshKey, SshEndpoint, SshKey},
    failure::{Failure, OWN_FAILURE, chain},
    ui::{printable, table},
};

/// Long enough to log in, and for the connections that follow at once (`scp -3`, an editor's second one).
const LOGIN_SECONDS: f64 = 60.0;
/// What the server is called in the file that pins its key, whatever its address.
const ALIAS: &str = "stockade";

/// Ends as `ssh` does, with the code of the command it ran.
pub(super) async fn ssh(context: &Context, args: args::Ssh) -> Result<u8, Failure> {
    let endpoint = context.client.ssh_endpoint().await?;
    let pair = KeyPair::generate().map_err(|error| Failure::new("internal", chain(&error)))?;
    let name = format!("login of {}", std::process::id());
    let key = AddSshKey {
        name: &name,
        public_key: &pair.public,
        sandbox: Some(&args.sandbox),
        lifetime_seconds: Some(LOGIN_SECONDS),
    };
    let key = context.client.add_ssh_key(&key).await?;
    let ended = async {
        let files = Files::write(&pair, &endpoint).map_err(|error| Failure::host("write the login's key", error))?;
        // Ctrl-C is for the program in the sandbox; ssh gets it from the terminal as we do.
        let mut signals = Signals::listen()?;
        let mut child = command(context.client.host(), &endpoint, &files, &args).spawn().map_err(|error| {
            let failure = Failure::host("run ssh", &error);
            match error.kind() {
                io::ErrorKind::NotFound => failure.hint("install an SSH client, for example openssh-client"),
                _ => failure,
            }
        })?;
        loop {
            tokio::select! {
                ended = child.wait() => return ended.map_err(|error| Failure::host("wait for ssh", error)),
                _ = signals.next() => {}
            }
        }
    };
    let ended = ended.await;
    // It expires anyway.
    let _ = context.client.remove_ssh_key(&key.id).await;
    ended.map(exit_code)
}

fn exit_code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(OWN_FAILURE),
        (None, signal) => code_of_signal(signal.unwrap_or_default()),
    }
}

/// What `ssh` reads, for as long as it runs.
struct Files {
    directory: TempDir,
}

impl Files {
    fn write(pair: &KeyPair, endpoint: &SshEndpoint) -> io::Result<Self> {
        let directory = tempfile::Builder::new().prefix("stockade-ssh-").tempdir()?;
        let write = |name: &str, text: &str| {
            let mut options = fs::OpenOptions::new();
            let mut file = options.write(true).create_new(true).mode(0o600).open(directory.path().join(name))?;
            file.write_all(text.as_bytes())
        };
        write("key", pair.private.expose())?;
        write("known_hosts", &format!("{ALIAS} {}\n", endpoint.host_key))?;
        Ok(Self { directory })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

fn command(api_host: &str, endpoint: &SshEndpoint, files: &Files, args: &args::Ssh) -> Command {
    let host = match endpoint.address.ip() {
        // It listens everywhere: it is where the API is.
        address if address.is_unspecified() => api_host.to_owned(),
        address => address.to_string(),
    };
    let option = |name: &str, path: PathBuf| format!("{name}={}", quoted(&path));
    let mut command = Command::new("ssh");
    command.arg("-i").arg(files.path("key"));
    let fixed = [
        format!("HostKeyAlias={ALIAS}"),
        option("UserKnownHostsFile", files.path("known_hosts")),
        "GlobalKnownHostsFile=/dev/null".to_owned(),
        "StrictHostKeyChecking=yes".to_owned(),
        "IdentitiesOnly=yes".to_owned(),
        "IdentityAgent=none".to_owned(),
        "PreferredAuthentications=publickey".to_owned(),
        "UpdateHostKeys=no".to_owned(),
        "LogLevel=ERROR".to_owned(),
    ];
    fixed.iter().for_each(|option| {
        command.arg("-o").arg(option);
    });
    command.args(["-p", &endpoint.address.port().to_string(), "-l", &args.sandbox]);
    let (options, rest) = split(&args.arguments);
    command.args(options).arg(host).args(rest);
    command
}

/// A path in an option's value: it may have spaces in it.
fn quoted(path: &Path) -> String {
    format!("\"{}\"", path.display())
}

/// Options of `ssh` with a value of their own.
const WITH_VALUE: &str = "BbcDEeFIiJLlmOoPpQRSWw";

/// The arguments that are options, which `ssh` wants before the host, and the command.
fn split(arguments: &[String]) -> (&[String], &[String]) {
    let mut index = 0;
    while let Some(argument) = arguments.get(index) {
        if argument == "--" {
            return (&arguments[..index], &arguments[index + 1..]);
        }
        let Some(letters) = argument.strip_prefix('-').filter(|letters| !letters.is_empty()) else { break };
        // The last letter's value is the next argument, unless it is the rest of this one.
        let takes_next = letters.find(|letter| WITH_VALUE.contains(letter)).is_some_and(|at| at + 1 == letters.len());
        index += if takes_next { 2 } else { 1 };
    }
    arguments.split_at(index.min(arguments.len()))
}

pub(super) async fn ssh_key(context: &Context, command: args::SshKey) -> Result<(), Failure> {
    match command {
        args::SshKey::Add { name, file, sandbox, lifetime } => {
            let text = read(&file)?;
            let (sandbox, lifetime_seconds) = (sandbox.as_deref(), lifetime);
            let key = AddSshKey { name: &name, public_key: &text, sandbox, lifetime_seconds };
            let key = context.client.add_ssh_key(&key).await?;
            context.ui.data(&key, || format!("{}  {}\n", key.id, key.fingerprint))
        }
        args::SshKey::Ls => {
            let keys = context.client.ssh_keys().await?;
            context.ui.data(&json!({"items": keys}), || {
                let rows: Vec<_> = keys.iter().map(row).collect();
                table(&["ID", "NAME", "FINGERPRINT", "SANDBOX", "EXPIRES"], &rows)
            })
        }
        args::SshKey::Rm { keys: wanted } => {
            let keys = context.client.ssh_keys().await?;
            let mut removed = Vec::new();
            for word in &wanted {
                let id = meant(&keys, word)?;
                context.client.remove_ssh_key(id).await?;
                removed.push(id);
            }
            context.ui.data(&json!({"removed": removed}), || removed.iter().map(|id| format!("{id}\n")).collect())
        }
    }
}

/// The ids a word stands for; a name may be that of several keys, and then it must be an id.
fn meant<'a>(keys: &'a [SshKey], word: &str) -> Result<&'a str, Failure> {
    let found: Vec<_> = keys.iter().filter(|key| key.id == word || key.name == word).collect();
    match found.as_slice() {
        [key] => Ok(&key.id),
        [] => Err(Failure::new("ssh_key_not_found", format!("there is no SSH key {}", stockade_model::quoted(word)))
            .hint("`stockade ssh-key ls` shows the keys there are")),
        several => {
            let ids: Vec<_> = several.iter().map(|key| key.id.as_str()).collect();
            Err(Failure::new(
                "ambiguous_name",
                format!("{} keys are called {}", several.len(), stockade_model::quoted(word)),
            )
            .hint(format!("name one by its id: {}", ids.join(", "))))
        }
    }
}

fn row(key: &SshKey) -> Vec<String> {
    vec![
        key.id.clone(),
        printable(&key.name),
        key.fingerprint.clone(),
        key.sandbox.clone().unwrap_or_else(|| "all".to_owned()),
        key.expires_at.as_deref().map_or_else(|| "never".to_owned(), local_time),
    ]
}

fn read(file: &Path) -> Result<String, Failure> {
    let mut text = String::new();
    let done = match file.to_str() {
        Some("-") => io::stdin().read_to_string(&mut text).map(drop),
        _ => fs::File::open(file).and_then(|mut file| file.read_to_string(&mut text)).map(drop),
    };
    done.map_err(|error| {
        Failure::host(format!("read {}", file.display()), error)
            .hint("the public key is the file that ends in .pub; `ssh-keygen -t ed25519` makes a pair")
    })?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn options_come_before_the_host_and_the_command_after_it() {
        let cases = [
            ("", 0, 0),
            ("ls -l", 0, 2),
            ("-t htop", 1, 1),
            ("-N -L 8080:localhost:80", 3, 0),
            ("-L8080:localhost:80 cat", 1, 1),
            ("-vvNT", 1, 0),
            ("-tp 22 ls", 2, 1),
            ("-v -- -odd", 1, 1),
            ("-o", 1, 0),
        ];
        for (text, options, rest) in cases {
            let words = words(text);
            let split = split(&words);
            assert_eq!((split.0.len(), split.1.len()), (options, rest), "{text}");
        }
    }

    #[test]
    fn the_login_is_pinned_to_the_server_and_uses_its_own_key_alone() {
        let pair = KeyPair::generate().expect("a pair");
        let endpoint = |address: &str| SshEndpoint {
            address: address.parse().expect("an address"),
            host_key: "ssh-ed25519 AAAA".to_owned(),
        };
        let files = Files::write(&pair, &endpoint("127.0.0.1:22")).expect("written");
        let args = args::Ssh { sandbox: "sbxid".to_owned(), arguments: words("-T id") };
        let line = |address: &str| {
            let command = command("api.example", &endpoint(address), &files, &args);
            let words: Vec<_> = command.as_std().get_args().map(|word| word.to_string_lossy().into_owned()).collect();
            words.join(" ")
        };
        assert!(line("127.0.0.1:2222").ends_with("-p 2222 -l sbxid -T 127.0.0.1 id"));
        assert!(line("0.0.0.0:2222").ends_with("-T api.example id"));
        for fixed in ["StrictHostKeyChecking=yes", "IdentitiesOnly=yes", "IdentityAgent=none", "HostKeyAlias=stockade"]
        {
            assert!(line("[::1]:22").contains(fixed), "{fixed}");
        }
        let mode = |name: &str| std::os::unix::fs::MetadataExt::mode(&fs::metadata(files.path(name)).expect("there"));
        assert_eq!((mode("key") & 0o777, mode("known_hosts") & 0o777), (0o600, 0o600));
        assert!(!line("[::1]:22").contains("PRIVATE"));
    }
}
