//! Moving what is worth keeping below the end of a pool that shrinks.
//!
//! The blocks that survive are to be the last in the eviction order, wherever they lie. So content of
//! leaving blocks (`size.rs`) is moved to blocks below, the last in the order first, each to the block below
//! that goes first of all, until what is left to leave goes before all that stays. Leaving blocks that stand
//! at the front of the order are dropped on the way. Content is lost from the front of the order only, as by
//! evictions, so it is lost in order.
//!
//! A move takes two calls, between which the caller copies KV. Until the second one the content is found,
//! hit and evicted where it was; the block that it moves to is in use, has no content and cannot be found. So
//! a caller that fails in between has lost nothing but what that block had, which went first.
//!
//! The second call puts the block into the very place of its list that the other leaves. Lookups go on, and never
//! find a block with other content: the record is written before the index entry names its block. Nor do they miss
//! what moves: the other record is erased after the entry was exchanged, and a lookup that finds it erased looks at
//! the entry again (`records/index.rs`).

use super::Writer;
use super::block::State;
use super::journal::Change;
use crate::class::{Class, Destination};
use crate::error::ResizeError;
use crate::id::BlockId;
use crate::policy::ReuseQueue;
use crate::pool::entries::Alone;
use crate::records::Content;
use crate::store::{Move, Moves, Plan};
use crate::sync::{Fault, planted, prefetch};

/// Blocks that are moved together.
const BATCH: usize = 64;

impl Writer {
    /// Begins up to `most` moves of a shrink to `num_blocks`.
    pub(super) fn begin_shrink(
        &mut self,
        num_blocks: usize,
        most: usize,
        moves: &mut Moves,
    ) -> Result<(), ResizeError> {
        moves.check_begin(&self.pool.config, num_blocks, self.pool.records.num_blocks())?;
        let evictions = self.pool.counters.evictions.get();
        self.move_end(num_blocks);
        self.plan(&mut moves.plan);
        while moves.in_flight.len() < most {
            let wanted = BATCH.min(most - moves.in_flight.len());
            // Fewer than asked for: blocks below are left that go before some of the batch alone.
            if self.add_moves(wanted, moves) < wanted && self.add_moves(1, moves) == 0 {
                break;
            }
        }
        let lost = self.pool.counters.evictions.get() - evictions;
        self.pool.counters.lost_to_resize.add_alone(lost);
        if planted(Fault::MoveEarly) {
            moves.in_flight.iter().for_each(|relocation| self.carry(relocation));
        }
        // As of a resize: fewer may be leaving than before.
        self.keep_bound_now();
        Ok(())
    }

    /// Lists the cached blocks in lists that are leaving, unless the plan is as it would be now.
    fn plan(&self, plan: &mut Plan) {
        let updates = self.pool.reuse.as_ref().map_or(0, ReuseQueue::num_updates);
        let now = (self.size.changes, self.tick(), updates);
        if plan.made_from != Some(now) {
            plan.made_from = Some(now);
            plan.leaving = self.leaving_in_order();
        }
    }

    fn leaving_in_order(&self) -> Vec<BlockId> {
        let mut all = Vec::new();
        for class in self.used {
            let leaving = self.list(class).walk(self.blocks()).filter(|&id| self.is_leaving(id));
            all.extend(leaving.map(|id| (class, self.rank_in(class, id), id)));
        }
        if self.pool.reuse.is_some() {
            // Stable: within a list the order is that of the list.
            all.sort_by_key(|&(class, rank, _)| match class.queue() {
                Some(_) => (Class::DEFAULT, rank),
                None => (class, rank),
            });
        }
        all.into_iter().map(|(_, _, id)| id).collect()
    }

