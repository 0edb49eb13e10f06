//! Growing and shrinking.
//!
//! A resize has the free blocks to itself: no other thread is inside a call that takes or gives back
//! any (see [`Credits`](crate::pool::credits::Credits)). Lookups, registrations and pins go on meanwhile.
//!
//! A pool has two bounds. Blocks from `num_blocks` on are *retired*: they hold no content, and the held ones
//! leave at their release. Blocks from the *end* on are not handed out any more, and no credit stands for
//! them. Both are the same but during a shrink (`moves.rs`): blocks between them are *leaving*.
//! Those with content keep it and their place in line until it is moved or lost; the others stand nowhere.

use super::MultiPool;
use super::block::Transition;
use super::free_stack::Chain;
use super::words::{add, fence};
use crate::class::Class;
use crate::error::ResizeError;
use crate::evictions::Cause;
use crate::id::BlockId;
use crate::sync::{AtomicU64, AtomicUsize, Fault, Ordering, planted, yield_now};

use Ordering::{Acquire, Release};

/// How many blocks are handed out.
#[derive(Debug)]
pub(super) struct Size {
    /// Never above the pool's `num_blocks`. Changes while no call takes or gives back blocks.
    end: AtomicUsize,
    /// Blocks from the end on that somebody holds.
    held_above: AtomicU64,
    /// How often the end was moved, or a block from there on joined the line.
    changes: AtomicU64,
}

impl Size {
    pub(super) fn new(num_blocks: usize) -> Self {
        let end = AtomicUsize::new(num_blocks);
        Self { end, held_above: AtomicU64::new(0), changes: AtomicU64::new(0) }
    }

    /// The first block that is not handed out.
    #[inline]
    pub(super) fn end(&self) -> usize {
        // Acquire: pairs with `set_end`.
        self.end.load(Acquire)
    }

    pub(super) fn held_above(&self) -> usize {
        self.held_above.load(Acquire) as usize
    }

    /// A number that is another once a leaving block may stand where none stood.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Acquire)
    }

    /// Says that more blocks from the end on have a holder, or fewer.
    pub(super) fn count_held_above(&self, blocks: i64) {
        add(&self.held_above, blocks.cast_unsigned());
    }

    /// Says that a block from the end on, which was held, stands in line again.
    pub(super) fn count_rejoined(&self) {
        self.count_held_above(-1);
        add(&self.changes, 1);
    }

    fn set_end(&self, end: usize) {
        add(&self.changes, 1);
        // Release: who sees the end sees the blocks as they were when it was set.
        self.end.store(end, Release);
    }
}

fn ids(range: std::ops::Range<usize>) -> impl Iterator<Item = BlockId> {
    range.map(|index| BlockId::new(index as u32))
}

impl MultiPool {
    /// Whether the block is not to be handed out any more: it is leaving or retired.
    #[inline]
    pub(super) fn is_above(&self, id: BlockId) -> bool {
        id.index() >= self.size.end()
    }

    /// Sets the number of blocks; how many above it are still held. Refused while another thread writes.
    pub(super) fn resize(&self, num_blocks: usize) -> Result<usize, ResizeError> {
        self.config.check_num_blocks(num_blocks)?;
        let Some(resizing) = self.credits.begin_resize() else {
            return Err(ResizeError::Busy);
        };
        self.set_time_of_batch();
        let before = self.records.num_blocks();
        if num_blocks >= before {
            self.records.set_num_blocks(num_blocks);
            self.move_end(num_blocks);
        } else {
            self.move_end(num_blocks);
            self.retire_from(num_blocks, before);
        }
        drop(resizing);
        // Of blocks that were leaving no content could be given up.
        self.keep_bound();
        Ok(self.size.held_above())
    }

    /// Ends the blocks that are handed out at `end`. No other call takes or gives back any meanwhile.
    pub(super) fn move_end(&self, end: usize) {
        let before = self.size.end();
        if end == before {
            return;
        }
        self.size.set_end(end);
        if end < before {
            self.withhold(end, before);
        } else {
            self.readmit(before, end);
        }
    }

