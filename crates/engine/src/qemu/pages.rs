//! A running guest's memory, seen from outside its emulator.
//!
//! The emulator maps sealed memory copy-on-write: what the guest has written lies on pages of its own,
//! which the kernel tells from the shared ones. Those pages are all a snapshot has to keep.
//!
//! They are listed by `PAGEMAP_SCAN` where the kernel has it (Linux 6.7), else from `/proc/<pid>/pagemap`,
//! and read and written by `process_vm_readv` and `process_vm_writev`. That takes the rights of a debugger:
//! root has them, and so has an ordinary user over the namespaces it made.

use std::{
    fs::{self, File},
    io::{self, IoSlice, IoSliceMut},
    os::{fd::AsRawFd, unix::fs::FileExt},
    thread,
};

use nix::{
    sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev},
    unistd::Pid,
};

use crate::EngineError;

/// What memory is saved by; all x86-64 guests and hosts have it.
pub(crate) const PAGE: u64 = 4096;
/// Above this, two threads copy.
const COPIED_BY_ONE: u64 = 16 << 20;
/// What is copied at once between guest and file.
const CHUNK_PAGES: u64 = 256;
/// Ranges of one system call; the kernel takes 1024.
const RANGES: usize = 512;

/// Pages next to each other.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Run {
    pub(crate) first: u64,
    pub(crate) count: u64,
}

/// How many pages there are in runs.
pub(crate) fn page_count(runs: &[Run]) -> u64 {
    runs.iter().map(|run| run.count).sum()
}

/// The pages that are in one of two lists, each ordered and without overlap.
pub(crate) fn union(one: &[Run], other: &[Run]) -> Vec<Run> {
    let mut all: Vec<Run> = one.iter().chain(other).copied().collect();
    all.sort_unstable_by_key(|run| run.first);
    let mut merged: Vec<Run> = Vec::with_capacity(all.len());
    for run in all {
        match merged.last_mut() {
            Some(last) if run.first <= last.first + last.count => {
                last.count = last.count.max(run.first + run.count - last.first);
            }
            _ => merged.push(run),
        }
    }
    merged
}

/// Where the guest's memory is in its emulator.
#[derive(Debug)]
pub(crate) struct GuestMemory {
    pid: i32,
    start: u64,
    pages: u64,
    map: File,
}

impl GuestMemory {
    /// Finds the mapping of shared memory in an emulator.
    pub(crate) fn find(pid: i32, bytes: u64) -> Result<Self, EngineError> {
        let path = format!("/proc/{pid}/maps");
        let text = fs::read_to_string(&path).map_err(refused(pid, "read"))?;
        let start = find_mapping(&text, bytes).ok_or_else(|| EngineError::Emulator {
            step: "find the guest's memory",
            detail: format!("{path} shows no mapping of {bytes} bytes of shared memory"),
        })?;
        let map = File::open(format!("/proc/{pid}/pagemap")).map_err(refused(pid, "read"))?;
        Ok(Self { pid, start, pages: bytes / PAGE, map })
    }

