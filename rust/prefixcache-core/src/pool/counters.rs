//! What a pool counts in its whole life.

use crate::class::Standing;
use crate::store::StoreStats;
use crate::sync::{AtomicU64, Ordering::Relaxed};

/// A count for people. Relaxed, all of it: it orders nothing.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    #[inline]
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// Adds, from any thread.
    #[inline]
    pub(crate) fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Relaxed);
    }

    /// Adds, from the only thread that does, without a read-modify-write.
    #[inline]
    pub(crate) fn add_alone(&self, amount: u64) {
        self.set(self.get().wrapping_add(amount));
    }

    pub(crate) fn set(&self, count: u64) {
        self.0.store(count, Relaxed);
    }
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) evictions: Counter,
    pub(crate) allocations: Counter,
    pub(crate) touches: Counter,
    /// Blocks that lost valid content, or got none, as there was no room for it.
    pub(crate) drops: Counter,
    /// Copies that lost their index entry to one registered later.
    pub(crate) surplus: Counter,
    pub(crate) moved: Counter,
    pub(crate) lost_to_resize: Counter,
    /// Blocks that a pin came to keep: it was given, or the priority above it ended.
    pub(crate) pins: Counter,
    /// Pins that were taken off, demoted, gone with the content, or below a priority since.
    pub(crate) ended_pins: Counter,
    pub(crate) demotions: Counter,
    pub(crate) pinned_evictions: Counter,
    pub(crate) pinned_hits: Counter,
}

impl Counters {
    /// What changes for the count of pins when a block's standing does: those that begin and end.
    #[inline]
    pub(crate) fn pin_changes(old: Standing, new: Standing) -> (u64, u64) {
        let (was, is) = (old.is_pinned(), new.is_pinned());
        (u64::from(is && !was), u64::from(was && !is))
    }

    /// Blocks that a pin keeps. A pin that another thread gives or ends may be missing.
    pub(crate) fn pinned(&self) -> usize {
        let ended = self.ended_pins.get();
        self.pins.get().saturating_sub(ended) as usize
    }

    /// The counts among the statistics of a pool; the rest is 0.
    pub(crate) fn stats(&self) -> StoreStats {
        StoreStats {
            evictions: self.evictions.get(),
            allocations: self.allocations.get(),
            touches: self.touches.get(),
            pins: self.pins.get(),
            demotions: self.demotions.get(),
            pinned_evictions: self.pinned_evictions.get(),
            pinned_hits: self.pinned_hits.get(),
            moved: self.moved.get(),
            lost_to_resize: self.lost_to_resize.get(),
            pinned: self.pinned(),
            ..StoreStats::default()
        }
    }
}
