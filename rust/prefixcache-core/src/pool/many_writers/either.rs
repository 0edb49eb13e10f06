//! A pool of either form, chosen at run time.

use std::time::Duration;

use super::{MultiReader, MultiWriter};
use crate::backing::{BackingStore, KeptBlock};
use crate::band::Band;
use crate::clock::Clock;
use crate::error::{Broken, Exhausted, InvalidArgument, ListenError, Misuse, ResizeError};
use crate::events::{BlockTokens, EventLog, EventReader};
use crate::evictions::Evictions;
use crate::id::{BlockId, BlockKey, Epoch};
use crate::policy::{Queue, ReuseQueue};
use crate::pool::{BlockMap, Reader, Writer};
use crate::store::sealed::Sealed;
use crate::store::{
    BlockStore, HintedChange, Lookup, Marks, Moves, Registration, StoreStats, WithReaders,
};
use crate::sync::Arc;

/// One of a pool's two forms.
#[derive(Clone, Debug)]
pub enum Either<O, M> {
    /// Of one writer.
    One(O),
    /// Of several.
    Many(M),
}

/// The right to change a pool of either form.
pub type AnyWriter = Either<Writer, MultiWriter>;

/// A pool of either form to look at.
pub type AnyReader = Either<Reader, MultiReader>;

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

/// The methods of [`BlockStore`] that both forms have.
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
            fn prefetch(key: &BlockKey);
            fn register(block: BlockId, key: BlockKey, epoch: Epoch) -> Result<Registration, Misuse>;
            fn release(blocks: &[BlockId]) -> Result<(), Misuse>;
            fn release_to(blocks: &[BlockId], queue: Queue) -> Result<(), Misuse>;
            fn release_unneeded(blocks: &[BlockId]) -> Result<(), Misuse>;
            fn mark(block: BlockId, marks: Marks);
            fn clear_index();
            fn pin(blocks: &[BlockId]) -> Result<usize, Misuse>;
            fn unpin(blocks: &[BlockId]) -> Result<usize, Misuse>;
            fn demote(count: usize) -> usize;
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

macro_rules! either {
    ($handle:expr, |$pool:ident| $call:expr) => {
        match $handle {
            Self::One($pool) => $call,
            Self::Many($pool) => $call,
        }
    };
}

impl<O: Sealed, M: Sealed> Sealed for Either<O, M> {}

impl<O: Lookup, M: Lookup> Lookup for Either<O, M> {
    forward! {
        either, &self:
        fn is_at_rest() -> bool;
        fn lookup(key: &BlockKey) -> Option<BlockId>;
        fn count_leading(keys: impl Iterator<Item = BlockKey> + Clone) -> usize;
        fn evicts_in_order() -> bool;
        fn clock() -> &Clock;
        fn epoch() -> Epoch;
        fn num_blocks() -> usize;
        fn num_free() -> usize;
        fn stats() -> StoreStats;
    }
}

impl<O: WithReaders, M: WithReaders> WithReaders for Either<O, M> {
    type Reader = Either<O::Reader, M::Reader>;

    fn reader(&self) -> Self::Reader {
        match self {
            Self::One(writer) => Either::One(writer.reader()),
            Self::Many(writer) => Either::Many(writer.reader()),
        }
    }
}

impl<O: BlockStore, M: BlockStore> BlockStore for Either<O, M> {
    changes_through!(either);

    forward! {
        either, &self:
        fn reads_first(keys: impl Iterator<Item = BlockKey>, most: usize) -> bool;
        fn lookup_held(key: &BlockKey, held: BlockId) -> Option<BlockId>;
        fn key_of(block: BlockId) -> BlockKey;
        fn held_band(block: BlockId) -> Band;
        fn marks(block: BlockId) -> Marks;
        fn reuse_queue() -> Option<&ReuseQueue>;
        fn event_log() -> Option<&EventLog>;
        fn free_order() -> Vec<BlockId>;
        fn cached_blocks() -> Vec<BlockId>;
        fn num_holders(block: BlockId) -> usize;
        fn validate() -> Result<(), Broken>;
    }

    forward! {
        either, &mut self:
        fn keep_events(block_size: usize) -> Result<EventReader, ListenError>;
        fn keep_in(store: Arc<dyn BackingStore>, kept: &[KeptBlock]) -> Result<usize, ListenError>;
        fn take_hinted_change() -> Option<HintedChange>;
        fn keep_tokens(block: BlockId, tokens: BlockTokens<'_>);
        fn keep_hint(block: BlockId, band: Band, hint: crate::backing::KeptHint);
        fn set_band(key: &BlockKey, held: BlockId, band: Band) -> bool;
        fn set_durable(durable: bool);
        fn end_order();
    }
}

impl AnyReader {
    forward! {
        either, &self:
        /// Evictions, for whoever listens.
        #[must_use]
        pub fn evictions() -> &Evictions;
        /// See [`MultiPool::map`](super::MultiPool::map).
        pub fn map(cells: usize, age_bounds: &[Duration]) -> Result<BlockMap, InvalidArgument>;
    }
}
