//! Which block goes next.
//!
//! Free blocks of the default class stand in one LRU line, or with [`EvictionPolicy::ReuseQueue`] in one for
//! each [`Queue`]; the pool looks at their oldest blocks alone and takes the one of the lowest [`Rank`]. How a
//! block is taken, from whichever line, is the pool's affair (`pool/take.rs`).
//!
//! **Reuse-queue.** Blocks in a queue have much the same chance to be used again: those of a conversation's
//! first turn, of its second, and so on, and those on a prefix that several conversations share. For each queue
//! the policy counts how long blocks waited until they were used again, or were given up (`reuse.rs`). From
//! that follows, for a block that has waited for so long, the most hits for the time that it is kept
//! (`scores.rs`): the Gittins index of its reuse. While LRU would have hit as much (`trial.rs`), the oldest goes.
//!
//! A score never rises with age, and the shared prefixes have the highest of all queues. A prefix is released
//! after what follows it and mostly outlives it, therefore, as with one line; nothing relies on that.
//!
//! All of it is bounded, and O(1) in the number of cached blocks. Its words are atomics that order nothing: from
//! several threads a count or a mark may be lost, and the order of eviction is then another, as good one.

mod ages;
mod names;
mod reuse;
mod scores;
mod tick;
mod trial;
mod turns;

use std::time::Duration;

use crate::clock::Clock;
use crate::id::{BlockHash, BlockId};
use crate::sync::{AtomicU32, AtomicU64, Ordering::Relaxed};
use crate::zeroed::Zeroed;

pub(crate) use names::Names;
pub use names::{Chain, NameBlocks};
pub use tick::Tick;
pub use turns::Turn;

/// The order in which free blocks of the default class are evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum EvictionPolicy {
    /// The one that was not used for the longest time.
    #[default]
    Lru,
    /// The one with the fewest hits to be expected for the time that it would be kept.
    ReuseQueue,
}

/// An LRU line of the default class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Queue(u8);

impl Queue {
    /// How many queues there are.
    pub const COUNT: usize = 7;

    /// Blocks on a prefix that several conversations share.
    pub const SHARED: Self = Self(Self::COUNT as u8 - 1);

    /// The queue at `index`, below [`Self::COUNT`].
    #[must_use]
    pub const fn new(index: u8) -> Self {
        assert!((index as usize) < Self::COUNT);
        Self(index)
    }

    /// The queue of blocks that a conversation's turn used last.
    #[must_use]
    pub const fn of_turn(turn: Turn) -> Self {
        Self(match turn.get() {
            0..=1 => 0,
            2 => 1,
            3 => 2,
            4..=5 => 3,
            6..=9 => 4,
            _ => 5,
        })
    }

    /// The queue's number.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// All queues.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..Self::COUNT as u8).map(Self)
    }
}

/// How soon a block goes: the lowest of all first. No two queues' blocks have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank(u64);

impl Rank {
    /// After all others.
    pub const LAST: Self = Self(u64::MAX);

    /// By score; of several with one score the oldest, and of those the one of the first queue.
    fn new(score: f32, age: u32, queue: Queue) -> Self {
        const MOST: u32 = u32::MAX >> 4;
        // The bits of floats that are not negative are in the order of the floats.
        let youth = u64::from(MOST - age.min(MOST));
        Self(u64::from(score.to_bits()) << 32 | youth << 4 | queue.index() as u64)
    }
}

/// Blocks whose children are remembered, for each block of the pool: those that were evicted may come back.
const CHILDREN: usize = 4;

/// Blocks on a branched prefix, instead of the one child that a block is known to have.
const SEVERAL: u32 = u32::MAX;

/// What [`EvictionPolicy::ReuseQueue`] knows.
pub struct ReuseQueue {
    clock: Clock,
    /// When each block joined its line.
    stamps: Zeroed<AtomicU32>,
    /// `name:32 | child:32`: what was seen to follow a block, or [`SEVERAL`]. A table in which a newer block takes
    /// the place of an older one.
    children: Zeroed<AtomicU64>,
    turns: turns::Turns,
    reuse: reuse::Reuse,
    trial: trial::Trial,
    scores: scores::Scores,
    requests: AtomicU64,
}

impl std::fmt::Debug for ReuseQueue {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("ReuseQueue").finish_non_exhaustive()
    }
}

impl ReuseQueue {
    /// Requests between two looks at the counts.
    const INTERVAL: u64 = 32;

