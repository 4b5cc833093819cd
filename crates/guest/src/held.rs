//! Small files the agent writes again and again, and what it reads to see that there is nothing to do, held open.
//!
//! A machine that was just restored under an emulator runs everything for the first time, and each kind of work has to
//! be translated first. Finding and opening a file is the longest part of a small write; so a template's files are
//! opened when it boots, and a machine made from it only has to write.

use std::{
    collections::HashMap,
    fs::{self, File, OpenOptions},
    io,
    os::{
        fd::{AsRawFd, RawFd},
        unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

const MODE: u32 = 0o644;
/// The length of a file whose writing failed.
const UNKNOWN: u64 = u64::MAX;
const RANDOM: &str = "/dev/urandom";
/// How many sockets of which kind there are, for both families.
const SOCKETS: [&str; 2] = ["/proc/net/sockstat", "/proc/net/sockstat6"];

/// What is held.
#[derive(Default)]
pub(crate) struct Held {
    files: Mutex<HashMap<PathBuf, Small>>,
    random: OnceLock<File>,
    sockets: [OnceLock<File>; SOCKETS.len()],
}

struct Small {
    file: File,
    place: (u64, u64),
    length: u64,
}

impl Held {
    /// Writes a small file in place (an open descriptor sees it), as root, mode 0644, parents made. `may_have_changed`:
    /// somebody else may have written or replaced it.
    pub(crate) fn write(&self, path: &Path, text: &str, may_have_changed: bool) -> io::Result<()> {
        let mut files = self.lock();
        if let Some(small) = files.get_mut(path)
            && (!may_have_changed || small.is_still(path))
        {
            return small.put(text);
        }
        let mut small = Small::open(path)?;
        small.put(text)?;
        files.insert(path.to_owned(), small);
        Ok(())
    }

    /// The kernel's generator.
    pub(crate) fn random(&self) -> io::Result<RawFd> {
        held(&self.random, || OpenOptions::new().write(true).open(RANDOM)).map(AsRawFd::as_raw_fd)
    }

    /// Whether there may be a TCP connection, whoever it is with. To list them is a long way.
    pub(crate) fn may_have_connections(&self) -> bool {
        let has_none = |(place, path): (&OnceLock<File>, &str)| {
            let mut text = [0; 1_024];
            let length = held(place, || File::open(path)).and_then(|file| file.read_at(&mut text, 0));
            length.is_ok_and(|length| counts_no_tcp(&String::from_utf8_lossy(&text[..length])))
        };
        !self.sockets.iter().zip(SOCKETS).all(has_none)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PathBuf, Small>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Small {
    fn open(path: &Path) -> io::Result<Self> {
        let open = || OpenOptions::new().write(true).create(true).truncate(false).mode(MODE).open(path);
        let file = match open() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
                open()?
            }
            other => other?,
        };
        let metadata = file.metadata()?;
        if metadata.permissions().mode() & 0o7777 != MODE {
            file.set_permissions(fs::Permissions::from_mode(MODE))?;
        }
        Ok(Self { file, place: (metadata.dev(), metadata.ino()), length: metadata.len() })
    }

    /// Whether the path leads to it as it was left.
    fn is_still(&self, path: &Path) -> bool {
        let as_left = |now: &fs::Metadata| {
            (now.dev(), now.ino()) == self.place
                && now.len() == self.length
                && now.permissions().mode() & 0o7777 == MODE
        };
        fs::metadata(path).as_ref().is_ok_and(as_left)
    }

    /// Does not empty the file first: its block would be given back, and ext4 would find a new one and write it out before
    /// the file is closed, which takes seven times as long.
    fn put(&mut self, text: &str) -> io::Result<()> {
        let before = std::mem::replace(&mut self.length, UNKNOWN);
        let length = text.len() as u64;
        self.file.write_all_at(text.as_bytes(), 0)?;
        if before > length {
            self.file.set_len(length)?;
        }
        self.length = length;
        Ok(())
    }
}

/// The file of a place, opened the first time.
fn held(place: &OnceLock<File>, open: impl FnOnce() -> io::Result<File>) -> io::Result<&File> {
    match place.get() {
        Some(file) => Ok(file),
        None => open().map(|file| place.get_or_init(|| file)),
    }
}

/// `TCP: inuse 0 orphan 0 tw 0 alloc 0 mem 0`, and `TCP6: inuse 0`. Those without a process (`orphan`) may still send.
fn counts_no_tcp(text: &str) -> bool {
    let line = text.lines().find_map(|line| line.strip_prefix("TCP: ").or_else(|| line.strip_prefix("TCP6: ")));
    let mut words = line.unwrap_or_default().split(' ');
    let mut is_zero = |name| words.next() == Some(name) && words.next() == Some("0");
    is_zero("inuse") && (text.starts_with("TCP6") || is_zero("orphan"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_written_over_holds_the_new_text_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("etc/hostname");
        let held = Held::default();
        for text in ["a-rather-long-name\n", "short\n", "", "another\n"] {
            held.write(&path, text, false).expect("written");
            assert_eq!(fs::read_to_string(&path).expect("read"), text);
        }
    }

    #[test]
    fn connections_are_looked_for_unless_the_kernel_counts_none() {
        let v4 = "sockets: used 9\nTCP: inuse 0 orphan 0 tw 0 alloc 1 mem 0\nUDP: inuse 1 mem 0\n";
        assert!(counts_no_tcp(v4) && counts_no_tcp("TCP6: inuse 0\nUDP6: inuse 0\n"));
        for some in
            [&v4.replace("TCP: inuse 0", "TCP: inuse 1"), &v4.replace("orphan 0", "orphan 2"), "TCP6: inuse 3\n"]
        {
            assert!(!counts_no_tcp(some), "{some}");
        }
        for strange in ["", "TCP: inuse", "TCP: 0", "UDP: inuse 0 mem 0\n"] {
            assert!(!counts_no_tcp(strange), "{strange}");
        }
        let _listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
        assert!(Held::default().may_have_connections());
    }

    #[test]
    fn what_somebody_did_to_a_file_is_set_right() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("machine-id");
        let held = Held::default();
        let replace = |path: &Path| {
            fs::remove_file(path).expect("removed");
            fs::write(path, "somebody else's, and longer").expect("written");
        };
        let lengthen = |path: &Path| fs::write(path, "somebody else's, and longer").expect("written");
        let remove = |path: &Path| fs::remove_file(path).expect("removed");
        let close = |path: &Path| fs::set_permissions(path, fs::Permissions::from_mode(0o600)).expect("changed");
        let link = |path: &Path| {
            fs::rename(path, path.with_extension("old")).expect("moved");
            std::os::unix::fs::symlink("elsewhere", path).expect("linked");
        };
        let changes: [&dyn Fn(&Path); 5] = [&replace, &lengthen, &remove, &close, &link];
        for (round, change) in changes.into_iter().enumerate() {
            held.write(&path, "ours\n", true).expect("written");
            change(&path);
            let text = format!("ours {round}\n");
            held.write(&path, &text, true).expect("written");
            assert_eq!(fs::read_to_string(&path).expect("read"), text);
            assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o7777, MODE);
        }
    }
}
