//! The data directory of one server.
//!
//! ```text
//! lock        held (flock) while a server runs; holds its pid
//! format      number of this layout; a newer one is refused, never touched
//! api-key     the first key's text (0600); another text put there replaces that key at the next start
//! ready.json  how to reach the server, while it serves
//! ssh-host-key what SSH clients know the server by (0600), once it has spoken SSH
//! stockade.db records     tls/ certificates     kernel/ templates/ machines/ what the engine runs
//! cache/      what templates are built from; may be removed at any time
//! ```

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Seek as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use nix::fcntl::{Flock, FlockArg};
use stockade_model::Secret;
use tempfile::NamedTempFile;

use crate::{
    failure::{BAD_USAGE, Failure},
    local_paths::{READY_FILE, Ready},
};

/// The layout this build knows.
const FORMAT: u32 = 1;
const FORMAT_FILE: &str = "format";
const KEY_FILE: &str = "api-key";

/// A data directory this process alone uses, until dropped.
#[derive(Debug)]
pub(crate) struct DataDir {
    path: PathBuf,
    before: Before,
    _lock: Flock<File>,
}

/// What was there before it was taken.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Before {
    Nothing,
    EmptyDirectory,
    DataDirectory,
}

impl Before {
    fn of(path: &Path) -> Self {
        match fs::read_dir(path).map(|mut entries| entries.next().is_none()) {
            Ok(true) => Self::EmptyDirectory,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::Nothing,
            _ => Self::DataDirectory,
        }
    }
}

impl DataDir {
    /// Looks whether the directory can be taken, and touches nothing; its absolute path.
    pub(crate) fn check(path: &Path) -> Result<PathBuf, Failure> {
        let path = absolute(path)?;
        if path.to_str().is_none() {
            // The files in it name it in JSON.
            let message = format!("the data directory's name {path:?} is not UTF-8");
            return Err(Failure::new("invalid_argument", message).hint("name another --data-dir").exit(BAD_USAGE));
        }
        if let Some(pid) = holder(&path) {
            return Err(in_use(&path, &pid.to_string()));
        }
        read_format(&path)?;
        read_key(&path.join(KEY_FILE))?;
        Ok(path)
    }

    /// Makes the directory if there is none, and takes it.
    pub(crate) fn take(path: &Path) -> Result<Self, Failure> {
        let path = absolute(path)?;
        let before = Before::of(&path);
        // Others have no business with records and keys.
        fs::DirBuilder::new().recursive(true).mode(0o711).create(&path).map_err(|error| unusable(&path, &error))?;
        let lock = take_lock(&path)?;
        if !read_format(&path)? {
            let format = path.join(FORMAT_FILE);
            fs::write(&format, format!("{FORMAT}\n")).map_err(|error| unusable(&format, &error))?;
        }
        Ok(Self { path, before, _lock: lock })
    }

