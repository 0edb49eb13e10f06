//! The pool that several threads change at a time. Who has one writer need not know it.
//!
//! Each thread has a [`MultiWriter`] of its own, a clone of the first. What it costs and what it buys stands in
//! the [pool](super)'s page. Over one writer's pool it adds:
//!
//! * every change of a word is one read-modify-write ([`Shared`]);
//! * the free-block semaphore counts the calls inside, which a resize has to be alone (`credits.rs`);
//! * a hit looks at its block again once it holds it (`take.rs`);
//! * a registration is numbered after its entry stands, by whoever comes first (below);
//! * calls that take blocks out of the line for a moment take one at a time (`bound.rs`, `give.rs`).
//!
//! Hints, events and counts by bisection need the order of one writer's changes, so it has none of them.

#[cfg(all(test, loom))]
mod models;
#[cfg(all(test, shuttle, not(loom)))]
mod schedules;

use std::time::Duration;

use super::index::Spot;
use super::writer::{changes_through, forward, lookup_through};
use super::{BlockMap, BlockPool, Mode, Reader, Shared, Writer};
use crate::block::{Block, Content};
use crate::clock::Clock;
use crate::error::{
    Broken, Exhausted, InvalidArgument, ListenError, Misuse, PoolError, ResizeError,
};
use crate::events::EventLog;
use crate::evictions::{Eviction, ReuseGaps};
use crate::hints::Band;
use crate::id::{BlockId, Epoch};
use crate::policy::{Queue, ReuseQueue};
use crate::store::sealed::Sealed;
use crate::store::{
    BlockKey, BlockStore, HintedChange, Lookup, Marks, Moves, PoolConfig, Registration, StoreStats,
};
use crate::sync::Arc;

/// A right to change a pool that others have too: each thread clones its own.
pub type MultiWriter = Writer<Shared>;

impl Clone for MultiWriter {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl MultiWriter {
    /// A pool whose blocks are all free and without content, and a first right to change it.
    ///
    /// Fails as [`Writer::new`] does.
    pub fn shared(config: PoolConfig) -> Result<Self, PoolError> {
        Self::in_mode(config)
    }
}

/// The right to change a pool of either form, which is chosen at run time.
#[derive(Debug)]
pub enum AnyWriter {
    /// The only one.
    One(Writer),
    /// One of several.
    Many(MultiWriter),
}

/// A pool of either form to look at.
#[derive(Clone, Debug)]
pub enum AnyReader {
    /// Of one writer.
    One(Reader),
    /// Of several.
    Many(Reader<Shared>),
}

impl AnyWriter {
    /// The pool, for another thread to look at.
    #[must_use]
    pub fn reader(&self) -> AnyReader {
        match self {
            Self::One(writer) => AnyReader::One(writer.reader()),
            Self::Many(writer) => AnyReader::Many(writer.reader()),
        }
    }
}

macro_rules! either {
    ($handle:expr, |$pool:ident| $call:expr) => {
        match $handle {
            Self::One($pool) => $call,
            Self::Many($pool) => $call,
        }
    };
}

impl Sealed for AnyWriter {}
impl Sealed for AnyReader {}

impl Lookup for AnyWriter {
    fn is_at_rest(&self) -> bool {
        either!(self, |pool| pool.is_at_rest())
    }

    lookup_through!(either);
}

impl Lookup for AnyReader {
    lookup_through!(either);
}

impl BlockStore for AnyWriter {
    changes_through!(either);
}

impl AnyReader {
    forward! {
        either, &self:
        /// See [`BlockPool::listen`].
        pub fn listen(capacity: usize, gap_bounds: &[Duration]) -> Result<(), ListenError>;
        /// See [`BlockPool::take_evictions`].
        pub fn take_evictions(most: usize, out: &mut Vec<Eviction>);
        /// See [`BlockPool::missed_evictions`].
        #[must_use]
        pub fn missed_evictions() -> u64;
        /// See [`BlockPool::reuse_gaps`].
        #[must_use]
        pub fn reuse_gaps() -> ReuseGaps;
        /// See [`BlockPool::map`].
        pub fn map(cells: usize, age_bounds: &[Duration]) -> Result<BlockMap, InvalidArgument>;
    }
}

// Numbering.

impl<M: Mode> BlockPool<M> {
    /// Gives a registration its final number. The content can be found from here on.
    ///
    /// Of several threads that register the same content exactly one learns that it is the first, and
    /// its block is the one that hits. A number is drawn after the entry stands, by the registering
    /// thread or one that helps it. So whoever draws a later number sees the entry, and numbers it
    /// before it compares. If that comes in time, the helped registration is the later one after all.
    pub(super) fn number(&self, block: &Block, open: u64) {
        block.number_registration::<M>(open, self.contents.next_seq::<M>());
    }

    pub(super) fn number_others(&self, spot: Spot, content: &Content, epoch: Epoch) {
        self.index.for_each_candidate(spot, |id| {
            let block = self.block(id);
            if let Some(open) = block.matches_open(content, epoch) {
                self.number(block, open);
            }
        });
    }
}