    /// Adds up to `wanted` moves, of the last of those that are leaving to the first below which go before all
    /// of them; how many.
    fn add_moves(&mut self, wanted: usize, moves: &mut Moves) -> usize {
        let leaving = &mut moves.plan.leaving;
        let from = self.last_leaving(wanted, leaving);
        let Some(&(first, class)) = from.last() else {
            return 0;
        };
        let rank = self.rank_in(class, first);
        let mut to = Vec::with_capacity(from.len());
        self.take_for_moves(from.len().min(self.free), &mut to, |pool, id| {
            pool.goes_before(id, first, class, rank)
        });
        let pairs = from.iter().zip(&to);
        moves.in_flight.extend(pairs.map(|(&(from, _), &to)| {
            let (key, epoch) = (self.block(from).key(), self.block(from).epoch());
            Move { from, to, key, epoch }
        }));
        leaving.extend(from[to.len()..].iter().rev().map(|&(id, _)| id));
        to.len()
    }

    /// Takes up to `wanted` blocks off the list's end, those that are in use or evicted since left aside.
    fn last_leaving(&self, wanted: usize, leaving: &mut Vec<BlockId>) -> Vec<(BlockId, Class)> {
        let mut last = Vec::with_capacity(wanted);
        while last.len() < wanted
            && let Some(id) = leaving.pop()
        {
            // One that came back is on the list that is made next.
            let class = self.block(id).state().list();
            last.extend(class.filter(|_| self.is_leaving(id)).map(|class| (id, class)));
        }
        last
    }

    /// Whether the block is leaving with content of this epoch.
    fn is_leaving(&self, id: BlockId) -> bool {
        self.is_above(id) && self.pool.records.is_cached(id)
    }

    /// Ends the moves in flight; how many took place.
    pub(super) fn finish_shrink(&mut self, moves: &mut Moves) -> usize {
        let (mut moved, mut failed) = (0, Vec::new());
        for batch in moves.in_flight.chunks(BATCH) {
            batch.iter().for_each(|relocation| self.prefetch_move(relocation));
            for relocation in batch {
                if planted(Fault::MoveEarly) || self.can_finish(relocation) {
                    self.carry(relocation);
                    moved += 1;
                } else {
                    failed.push(relocation.to);
                }
            }
        }
        moves.in_flight.clear();
        self.pool.counters.moved.add_alone(moved as u64);
        if !failed.is_empty() {
            moves.plan.made_from = None;
            let outcome = self.release_all(&failed, Destination::Same);
            debug_assert!(outcome.is_ok(), "a reference was lost: {outcome:?}");
        }
        moved
    }

    fn prefetch_move(&self, relocation: &Move) {
        let index = &self.pool.records.index;
        index.prefetch(index.spot(&Content::from(&relocation.key), relocation.epoch));
        prefetch(self.block(relocation.from));
        prefetch(self.block(relocation.to));
    }

    /// Whether what was copied is what the block still holds, in a list, and the other one is still to get it.
    fn can_finish(&self, relocation: &Move) -> bool {
        let block = self.block(relocation.from);
        let is_free = block.state().is_listed() || planted(Fault::BlindMove);
        let same = block.epoch() == relocation.epoch && block.key() == relocation.key;
        // Nobody else has it.
        let to = self.block(relocation.to);
        let is_ready = to.state() == State::ALLOCATED && !to.has_content();
        is_free
            && same
            && is_ready
            && self.is_leaving(relocation.from)
            && !self.is_above(relocation.to)
    }

    /// Moves content from a free block, and its place, to one that the caller alone has.
    fn carry(&mut self, relocation: &Move) {
        let Move { from, to, .. } = *relocation;
        let (old, new) = (self.block(from), self.block(to));
        let (content, epoch, state) = (old.content(), old.epoch(), old.state());
        let Some(class) = state.list() else {
            return;
        };
        new.write(&content, epoch, old.seq());
        new.set_state(state.of_content());
        if let Some(reuse) = &self.pool.reuse {
            reuse.take_place(from, to);
        }
        self.lists[class.index()].replace(self.pool.records.blocks(), from, to);
        // A copy too many has no entry, nor has content of an ended epoch that made room.
        let index = &self.pool.records.index;
        index.exchange::<Alone>(index.spot(&content, epoch), from, to);
        self.block(from).erase();
        self.block(from).set_state(State::BLANK);
        self.free += 1;
        self.note(Change::Moved { from, to, band: state.standing().own_class().band() });
    }
}
