//! Who may change the pool, and who may look at it.

use std::ops::Deref;

use super::MultiPool;
use super::either::{changes_through, forward};
use super::validate::validate;
use crate::clock::Clock;
use crate::error::{Broken, Exhausted, Misuse, PoolError, ResizeError};
use crate::id::{BlockId, BlockKey, Epoch};
use crate::policy::{Queue, ReuseQueue};
use crate::store::sealed::Sealed;
use crate::store::{
    BlockStore, Lookup, Marks, Moves, PoolConfig, Registration, StoreStats, WithReaders,
};
use crate::sync::Arc;

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

    fn stats(&self) -> StoreStats {
        MultiPool::stats(self)
    }
}

macro_rules! behind {
    ($handle:expr, |$pool:ident| $call:expr) => {{
        let $pool = &*$handle.0;
        $call
    }};
}

impl WithReaders for MultiWriter {
    type Reader = MultiReader;

    fn reader(&self) -> MultiReader {
        MultiReader(Arc::clone(&self.0))
    }
}

impl BlockStore for MultiWriter {
    changes_through!(behind);

    fn key_of(&self, block: BlockId) -> BlockKey {
        self.block(block).key()
    }

    fn marks(&self, block: BlockId) -> Marks {
        self.block(block).marks()
    }

    fn cached_blocks(&self) -> Vec<BlockId> {
        let ids = (1..self.num_blocks() as u32).map(BlockId::new);
        ids.filter(|&id| self.records.is_cached(id)).collect()
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
