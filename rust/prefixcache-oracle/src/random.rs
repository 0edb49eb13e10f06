//! Random numbers and keys for tests and benches.

use prefixcache_core::id::{BlockHash, BlockKey, GroupId};

/// A generator that is good enough to choose and to shuffle with (splitmix64; Steele, Lea, Flood, 2014).
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.word() % limit
    }
}

/// The key of a block, another for each number.
#[must_use]
pub fn key(number: u64) -> BlockKey {
    let mut random = Random(number);
    let words = [(); 4].map(|()| random.word().to_le_bytes());
    let hash = words.concat().try_into().expect("32 bytes");
    BlockKey::new(BlockHash::from_bytes(hash), GroupId::default())
}
