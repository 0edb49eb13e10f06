//! Whether the scores' order would hit more than LRU, by the sample of waiting blocks.
//!
//! A pool keeps the blocks of the highest scores, or with LRU those of the least age, as many as it has. Of the
//! sampled blocks that wait, held or evicted, both orders would keep as many. A wait that ends with a use is a hit
//! of each order that would have kept the block for so long.

use super::Queue;
use super::ages::{BUCKETS, Waiting};
use crate::sync::{AtomicU32, AtomicU64, Ordering::Relaxed};
use crate::zeroed::Zeroed;

/// What a hit counts.
const ONE: u64 = 1 << 16;

/// Updates of the scores in which a hit's weight falls to a third.
const MEMORY: u64 = 32;

/// LRU is taken unless the scores' order has more hits by one in this many, as the sample errs by as much.
const MARGIN: u64 = 64;

/// One order's hits.
struct Order {
    /// Queue by queue, for each bucket of age: the share of its blocks that the order keeps, of [`ONE`].
    kept: Zeroed<AtomicU32>,
    hits: AtomicU64,
}

impl Order {
    fn new() -> Option<Self> {
        Some(Self { kept: Zeroed::new(Queue::COUNT * BUCKETS)?, hits: AtomicU64::new(0) })
    }

    fn used(&self, cell: usize) {
        let share = self.kept[cell].load(Relaxed);
        self.hits.fetch_add(u64::from(share), Relaxed);
    }

    /// Keeps the first of these cells that have `capacity` blocks together; old hits fade.
    fn keep(&self, waiting: &Waiting, cells: &[usize], capacity: f64) -> u64 {
        let mut left = capacity;
        for &cell in cells {
            let blocks = waiting.as_flattened()[cell];
            let share = if blocks <= left { 1.0 } else { left / blocks };
            self.kept[cell].store((share * ONE as f64) as u32, Relaxed);
            left -= share * blocks;
        }
        let hits = self.hits.load(Relaxed);
        self.hits.store(hits - hits / MEMORY, Relaxed);
        hits
    }
}

/// The two orders.
pub(super) struct Trial {
    by_score: Order,
    by_age: Order,
    /// Sampled blocks that the pool has room for.
    capacity: f64,
}

impl Trial {
    pub(super) fn new(capacity: f64) -> Option<Self> {
        Some(Self { by_score: Order::new()?, by_age: Order::new()?, capacity })
    }

    /// A wait in this queue has ended with a use at this bucket of age.
    pub(super) fn used(&self, queue: Queue, bucket: usize) {
        let cell = queue.index() * BUCKETS + bucket;
        self.by_score.used(cell);
        self.by_age.used(cell);
    }

    /// Takes new scores and what waits now. Whether the scores' order has not had more hits than LRU lately.
    pub(super) fn update(&self, scores: &Waiting, waiting: &Waiting) -> bool {
        let mut cells: Vec<usize> = (0..Queue::COUNT * BUCKETS).collect();
        cells.sort_by_key(|cell| cell % BUCKETS);
        let by_age = self.by_age.keep(waiting, &cells, self.capacity);
        let score = |cell: usize| scores.as_flattened()[cell];
        cells.sort_by(|&one, &other| score(other).total_cmp(&score(one)));
        let by_score = self.by_score.keep(waiting, &cells, self.capacity);
        by_age + by_age / MARGIN > by_score
    }
}
