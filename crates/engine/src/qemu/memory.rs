//! Guest memory that many machines share, and sparse files.
//!
//! A template's memory is read once into a memfd that is then sealed: nobody, a broken-out emulator
//! included, can change or shrink it any more, while each machine maps it copy-on-write.
//!
//! The checksum of a sparse file is that of its blocks that are not all zero, each with its number:
//! it does not depend on where a file system keeps holes.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::{
        fd::AsFd,
        unix::fs::{FileExt, OpenOptionsExt},
    },
    path::Path,
};

use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::memfd::{MFdFlags, memfd_create},
    unistd::{Whence, lseek},
};
use sha2::{Digest, Sha256};

use super::pages::{PAGE, Run};

const BLOCK_BYTES: usize = 64 << 10;

/// Seals of a shared base. `F_SEAL_WRITE` is only accepted when nobody maps it for writing.
const SEALS: SealFlag =
    SealFlag::F_SEAL_SEAL.union(SealFlag::F_SEAL_SHRINK).union(SealFlag::F_SEAL_GROW).union(SealFlag::F_SEAL_WRITE);

/// Memory nobody can change.
#[derive(Debug)]
pub(crate) struct SealedMemory {
    file: File,
}

impl SealedMemory {
    /// Copies a memory file into sealed memory; returns its checksum with it.
    pub(crate) fn load(path: &Path) -> io::Result<(Self, String)> {
        let source = File::open(path)?;
        let file = new_memory(source.metadata()?.len())?;
        let digest = copy_blocks(&source, Some(&file))?;
        fcntl(&file, FcntlArg::F_ADD_SEALS(SEALS))?;
        Ok((Self { file }, digest))
    }

    /// Takes over sealed memory that another process holds, if its contents are the expected ones.
    /// The holder is an emulator and may lie about everything but seals and contents.
    pub(crate) fn take_over(pid: i32, fd: i32, bytes: u64, digest: &str) -> io::Result<Option<Self>> {
        // Looked at before it is opened: opening what an emulator put there (a FIFO, say) must not block.
        let path = format!("/proc/{pid}/fd/{fd}");
        if !fs::read_link(&path)?.to_string_lossy().starts_with("/memfd:stockade-memory") {
            return Ok(None);
        }
        let file = fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path)?;
        let is_sealed = fcntl(&file, FcntlArg::F_GET_SEALS).is_ok_and(|seals| seals & SEALS.bits() == SEALS.bits());
        if !is_sealed || file.metadata()?.len() != bytes || copy_blocks(&file, None)? != digest {
            return Ok(None);
        }
        Ok(Some(Self { file }))
    }

    /// Memory in which nothing is written.
    pub(crate) fn zero(bytes: u64) -> io::Result<Self> {
        let file = new_memory(bytes)?;
        fcntl(&file, FcntlArg::F_ADD_SEALS(SEALS))?;
        Ok(Self { file })
    }

    /// A copy with some pages changed: those of `runs` to what `pages` holds of them, one after the other.
    pub(crate) fn with_pages(&self, runs: &[Run], pages: &File) -> io::Result<Self> {
        let file = new_memory(self.file.metadata()?.len())?;
        let mut buffer = vec![0; 16 * BLOCK_BYTES];
        let mut position = 0;
        while let Some(start) = next_data(&self.file, position)? {
            let end = lseek(self.file.as_fd(), i64::try_from(start).map_err(io::Error::other)?, Whence::SeekHole)?;
            position = end.unsigned_abs();
            copy_range(&self.file, start, &file, start, position - start, &mut buffer)?;
        }
        let mut from = 0;
        for run in runs {
            let bytes = run.count * PAGE;
            copy_range(pages, from, &file, run.first * PAGE, bytes, &mut buffer)?;
            from += bytes;
        }
        fcntl(&file, FcntlArg::F_ADD_SEALS(SEALS))?;
        Ok(Self { file })
    }

    /// Bytes of it that are in use.
    pub(crate) fn used_bytes(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        self.file.metadata().map_or(0, |metadata| metadata.blocks() * 512)
    }

    /// The memory, to be inherited by an emulator.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }
}

fn new_memory(bytes: u64) -> io::Result<File> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let file = File::from(memfd_create(c"stockade-memory", flags)?);
    file.set_len(bytes)?;
    Ok(file)
}

fn copy_range(
    from: &File,
    from_offset: u64,
    to: &File,
    to_offset: u64,
    bytes: u64,
    buffer: &mut [u8],
) -> io::Result<()> {
    let mut done = 0;
    while done < bytes {
        let want = usize::try_from(bytes - done).map_or(buffer.len(), |left| left.min(buffer.len()));
        from.read_exact_at(&mut buffer[..want], from_offset + done)?;
        to.write_all_at(&buffer[..want], to_offset + done)?;
        done += want as u64;
    }
    Ok(())
}

/// Checksum of a file, holes or not.
pub(crate) fn sparse_digest(path: &Path) -> io::Result<String> {
    copy_blocks(&File::open(path)?, None)
}

/// Copies a file, leaving holes where the source is zero; returns the checksum. The target is on disk
/// when this returns.
pub(crate) fn copy_sparse(from: &Path, to: &Path) -> io::Result<String> {
    let source = File::open(from)?;
    let target = File::create_new(to)?;
    target.set_len(source.metadata()?.len())?;
    let digest = copy_blocks(&source, Some(&target))?;
    target.sync_all()?;
    Ok(digest)
}

