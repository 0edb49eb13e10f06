//! Taking blocks: hits with their content, and blocks from the front of the order.

use super::Writer;
use super::block::State;
use super::journal::Change;
use super::lists::List;
use crate::class::Class;
use crate::error::Exhausted;
use crate::evictions::Cause;
use crate::id::{BlockId, BlockKey};
use crate::policy::{Queue, Rank, Tick};

impl Writer {
    /// Takes the leading `keys` that hit and `num_new` other blocks, or nothing; the number of hits.
    pub(super) fn commit_all(
        &mut self,
        keys: impl ExactSizeIterator<Item = BlockKey> + Clone,
        num_new: usize,
        out: &mut Vec<BlockId>,
    ) -> Result<usize, Exhausted> {
        let (first, mut free_hits) = (out.len(), 0);
        if keys.len() > 0 {
            out.reserve(keys.len());
            self.pool.records.find_leading(keys, |hit| {
                free_hits += usize::from(self.is_free(hit.id));
                out.push(hit.id);
                true
            });
        }
        let needed = free_hits.saturating_add(num_new);
        if needed > self.free {
            out.truncate(first);
            return Err(Exhausted { needed, free: self.free });
        }
        let mut hits = 0;
        if out.len() > first {
            hits = self.hit_all(&out[first..]);
            out.truncate(first + hits);
        }
        self.hand_out(num_new, out);
        self.pool.counters.allocations.add_alone(num_new as u64);
        Ok(hits)
    }

    /// Whether a block counts as free.
    #[inline]
    fn is_free(&self, id: BlockId) -> bool {
        !self.block(id).state().is_in_use() && !self.is_above(id)
    }

    /// Takes a reference to each of the leading blocks that are sound and can count one more; how many.
    fn hit_all(&mut self, ids: &[BlockId]) -> usize {
        let mut hits = 0;
        let mut pinned = 0;
        for &id in ids {
            let state = self.block(id).state();
            if state.references() >= State::MOST_REFERENCES {
                break;
            }
            self.hit(id, state);
            if !self.is_sound(id) {
                self.drop_unsound(id);
                break;
            }
            pinned += u64::from(state.is_pinned());
            hits += 1;
        }
        self.pool.counters.touches.add_alone(hits as u64);
        self.pool.counters.pinned_hits.add_alone(pinned);
        self.note_all(&ids[..hits], Change::Hit);
        hits
    }

    #[inline]
    fn hit(&mut self, id: BlockId, state: State) {
        if let Some(class) = state.list() {
            self.unlist(class, id);
            if self.is_above(id) {
                self.size.in_use_above += 1;
            } else {
                self.free -= 1;
            }
        }
        self.block(id).set_state(state.listed(false).with_one_more());
    }

    /// Takes `count` blocks from the front of the order. As many are free.
    pub(super) fn hand_out(&mut self, count: usize, out: &mut Vec<BlockId>) {
        let first = out.len();
        let end = first + count;
        out.reserve(count);
        while out.len() < end {
            self.take_stale(end, out);
            self.take_blank(end, out);
            self.take_listed(end, out, Cause::Evicted, |_, _| true);
            if self.is_shrinking() {
                self.drop_leaving(out, first);
            }
        }
    }

    /// Takes up to `end` blocks from the front of the order, none of them leaving, up to the first with a place
    /// that is not `wanted`, for a pool that shrinks.
    pub(super) fn take_for_moves(
        &mut self,
        end: usize,
        out: &mut Vec<BlockId>,
        wanted: impl Fn(&Self, BlockId) -> bool,
    ) {
        loop {
            let first = out.len();
            self.take_stale(end, out);
            self.take_blank(end, out);
            self.take_listed(end, out, Cause::Resized, &wanted);
            if out.len() == first {
                return;
            }
            self.drop_leaving(out, first);
            if out.len() == end {
                return;
            }
        }
    }

    /// Lets leaving blocks go that a call took from the order, where others were wanted.
    #[cold]
    fn drop_leaving(&self, taken: &mut Vec<BlockId>, first: usize) {
        let mut index = 0;
        taken.retain(|&id| {
            index += 1;
            let drops = index > first && self.is_above(id);
            if drops {
                self.block(id).set_state(State::BLANK);
            }
            !drops
        });
    }

    fn take_blank(&mut self, end: usize, out: &mut Vec<BlockId>) {
        self.free -= self.blank.take(self.pool.records.blocks(), end, out);
    }

