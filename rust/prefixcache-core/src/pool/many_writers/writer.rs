//! Who may change the pool, and who may look at it.

use std::ops::Deref;

use super::MultiPool;
use super::validate::validate;
use crate::band::Band;
use crate::class::Destination;
use crate::clock::Clock;
use crate::error::{Broken, Exhausted, Misuse, PoolError, ResizeError};
use crate::evictions::Cause;
use crate::id::{BlockId, Epoch};
use crate::policy::{Queue, ReuseQueue};
use crate::records::Content;
use crate::store::sealed::Sealed;
use crate::store::{
    BlockKey, BlockStore, Lookup, Marks, Moves, PoolConfig, Registration, StoreStats,
};
use crate::sync::{Arc, Ordering::Relaxed};

/// A right to change a pool that others have too: each thread clones its own.
#[derive(Clone, Debug)]
pub struct MultiWriter(Arc<MultiPool>);

/// A pool that several threads change, for any thread to look at.
#[derive(Clone, Debug)]
pub struct MultiReader(Arc<MultiPool>);

impl MultiWriter {
    /// A pool whose blocks are all free and without content, and a first right to change it.
    ///
    /// Fails when a size is out of range or there is no memory for `max_blocks` blocks.
    pub fn shared(config: PoolConfig) -> Result<Self, PoolError> {
        MultiPool::new(config, None).map(Arc::new).map(Self)
    }

    /// A pool whose rings have `ring_capacity` slots each, a power of two.
    ///
    /// For tests and measurements: a ring of fewer than four slots a block can fill up, and then
    /// releases drop content ([`MultiPool::content_drops`]).
    pub fn with_ring_capacity(config: PoolConfig, ring_capacity: usize) -> Result<Self, PoolError> {
        MultiPool::new(config, Some(ring_capacity)).map(Arc::new).map(Self)
    }

    /// The pool, for another thread to look at.
    #[must_use]
    pub fn reader(&self) -> MultiReader {
        MultiReader(Arc::clone(&self.0))
    }
}

impl Deref for MultiWriter {
    type Target = MultiPool;

    fn deref(&self) -> &MultiPool {
        &self.0
    }
}

impl Deref for MultiReader {
    type Target = MultiPool;

    fn deref(&self) -> &MultiPool {
        &self.0
    }
}

impl Sealed for MultiWriter {}
impl Sealed for MultiReader {}

impl<H: Deref<Target = MultiPool> + Sealed> Lookup for H {
    fn lookup(&self, key: &BlockKey) -> Option<BlockId> {
        self.records.find(key)
    }

    fn key_of(&self, block: BlockId) -> BlockKey {
        self.block(block).key()
    }

    fn count_leading(&self, keys: impl Iterator<Item = BlockKey> + Clone) -> usize {
        self.records.count_leading(keys)
    }

    fn clock(&self) -> &Clock {
        &self.clock
    }

    fn epoch(&self) -> Epoch {
        self.records.epoch()
    }

    fn num_blocks(&self) -> usize {
        self.records.num_blocks()
    }

    fn num_free(&self) -> usize {
        self.credits.available()
    }

    fn band(&self, key: &BlockKey) -> Option<Band> {
        self.records.find(key).map(|hit| self.held_band(hit))
    }

    fn held_band(&self, block: BlockId) -> Band {
        self.block(block).state().standing().own_class().band()
    }

    fn marks(&self, block: BlockId) -> Marks {
        self.block(block).marks()
    }

    fn cached_blocks(&self) -> Vec<BlockId> {
        let ids = (1..self.num_blocks() as u32).map(BlockId::new);
        ids.filter(|&id| self.records.is_cached(id)).collect()
    }

    fn stats(&self) -> StoreStats {
        MultiPool::stats(self)
    }

    fn reuse_queue(&self) -> Option<&ReuseQueue> {
        self.reuse.as_ref()
    }

    fn free_order(&self) -> Vec<BlockId> {
        MultiPool::free_order(self)
    }

    fn num_holders(&self, block: BlockId) -> usize {
        self.block(block).state().holders() as usize
    }

    fn validate(&self) -> Result<(), Broken> {
        validate(self)
    }
}

