//! When each block's content came, when it was used last, and how often.

use crate::id::BlockId;
use crate::sync::{AtomicU32, AtomicU64, Mode, Ordering};
use crate::zeroed::{Zeroable, Zeroed};

use Ordering::Relaxed;

/// One block's content. Its times are in microseconds of the pool's clock; 0 before the listening began.
#[derive(Default)]
struct Metadata {
    born: AtomicU64,
    used: AtomicU64,
    hits: AtomicU32,
}

// SAFETY: zero is a valid value of every atomic integer, and its default; none has a destructor.
unsafe impl Zeroable for Metadata {}

/// What is known of a block's content when it goes; times in microseconds.
pub(super) struct Summary {
    pub(super) hits: u32,
    pub(super) age: u64,
    pub(super) idle: u64,
}

/// Words that order nothing (Relaxed): a block's are written by who claims it or holds it, and read by who has it
/// alone, and the block's state orders those.
pub(super) struct BlockMetadata {
    blocks: Zeroed<Metadata>,
    /// When the listening began: of what was before nothing is known.
    since: u64,
}

impl BlockMetadata {
    pub(super) fn new(max_blocks: usize, since: u64) -> Option<Self> {
        let blocks = Zeroed::new(max_blocks)?;
        Some(Self { blocks, since })
    }

    /// The block gets new content.
    pub(super) fn begin(&self, block: BlockId, now: u64) {
        let block = &self.blocks[block.index()];
        block.born.store(now, Relaxed);
        block.used.store(now, Relaxed);
        block.hits.store(0, Relaxed);
    }

    /// The content is hit; how long ago it was used before.
    pub(super) fn hit<M: Mode>(&self, block: BlockId, now: u64) -> u64 {
        let block = &self.blocks[block.index()];
        let gap = self.passed(block.used.load(Relaxed), now);
        block.used.store(now, Relaxed);
        M::add_short(&block.hits, 1);
        gap
    }

    /// A use of the content ends.
    pub(super) fn touch(&self, block: BlockId, now: u64) {
        self.blocks[block.index()].used.store(now, Relaxed);
    }

    /// The content goes on in another block.
    pub(super) fn carry(&self, from: BlockId, to: BlockId) {
        let (from, to) = (&self.blocks[from.index()], &self.blocks[to.index()]);
        to.born.store(from.born.load(Relaxed), Relaxed);
        to.used.store(from.used.load(Relaxed), Relaxed);
        to.hits.store(from.hits.load(Relaxed), Relaxed);
    }

    pub(super) fn of(&self, block: BlockId, now: u64) -> Summary {
        let block = &self.blocks[block.index()];
        Summary {
            hits: block.hits.load(Relaxed),
            age: self.passed(block.born.load(Relaxed), now),
            idle: self.passed(block.used.load(Relaxed), now),
        }
    }

    /// From a time to another; 0 if another thread read the earlier one later.
    fn passed(&self, from: u64, to: u64) -> u64 {
        to.saturating_sub(from.max(self.since))
    }
}