    /// Nothing can be served from here: what was made in a place that was empty goes again. The records and machines
    /// of an earlier server stay as they are.
    pub(crate) fn give_up(self) {
        let removed = match self.before {
            Before::Nothing => fs::remove_dir_all(&self.path),
            Before::EmptyDirectory => remove_contents(&self.path),
            Before::DataDirectory => Ok(()),
        };
        if let Err(error) = removed {
            tracing::warn!(%error, "what was made in {} could not be removed again", self.path.display());
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Where the API key's text is.
    pub(crate) fn key_file(&self) -> PathBuf {
        self.join(KEY_FILE)
    }

    /// The API key in the key file; made, and `true`, if there is none.
    pub(crate) fn api_key(&self) -> Result<(Secret, bool), Failure> {
        let path = self.key_file();
        if let Some(key) = read_key(&path)? {
            return Ok((key, false));
        }
        let key = Secret::random_hex("e2b_", 20);
        self.write(&path, format!("{}\n", key.expose()).as_bytes(), 0o600)?;
        Ok((key, true))
    }

    /// Says to the world that the server serves.
    pub(crate) fn write_ready(&self, ready: &Ready) -> Result<(), Failure> {
        let mut text = serde_json::to_vec_pretty(ready).map_err(|error| Failure::new("internal", error.to_string()))?;
        text.push(b'\n');
        self.write(&self.join(READY_FILE), &text, 0o644)
    }

    /// Takes that back.
    pub(crate) fn remove_ready(&self) {
        // It may not be there; clients find out at the latest when they connect.
        let _ = fs::remove_file(self.join(READY_FILE));
    }

    /// Appears whole or not at all.
    fn write(&self, path: &Path, content: &[u8], mode: u32) -> Result<(), Failure> {
        use std::os::unix::fs::PermissionsExt as _;
        let write = || {
            let mut file = NamedTempFile::new_in(&self.path)?;
            file.write_all(content)?;
            file.as_file().set_permissions(fs::Permissions::from_mode(mode))?;
            file.as_file().sync_all()?;
            file.persist(path).map_err(io::Error::from)
        };
        write().map(drop).map_err(|error| unusable(path, &error))
    }
}

fn remove_contents(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let removed = match entry.file_type()?.is_dir() {
            true => fs::remove_dir_all(entry.path()),
            false => fs::remove_file(entry.path()),
        };
        match removed {
            // The database removes files of its own while it is closed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other?,
        }
    }
    Ok(())
}

fn take_lock(directory: &Path) -> Result<Flock<File>, Failure> {
    let path = directory.join("lock");
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o644);
    let file = options.open(&path).map_err(|error| unusable(&path, &error))?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(mut lock) => {
            let mut write = || {
                lock.set_len(0)?;
                lock.rewind()?;
                writeln!(lock, "{}", std::process::id())
            };
            write().map_err(|error| unusable(&path, &error))?;
            Ok(lock)
        }
        Err((mut file, nix::errno::Errno::EWOULDBLOCK)) => {
            let mut pid = String::new();
            let _ = file.read_to_string(&mut pid);
            Err(in_use(directory, pid.trim()))
        }
        Err((_, error)) => Err(Failure::host(format!("lock {}", path.display()), error)),
    }
}

fn in_use(directory: &Path, pid: &str) -> Failure {
    Failure::new("data_dir_in_use", format!("{} is in use by another server, pid {pid}", directory.display()))
        .hint("stop that one, or name another --data-dir")
}

fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path).map_err(|error| Failure::host(format!("find {}", path.display()), error))
}

/// The pid of the server that holds the directory.
pub(crate) fn holder(directory: &Path) -> Option<u32> {
    let mut file = File::open(directory.join("lock")).ok()?;
    let mut pid = String::new();
    file.read_to_string(&mut pid).ok()?;
    // A shared lock can be had exactly when no server has the exclusive one.
    match Flock::lock(file, FlockArg::LockSharedNonblock) {
        Ok(_) => None,
        Err(_) => pid.trim().parse().ok(),
    }
}

/// Whether the directory says that it has the layout this build knows; an error if it says another.
fn read_format(directory: &Path) -> Result<bool, Failure> {
    let path = directory.join(FORMAT_FILE);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(unusable(&path, &error)),
    };
    match text.trim().parse::<u32>() {
        Ok(FORMAT) => Ok(true),
        Ok(found) if found > FORMAT => Err(too_new(directory, &format!("format {found}, this one knows {FORMAT}"))),
        _ => {
            let message = format!("{} does not hold a format number but {:?}", path.display(), text.trim());
            Err(Failure::new("data_dir_damaged", message)
                .hint("is it a data directory of stockade? name another --data-dir"))
        }
    }
}

/// A newer version was here: what it wrote is left alone.
pub(super) fn too_new(directory: &Path, versions: &str) -> Failure {
    let message = format!("{} was written by a newer stockade ({versions})", directory.display());
    Failure::new("data_dir_too_new", message).hint("use that version, or name another --data-dir")
}