/// How many of the blocks something could be done with, up to the first that nobody holds.
fn count_done(
    blocks: &[BlockId],
    work: impl Fn(BlockId) -> Result<bool, Misuse>,
) -> (usize, Result<(), Misuse>) {
    let mut done = 0;
    let outcome = blocks.iter().try_for_each(|&id| {
        done += usize::from(work(id)?);
        Ok(())
    });
    (done, outcome)
}

impl BlockStore for MultiWriter {
    fn commit(
        &mut self,
        keys: impl ExactSizeIterator<Item = BlockKey> + Clone,
        num_new: usize,
        out: &mut Vec<BlockId>,
    ) -> Result<usize, Exhausted> {
        self.take(keys, num_new, out)
    }

    fn begin_registrations(&mut self) {
        self.set_time_of_batch();
    }

    fn prefetch(&mut self, key: &BlockKey) {
        let spot = self.records.index.spot(&Content::from(key), self.epoch());
        self.records.index.prefetch(spot);
    }

    fn register(
        &mut self,
        block: BlockId,
        key: BlockKey,
        epoch: Epoch,
    ) -> Result<Registration, Misuse> {
        self.register_held(block, key, epoch)
    }

    fn release(&mut self, blocks: &[BlockId]) -> Result<(), Misuse> {
        self.give_back(blocks, Destination::Same)
    }

    fn release_to(&mut self, blocks: &[BlockId], queue: Queue) -> Result<(), Misuse> {
        let queue = self.reuse.as_ref().map(|_| Destination::Queue(queue));
        self.give_back(blocks, queue.unwrap_or(Destination::Same))
    }

    fn release_unneeded(&mut self, blocks: &[BlockId]) -> Result<(), Misuse> {
        self.give_back(blocks, Destination::Front)
    }

    fn mark(&mut self, block: BlockId, marks: Marks) {
        self.block(block).mark(marks);
    }

    fn clear_index(&mut self) {
        self.records.end_epoch();
        self.census.count(self.epoch(), 0);
        if let Some(log) = self.eviction_log.get() {
            log.note_clear();
        }
        self.classes.mark_stale();
    }

    fn pin(&mut self, blocks: &[BlockId]) -> Result<usize, Misuse> {
        let (pinned, outcome) = count_done(blocks, |id| self.pin_content(id));
        self.counters.pins.add(pinned as u64);
        outcome.map(|()| pinned)
    }

    fn unpin(&mut self, blocks: &[BlockId]) -> Result<usize, Misuse> {
        let (unpinned, outcome) = count_done(blocks, |id| self.unpin_content(id));
        outcome.map(|()| unpinned)
    }

    fn demote(&mut self, count: usize) -> usize {
        let demoted = self.unpin_oldest(count);
        self.counters.ended_pins.add(demoted as u64);
        self.counters.demotions.add(demoted as u64);
        demoted
    }

    fn set_band(&mut self, key: &BlockKey, held: BlockId, band: Band) -> bool {
        self.classify_hit(key, held, band)
    }

    fn resize(&mut self, num_blocks: usize) -> Result<usize, ResizeError> {
        self.set_size(num_blocks)
    }

    fn begin_moves(
        &mut self,
        num_blocks: usize,
        most: usize,
        moves: &mut Moves,
    ) -> Result<(), ResizeError> {
        self.plan_moves(num_blocks, most, moves)
    }

    fn finish_moves(&mut self, moves: &mut Moves) -> Result<usize, ResizeError> {
        self.end_moves(moves)
    }

    fn release_cached(&mut self, count: usize) -> usize {
        self.give_up(count, Cause::Evicted)
    }

    fn set_max_cached(&mut self, blocks: Option<usize>) {
        // Relaxed, also below: see `MultiPool::keep_bound`.
        self.max_cached.store(blocks.unwrap_or(usize::MAX), Relaxed);
        MultiPool::keep_bound(self);
    }

    fn defer_bound(&mut self, defers: bool) {
        self.defers_bound.store(defers, Relaxed);
    }

    fn keep_bound(&mut self) {
        MultiPool::keep_bound(self);
    }
}