    /// The pages that are the machine's own, in order.
    pub(crate) fn private_pages(&self) -> Result<Vec<Run>, EngineError> {
        let listed = match self.scan() {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL | libc::ENOSYS)) => {
                self.read_map()
            }
            listed => listed,
        };
        listed.map_err(refused(self.pid, "list the pages of"))
    }

    fn scan(&self) -> io::Result<Vec<Run>> {
        let mut runs = Vec::new();
        let mut regions = vec![scan::Region::default(); RANGES];
        let (mut from, end) = (self.start, self.start + self.pages * PAGE);
        while from < end {
            let (found, reached) = scan::private(&self.map, from, end, &mut regions)?;
            runs.extend(regions[..found].iter().map(|region| Run {
                first: (region.start - self.start) / PAGE,
                count: (region.end - region.start) / PAGE,
            }));
            if reached <= from {
                return Err(io::Error::other("the kernel's list of pages does not get on"));
            }
            from = reached;
        }
        // A run may have been cut where the buffer ended.
        Ok(union(&runs, &[]))
    }

    fn read_map(&self) -> io::Result<Vec<Run>> {
        const PRESENT: u64 = 1 << 63;
        const SWAPPED: u64 = 1 << 62;
        const SHARED: u64 = 1 << 61;
        const ENTRIES: u64 = 8192;
        let mut runs: Vec<Run> = Vec::new();
        let mut buffer = vec![0; 8 * ENTRIES as usize];
        for begin in (0..self.pages).step_by(ENTRIES as usize) {
            let count = ENTRIES.min(self.pages - begin);
            let bytes = &mut buffer[..8 * count as usize];
            self.map.read_exact_at(bytes, (self.start / PAGE + begin) * 8)?;
            for (page, entry) in (begin..).zip(bytes.chunks_exact(8)) {
                let entry = u64::from_ne_bytes(entry.try_into().expect("chunks of eight"));
                if entry & (PRESENT | SWAPPED) == 0 || entry & SHARED != 0 {
                    continue;
                }
                match runs.last_mut() {
                    Some(run) if run.first + run.count == page => run.count += 1,
                    _ => runs.push(Run { first: page, count: 1 }),
                }
            }
        }
        Ok(runs)
    }

    /// Reads pages one after the other into a buffer of their size.
    pub(crate) fn read(&self, runs: &[Run], buffer: &mut [u8]) -> Result<(), EngineError> {
        debug_assert_eq!(page_count(runs) * PAGE, buffer.len() as u64);
        let (one, other) = halves(runs);
        let (first, second) = buffer.split_at_mut((page_count(&one) * PAGE) as usize);
        let result = if other.is_empty() {
            self.read_some(&one, first)
        } else {
            thread::scope(|scope| {
                let helper = scope.spawn(|| self.read_some(&other, second));
                let result = self.read_some(&one, first);
                result.and(helper.join().unwrap_or_else(|_| Err(io::Error::other("a copying thread panicked"))))
            })
        };
        result.map_err(refused(self.pid, "read"))
    }

    fn read_some(&self, runs: &[Run], mut buffer: &mut [u8]) -> io::Result<()> {
        for runs in runs.chunks(RANGES) {
            let remote: Vec<RemoteIoVec> = runs.iter().map(|run| self.remote(run)).collect();
            let (now, rest) = std::mem::take(&mut buffer).split_at_mut((page_count(runs) * PAGE) as usize);
            let expected = now.len();
            let read = process_vm_readv(Pid::from_raw(self.pid), &mut [IoSliceMut::new(now)], &remote)?;
            whole(read, expected)?;
            buffer = rest;
        }
        Ok(())
    }

    /// Reads pages one after the other into a file.
    pub(crate) fn read_into_file(&self, runs: &[Run], file: &File) -> Result<(), EngineError> {
        let (one, other) = halves(runs);
        let middle = page_count(&one) * PAGE;
        thread::scope(|scope| {
            let helper = scope.spawn(|| self.read_some_into_file(&other, file, middle));
            let result = self.read_some_into_file(&one, file, 0);
            result.and(helper.join().unwrap_or_else(|_| Err(io::Error::other("a copying thread panicked"))))
        })
        .map_err(refused(self.pid, "copy"))
    }

    fn read_some_into_file(&self, runs: &[Run], file: &File, mut offset: u64) -> io::Result<()> {
        let mut buffer = vec![0; (CHUNK_PAGES * PAGE) as usize];
        for runs in chunks(runs) {
            let bytes = &mut buffer[..(page_count(&runs) * PAGE) as usize];
            self.read_some(&runs, bytes)?;
            file.write_all_at(bytes, offset)?;
            offset += bytes.len() as u64;
        }
        Ok(())
    }

    /// Writes pages that lie one after the other in a file. The guest must not run.
    pub(crate) fn write_from_file(&self, runs: &[Run], file: &File) -> Result<(), EngineError> {
        let (one, other) = halves(runs);
        let middle = page_count(&one) * PAGE;
        if other.is_empty() {
            return self.write_some_from_file(&one, file, 0);
        }
        thread::scope(|scope| {
            let helper = scope.spawn(|| self.write_some_from_file(&other, file, middle));
            let result = self.write_some_from_file(&one, file, 0);
            let panicked =
                |_| Err(EngineError::host("write the guest's memory")(io::Error::other("a thread panicked")));
            result.and(helper.join().unwrap_or_else(panicked))
        })
    }

    fn write_some_from_file(&self, runs: &[Run], file: &File, mut offset: u64) -> Result<(), EngineError> {
        let mut buffer = vec![0; (CHUNK_PAGES.min(page_count(runs)) * PAGE) as usize];
        for runs in chunks(runs) {
            let bytes = &mut buffer[..(page_count(&runs) * PAGE) as usize];
            file.read_exact_at(bytes, offset).map_err(EngineError::host("read the snapshot's pages"))?;
            self.write(&runs, bytes)?;
            offset += bytes.len() as u64;
        }
        Ok(())
    }

    /// Writes pages one after the other from a buffer of their size. The guest must not run.
    fn write(&self, runs: &[Run], mut buffer: &[u8]) -> Result<(), EngineError> {
        for runs in runs.chunks(RANGES) {
            let remote: Vec<RemoteIoVec> = runs.iter().map(|run| self.remote(run)).collect();
            let (now, rest) = buffer.split_at((page_count(runs) * PAGE) as usize);
            let written = process_vm_writev(Pid::from_raw(self.pid), &[IoSlice::new(now)], &remote);
            written
                .map_err(io::Error::from)
                .and_then(|written| whole(written, now.len()))
                .map_err(refused(self.pid, "write"))?;
            buffer = rest;
        }
        Ok(())
    }

    fn remote(&self, run: &Run) -> RemoteIoVec {
        RemoteIoVec { base: (self.start + run.first * PAGE) as usize, len: (run.count * PAGE) as usize }
    }
}

