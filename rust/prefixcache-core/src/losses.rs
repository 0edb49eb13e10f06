//! Content that was lost, told to whoever listens.
//!
//! Nothing of this exists until somebody listens ([`BlockPool::listen`](crate::BlockPool::listen)): then an array
//! remembers when each block's content came and was used, and every block that loses content of the current
//! epoch leaves one [`Loss`] in a bounded log. Any thread takes them out of it, beside those that change the
//! pool. A full log takes no more: what was not told is counted.

mod gaps;
mod lives;
mod log;

use std::time::Duration;

use crate::band::Band;
use crate::block::Content;
use crate::clock::Clock;
use crate::id::{BlockHash, BlockId, GroupId};
use crate::store::BlockKey;
use crate::sync::{AtomicU64, Mode, Ordering};

pub use gaps::ReuseGaps;

use Ordering::Relaxed;

/// Why a block lost its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// It was handed out for other content, as the first in the order of eviction.
    Evicted,
    /// It was handed out for other content before all other, as its last holder needed it no more.
    Discarded,
    /// Its last holder released it and there was no place in line; see
    /// [`content_drops`](crate::BlockPool::content_drops).
    Dropped,
    /// The pool shrank below it.
    Resized,
    /// More blocks stood in line than may: see [`set_max_cached`](crate::BlockStore::set_max_cached).
    Bounded,
}

impl Cause {
    const ALL: [Self; 5] = [
        Self::Evicted,
        Self::Discarded,
        Self::Dropped,
        Self::Resized,
        Self::Bounded,
    ];
}

/// A block that lost its content.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LostBlock {
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
    /// Whether no other block has the content any more. When several threads lose copies at the same time,
    /// each of them may say so; at least one does.
    pub is_last: bool,
}

/// What was lost.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Loss {
    /// The content of one block.
    Block(LostBlock),
    /// Everything: the index was cleared. The blocks that it left behind are not told of one by one.
    Everything,
}

/// What a listener's pool remembers.
pub(crate) struct Losses {
    log: log::Log,
    lives: lives::Lives,
    gaps: gaps::Gaps,
    /// The time of the batch that is under way, in microseconds: the clock is read once a batch.
    now: AtomicU64,
}

impl Losses {
    /// A log of `capacity` losses, a power of two, for a pool of up to `max_blocks`; None when there is no memory.
    pub(crate) fn new(
        capacity: usize,
        gap_bounds: &[Duration],
        max_blocks: usize,
        clock: &Clock,
    ) -> Option<Self> {
        let now = clock.micros();
        Some(Self {
            log: log::Log::new(capacity)?,
            lives: lives::Lives::new(max_blocks, now)?,
            gaps: gaps::Gaps::new(gap_bounds),
            now: AtomicU64::new(now),
        })
    }

    /// A batch begins.
    pub(crate) fn tell_time(&self, clock: &Clock) {
        // Relaxed: a time that is read late makes an age inexact by the length of a call.
        self.now.store(clock.micros(), Relaxed);
    }

    fn now(&self) -> u64 {
        self.now.load(Relaxed)
    }

    /// The block, which is the caller's alone, gets content.
    pub(crate) fn registered(&self, block: BlockId) {
        self.lives.begin(block, self.now());
    }

    /// These blocks were hit, and are held.
    pub(crate) fn hit<M: Mode>(&self, blocks: &[BlockId]) {
        let now = self.now();
        for &block in blocks {
            self.gaps.count::<M>(self.lives.hit::<M>(block, now));
        }
    }

    /// A holder, the last one or not, gives the block up.
    pub(crate) fn released(&self, block: BlockId) {
        self.lives.touch(block, self.now());
    }

    /// For how long nobody has used the block's content, in microseconds up to `now`.
    pub(crate) fn idle(&self, block: BlockId, now: u64) -> u64 {
        self.lives.of(block, now).idle
    }

    /// Content moves from a block to another, both the caller's alone.
    pub(crate) fn moved(&self, from: BlockId, to: BlockId) {
        self.lives.carry(from, to);
    }

    /// The block, which is the caller's alone, has lost its content.
    pub(crate) fn lost<M: Mode>(
        &self,
        block: BlockId,
        content: Content,
        cause: Cause,
        band: Band,
        is_last: bool,
    ) {
        let life = self.lives.of(block, self.now());
        let kind = 1 + cause as u64;
        let flags = kind << log::KIND_SHIFT | u64::from(is_last) << log::LAST_SHIFT;
        let names = (band.index() as u64) << log::BAND_SHIFT | u64::from(content.group);
        let [a, b, c, d] = content.hash;
        let facts = u64::from(life.hits) << log::HITS_SHIFT | flags | names;
        self.log.push::<M>([a, b, c, d, facts, life.age, life.idle]);
    }

    /// The index was cleared.
    pub(crate) fn lost_everything<M: Mode>(&self) {
        self.log.push::<M>([0; log::WORDS]);
    }

    /// Takes up to `most` losses out of the log, the oldest first.
    pub(crate) fn take(&self, most: usize, out: &mut Vec<Loss>) {
        out.extend(std::iter::from_fn(|| self.log.pop()).take(most).map(unpack));
    }

    pub(crate) fn missed(&self) -> u64 {
        self.log.missed()
    }

    pub(crate) fn gaps(&self) -> ReuseGaps {
        self.gaps.counts()
    }
}

fn unpack([a, b, c, d, facts, age, idle]: log::Words) -> Loss {
    let kind = facts >> log::KIND_SHIFT & 7;
    let Some(&cause) = Cause::ALL.get((kind as usize).wrapping_sub(1)) else {
        return Loss::Everything;
    };
    let content = Content {
        hash: [a, b, c, d],
        group: facts as u16,
    };
    let BlockKey { hash, group } = content.key();
    Loss::Block(LostBlock {
        hash,
        group,
        cause,
        band: Band::all()
            .nth((facts >> log::BAND_SHIFT & 7) as usize)
            .unwrap_or_default(),
        hits: (facts >> log::HITS_SHIFT) as u32,
        age: Duration::from_micros(age),
        idle: Duration::from_micros(idle),
        is_last: facts >> log::LAST_SHIFT & 1 == 1,
    })
}
