//! `stockade cp`: files by the files API, directories as tar streams through `tar` in the guest.
//!
//! As with `cp -r`: a target that is a directory takes the copy into it, any other becomes the copy.
//! `DIR/.` means what is in the directory.

use std::{
    ffi::{OsStr, OsString},
    fs, io,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use stockade_model::SandboxId;

use super::{
    Context,
    attend::{Signals, code_of_signal},
};
use crate::{
    args::Cp,
    failure::{BAD_USAGE, Failure},
};

mod file;
mod tree;

/// One side of a copy.
#[derive(Debug, Eq, PartialEq)]
enum Place {
    Local(PathBuf),
    Remote(Remote),
    /// `-`: standard input or output.
    Standard,
}

/// A path in a sandbox.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Remote {
    sandbox: String,
    path: String,
}

/// A copy under way.
struct Copy<'a> {
    context: &'a Context,
    user: Option<String>,
}

pub(super) async fn cp(context: &Context, args: Cp) -> Result<(), Failure> {
    let (from, to) = (place(&args.from)?, place(&args.to)?);
    let copy = Copy { context, user: args.user };
    let mut signals = Signals::listen()?;
    match (from, to) {
        (Place::Standard, Place::Remote(to)) => unless_interrupted(copy.upload_stdin(&to), &mut signals).await,
        (Place::Local(from), Place::Remote(to)) => copy.upload(&from, to, &mut signals).await,
        (Place::Remote(from), Place::Standard) => {
            unless_interrupted(copy.download_to_stdout(&from), &mut signals).await
        }
        (Place::Remote(from), Place::Local(to)) => copy.download(&from, &to, &mut signals).await,
        (Place::Remote(_), Place::Remote(_)) => Err(Failure::new("invalid_argument", "both sides are in sandboxes")
            .hint("copy in two steps, or through a pipe: `stockade cp A:FILE - | stockade cp - B:FILE`")
            .exit(BAD_USAGE)),
        (_, _) => Err(Failure::new("invalid_argument", "neither side is in a sandbox")
            .hint("write a path in a sandbox as SANDBOX:PATH, with the id `stockade ls` shows")
            .exit(BAD_USAGE)),
    }
}

impl Copy<'_> {
    async fn upload(&self, from: &Path, to: Remote, signals: &mut Signals) -> Result<(), Failure> {
        let metadata = fs::metadata(from).map_err(|error| Failure::host(format!("read {}", from.display()), error))?;
        let to = if means_contents(from.as_os_str()) { to } else { self.remote_target(from, to).await? };
        if metadata.is_dir() {
            self.upload_tree(from, &to, signals).await
        } else {
            unless_interrupted(self.upload_file(from, &metadata, &to), signals).await
        }
    }

    /// `to`, or the place in it if it is a directory.
    async fn remote_target(&self, from: &Path, mut to: Remote) -> Result<Remote, Failure> {
        let into = to.path.is_empty() || to.path.ends_with('/') || self.is_remote_dir(&to).await?;
        if into {
            let name = fs::canonicalize(from).ok().and_then(|path| path.file_name().map(OsStr::to_owned));
            let name = from.file_name().map(OsStr::to_owned).or(name).unwrap_or_default();
            let name = name.to_str().ok_or_else(|| {
                Failure::new("invalid_argument", format!("the name {name:?} is not UTF-8"))
                    .hint("give the copy another name: SANDBOX:DIR/NAME")
            })?;
            to.path =
                if to.path.is_empty() { name.to_owned() } else { format!("{}/{name}", to.path.trim_end_matches('/')) };
        }
        Ok(to)
    }

    async fn is_remote_dir(&self, at: &Remote) -> Result<bool, Failure> {
        let client = &self.context.client;
        let entry = client.stat(&at.sandbox, &at.path, self.user.as_deref()).await?;
        match entry.map(|entry| entry.kind) {
            Some(kind) if kind == "directory" => Ok(true),
            Some(kind) if kind == "symlink" => {
                // What the link leads to, if anything.
                let behind = format!("{}/.", at.path);
                Ok(client.stat(&at.sandbox, &behind, self.user.as_deref()).await.is_ok_and(|entry| entry.is_some()))
            }
            _ => Ok(false),
        }
    }

    async fn download(&self, from: &Remote, to: &Path, signals: &mut Signals) -> Result<(), Failure> {
        let is_dir = from.path.is_empty() || self.is_remote_dir(from).await?;
        let into_dir = to.is_dir() || to.as_os_str().as_bytes().ends_with(b"/");
        let name = Path::new(&from.path).file_name();
        let to = match name {
            Some(name) if into_dir && !means_contents(OsStr::new(&from.path)) => to.join(name),
            _ => to.to_owned(),
        };
        if is_dir {
            self.download_tree(from, &to, signals).await
        } else {
            unless_interrupted(self.download_file(from, &to), signals).await
        }
    }

    /// Says what was left out.
    fn note_skipped(&self, skipped: &[PathBuf]) {
        for path in skipped {
            self.context.ui.note(&format!("warning: {path:?} is no file, directory or link and was left out"));
        }
    }
}

