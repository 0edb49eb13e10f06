//! A buffer of 32-bit words aligned to a cache line.

/// 64 bytes that start a cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u32; 16]);

/// 32-bit words, zero at first, that start at a cache line's boundary.
#[derive(Clone, Default)]
pub struct AlignedWords {
    lines: Vec<Line>,
    len: usize,
}

impl AlignedWords {
    /// `len` zero words.
    pub fn zeroed(len: usize) -> Self {
        let lines = vec![Line([0; 16]); len.div_ceil(16)];
        Self { lines, len }
    }

    /// Grows to at least `len` words; what was there stays.
    pub fn grow(&mut self, len: usize) {
        if len > self.len {
            self.lines.resize(len.div_ceil(16), Line([0; 16]));
            self.len = len;
        }
    }

    /// The words.
    pub fn as_slice(&self) -> &[u32] {
        // SAFETY: `lines` are `repr(C)` arrays of 16 words without padding and hold `len` of them.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }

    /// The words, to write to.
    pub fn as_mut_slice(&mut self) -> &mut [u32] {
        // SAFETY: as in `as_slice`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::AlignedWords;

    #[test]
    fn starts_a_cache_line_and_grows_with_zeros() {
        let mut words = AlignedWords::zeroed(17);
        assert_eq!(words.as_slice().as_ptr().align_offset(64), 0);
        words.as_mut_slice()[16] = 7;
        words.grow(40);
        assert_eq!(words.as_slice()[15..18], [0, 7, 0]);
        assert_eq!(words.as_slice().len(), 40);
    }
}
