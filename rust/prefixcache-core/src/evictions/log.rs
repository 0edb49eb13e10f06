//! A bounded queue of evictions, from any number of threads to any number of threads.
//!
//! Each slot counts its turns: `2 * round` while it is free for the record of that round, one more once the record
//! stands in it. A writer takes a free slot by moving the tail past it, writes, and ends the turn; a reader does
//! the same at the head. No writer waits: where a slot is not free yet, the record is only counted. A writer that
//! loses its core while it writes keeps readers from what stands behind its slot until it goes on, and nobody else
//! from anything.

use crate::sync::{AtomicU64, Fault, Ordering, OwnLine, planted};
use crate::zeroed::{Zeroable, Zeroed};

use Ordering::{AcqRel, Acquire, Relaxed, Release};

/// The words of a record: hash, facts, age and idle time in microseconds.
pub(super) const WORDS: usize = 7;

pub(super) type Words = [u64; WORDS];

/// Facts are `hits:32 | kind:3 | last:1 | .. | band:3 | group:16`; a kind of 0 is a cleared index.
pub(super) const BAND_SHIFT: u32 = 16;
pub(super) const LAST_SHIFT: u32 = 28;
pub(super) const KIND_SHIFT: u32 = 29;
pub(super) const HITS_SHIFT: u32 = 32;

/// A record, on a cache line of its own.
#[derive(Default)]
#[repr(align(64))]
struct Slot {
    turn: AtomicU64,
    words: [AtomicU64; WORDS],
}

// SAFETY: zero is a valid value of every atomic integer, and its default; none has a destructor.
unsafe impl Zeroable for Slot {}

pub(super) struct Log {
    slots: Zeroed<Slot>,
    /// Records that were ever written, and read: the place of the next one.
    tail: OwnLine<AtomicU64>,
    head: OwnLine<AtomicU64>,
    missed: AtomicU64,
}

impl Log {
    /// Room for `capacity` records, a power of two.
    pub(super) fn new(capacity: usize) -> Option<Self> {
        debug_assert!(capacity.is_power_of_two());
        Some(Self {
            slots: Zeroed::new(capacity)?,
            tail: OwnLine::default(),
            head: OwnLine::default(),
            missed: AtomicU64::new(0),
        })
    }

    /// The slot of a place, and its turn while it is free for that place.
    #[inline]
    fn slot(&self, place: u64) -> (&Slot, u64) {
        let index = place as usize & (self.slots.len() - 1);
        (&self.slots[index], place / self.slots.len() as u64 * 2)
    }

    /// Appends a record, or counts it where there is no room.
    #[inline]
    pub(super) fn push(&self, record: Words) {
        loop {
            let place = self.tail.0.load(Acquire);
            let (slot, free) = self.slot(place);
            // Acquire: the reader of the round before is done with the words.
            let turn = slot.turn.load(Acquire);
            if turn < free && !planted(Fault::OverwriteRecord) {
                // Relaxed: for people.
                self.missed.fetch_add(1, Relaxed);
                return;
            }
            let next = place + 1;
            if turn <= free && (self.tail.0).compare_exchange(place, next, AcqRel, Acquire).is_ok()
            {
                slot.write(record, free + 1);
                return;
            }
        }
    }

    /// Takes the oldest record out.
    pub(super) fn pop(&self) -> Option<Words> {
        loop {
            let place = self.head.0.load(Acquire);
            let (slot, free) = self.slot(place);
            // Acquire: the words were written before.
            let turn = slot.turn.load(Acquire);
            if turn <= free {
                return None;
            }
            // Several threads may read, whoever changes the pool.
            let next = place + 1;
            if turn == free + 1
                && (self.head.0).compare_exchange(place, next, AcqRel, Acquire).is_ok()
            {
                return Some(slot.read(free + 2));
            }
        }
    }

    /// Records for which there was no room.
    pub(super) fn missed(&self) -> u64 {
        // Relaxed: for people.
        self.missed.load(Relaxed)
    }
}

impl Slot {
    #[inline]
    fn write(&self, record: Words, turn: u64) {
        if planted(Fault::PublishEarly) {
            self.turn.store(turn, Release);
        }
        for (word, value) in self.words.iter().zip(record) {
            // Relaxed: the slot is this thread's until the turn ends.
            word.store(value, Relaxed);
        }
        // Release: pairs with the reader's load.
        self.turn.store(turn, Release);
    }

    fn read(&self, turn: u64) -> Words {
        // Relaxed: as in `write`.
        let words = std::array::from_fn(|word| self.words[word].load(Relaxed));
        // Release: pairs with the next writer's load.
        self.turn.store(turn, Release);
        words
    }
}

#[cfg(all(test, loom))]
mod models {
    use loom::sync::Arc;

    use super::*;
    use crate::sync::{in_parallel, model};

    /// Two threads write a record each into a log of `capacity`, which has been round once, and one reads in
    /// parallel: each record is read once and whole, or counted as missed.
    fn writers_and_a_reader(capacity: usize) {
        let log = Arc::new(Log::new(capacity).unwrap());
        for _ in 0..capacity {
            log.push([9; WORDS]);
            assert_eq!(log.pop(), Some([9; WORDS]));
        }
        let writing = in_parallel(&log, |log| log.push([1; WORDS]));
        let reading = in_parallel(&log, Log::pop);
        log.push([2; WORDS]);
        writing.join().unwrap();
        let mut read: Vec<Words> = reading.join().unwrap().into_iter().collect();
        read.extend(std::iter::from_fn(|| log.pop()));
        assert_eq!(read.len() as u64 + log.missed(), 2, "a record was lost or doubled");
        read.sort_unstable();
        read.dedup();
        assert_eq!(read.len() as u64 + log.missed(), 2, "a record was read twice");
        let whole = |words: &Words| *words == [1; WORDS] || *words == [2; WORDS];
        assert!(read.iter().all(whole), "a record was torn: {read:?}");
    }

    fn log_with_room() {
        writers_and_a_reader(2);
    }

    model!(log_with_room, fails with PublishEarly(""));

    fn log_that_fills_up() {
        writers_and_a_reader(1);
    }

    model!(log_that_fills_up, fails with OverwriteRecord(""));
}