/// A copy of one file. Where it is cut, what was there before is left, on either side.
async fn unless_interrupted(
    copy: impl Future<Output = Result<(), Failure>>,
    signals: &mut Signals,
) -> Result<(), Failure> {
    tokio::select! {
        done = copy => done,
        number = signals.next() => {
            Err(Failure::new("interrupted", "interrupted; nothing was copied").exit(code_of_signal(number)))
        }
    }
}

/// `DIR/.`, `.` and `..` have no name to be copied under.
fn means_contents(path: &OsStr) -> bool {
    let path = path.as_bytes();
    [b".".as_slice(), b".."].contains(&path) || path.ends_with(b"/.") || path.ends_with(b"/..") || path == b"/"
}

fn place(argument: &OsString) -> Result<Place, Failure> {
    if argument == "-" {
        return Ok(Place::Standard);
    }
    let Some((sandbox, path)) = split(argument) else { return Ok(Place::Local(PathBuf::from(argument))) };
    // A file of ours may have a colon in its name; an id looks like nothing else.
    if !sandbox.starts_with("sbx") || sandbox.contains('/') {
        return Ok(Place::Local(PathBuf::from(argument)));
    }
    let sandbox = sandbox.parse::<SandboxId>().map_err(|error| {
        Failure::new("invalid_argument", error.to_string())
            .hint(format!("write ./{} for a file of that name here", argument.to_string_lossy()))
    })?;
    let path =
        path.to_str().ok_or_else(|| Failure::new("invalid_argument", format!("the path {path:?} is not UTF-8")))?;
    Ok(Place::Remote(Remote { sandbox: sandbox.to_string(), path: path.to_owned() }))
}

fn split(argument: &OsStr) -> Option<(&str, &OsStr)> {
    let bytes = argument.as_bytes();
    let colon = bytes.iter().position(|byte| *byte == b':')?;
    let sandbox = std::str::from_utf8(&bytes[..colon]).ok()?;
    Some((sandbox, OsStr::from_bytes(&bytes[colon + 1..])))
}

/// An error about a file here.
fn local(verb: &str, path: &Path) -> impl FnOnce(io::Error) -> Failure {
    let action = format!("{verb} {}", path.display());
    move |error| Failure::host(action, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_id_before_a_colon_makes_a_path_remote() {
        let id = SandboxId::random().to_string();
        let remote = place(&format!("{id}:/tmp/a:b").into()).expect("a place");
        assert_eq!(remote, Place::Remote(Remote { sandbox: id.clone(), path: "/tmp/a:b".to_owned() }));
        for here in ["plain", "a:b", &format!("./{id}:x"), "sbx", "dir/sbx:x"] {
            assert_eq!(place(&here.into()).expect("a place"), Place::Local(PathBuf::from(here)), "{here}");
        }
        assert!(place(&"sbxshort:/x".into()).is_err());
    }

    #[test]
    fn only_names_that_name_nothing_mean_their_contents() {
        for path in [".", "..", "a/.", "/"] {
            assert!(means_contents(OsStr::new(path)), "{path}");
        }
        for path in ["a", "a/", ".hidden", "a."] {
            assert!(!means_contents(OsStr::new(path)), "{path}");
        }
    }
}
