//! Writes a tree of the host as a tar stream. Links are not followed; what is no file, directory or link
//! is left out and named.

use std::{
    fs::{self, File, Metadata},
    io::{self, Write},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use tar::{Builder, EntryType, Header};

use crate::failure::Failure;

/// Writes everything below `root`; returns what was left out.
pub(crate) fn pack(root: &Path, out: impl Write) -> Result<Vec<PathBuf>, Failure> {
    let mut builder = Builder::new(out);
    let mut skipped = Vec::new();
    // Names below the root, still to be written. Not recursive: trees may be deeper than a stack.
    let mut names = vec![PathBuf::new()];
    while let Some(name) = names.pop() {
        let path = root.join(&name);
        let failed = |error: io::Error| Failure::host(format!("read {}", path.display()), error);
        let metadata = fs::symlink_metadata(&path).map_err(failed)?;
        let kind = metadata.file_type();
        if kind.is_dir() {
            if !name.as_os_str().is_empty() {
                add(&mut builder, &name, &metadata, EntryType::Directory, io::empty()).map_err(failed)?;
            }
            names.extend(children(&path, &name).map_err(failed)?);
        } else if kind.is_symlink() {
            let mut header = header(&metadata, EntryType::Symlink);
            let target = fs::read_link(&path).map_err(failed)?;
            builder.append_link(&mut header, &name, target).map_err(failed)?;
        } else if kind.is_file() {
            let file = File::open(&path).map_err(failed)?;
            add(&mut builder, &name, &metadata, EntryType::Regular, file).map_err(failed)?;
        } else {
            skipped.push(path);
        }
    }
    let ended = |error: io::Error| Failure::host("send the files", error);
    builder.into_inner().and_then(|mut out| out.flush()).map_err(ended)?;
    Ok(skipped)
}

/// The names in a directory, the last one first.
fn children(path: &Path, name: &Path) -> io::Result<Vec<PathBuf>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(path)? {
        names.push(name.join(entry?.file_name()));
    }
    names.sort_unstable_by(|left, right| right.cmp(left));
    Ok(names)
}

fn header(metadata: &Metadata, kind: EntryType) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(metadata.permissions().mode() & 0o777);
    header.set_mtime(u64::try_from(metadata.mtime()).unwrap_or(0));
    header.set_size(0);
    header
}

/// The header promises a length, so exactly that many bytes must follow.
fn add(
    builder: &mut Builder<impl Write>,
    name: &Path,
    metadata: &Metadata,
    kind: EntryType,
    data: impl io::Read,
) -> io::Result<()> {
    let mut header = header(metadata, kind);
    let length = if kind == EntryType::Regular { metadata.len() } else { 0 };
    header.set_size(length);
    let mut data = Counted { inner: data.take(length), read: 0 };
    builder.append_data(&mut header, name, &mut data)?;
    if data.read == length { Ok(()) } else { Err(io::Error::other("it became shorter while it was read")) }
}

struct Counted<R> {
    inner: R,
    read: u64,
}

impl<R: io::Read> io::Read for Counted<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let length = self.inner.read(out)?;
        self.read += length as u64;
        Ok(length)
    }
}