fn whole(done: usize, expected: usize) -> io::Result<()> {
    if done == expected {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("{done} of {expected} bytes were copied")))
}

/// Lists of at most [`CHUNK_PAGES`] pages each.
fn chunks(runs: &[Run]) -> impl Iterator<Item = Vec<Run>> {
    let mut rest = runs.iter().copied();
    let mut cut: Option<Run> = None;
    std::iter::from_fn(move || {
        let (mut chunk, mut room) = (Vec::new(), CHUNK_PAGES);
        while room > 0 {
            let Some(run) = cut.take().or_else(|| rest.next()) else { break };
            let count = run.count.min(room);
            chunk.push(Run { first: run.first, count });
            room -= count;
            if count < run.count {
                cut = Some(Run { first: run.first + count, count: run.count - count });
            }
        }
        (!chunk.is_empty()).then_some(chunk)
    })
}

/// Two lists of about the same size where that is worth a thread, else all and nothing.
fn halves(runs: &[Run]) -> (Vec<Run>, Vec<Run>) {
    let total = page_count(runs);
    if total * PAGE <= COPIED_BY_ONE {
        return (runs.to_vec(), Vec::new());
    }
    let (mut one, mut other, mut seen) = (Vec::new(), Vec::new(), 0);
    for run in runs {
        let left = (total / 2).saturating_sub(seen).min(run.count);
        seen += run.count;
        if left > 0 {
            one.push(Run { first: run.first, count: left });
        }
        if left < run.count {
            other.push(Run { first: run.first + left, count: run.count - left });
        }
    }
    (one, other)
}

/// Finds shared memory of a size that is mapped writable, in a process's list of mappings.
fn find_mapping(text: &str, bytes: u64) -> Option<u64> {
    let mut found: Option<(u64, u64)> = None;
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let (range, rights) = (words.next()?, words.next()?);
        if !line.contains("/memfd:stockade-memory") || !rights.starts_with("rw") {
            continue;
        }
        let (start, end) = range.split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        // The kernel shows one mapping in pieces where their settings differ.
        found = match found {
            Some((begin, before)) if before == start => Some((begin, end)),
            _ => Some((start, end)),
        };
        if let Some((begin, end)) = found
            && end - begin == bytes
        {
            return Some(begin);
        }
    }
    None
}

/// Errors of reaching into an emulator; says what to do where the kernel forbids it.
fn refused(pid: i32, verb: &'static str) -> impl FnOnce(io::Error) -> EngineError {
    move |error| match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES | libc::ENOSYS) => EngineError::Unsupported {
            missing: format!("access to the memory of emulator {pid}"),
            why: format!(
                "the kernel does not let this user {verb} it ({error}); snapshots with memory need the rights of a \
                 debugger: run the server as root or with CAP_SYS_PTRACE, set kernel.yama.ptrace_scope to 1 or less, \
                 and let no seccomp profile forbid process_vm_readv"
            ),
        },
        _ => EngineError::Host { action: format!("{verb} the memory of emulator {pid}"), source: error },
    }
}

/// The `PAGEMAP_SCAN` system call (`include/uapi/linux/fs.h`).
mod scan {
    use super::{AsRawFd, File, io};

    const IS_FILE: u64 = 1 << 2;
    const IS_PRESENT: u64 = 1 << 3;
    const IS_SWAPPED: u64 = 1 << 4;

    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    pub(super) struct Region {
        pub(super) start: u64,
        pub(super) end: u64,
        categories: u64,
    }

    #[repr(C)]
    struct Arguments {
        size: u64,
        flags: u64,
        start: u64,
        end: u64,
        walk_end: u64,
        vector: u64,
        vector_length: u64,
        max_pages: u64,
        category_inverted: u64,
        category_mask: u64,
        category_anyof_mask: u64,
        return_mask: u64,
    }

