//! The seam between the cache and its block pool.
//!
//! The rules below are those of a pool that one thread drives; the `PlainPool` of `prefixcache-oracle`
//! is their obvious form. From several threads each block's history follows the same rules.
//!
//! **Free order.** Free blocks stand in one line, handed out from its front: pinned blocks whose epoch
//! has ended, as nothing else would ever take them out, then blocks without content, then the regular
//! tier, then the pinned tier, each tier oldest first. A fresh pool's line is
//! 1, 2, 3, ... With [`FreeOrder::UnhashedFirst`] (vLLM since #42656) a released block without a
//! valid hash joins the front of the line, in the order given to `release`, so that the first of
//! them is handed out next; a hashed block joins the end of its tier. With [`FreeOrder::Append`]
//! every released block joins the end of its tier (the regular one for a block without a hash).
//!
//! With [`EvictionPolicy::ReuseQueue`] the regular tier is one line for each queue, and the block of the lowest
//! [`Rank`](crate::policy::Rank) among their oldest ones is handed out next.
//!
//! **Duplicates.** Several blocks may hold the same key. The one registered first hits; when it loses its
//! hash the next one hits. Where [`MAX_COPIES`] or more hold a key already, a registration takes the
//! last registered free copy of the regular tier, but for the first of all, out of the index: that one
//! keeps its hash and its place in line, and hits no more. A copy that is held is never taken out.
//!
//! **Pins** are of content: the copy that hits has it, whichever copy was named. Copies registered later
//! are not pinned and age like others, so that a prompt asked for again and again fills no tier. Nobody
//! holds a block by pinning it.
//!
//! **Retiring.** `resize` below a block's id retires it: it loses its hash at once, a free one
//! leaves the line at once, a held one when its last holder releases it.
//!
//! **Leaving.** A shrink that keeps what is worth most begins with `begin_moves`: from then on blocks from its
//! size on are leaving. They are handed out no more and do not count as free; one without content stands in no
//! line. One with content keeps its place, can be hit, and comes back to the line at its release. At the front
//! of the line it is dropped by whoever takes what follows. Moves carry the last of them in the order to
//! blocks below that go first, until none below goes before any of them; `resize` ends it or takes it back.

use std::collections::HashMap;
use std::iter;
use std::time::Duration;

use crate::backing::{BackingStore, KeptBlock, KeptHint};
use crate::band::Band;
use crate::clock::Clock;
use crate::error::{Broken, Exhausted, InvalidArgument, ListenError, Misuse, ResizeError, require};
use crate::events::{BlockTokens, EventLog, EventReader};
use crate::id::{BlockId, BlockKey, Epoch, MAX_BLOCKS};
use crate::policy::{EvictionPolicy, Queue, ReuseQueue, Tick};
use crate::sync::Arc;

/// Copies of a key that are found one after the other before free ones are taken out of the index.
pub const MAX_COPIES: usize = if cfg!(loom) { 2 } else { 32 };

/// Where a released block without a valid hash goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FreeOrder {
    /// To the front: it is reused before any cached block (vLLM since #42656).
    #[default]
    UnhashedFirst,
    /// To the end, as every other block (vLLM before #42656).
    Append,
}

/// The size and order of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolConfig {
    /// Blocks, the null block counted.
    pub num_blocks: usize,
    /// The most blocks that `resize` may ever reach, the null block counted.
    pub max_blocks: usize,
    /// Where released blocks go.
    pub free_order: FreeOrder,
    /// Which free block of the default class is evicted first.
    pub eviction_policy: EvictionPolicy,
}

impl PoolConfig {
    /// A pool of a fixed size in the default order.
    #[must_use]
    pub fn new(num_blocks: usize) -> Self {
        Self {
            num_blocks,
            max_blocks: num_blocks,
            free_order: FreeOrder::default(),
            eviction_policy: EvictionPolicy::default(),
        }
    }

    /// This, but a pool that `resize` may take up to `max_blocks`, the null block counted.
    #[must_use]
    pub fn with_max_blocks(self, max_blocks: usize) -> Self {
        Self { max_blocks, ..self }
    }

