//! An SFTP server, version 3 with OpenSSH's extensions that `scp`, `sftp` and `sshfs` use, on a pair of pipes.
//!
//! It is a process of the user's: what it may do is what the kernel lets that user do. One request is answered after the
//! other, and answers leave when no more requests wait.

mod listing;
mod packet;

use std::{
    collections::HashMap,
    ffi::OsStr,
    fs::{self, File, Metadata, OpenOptions},
    io::{self, BufReader, BufWriter, Read, Write},
    os::{
        fd::AsFd as _,
        unix::{
            ffi::OsStrExt as _,
            fs::{self as unix, DirBuilderExt as _, FileExt as _, OpenOptionsExt as _, PermissionsExt as _},
        },
    },
    path::{Path, PathBuf},
};

use nix::sys::{
    stat::{UtimensatFlags, futimens, utimensat},
    time::TimeSpec,
};

use packet::{Attributes, Body, MAX_PACKET, Malformed, Packet};

const VERSION: u32 = 3;
/// What a client may ask for or send at once; a packet has some bytes besides.
const MAX_DATA: usize = MAX_PACKET - 1024;
const MAX_HANDLES: usize = 1024;
/// Names in one answer.
const NAMES_BYTES: usize = 64 << 10;

const EXTENSIONS: [(&str, &str); 6] = [
    ("posix-rename@openssh.com", "1"),
    ("hardlink@openssh.com", "1"),
    ("fsync@openssh.com", "1"),
    ("lsetstat@openssh.com", "1"),
    ("limits@openssh.com", "1"),
    ("expand-path@openssh.com", "1"),
];

mod kind {
    pub(super) const INIT: u8 = 1;
    pub(super) const VERSION: u8 = 2;
    pub(super) const OPEN: u8 = 3;
    pub(super) const CLOSE: u8 = 4;
    pub(super) const READ: u8 = 5;
    pub(super) const WRITE: u8 = 6;
    pub(super) const LSTAT: u8 = 7;
    pub(super) const FSTAT: u8 = 8;
    pub(super) const SETSTAT: u8 = 9;
    pub(super) const FSETSTAT: u8 = 10;
    pub(super) const OPENDIR: u8 = 11;
    pub(super) const READDIR: u8 = 12;
    pub(super) const REMOVE: u8 = 13;
    pub(super) const MKDIR: u8 = 14;
    pub(super) const RMDIR: u8 = 15;
    pub(super) const REALPATH: u8 = 16;
    pub(super) const STAT: u8 = 17;
    pub(super) const RENAME: u8 = 18;
    pub(super) const READLINK: u8 = 19;
    pub(super) const SYMLINK: u8 = 20;
    pub(super) const STATUS: u8 = 101;
    pub(super) const HANDLE: u8 = 102;
    pub(super) const DATA: u8 = 103;
    pub(super) const NAME: u8 = 104;
    pub(super) const ATTRS: u8 = 105;
    pub(super) const EXTENDED: u8 = 200;
    pub(super) const EXTENDED_REPLY: u8 = 201;
}

/// Answers until the client ends its side.
pub(super) fn serve(input: &mut impl Read, output: &mut impl Write) -> io::Result<()> {
    let mut input = BufReader::with_capacity(MAX_PACKET, input);
    let mut output = BufWriter::with_capacity(MAX_PACKET, output);
    let mut server = Server::default();
    let mut buffer = Vec::new();
    while packet::read(&mut input, &mut buffer)?.is_some() {
        output.write_all(&server.answer(&buffer)?.finish())?;
        if input.buffer().is_empty() {
            output.flush()?;
        }
    }
    output.flush()
}

/// Why a request has no answer of its own kind.
enum Refusal {
    End,
    Os(io::Error),
    BadMessage,
    Unsupported,
    Failure(&'static str),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::Os(error)
    }
}

impl From<nix::Error> for Refusal {
    fn from(error: nix::Error) -> Self {
        Self::Os(error.into())
    }
}

impl From<Malformed> for Refusal {
    fn from(_: Malformed) -> Self {
        Self::BadMessage
    }
}

