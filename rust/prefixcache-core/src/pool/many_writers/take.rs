//! Taking blocks: hits with their content, and blocks from the front of the line.

use super::MultiPool;
use super::block::{Hold, Place, Transition};
use super::credits::Inside;
use super::ring::VacatedSlots;
use crate::class::Class;
use crate::error::Exhausted;
use crate::evictions::Cause;
use crate::id::{BlockId, BlockKey};
use crate::policy::{Queue, Rank, ReuseQueue, Tick};
use crate::sync::{Fault, planted, spin_loop};

/// Blocks that a call takes from the line.
pub(super) struct Taking<'a> {
    pub(super) out: &'a mut Vec<BlockId>,
    /// How many there are to be in `out`.
    pub(super) end: usize,
    /// Why they lose their content.
    pub(super) cause: Cause,
}

impl Taking<'_> {
    pub(super) fn left(&self) -> usize {
        self.end - self.out.len()
    }
}

impl MultiPool {
    /// Takes the leading `keys` that hit and `num_new` other blocks, or nothing; the number of hits.
    ///
    /// A credit that this thread holds is a block that no other thread may count on, so it takes one
    /// for each block that it will take out of the free line, and none for a hit that is held already
    /// or for a miss. All in one exchange: of two calls that fit only one at a time, one succeeds.
    pub(super) fn commit(
        &self,
        keys: impl ExactSizeIterator<Item = BlockKey> + Clone,
        num_new: usize,
        out: &mut Vec<BlockId>,
    ) -> Result<usize, Exhausted> {
        self.set_time_of_batch();
        let first = out.len();
        let free_hits = self.find_hits(keys.clone(), out);
        let credits = if planted(Fault::CreditsForMisses) { keys.len() } else { free_hits };
        let entered = self.credits.enter_taking(credits.saturating_add(num_new));
        let outcome = entered.and_then(|mut inside| {
            let hits = self.hold_hits(keys, credits, num_new, &out[first..], &mut inside)?;
            out.truncate(first + hits);
            self.hand_out(num_new, out);
            Ok(hits)
        });
        match outcome {
            Ok(_) => self.counters.allocations.add(num_new as u64),
            Err(_) => out.truncate(first),
        }
        outcome
    }

    /// Appends the blocks of the leading `keys` that hit to `out`; how many of them take a credit.
    #[inline]
    fn find_hits(
        &self,
        keys: impl ExactSizeIterator<Item = BlockKey> + Clone,
        out: &mut Vec<BlockId>,
    ) -> usize {
        let mut free = 0;
        if keys.len() > 0 {
            out.reserve(keys.len());
            let end = self.size.end();
            self.records.find_leading(keys, |hit| {
                // No credit stands for a leaving block.
                let is_free = hit.id.index() < end && !self.block(hit.id).state().is_held();
                free += usize::from(is_free);
                out.push(hit.id);
                true
            });
        }
        free
    }

    /// Takes a hold on the leading `hits` that still hold the content of `keys`; how many. The
    /// credits that this does not spend go back. Where another thread released one of the blocks since
    /// it was found, that one needs a credit too: without one, all is given back, and so are the
    /// credits for the `num_new` blocks to come.
    fn hold_hits(
        &self,
        keys: impl Iterator<Item = BlockKey>,
        mut credits: usize,
        num_new: usize,
        hits: &[BlockId],
        inside: &mut Inside<'_>,
    ) -> Result<usize, Exhausted> {
        if hits.is_empty() {
            inside.give_at_end(credits);
            return Ok(0);
        }
        let mut vacated = self.ring(Class::DEFAULT).vacated_slots();
        let end = self.size.end();
        let mut held = 0;
        let mut hold = |(&id, key)| {
            let holds = self.hold_hit(id, &key, end, &mut credits, &mut vacated)?;
            held += usize::from(holds);
            Ok(holds)
        };
        let stop = hits.iter().zip(keys).map(&mut hold).find(|outcome| *outcome != Ok(true));
        drop(vacated);
        if let Some(Err(exhausted)) = stop {
            inside.give_at_end(credits + num_new);
            let kept = if planted(Fault::KeepHitsOfFailure) { held } else { 0 };
            self.give_back_all(&hits[kept..held]);
            return Err(exhausted);
        }
        inside.give_at_end(credits);
        self.counters.touches.add(held as u64);
        if let Some(log) = self.evictions.log() {
            log.hit(&hits[..held]);
        }
        if self.counters.pinned() > 0 {
            self.count_pinned_hits(&hits[..held]);
        }
        Ok(held)
    }