    /// Takes blocks of classes above the default one whose content ended with its epoch. They stand
    /// before the others of their class, as blocks with such content never join a list.
    #[inline]
    pub(super) fn take_stale(&mut self, end: usize, out: &mut Vec<BlockId>) {
        for class in self.stale {
            self.take_from(class, end, out, Cause::Evicted, |pool, id| !pool.is_current(id));
            if out.len() < end {
                self.stale = self.stale.without(class);
            }
        }
    }

    /// Takes blocks from the lists in the order in which they go, up to the first that is not `wanted`.
    pub(super) fn take_listed(
        &mut self,
        end: usize,
        out: &mut Vec<BlockId>,
        cause: Cause,
        wanted: impl Fn(&Self, BlockId) -> bool,
    ) {
        for class in self.used {
            if self.pool.reuse.is_some() && class.queue().is_some() {
                self.take_from_queues(end, out, cause, &wanted);
            } else {
                self.take_from(class, end, out, cause, &wanted);
            }
        }
    }

    /// Takes blocks of the lowest rank from the default class's queues, until none is left or the next is not
    /// `wanted`.
    fn take_from_queues(
        &mut self,
        end: usize,
        out: &mut Vec<BlockId>,
        cause: Cause,
        wanted: impl Fn(&Self, BlockId) -> bool,
    ) {
        let now = self.tick();
        let mut before = usize::MAX;
        while out.len() < end
            && out.len() != before
            && let Some((queue, upto)) = self.next_queue(now)
        {
            before = out.len();
            let comes_first =
                |pool: &Self, id| pool.rank(queue, id, now) <= upto && wanted(pool, id);
            self.take_from(Class::of(queue), end, out, cause, comes_first);
        }
    }

    fn rank(&self, queue: Queue, id: BlockId, now: Tick) -> Rank {
        self.pool.reuse.as_ref().map_or(Rank::LAST, |reuse| reuse.rank(queue, id, now))
    }

    /// The queue whose oldest block has the lowest rank, and up to which rank its blocks come before those
    /// of the other queues.
    fn next_queue(&self, now: Tick) -> Option<(Queue, Rank)> {
        let (mut lowest, mut next) = (Rank::LAST, Rank::LAST);
        let mut chosen = None;
        for queue in self.used.filter_map(Class::queue) {
            if let Some(oldest) = self.list(Class::of(queue)).first() {
                let rank = self.rank(queue, oldest, now);
                if rank < lowest {
                    (next, lowest, chosen) = (lowest, rank, Some(queue));
                } else {
                    next = next.min(rank);
                }
            }
        }
        chosen.map(|queue| (queue, next))
    }

    /// Whether a free block goes before `other`, when the blocks before both are gone.
    pub(super) fn goes_before(
        &self,
        id: BlockId,
        other: BlockId,
        class: Class,
        rank: Rank,
    ) -> bool {
        match self.block(id).state().list() {
            Some(own) if own == class => id != other,
            Some(own) => match (own.queue(), class.queue()) {
                (Some(queue), Some(_)) if self.pool.reuse.is_some() => {
                    self.rank(queue, id, self.tick()) < rank
                }
                _ => own < class,
            },
            None => false,
        }
    }

    /// The rank of a free block, where the policy has ranks.
    pub(super) fn rank_in(&self, class: Class, id: BlockId) -> Rank {
        class.queue().map_or(Rank::LAST, |queue| self.rank(queue, id, self.tick()))
    }

    /// Takes the oldest blocks of a class, up to the first that is not `wanted`.
    #[inline]
    fn take_from(
        &mut self,
        class: Class,
        end: usize,
        out: &mut Vec<BlockId>,
        cause: Cause,
        wanted: impl Fn(&Self, BlockId) -> bool,
    ) {
        let first = out.len();
        let (mut pinned, mut current_pins) = (0, 0);
        while out.len() < end
            && let Some(id) = self.list(class).first()
            && wanted(self, id)
        {
            List::prefetch_behind(self.blocks(), id);
            if class == Class::PINNED {
                pinned += 1;
                current_pins += u64::from(self.is_current(id));
            }
            self.unlist(class, id);
            self.free -= usize::from(!self.is_above(id));
            self.block(id).set_state(State::ALLOCATED);
            out.push(id);
        }
        if out.len() > first {
            let evicted = self.evict_all(&out[first..], cause, |_| class);
            self.pool.counters.evictions.add_alone(evicted);
            self.pool.counters.ended_pins.add_alone(pinned);
            self.pool.counters.pinned_evictions.add_alone(current_pins);
        }
    }
}
