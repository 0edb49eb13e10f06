//! Moving what is worth keeping below the end of a pool that shrinks.
//!
//! The blocks that survive are to be the last in the eviction order, wherever they lie. So content of
//! leaving blocks (`size.rs`) is moved to blocks below, the last in the order first, each to the block below
//! that goes first of all, until what is left to leave goes before all that stays. Leaving blocks that stand
//! at the front of the line are dropped on the way. Content is lost from the front of the line only, as by
//! evictions, so it is lost in order.
//!
//! A move takes two calls, between which the caller copies KV. Until the second one the content is found,
//! hit and evicted where it was; the block that it moves to is held, has no content and cannot be found. So
//! a caller that fails in between has lost nothing but what that block had, which went first.
//!
//! The second call puts the block into the very slot in line that the other leaves, and has the free blocks
//! to itself for that, as a resize has: an eviction meanwhile could see the slot vacant and move the head of
//! the line past it. Lookups go on, and never find a block with other content: the record is written before
//! the index entry names its block. Nor do they miss what moves: the other record is erased after the entry was
//! exchanged, and a lookup that finds it erased looks at the entry again (`index.rs`).

use super::MultiPool;
use super::block::{Place, Transition};
use super::take::Taking;
use crate::class::Class;
use crate::error::ResizeError;
use crate::evictions::Cause;
use crate::id::BlockId;
use crate::policy::{Rank, ReuseQueue};
use crate::pool::entries::Among;
use crate::records::Content;
use crate::store::{Move, Moves, Plan};
use crate::sync::{Fault, planted, prefetch};

/// Blocks that are moved together.
const BATCH: usize = 64;

impl MultiPool {
    /// Begins up to `most` moves of a shrink to `num_blocks`.
    pub(super) fn begin_moves(
        &self,
        num_blocks: usize,
        most: usize,
        moves: &mut Moves,
    ) -> Result<(), ResizeError> {
        moves.check_begin(&self.config, num_blocks, self.records.num_blocks())?;
        let Some(resizing) = self.credits.begin_resize() else {
            return Err(ResizeError::Busy);
        };
        self.set_time_of_batch();
        // No other thread evicts during a shrink.
        let evictions = self.counters.evictions.get();
        self.move_end(num_blocks);
        self.plan(&mut moves.plan);
        while moves.in_flight.len() < most {
            let wanted = BATCH.min(most - moves.in_flight.len());
            // Fewer than asked for: blocks below are left that go before some of the batch alone.
            if self.add_moves(wanted, moves) < wanted && self.add_moves(1, moves) == 0 {
                break;
            }
        }
        let lost = self.counters.evictions.get() - evictions;
        self.counters.lost_to_resize.add(lost);
        if planted(Fault::MoveEarly) {
            moves.in_flight.iter().for_each(|step| self.carry(step));
        }
        drop(resizing);
        // As of a resize: fewer may be leaving than before.
        self.keep_bound();
        Ok(())
    }

    /// Lists the cached blocks in line that are leaving, unless the list is as it would be now.
    fn plan(&self, plan: &mut Plan) {
        let updates = self.reuse.as_ref().map_or(0, ReuseQueue::num_updates);
        let now = (self.size.changes(), self.tick(), updates);
        if plan.made_from != Some(now) {
            plan.made_from = Some(now);
            let lines = self.classes.used().map(|class| self.ring(class));
            let queued = lines.flat_map(|ring| ring.walk(self.records.blocks()));
            let leaving = queued.map(|(_, id)| id).filter(|&id| self.is_leaving(id));
            plan.leaving = leaving.collect();
            if self.reuse.is_some() {
                // Of queues the order is not that of their lines.
                plan.leaving.sort_by_cached_key(|&id| self.order(id));
            }
        }
    }

    /// Where the block stands in the order in which blocks with a place go, the lowest first. To be compared while
    /// nobody takes blocks.
    fn order(&self, id: BlockId) -> Option<(Class, Rank, u64)> {
        let Place { class, ticket } = self.block(id).state().place()?;
        let behind = ticket.since(self.ring(class).head());
        Some(match (&self.reuse, class.queue()) {
            (Some(reuse), Some(queue)) => {
                (Class::DEFAULT, reuse.rank(queue, id, reuse.now()), behind)
            }
            _ => (class, Rank::LAST, behind),
        })
    }

