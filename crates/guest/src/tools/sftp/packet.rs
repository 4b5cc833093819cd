//! Packets of SFTP, version 3: `length u32, kind u8, body`, all numbers big-endian, strings with a length.

use std::{
    ffi::OsStr,
    fs::Metadata,
    io::{self, Read},
    os::unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    path::{Path, PathBuf},
};

/// Largest packet either side sends; clients take 34,000 for granted and ask for more.
pub(super) const MAX_PACKET: usize = 256 << 10;

const SIZE: u32 = 1;
const OWNER: u32 = 2;
const PERMISSIONS: u32 = 4;
const TIMES: u32 = 8;
const EXTENDED: u32 = 1 << 31;

/// The body of a packet that has come, read from front to back.
pub(super) struct Body<'a>(pub(super) &'a [u8]);

/// The body is not what its kind says.
#[derive(Debug)]
pub(super) struct Malformed;

impl<'a> Body<'a> {
    fn bytes(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (bytes, rest) = self.0.split_at_checked(count).ok_or(Malformed)?;
        self.0 = rest;
        Ok(bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_be_bytes(self.bytes(4)?.try_into().map_err(|_| Malformed)?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_be_bytes(self.bytes(8)?.try_into().map_err(|_| Malformed)?))
    }

    pub(super) fn string(&mut self) -> Result<&'a [u8], Malformed> {
        let length = self.u32()?;
        self.bytes(length as usize)
    }

    pub(super) fn path(&mut self) -> Result<PathBuf, Malformed> {
        let bytes = self.string()?;
        // Nothing named is the place we are in.
        Ok(if bytes.is_empty() { PathBuf::from(".") } else { PathBuf::from(OsStr::from_bytes(bytes)) })
    }

    pub(super) fn attributes(&mut self) -> Result<Attributes, Malformed> {
        let flags = self.u32()?;
        let mut attributes = Attributes::default();
        if flags & SIZE != 0 {
            attributes.size = Some(self.u64()?);
        }
        if flags & OWNER != 0 {
            attributes.owner = Some((self.u32()?, self.u32()?));
        }
        if flags & PERMISSIONS != 0 {
            attributes.mode = Some(self.u32()?);
        }
        if flags & TIMES != 0 {
            attributes.times = Some((self.u32()?, self.u32()?));
        }
        if flags & EXTENDED != 0 {
            for _ in 0..self.u32()? {
                self.string()?;
                self.string()?;
            }
        }
        Ok(attributes)
    }
}

/// What a client wants changed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Attributes {
    pub(super) size: Option<u64>,
    /// User and group.
    pub(super) owner: Option<(u32, u32)>,
    pub(super) mode: Option<u32>,
    /// Access and change, seconds since the epoch.
    pub(super) times: Option<(u32, u32)>,
}

/// A packet to be sent.
pub(super) struct Packet(Vec<u8>);

impl Packet {
    pub(super) fn new(kind: u8) -> Self {
        Self(vec![0, 0, 0, 0, kind])
    }

    pub(super) fn u32(mut self, number: u32) -> Self {
        self.0.extend(number.to_be_bytes());
        self
    }

    pub(super) fn u64(mut self, number: u64) -> Self {
        self.0.extend(number.to_be_bytes());
        self
    }

    pub(super) fn string(self, bytes: &[u8]) -> Self {
        let mut packet = self.u32(bytes.len() as u32);
        packet.0.extend(bytes);
        packet
    }

    pub(super) fn path(self, path: &Path) -> Self {
        self.string(path.as_os_str().as_bytes())
    }

    pub(super) fn attributes(self, meta: Option<&Metadata>) -> Self {
        let Some(meta) = meta else { return self.u32(0) };
        // The protocol's clocks end in 2106.
        let seconds = |time: i64| u32::try_from(time.max(0)).unwrap_or(u32::MAX);
        self.u32(SIZE | OWNER | PERMISSIONS | TIMES)
            .u64(meta.size())
            .u32(meta.uid())
            .u32(meta.gid())
            .u32(meta.mode())
            .u32(seconds(meta.atime()))
            .u32(seconds(meta.mtime()))
    }

    /// Reads into the packet as a string: at most `most` bytes, by `read`, which says how many there were.
    pub(super) fn fill(
        mut self,
        most: usize,
        read: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<(Self, usize)> {
        let start = self.0.len();
        self.0.resize(start + 4 + most, 0);
        let count = read(&mut self.0[start + 4..])?;
        self.0.truncate(start + 4 + count);
        self.0[start..start + 4].copy_from_slice(&(count as u32).to_be_bytes());
        Ok((self, count))
    }

    /// Appends another packet's body.
    pub(super) fn join(mut self, other: &Self) -> Self {
        self.0.extend(&other.0[5..]);
        self
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The packet as it goes out.
    pub(super) fn finish(mut self) -> Vec<u8> {
        let length = (self.0.len() - 4) as u32;
        self.0[..4].copy_from_slice(&length.to_be_bytes());
        self.0
    }
}

/// The next packet, kind first; `None`: there are no more.
pub(super) fn read(input: &mut impl Read, buffer: &mut Vec<u8>) -> io::Result<Option<()>> {
    let mut length = [0; 4];
    match input.read(&mut length[..1])? {
        0 => return Ok(None),
        _ => input.read_exact(&mut length[1..])?,
    }
    let length = u32::from_be_bytes(length) as usize;
    if !(1..=MAX_PACKET).contains(&length) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a packet of {length} bytes")));
    }
    buffer.resize(length, 0);
    input.read_exact(buffer).map(Some)
}
