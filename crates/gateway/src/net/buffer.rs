//! Ring buffers for flows. Each flow has addresses for two rings and only the pages it touched: thousands of idle flows
//! cost next to nothing. Memory of ended flows is given back at once, which an allocator would not promise.
//!
//! A ring is what may be under way: the guest's next frames wait for the answer to those that fill it, which comes only
//! when the emulator has taken its turn. So a flow gets a large one, unless there are so many that large ones, all full,
//! would take gigabytes.

use std::{
    io,
    ptr::{self, NonNull},
    slice,
};

/// With no more flows than this a new one gets large rings.
const FEW_FLOWS: usize = 64;
const LARGE_BYTES: usize = 1 << 20;
const SMALL_BYTES: usize = 256 << 10;

/// Two rings of zeroed pages.
pub(super) struct Rings {
    start: NonNull<u8>,
    /// The size of one.
    bytes: usize,
}

// SAFETY: the mapping is private to this value, which hands out access through `&mut self` alone.
unsafe impl Send for Rings {}

impl Rings {
    /// For one more flow on a link that has `flows` already.
    pub(super) fn new(flows: usize) -> io::Result<Self> {
        let bytes = if flows < FEW_FLOWS { LARGE_BYTES } else { SMALL_BYTES };
        // SAFETY: a new anonymous mapping touches no other memory.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                2 * bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Self { start, bytes })
    }

    /// Both rings.
    ///
    /// # Safety
    /// Called once, and the slices are gone before `self` is.
    pub(super) unsafe fn split(&mut self) -> (&'static mut [u8], &'static mut [u8]) {
        // SAFETY: the mapping holds `2 * bytes` initialized bytes, the halves do not overlap, and the caller
        // promises that nothing outlives the mapping.
        unsafe {
            let first = slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes);
            let second = slice::from_raw_parts_mut(self.start.as_ptr().add(self.bytes), self.bytes);
            (first, second)
        }
    }
}

impl Drop for Rings {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `new` with this length, and its slices are gone (see `split`).
        let result = unsafe { libc::munmap(self.start.as_ptr().cast(), 2 * self.bytes) };
        debug_assert_eq!(result, 0);
    }
}