    /// This, in another order of released blocks.
    #[must_use]
    pub fn with_free_order(self, free_order: FreeOrder) -> Self {
        Self { free_order, ..self }
    }

    /// This, under another eviction policy.
    #[must_use]
    pub fn with_eviction_policy(self, eviction_policy: EvictionPolicy) -> Self {
        Self { eviction_policy, ..self }
    }

    /// Fails unless both sizes are within their limits.
    pub fn check(&self) -> Result<(), InvalidArgument> {
        require(self.max_blocks <= MAX_BLOCKS, "max_blocks", || {
            format!("must be at most {MAX_BLOCKS}, not {}", self.max_blocks)
        })?;
        self.check_num_blocks(self.num_blocks)
    }

    /// Fails unless a pool of this configuration may have `num_blocks` blocks.
    pub fn check_num_blocks(&self, num_blocks: usize) -> Result<(), InvalidArgument> {
        let most = self.max_blocks;
        require((2..=most).contains(&num_blocks), "num_blocks", || {
            format!(
                "must be from 2 (the null block and one more) to {most} (max_blocks), not {num_blocks}"
            )
        })
    }
}

/// Content on its way from one block to another: see [`BlockStore::begin_moves`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Move {
    /// Where it is.
    pub from: BlockId,
    /// Where it will be; its caller holds that block.
    pub to: BlockId,
    /// What it is.
    pub key: BlockKey,
    /// When it was registered.
    pub epoch: Epoch,
}

impl Move {
    /// The content of `key`, registered in `epoch`, on its way.
    #[must_use]
    pub const fn new(from: BlockId, to: BlockId, key: BlockKey, epoch: Epoch) -> Self {
        Self { from, to, key, epoch }
    }
}

/// The moves of one shrink. To be begun, finished and aborted with the same pool.
#[derive(Debug, Default)]
pub struct Moves {
    /// Those that were begun and neither finished nor aborted.
    pub(crate) in_flight: Vec<Move>,
    pub(crate) plan: Plan,
}

impl Moves {
    /// Those that were begun and neither finished nor aborted.
    #[must_use]
    pub fn in_flight(&self) -> &[Move] {
        &self.in_flight
    }

    /// Whether moves to `num_blocks` of a pool of `most` blocks may begin.
    pub(crate) fn check_begin(
        &self,
        config: &PoolConfig,
        num_blocks: usize,
        most: usize,
    ) -> Result<(), ResizeError> {
        config.check_num_blocks(num_blocks)?;
        if !self.in_flight.is_empty() {
            return Err(ResizeError::Moving);
        }
        require(num_blocks <= most, "num_blocks", || {
            format!("must be at most {most}, the blocks that there are, not {num_blocks}")
        })?;
        Ok(())
    }
}

impl sealed::Inner for Moves {
    type Inner = Vec<Move>;

    fn inner_mut(&mut self) -> &mut Vec<Move> {
        &mut self.in_flight
    }
}

/// What a pool knows of a shrink from the slice before.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Cached blocks that are to leave, what goes first of them first.
    pub(crate) leaving: Vec<BlockId>,
    /// What the plan was made from: while it is the same, no leaving block stands further back in line.
    pub(crate) made_from: Option<(u64, Tick, u64)>,
}

/// What happened to content with a band.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HintedChange {
    /// The block has it no more.
    Evicted(BlockId),
    /// It is in another block.
    Moved {
        /// Where it was.
        from: BlockId,
        /// Where it is.
        to: BlockId,
    },
}

/// What is noted of a block's content: what ended with it, or went on behind it. A lost mark changes what is evicted
/// first, and nothing else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks(pub(crate) u16);

impl Marks {
    /// None of them.
    pub const NONE: Self = Self(0);
    /// A prompt ended here.
    pub const PROMPT: Self = Self(1);
    /// An answer ended here.
    pub const ANSWER: Self = Self(2);
    /// A request went on from here.
    pub const PASSED: Self = Self(4);