    /// Lists pages that are in use and belong to no file; returns how many regions there are, and up to
    /// where was looked.
    pub(super) fn private(map: &File, start: u64, end: u64, regions: &mut [Region]) -> io::Result<(usize, u64)> {
        let size = size_of::<Arguments>();
        let mut arguments = Arguments {
            size: size as u64,
            flags: 0,
            start,
            end,
            walk_end: 0,
            vector: regions.as_mut_ptr() as u64,
            vector_length: regions.len() as u64,
            max_pages: 0,
            category_inverted: IS_FILE,
            category_mask: IS_FILE,
            category_anyof_mask: IS_PRESENT | IS_SWAPPED,
            // The same for all that are found, so that neighbours become one region.
            return_mask: IS_FILE,
        };
        let request = nix::request_code_readwrite!(b'f', 16, size);
        // SAFETY: the arguments and the regions they point to live through the call, with their true sizes.
        let found = unsafe { libc::ioctl(map.as_raw_fd(), request, &raw mut arguments) };
        match usize::try_from(found) {
            Ok(found) if found <= regions.len() => Ok((found, arguments.walk_end)),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qemu::memory::SealedMemory;

    #[test]
    fn lists_of_pages_are_united() {
        let run = |first, count| Run { first, count };
        assert_eq!(union(&[run(0, 2), run(9, 1)], &[run(1, 3), run(5, 1)]), [run(0, 4), run(5, 1), run(9, 1)]);
        assert_eq!(union(&[run(3, 1)], &[run(0, 3), run(4, 2)]), [run(0, 6)]);
    }

    #[test]
    fn halves_hold_all_pages_once() {
        let runs = [Run { first: 0, count: 3000 }, Run { first: 5000, count: 3001 }];
        let (one, other) = halves(&runs);
        assert_eq!(page_count(&one), 3000);
        assert_eq!(union(&one, &other), runs);
    }

    #[test]
    fn chunks_hold_all_pages_once_and_few_each() {
        let runs = [Run { first: 0, count: 700 }, Run { first: 5000, count: 3 }, Run { first: 6000, count: 256 }];
        let chunks: Vec<Vec<Run>> = chunks(&runs).collect();
        assert!(chunks.iter().all(|chunk| (1..=CHUNK_PAGES).contains(&page_count(chunk))));
        assert_eq!(union(&chunks.concat(), &[]), runs);
        assert_eq!(page_count(&chunks.concat()), page_count(&runs));
    }

    #[test]
    fn a_mapping_shown_in_pieces_is_found() {
        let text = "1000-3000 r--p 0 0:1 5 /memfd:stockade-memory (deleted)\n\
                    7000-8000 rw-p 0 0:1 5 /memfd:stockade-memory (deleted)\n\
                    8000-9000 rw-p 1000 0:1 5 /memfd:stockade-memory (deleted)\n";
        assert_eq!(find_mapping(text, 0x2000), Some(0x7000));
        assert_eq!(find_mapping(text, 0x3000), None);
    }

    #[test]
    fn own_pages_are_told_from_shared_ones_read_and_written() {
        const PAGES: usize = 64;
        let memory = SealedMemory::zero(PAGES as u64 * PAGE).expect("memory");
        let length = PAGES * PAGE as usize;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh private mapping of that length, which is unmapped below.
        let mapping = unsafe {
            libc::mmap(std::ptr::null_mut(), length, rights, libc::MAP_PRIVATE, memory.file().as_raw_fd(), 0)
        };
        assert_ne!(mapping, libc::MAP_FAILED);
        // SAFETY: within the mapping, which nobody else uses.
        let bytes = unsafe { std::slice::from_raw_parts_mut(mapping.cast::<u8>(), length) };
        assert_eq!(bytes[7 * PAGE as usize], 0, "looked at only");
        for page in [3, 4, 10] {
            bytes[page * PAGE as usize] = page as u8;
        }
        let pid = i32::try_from(std::process::id()).expect("small");
        let guest = GuestMemory::find(pid, PAGES as u64 * PAGE).expect("found");
        let expected = [Run { first: 3, count: 2 }, Run { first: 10, count: 1 }];
        assert_eq!(guest.private_pages().expect("listed"), expected);
        assert_eq!(guest.read_map().expect("listed"), expected);
        let mut copy = vec![0; 3 * PAGE as usize];
        guest.read(&expected, &mut copy).expect("read");
        assert_eq!([copy[0], copy[PAGE as usize], copy[2 * PAGE as usize]], [3, 4, 10]);
        guest.write(&[Run { first: 20, count: 3 }], &copy).expect("written");
        assert_eq!(bytes[22 * PAGE as usize], 10);
        // SAFETY: mapped above with this length; `bytes` is not used any more.
        assert_eq!(unsafe { libc::munmap(mapping, length) }, 0);
    }
}
