//! Ring buffers for flows. Each flow has 512 KiB of addresses and only the pages it touched: thousands of idle flows
//! cost next to nothing. Memory of ended flows is given back at once, which an allocator would not promise.

use std::{
    io,
    ptr::{self, NonNull},
    slice,
};

/// The size of one ring.
pub(super) const RING_BYTES: usize = 256 << 10;

/// Two rings of zeroed pages.
pub(super) struct Rings(NonNull<u8>);

// SAFETY: the mapping is private to this value, which hands out access through `&mut self` alone.
unsafe impl Send for Rings {}

impl Rings {
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: a new anonymous mapping touches no other memory.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                2 * RING_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(start.cast()).map(Self).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))
    }

    /// Both rings.
    ///
    /// # Safety
    /// Called once, and the slices are gone before `self` is.
    pub(super) unsafe fn split(&mut self) -> (&'static mut [u8], &'static mut [u8]) {
        // SAFETY: the mapping holds `2 * RING_BYTES` initialized bytes, the halves do not overlap, and the caller
        // promises that nothing outlives the mapping.
        unsafe {
            let first = slice::from_raw_parts_mut(self.0.as_ptr(), RING_BYTES);
            let second = slice::from_raw_parts_mut(self.0.as_ptr().add(RING_BYTES), RING_BYTES);
            (first, second)
        }
    }
}

impl Drop for Rings {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `new` with this length, and its slices are gone (see `split`).
        let result = unsafe { libc::munmap(self.0.as_ptr().cast(), 2 * RING_BYTES) };
        debug_assert_eq!(result, 0);
    }
}