    /// Both of these.
    #[must_use]
    pub const fn and(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    /// Whether all of `others` are among these.
    #[must_use]
    pub const fn has(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }
}

/// What became of a registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub enum Registration {
    /// The block is the first to hold the key, and hits from now on.
    New,
    /// The block held the key already; nothing changed.
    Already,
    /// Registered too, but this other block holds the same key and is the one that hits.
    Duplicate(BlockId),
    /// Nothing was registered: the index was cleared since `epoch`, or the block is retired.
    Stale,
}

/// What a pool can tell of itself. Counts are of its whole life, the rest is of now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreStats {
    /// Blocks that lost a valid hash because they were handed out again, given up, or left the pool.
    pub evictions: u64,
    /// Blocks handed out without their content: new ones and recycled ones.
    pub allocations: u64,
    /// Blocks taken with their content, as hits.
    pub touches: u64,
    /// Blocks that were pinned, each time again.
    pub pins: u64,
    /// Pinned blocks that were moved to the regular tier.
    pub demotions: u64,
    /// Those of the evictions whose block was pinned.
    pub pinned_evictions: u64,
    /// Those of the touches whose block was pinned.
    pub pinned_hits: u64,
    /// Blocks whose content was moved to another when the pool shrank.
    pub moved: u64,
    /// Those of the evictions that a shrinking pool had no room for.
    pub lost_to_resize: u64,
    /// Blocks that hold a hash of the current epoch, in use or free.
    pub cached: usize,
    /// Blocks that somebody holds, those that leave the pool at release included.
    pub in_use: usize,
    /// Those of them that a shrink is waiting for, or that have left the pool but for their holders.
    pub held_above: usize,
    /// Blocks that nobody holds and that may be handed out, the cached ones included.
    pub free: usize,
    /// Blocks that a pin keeps, held or free; one whose band is evicted even later keeps its pin for the end of that,
    /// and does not count. Where the index was cleared since, a block has it until it is handed out or loses its
    /// content.
    pub pinned: usize,
    /// Free blocks of the pinned tier.
    pub pinned_free: usize,
}

/// What keeps the traits of this module to this repository: they grow with the pool.
#[doc(hidden)]
pub mod sealed {
    /// Implemented by the pools of this repository alone.
    pub trait Sealed {}

    /// What this repository's tests change past the promises of what is around it.
    pub trait Inner {
        /// What is inside.
        type Inner;

        /// It, to change.
        fn inner_mut(&mut self) -> &mut Self::Inner;
    }
}

/// A pool of blocks, as everybody may look at it.
pub trait Lookup: sealed::Sealed {
    /// Whether nobody can change the pool while it is borrowed: this is its only writer.
    fn is_at_rest(&self) -> bool {
        false
    }

    /// The block that hits for `key`, held or free. A retired or recycled block never hits.
    fn lookup(&self, key: &BlockKey) -> Option<BlockId>;

    /// How many of the leading `keys` hit.
    fn count_leading(&self, keys: impl Iterator<Item = BlockKey> + Clone) -> usize {
        keys.take_while(|key| self.lookup(key).is_some()).count()
    }

    /// Whether of two keys that one request held in this epoch, the one that comes first in it is evicted
    /// last: then the hits of a prompt can be counted by bisection.
    ///
    /// With one writer and [`EvictionPolicy::Lru`] that is so until content is pinned of which there are
    /// duplicates, [unpinned](BlockStore::unpin), given a lower band, or lost to a
    /// [`resize`](BlockStore::resize) out of the order, or a caller [says so](BlockStore::end_order). What was
    /// [not needed](BlockStore::release_unneeded) does not count.
    fn evicts_in_order(&self) -> bool {
        false
    }

    /// The clock that all that belongs to the pool goes by.
    fn clock(&self) -> &Clock;

    /// The current epoch.
    fn epoch(&self) -> Epoch;

    /// Blocks of the pool, the null block counted.
    fn num_blocks(&self) -> usize;

    /// Blocks that nobody holds.
    fn num_free(&self) -> usize;