impl Refusal {
    fn status(&self) -> (u32, String) {
        match self {
            Self::End => (1, "end of file".to_owned()),
            Self::Os(error) => match error.kind() {
                io::ErrorKind::NotFound => (2, error.to_string()),
                io::ErrorKind::PermissionDenied => (3, error.to_string()),
                _ => (4, error.to_string()),
            },
            Self::BadMessage => (5, "malformed request".to_owned()),
            Self::Unsupported => (8, "not supported".to_owned()),
            Self::Failure(why) => (4, (*why).to_owned()),
        }
    }
}

enum Handle {
    File { file: File, appends: bool },
    Directory { path: PathBuf, entries: std::vec::IntoIter<std::ffi::OsString> },
}

#[derive(Default)]
struct Server {
    handles: HashMap<u32, Handle>,
    next: u32,
}

type Answer = Result<Packet, Refusal>;

impl Server {
    /// The answer to a packet. An error: the client does not speak the protocol.
    fn answer(&mut self, packet: &[u8]) -> io::Result<Packet> {
        let (kind, mut body) = (packet[0], Body(&packet[1..]));
        let malformed = || io::Error::new(io::ErrorKind::InvalidData, "a packet without a number");
        let number = body.u32().map_err(|_| malformed())?;
        if kind == kind::INIT {
            let version = Packet::new(kind::VERSION).u32(VERSION);
            let with =
                |packet: Packet, (name, data): &(&str, &str)| packet.string(name.as_bytes()).string(data.as_bytes());
            return Ok(EXTENSIONS.iter().fold(version, with));
        }
        Ok(self.act(kind, number, &mut body).unwrap_or_else(|refusal| {
            let (code, message) = refusal.status();
            status(number, code, &message)
        }))
    }

    fn act(&mut self, kind: u8, number: u32, body: &mut Body<'_>) -> Answer {
        match kind {
            kind::OPEN => self.open(number, body),
            kind::CLOSE => {
                let id = handle_id(body)?;
                // A file that could not be written says so by now, or never.
                self.handles.remove(&id).map(|_| done(number)).ok_or(Refusal::Failure("no such handle"))
            }
            kind::READ => self.read(number, body),
            kind::WRITE => self.write(number, body),
            kind::LSTAT => attributes(number, &fs::symlink_metadata(body.path()?)?),
            kind::STAT => attributes(number, &fs::metadata(body.path()?)?),
            kind::FSTAT => {
                let (file, _) = self.file(body)?;
                attributes(number, &file.metadata()?)
            }
            kind::SETSTAT => set_at(number, &body.path()?, body.attributes()?, true),
            kind::FSETSTAT => {
                let (file, _) = self.file(body)?;
                set_open(number, file, body.attributes()?)
            }
            kind::OPENDIR => {
                let path = body.path()?;
                let names = fs::read_dir(&path)?.map(|entry| entry.map(|entry| entry.file_name()));
                let dots = [".", ".."].map(|name| Ok(name.into()));
                let names: io::Result<Vec<_>> = dots.into_iter().chain(names).collect();
                self.keep(number, Handle::Directory { path, entries: names?.into_iter() })
            }
            kind::READDIR => self.read_directory(number, body),
            kind::REMOVE => fs::remove_file(body.path()?).map(|()| done(number)).map_err(Refusal::Os),
            kind::MKDIR => {
                let path = body.path()?;
                let mode = body.attributes()?.mode.unwrap_or(0o777) & 0o7777;
                Ok(fs::DirBuilder::new().mode(mode).create(path).map(|()| done(number))?)
            }
            kind::RMDIR => Ok(fs::remove_dir(body.path()?).map(|()| done(number))?),
            kind::REALPATH => name(number, &real_path(&body.path()?)?),
            kind::RENAME => {
                let (from, to) = (body.path()?, body.path()?);
                if fs::symlink_metadata(&to).is_ok() {
                    return Err(Refusal::Failure("the target exists"));
                }
                Ok(fs::rename(from, to).map(|()| done(number))?)
            }
            kind::READLINK => name(number, &fs::read_link(body.path()?)?),
            // In the order OpenSSH has them: what it leads to, then the link.
            kind::SYMLINK => Ok(unix::symlink(body.path()?, body.path()?).map(|()| done(number))?),
            kind::EXTENDED => self.extended(number, body),
            _ => Err(Refusal::Unsupported),
        }
    }

