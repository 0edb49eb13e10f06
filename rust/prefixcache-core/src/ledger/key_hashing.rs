//! Hashing of keys that are hashes already.

use std::hash::{BuildHasher, Hasher, RandomState};

/// Makes hashers of block keys: eight bytes of the content's BLAKE3 hash, times a factor that nobody else knows.
#[derive(Clone, Debug)]
pub(super) struct KeyHashing {
    factor: u64,
}

impl Default for KeyHashing {
    fn default() -> Self {
        Self {
            factor: RandomState::new().hash_one(0) | 1,
        }
    }
}

impl BuildHasher for KeyHashing {
    type Hasher = KeyHasher;

    fn build_hasher(&self) -> KeyHasher {
        KeyHasher {
            factor: self.factor,
            state: 0,
        }
    }
}

/// Folds eight bytes of each part in.
pub(super) struct KeyHasher {
    factor: u64,
    state: u64,
}

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        let mut word = [0; 8];
        let length = bytes.len().min(8);
        word[..length].copy_from_slice(&bytes[..length]);
        self.write_u64(u64::from_ne_bytes(word));
    }

    fn write_u64(&mut self, word: u64) {
        let product = u128::from(self.state ^ word) * u128::from(self.factor);
        self.state = (product >> 64) as u64 ^ product as u64;
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    fn finish(&self) -> u64 {
        self.state
    }
}
