//! Writes a tar stream that comes from a guest into a directory of the host, and nowhere else.
//!
//! The guest may send anything: links to follow out of the directory, `..`, absolute names, devices, setuid
//! programs. So every name is resolved by the kernel with `openat2`, beneath the directory and through no
//! link at all; files are made anew and never written through; permissions are the nine ordinary bits; what
//! is no file, directory or link is left out and named.

use std::{
    ffi::OsStr,
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::{Component, Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat, openat2},
    sys::{
        stat::{Mode, fchmod, futimens, mkdirat},
        time::{TimeSpec, TimeValLike as _},
    },
    unistd::{UnlinkatFlags, linkat, symlinkat, unlinkat},
};
use tar::{Archive, Entry, EntryType};

use crate::failure::Failure;

/// What a directory gets until all that is in it is written.
const OPEN_DIRECTORY: Mode = Mode::from_bits_truncate(0o700);

/// Unpacks into the directory; returns the names that were left out.
pub(crate) fn unpack(root: &Path, input: impl Read) -> Result<Vec<PathBuf>, Failure> {
    let directory = File::open(root).map_err(|error| Failure::host(format!("open {}", root.display()), error))?;
    let mut target = Target { root, directory: directory.into(), modes: Vec::new(), skipped: Vec::new() };
    let malformed =
        |error: io::Error| Failure::new("malformed_archive", format!("the sandbox sent no valid archive: {error}"));
    let mut archive = Archive::new(input);
    for entry in archive.entries().map_err(malformed)? {
        target.write(entry.map_err(malformed)?)?;
    }
    target.set_directory_modes()?;
    Ok(target.skipped)
}

struct Target<'a> {
    root: &'a Path,
    directory: OwnedFd,
    /// Directories and the permissions they get at the end: they may forbid writing into them.
    modes: Vec<(PathBuf, Mode)>,
    skipped: Vec<PathBuf>,
}

impl Target<'_> {
    fn write<R: Read>(&mut self, mut entry: Entry<'_, R>) -> Result<(), Failure> {
        let name = confined(Path::new(OsStr::from_bytes(&entry.path_bytes())))?;
        let Some(leaf) = name.file_name().map(OsStr::to_owned) else {
            // The directory itself.
            return Ok(());
        };
        let failed = |error: Errno| self.failed(&name, error);
        let parent = self.open_parent(&name).map_err(failed)?;
        let mode = Mode::from_bits_truncate(entry.header().mode().unwrap_or(0o644) & 0o777);
        match entry.header().entry_type() {
            EntryType::Directory => {
                make_directory(parent.as_fd(), &leaf).map_err(failed)?;
                self.modes.push((name, mode));
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                remove(parent.as_fd(), &leaf).map_err(failed)?;
                let mut file = create(parent.as_fd(), &leaf).map_err(failed)?;
                let written = io::copy(&mut entry, &mut file);
                written.map_err(|error| Failure::host(format!("write {}", self.root.join(&name).display()), error))?;
                finish(&file, mode, entry.header().mtime().unwrap_or(0)).map_err(failed)?;
            }
            EntryType::Symlink => {
                let link = entry.link_name_bytes().unwrap_or_default();
                remove(parent.as_fd(), &leaf).map_err(failed)?;
                symlinkat(OsStr::from_bytes(&link), &parent, leaf.as_os_str()).map_err(failed)?;
            }
            EntryType::Link => {
                let link = entry.link_name_bytes().unwrap_or_default();
                let original = confined(Path::new(OsStr::from_bytes(&link)))?;
                self.link(&original, parent.as_fd(), &leaf).map_err(failed)?;
            }
            _ => self.skipped.push(name),
        }
        Ok(())
    }

    fn failed(&self, name: &Path, error: Errno) -> Failure {
        let path = self.root.join(name);
        match error {
            Errno::ELOOP | Errno::EXDEV => Failure::new(
                "unsafe_archive",
                format!("the sandbox sent {}, which leads through a link; nothing was written there", path.display()),
            ),
            error => Failure::host(format!("write {}", path.display()), error.desc()),
        }
    }

    /// The directory a name is in; made if the stream did not bring it.
    fn open_parent(&self, name: &Path) -> nix::Result<OwnedFd> {
        let parent = name.parent().unwrap_or(Path::new(""));
        match self.open_directory(parent) {
            Err(Errno::ENOENT) => {}
            opened => return opened,
        }
        let mut made = PathBuf::new();
        for part in parent {
            let above = self.open_directory(&made)?;
            make_directory(above.as_fd(), part)?;
            made.push(part);
        }
        self.open_directory(parent)
    }

    fn open_directory(&self, name: &Path) -> nix::Result<OwnedFd> {
        let name = if name.as_os_str().is_empty() { Path::new(".") } else { name };
        let resolve =
            ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_MAGICLINKS;
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        openat2(&self.directory, name, OpenHow::new().flags(flags).resolve(resolve))
    }

    /// A second name for a file the stream brought before.
    fn link(&self, original: &Path, parent: BorrowedFd<'_>, leaf: &OsStr) -> nix::Result<()> {
        let original_leaf = original.file_name().ok_or(Errno::EINVAL)?;
        let original_parent = self.open_directory(original.parent().unwrap_or(Path::new("")))?;
        remove(parent, leaf)?;
        linkat(&original_parent, original_leaf, parent, leaf, AtFlags::empty())
    }

    fn set_directory_modes(&mut self) -> Result<(), Failure> {
        while let Some((name, mode)) = self.modes.pop() {
            let directory = self.open_directory(&name).and_then(|directory| fchmod(&directory, mode));
            directory.map_err(|error| self.failed(&name, error))?;
        }
        Ok(())
    }
}

