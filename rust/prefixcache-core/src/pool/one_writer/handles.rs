//! What the two handles offer.

use std::time::Duration;

use super::{BlockPool, Ordering::Relaxed, Reader, Writer};
use crate::backing::{BackingStore, KeptBlock, KeptHint};
use crate::band::Band;
use crate::class::{Class, Destination};
use crate::clock::Clock;
use crate::error::{Broken, Exhausted, InvalidArgument, ListenError, Misuse, ResizeError};
use crate::events::{BlockTokens, EventLog, EventReader};
use crate::evictions::{Cause, Evictions};
use crate::id::{BlockId, BlockKey, Epoch};
use crate::policy::{Queue, ReuseQueue};
use crate::pool::map::{BlockMap, BlockState};
use crate::records::Content;
use crate::store::sealed::Sealed;
use crate::store::{
    BlockStore, HintedChange, Lookup, Marks, Moves, Registration, StoreStats, WithReaders,
};
use crate::sync::Arc;

impl Sealed for Writer {}
impl Sealed for Reader {}

/// What both can look at.
macro_rules! lookups {
    () => {
        #[inline]
        fn lookup(&self, key: &BlockKey) -> Option<BlockId> {
            self.pool().records.find(key)
        }

        fn count_leading(&self, keys: impl Iterator<Item = BlockKey> + Clone) -> usize {
            self.pool().records.count_leading(keys)
        }

        fn evicts_in_order(&self) -> bool {
            self.pool().reuse.is_none() && self.pool().is_in_order()
        }

        fn clock(&self) -> &Clock {
            &self.pool().clock
        }

        fn epoch(&self) -> Epoch {
            self.pool().epoch()
        }

        fn num_blocks(&self) -> usize {
            self.pool().records.num_blocks()
        }

        fn stats(&self) -> StoreStats {
            self.pool().stats()
        }
    };
}

impl Lookup for Reader {
    lookups!();

    fn num_free(&self) -> usize {
        self.pool().counts.free.load(Relaxed)
    }
}

impl Lookup for Writer {
    lookups!();

    fn is_at_rest(&self) -> bool {
        true
    }

    fn num_free(&self) -> usize {
        self.free
    }
}

impl WithReaders for Writer {
    type Reader = Reader;

    fn reader(&self) -> Reader {
        Reader(Arc::clone(&self.pool))
    }
}

impl BlockStore for Writer {
    fn commit(
        &mut self,
        keys: impl ExactSizeIterator<Item = BlockKey> + Clone,
        num_new: usize,
        out: &mut Vec<BlockId>,
    ) -> Result<usize, Exhausted> {
        self.settled(|pool| pool.commit_all(keys, num_new, out))
    }

    fn register(
        &mut self,
        block: BlockId,
        key: BlockKey,
        epoch: Epoch,
    ) -> Result<Registration, Misuse> {
        self.settled(|pool| pool.register_block(block, &key, epoch))
    }

    fn release(&mut self, blocks: &[BlockId]) -> Result<(), Misuse> {
        self.settled(|pool| pool.release_all(blocks, Destination::Same))
    }

    fn release_to(&mut self, blocks: &[BlockId], queue: Queue) -> Result<(), Misuse> {
        let queue = self.pool.reuse.as_ref().map(|_| Destination::Queue(queue));
        self.settled(|pool| pool.release_all(blocks, queue.unwrap_or(Destination::Same)))
    }

    fn release_unneeded(&mut self, blocks: &[BlockId]) -> Result<(), Misuse> {
        self.settled(|pool| pool.release_all(blocks, Destination::Front))
    }

    fn clear_index(&mut self) {
        self.settled(Self::clear);
    }

    fn pin(&mut self, blocks: &[BlockId]) -> Result<usize, Misuse> {
        self.settled(|pool| pool.pin_all(blocks))
    }

    fn unpin(&mut self, blocks: &[BlockId]) -> Result<usize, Misuse> {
        self.settled(|pool| pool.unpin_all(blocks))
    }

    fn demote(&mut self, count: usize) -> usize {
        self.settled(|pool| pool.demote_oldest(count))
    }

    fn set_band(&mut self, key: &BlockKey, held: BlockId, band: Band) -> bool {
        self.settled(|pool| pool.set_band_of(key, held, band))
    }

    fn resize(&mut self, num_blocks: usize) -> Result<usize, ResizeError> {
        self.settled(|pool| pool.resize_to(num_blocks))
    }

    fn begin_moves(
        &mut self,
        num_blocks: usize,
        most: usize,
        moves: &mut Moves,
    ) -> Result<(), ResizeError> {
        self.settled(|pool| pool.begin_shrink(num_blocks, most, moves))
    }

    fn finish_moves(&mut self, moves: &mut Moves) -> Result<usize, ResizeError> {
        Ok(self.settled(|pool| pool.finish_shrink(moves)))
    }

    fn release_cached(&mut self, count: usize) -> usize {
        self.settled(|pool| pool.give_up(count, Cause::Evicted))
    }

    fn set_max_cached(&mut self, blocks: Option<usize>) {
        self.max_cached = blocks.unwrap_or(usize::MAX);
        self.keep_bound();
    }

    fn defer_bound(&mut self, defers: bool) {
        self.defers_bound = defers;
    }

