//! How long content waited between two uses.

use std::time::Duration;

use crate::sync::{AtomicU64, Ordering::Relaxed};

/// A histogram of the gaps between the uses of content, all hits counted, and not only those of what was evicted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReuseGaps {
    /// Gaps up to each bound, and above the bound before it; then those above the last.
    pub counts: Vec<u64>,
    /// The sum of all gaps.
    pub sum: Duration,
}

/// Its counts as they grow. Relaxed, all of it: the counts are for people.
pub(super) struct Gaps {
    /// In microseconds.
    bounds: Vec<u64>,
    counts: Vec<AtomicU64>,
    sum: AtomicU64,
}

impl Gaps {
    /// `bounds` rise.
    pub(super) fn new(bounds: &[Duration]) -> Self {
        let micros = bounds.iter().map(|bound| bound.as_micros() as u64);
        Self {
            bounds: micros.collect(),
            counts: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            sum: AtomicU64::new(0),
        }
    }

    pub(super) fn count(&self, micros: u64) {
        let at = self.bounds.partition_point(|&bound| bound < micros);
        self.counts[at].fetch_add(1, Relaxed);
        self.sum.fetch_add(micros, Relaxed);
    }

    pub(super) fn counts(&self) -> ReuseGaps {
        ReuseGaps {
            counts: self.counts.iter().map(|count| count.load(Relaxed)).collect(),
            sum: Duration::from_micros(self.sum.load(Relaxed)),
        }
    }
}