    /// Lifetime counts, and blocks by state.
    fn stats(&self) -> StoreStats;
}

fn needs_one_writer(reason: &str) -> ListenError {
    let reason = format!("must be \"single_writer\": {reason}");
    InvalidArgument::new("threads", reason).into()
}

/// A pool that other threads may look at while it changes.
pub trait WithReaders: BlockStore {
    /// The pool for other threads.
    type Reader: Lookup;

    /// The pool, for another thread to look at, in parallel with those that change it.
    #[must_use]
    fn reader(&self) -> Self::Reader;
}

/// A pool of blocks that are handed out, counted, given back, and found again by their content, for one who
/// may change it.
pub trait BlockStore: Lookup {
    /// Takes the blocks of the leading `keys` that hit, then `num_new` blocks from the front of the
    /// free line, all or none, and appends them to `out` in that order. Returns how many hits were
    /// taken: fewer than `keys` where one of them hits no more.
    ///
    /// A free hit counts against the free blocks as a new block does. The hits are taken before the
    /// new blocks are chosen, so a new block is never one of the hits.
    fn commit(
        &mut self,
        keys: impl ExactSizeIterator<Item = BlockKey> + Clone,
        num_new: usize,
        out: &mut Vec<BlockId>,
    ) -> Result<usize, Exhausted>;

    /// Takes `count` blocks from the front of the free line, all or none, and appends them to `out`.
    /// A block that is handed out again loses its hash and its pin.
    fn allocate(&mut self, count: usize, out: &mut Vec<BlockId>) -> Result<(), Exhausted> {
        self.commit(iter::empty(), count, out).map(|_| ())
    }

    /// Says that a batch of registrations begins. Changes nothing but the time that they are remembered by.
    fn begin_registrations(&mut self) {}

    /// The next block whose content was evicted, or came from another block, while the content's band was not the default
    /// one: whoever gives bands has to forget it. Each change is reported once.
    fn take_hinted_change(&mut self) -> Option<HintedChange> {
        None
    }

    /// Says that `key` will be registered soon, so that its place may be fetched. Changes nothing.
    fn prefetch(&mut self, _key: &BlockKey) {}

    /// Lets a held block be found under `key`, unless the index was cleared since `epoch`, which is
    /// the value of [`Lookup::epoch`] from before the block was allocated.
    fn register(
        &mut self,
        block: BlockId,
        key: BlockKey,
        epoch: Epoch,
    ) -> Result<Registration, Misuse>;

