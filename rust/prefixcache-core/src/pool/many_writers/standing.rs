//! Pins.

use super::MultiPool;
use crate::class::Standing;
use crate::error::Misuse;
use crate::id::{BlockId, BlockKey};
use crate::pool::counters::Counters;
use crate::records::Content;

/// How many of the blocks something was done with, up to the first that nobody holds.
fn count_done(
    ids: &[BlockId],
    work: impl Fn(BlockId) -> Result<bool, Misuse>,
) -> (usize, Result<(), Misuse>) {
    let mut done = 0;
    let outcome = ids.iter().try_for_each(|&id| {
        done += usize::from(work(id)?);
        Ok(())
    });
    (done, outcome)
}

impl MultiPool {
    pub(super) fn is_pinned(&self, id: BlockId) -> bool {
        self.block(id).state().standing().is_pinned()
    }

    /// Counts a pinned block that was taken from its line, with content of this epoch or not.
    #[cold]
    pub(super) fn count_recycled_pin(&self, is_current: bool) {
        self.counters.ended_pins.add(1);
        self.counters.pinned_evictions.add(u64::from(is_current));
    }

    /// Counts the pinned ones of the blocks that a call has hit and holds.
    #[cold]
    pub(super) fn count_pinned_hits(&self, hits: &[BlockId]) {
        let pinned = hits.iter().filter(|&&id| self.is_pinned(id)).count();
        self.counters.pinned_hits.add(pinned as u64);
    }

    /// Pins the content of held blocks; how much of it was not pinned before.
    pub(super) fn pin(&self, ids: &[BlockId]) -> Result<usize, Misuse> {
        let (pinned, outcome) = count_done(ids, |id| self.pin_content(id));
        outcome.map(|()| pinned)
    }

    /// Takes the pins from the content of held blocks; how much of it was pinned.
    pub(super) fn unpin(&self, ids: &[BlockId]) -> Result<usize, Misuse> {
        let (unpinned, outcome) = count_done(ids, |id| self.unpin_content(id));
        outcome.map(|()| unpinned)
    }

    /// Takes the pins off the oldest `count` blocks in the pinned line; how many there were.
    pub(super) fn demote(&self, count: usize) -> usize {
        let demoted = (0..count).take_while(|_| self.unpin_oldest()).count();
        self.counters.ended_pins.add(demoted as u64);
        self.counters.demotions.add(demoted as u64);
        demoted
    }

    /// Pins the content of a held block, which is that of the copy that hits: it is the one that later requests
    /// hold, and the others may go. Whether it was not pinned before.
    fn pin_content(&self, id: BlockId) -> Result<bool, Misuse> {
        self.check_held(id)?;
        if !self.records.is_cached(id) {
            return Ok(false);
        }
        let key = self.block(id).key();
        let hit =
            self.records.find(&key).filter(|&hit| !self.block(hit).state().standing().has_pin());
        Ok(hit.is_some_and(|hit| self.classify(hit, id, &key, Standing::pinned)))
    }

    /// Takes the pins from a held block and all copies of its content; whether there were any.
    fn unpin_content(&self, id: BlockId) -> Result<bool, Misuse> {
        self.check_held(id)?;
        let key = self.block(id).key();
        let mut copies = vec![id];
        if self.records.is_cached(id) {
            let content = Content::from(&key);
            let spot = self.records.index.spot(&content, self.records.epoch());
            self.records.for_each_copy(spot, &content, |copy| copies.push(copy.id));
        }
        // One without a pin keeps its place in line.
        let unpin = |&copy: &BlockId| {
            self.is_pinned(copy) && self.classify(copy, id, &key, Standing::unpinned)
        };
        // All of them, so no `any`.
        Ok(copies.iter().filter(|copy| unpin(copy)).count() > 0)
    }

    /// Gives a block, which the caller holds if it is `held`, the class and the pin that `change` makes of
    /// its own, as long as it has the content of `key`; whether they are others.
    fn classify(
        &self,
        id: BlockId,
        held: BlockId,
        key: &BlockKey,
        change: impl Fn(Standing) -> Standing,
    ) -> bool {
        if id == held {
            return self.reclass_held(id, change);
        }
        // A hold takes a free block out of its line, and its release puts it into that of its new class.
        if !self.hold_copy(id, key) {
            return false;
        }
        let changed = self.reclass_held(id, change);
        self.give_back_all(&[id]);
        changed
    }

    /// Changes class and pin of a held block, and counts the pin; whether they are others then.
    fn reclass_held(&self, id: BlockId, change: impl Fn(Standing) -> Standing) -> bool {
        let changed = self.block(id).transition_to_classed(change);
        let Some((old, new)) = changed else { return false };
        let (begun, ended) = Counters::pin_changes(old, new);
        self.counters.pins.add(begun);
        self.counters.ended_pins.add(ended);
        true
    }
}
