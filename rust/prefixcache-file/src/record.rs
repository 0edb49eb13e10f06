//! The record of a block: 64 bytes in the file, all of them atomics.
//!
//! `state` decides. 0: there is no record. Even: the block is published, and its checksum is still to be computed;
//! the number names this one publishing of this process. Odd: the record is valid, and the number is the checksum of
//! all other words but `usage`, and of the block's id, so that a record that is torn or lies elsewhere is none.

use std::sync::atomic::{AtomicU64, Ordering};

use prefixcache_core::band::Band;
use prefixcache_core::id::{BlockHash, BlockId, GroupId};
use prefixcache_core::store::BlockKey;
use twox_hash::XxHash3_64;

use Ordering::{Acquire, Relaxed};

pub(crate) const NONE: u64 = 0;

const EPOCH_BITS: u32 = 48;
pub(crate) const EPOCH_MASK: u64 = (1 << EPOCH_BITS) - 1;

/// One block's record.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Record {
    pub(crate) state: AtomicU64,
    pub(crate) hash: [AtomicU64; 4],
    /// The checksum of the block's bytes.
    pub(crate) sum: AtomicU64,
    /// `group:16 | epoch:48`.
    pub(crate) name: AtomicU64,
    /// [`Usage`]; a wrong one costs nothing but order.
    pub(crate) usage: AtomicU64,
}

const _: () = assert!(size_of::<Record>() == crate::layout::RECORD_BYTES);

/// The words of a record that its checksum is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Words {
    pub(crate) hash: [u64; 4],
    pub(crate) sum: u64,
    pub(crate) name: u64,
}

impl Words {
    pub(crate) fn of(key: &BlockKey, epoch: u64) -> Self {
        let bytes = key.hash.as_bytes();
        let hash = std::array::from_fn(|at| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[8 * at..8 * at + 8]);
            u64::from_le_bytes(word)
        });
        let name = u64::from(key.group.get()) << EPOCH_BITS | epoch & EPOCH_MASK;
        let sum = 0;
        Self { hash, sum, name }
    }

    pub(crate) fn key(&self) -> BlockKey {
        let mut bytes = [0; 32];
        for (at, word) in self.hash.iter().enumerate() {
            bytes[8 * at..8 * at + 8].copy_from_slice(&word.to_le_bytes());
        }
        let group = GroupId::new((self.name >> EPOCH_BITS) as u16);
        BlockKey::new(BlockHash::from_bytes(bytes), group)
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.name & EPOCH_MASK
    }

    /// The state of a valid record with these words.
    pub(crate) fn valid(&self, block: BlockId, seed: u64) -> u64 {
        let [a, b, c, d] = self.hash;
        let words = [a, b, c, d, self.sum, self.name, block.get().into()];
        let mut bytes = [0; 56];
        for (at, word) in words.into_iter().enumerate() {
            bytes[8 * at..8 * at + 8].copy_from_slice(&word.to_le_bytes());
        }
        XxHash3_64::oneshot_with_seed(seed, &bytes) | 1
    }
}

impl Record {
    pub(crate) fn state(&self) -> u64 {
        // Acquire: whoever sees a state sees the words that were written before it.
        self.state.load(Acquire)
    }

    /// Relaxed: the state is read before them, and again after them where somebody may write meanwhile.
    pub(crate) fn words(&self) -> Words {
        Words {
            hash: self.hash.each_ref().map(|word| word.load(Relaxed)),
            sum: self.sum.load(Relaxed),
            name: self.name.load(Relaxed),
        }
    }

    /// The words, if the record is valid for this block.
    pub(crate) fn valid_words(&self, block: BlockId, seed: u64) -> Option<Words> {
        let state = self.state();
        let words = self.words();
        (state & 1 == 1 && state == words.valid(block, seed)).then_some(words)
    }
}

/// `in use:1 | pinned:1 | priority level:3 | number of the use:48`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage(pub(crate) u64);

impl Usage {
    const ORDER: u64 = (1 << 48) - 1;

    pub(crate) fn in_use(order: u64) -> Self {
        Self(1 << 52 | (Band::DEFAULT.index() as u64) << 48 | order & Self::ORDER)
    }

    pub(crate) fn queued(order: u64, band: Band, pinned: bool) -> Self {
        Self(u64::from(pinned) << 51 | (band.index() as u64) << 48 | order & Self::ORDER)
    }

    /// The same priority and pin, used as the `order`-th.
    pub(crate) fn used_again(self, order: u64) -> Self {
        Self(1 << 52 | self.0 & 0xf << 48 | order & Self::ORDER)
    }

    /// The same use with another priority and pin.
    pub(crate) fn classed(self, band: Band, pinned: bool) -> Self {
        let class = u64::from(pinned) << 51 | (band.index() as u64) << 48;
        Self(self.0 & !(0xf << 48) | class)
    }

    pub(crate) fn band(self) -> Band {
        Band::all()
            .nth((self.0 >> 48 & 7) as usize)
            .unwrap_or_default()
    }

    pub(crate) fn pinned(self) -> bool {
        self.0 >> 51 & 1 == 1
    }

    /// Rises in the order of eviction. What was in use counts as released at the end, the newest first, as the
    /// end of a prompt is before its beginning.
    pub(crate) fn rank(self) -> (bool, u64) {
        let (in_use, order) = (self.0 >> 52 & 1 == 1, self.0 & Self::ORDER);
        (in_use, if in_use { Self::ORDER - order } else { order })
    }
}