    fn extended(&mut self, number: u32, body: &mut Body<'_>) -> Answer {
        match body.string()? {
            b"posix-rename@openssh.com" => Ok(fs::rename(body.path()?, body.path()?).map(|()| done(number))?),
            b"hardlink@openssh.com" => Ok(fs::hard_link(body.path()?, body.path()?).map(|()| done(number))?),
            b"fsync@openssh.com" => {
                let (file, _) = self.file(body)?;
                Ok(file.sync_all().map(|()| done(number))?)
            }
            b"lsetstat@openssh.com" => set_at(number, &body.path()?, body.attributes()?, false),
            b"limits@openssh.com" => Ok(Packet::new(kind::EXTENDED_REPLY)
                .u32(number)
                .u64(MAX_PACKET as u64)
                .u64(MAX_DATA as u64)
                .u64(MAX_DATA as u64)
                .u64(MAX_HANDLES as u64)),
            b"expand-path@openssh.com" => name(number, &real_path(&expand(body.string()?)?)?),
            _ => Err(Refusal::Unsupported),
        }
    }

    fn open(&mut self, number: u32, body: &mut Body<'_>) -> Answer {
        let (path, flags, attributes) = (body.path()?, body.u32()?, body.attributes()?);
        let has = |flag: u32| flags & flag != 0;
        let (appends, creates) = (has(4), has(8));
        let mut options = OpenOptions::new();
        options.read(has(1)).append(appends).write(has(2)).truncate(has(16) && !appends);
        options.mode(attributes.mode.unwrap_or(0o666) & 0o7777).custom_flags(libc::O_NOCTTY);
        if creates && has(32) {
            options.create_new(true);
        } else {
            options.create(creates);
        }
        let file = options.open(path)?;
        if appends && has(16) {
            file.set_len(0)?;
        }
        self.keep(number, Handle::File { file, appends })
    }

    fn read(&mut self, number: u32, body: &mut Body<'_>) -> Answer {
        let (file, _) = self.file(body)?;
        let (offset, length) = (body.u64()?, (body.u32()? as usize).min(MAX_DATA));
        let (packet, count) = Packet::new(kind::DATA).u32(number).fill(length, |space| read_at(file, space, offset))?;
        if count == 0 && length > 0 { Err(Refusal::End) } else { Ok(packet) }
    }

    fn write(&mut self, number: u32, body: &mut Body<'_>) -> Answer {
        let (mut file, appends) = self.file(body)?;
        let (offset, data) = (body.u64()?, body.string()?);
        if appends {
            file.write_all(data)?
        } else {
            file.write_all_at(data, offset)?
        }
        Ok(done(number))
    }

    fn read_directory(&mut self, number: u32, body: &mut Body<'_>) -> Answer {
        let id = handle_id(body)?;
        let Some(Handle::Directory { path, entries }) = self.handles.get_mut(&id) else {
            return Err(Refusal::Failure("no such directory handle"));
        };
        let (mut names, mut count) = (Packet::new(0), 0);
        while names.len() < NAMES_BYTES {
            let Some(entry) = entries.next() else { break };
            // What has gone meanwhile is left out.
            let Ok(meta) = fs::symlink_metadata(path.join(&entry)) else { continue };
            let long = listing::line(entry.as_bytes(), &meta);
            names = names.string(entry.as_bytes()).string(&long).attributes(Some(&meta));
            count += 1;
        }
        if count == 0 {
            return Err(Refusal::End);
        }
        Ok(Packet::new(kind::NAME).u32(number).u32(count).join(&names))
    }

    fn keep(&mut self, number: u32, handle: Handle) -> Answer {
        if self.handles.len() >= MAX_HANDLES {
            return Err(Refusal::Failure("too many open handles"));
        }
        while self.handles.contains_key(&self.next) {
            self.next = self.next.wrapping_add(1);
        }
        self.handles.insert(self.next, handle);
        Ok(Packet::new(kind::HANDLE).u32(number).string(&self.next.to_be_bytes()))
    }