fn copy_blocks(source: &File, target: Option<&File>) -> io::Result<String> {
    let mut digest = Sha256::new();
    let mut block = vec![0; BLOCK_BYTES];
    let length = source.metadata()?.len();
    digest.update(length.to_be_bytes());
    let mut position = 0;
    while let Some(start) = next_data(source, position)? {
        // Blocks are whole, wherever the file system's extents begin.
        let start = start - start % BLOCK_BYTES as u64;
        if start >= length {
            break;
        }
        let want = usize::try_from(length - start).map_or(BLOCK_BYTES, |left| left.min(BLOCK_BYTES));
        source.read_exact_at(&mut block[..want], start)?;
        if block[..want].iter().any(|byte| *byte != 0) {
            digest.update(start.to_be_bytes());
            digest.update(&block[..want]);
            if let Some(target) = target {
                write_pages(target, &block[..want], start)?;
            }
        }
        position = start + BLOCK_BYTES as u64;
    }
    Ok(hex(&digest.finalize()))
}

/// Writes the pages of a block that are not zero: a page is what memory is saved by.
fn write_pages(target: &File, block: &[u8], start: u64) -> io::Result<()> {
    const PAGE: usize = 4096;
    let is_zero = |page: &[u8]| page.iter().all(|byte| *byte == 0);
    let mut from = 0;
    while from < block.len() {
        let page_end = |at: usize| (at + PAGE).min(block.len());
        if is_zero(&block[from..page_end(from)]) {
            from = page_end(from);
            continue;
        }
        let mut to = page_end(from);
        while to < block.len() && !is_zero(&block[to..page_end(to)]) {
            to = page_end(to);
        }
        target.write_all_at(&block[from..to], start + from as u64)?;
        from = to;
    }
    Ok(())
}

fn next_data(file: &File, from: u64) -> io::Result<Option<u64>> {
    let from = i64::try_from(from).map_err(io::Error::other)?;
    match lseek(file.as_fd(), from, Whence::SeekData) {
        Ok(offset) => Ok(Some(offset.unsigned_abs())),
        Err(nix::errno::Errno::ENXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Checksum of a small file's bytes as they are.
pub(crate) fn file_digest(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut digest = Sha256::new();
    let mut buffer = vec![0; BLOCK_BYTES];
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok(hex(&digest.finalize()));
        }
        digest.update(&buffer[..read]);
    }
}

/// Checksum of bytes.
pub(crate) fn bytes_digest(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// So many random hexadecimal digits.
pub(crate) fn random_hex(digits: usize) -> io::Result<String> {
    let mut bytes = vec![0; digits.div_ceil(2)];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
    let mut text = hex(&bytes);
    text.truncate(digits);
    Ok(text)
}

/// Sets a file's permissions.
pub(crate) fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("writing to a string does not fail");
        text
    })
}

/// Writes a small file whole: under another name, to disk, renamed.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("new");
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, path)
}

/// Makes what was renamed or created in a directory last.
pub(crate) fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::{fd::AsRawFd, unix::fs::MetadataExt};

    use super::*;

    #[test]
    fn sealed_memory_has_the_contents_and_refuses_every_write() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("memory");
        let file = File::create(&path).expect("created");
        file.set_len(4 << 20).expect("sized");
        file.write_all_at(b"guest", (1 << 20) + 4090).expect("written");
        let (memory, digest) = SealedMemory::load(&path).expect("loaded");

        let mut bytes = [0; 5];
        memory.file().read_exact_at(&mut bytes, (1 << 20) + 4090).expect("read");
        assert_eq!(&bytes, b"guest");
        assert_eq!(digest, sparse_digest(&path).expect("digest"));
        assert!(memory.file().write_all_at(b"x", 0).is_err());
        assert!(memory.file().set_len(0).is_err());
        let again = format!("/proc/self/fd/{}", memory.file().as_raw_fd());
        let again = fs::OpenOptions::new().write(true).open(again).expect("opens for writing");
        assert!(again.write_all_at(b"x", 0).is_err());
    }

    #[test]
    fn memory_of_another_process_is_taken_over_only_with_the_right_contents() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("memory");
        fs::write(&path, vec![7; 100_000]).expect("written");
        let (memory, digest) = SealedMemory::load(&path).expect("loaded");
        let pid = i32::try_from(std::process::id()).expect("small");
        let fd = memory.file().as_raw_fd();
        assert!(SealedMemory::take_over(pid, fd, 100_000, &digest).expect("looked at").is_some());
        assert!(SealedMemory::take_over(pid, fd, 100_000, "other").expect("looked at").is_none());
        assert!(SealedMemory::take_over(pid, fd, 100_001, &digest).expect("looked at").is_none());
    }

    #[test]
    fn holes_do_not_change_the_checksum_and_stay_holes() {
        let directory = tempfile::tempdir().expect("a directory");
        let (dense, copy) = (directory.path().join("dense"), directory.path().join("copy"));
        let mut bytes = vec![0; 3 << 20];
        bytes[2_000_000] = 1;
        fs::write(&dense, &bytes).expect("written");
        let digest = copy_sparse(&dense, &copy).expect("copied");
        assert_eq!(fs::read(&copy).expect("read"), bytes);
        assert_eq!(digest, sparse_digest(&copy).expect("digest"));
        assert!(fs::metadata(&copy).expect("there").blocks() * 512 < 1 << 20);
    }
}
