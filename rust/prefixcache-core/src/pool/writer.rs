//! Who may change a pool, and who may look at it.

use std::ops::Deref;

use super::{BlockPool, Mode, SingleWriter};
use crate::clock::Clock;
use crate::error::{Broken, Exhausted, ListenError, Misuse, PoolError, ResizeError};
use crate::events::{EventLog, EventReader};
use crate::hints::Band;
use crate::id::{BlockId, Epoch};
use crate::policy::{Queue, ReuseQueue};
use crate::store::sealed::Sealed;
use crate::store::{
    BlockKey, BlockStore, HintedChange, Lookup, Marks, Moves, PoolConfig, Registration, StoreStats,
};
use crate::sync::Arc;

/// The right to change a pool, which makes the pool.
///
/// There is one for each pool, and its methods take `&mut self`: no two threads can change the pool at a time.
/// It can be sent to another thread. A second one is not to be had:
///
/// ```compile_fail,E0277
/// fn another<T: Clone>(writer: &T) -> T {
///     writer.clone()
/// }
/// let writer = prefixcache_core::Writer::new(prefixcache_core::PoolConfig::new(8)).unwrap();
/// let second = another(&writer);
/// ```
///
/// Nor do two threads have it at a time:
///
/// ```compile_fail,E0499
/// use prefixcache_core::{BlockStore, PoolConfig, Writer};
///
/// let mut writer = Writer::new(PoolConfig::new(8)).unwrap();
/// std::thread::scope(|scope| {
///     scope.spawn(|| writer.allocate(1, &mut Vec::new()));
///     scope.spawn(|| writer.allocate(1, &mut Vec::new()));
/// });
/// ```
#[derive(Debug)]
pub struct Writer<M: Mode = SingleWriter>(pub(super) Arc<BlockPool<M>>);

/// A pool for any thread to look at, in parallel with the one that changes it.
#[derive(Debug)]
pub struct Reader<M: Mode = SingleWriter>(Arc<BlockPool<M>>);

impl<M: Mode> Clone for Reader<M> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl Writer {
    /// A pool whose blocks are all free and without content, and the only right to change it.
    ///
    /// Fails when a size is out of range or there is no memory for `max_blocks` blocks.
    pub fn new(config: PoolConfig) -> Result<Self, PoolError> {
        Self::in_mode(config)
    }

    /// Reports to the reader, from now on, blocks of `block_size` tokens that can be found and cannot any more.
    /// What another process has kept comes first. Once in a pool's life, before anything else is cached.
    pub fn keep_events(&mut self, block_size: usize) -> Result<EventReader, ListenError> {
        self.0.keep_events(block_size)
    }
}

impl<M: Mode> Writer<M> {
    /// [`Writer::new`] in either mode.
    pub fn in_mode(config: PoolConfig) -> Result<Self, PoolError> {
        BlockPool::new(config).map(Arc::new).map(Self)
    }

    /// A pool whose rings have `ring_capacity` slots each, a power of two.
    ///
    /// For tests and measurements: a ring of fewer than four slots a block can fill up, and then
    /// releases drop content ([`BlockPool::content_drops`]).
    pub fn with_ring_capacity(config: PoolConfig, ring_capacity: usize) -> Result<Self, PoolError> {
        let pool = BlockPool::with_ring_capacity(config, ring_capacity)?;
        Ok(Self(Arc::new(pool)))
    }

    /// The pool, for another thread to look at.
    #[must_use]
    pub fn reader(&self) -> Reader<M> {
        Reader(Arc::clone(&self.0))
    }
}

impl<M: Mode> Deref for Writer<M> {
    type Target = BlockPool<M>;

    fn deref(&self) -> &BlockPool<M> {
        &self.0
    }
}

impl<M: Mode> Deref for Reader<M> {
    type Target = BlockPool<M>;

    fn deref(&self) -> &BlockPool<M> {
        &self.0
    }
}

/// The methods of [`Lookup`], each of which `$through` makes of that of the pool behind.
macro_rules! lookup_through {
    ($through:ident) => {
        fn lookup(&self, key: &BlockKey) -> Option<BlockId> {
            $through!(self, |pool| pool.lookup(key))
        }

        fn count_leading(&self, keys: impl Iterator<Item = BlockKey> + Clone) -> usize {
            $through!(self, |pool| pool.count_leading(keys))
        }

        fn evicts_in_order(&self) -> bool {
            $through!(self, |pool| pool.evicts_in_order())
        }

        fn lookup_held(&self, key: &BlockKey, held: BlockId) -> Option<BlockId> {
            $through!(self, |pool| pool.lookup_held(key, held))
        }

        fn key_of(&self, block: BlockId) -> BlockKey {
            $through!(self, |pool| pool.key_of(block))
        }

        fn clock(&self) -> &Clock {
            $through!(self, |pool| pool.clock())
        }

        fn epoch(&self) -> Epoch {
            $through!(self, |pool| pool.epoch())
        }

        fn num_blocks(&self) -> usize {
            $through!(self, |pool| pool.num_blocks())
        }

        fn num_free(&self) -> usize {
            $through!(self, |pool| pool.num_free())
        }

        fn band(&self, key: &BlockKey) -> Option<Band> {
            $through!(self, |pool| pool.band(key))
        }

        fn held_band(&self, block: BlockId) -> Band {
            $through!(self, |pool| pool.held_band(block))
        }

        fn marks(&self, block: BlockId) -> Marks {
            $through!(self, |pool| pool.marks(block))
        }

        fn reuse_queue(&self) -> Option<&ReuseQueue> {
            $through!(self, |pool| pool.reuse_queue())
        }

        fn event_log(&self) -> Option<&EventLog> {
            $through!(self, |pool| pool.event_log())
        }

        fn free_order(&self) -> Vec<BlockId> {
            $through!(self, |pool| pool.free_order())
        }

        fn cached_blocks(&self) -> Vec<BlockId> {
            $through!(self, |pool| pool.cached_blocks())
        }

        fn stats(&self) -> StoreStats {
            $through!(self, |pool| pool.stats())
        }

        fn num_holders(&self, block: BlockId) -> usize {
            $through!(self, |pool| pool.num_holders(block))
        }

        fn validate(&self) -> Result<(), Broken> {
            $through!(self, |pool| pool.validate())
        }
    };
}
pub(super) use lookup_through;

