//! Content that blocks lose, reported to whoever listens.
//!
//! Nothing of this exists until somebody listens ([`Evictions::listen`]): then an array
//! remembers when each block's content came and was used, and every block that loses content of the current
//! epoch leaves one [`Eviction`] in a bounded log. Any thread takes them out of it, in parallel with those that change
//! the pool. A full log takes no more: what was not reported is counted.

mod gaps;
mod log;

use std::time::Duration;

use crate::band::Band;
use crate::clock::Clock;
use crate::error::{InvalidArgument, ListenError, require};
use crate::id::{BlockHash, BlockId, BlockKey, GroupId};
use crate::records::Content;
use crate::sync::{AtomicU32, AtomicU64, OnceLock, Ordering::Relaxed};
use crate::zeroed::{Zeroable, Zeroed};

pub use gaps::ReuseGaps;

/// Why a block lost its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Cause {
    /// It was handed out for other content, as the first in the order of eviction.
    Evicted,
    /// It was handed out for other content before all other, as its last holder needed it no more.
    Discarded,
    /// Its last holder released it and there was no place in line; see
    /// `content_drops` of a pool.
    Dropped,
    /// The pool shrank below it.
    Resized,
    /// More blocks stood in line than may: see [`set_max_cached`](crate::BlockStore::set_max_cached).
    Bounded,
}

impl Cause {
    const ALL: [Self; 5] =
        [Self::Evicted, Self::Discarded, Self::Dropped, Self::Resized, Self::Bounded];
}

/// A block that lost its content.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub struct EvictedBlock {
    /// The hash of the content.
    pub hash: BlockHash,
    /// The group that the block belonged to.
    pub group: GroupId,
    /// Why it went.
    pub cause: Cause,
    /// The band of its priority.
    pub band: Band,
    /// How often the content was hit, as far as somebody listened.
    pub hits: u32,
    /// How long ago the content was registered, or the listening began.
    pub age: Duration,
    /// How long ago the last holder gave it up, or the listening began; 0 if it was held.
    pub idle: Duration,
    /// Whether no other block has the content any more. When several threads evict copies at the same time,
    /// each of them may say so; at least one does.
    pub is_last: bool,
}

impl EvictedBlock {
    /// The last block with a content, at once, without a priority or a hit.
    #[must_use]
    pub fn new(key: BlockKey, cause: Cause) -> Self {
        Self {
            hash: key.hash,
            group: key.group,
            cause,
            band: Band::DEFAULT,
            hits: 0,
            age: Duration::ZERO,
            idle: Duration::ZERO,
            is_last: true,
        }
    }
}

/// What was evicted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Eviction {
    /// The content of one block.
    Block(EvictedBlock),
    /// Everything: the index was cleared. The blocks that it left behind are not reported one by one.
    Everything,
}

/// One block's content. Its times are in microseconds of the pool's clock; 0 before the listening began.
///
/// Words that order nothing (Relaxed): a block's are written by who claims it or holds it, and read by who has it
/// alone, and the block's state orders those.
#[derive(Default)]
struct Metadata {
    born: AtomicU64,
    used: AtomicU64,
    hits: AtomicU32,
}

// SAFETY: zero is a valid value of every atomic integer, and its default; none has a destructor.
unsafe impl Zeroable for Metadata {}

/// The most evictions that a log may hold: 4 GiB of them.
const MAX_CAPACITY: usize = 1 << 26;

pub(crate) fn check_rising(name: &'static str, bounds: &[Duration]) -> Result<(), InvalidArgument> {
    let rises = bounds.is_sorted_by(|bound, next| bound < next);
    require(rises, name, || "must rise from each to the next")
}

/// What a pool reports of evictions, to one listener. From any thread, in parallel with those that change the pool, none
/// of which waits.
pub struct Evictions {
    log: OnceLock<EvictionLog>,
    clock: Clock,
    max_blocks: usize,
}

impl Evictions {
    /// Of a pool of up to `max_blocks`, to which nobody listens yet.
    pub(crate) fn new(max_blocks: usize, clock: Clock) -> Self {
        Self { log: OnceLock::new(), clock, max_blocks }
    }

    /// Keeps a log of evictions from now on, of up to `capacity` blocks rounded up to a power of two,
    /// and counts of the gaps between uses, by bounds that rise. Once in a pool's life; costs 64 bytes of memory an
    /// eviction and 24 a block, once they are touched.
    pub fn listen(&self, capacity: usize, gap_bounds: &[Duration]) -> Result<(), ListenError> {
        let log = EvictionLog::new(capacity, gap_bounds, self.max_blocks, &self.clock)?;
        self.log.set(log).map_err(|_| ListenError::Twice)
    }

    /// Takes up to `most` evictions out of the log, the oldest first; nothing where nobody listens.
    pub fn take(&self, most: usize, out: &mut Vec<Eviction>) {
        if let Some(log) = self.log() {
            out.extend(std::iter::from_fn(|| log.log.pop()).take(most).map(unpack));
        }
    }

    /// Evictions for which the log had no room.
    #[must_use]
    pub fn missed(&self) -> u64 {
        self.log().map_or(0, |log| log.log.missed())
    }

    /// How long content waited between its uses; empty where nobody listens.
    #[must_use]
    pub fn reuse_gaps(&self) -> ReuseGaps {
        self.log().map(|log| log.gaps.counts()).unwrap_or_default()
    }

    /// What is remembered where somebody listens.
    #[inline]
    pub(crate) fn log(&self) -> Option<&EvictionLog> {
        self.log.get()
    }

