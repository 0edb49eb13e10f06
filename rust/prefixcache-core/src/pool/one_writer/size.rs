//! Growing and shrinking.
//!
//! A pool has two bounds. Blocks from `num_blocks` on are *retired*: they hold no content, and those in use
//! leave at their release. Blocks from the *end* on are not handed out any more and do not count as free. Both are
//! the same but during a shrink (`moves.rs`): blocks between them are *leaving*. Those with content keep it
//! and their place in their list until it is moved or lost; the others stand nowhere.

use super::Writer;
use super::block::State;
use super::journal::Change;
use super::lists::Chain;
use crate::class::Class;
use crate::error::ResizeError;
use crate::evictions::Cause;
use crate::id::BlockId;
use crate::sync::{Fault, planted};

/// Which blocks are handed out.
#[derive(Debug)]
pub(super) struct Size {
    /// The first block that is not handed out. Never above `num_blocks`.
    pub(super) end: usize,
    /// Blocks from the end on that are in use.
    pub(super) in_use_above: usize,
    /// How often the end was moved, or a block from there on joined a list.
    pub(super) changes: u64,
}

impl Size {
    pub(super) fn new(num_blocks: usize) -> Self {
        Self { end: num_blocks, in_use_above: 0, changes: 0 }
    }
}

fn ids(range: std::ops::Range<usize>) -> impl DoubleEndedIterator<Item = BlockId> + Clone {
    range.map(|index| BlockId::new(index as u32))
}

impl Writer {
    /// Whether the block is not to be handed out any more: it is leaving or retired.
    #[inline]
    pub(super) fn is_above(&self, id: BlockId) -> bool {
        id.index() >= self.size.end
    }

    /// Whether blocks are leaving.
    #[inline]
    pub(super) fn is_shrinking(&self) -> bool {
        self.size.end < self.pool.records.num_blocks()
    }

    /// Sets the number of blocks; how many above it are still in use.
    pub(super) fn resize_to(&mut self, num_blocks: usize) -> Result<usize, ResizeError> {
        self.pool.config.check_num_blocks(num_blocks)?;
        let before = self.pool.records.num_blocks();
        if num_blocks >= before {
            self.pool.records.set_num_blocks(num_blocks);
            self.move_end(num_blocks);
        } else {
            self.move_end(num_blocks);
            self.retire_from(num_blocks, before);
        }
        self.note(Change::Resized(num_blocks));
        // Of blocks that were leaving no content could be given up.
        self.keep_bound_now();
        Ok(self.size.in_use_above)
    }

    /// Ends the blocks that are handed out at `end`.
    pub(super) fn move_end(&mut self, end: usize) {
        let before = self.size.end;
        if end == before {
            return;
        }
        self.size.changes += 1;
        self.size.end = end;
        if end < before {
            self.withhold(end, before);
        } else {
            self.readmit(before, end);
        }
    }

    /// Puts the blocks from `before` on that stand nowhere in front of the order; those in lists count again.
    fn readmit(&mut self, before: usize, end: usize) {
        let (mut nowhere, mut in_use) = (Chain::default(), 0);
        for id in ids(before..end) {
            match self.block(id).state() {
                State::BLANK => nowhere.append(self.blocks(), id),
                state => in_use += usize::from(state.is_in_use()),
            }
        }
        self.size.in_use_above -= in_use;
        self.free += end - before - in_use;
        self.stack(&nowhere);
    }

    /// Withholds the blocks from `end` on from being handed out; those without content leave the order.
    fn withhold(&mut self, end: usize, before: usize) {
        let fresh = self.blank.fresh.clone();
        // Nothing but the run knows of the fresh blocks; those around it have a state.
        let used = ids(end..before).filter(|id| !fresh.contains(&id.get()));
        let (mut in_use, mut listed) = (0, 0);
        for state in used.map(|id| self.block(id).state()) {
            in_use += usize::from(state.is_in_use());
            listed += usize::from(state.is_listed());
        }
        self.free -= self.blank.cut(self.pool.records.blocks(), end) + listed;
        self.size.in_use_above += in_use;
    }

    /// Takes the leaving blocks out of the pool with what content they have; those in use lose theirs.
    fn retire_from(&mut self, num_blocks: usize, before: usize) {
        let in_order = self.goes_first(num_blocks);
        self.pool.records.set_num_blocks(num_blocks);
        let mut lost = self.unlist_all(num_blocks..before);
        for id in ids(num_blocks..before) {
            lost += self.forget_in_use(id, Cause::Resized);
        }
        self.pool.counters.lost_to_resize.add_alone(lost);
        self.pool.counters.evictions.add_alone(lost);
        if !in_order {
            self.note_disorder();
        }
    }

    /// Whether the content of the blocks from `end` on goes first: none stands behind content that
    /// stays, and none is in use. Of what a sequence registers a retired block would be left out, content or not.
    /// Not looked for where content goes in no order in any case.
    fn goes_first(&self, end: usize) -> bool {
        if self.pool.reuse.is_some() || self.size.in_use_above > 0 {
            return false;
        }
        let order = self.used.flat_map(|class| self.list(class).walk(self.blocks()));
        let mut cached = order.filter(|&id| self.pool.records.is_cached(id));
        // The first that stays is taken, so the rest is what stands behind it.
        cached.by_ref().find(|id| id.index() < end);
        !cached.any(|id| id.index() >= end)
    }

    /// Takes the blocks of a range out of their lists, with their content; how many held content of this epoch.
    fn unlist_all(&mut self, range: std::ops::Range<usize>) -> u64 {
        let (mut unlisted, mut classes) = (Vec::new(), Vec::<Class>::new());
        for id in ids(range) {
            let state = self.block(id).state();
            let Some(class) = state.list() else { continue };
            if state.is_pinned() {
                self.pool.counters.ended_pins.add_alone(1);
                let is_current = self.is_current(id);
                self.pool.counters.pinned_evictions.add_alone(u64::from(is_current));
            }
            self.unlist(class, id);
            self.block(id).set_state(State::BLANK);
            unlisted.push(id);
            classes.push(class);
        }
        if planted(Fault::KeepRetired) {
            return 0;
        }
        self.evict_all(&unlisted, Cause::Resized, |at| classes[at])
    }

    /// Takes content and pin from a block in use; how much of it was of this epoch.
    pub(super) fn forget_in_use(&mut self, id: BlockId, cause: Cause) -> u64 {
        let state = self.block(id).state();
        if !state.is_in_use() || !self.block(id).has_content() {
            return 0;
        }
        self.note(Change::Released(id));
        self.block(id).set_state(state.without_content());
        let lost = self.evict_all(&[id], cause, |_| state.standing().class());
        if state.is_pinned() {
            self.pool.counters.ended_pins.add_alone(1);
            self.pool.counters.pinned_evictions.add_alone(lost);
        }
        lost
    }
}
