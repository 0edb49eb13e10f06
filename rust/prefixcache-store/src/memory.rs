//! Memory of a caller, and of our own where a system call may still write when the caller has gone.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

/// What a system reads and writes of a file without its cache begins and ends with one.
pub(crate) const PAGE: usize = 4096;

/// Bytes of a caller, which `owner` keeps there.
pub struct Memory {
    start: NonNull<u8>,
    len: usize,
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: a plain address and what may be sent itself; `Memory::new` says who may read and write what is there.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// # Safety
    ///
    /// `len` bytes from `start` on are there until `owner` is dropped. While a call of the store has them, nobody
    /// writes to them, and nobody reads them if the call writes to them.
    #[must_use]
    pub unsafe fn new(start: NonNull<u8>, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { start, len, _owner: owner }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the promise of `new`. After a deadline a call that only reads may see bytes change: these are
        // plain bytes, and the checksum that was computed of them refuses them.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// # Safety
    ///
    /// The call that has the memory has not ended, and writes to it here alone.
    #[expect(clippy::mut_from_ref, reason = "the memory is not part of the struct")]
    pub(crate) unsafe fn bytes_mut(&self) -> &mut [u8] {
        // SAFETY: the promises of `new` and of the caller.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// Memory of a thread, which begins with a page.
#[derive(Debug, Default)]
pub(crate) struct Scratch(Vec<u8>);

impl Scratch {
    /// Room for `len` bytes, up to the end of a page.
    pub(crate) fn pages(&mut self, len: usize) -> &mut [u8] {
        let len = len.next_multiple_of(PAGE);
        if self.0.len() < len + PAGE {
            self.0 = vec![0; len + PAGE];
        }
        let start = self.0.as_ptr().align_offset(PAGE);
        &mut self.0[start..start + len]
    }
}

/// Whether the system can move these bytes without its cache.
pub(crate) fn is_paged(bytes: &[u8]) -> bool {
    bytes.as_ptr().align_offset(PAGE) == 0 && bytes.len().is_multiple_of(PAGE)
}