    fn file(&self, body: &mut Body<'_>) -> Result<(&File, bool), Refusal> {
        match self.handles.get(&handle_id(body)?) {
            Some(Handle::File { file, appends }) => Ok((file, *appends)),
            _ => Err(Refusal::Failure("no such file handle")),
        }
    }
}

fn handle_id(body: &mut Body<'_>) -> Result<u32, Refusal> {
    let bytes = body.string()?.try_into().map_err(|_| Refusal::Failure("no such handle"))?;
    Ok(u32::from_be_bytes(bytes))
}

fn status(number: u32, code: u32, message: &str) -> Packet {
    Packet::new(kind::STATUS).u32(number).u32(code).string(message.as_bytes()).string(b"en")
}

fn done(number: u32) -> Packet {
    status(number, 0, "")
}

#[expect(clippy::unnecessary_wraps, reason = "an answer like all others")]
fn attributes(number: u32, meta: &Metadata) -> Answer {
    Ok(Packet::new(kind::ATTRS).u32(number).attributes(Some(meta)))
}

#[expect(clippy::unnecessary_wraps, reason = "an answer like all others")]
fn name(number: u32, path: &Path) -> Answer {
    Ok(Packet::new(kind::NAME).u32(number).u32(1).path(path).path(path).attributes(None))
}

/// As much as there is, up to the space.
fn read_at(file: &File, space: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut count = 0;
    while count < space.len() {
        match file.read_at(&mut space[count..], offset + count as u64) {
            Ok(0) => break,
            Ok(read) => count += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(count)
}

/// A path without links and dots; its last part need not be there.
fn real_path(path: &Path) -> io::Result<PathBuf> {
    fs::canonicalize(path).or_else(|error| match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) if error.kind() == io::ErrorKind::NotFound => {
            let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
            Ok(fs::canonicalize(parent)?.join(name))
        }
        _ => Err(error),
    })
}

/// `~` and `~user` at the front become a home.
fn expand(path: &[u8]) -> Result<PathBuf, Refusal> {
    let Some(rest) = path.strip_prefix(b"~") else { return Ok(PathBuf::from(OsStr::from_bytes(path))) };
    let end = rest.iter().position(|byte| *byte == b'/').unwrap_or(rest.len());
    let (user, below) = rest.split_at(end);
    let home = if user.is_empty() {
        std::env::var_os("HOME").map(PathBuf::from)
    } else {
        let user = std::str::from_utf8(user).map_err(|_| Refusal::BadMessage)?;
        nix::unistd::User::from_name(user)?.map(|user| user.dir)
    };
    let home = home.ok_or(Refusal::Failure("no such user"))?;
    Ok(home.join(OsStr::from_bytes(below.strip_prefix(b"/").unwrap_or(below))))
}

fn set_at(number: u32, path: &Path, wanted: Attributes, follow: bool) -> Answer {
    if follow && let Some(size) = wanted.size {
        OpenOptions::new().write(true).open(path)?.set_len(size)?;
    }
    if follow && let Some(mode) = wanted.mode {
        fs::set_permissions(path, fs::Permissions::from_mode(mode & 0o7777))?;
    }
    if let Some((user, group)) = wanted.owner {
        let change = if follow { unix::chown } else { unix::lchown };
        change(path, Some(user), Some(group))?;
    }
    if let Some((access, change)) = wanted.times {
        let follow = if follow { UtimensatFlags::FollowSymlink } else { UtimensatFlags::NoFollowSymlink };
        utimensat(nix::fcntl::AT_FDCWD, path, &seconds(access), &seconds(change), follow)?;
    }
    Ok(done(number))
}

fn set_open(number: u32, file: &File, wanted: Attributes) -> Answer {
    if let Some(size) = wanted.size {
        file.set_len(size)?;
    }
    if let Some(mode) = wanted.mode {
        file.set_permissions(fs::Permissions::from_mode(mode & 0o7777))?;
    }
    if let Some((user, group)) = wanted.owner {
        unix::fchown(file, Some(user), Some(group))?;
    }
    if let Some((access, change)) = wanted.times {
        futimens(file.as_fd(), &seconds(access), &seconds(change))?;
    }
    Ok(done(number))
}

fn seconds(time: u32) -> TimeSpec {
    TimeSpec::new(time.into(), 0)
}

#[cfg(test)]
mod tests;
