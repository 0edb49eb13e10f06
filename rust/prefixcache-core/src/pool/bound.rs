//! Giving up content: on request, and above a bound on the blocks that stand in line with theirs.

use super::BlockPool;
use super::free_stack::Chain;
use crate::evictions::Cause;
use crate::sync::{Mode, Ordering::Relaxed};

impl<M: Mode> BlockPool<M> {
    /// Says whether releases give up nothing beyond the bound.
    pub(super) fn defer_bound(&self, defers: bool) {
        // Relaxed: releases of another thread that see it late evict, or leave to evict, what the next call would.
        self.defers_bound.store(defers, Relaxed);
    }

    /// Gives up the content of blocks beyond the bound, in the order in which they go.
    #[inline]
    pub(super) fn keep_bound(&self) {
        // Relaxed: as where it is set.
        let bound = self.max_cached.load(Relaxed);
        if bound != usize::MAX {
            self.give_up_beyond(bound);
        }
    }

    #[cold]
    fn give_up_beyond(&self, bound: usize) {
        if self.defers_bound.load(Relaxed) {
            return;
        }
        let in_line = || -> usize {
            let used = self.classes.used();
            used.map(|class| self.ring(class).len()).sum()
        };
        // Where several threads change the pool, each looks again after each block.
        while let Some(excess) = in_line().checked_sub(bound).filter(|&excess| excess > 0) {
            let at_once = if M::SHARED { 1 } else { excess };
            if self.give_up(at_once, Cause::Bounded) == 0 {
                return;
            }
        }
    }

    /// Gives up the content of the first `count` blocks that stand in line with theirs; how many there were.
    pub(super) fn give_up(&self, count: usize, cause: Cause) -> usize {
        // An allocation meanwhile may count on all other blocks.
        let at_once = if M::SHARED { 1 } else { count };
        let mut given_up = 0;
        while given_up < count {
            let some = self.give_up_some(at_once.min(count - given_up), cause);
            if some == 0 {
                break;
            }
            given_up += some;
        }
        given_up
    }

    fn give_up_some(&self, count: usize, cause: Cause) -> usize {
        let mut inside = self.credits.enter::<M>();
        self.note_time_of_batch();
        let credits = self.credits.take_some::<M>(count);
        let mut ids = Vec::new();
        self.take_stale(credits, &mut ids);
        self.take_queued(credits, &mut ids, cause, |_| true);
        let mut chain = Chain::EMPTY;
        // The last is to stand on top, as when they go one by one.
        for &id in ids.iter().rev() {
            self.put_nowhere(id);
            if !self.is_above(id) {
                chain.append(&self.blocks, id);
            }
        }
        self.stack.push::<M>(&self.blocks, &chain);
        // All of them: those of the blocks now stand for blank ones, and none stood for a leaving block.
        inside.give_at_end(credits);
        ids.len()
    }
}
