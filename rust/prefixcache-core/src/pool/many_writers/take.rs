//! Taking blocks: hits with their content, and blocks from the front of the line.

use super::MultiPool;
use super::block::{Hold, Place, Transition};
use super::credits::Inside;
use super::ring::Vacated;
use crate::class::Class;
use crate::error::Exhausted;
use crate::evictions::Cause;
use crate::id::BlockId;
use crate::policy::{Queue, Rank, ReuseQueue, Tick};
use crate::store::BlockKey;
use crate::sync::{Fault, planted, spin_loop};

impl MultiPool {
    /// Takes the leading `keys` that hit and `num_new` other blocks, or nothing; the number of hits.
    ///
    /// A credit that this thread holds is a block that no other thread may count on, so it takes one
    /// for each block that it will take out of the free line, and none for a hit that is held already
    /// or for a miss. All in one exchange: of two calls that fit only one at a time, one succeeds.
    pub(super) fn take(
        &self,
        keys: impl ExactSizeIterator<Item = BlockKey> + Clone,
        num_new: usize,
        out: &mut Vec<BlockId>,
    ) -> Result<usize, Exhausted> {
        self.set_time_of_batch();
        let first = out.len();
        let num_keys = keys.len();
        let free_hits = if num_keys == 0 {
            0
        } else {
            out.reserve(num_keys);
            self.find_hits(keys.clone(), out)
        };
        let credits = if planted(Fault::CreditsForMisses) { num_keys } else { free_hits };
        let entered = self.credits.enter_taking(credits.saturating_add(num_new));
        let taken = entered.and_then(|mut inside| {
            let hits = self.hold_hits(keys, credits, num_new, &out[first..], &mut inside)?;
            Ok((hits, inside))
        });
        let hits = taken.as_ref().map_or(0, |&(hits, _)| hits);
        out.truncate(first + hits);
        let (_, _inside) = taken?;
        self.hand_out(num_new, out);
        self.counters.allocations.add(num_new as u64);
        Ok(hits)
    }

    /// Appends the blocks of the leading `keys` that hit to `out`; how many of them take a credit.
    #[inline]
    fn find_hits(
        &self,
        keys: impl Iterator<Item = BlockKey> + Clone,
        out: &mut Vec<BlockId>,
    ) -> usize {
        let mut free = 0;
        let first = out.len();
        self.records.find_leading(keys, |found| {
            free += usize::from(!self.block(found.id).state().is_held());
            out.push(found.id);
            true
        });
        if self.is_shrinking() {
            return self.count_free(&out[first..]);
        }
        free
    }

    /// How many of the blocks are free and not leaving: no credit stands for the leaving ones.
    #[cold]
    fn count_free(&self, ids: &[BlockId]) -> usize {
        let free = |&&id: &&BlockId| !self.is_above(id) && !self.block(id).state().is_held();
        ids.iter().filter(free).count()
    }

    /// Takes a hold on the leading `found` blocks that still hold the content of `keys`; how many. The
    /// credits that this does not spend go back. Where another thread released one of the blocks since
    /// it was found, that one needs a credit too: without one, all is given back, and so are the
    /// credits for the `num_new` blocks to come.
    fn hold_hits(
        &self,
        keys: impl Iterator<Item = BlockKey>,
        mut credits: usize,
        num_new: usize,
        found: &[BlockId],
        inside: &mut Inside<'_>,
    ) -> Result<usize, Exhausted> {
        let mut vacated = Vacated::new(&self.rings);
        let end = self.size.end();
        let mut hits = 0;
        let mut outcome = Ok(());
        for (&id, key) in found.iter().zip(keys) {
            match self.hold_hit(id, &key, end, &mut credits, &mut vacated) {
                Ok(true) => hits += 1,
                Ok(false) => break,
                Err(exhausted) => {
                    outcome = Err(exhausted);
                    break;
                }
            }
        }
        drop(vacated);
        if let Err(exhausted) = outcome {
            inside.give_at_end(credits + num_new);
            let kept = if planted(Fault::KeepHitsOfFailure) { hits } else { 0 };
            self.give_back_all(&found[kept..hits]);
            return Err(exhausted);
        }
        inside.give_at_end(credits);
        self.counters.touches.add(hits as u64);
        if let Some(log) = self.eviction_log.get() {
            log.hit(&found[..hits]);
        }
        if self.counters.pinned() > 0 {
            self.count_pinned_hits(&found[..hits]);
        }
        Ok(hits)
    }

