//! What a build does in its sandbox's guest.

use std::{collections::BTreeMap, path::Path};

use futures::StreamExt as _;
use stockade_engine::{
    EngineError, GuestClient,
    guest::{ByteStream, WriteFile},
};
use stockade_model::quoted;
use stockade_wire::{
    ErrorCode,
    event::Event,
    process::{Command, Exit, StartRequest},
};
use tokio_util::io::ReaderStream;

const COPY: &str = include_str!("copy.sh");
/// Makes a directory that belongs to its user. Arguments: path, user.
const MAKE_DIRECTORY: &str = r#"[ -d "$1" ] || { mkdir -p "$1" && chown "$2" "$1"; }"#;
/// Makes a user. Arguments: name, "true" for sudo without a password.
const MAKE_USER: &str = r#"id -u "$1" >/dev/null 2>&1 || useradd --create-home --shell /bin/bash "$1"
if [ "$2" = true ]; then
	printf '%s ALL=(ALL:ALL) NOPASSWD:ALL\n' "$1" > "/etc/sudoers.d/$1" && chmod 0440 "/etc/sudoers.d/$1"
fi"#;
/// Longest line that is put together.
const LONGEST_LINE: usize = 16 << 10;

/// Where and as whom commands run.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) user: String,
    pub(super) cwd: Option<String>,
    pub(super) env: BTreeMap<String, String>,
}

impl Place {
    /// A request for a command here.
    pub(super) fn request(&self, command: Command, user: Option<&str>) -> StartRequest {
        StartRequest {
            user: Some(user.unwrap_or(&self.user).to_owned()),
            cwd: self.cwd.clone(),
            env: self.env.clone(),
            ..StartRequest::new(command)
        }
    }

    /// A request for a script of ours, as root.
    fn script(script: &str, arguments: &[&str]) -> StartRequest {
        let words = [&["/bin/sh", "-c", script, "stockade"], arguments].concat();
        let place = Self { user: "root".to_owned(), cwd: Some("/".to_owned()), env: BTreeMap::new() };
        place.request(Command::Argv(words.into_iter().map(str::to_owned).collect()), None)
    }
}

/// Runs a command to its end; every line goes to `tell`, true for those of standard error.
pub(super) async fn run(
    guest: &GuestClient,
    request: &StartRequest,
    mut tell: impl FnMut(bool, &str) + Send,
) -> Result<Exit, String> {
    let mut events = guest.start(request).await.map_err(|error| explain(&error, request))?.events;
    let mut partial = [Vec::new(), Vec::new()];
    while let Some(event) = events.next().await {
        let (index, bytes) = match event.map_err(|error| explain(&error, request))? {
            Event::Stdout(bytes) => (0, bytes),
            Event::Stderr(bytes) => (1, bytes),
            Event::Exit(exit) => {
                for (index, rest) in partial.iter().enumerate().filter(|(_, rest)| !rest.is_empty()) {
                    tell(index == 1, &String::from_utf8_lossy(rest));
                }
                return Ok(exit);
            }
            _ => continue,
        };
        let line: &mut Vec<u8> = &mut partial[index];
        for byte in bytes {
            if byte == b'\n' || line.len() == LONGEST_LINE {
                tell(index == 1, String::from_utf8_lossy(line).trim_end_matches('\r'));
                line.clear();
            }
            if byte != b'\n' {
                line.push(byte);
            }
        }
    }
    Err("the command's stream broke; whether it ended is not known".to_owned())
}

/// Why a command could not be run.
fn explain(error: &EngineError, request: &StartRequest) -> String {
    match error {
        EngineError::Guest(body) if body.code == ErrorCode::UnknownUser => {
            let user = request.user.as_deref().unwrap_or_default();
            format!("command failed: unauthenticated: invalid username: '{user}'")
        }
        EngineError::Guest(body) => format!("command failed: {}", body.message),
        error => format!("command failed: {}", crate::error::chain(error)),
    }
}

/// How a command ended, if it did not succeed.
pub(super) fn failure(exit: &Exit) -> Option<String> {
    match exit {
        Exit { out_of_memory: true, .. } => Some("command failed: out of memory".to_owned()),
        Exit { code: Some(0), .. } => None,
        Exit { code: Some(code), .. } => Some(format!("command failed: exit status {code}")),
        Exit { signal: Some(signal), .. } => Some(format!("command failed: signal {signal}")),
        Exit { .. } => Some("command failed: it did not run".to_owned()),
    }
}