/// The methods of [`BlockStore`], likewise.
macro_rules! changes_through {
    ($through:ident) => {
        fn commit(
            &mut self,
            keys: impl ExactSizeIterator<Item = BlockKey> + Clone,
            num_new: usize,
            out: &mut Vec<BlockId>,
        ) -> Result<usize, Exhausted> {
            $through!(self, |pool| pool.commit(keys, num_new, out))
        }

        fn begin_registrations(&mut self) {
            $through!(self, |pool| pool.begin_registrations());
        }

        fn take_hinted_change(&mut self) -> Option<HintedChange> {
            $through!(self, |pool| pool.take_hinted_change())
        }

        fn prefetch(&mut self, key: &BlockKey) {
            $through!(self, |pool| pool.prefetch(key));
        }

        fn register(
            &mut self,
            block: BlockId,
            key: BlockKey,
            epoch: Epoch,
        ) -> Result<Registration, Misuse> {
            $through!(self, |pool| pool.register(block, key, epoch))
        }

        fn keep_tokens(&mut self, block: BlockId, tokens: crate::backing::BlockTokens<'_>) {
            $through!(self, |pool| pool.keep_tokens(block, tokens));
        }

        fn release(&mut self, blocks: &[BlockId]) -> Result<(), Misuse> {
            $through!(self, |pool| pool.release(blocks))
        }

        fn release_to(&mut self, blocks: &[BlockId], queue: Queue) -> Result<(), Misuse> {
            $through!(self, |pool| pool.release_to(blocks, queue))
        }

        fn release_unneeded(&mut self, blocks: &[BlockId]) -> Result<(), Misuse> {
            $through!(self, |pool| pool.release_unneeded(blocks))
        }

        fn set_durable(&mut self, durable: bool) {
            $through!(self, |pool| pool.set_durable(durable));
        }

        fn mark(&mut self, block: BlockId, marks: Marks) {
            $through!(self, |pool| pool.mark(block, marks));
        }

        fn clear_index(&mut self) {
            $through!(self, |pool| pool.clear_index());
        }

        fn pin(&mut self, blocks: &[BlockId]) -> Result<usize, Misuse> {
            $through!(self, |pool| pool.pin(blocks))
        }

        fn unpin(&mut self, blocks: &[BlockId]) -> Result<usize, Misuse> {
            $through!(self, |pool| pool.unpin(blocks))
        }

        fn demote(&mut self, count: usize) -> usize {
            $through!(self, |pool| pool.demote(count))
        }

        fn set_band(&mut self, key: &BlockKey, held: BlockId, band: Band) -> bool {
            $through!(self, |pool| pool.set_band(key, held, band))
        }

        fn resize(&mut self, num_blocks: usize) -> Result<usize, ResizeError> {
            $through!(self, |pool| pool.resize(num_blocks))
        }

        fn begin_moves(
            &mut self,
            num_blocks: usize,
            most: usize,
            moves: &mut Moves,
        ) -> Result<(), ResizeError> {
            $through!(self, |pool| pool.begin_moves(num_blocks, most, moves))
        }

        fn finish_moves(&mut self, moves: &mut Moves) -> Result<usize, ResizeError> {
            $through!(self, |pool| pool.finish_moves(moves))
        }

        fn release_cached(&mut self, count: usize) -> usize {
            $through!(self, |pool| pool.release_cached(count))
        }

        fn set_max_cached(&mut self, blocks: Option<usize>) {
            $through!(self, |pool| pool.set_max_cached(blocks));
        }
    };
}
pub(super) use changes_through;

macro_rules! behind {
    ($handle:expr, |$pool:ident| $call:expr) => {{
        let $pool = &*$handle.0;
        $call
    }};
}

impl<M: Mode> Sealed for Writer<M> {}
impl<M: Mode> Sealed for Reader<M> {}

impl<M: Mode> Lookup for Writer<M> {
    fn is_at_rest(&self) -> bool {
        !M::SHARED
    }

    lookup_through!(behind);
}

impl<M: Mode> Lookup for Reader<M> {
    lookup_through!(behind);
}

impl<M: Mode> BlockStore for Writer<M> {
    changes_through!(behind);
}