/// The name without `.` parts; refused if it is absolute or has a `..`.
fn confined(name: &Path) -> Result<PathBuf, Failure> {
    let mut confined = PathBuf::new();
    for part in name.components() {
        match part {
            Component::Normal(part) => confined.push(part),
            Component::CurDir => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                let message =
                    format!("the sandbox sent {name:?}, which leads out of the directory; nothing was written there");
                return Err(Failure::new("unsafe_archive", message));
            }
        }
    }
    Ok(confined)
}

fn make_directory(parent: BorrowedFd<'_>, leaf: &OsStr) -> nix::Result<()> {
    match mkdirat(parent, leaf, OPEN_DIRECTORY) {
        Err(Errno::EEXIST) => {
            // Fine if it is a directory and no link to one.
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let directory = openat(parent, leaf, flags, Mode::empty())?;
            let mode = nix::sys::stat::fstat(&directory)?.st_mode;
            fchmod(&directory, Mode::from_bits_truncate(mode) | OPEN_DIRECTORY)
        }
        made => made,
    }
}

fn remove(parent: BorrowedFd<'_>, leaf: &OsStr) -> nix::Result<()> {
    match unlinkat(parent, leaf, UnlinkatFlags::NoRemoveDir) {
        Err(Errno::ENOENT) => Ok(()),
        removed => removed,
    }
}

fn create(parent: BorrowedFd<'_>, leaf: &OsStr) -> nix::Result<File> {
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    openat(parent, leaf, flags, Mode::from_bits_truncate(0o600)).map(File::from)
}

