//! Giving blocks back, and the bound on those that keep their content.

use super::Writer;
use super::block::State;
use super::journal::Change;
use super::lists::Chain;
use crate::class::Destination;
use crate::error::Misuse;
use crate::evictions::Cause;
use crate::id::BlockId;
use crate::policy::Tick;
use crate::store::FreeOrder;

/// How blocks are given back in one call.
pub(super) struct Release {
    /// Whether blocks without content join the end of their list.
    pub(super) append: bool,
    pub(super) to: Destination,
    pub(super) now: Tick,
    /// Whether changes have to be noted.
    pub(super) observed: bool,
}

impl Writer {
    pub(super) fn appends(&self) -> bool {
        self.pool.config.free_order == FreeOrder::Append
    }

    /// Gives up one reference to each block, in this order, up to the first that nobody has one to.
    pub(super) fn release_all(&mut self, ids: &[BlockId], to: Destination) -> Result<(), Misuse> {
        let (append, observed) = (self.appends(), self.is_observed());
        let release = Release { append, to, now: self.tick(), observed };
        let mut front = Chain::default();
        let outcome = ids.iter().try_for_each(|&id| {
            self.check_in_use(id)?;
            if observed {
                self.note(Change::Released(id));
            }
            let state = self.block(id).state();
            match state.references() {
                1 => self.let_go(id, &release, &mut front),
                _ => self.block(id).set_state(state.with_one_less()),
            }
            Ok(())
        });
        self.stack(&front);
        self.keep_bound_now();
        outcome
    }

    /// Puts blocks that hold nothing on top of the others.
    pub(super) fn stack(&mut self, front: &Chain) {
        self.blank.push(self.pool.records.blocks(), front);
    }

    /// Gives up the last reference to a block. One that holds nothing is free once the caller has stacked `front`.
    pub(super) fn let_go(&mut self, id: BlockId, release: &Release, front: &mut Chain) {
        let above = self.is_above(id);
        let retired = above && self.pool.records.is_retired(id);
        if self.block(id).has_content() && (retired || !self.is_current(id)) {
            self.blank(id, if retired { Cause::Resized } else { Cause::Discarded });
        }
        let (state, has_content) = (self.block(id).state(), self.block(id).has_content());
        self.count_release(id, above && has_content);
        if has_content || release.append && !above {
            let standing = state.standing();
            let standing = if has_content { standing.released(release.to) } else { standing };
            self.block(id).set_state(state.with_one_less().with_standing(standing).listed(true));
            if let Some(reuse) = &self.pool.reuse {
                reuse.stamp(id, release.now);
            }
            self.push(standing.class(), id);
            if has_content && release.observed {
                self.note(Change::Listed(id, standing));
            }
        } else {
            self.block(id).set_state(State::BLANK);
            if !above {
                front.append(self.pool.records.blocks(), id);
            }
        }
    }

    /// Counts the end of a block's last reference; whether one above the end stands in a list again.
    fn count_release(&mut self, id: BlockId, rejoins: bool) {
        if !self.is_above(id) {
            self.free += 1;
            return;
        }
        self.size.in_use_above -= 1;
        self.size.changes += u64::from(rejoins);
    }

    /// Takes content and pin from a block in use.
    #[cold]
    fn blank(&mut self, id: BlockId, cause: Cause) {
        let state = self.block(id).state();
        self.pool.counters.ended_pins.add_alone(u64::from(state.is_pinned()));
        self.block(id).set_state(state.without_content());
        self.evict_all(&[id], cause, |_| state.standing().class());
    }

    #[inline]
    pub(super) fn is_current(&self, id: BlockId) -> bool {
        self.pool.records.is_current(self.block(id))
    }

    // The bound.

    /// Evicts what stands in lists beyond the bound, in the order of eviction.
    #[inline]
    pub(super) fn keep_bound_now(&mut self) {
        while self.num_listed > self.max_cached && !self.defers_bound {
            if self.give_up(self.num_listed - self.max_cached, Cause::Bounded) == 0 {
                return;
            }
        }
    }

    /// Evicts the first `count` blocks of the order, which stay free; how many there were.
    pub(super) fn give_up(&mut self, count: usize, cause: Cause) -> usize {
        let mut given_up = 0;
        while given_up < count {
            let some = self.give_up_some(count - given_up, cause);
            if some == 0 {
                break;
            }
            given_up += some;
        }
        given_up
    }

    /// Evicts up to `count` blocks: fewer where leaving ones stand among them, which do not count as free.
    fn give_up_some(&mut self, count: usize, cause: Cause) -> usize {
        let count = count.min(self.free);
        let mut ids = Vec::new();
        self.take_stale(count, &mut ids);
        self.take_listed(count, &mut ids, cause, |_, _| true);
        for &id in &ids {
            self.block(id).set_state(State::BLANK);
            if !self.is_above(id) {
                self.free += 1;
                // The last is to stand on top, as when they go one by one.
                let mut chain = Chain::default();
                chain.append(self.blocks(), id);
                self.stack(&chain);
            }
        }
        ids.len()
    }
}
