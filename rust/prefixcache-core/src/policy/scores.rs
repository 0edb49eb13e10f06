//! What keeping a block is worth, by its queue and its age.

use super::Queue;
use super::ages::{BUCKETS, Counts, Row, Waits, bucket, start};
use crate::sync::{AtomicU32, Ordering::Relaxed};
use crate::zeroed::Zeroed;

/// How many waits of its own a queue needs until they count as much as those of all queues together.
const POOLED: f64 = 10.0;

/// The scores in use: 0 for all until the first update, so that the oldest block goes.
pub(super) struct Scores {
    /// Queue by queue, for each bucket of age: the bits of an `f32` that is not negative.
    table: Zeroed<AtomicU32>,
}

impl Scores {
    pub(super) fn new() -> Option<Self> {
        let table = Zeroed::new(Queue::COUNT * BUCKETS)?;
        Some(Self { table })
    }

    #[inline]
    pub(super) fn of(&self, queue: Queue, age: u32) -> f32 {
        f32::from_bits(self.table[queue.index() * BUCKETS + bucket(age)].load(Relaxed))
    }

    /// Puts these scores in use.
    pub(super) fn set(&self, scores: &[Row; Queue::COUNT]) {
        for (word, score) in self.table.iter().zip(scores.as_flattened()) {
            word.store((*score as f32).to_bits(), Relaxed);
        }
    }
}

/// Scores by which the oldest block goes.
pub(super) const NONE: [Row; Queue::COUNT] = [[0.0; BUCKETS]; Queue::COUNT];

/// The score of each queue at each age.
pub(super) fn scores(counts: &Counts) -> [Row; Queue::COUNT] {
    let pooled = pooled_hazard(counts);
    let last = last_worth_keeping(counts);
    let mut all = counts.map(|waits| {
        let waiting = waiting(&waits.used, &waits.open);
        let share = |at| (waits.used[at] + POOLED * pooled[at]) / (waiting[at] + POOLED);
        let mut row = falling(index(&std::array::from_fn(share)));
        row[last + 1..].fill(0.0);
        row
    });
    // Whatever follows a shared prefix is used together with it.
    all[Queue::SHARED.index()] = std::array::from_fn(|at| highest(all.iter().map(|row| row[at])));
    all
}

/// How many waits were not over before each bucket.
fn waiting(used: &Row, open: &Row) -> Row {
    let mut waiting = [0.0; BUCKETS];
    let mut sum = 0.0;
    for at in (0..BUCKETS).rev() {
        sum += used[at] + open[at];
        waiting[at] = sum;
    }
    waiting
}

/// The bucket by whose end nine in ten of the uses came. Of blocks that have waited for longer little is known,
/// so the oldest of them goes first, whatever its queue.
fn last_worth_keeping(counts: &Counts) -> usize {
    let used: Row = std::array::from_fn(|at| counts.iter().map(|waits| waits.used[at]).sum());
    let most = 0.9 * used.iter().sum::<f64>();
    let mut sum = 0.0;
    let reaches = used.iter().position(|used| {
        sum += used;
        sum >= most
    });
    reaches.unwrap_or(BUCKETS - 1)
}

/// Of the waits of all queues that reach a bucket, the share that ends there with a use.
fn pooled_hazard(counts: &Counts) -> Row {
    let total = |of: fn(&Waits) -> &Row| -> Row {
        std::array::from_fn(|at| counts.iter().map(|waits| of(waits)[at]).sum())
    };
    let (used, open) = (total(|waits| &waits.used), total(|waits| &waits.open));
    let waiting = waiting(&used, &open);
    std::array::from_fn(|at| if waiting[at] > 0.0 { used[at] / waiting[at] } else { 0.0 })
}

/// For each age the most uses to be had for a tick of keeping the block: over all times `tau`, the chance of
/// a use within `tau` by the expected wait until the use or `tau`. `hazard` is the chance, for who waits still
/// at the start of a bucket, of a use within it.
fn index(hazard: &Row) -> Row {
    std::array::from_fn(|from| {
        let (mut waiting, mut kept, mut best) = (1.0, 0.0, 0.0_f64);
        for (at, hazard) in hazard.iter().enumerate().skip(from) {
            let uses = waiting * hazard;
            // Uses are spread evenly over a bucket.
            kept += (waiting - uses / 2.0) * (start(at + 1) - start(at)) as f64;
            waiting -= uses;
            best = best.max((1.0 - waiting) / kept);
        }
        best
    })
}

/// The row with each score at least that of every later age.
fn falling(mut row: Row) -> Row {
    for at in (1..BUCKETS).rev() {
        row[at - 1] = row[at - 1].max(row[at]);
    }
    row
}

fn highest(scores: impl Iterator<Item = f64>) -> f64 {
    scores.fold(0.0, f64::max)
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    const NO_WAITS: Waits = Waits { used: [0.0; BUCKETS], open: [0.0; BUCKETS] };

    #[test]
    fn nothing_known_is_a_score_of_zero() {
        assert_eq!(scores(&[NO_WAITS; Queue::COUNT]), [[0.0; BUCKETS]; Queue::COUNT]);
    }

    /// The index by its definition, from the chance to wait still at the start of each bucket.
    fn slow_index(hazard: &Row, from: usize) -> f64 {
        let still =
            |at: usize| -> f64 { hazard[from..at].iter().map(|hazard| 1.0 - hazard).product() };
        let width = |at: usize| (start(at + 1) - start(at)) as f64;
        let rate = |end: usize| {
            let kept: f64 =
                (from..end).map(|at| (still(at) + still(at + 1)) / 2.0 * width(at)).sum();
            (1.0 - still(end)) / kept
        };
        (from + 1..=BUCKETS).map(rate).fold(0.0, f64::max)
    }

    #[test]
    fn the_index_is_its_definition() {
        let hazard: Row = std::array::from_fn(|at| [0.0, 0.3, 0.05, 0.7, 0.01][at * 7 % 5]);
        for (from, fast) in index(&hazard).into_iter().enumerate() {
            let slow = slow_index(&hazard, from);
            assert!((fast - slow).abs() <= 1e-12 * slow.max(1e-12), "{from}: {fast} is not {slow}");
        }
    }

    #[test]
    fn blocks_that_are_used_sooner_score_more_and_old_ones_less() {
        let mut counts = [NO_WAITS; Queue::COUNT];
        counts[0].open[30] = 1000.0;
        counts[3].used[20] = 900.0;
        counts[3].open[30] = 100.0;
        let scores = scores(&counts);
        assert!(scores[0][10] < scores[3][10]);
        assert!(scores[3][25] < scores[3][10]);
        assert!(scores.iter().all(|row| row.windows(2).all(|two| two[0] >= two[1])));
        assert_eq!(scores[Queue::SHARED.index()], scores[3]);
    }
}