fn finish(file: &File, mode: Mode, modified: u64) -> nix::Result<()> {
    fchmod(file, mode)?;
    let modified = TimeSpec::seconds(i64::try_from(modified).unwrap_or(0));
    futimens(file, &modified, &modified)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::Write as _,
        os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
    };

    use tar::{Builder, Header};
    use tempfile::TempDir;

    use super::*;
    use crate::copy::pack::pack;

    /// A stream with names a well-behaved packer would refuse.
    fn stream(entries: &[(&str, EntryType, &str)]) -> Vec<u8> {
        let mut builder = Builder::new(Vec::new());
        for (name, kind, content) in entries {
            let mut header = Header::new_gnu();
            header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_entry_type(*kind);
            header.set_mode(0o4755);
            header.set_mtime(0);
            let data = if *kind == EntryType::Regular { content.as_bytes() } else { b"" };
            if *kind != EntryType::Regular {
                header.as_old_mut().linkname[..content.len()].copy_from_slice(content.as_bytes());
            }
            header.set_size(data.len() as u64);
            header.set_cksum();
            builder.append(&header, data).expect("an entry");
        }
        builder.into_inner().expect("a stream")
    }

    #[test]
    fn a_tree_comes_back_with_links_modes_and_empty_directories() {
        let (from, to) = (TempDir::new().expect("a dir"), TempDir::new().expect("a dir"));
        let path = |name: &str| from.path().join(name);
        fs::create_dir_all(path("real/inner")).expect("dirs");
        fs::create_dir(path("empty")).expect("a dir");
        fs::write(path("real/tool.sh"), "#!/bin/sh\n").expect("a file");
        fs::set_permissions(path("real/tool.sh"), fs::Permissions::from_mode(0o755)).expect("a mode");
        let long = "long".repeat(50);
        fs::write(path(&format!("real/{long}")), "x").expect("a file");
        fs::write(path("new\nline \u{3042}"), "named").expect("a file");
        for (target, link) in
            [("nowhere", "dangling"), ("/etc/hostname", "absolute"), ("loop", "loop"), ("real", "to_dir")]
        {
            symlink(target, path(link)).expect("a link");
        }
        fs::set_permissions(path("real/inner"), fs::Permissions::from_mode(0o555)).expect("a mode");
        let mut tar = Vec::new();
        assert!(pack(from.path(), &mut tar).expect("packed").is_empty());
        assert!(unpack(to.path(), tar.as_slice()).expect("unpacked").is_empty());
        let mode = |name: &str| fs::symlink_metadata(to.path().join(name)).expect(name).mode() & 0o777;
        assert_eq!((mode("real/tool.sh"), mode("real/inner")), (0o755, 0o555));
        assert!(to.path().join("empty").is_dir() && to.path().join("real").join(&long).is_file());
        assert_eq!(fs::read_to_string(to.path().join("new\nline \u{3042}")).expect("a file"), "named");
        assert_eq!(fs::read_link(to.path().join("absolute")).expect("a link"), Path::new("/etc/hostname"));
        assert_eq!(fs::read_link(to.path().join("loop")).expect("a link"), Path::new("loop"));
    }

    #[test]
    fn nothing_is_written_outside_the_directory() {
        use EntryType::{Directory, Link, Regular, Symlink};
        let outside = TempDir::new().expect("a dir");
        let canary = outside.path().join("canary");
        let away = outside.path().display().to_string();
        for entries in [
            vec![("../../x", Regular, "bad")],
            vec![("/tmp/stockade-absolute", Regular, "bad")],
            vec![("up", Symlink, away.as_str()), ("up/canary", Regular, "bad")],
            vec![("up", Symlink, away.as_str()), ("up/deeper/canary", Regular, "bad")],
            vec![("up", Symlink, away.as_str()), ("up", Directory, ""), ("up/canary", Regular, "bad")],
            vec![("up", Symlink, away.as_str()), ("hard", Link, "up/secret")],
            vec![("hard", Link, "../secret")],
        ] {
            fs::write(outside.path().join("secret"), "secret").expect("a file");
            let target = TempDir::new_in(outside.path()).expect("a dir");
            let failure = unpack(target.path(), stream(&entries).as_slice()).expect_err("refused");
            assert!(["unsafe_archive", "host_error"].contains(&failure.code.as_str()), "{entries:?}: {failure}");
            assert!(!canary.exists() && !outside.path().join("x").exists(), "{entries:?}");
            assert_eq!(fs::read_dir(outside.path()).expect("a dir").count(), 2, "{entries:?}");
        }
    }

    #[test]
    fn a_link_at_the_place_of_a_file_is_replaced_and_not_written_through() {
        let (outside, target) = (TempDir::new().expect("a dir"), TempDir::new().expect("a dir"));
        let canary = outside.path().join("canary");
        fs::File::create(&canary).and_then(|mut file| file.write_all(b"mine")).expect("a file");
        let link = canary.display().to_string();
        let entries = [("leak", EntryType::Symlink, link.as_str()), ("leak", EntryType::Regular, "theirs")];
        unpack(target.path(), stream(&entries).as_slice()).expect("unpacked");
        assert_eq!(fs::read_to_string(&canary).expect("a file"), "mine");
        assert_eq!(fs::read_to_string(target.path().join("leak")).expect("a file"), "theirs");
    }

    #[test]
    fn devices_are_left_out_and_setuid_bits_are_dropped() {
        let target = TempDir::new().expect("a dir");
        let entries = [("fifo", EntryType::Fifo, ""), ("program", EntryType::Regular, "x")];
        let skipped = unpack(target.path(), stream(&entries).as_slice()).expect("unpacked");
        assert_eq!(skipped, [Path::new("fifo")]);
        assert_eq!(fs::metadata(target.path().join("program")).expect("a file").mode() & 0o7777, 0o755);
    }
}
