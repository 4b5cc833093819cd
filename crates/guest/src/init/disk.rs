//! The root disk: found by its serial, grown to the size the machine was given.

use std::{
    fs::{self, File},
    io,
    os::{fd::AsRawFd, unix::fs::FileExt},
    path::{Path, PathBuf},
};

use super::{InitError, cannot, wait_for};
use crate::failure::check;

const SERIAL: &str = "root";
/// `_IOW('f', 16, u64)`: grow to this many blocks, while mounted.
const EXT4_IOC_RESIZE_FS: libc::c_ulong = 0x4008_6610;
const SUPERBLOCK: u64 = 1024;

pub(super) fn find() -> Result<PathBuf, InitError> {
    wait_for(look).map_err(cannot(format!("find the disk with serial '{SERIAL}'")))
}

fn look() -> io::Result<Option<PathBuf>> {
    for disk in fs::read_dir("/sys/block")? {
        let disk = disk?;
        let serial = fs::read_to_string(disk.path().join("serial")).unwrap_or_default();
        let device = Path::new("/dev").join(disk.file_name());
        if serial.trim_matches(['\0', '\n', ' ']) == SERIAL && device.exists() {
            return Ok(Some(device));
        }
    }
    Ok(None)
}

/// Lets the mounted file system fill its disk.
pub(super) fn grow(device: &Path, mounted: &str) -> Result<(), InitError> {
    let action = || cannot(format!("grow the file system on {}", device.display()));
    let disk = File::open(device).map_err(action())?;
    let size = size_of(&disk).map_err(action())?;
    let superblock = Superblock::read(&disk).map_err(action())?;
    let blocks = size / superblock.block_bytes;
    if blocks <= superblock.blocks {
        return Ok(());
    }
    let root = File::open(mounted).map_err(action())?;
    // SAFETY: the request reads one u64.
    let result = unsafe { libc::ioctl(root.as_raw_fd(), EXT4_IOC_RESIZE_FS, &raw const blocks) };
    check(result.into()).map(drop).map_err(action())
}

fn size_of(disk: &File) -> io::Result<u64> {
    use std::io::{Seek, SeekFrom};
    let mut disk = disk;
    disk.seek(SeekFrom::End(0))
}

/// What of ext4's superblock tells the file system's size.
#[derive(Debug, Eq, PartialEq)]
struct Superblock {
    blocks: u64,
    block_bytes: u64,
}

impl Superblock {
    fn read(disk: &File) -> io::Result<Self> {
        let mut bytes = [0; 0x154];
        disk.read_exact_at(&mut bytes, SUPERBLOCK)?;
        Self::parse(&bytes).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "not an ext4 file system"))
    }

    /// `s_blocks_count` in two halves, `s_log_block_size`, `s_magic`.
    fn parse(bytes: &[u8; 0x154]) -> Option<Self> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        if bytes[0x38..0x3a] != [0x53, 0xef] || word(0x18) > 6 {
            return None;
        }
        let is_64_bit = word(0x60) & 0x80 != 0;
        let high = if is_64_bit { word(0x150) } else { 0 };
        Some(Self { blocks: u64::from(high) << 32 | u64::from(word(4)), block_bytes: 1024 << word(0x18) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_superblock_tells_blocks_and_their_size() {
        let mut bytes = [0; 0x154];
        assert_eq!(Superblock::parse(&bytes), None);
        bytes[0x38..0x3a].copy_from_slice(&[0x53, 0xef]);
        bytes[4..8].copy_from_slice(&262_144u32.to_le_bytes());
        bytes[0x18] = 2;
        bytes[0x150] = 1;
        assert_eq!(Superblock::parse(&bytes), Some(Superblock { blocks: 262_144, block_bytes: 4096 }));
        bytes[0x60] = 0x80;
        assert_eq!(Superblock::parse(&bytes).map(|found| found.blocks), Some((1 << 32) + 262_144));
    }
}
