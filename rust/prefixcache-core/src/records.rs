//! What readers of a pool touch, and nothing else: the records of its blocks, the index, the epoch and the size.
//!
//! Both pools stand on these. A lookup loads, in a bounded number of steps, and stores nothing: it is wait-free,
//! next to whatever a writer does, a resize included. The bound is argued in `records/index.rs`, why a lookup never
//! returns a block with other content in `records/record.rs`, and why it does not miss what moves in
//! `Index::for_each_candidate`. How writers change any of this is the affair of each pool.

mod check;
pub(crate) mod index;
mod lookup;
mod record;

use std::ops::Deref;

use crate::id::{BlockId, Epoch};
use crate::sync::{AtomicU64, AtomicUsize, Ordering, OwnLine};
use crate::zeroed::{Zeroable, Zeroed};
use index::Index;

pub(crate) use lookup::Found;
pub(crate) use record::{Content, OPEN, Record};

use Ordering::{AcqRel, Acquire, Release};

/// The records of a pool's blocks, each in a `B` with what its writers know of the block, and how they are found.
pub(crate) struct Records<B> {
    blocks: Zeroed<B>,
    pub(crate) index: Index,
    /// On a line of its own, as the size is: every lookup reads it and almost nobody writes it.
    epoch: OwnLine<AtomicU64>,
    num_blocks: OwnLine<AtomicUsize>,
}

impl<B: Zeroable + Deref<Target = Record>> Records<B> {
    /// Records of `num_blocks` blocks, which may become `max_blocks`; None when there is no memory.
    pub(crate) fn new(num_blocks: usize, max_blocks: usize) -> Option<Self> {
        Some(Self {
            blocks: Zeroed::new(max_blocks)?,
            index: Index::new(max_blocks)?,
            epoch: OwnLine::default(),
            num_blocks: OwnLine(AtomicUsize::new(num_blocks)),
        })
    }

    /// All blocks that the pool may have.
    #[inline]
    pub(crate) fn blocks(&self) -> &[B] {
        &self.blocks
    }

    #[inline]
    pub(crate) fn block(&self, id: BlockId) -> &B {
        &self.blocks[id.index()]
    }

    /// The current epoch.
    #[inline]
    pub(crate) fn epoch(&self) -> Epoch {
        // Acquire: who sees a cleared index sees all that came before the clearing.
        Epoch::new(self.epoch.0.load(Acquire))
    }

    /// Ends the epoch, and with it all content.
    pub(crate) fn end_epoch(&self) {
        self.epoch.0.fetch_add(1, AcqRel);
    }

    /// Blocks of the pool, the null block counted.
    #[inline]
    pub(crate) fn num_blocks(&self) -> usize {
        // Acquire: pairs with `set_num_blocks`.
        self.num_blocks.0.load(Acquire)
    }

    pub(crate) fn set_num_blocks(&self, num_blocks: usize) {
        // Release: a lookup that sees the size sees the blocks as they were when it was set.
        self.num_blocks.0.store(num_blocks, Release);
    }

    /// Whether the pool has shrunk below the block.
    #[inline]
    pub(crate) fn is_retired(&self, id: BlockId) -> bool {
        id.index() >= self.num_blocks()
    }

    /// Whether the content that the record names is of this epoch.
    #[inline]
    pub(crate) fn is_current(&self, record: &Record) -> bool {
        record.epoch() == self.epoch()
    }

    /// Whether a lookup of the right key would find the block, or one registered before it.
    pub(crate) fn is_cached(&self, id: BlockId) -> bool {
        let record = self.block(id);
        record.seq() != 0 && self.is_current(record) && !self.is_retired(id)
    }
}