    /// For a pool of up to `max_blocks`; None when there is no memory.
    #[must_use]
    pub fn new(max_blocks: usize, clock: Clock) -> Option<Self> {
        Some(Self {
            clock,
            stamps: Zeroed::new(max_blocks)?,
            children: Zeroed::new((CHILDREN * max_blocks).next_power_of_two())?,
            turns: turns::Turns::new()?,
            reuse: reuse::Reuse::new(max_blocks)?,
            trial: trial::Trial::new(max_blocks as f64 / reuse::one_in(max_blocks) as f64)?,
            scores: scores::Scores::new()?,
            requests: AtomicU64::new(0),
        })
    }

    /// Sets the time of the clock.
    pub fn set_time(&self, now: Duration) {
        self.clock.set(now);
    }

    /// The time now.
    #[must_use]
    pub fn now(&self) -> Tick {
        Tick::of(&self.clock)
    }

    /// A request asks for these blocks, all that its tokens fill: which turn of its conversation it is.
    pub fn begin(&self, hashes: &[BlockHash]) -> Turn {
        let now = self.now();
        self.reuse.used(hashes, now, |queue, age| self.trial.used(queue, age));
        // Relaxed, as everywhere here: see the module.
        if self.requests.fetch_add(1, Relaxed) % Self::INTERVAL == Self::INTERVAL - 1 {
            self.update(now);
        }
        self.turns.turn_of(hashes)
    }

    /// Learns from the waits so far. The scores are 0, so that the oldest block goes, while that hits as much.
    fn update(&self, now: Tick) {
        let waiting = self.reuse.waiting(now);
        let scores = scores::scores(&self.reuse.take_counts(&waiting));
        let yields = self.trial.update(&scores, &waiting);
        self.scores.set(if yields { &scores::NONE } else { &scores });
    }

    /// How many leading blocks of a request lie on a prefix that several conversations share.
    pub fn count_shared(&self, hashes: &[BlockHash]) -> usize {
        let mut shared = 0;
        for (index, two) in hashes.windows(2).enumerate() {
            let name = word(&two[0]);
            let slot = &self.children[name as usize & (self.children.len() - 1)];
            let (known, child) = (slot.load(Relaxed), child_mark(&two[1]));
            let name = name >> 32 << 32;
            if known & !u64::from(SEVERAL) != name {
                slot.store(name | u64::from(child), Relaxed);
            } else if known as u32 != child {
                slot.store(name | u64::from(SEVERAL), Relaxed);
                shared = index + 1;
            }
        }
        shared
    }

    /// A request is over: its blocks, of which `shared` are shared, can be used again. Its prompt filled
    /// `num_prompt` of them.
    pub fn end(&self, hashes: &[BlockHash], turn: Turn, num_prompt: usize, shared: usize) {
        let (head, tail) = hashes.split_at(shared.min(hashes.len()));
        let now = self.now();
        self.reuse.released(head, Queue::SHARED, now);
        self.reuse.released(tail, Queue::of_turn(turn), now);
        self.turns.ended(&hashes[..num_prompt.min(hashes.len())], turn);
        self.turns.ended(hashes, turn);
    }

    /// A block joins its line.
    #[inline]
    pub fn stamp(&self, block: BlockId, now: Tick) {
        self.stamps[block.index()].store(now.get(), Relaxed);
    }

    /// A block takes the place of another in its line.
    pub fn take_place(&self, from: BlockId, to: BlockId) {
        let stamp = self.stamps[from.index()].load(Relaxed);
        self.stamps[to.index()].store(stamp, Relaxed);
    }

    /// How often the scores may have changed: while this and the time are the same, so are all ranks.
    #[must_use]
    pub fn num_updates(&self) -> u64 {
        self.requests.load(Relaxed) / Self::INTERVAL
    }

    /// The rank of a block that stands in `queue`.
    #[inline]
    pub fn rank(&self, queue: Queue, block: BlockId, now: Tick) -> Rank {
        let age = now.since(Tick::new(self.stamps[block.index()].load(Relaxed)));
        Rank::new(self.scores.of(queue, age), age, queue)
    }
}

/// What a block is known by to the one before it: never 0 or [`SEVERAL`].
fn child_mark(hash: &BlockHash) -> u32 {
    ((word(hash) >> 32) as u32).clamp(1, SEVERAL - 1)
}

/// The first bytes of a hash.
#[inline]
fn word(hash: &BlockHash) -> u64 {
    let (words, _) = hash.as_bytes().as_chunks::<8>();
    u64::from_le_bytes(words[0])
}