    /// Takes a hold on a block if it still holds the content of `key`; whether it did.
    #[inline(always)]
    fn hold_hit<'a>(
        &'a self,
        id: BlockId,
        key: &BlockKey,
        end: usize,
        credits: &mut usize,
        vacated: &mut VacatedSlots<'a>,
    ) -> Result<bool, Exhausted> {
        loop {
            // No credit stands for a leaving block.
            let is_above = id.index() >= end;
            match self.block(id).transition_to_touched(*credits > 0 || is_above) {
                Hold::Shared => break,
                Hold::TakenFromLine(place) => {
                    match is_above {
                        true => self.size.count_held_above(1),
                        false => *credits -= 1,
                    }
                    vacated.add(self.ring(place.class), place.ticket);
                    break;
                }
                // Its holder released it after the credits were counted.
                Hold::NeedsCredit => {
                    self.credits.take(1)?;
                    *credits += 1;
                }
                Hold::Missed => return Ok(false),
            }
        }
        // The hold keeps the block from being recycled from here on. Before the hold, another writer may
        // have recycled it for other content.
        let holds = self.records.holds(id, key) || planted(Fault::SkipRecheck);
        if !holds {
            self.give_back_all(&[id]);
        }
        Ok(holds)
    }

    /// Takes a hold on a block if it holds the content of `key`, and a credit where that takes one; whether it did.
    /// The block's place in line is lost.
    pub(super) fn hold_copy(&self, id: BlockId, key: &BlockKey) -> bool {
        let mut inside = self.credits.enter();
        let mut vacated = self.ring(Class::DEFAULT).vacated_slots();
        let mut credits = 0;
        let held = self.hold_hit(id, key, self.size.end(), &mut credits, &mut vacated);
        inside.give_at_end(credits);
        held.unwrap_or(false)
    }

    /// Takes `count` blocks from the front of the line. The caller has a credit for each.
    fn hand_out(&self, count: usize, out: &mut Vec<BlockId>) {
        out.reserve(count);
        let mut taking = Taking { end: out.len() + count, out, cause: Cause::Evicted };
        while taking.left() > 0 {
            self.take_next(&mut taking, |_| true);
            if taking.left() > 0 {
                // The credits promise that enough blocks are free, but one that was released, or moved
                // by the compactor, behind the place that was searched is found on the next round.
                spin_loop();
            }
        }
    }

    /// Takes blocks from the front of the line that are not leaving, up to the first with a place that is not
    /// `wanted`. Fewer than asked for where some were leaving, or another thread was faster; whether there was any.
    pub(super) fn take_next(
        &self,
        taking: &mut Taking<'_>,
        wanted: impl Fn(BlockId) -> bool,
    ) -> bool {
        let first = taking.out.len();
        self.take_stale(taking);
        self.take_blank(taking);
        self.take_queued(taking, wanted);
        let takes = taking.out.len() > first;
        if self.size.end() < self.records.num_blocks() {
            self.drop_leaving(taking.out, first);
        }
        takes
    }

    /// Takes blocks with a place in the order in which they go, up to the first that is not `wanted`.
    pub(super) fn take_queued(&self, taking: &mut Taking<'_>, wanted: impl Fn(BlockId) -> bool) {
        for class in self.classes.used() {
            match &self.reuse {
                Some(reuse) if class.queue().is_some() => {
                    self.take_from_queues(reuse, taking, &wanted);
                }
                _ => self.take_from_ring(class, taking, &wanted),
            }
        }
    }

    fn take_blank(&self, taking: &mut Taking<'_>) {
        let first = taking.out.len();
        self.stack.pop(self.records.blocks(), taking.left(), taking.out);
        for &id in &taking.out[first..] {
            self.block(id).transition_to_allocated();
        }
    }

    /// Takes blocks of classes above the default one whose content ended with its epoch. They stand
    /// before the others of their class, as blocks with such content are never queued.
    #[inline]
    pub(super) fn take_stale(&self, taking: &mut Taking<'_>) {
        for class in self.classes.stale() {
            self.take_stale_of(class, taking);
        }
    }

    #[cold]
    fn take_stale_of(&self, class: Class, taking: &mut Taking<'_>) {
        self.take_from_ring(class, taking, |id| !self.records.is_current(self.block(id)));
        if taking.left() > 0 {
            self.classes.unmark_stale(class);
        }
    }

    /// Takes blocks of the lowest rank from the default class's queues, until none is left, the next is not
    /// `wanted`, or another thread has been faster.
    fn take_from_queues(
        &self,
        reuse: &ReuseQueue,
        taking: &mut Taking<'_>,
        wanted: impl Fn(BlockId) -> bool,
    ) {
        let now = reuse.now();
        let mut before = usize::MAX;
        while taking.left() > 0
            && taking.left() != before
            && let Some((queue, upto)) = self.next_queue(reuse, now)
        {
            before = taking.left();
            let comes_first = |id| reuse.rank(queue, id, now) <= upto && wanted(id);
            self.take_from_ring(Class::of(queue), taking, comes_first);
        }
    }

    /// The queue whose oldest block has the lowest rank, and up to which rank its blocks come before those
    /// of the other queues.
    fn next_queue(&self, reuse: &ReuseQueue, now: Tick) -> Option<(Queue, Rank)> {
        let (mut lowest, mut next) = (Rank::LAST, Rank::LAST);
        let mut chosen = None;
        for queue in self.classes.used().filter_map(Class::queue) {
            if let Some(oldest) = self.ring(Class::of(queue)).oldest(self.records.blocks()) {
                let rank = reuse.rank(queue, oldest, now);
                if rank < lowest {
                    (next, lowest, chosen) = (lowest, rank, Some(queue));
                } else {
                    next = next.min(rank);
                }
            }
        }
        chosen.map(|queue| (queue, next))
    }

    /// Takes the oldest blocks of a class, up to the first that is not `wanted`.
    fn take_from_ring(
        &self,
        class: Class,
        taking: &mut Taking<'_>,
        wanted: impl Fn(BlockId) -> bool,
    ) {
        let first = taking.out.len();
        if taking.left() == 0 {
            return;
        }
        let evict = |id: BlockId, place: Place| -> Option<Transition> {
            let block = self.block(id);
            if !wanted(id) {
                // A vacant slot ends nothing: its block may stand elsewhere by now.
                return (block.state().place() != Some(place)).then_some(Transition::Raced);
            }
            // A block keeps its pin, or goes without one, while it stands at its place.
            let has_pin = class == Class::PINNED;
            let is_current = has_pin && self.records.is_current(block);
            let step = block.transition_to_evicted(place);
            if has_pin && step == Transition::Done {
                self.count_recycled_pin(is_current);
            }
            Some(step)
        };
        self.ring(class).take_oldest(self.records.blocks(), taking.left(), evict, taking.out);
        let evicted = self.evict_all(&taking.out[first..], taking.cause, |_| class);
        self.counters.evictions.add(evicted);
    }
}
