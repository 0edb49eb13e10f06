//! BLAKE3 of many messages of one length side by side: sixteen with AVX-512, eight with AVX2, four with
//! SSE and NEON.
//!
//! The lanes are blake3's own. Its `platform` module is public but not documented, so any release may
//! change it; the rest of the crate does not know of it.

use blake3::IncrementCounter;
use blake3::platform::{Platform, words_from_le_bytes_32};

pub type Digest = [u8; 32];

/// The most messages that any processor hashes at once.
pub const LANES: usize = 16;

// Flags of the BLAKE3 specification (2.2).
const CHUNK_START: u8 = 1 << 0;
const CHUNK_END: u8 = 1 << 1;
const ROOT: u8 = 1 << 3;
const KEYED_HASH: u8 = 1 << 4;

/// `blake3::keyed_hash` with one key, for messages of whole 64-byte blocks up to a chunk of 1,024 bytes.
pub struct KeyedHash {
    platform: Platform,
    key: [u32; 8],
}

impl KeyedHash {
    pub fn new(key: &[u8; 32]) -> Self {
        Self { platform: Platform::detect(), key: words_from_le_bytes_32(key) }
    }

    /// Writes the digest of each message.
    pub fn digest<const N: usize>(&self, messages: &[[u8; N]], digests: &mut [Digest]) {
        const { assert!(N > 0 && N <= 1024 && N.is_multiple_of(64)) };
        for (messages, digests) in messages.chunks(LANES).zip(digests.chunks_mut(LANES)) {
            let mut inputs = [&messages[0]; LANES];
            for (input, message) in inputs.iter_mut().zip(messages) {
                *input = message;
            }
            // 15 messages would be hashed as 8, 4, 2 and 1, which takes longer than 16.
            let width = messages.len().next_power_of_two();
            if width == messages.len() {
                self.hash_many(&inputs[..width], digests);
            } else {
                let mut more = [Digest::default(); LANES];
                self.hash_many(&inputs[..width], &mut more);
                digests.copy_from_slice(&more[..digests.len()]);
            }
        }
    }

    fn hash_many<const N: usize>(&self, messages: &[&[u8; N]], digests: &mut [Digest]) {
        self.platform.hash_many(
            messages,
            &self.key,
            0,
            IncrementCounter::No,
            KEYED_HASH,
            CHUNK_START,
            CHUNK_END | ROOT,
            digests.as_flattened_mut(),
        );
    }
}
