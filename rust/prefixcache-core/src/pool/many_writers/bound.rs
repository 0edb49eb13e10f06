//! Giving up content: on request, and above a bound on the blocks that stand in line with theirs.

use super::MultiPool;
use super::free_stack::Chain;
use super::take::Taking;
use crate::evictions::Cause;
use crate::sync::Ordering::Relaxed;

impl MultiPool {
    /// Bounds the blocks that stand in line with content.
    pub(super) fn set_max_cached(&self, blocks: Option<usize>) {
        // Relaxed, also below: each release compares on its own, and one that sees a change late evicts, or leaves to
        // evict, what the next call would.
        self.max_cached.store(blocks.unwrap_or(usize::MAX), Relaxed);
        self.keep_bound();
    }

    /// Says whether releases give up nothing beyond the bound.
    pub(super) fn defer_bound(&self, defers: bool) {
        self.defers_bound.store(defers, Relaxed);
    }

    /// Gives up the content of blocks beyond the bound, in the order in which they go.
    #[inline]
    pub(super) fn keep_bound(&self) {
        let bound = self.max_cached.load(Relaxed);
        if bound != usize::MAX && !self.defers_bound.load(Relaxed) {
            self.give_up_beyond(bound);
        }
    }

    #[cold]
    fn give_up_beyond(&self, bound: usize) {
        let in_line = || -> usize {
            let used = self.classes.used();
            used.map(|class| self.ring(class).len()).sum()
        };
        // Other threads change the count too: each looks again after each block.
        while in_line() > bound && self.give_up_next(Cause::Bounded) {}
    }

    /// Gives up the content of the first `count` blocks that stand in line with theirs; how many there were.
    pub(super) fn release_cached(&self, count: usize) -> usize {
        (0..count).take_while(|_| self.give_up_next(Cause::Evicted)).count()
    }

    /// Gives up the content of the first block that stands in line; whether there was one. One at a time: an
    /// allocation meanwhile may count on all others.
    fn give_up_next(&self, cause: Cause) -> bool {
        let mut inside = self.credits.enter();
        self.set_time_of_batch();
        let credits = self.credits.take_some(1);
        let mut ids = Vec::new();
        let mut taking = Taking { out: &mut ids, end: credits, cause };
        self.take_stale(&mut taking);
        self.take_queued(&mut taking, |_| true);
        // The credit is for the block that is blank now; none stood for a leaving one.
        inside.give_at_end(credits);
        let Some(&id) = ids.first() else {
            return false;
        };
        self.put_nowhere(id);
        if !self.is_above(id) {
            let mut chain = Chain::EMPTY;
            chain.append(self.records.blocks(), id);
            self.stack.push(self.records.blocks(), &chain);
        }
        true
    }
}