    /// What KV events report of a block that was registered, for a [backing store](crate::backing).
    fn keep_tokens(&mut self, _block: BlockId, _tokens: BlockTokens<'_>) {}

    /// Who asked for a priority that a block has or gets next, for a [backing store](crate::backing).
    fn keep_hint(&mut self, _block: BlockId, _band: Band, _hint: KeptHint) {}

    /// Gives up one hold of each block; a block whose last hold goes joins the free line, in the
    /// order given here (so callers pass the tail of a request first).
    ///
    /// At a block that cannot be released it stops: those before it are released, the rest is not.
    fn release(&mut self, blocks: &[BlockId]) -> Result<(), Misuse>;

    /// [`release`](Self::release), but blocks of the regular tier with content join this queue of it, where
    /// the eviction policy has several; by `release` they join the one that they stood in before.
    fn release_to(&mut self, blocks: &[BlockId], queue: Queue) -> Result<(), Misuse>;

    /// [`release`](Self::release), but content that has no priority and no pin is evicted before all other:
    /// what is behind a window, or a second copy. Whoever hits it ends that, and `release` puts it in the first queue.
    fn release_unneeded(&mut self, blocks: &[BlockId]) -> Result<(), Misuse>;

    /// Says whether a [backing store](crate::backing) may let other processes find what is registered from now on.
    fn set_durable(&mut self, _durable: bool) {}

    /// Notes more of the content of a block that the caller holds.
    fn mark(&mut self, block: BlockId, marks: Marks);

    /// Forgets every hash, in constant time. Held blocks stay held, free blocks keep their places.
    fn clear_index(&mut self);

    /// Pins the content of held blocks: the copy of each that hits joins the pinned tier, which is
    /// evicted last, at its release, or at once if it is free. A block without a valid hash is passed
    /// over. Returns how many pins are new.
    ///
    /// A pin lasts through hits and releases until `unpin`, `demote`, or the loss of the hash. Stops
    /// at a block that nobody holds, as `release` does.
    fn pin(&mut self, blocks: &[BlockId]) -> Result<usize, Misuse>;

    /// Takes the pins off held blocks and off all copies of their content. Returns how many were pinned.
    /// Stops as `pin` does.
    fn unpin(&mut self, blocks: &[BlockId]) -> Result<usize, Misuse>;

    /// Takes the pins off the oldest `count` free blocks of the pinned tier, oldest first; each moves to the
    /// end of its band's line. Returns how many there were.
    fn demote(&mut self, count: usize) -> usize;

    /// Gives the copy that hits for `key` this band; a free one that has to stand in another line moves to
    /// the end of that. Returns whether there is one. A band lasts through hits and releases until
    /// the loss of the hash.
    ///
    /// `held` is a block that the caller holds; it costs less where that is the copy. The pool for many writers has no
    /// bands: there nothing happens, and none is said to be there.
    fn set_band(&mut self, _key: &BlockKey, _held: BlockId, _band: Band) -> bool {
        false
    }

    /// Says that content may be evicted before what follows it in its prompt, from now to the end of the epoch: see
    /// [`Lookup::evicts_in_order`].
    fn end_order(&mut self) {}

    /// Sets the number of blocks, the null block counted. Growing puts the blocks that are neither
    /// held nor free at the front of the free line, lowest id first. Returns how many blocks above
    /// the new size are still held; they retire at their release.
    ///
    /// Refused while another thread is inside a call that changes the pool. Lookups run in parallel with it.
    fn resize(&mut self, num_blocks: usize) -> Result<usize, ResizeError>;

    /// Begins one slice of a shrink to `num_blocks`: up to `most` cached blocks from there on that are worth
    /// more than others below, the most worth first, each with the one below that goes first.
    ///
    /// From the first such call on, blocks from `num_blocks` on are handed out no more; those with content
    /// stay in line and can be hit. The blocks that content moves to are held until
    /// [`finish_moves`](Self::finish_moves) or [`abort_moves`](Self::abort_moves), and lose what they had.
    /// Between the two the caller copies the KV of each `from` to its `to`. Where nothing is left to move,
    /// what remains above is held, or goes before all that stays: [`resize`](Self::resize) ends the shrink,
    /// or takes it back.
    ///
    /// Refused while another thread writes, and before the moves of the call before were finished or aborted.
    fn begin_moves(
        &mut self,
        num_blocks: usize,
        most: usize,
        moves: &mut Moves,
    ) -> Result<(), ResizeError>;

    /// Lets the content of each move be found where it was copied to, in the same place of the eviction
    /// order, and takes it from where it was. Returns how many moved. One whose block was taken, or lost its
    /// content, since is left as it is.
    ///
    /// Refused while another thread writes; the moves stay in flight then.
    fn finish_moves(&mut self, moves: &mut Moves) -> Result<usize, ResizeError>;

    /// Gives the moves up: content stays where it is.
    fn abort_moves(&mut self, moves: &mut Moves) -> Result<(), Misuse> {
        let to: Vec<BlockId> = moves.in_flight.drain(..).map(|one| one.to).collect();
        // What was to be moved is to be moved yet.
        moves.plan.made_from = None;
        self.release(&to)
    }

    /// Gives up the content of the `count` free blocks that would lose it first. Returns how many there were.
    fn release_cached(&mut self, count: usize) -> usize;

    /// Bounds the blocks that stand in the tiers: what is above goes at each release, and now, in the
    /// eviction order.
    fn set_max_cached(&mut self, blocks: Option<usize>);

    /// Says whether releases leave more than [`set_max_cached`](Self::set_max_cached) allows, for
    /// [`keep_bound`](Self::keep_bound) or the first release afterwards to evict.
    fn defer_bound(&mut self, defers: bool);

    /// Evicts what is above the bound of [`set_max_cached`](Self::set_max_cached), as a release does.
    fn keep_bound(&mut self);

    /// Sets the time of the [clock](Lookup::clock), and ends the use of the system's: with times that are given,
    /// the same calls have the same outcome.
    fn set_time(&mut self, now: Duration) {
        self.clock().set(now);
    }

    /// Reports to the reader, from now on, blocks of `block_size` tokens that can be found and cannot any more.
    /// What another process has kept comes first. Once in a pool's life, before anything else is cached, and for one
    /// writer, whose changes have an order.
    fn keep_events(&mut self, _block_size: usize) -> Result<EventReader, ListenError> {
        Err(needs_one_writer("the changes of several writers have no order"))
    }

    /// Restores the content that `store` has kept, in the order of eviction, and reports to it from now on.
    ///
    /// Once in a pool's life, before its first use, and for one writer. All or nothing: it fails for a block that the
    /// pool does not have or that is listed twice. Returns how many blocks were restored.
    fn keep_in(
        &mut self,
        _store: Arc<dyn BackingStore>,
        _kept: &[KeptBlock],
    ) -> Result<usize, ListenError> {
        Err(needs_one_writer("what several writers publish is kept in no file"))
    }

    /// Whether more than `most` of the blocks that hold these `keys` are still to be read before they can be hit:
    /// see [`BackingStore::reads_first`].
    fn reads_first(&self, _keys: impl Iterator<Item = BlockKey>, _most: usize) -> bool {
        false
    }

    /// [`lookup`](Lookup::lookup) of a key that was registered with `held`, which the caller holds: no look into the
    /// index where that is the only copy. The null block stands for none.
    fn lookup_held(&self, key: &BlockKey, _held: BlockId) -> Option<BlockId> {
        self.lookup(key)
    }

    /// The key that a block with content is found by.
    fn key_of(&self, block: BlockId) -> BlockKey;

    /// The band of the copy that hits for `key`, whether it is pinned or not.
    fn band(&self, key: &BlockKey) -> Option<Band> {
        self.lookup(key).map(|hit| self.held_band(hit))
    }

    /// The band of a block's content, whether it is pinned or not.
    fn held_band(&self, _block: BlockId) -> Band {
        Band::DEFAULT
    }

    /// What was noted of a block's content.
    fn marks(&self, block: BlockId) -> Marks;

    /// What the eviction policy knows, where that is [`EvictionPolicy::ReuseQueue`].
    fn reuse_queue(&self) -> Option<&ReuseQueue>;

    /// Where changes of what can be found are reported, if somebody wants to know.
    fn event_log(&self) -> Option<&EventLog> {
        None
    }

    /// The free line, the block to be handed out next first. For debugging and tests.
    fn free_order(&self) -> Vec<BlockId>;

    /// The blocks that hold a valid hash, lowest id first. For debugging and tests.
    fn cached_blocks(&self) -> Vec<BlockId>;

    /// How many hold the block. For debugging and tests.
    fn num_holders(&self, block: BlockId) -> usize;

    /// Checks that each block is held as often as `holds`, all holds that there are, name it.
    fn validate_holds(&self, holds: impl IntoIterator<Item = BlockId>) -> Result<(), Broken> {
        let mut counts: HashMap<BlockId, usize> = HashMap::new();
        for id in holds {
            *counts.entry(id).or_default() += 1;
        }
        if let Some((id, count)) = counts.iter().find(|&(&id, &n)| self.num_holders(id) != n) {
            let held = self.num_holders(*id);
            return Err(Broken(format!("block {id} counts {held} holders, {count} hold it")));
        }
        let (held, counted) = (counts.len(), self.stats().in_use);
        if held != counted {
            return Err(Broken(format!("{counted} blocks are in use, {held} are held")));
        }
        Ok(())
    }

    /// Checks every invariant of the whole structure, which must be at rest.
    fn validate(&self) -> Result<(), Broken>;
}
