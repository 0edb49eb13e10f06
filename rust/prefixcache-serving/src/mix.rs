//! A permutation of 64-bit words, each bit of which depends on all bits, and maps whose keys are such words.

use std::hash::Hasher;

/// The finalizer of SplitMix64.
#[must_use]
pub fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// The hasher of a map whose keys are `u64` and mixed already.
#[derive(Default)]
pub struct Mixed(u64);

impl Hasher for Mixed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("a key is one u64")
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}