/// The key in a key file; `None` if there is no file.
fn read_key(path: &Path) -> Result<Option<Secret>, Failure> {
    match fs::read_to_string(path) {
        Ok(text) if is_key(text.trim()) => Ok(Some(Secret::new(text.trim()))),
        Ok(_) => {
            let message = format!("{} holds no API key: one line of 20 to 256 visible characters", path.display());
            Err(Failure::new("bad_api_key", message)
                .hint("put the key back, or remove the file: a new key is made at the next start"))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Failure::host(format!("read {}", path.display()), error)),
    }
}

fn unusable(path: &Path, error: &io::Error) -> Failure {
    let failure = match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            Failure::new("data_dir_read_only", format!("{} cannot be written: {error}", path.display()))
        }
        io::ErrorKind::StorageFull => Failure::new("no_space", format!("cannot write {}: {error}", path.display())),
        _ => Failure::host(format!("write {}", path.display()), error),
    };
    failure.hint("name a directory this user can write with --data-dir or STOCKADE_DATA_DIR")
}

/// A key somebody could guess would open everything.
fn is_key(text: &str) -> bool {
    (20..=256).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    #[test]
    fn a_directory_has_one_server_at_a_time_and_keeps_its_key() {
        let place = TempDir::new().expect("a dir");
        let first = DataDir::take(place.path()).expect("taken");
        let (key, is_new) = first.api_key().expect("a key");
        assert!(is_new && key.expose().len() == 44 && key.expose().starts_with("e2b_"));
        assert_eq!(holder(place.path()), Some(std::process::id()));
        let failure = DataDir::take(place.path()).expect_err("in use");
        assert_eq!(failure.code, "data_dir_in_use");
        assert!(failure.message.contains(&format!("pid {}", std::process::id())), "{failure}");
        drop(first);
        assert_eq!(holder(place.path()), None);
        let (again, is_new) = DataDir::take(place.path()).expect("taken again").api_key().expect("a key");
        assert!(!is_new && again.matches(key.expose()));
    }

    #[test]
    fn giving_up_leaves_the_place_as_it_was() {
        let place = TempDir::new().expect("a dir");
        let new = place.path().join("data");
        let taken = || {
            let data_dir = DataDir::take(&new).expect("taken");
            data_dir.api_key().expect("a key");
            fs::create_dir(data_dir.join("kernel")).expect("a directory");
            data_dir
        };
        taken().give_up();
        assert!(!new.exists());
        fs::create_dir(&new).expect("a directory");
        taken().give_up();
        assert!(new.exists() && fs::read_dir(&new).expect("a directory").count() == 0);
        // An earlier server's.
        drop(taken());
        fs::remove_dir(new.join("kernel")).expect("removed");
        let key = fs::read(new.join(KEY_FILE)).expect("a key");
        taken().give_up();
        assert!(new.join("kernel").exists() && fs::read(new.join(KEY_FILE)).expect("a key") == key);
    }

    #[test]
    fn a_key_file_without_a_key_is_refused() {
        let place = TempDir::new().expect("a dir");
        let data_dir = DataDir::take(place.path()).expect("taken");
        for text in ["", "x", "e2b_wrong", "two words that are long enough", &"k".repeat(257)] {
            fs::write(data_dir.key_file(), text).expect("written");
            assert_eq!(data_dir.api_key().expect_err("no key").code, "bad_api_key", "{text}");
        }
        fs::write(data_dir.key_file(), "a-key-of-the-operators-own\n").expect("written");
        assert!(data_dir.api_key().expect("a key").0.matches("a-key-of-the-operators-own"));
    }

    #[test]
    fn a_directory_of_a_newer_version_is_refused_and_left_alone() {
        let place = TempDir::new().expect("a dir");
        fs::write(place.path().join("format"), "99\n").expect("a file");
        assert_eq!(DataDir::take(place.path()).expect_err("refused").code, "data_dir_too_new");
        assert_eq!(fs::read_to_string(place.path().join("format")).expect("a file"), "99\n");
        fs::write(place.path().join("format"), "what\n").expect("a file");
        assert_eq!(DataDir::take(place.path()).expect_err("refused").code, "data_dir_damaged");
    }
}