    /// Adds up to `wanted` moves, of the last of those that are leaving to the first below which go before all
    /// of them; how many.
    fn add_moves(&self, wanted: usize, moves: &mut Moves) -> usize {
        let leaving = &mut moves.plan.leaving;
        // One that came back is on the list that is made next.
        let in_line = |&id: &BlockId| self.block(id).state().place().is_some();
        let still = |id: &BlockId| in_line(id) && self.is_leaving(*id);
        let from: Vec<_> =
            std::iter::from_fn(|| leaving.pop()).filter(still).take(wanted).collect();
        let Some(&last) = from.last() else {
            return 0;
        };
        let credits = self.credits.take_some(from.len());
        let mut to = Vec::with_capacity(credits);
        let mut taking = Taking { out: &mut to, end: credits, cause: Cause::Resized };
        let goes_before = |id| self.order(id) < self.order(last);
        while taking.left() > 0 && self.take_next(&mut taking, goes_before) {}
        self.credits.give(credits - to.len());
        moves.in_flight.extend(from.iter().zip(&to).map(|(&from, &to)| {
            let (key, epoch) = (self.block(from).key(), self.block(from).epoch());
            Move { from, to, key, epoch }
        }));
        leaving.extend(from[to.len()..].iter().rev());
        to.len()
    }

    /// Whether the block is leaving with content of this epoch.
    fn is_leaving(&self, id: BlockId) -> bool {
        self.is_above(id) && self.records.is_cached(id)
    }

    /// Ends the moves in flight; how many took place.
    pub(super) fn finish_moves(&self, moves: &mut Moves) -> Result<usize, ResizeError> {
        let Some(resizing) = self.credits.begin_resize() else {
            return Err(ResizeError::Busy);
        };
        let (mut moved, mut failed) = (0, Vec::new());
        for batch in moves.in_flight.chunks(BATCH) {
            batch.iter().for_each(|step| self.prefetch_move(step));
            for step in batch {
                if planted(Fault::MoveEarly) || self.can_finish(step) {
                    self.carry(step);
                    moved += 1;
                } else {
                    failed.push(step.to);
                }
            }
        }
        moves.in_flight.clear();
        if !failed.is_empty() {
            moves.plan.made_from = None;
        }
        self.credits.give(moved);
        self.counters.moved.add(moved as u64);
        drop(resizing);
        self.give_back_all(&failed);
        Ok(moved)
    }

    fn prefetch_move(&self, step: &Move) {
        let spot = self.records.index.spot(&Content::from(&step.key), step.epoch);
        self.records.index.prefetch(spot);
        prefetch(self.block(step.from));
        prefetch(self.block(step.to));
    }

    /// Whether what was copied is what the block still holds, in line, and the other one is still to get it.
    fn can_finish(&self, step: &Move) -> bool {
        let block = self.block(step.from);
        let in_line = block.state().place().is_some() || planted(Fault::BlindMove);
        let same = block.epoch() == step.epoch && block.content() == Content::from(&step.key);
        in_line && same && self.is_leaving(step.from) && !self.is_above(step.to)
    }

    /// Moves content from a block in line, and its place, to one that the caller alone holds.
    fn carry(&self, step: &Move) {
        let (from, to) = (self.block(step.from), self.block(step.to));
        let (content, state) = (from.content(), from.state());
        let Some(place) = state.place() else {
            return;
        };
        to.write_content(&content, from.epoch(), from.seq());
        to.mark(from.marks());
        if let Some(reuse) = &self.reuse {
            reuse.take_place(step.from, step.to);
        }
        if let Some(log) = self.evictions.log() {
            log.moved(step.from, step.to);
        }
        let replaced = to.transition_to_replacing(state);
        debug_assert_eq!(replaced, Transition::Done, "block {} was shared", step.to);
        self.ring(place.class).replace(place.ticket, step.from, step.to);
        // A copy too many has no entry, nor has content of an ended epoch that made room.
        let spot = self.records.index.spot(&content, from.epoch());
        self.records.index.exchange::<Among>(spot, step.from, step.to);
        from.erase();
        from.transition_to_unqueued();
    }
}
