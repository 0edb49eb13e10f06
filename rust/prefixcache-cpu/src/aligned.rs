//! Buffers of 32-bit words aligned to a cache line, alone or side by side in large pages.
//!
//! A decode step reads every weight once, and with pages of 4 KiB the processor spends as long on
//! finding them as on reading them. Weights are smaller than a large page, so they share some.

use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::memory::OutOfMemory;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Bytes of a large page.
const LARGE_PAGE: usize = 2 << 20;

/// Least bytes that [`WeightMemory`] asks the system for.
const CHUNK: usize = 32 << 20;

/// 32-bit words, zero at first, that start at a cache line's boundary.
pub struct AlignedWords {
    start: NonNull<u32>,
    len: usize,
    /// What they lie in; nobody else has this part of it.
    _chunk: Arc<Chunk>,
}

// SAFETY: it owns its words, as a `Box<[u32]>` does.
unsafe impl Send for AlignedWords {}
// SAFETY: as above.
unsafe impl Sync for AlignedWords {}

impl AlignedWords {
    /// `len` zero words, in memory of their own.
    pub fn zeroed(len: usize) -> Result<Self, OutOfMemory> {
        let chunk = Arc::new(Chunk::new(bytes_of(len)?, LINE)?);
        // SAFETY: the chunk is new and has the bytes.
        Ok(unsafe { Self::carve(chunk, 0, len) })
    }

    /// Zeroes `len` words of the chunk, from the byte `at` on, and takes them.
    ///
    /// # Safety
    /// They lie inside the chunk, `at` is a multiple of a cache line, and no one else has them.
    unsafe fn carve(chunk: Arc<Chunk>, at: usize, len: usize) -> Self {
        // SAFETY: inside the chunk, whose start is aligned to a line at least.
        let start = unsafe { chunk.start.add(at) }.cast::<u32>();
        // SAFETY: as above, and the words are nobody else's.
        unsafe { start.write_bytes(0, len) };
        Self {
            start,
            len,
            _chunk: chunk,
        }
    }

    /// The words.
    pub fn as_slice(&self) -> &[u32] {
        // SAFETY: `carve` took and wrote these words, and the chunk lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// The words, to write to.
    pub fn as_mut_slice(&mut self) -> &mut [u32] {
        // SAFETY: as in `as_slice`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// Hands out words side by side in large pages, where the system has them.
///
/// The memory goes back to the system with the last words of a chunk.
#[derive(Default)]
pub struct WeightMemory {
    /// The chunk that is being filled, and the bytes handed out of it.
    filling: Mutex<(Weak<Chunk>, usize)>,
}

impl WeightMemory {
    /// `len` zero words.
    pub fn zeroed(&self, len: usize) -> Result<AlignedWords, OutOfMemory> {
        let bytes = bytes_of(len)?;
        let mut filling = self.filling.lock().unwrap_or_else(PoisonError::into_inner);
        let (chunk, at) = match filling.0.upgrade() {
            Some(chunk) if bytes <= chunk.layout.size() - filling.1 => (chunk, filling.1),
            _ => (Arc::new(Chunk::large(bytes)?), 0),
        };
        *filling = (Arc::downgrade(&chunk), at + bytes);
        // SAFETY: the chunk has `bytes` from `at` on, which are whole lines and handed out once.
        Ok(unsafe { AlignedWords::carve(chunk, at, len) })
    }
}

/// Bytes of `len` words, in whole lines.
fn bytes_of(len: usize) -> Result<usize, OutOfMemory> {
    let bytes = len.checked_mul(size_of::<u32>());
    bytes
        .and_then(|bytes| bytes.checked_next_multiple_of(LINE))
        .ok_or(OutOfMemory)
}

/// Memory from the system, not written yet.
struct Chunk {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns the memory; who writes to which part of it is up to `AlignedWords`.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Chunk {
    fn new(bytes: usize, align: usize) -> Result<Self, OutOfMemory> {
        let layout = Layout::from_size_align(bytes.max(LINE), align).map_err(|_| OutOfMemory)?;
        // SAFETY: the size is not 0.
        let start = NonNull::new(unsafe { alloc(layout) }).ok_or(OutOfMemory)?;
        Ok(Self { start, layout })
    }

    /// At least `bytes`, in large pages.
    fn large(bytes: usize) -> Result<Self, OutOfMemory> {
        let bytes = bytes.max(CHUNK).checked_next_multiple_of(LARGE_PAGE);
        let chunk = Self::new(bytes.ok_or(OutOfMemory)?, LARGE_PAGE)?;
        // SAFETY: the range is this chunk's, and the advice changes nothing of what it holds.
        #[cfg(target_os = "linux")]
        unsafe {
            // A system that has no large pages to give says so here, and is just slower.
            let start = chunk.start.as_ptr().cast();
            libc::madvise(start, chunk.layout.size(), libc::MADV_HUGEPAGE);
        }
        Ok(chunk)
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and nobody holds words of it any more.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_start_a_cache_line_and_are_zero() {
        let memory = WeightMemory::default();
        for len in [0, 1, 17, 64, 5_000] {
            for words in [AlignedWords::zeroed(len), memory.zeroed(len)] {
                let words = words.expect("memory");
                assert_eq!(words.as_slice().as_ptr().align_offset(LINE), 0);
                assert_eq!(words.as_slice(), vec![0; len]);
            }
        }
    }

    #[test]
    fn neighbours_keep_their_own_words() {
        let memory = WeightMemory::default();
        let sizes = [3, CHUNK / 8, 0, CHUNK / 8, 40, CHUNK / 2, 17];
        let mut all: Vec<_> = sizes
            .iter()
            .map(|&len| memory.zeroed(len).expect("memory"))
            .collect();
        for (value, words) in (1..).zip(&mut all) {
            words.as_mut_slice().fill(value);
        }
        for (value, words) in (1..).zip(&all) {
            assert!(words.as_slice().iter().all(|&word| word == value));
        }
    }

    #[test]
    fn a_chunk_goes_with_its_last_words() {
        let memory = WeightMemory::default();
        let words = || memory.zeroed(9).expect("memory");
        let (first, second) = (words(), words());
        let chunk = || memory.filling.lock().expect("no panic").0.upgrade();
        drop(first);
        assert!(chunk().is_some());
        drop(second);
        assert!(chunk().is_none());
    }

    #[test]
    fn more_than_there_is_is_refused() {
        let memory = WeightMemory::default();
        let kept = memory.zeroed(9).expect("memory");
        // The bytes of 2^62 words wrap around to 0; those of 2^46 do not fit the address space.
        for len in [1 << 46, 1 << 60, 1 << 61, 1 << 62, usize::MAX] {
            assert!(AlignedWords::zeroed(len).is_err());
            assert!(memory.zeroed(len).is_err());
        }
        assert_eq!(kept.as_slice(), [0; 9]);
        assert_eq!(memory.zeroed(9).expect("memory").as_slice(), [0; 9]);
    }
}