    /// Puts the blocks from `before` on that stand nowhere in front of the line; those in line count again.
    fn readmit(&self, before: usize, end: usize) {
        let mut chain = Chain::EMPTY;
        let mut held = 0;
        for id in ids(before..end) {
            let state = self.block(id).state();
            if state.is_held() {
                held += 1;
            } else if state.place().is_none() {
                chain.append(self.records.blocks(), id);
            }
        }
        self.size.count_held_above(-(held as i64));
        self.stack.push(self.records.blocks(), &chain);
        self.credits.give(end - before - held);
    }

    /// Withholds the blocks from `end` on from being handed out; those without content leave the line.
    fn withhold(&self, end: usize, before: usize) {
        let (mut held, mut in_line) = (0, 0);
        for state in ids(end..before).map(|id| self.block(id).state()) {
            held += i64::from(state.is_held());
            in_line += usize::from(state.place().is_some());
        }
        let free = self.stack.cut(self.records.blocks(), end) + in_line;
        let taken = self.credits.take(free);
        debug_assert!(taken.is_ok(), "free blocks without credits: {taken:?}");
        self.size.count_held_above(held);
    }

    /// Takes the leaving blocks out of the pool with what content they have; the held ones lose theirs.
    fn retire_from(&self, num_blocks: usize, before: usize) {
        self.records.set_num_blocks(num_blocks);
        // A registration that does not see the new size has its claim seen here.
        fence();
        let lost = self.unqueue_all(ids(num_blocks..before))
            + ids(num_blocks..before).map(|id| self.forget_held(id)).sum::<u64>();
        self.counters.lost_to_resize.add(lost);
        self.counters.evictions.add(lost);
    }

    /// Takes the queued ones of `ids` out of their lines and removes their content; how many held content of
    /// this epoch.
    fn unqueue_all(&self, ids: impl Iterator<Item = BlockId>) -> u64 {
        let mut vacated = self.ring(Class::DEFAULT).vacated_slots();
        let unqueued = ids.filter_map(|id| {
            let is_current = self.records.is_current(self.block(id));
            let left = self.block(id).transition_to_unqueued()?;
            let place = left.place()?;
            vacated.add(self.ring(place.class), place.ticket);
            if left.standing().is_pinned() {
                self.count_recycled_pin(is_current);
            }
            Some((id, place.class))
        });
        let (unqueued, classes): (Vec<BlockId>, Vec<Class>) = unqueued.unzip();
        if planted(Fault::KeepRetired) {
            return 0;
        }
        self.evict_all(&unqueued, Cause::Resized, |at| classes[at])
    }

    /// Takes content and pin from a held block, once no other thread is registering it; how much of it was of
    /// this epoch. Of a block that nobody holds there is none.
    fn forget_held(&self, id: BlockId) -> u64 {
        loop {
            let state = self.block(id).state();
            if state.is_claimed() {
                yield_now();
            } else if !state.is_hashed() {
                return 0;
            } else if self.claim(id, state) == Transition::Done {
                self.report_release(&[id]);
                let lost = self.evict_all(&[id], Cause::Resized, |_| state.standing().class());
                if state.standing().is_pinned() {
                    self.counters.pinned_evictions.add(lost);
                }
                self.end_claim(id, false);
                return lost;
            }
        }
    }

    /// Lets leaving blocks go that a call took from the line, where others were wanted.
    #[cold]
    pub(super) fn drop_leaving(&self, taken: &mut Vec<BlockId>, first: usize) {
        let new = taken.split_off(first);
        let (leaving, staying): (Vec<_>, Vec<_>) = new.iter().partition(|&&id| self.is_above(id));
        leaving.iter().for_each(|&id| self.put_nowhere(id));
        taken.extend(staying);
    }

    /// Gives up a block that the caller took from the line and whose content is forgotten.
    pub(super) fn put_nowhere(&self, id: BlockId) {
        let outcome = self.block(id).transition_to_idle();
        debug_assert_eq!(outcome, Transition::Done, "block {id} was shared");
    }
}