    /// Takes a hold on a block if it still holds the content of `key`; whether it did.
    #[inline(always)]
    fn hold_hit(
        &self,
        id: BlockId,
        key: &BlockKey,
        end: usize,
        credits: &mut usize,
        vacated: &mut Vacated<'_>,
    ) -> Result<bool, Exhausted> {
        loop {
            // No credit stands for a leaving block.
            let is_above = id.index() >= end;
            let may_take = *credits > 0 || is_above;
            match self.block(id).transition_to_touched(may_take) {
                Hold::Shared => break,
                Hold::TakenFromLine(place) => {
                    if is_above {
                        self.size.count_holds_above(1);
                    } else {
                        *credits -= 1;
                    }
                    vacated.add(place);
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

    /// Takes a hold on a block if it holds the content of `key`, and a credit where that takes one. The
    /// block's place in line is lost.
    pub(super) fn hold_copy(&self, id: BlockId, key: &BlockKey) -> Option<BlockId> {
        let _inside = self.credits.enter();
        let mut vacated = Vacated::new(&self.rings);
        let mut credits = 0;
        let held = self.hold_hit(id, key, self.size.end(), &mut credits, &mut vacated);
        self.credits.give(credits);
        held.unwrap_or(false).then_some(id)
    }

    /// Takes `count` blocks from the front of the line. The caller has a credit for each.
    fn hand_out(&self, count: usize, out: &mut Vec<BlockId>) {
        let first = out.len();
        let end = first + count;
        out.reserve(count);
        while out.len() < end {
            self.take_stale(end, out);
            self.take_blank(end, out);
            self.take_queued(end, out, Cause::Evicted, |_| true);
            if self.is_shrinking() {
                self.drop_leaving(out, first);
            }
            if out.len() < end {
                // The credits promise that enough blocks are free, but one that was released, or moved
                // by the compactor, behind the place that was searched is found on the next round.
                spin_loop();
            }
        }
    }

    /// Takes up to `end` blocks from the front of the line, none of them leaving, up to the first with a place
    /// that is not `wanted`, for a pool that shrinks. The caller has credits for them, and the free blocks to
    /// itself.
    pub(super) fn take_for_moves(
        &self,
        end: usize,
        out: &mut Vec<BlockId>,
        wanted: impl Fn(BlockId) -> bool,
    ) {
        let mut before = usize::MAX;
        while out.len() < end && out.len() != before {
            let first = out.len();
            self.take_stale(end, out);
            self.take_blank(end, out);
            self.take_queued(end, out, Cause::Resized, &wanted);
            before = if out.len() == first { first } else { usize::MAX };
            self.drop_leaving(out, first);
        }
    }

    /// Takes blocks with a place in the order in which they go, up to the first that is not `wanted`.
    pub(super) fn take_queued(
        &self,
        end: usize,
        out: &mut Vec<BlockId>,
        cause: Cause,
        wanted: impl Fn(BlockId) -> bool,
    ) {
        for class in self.classes.used() {
            match &self.reuse {
                Some(reuse) if class.queue().is_some() => {
                    self.take_from_queues(reuse, end, out, cause, &wanted);
                }
                _ => self.take_from_ring(class, end, out, cause, &wanted),
            }
        }
    }

    /// Whether a block in line goes before the one that stands at `place` with this rank.
    pub(super) fn goes_before(&self, id: BlockId, place: Place, rank: Rank) -> bool {
        let Some(own) = self.block(id).state().place() else {
            return false;
        };
        match (&self.reuse, own.class.queue()) {
            _ if own.class == place.class => own.ticket.is_before(place.ticket),
            (Some(reuse), Some(queue)) if place.class.queue().is_some() => {
                reuse.rank(queue, id, reuse.now()) < rank
            }
            _ => own.class < place.class,
        }
    }

    /// The rank of a block at `place`, where the policy has ranks.
    pub(super) fn rank_at(&self, id: BlockId, place: Place) -> Rank {
        match (&self.reuse, place.class.queue()) {
            (Some(reuse), Some(queue)) => reuse.rank(queue, id, reuse.now()),
            _ => Rank::LAST,
        }
    }

    fn take_blank(&self, end: usize, out: &mut Vec<BlockId>) {
        let first = out.len();
        self.stack.pop(self.records.blocks(), end - first, out);
        for &id in &out[first..] {
            self.block(id).transition_to_allocated();
        }
    }

    /// Takes blocks of classes above the default one whose content ended with its epoch. They stand
    /// before the others of their class, as blocks with such content are never queued.
    #[inline]
    pub(super) fn take_stale(&self, end: usize, out: &mut Vec<BlockId>) {
        for class in self.classes.stale() {
            self.take_stale_of(class, end, out);
        }
    }

    #[cold]
    fn take_stale_of(&self, class: Class, end: usize, out: &mut Vec<BlockId>) {
        let is_stale = |id| !self.records.is_current(self.block(id));
        self.take_from_ring(class, end, out, Cause::Evicted, is_stale);
        if out.len() < end {
            self.classes.unmark_stale(class);
        }
    }

    /// Takes blocks of the lowest rank from the default class's queues, until none is left, the next is not
    /// `wanted`, or another thread has been faster.
    fn take_from_queues(
        &self,
        reuse: &ReuseQueue,
        end: usize,
        out: &mut Vec<BlockId>,
        cause: Cause,
        wanted: impl Fn(BlockId) -> bool,
    ) {
        let now = reuse.now();
        let mut before = usize::MAX;
        while out.len() < end
            && out.len() != before
            && let Some((queue, upto)) = self.next_queue(reuse, now)
        {
            before = out.len();
            let comes_first = |id| reuse.rank(queue, id, now) <= upto && wanted(id);
            self.take_from_ring(Class::of(queue), end, out, cause, comes_first);
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
        end: usize,
        out: &mut Vec<BlockId>,
        cause: Cause,
        wanted: impl Fn(BlockId) -> bool,
    ) {
        let first = out.len();
        if first < end {
            let take = |id: BlockId, place: Place| -> Option<Transition> {
                if !wanted(id) {
                    // A vacant slot ends nothing: its block may stand elsewhere by now.
                    let is_vacant = self.block(id).state().place() != Some(place);
                    return is_vacant.then_some(Transition::Raced);
                }
                // A block keeps its pin, or goes without one, while it stands at its place.
                let has_pin = class >= Class::PINNED && self.is_pinned(id);
                let is_hit = has_pin && self.records.is_current(self.block(id));
                let step = self.block(id).transition_to_evicted(place);
                if has_pin && step == Transition::Done {
                    self.count_recycled_pin(is_hit);
                }
                Some(step)
            };
            self.ring(class).take_oldest(self.records.blocks(), end - first, take, out);
            let evicted = self.evict_all(&out[first..], cause, |_| class);
            self.counters.evictions.add(evicted);
        }
    }
}