async fn script(guest: &GuestClient, text: &str, arguments: &[&str]) -> Result<(), String> {
    let mut said = String::new();
    let request = Place::script(text, arguments);
    let exit = run(guest, &request, |_, line| {
        if said.len() < 1000 {
            said.push_str(line);
            said.push(' ');
        }
    });
    match failure(&exit.await?) {
        None => Ok(()),
        Some(failure) => Err(format!("{failure}: {}", said.trim())),
    }
}

/// The environment a login shell has.
pub(super) async fn login_env(guest: &GuestClient, place: &Place) -> Result<BTreeMap<String, String>, String> {
    let mut env = BTreeMap::new();
    let request = place.request(Command::Shell("env".to_owned()), None);
    run(guest, &request, |is_error, line| {
        if let (false, Some((name, value))) = (is_error, line.split_once('=')) {
            env.insert(name.to_owned(), value.to_owned());
        }
    })
    .await?;
    Ok(env)
}

pub(super) async fn make_directory(guest: &GuestClient, path: &str, user: &str) -> Result<(), String> {
    script(guest, MAKE_DIRECTORY, &[path, user]).await
}

pub(super) async fn make_user(guest: &GuestClient, name: &str, sudo: bool) -> Result<(), String> {
    let valid = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(&byte);
    if name.is_empty() || name.len() > 32 || !name.bytes().all(valid) || name.starts_with('-') {
        return Err(format!("{} cannot be a user's name: 1 to 32 lower-case letters, digits, - and _", quoted(name)));
    }
    script(guest, MAKE_USER, &[name, if sudo { "true" } else { "false" }]).await
}

/// Where files go, from where, and whose they are.
pub(super) struct Copying<'a> {
    pub(super) archive: &'a Path,
    pub(super) source: &'a str,
    pub(super) destination: &'a str,
    pub(super) owner: &'a str,
    pub(super) mode: &'a str,
}

pub(super) async fn copy(guest: &GuestClient, copying: &Copying<'_>) -> Result<(), String> {
    let is_mode = |mode: &str| mode.len() <= 5 && mode.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
    if !is_mode(copying.mode) {
        return Err(format!("mode {} is not octal", quoted(copying.mode)));
    }
    let there = format!("/tmp/.stockade-copy-{}", super::random_uuid());
    let file = tokio::fs::File::open(copying.archive).await.map_err(|error| format!("the upload is gone: {error}"))?;
    let body: ByteStream = Box::pin(ReaderStream::with_capacity(file, 64 << 10));
    let write = WriteFile {
        path: there.clone(),
        user: Some("root".to_owned()),
        atomic: false,
        mode: Some(0o600),
        attributes: None,
    };
    guest.write_file(&write, body).await.map_err(|error| crate::error::chain(&error))?;
    script(guest, COPY, &[&there, copying.source, copying.destination, copying.owner, copying.mode]).await
}

/// `text` with `$NAME` and `${NAME}` replaced by what `env` has, unknown ones by nothing.
pub(super) fn expand(text: &str, env: &BTreeMap<String, String>) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(['$', '\\']) {
        out.push_str(&rest[..at]);
        let tail = &rest[at + 1..];
        if rest[at..].starts_with('\\') {
            let escaped = tail.starts_with('$');
            out.push(if escaped { '$' } else { '\\' });
            rest = &tail[usize::from(escaped)..];
            continue;
        }
        let braced = tail.strip_prefix('{').and_then(|tail| tail.split_once('}'));
        let plain =
            tail.len() - tail.trim_start_matches(|next: char| next.is_ascii_alphanumeric() || next == '_').len();
        let (name, after) = match braced {
            Some((name, after)) => (name, after),
            None => tail.split_at(plain),
        };
        if name.is_empty() || name.starts_with(|first: char| first.is_ascii_digit()) {
            out.push('$');
            rest = tail;
        } else {
            out.push_str(env.get(name).map_or("", String::as_str));
            rest = after;
        }
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_expanded_as_a_shell_would() {
        let env = BTreeMap::from([("PATH".to_owned(), "/bin".to_owned()), ("A_1".to_owned(), "x".to_owned())]);
        for (text, expected) in [
            ("/opt:$PATH", "/opt:/bin"),
            ("${A_1}y$A_1", "xyx"),
            ("$NONE.", "."),
            (r"\$PATH", "$PATH"),
            ("5$", "5$"),
            ("$1", "$1"),
            (r"a\b", r"a\b"),
            ("${open", "${open"),
            ("ü$A_1ü", "üxü"),
        ] {
            assert_eq!(expand(text, &env), expected, "{text}");
        }
    }
}