    fn keep_bound(&mut self) {
        self.settled(Self::keep_bound_now);
    }

    fn end_order(&mut self) {
        self.note_disorder();
    }

    fn prefetch(&mut self, key: &BlockKey) {
        let index = &self.pool.records.index;
        index.prefetch(index.spot(&Content::from(key), self.pool.epoch()));
    }

    fn mark(&mut self, block: BlockId, marks: Marks) {
        self.block(block).update(|state| state.marked(marks));
    }

    fn take_hinted_change(&mut self) -> Option<HintedChange> {
        self.journal.hinted.pop_front()
    }

    // Observers, and what they learn besides.

    fn keep_events(&mut self, block_size: usize) -> Result<EventReader, ListenError> {
        self.report_events(block_size)
    }

    fn keep_in(
        &mut self,
        store: Arc<dyn BackingStore>,
        kept: &[KeptBlock],
    ) -> Result<usize, ListenError> {
        self.restore_from(store, kept)
    }

    fn reads_first(&self, keys: impl Iterator<Item = BlockKey>, most: usize) -> bool {
        let mut blocks = keys.filter_map(|key| self.lookup(&key));
        let backing = self.journal.backing.as_ref();
        backing.is_some_and(|backing| backing.reads_first(&mut blocks, most))
    }

    fn event_log(&self) -> Option<&EventLog> {
        self.journal.events.as_ref()
    }

    fn keep_tokens(&mut self, block: BlockId, tokens: BlockTokens<'_>) {
        if let Some(backing) = &self.journal.backing {
            backing.keep_tokens(block, tokens);
        }
    }

    fn keep_hint(&mut self, block: BlockId, band: Band, hint: KeptHint) {
        if let Some(backing) = &self.journal.backing {
            backing.keep_hint(block, band, hint);
        }
    }

    fn set_durable(&mut self, durable: bool) {
        if let Some(backing) = &self.journal.backing {
            backing.set_durable(durable);
        }
    }

    // Looking.

    #[inline]
    fn lookup_held(&self, key: &BlockKey, held: BlockId) -> Option<BlockId> {
        if self.is_only_copy(held) {
            debug_assert_eq!(self.lookup(key), Some(held));
            return Some(held);
        }
        self.lookup(key)
    }

    fn key_of(&self, block: BlockId) -> BlockKey {
        self.block(block).key()
    }

    fn held_band(&self, block: BlockId) -> Band {
        self.block(block).state().standing().own_class().band()
    }

    fn marks(&self, block: BlockId) -> Marks {
        self.block(block).state().marks()
    }

    fn reuse_queue(&self) -> Option<&ReuseQueue> {
        self.pool.reuse.as_ref()
    }

    fn free_order(&self) -> Vec<BlockId> {
        let list = |class: Class| self.list(class).walk(self.blocks());
        let is_stale = |id: &BlockId| !self.is_current(*id);
        let above = Class::is_above_default;
        let stale = Class::all().filter(|&class| above(class));
        let stale = stale.flat_map(|class| list(class).take_while(is_stale));
        let blank = self.blank.walk(self.blocks());
        let listed = Class::all()
            .flat_map(|class| list(class).skip_while(move |id| above(class) && is_stale(id)));
        stale.chain(blank).chain(listed).collect()
    }

    fn cached_blocks(&self) -> Vec<BlockId> {
        let ids = (1..self.num_blocks() as u32).map(BlockId::new);
        ids.filter(|&id| self.pool.records.is_cached(id)).collect()
    }

    fn num_holders(&self, block: BlockId) -> usize {
        self.block(block).state().references() as usize
    }

    fn validate(&self) -> Result<(), Broken> {
        self.check()
    }
}

impl Writer {
    #[inline]
    fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Ends a call: see [`Self::settle`].
    #[inline]
    fn settled<T>(&mut self, call: impl FnOnce(&mut Self) -> T) -> T {
        let outcome = call(self);
        self.settle();
        outcome
    }
}

impl Reader {
    #[inline]
    fn pool(&self) -> &BlockPool {
        &self.0
    }

    /// Evictions, for whoever listens.
    #[must_use]
    pub fn evictions(&self) -> &Evictions {
        &self.pool().evictions
    }

    /// A map of the pool in up to `cells` cells. From any thread, in parallel with the writer, which does not wait:
    /// each block is counted once, as it was when it was looked at.
    ///
    /// Reads 64 bytes a block, but not of those that were never handed out, and 24 more where somebody listens.
    pub fn map(&self, cells: usize, age_bounds: &[Duration]) -> Result<BlockMap, InvalidArgument> {
        let pool = self.pool();
        let [fresh, end] = pool.counts.fresh.each_ref().map(|bound| bound.load(Relaxed));
        BlockMap::of_pool(self.num_blocks(), cells, age_bounds, &pool.evictions, |id| {
            if (fresh..end).contains(&id.index()) {
                return (BlockState::Free, false);
            }
            let block = pool.records.block(id);
            let (state, is_cached) = (block.state(), block.has_content());
            let is_cached = is_cached && pool.records.is_current(block);
            (BlockState::of(state.is_in_use(), is_cached, state.is_pinned()), is_cached)
        })
    }
}
