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

/// Methods that `$through` makes of those of the pool behind.
macro_rules! forward {
    ($through:ident, &self: $(
        $(#[$meta:meta])* $visible:vis fn $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;
    )*) => {$(
        $(#[$meta])*
        $visible fn $name(&self $(, $arg: $type)*) $(-> $result)? {
            $through!(self, |pool| pool.$name($($arg),*))
        }
    )*};
    ($through:ident, &mut self: $(fn $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {$(
        fn $name(&mut self $(, $arg: $type)*) $(-> $result)? {
            $through!(self, |pool| pool.$name($($arg),*))
        }
    )*};
}
pub(super) use forward;

/// The methods of [`Lookup`].
macro_rules! lookup_through {
    ($through:ident) => {
        forward! {
            $through, &self:
            fn lookup(key: &BlockKey) -> Option<BlockId>;
            fn count_leading(keys: impl Iterator<Item = BlockKey> + Clone) -> usize;
            fn evicts_in_order() -> bool;
            fn lookup_held(key: &BlockKey, held: BlockId) -> Option<BlockId>;
            fn key_of(block: BlockId) -> BlockKey;
            fn clock() -> &Clock;
            fn epoch() -> Epoch;
            fn num_blocks() -> usize;
            fn num_free() -> usize;
            fn band(key: &BlockKey) -> Option<Band>;
            fn held_band(block: BlockId) -> Band;
            fn marks(block: BlockId) -> Marks;
            fn reuse_queue() -> Option<&ReuseQueue>;
            fn event_log() -> Option<&EventLog>;
            fn free_order() -> Vec<BlockId>;
            fn cached_blocks() -> Vec<BlockId>;
            fn stats() -> StoreStats;
            fn num_holders(block: BlockId) -> usize;
            fn validate() -> Result<(), Broken>;
        }
    };
}
pub(super) use lookup_through;

/// The methods of [`BlockStore`].
macro_rules! changes_through {
    ($through:ident) => {
        forward! {
            $through, &mut self:
            fn commit(
                keys: impl ExactSizeIterator<Item = BlockKey> + Clone,
                num_new: usize,
                out: &mut Vec<BlockId>
            ) -> Result<usize, Exhausted>;
            fn begin_registrations();
            fn take_hinted_change() -> Option<HintedChange>;
            fn prefetch(key: &BlockKey);
            fn register(block: BlockId, key: BlockKey, epoch: Epoch) -> Result<Registration, Misuse>;
            fn keep_tokens(block: BlockId, tokens: crate::backing::BlockTokens<'_>);
            fn keep_hint(block: BlockId, band: Band, hint: crate::backing::KeptHint);
            fn release(blocks: &[BlockId]) -> Result<(), Misuse>;
            fn release_to(blocks: &[BlockId], queue: Queue) -> Result<(), Misuse>;
            fn release_unneeded(blocks: &[BlockId]) -> Result<(), Misuse>;
            fn set_durable(durable: bool);
            fn mark(block: BlockId, marks: Marks);
            fn clear_index();
            fn pin(blocks: &[BlockId]) -> Result<usize, Misuse>;
            fn unpin(blocks: &[BlockId]) -> Result<usize, Misuse>;
            fn demote(count: usize) -> usize;
            fn set_band(key: &BlockKey, held: BlockId, band: Band) -> bool;
            fn end_order();
            fn resize(num_blocks: usize) -> Result<usize, ResizeError>;
            fn begin_moves(num_blocks: usize, most: usize, moves: &mut Moves) -> Result<(), ResizeError>;
            fn finish_moves(moves: &mut Moves) -> Result<usize, ResizeError>;
            fn release_cached(count: usize) -> usize;
            fn set_max_cached(blocks: Option<usize>);
            fn defer_bound(defers: bool);
            fn keep_bound();
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
