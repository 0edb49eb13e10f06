//! Buffers of 32-bit words aligned to a cache line, alone or side by side in large pages.
//!
//! A decode step reads every weight once, and with pages of 4 KiB the processor spends as long on
//! finding them as on reading them. Weights are smaller than a large page, so they share some.

use std::fs::File;
use std::io;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use memmap2::{Mmap, MmapMut};

use crate::memory::{OutOfMemory, filled};

/// Bytes of a large page.
const LARGE_PAGE: usize = 2 << 20;

/// Least bytes that [`WeightMemory`] asks the system for: several large tensors, so that few pages are
/// at a chunk's end. They take memory once they are written.
const CHUNK: usize = 128 << 20;

/// The words of a cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
#[expect(dead_code, reason = "read and written by the address of its words")]
struct Line([u32; WORDS]);

const WORDS: usize = 16;

/// What words lie in; it is kept for as long as they live.
enum Memory {
    Own { _lines: Vec<Line> },
    Shared { _chunk: Arc<Chunk> },
    Mapped { _file: Arc<Mmap> },
}

/// 32-bit words that start at a cache line's boundary: zero at first, or those of a file.
pub struct AlignedWords {
    start: NonNull<u32>,
    len: usize,
    /// Nobody else has this part of it, but for that of a file, which nobody writes to.
    memory: Memory,
}

// SAFETY: it owns its words, as a `Box<[u32]>` does.
unsafe impl Send for AlignedWords {}
// SAFETY: as above.
unsafe impl Sync for AlignedWords {}

impl AlignedWords {
    /// `len` zero words, in memory of their own.
    pub fn zeroed(len: usize) -> Result<Self, OutOfMemory> {
        let mut lines = filled(Line([0; WORDS]), len.div_ceil(WORDS), 1)?;
        let start = NonNull::from(lines.as_mut_slice()).cast();
        let memory = Memory::Own { _lines: lines };
        Ok(Self { start, len, memory })
    }

