//! Counts of pins.

use crate::sync::{AtomicU64, Mode, Ordering};

use Ordering::Relaxed;

/// Counts of a pool's whole life. Relaxed loads: the counts are for people.
#[derive(Debug, Default)]
pub(super) struct PinCounts {
    given: AtomicU64,
    /// Taken off, demoted, or gone with the content.
    ended: AtomicU64,
    demotions: AtomicU64,
    evictions: AtomicU64,
    hits: AtomicU64,
}

impl PinCounts {
    /// Blocks that were pinned.
    pub(super) fn given(&self) -> u64 {
        self.given.load(Relaxed)
    }

    /// Blocks that carry a pin. A pin that another thread gives or ends may be missing.
    pub(super) fn now(&self) -> usize {
        let ended = self.ended.load(Relaxed);
        self.given().saturating_sub(ended) as usize
    }

    pub(super) fn demotions(&self) -> u64 {
        self.demotions.load(Relaxed)
    }

    pub(super) fn evictions(&self) -> u64 {
        self.evictions.load(Relaxed)
    }

    pub(super) fn hits(&self) -> u64 {
        self.hits.load(Relaxed)
    }

    pub(super) fn count_given<M: Mode>(&self, blocks: usize) {
        M::add(&self.given, blocks as u64);
    }

    pub(super) fn count_ended<M: Mode>(&self, blocks: usize) {
        M::add(&self.ended, blocks as u64);
    }

    pub(super) fn count_demoted<M: Mode>(&self, blocks: usize) {
        self.count_ended::<M>(blocks);
        M::add(&self.demotions, blocks as u64);
    }

    /// Counts `blocks` that were taken out of the pinned tier, `evicted` of them with content of this
    /// epoch.
    pub(super) fn count_recycled<M: Mode>(&self, blocks: usize, evicted: u64) {
        self.count_ended::<M>(blocks);
        self.count_evicted::<M>(evicted);
    }

    /// Counts `blocks` whose content of this epoch was evicted while they carried a pin.
    pub(super) fn count_evicted<M: Mode>(&self, blocks: u64) {
        M::add(&self.evictions, blocks);
    }

    pub(super) fn count_hits<M: Mode>(&self, blocks: usize) {
        M::add(&self.hits, blocks as u64);
    }
}
