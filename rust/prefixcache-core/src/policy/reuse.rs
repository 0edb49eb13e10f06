//! How long blocks of each queue wait until they are used again, counted over a sample of them.

use super::ages::{BUCKETS, Counts, Waiting, Waits, bucket};
use super::{Queue, Tick, word};
use crate::id::BlockHash;
use crate::sync::{AtomicU64, Ordering::Relaxed};
use crate::zeroed::Zeroed;

/// Sampled blocks that wait.
const SLOTS: usize = if cfg!(loom) { 2 } else { 1 << 14 };

/// How many pools' worth of blocks the sample stands for: what was evicted is waited for too.
const POOLS: usize = 16;

/// What one wait counts, so that counts can fade in whole numbers.
const ONE: u64 = 256;

/// A sampled block that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wait {
    name: u32,
    queue: Queue,
    since: Tick,
}

impl Wait {
    const USED: u64 = 1 << 35;

    /// `name:28 | 1 | queue:3 | since:32`; a word of 0: none.
    fn pack(self) -> u64 {
        let queue = self.queue.index() as u64;
        u64::from(self.name) << 36 | Self::USED | queue << 32 | u64::from(self.since.get())
    }

    fn unpack(word: u64) -> Option<Self> {
        (word & Self::USED != 0).then(|| Self {
            name: (word >> 36) as u32,
            queue: Queue::new((word >> 32 & 7) as u8),
            since: Tick::new(word as u32),
        })
    }
}

/// Of how many blocks of a pool one is in the sample.
pub(super) fn one_in(max_blocks: usize) -> u64 {
    (max_blocks * POOLS / SLOTS).next_power_of_two() as u64
}

/// The sample and its counts.
pub(super) struct Reuse {
    /// A table in which a newer block takes the place of an older one.
    slots: Zeroed<AtomicU64>,
    /// A block is in the sample if these bits of its hash are 0.
    sampled: u64,
    /// For each queue the used waits of each bucket, then the open ones; each counts [`ONE`].
    counts: Zeroed<AtomicU64>,
}

impl Reuse {
    pub(super) fn new(max_blocks: usize) -> Option<Self> {
        Some(Self {
            slots: Zeroed::new(SLOTS)?,
            sampled: (one_in(max_blocks) - 1) << 16,
            counts: Zeroed::new(Queue::COUNT * BUCKETS * 2)?,
        })
    }

    /// The sampled ones of these blocks, by slot and name.
    fn sample<'a>(&'a self, hashes: &'a [BlockHash]) -> impl Iterator<Item = (&'a AtomicU64, u32)> {
        let words = hashes.iter().map(word);
        let sampled = words.filter(|word| word & self.sampled == 0);
        sampled.map(|word| (&self.slots[word as usize % SLOTS], (word >> 36) as u32))
    }

    fn count(&self, wait: Wait, is_used: bool, now: Tick) {
        let kind = if is_used { 0 } else { BUCKETS };
        let place = wait.queue.index() * BUCKETS * 2 + kind + bucket(now.since(wait.since));
        self.counts[place].fetch_add(ONE, Relaxed);
    }

    /// These blocks are used: the waits of those that waited have ended. Calls `ended` with the queue of each and the
    /// bucket of its age.
    pub(super) fn used(&self, hashes: &[BlockHash], now: Tick, ended: impl Fn(Queue, usize)) {
        for (slot, name) in self.sample(hashes) {
            if let Some(wait) = Wait::unpack(slot.load(Relaxed)).filter(|wait| wait.name == name) {
                slot.store(0, Relaxed);
                self.count(wait, true, now);
                ended(wait.queue, bucket(now.since(wait.since)));
            }
        }
    }

    /// These blocks wait from now on. Of a block whose slot another takes no more will be known.
    pub(super) fn released(&self, hashes: &[BlockHash], queue: Queue, now: Tick) {
        for (slot, name) in self.sample(hashes) {
            let before = Wait::unpack(slot.load(Relaxed));
            if let Some(other) = before.filter(|wait| wait.name != name) {
                self.count(other, false, now);
            }
            slot.store(Wait { name, queue, since: now }.pack(), Relaxed);
        }
    }

    /// The sampled blocks that wait.
    pub(super) fn waiting(&self, now: Tick) -> Waiting {
        let mut waiting = [[0.0; BUCKETS]; Queue::COUNT];
        let waits = self.slots.iter();
        for wait in waits.filter_map(|slot| Wait::unpack(slot.load(Relaxed))) {
            waiting[wait.queue.index()][bucket(now.since(wait.since))] += 1.0;
        }
        waiting
    }

    /// All counts, with those that wait still as open; what is counted already fades a little.
    pub(super) fn take_counts(&self, waiting: &Waiting) -> Counts {
        let mut all = [Waits { used: [0.0; BUCKETS], open: [0.0; BUCKETS] }; Queue::COUNT];
        for (queue, (waits, waiting)) in all.iter_mut().zip(waiting).enumerate() {
            let first = queue * BUCKETS * 2;
            for (bucket, waiting) in waiting.iter().enumerate() {
                waits.used[bucket] = self.fade(first + bucket);
                waits.open[bucket] = self.fade(first + BUCKETS + bucket) + waiting;
            }
        }
        all
    }

    /// One count, which loses a 256th.
    fn fade(&self, place: usize) -> f64 {
        let count = &self.counts[place];
        let value = count.load(Relaxed);
        count.store(value - value / 256, Relaxed);
        value as f64 / ONE as f64
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    fn hash(number: u8) -> BlockHash {
        let mut bytes = [0; 32];
        (bytes[0], bytes[7]) = (number, number);
        BlockHash::from_bytes(bytes)
    }

    #[test]
    fn a_wait_is_counted_once_in_its_queue_by_its_age() {
        let reuse = Reuse::new(16).unwrap();
        let (first, third) = (Queue::new(0), Queue::new(2));
        reuse.released(&[hash(1), hash(2)], first, Tick::new(10));
        reuse.released(&[hash(3)], third, Tick::new(10));
        reuse.used(&[hash(1), hash(3), hash(9)], Tick::new(18), |_, _| {});
        reuse.used(&[hash(1)], Tick::new(30), |_, _| {});
        let counts = reuse.take_counts(&reuse.waiting(Tick::new(14)));
        let mut expected = [Waits { used: [0.0; BUCKETS], open: [0.0; BUCKETS] }; Queue::COUNT];
        expected[0].used[bucket(8)] = 1.0;
        expected[2].used[bucket(8)] = 1.0;
        expected[0].open[bucket(4)] = 1.0;
        assert_eq!(counts, expected);
        let faded = reuse.take_counts(&reuse.waiting(Tick::new(14)));
        assert_eq!(faded[0].used[bucket(8)], 255.0 / 256.0);
    }

    #[test]
    fn a_wait_whose_slot_is_taken_is_open() {
        let reuse = Reuse::new(16).unwrap();
        let (one, mut other) = (hash(1), *hash(1).as_bytes());
        other[7] = 9;
        reuse.released(&[one], Queue::new(1), Tick::new(0));
        reuse.released(&[BlockHash::from_bytes(other)], Queue::new(1), Tick::new(6));
        reuse.used(&[one], Tick::new(9), |_, _| {});
        let counts = reuse.take_counts(&reuse.waiting(Tick::new(6)));
        assert_eq!(counts[1].used, [0.0; BUCKETS]);
        assert_eq!((counts[1].open[bucket(6)], counts[1].open[0]), (1.0, 1.0));
    }
}