    /// The words.
    pub fn as_slice(&self) -> &[u32] {
        // SAFETY: the words were zeroes when they were taken, or are those of the file, nobody else writes
        // to them, and what they lie in lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// Whether they lie in a file, and so are not written to.
    pub fn are_mapped(&self) -> bool {
        matches!(self.memory, Memory::Mapped { .. })
    }

    /// The words, to write to.
    ///
    /// # Panics
    /// They lie in a file.
    pub fn as_mut_slice(&mut self) -> &mut [u32] {
        assert!(!self.are_mapped(), "words of a file are read only");
        // SAFETY: as in `as_slice`, nobody else has them, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// Where the words of weights come from.
pub trait WordSource {
    /// `len` words.
    ///
    /// # Errors
    /// There are not as many.
    fn words(&self, len: usize) -> Result<AlignedWords, OutOfMemory>;
}

/// Hands out words side by side in large pages, where the system has them.
///
/// The memory goes back to the system with the last words of a chunk.
#[derive(Default)]
pub struct WeightMemory {
    /// The chunk that is being filled, and the bytes handed out of it.
    filling: Mutex<(Weak<Chunk>, usize)>,
}

impl WordSource for WeightMemory {
    /// `len` zero words.
    fn words(&self, len: usize) -> Result<AlignedWords, OutOfMemory> {
        let bytes = len.div_ceil(WORDS).checked_mul(size_of::<Line>()).ok_or(OutOfMemory)?;
        let mut filling = self.filling.lock().unwrap_or_else(PoisonError::into_inner);
        let (chunk, at) = match filling.0.upgrade() {
            Some(chunk) if bytes <= chunk.bytes - filling.1 => (chunk, filling.1),
            _ => (Arc::new(Chunk::new(bytes.max(CHUNK))?), 0),
        };
        *filling = (Arc::downgrade(&chunk), at + bytes);
        // SAFETY: the chunk has `bytes` from `at` on, which are whole lines and handed out once.
        let start = unsafe { chunk.start.add(at) }.cast();
        let memory = Memory::Shared { _chunk: chunk };
        Ok(AlignedWords { start, len, memory })
    }
}

/// Words that lie in a file, mapped to be read.
#[derive(Clone)]
pub struct MappedWords {
    file: Arc<Mmap>,
    start: usize,
    bytes: usize,
}

impl MappedWords {
    /// All of a file, less what follows its last whole cache line.
    ///
    /// # Errors
    /// The system does not map it.
    ///
    /// # Safety
    /// Nobody writes to the file or cuts it short while words of it live.
    pub unsafe fn map(file: &File) -> io::Result<Self> {
        // SAFETY: the caller's promise.
        let file = unsafe { Mmap::map(file)? };
        let bytes = file.len() / size_of::<Line>() * size_of::<Line>();
        Ok(Self { file: Arc::new(file), start: 0, bytes })
    }

    /// `bytes` bytes from byte `start` on, a multiple of a cache line; `None` where there are none.
    pub fn part(&self, start: usize, bytes: usize) -> Option<Self> {
        let end = start.checked_add(bytes)?;
        let is_inside = end <= self.bytes && start.is_multiple_of(size_of::<Line>());
        is_inside.then(|| Self { file: Arc::clone(&self.file), start: self.start + start, bytes })
    }
}

impl WordSource for MappedWords {
    /// All words, if they are `len`.
    fn words(&self, len: usize) -> Result<AlignedWords, OutOfMemory> {
        if len.checked_mul(size_of::<u32>()) != Some(self.bytes) {
            return Err(OutOfMemory);
        }
        Ok(AlignedWords {
            start: NonNull::from(&self.file[self.start..]).cast(),
            len,
            memory: Memory::Mapped { _file: Arc::clone(&self.file) },
        })
    }
}

/// Zeroes from the system in large pages, which exist only once they are touched.
struct Chunk {
    start: NonNull<u8>,
    /// Bytes from there on.
    bytes: usize,
    _pages: MmapMut,
}

// SAFETY: it owns the memory; who writes to which part of it is up to `AlignedWords`.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Chunk {
    /// At least `bytes`.
    fn new(bytes: usize) -> Result<Self, OutOfMemory> {
        let bytes = bytes.checked_next_multiple_of(LARGE_PAGE).ok_or(OutOfMemory)?;
        let mapped = bytes.checked_add(LARGE_PAGE).ok_or(OutOfMemory)?;
        let mut pages = MmapMut::map_anon(mapped).map_err(|_| OutOfMemory)?;
        let skip = pages.as_ptr().align_offset(LARGE_PAGE);
        // A system that has no large pages to give says so here, and is just slower.
        #[cfg(target_os = "linux")]
        let _ = pages.advise_range(memmap2::Advice::HugePage, skip, bytes);
        let start = NonNull::from(&mut pages[skip..]).cast();
        Ok(Self { start, bytes, _pages: pages })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_start_a_cache_line_and_are_zero() {
        let memory = WeightMemory::default();
        for len in [0, 1, 17, 64, 5_000] {
            for words in [AlignedWords::zeroed(len), memory.words(len)] {
                let words = words.expect("memory");
                assert_eq!(words.as_slice().as_ptr().align_offset(size_of::<Line>()), 0);
                assert_eq!(words.as_slice(), vec![0; len]);
            }
        }
    }

    #[test]
    fn neighbours_keep_their_own_words() {
        let memory = WeightMemory::default();
        let sizes = [3, CHUNK / 8, 0, CHUNK / 8, 40, CHUNK / 4, 17];
        let mut all: Vec<_> = sizes.iter().map(|&len| memory.words(len).expect("memory")).collect();
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
        let words = || memory.words(9).expect("memory");
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
        let kept = memory.words(9).expect("memory");
        // The bytes of 2^62 words wrap around to 0; those of 2^46 do not fit the address space.
        for len in [1 << 46, 1 << 60, 1 << 61, 1 << 62, usize::MAX] {
            assert!(AlignedWords::zeroed(len).is_err());
            assert!(memory.words(len).is_err());
        }
        assert_eq!(kept.as_slice(), [0; 9]);
        assert_eq!(memory.words(9).expect("memory").as_slice(), [0; 9]);
    }
}