    /// The same, for a call that begins: it goes by the time of now.
    pub(crate) fn log_now(&self) -> Option<&EvictionLog> {
        let log = self.log()?;
        // Relaxed: a time that is read late makes an age inexact by the length of a call.
        log.now.store(self.clock.micros(), Relaxed);
        Some(log)
    }

    /// For how long nobody has used each block's content, where somebody listens.
    pub(crate) fn idle_times(&self) -> Option<impl Fn(BlockId) -> Duration> {
        let (log, now) = (self.log()?, self.clock.micros());
        Some(move |id| Duration::from_micros(log.passed(&log.block(id).used, now)))
    }
}

/// What a listener's pool remembers.
pub(crate) struct EvictionLog {
    log: log::Log,
    blocks: Zeroed<Metadata>,
    gaps: gaps::Gaps,
    /// When the listening began, in microseconds: of what was before nothing is known.
    since: u64,
    /// The time of the batch in progress, in microseconds: the clock is read once a batch.
    now: AtomicU64,
}

impl EvictionLog {
    /// A log of `capacity` evictions, rounded up to a power of two, for a pool of up to `max_blocks`, and counts of
    /// the gaps between uses by bounds that rise.
    fn new(
        capacity: usize,
        gap_bounds: &[Duration],
        max_blocks: usize,
        clock: &Clock,
    ) -> Result<Self, ListenError> {
        require((1..=MAX_CAPACITY).contains(&capacity), "capacity", || {
            format!("must be from 1 to {MAX_CAPACITY}, not {capacity}")
        })?;
        check_rising("gap_bounds", gap_bounds)?;
        let capacity = capacity.next_power_of_two();
        let now = clock.micros();
        let log = || {
            Some(Self {
                log: log::Log::new(capacity)?,
                blocks: Zeroed::new(max_blocks)?,
                gaps: gaps::Gaps::new(gap_bounds),
                since: now,
                now: AtomicU64::new(now),
            })
        };
        log().ok_or(ListenError::OutOfMemory { capacity })
    }

    fn now(&self) -> u64 {
        self.now.load(Relaxed)
    }

    fn block(&self, id: BlockId) -> &Metadata {
        &self.blocks[id.index()]
    }

    /// How long a time of this clock is past, in microseconds up to `now`; 0 if another thread read it later.
    fn passed(&self, time: &AtomicU64, now: u64) -> u64 {
        now.saturating_sub(time.load(Relaxed).max(self.since))
    }

    /// The block, which is the caller's alone, gets content.
    pub(crate) fn registered(&self, block: BlockId) {
        let (block, now) = (self.block(block), self.now());
        block.born.store(now, Relaxed);
        block.used.store(now, Relaxed);
        block.hits.store(0, Relaxed);
    }

    /// These blocks were hit, and are held.
    pub(crate) fn hit(&self, blocks: &[BlockId]) {
        let now = self.now();
        for block in blocks.iter().map(|&block| self.block(block)) {
            self.gaps.count(self.passed(&block.used, now));
            block.used.store(now, Relaxed);
            block.hits.fetch_add(1, Relaxed);
        }
    }

    /// A holder, the last one or not, gives the block up.
    pub(crate) fn released(&self, block: BlockId) {
        self.block(block).used.store(self.now(), Relaxed);
    }

    /// Content moves from a block to another, both the caller's alone.
    pub(crate) fn moved(&self, from: BlockId, to: BlockId) {
        let (from, to) = (self.block(from), self.block(to));
        to.born.store(from.born.load(Relaxed), Relaxed);
        to.used.store(from.used.load(Relaxed), Relaxed);
        to.hits.store(from.hits.load(Relaxed), Relaxed);
    }

    /// The block, which is the caller's alone, has no content any more.
    pub(crate) fn evicted(
        &self,
        block: BlockId,
        content: Content,
        cause: Cause,
        band: Band,
        is_last: bool,
    ) {
        let (known, now) = (self.block(block), self.now());
        let (age, idle) = (self.passed(&known.born, now), self.passed(&known.used, now));
        let kind = 1 + cause as u64;
        let flags = kind << log::KIND_SHIFT | u64::from(is_last) << log::LAST_SHIFT;
        let names = (band.index() as u64) << log::BAND_SHIFT | u64::from(content.group);
        let [a, b, c, d] = content.hash;
        let facts = u64::from(known.hits.load(Relaxed)) << log::HITS_SHIFT | flags | names;
        self.log.push([a, b, c, d, facts, age, idle]);
    }

    /// The index was cleared.
    pub(crate) fn note_clear(&self) {
        self.log.push([0; log::WORDS]);
    }
}

fn unpack([a, b, c, d, facts, age, idle]: log::Words) -> Eviction {
    let kind = facts >> log::KIND_SHIFT & 7;
    let Some(&cause) = Cause::ALL.get((kind as usize).wrapping_sub(1)) else {
        return Eviction::Everything;
    };
    let content = Content { hash: [a, b, c, d], group: facts as u16 };
    let BlockKey { hash, group } = content.key();
    Eviction::Block(EvictedBlock {
        hash,
        group,
        cause,
        band: Band::all().nth((facts >> log::BAND_SHIFT & 7) as usize).unwrap_or_default(),
        hits: (facts >> log::HITS_SHIFT) as u32,
        age: Duration::from_micros(age),
        idle: Duration::from_micros(idle),
        is_last: facts >> log::LAST_SHIFT & 1 == 1,
    })
}
