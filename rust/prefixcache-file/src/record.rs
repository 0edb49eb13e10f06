//! The record of a block: 64 bytes in the file, all of them atomics.
//!
//! `state` decides. 0: there is no record. Even: the block is published, and its checksum is still to be computed;
//! the number names this one publishing of this process. Odd: the record is valid, and the number is the checksum of
//! all other words but `usage`, and of the block's id, so that a record that is torn or lies elsewhere is none.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

use prefixcache_core::band::Band;
use prefixcache_core::id::{BlockHash, BlockId, BlockKey, GroupId};
use twox_hash::XxHash3_64;

use Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};

pub(crate) const NONE: u64 = 0;

const EPOCH_BITS: u32 = 48;
pub(crate) const EPOCH_MASK: u64 = (1 << EPOCH_BITS) - 1;

/// One block's record.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Record {
    pub(crate) state: AtomicU64,
    pub(crate) hash: [AtomicU64; 4],
    /// The checksum of the block's bytes.
    pub(crate) sum: AtomicU64,
    /// `group:16 | epoch:48`.
    pub(crate) name: AtomicU64,
    /// [`Usage`]; a wrong one costs nothing but order.
    pub(crate) usage: AtomicU64,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Record>() == crate::layout::RECORD_BYTES);

/// The words of a record that its checksum is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Words {
    pub(crate) hash: [u64; 4],
    pub(crate) sum: u64,
    pub(crate) name: u64,
}

impl Words {
    pub(crate) fn of(key: &BlockKey, epoch: u64) -> Self {
        let (words, _) = key.hash.as_bytes().as_chunks();
        let hash = std::array::from_fn(|at| u64::from_le_bytes(words[at]));
        let name = u64::from(key.group.get()) << EPOCH_BITS | epoch & EPOCH_MASK;
        let sum = 0;
        Self { hash, sum, name }
    }

    pub(crate) fn key(&self) -> BlockKey {
        let mut bytes = [0; 32];
        bytes.as_chunks_mut().0.copy_from_slice(&self.hash.map(u64::to_le_bytes));
        let group = GroupId::new((self.name >> EPOCH_BITS) as u16);
        BlockKey::new(BlockHash::from_bytes(bytes), group)
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.name & EPOCH_MASK
    }

    /// The state of a valid record with these words.
    pub(crate) fn valid(&self, block: BlockId, seed: u64) -> u64 {
        let [a, b, c, d] = self.hash;
        let words = [a, b, c, d, self.sum, self.name, block.get().into()];
        XxHash3_64::oneshot_with_seed(seed, words.map(u64::to_le_bytes).as_flattened()) | 1
    }
}

/// Every store to the mapping, but for the one that makes a record valid. Release: no store before it comes after it,
/// in this process or for the next.
pub(crate) fn put(word: &AtomicU64, value: u64, survives: impl Fn() -> bool) {
    if survives() {
        word.store(value, Release);
    }
}

impl Record {
    pub(crate) fn state(&self) -> u64 {
        // Acquire: whoever sees a state sees the words that were written before it.
        self.state.load(Acquire)
    }

    /// Relaxed: the state is read before them, and again after them where somebody may write meanwhile.
    pub(crate) fn words(&self) -> Words {
        Words {
            hash: self.hash.each_ref().map(|word| word.load(Relaxed)),
            sum: self.sum.load(Relaxed),
            name: self.name.load(Relaxed),
        }
    }

    /// Writes the words of a record that is withdrawn, and its state last.
    ///
    /// Here and below `survives` is asked before each store, and says whether the process lives to make it.
    pub(crate) fn write(&self, words: &Words, state: u64, survives: impl Fn() -> bool) {
        for (word, value) in self.hash.iter().zip(words.hash) {
            put(word, value, &survives);
        }
        put(&self.sum, words.sum, &survives);
        put(&self.name, words.name, &survives);
        put(&self.state, state, &survives);
    }

    /// Withdraws the record. The block's bytes may change once this returns.
    pub(crate) fn withdraw(&self, survives: impl Fn() -> bool) {
        if self.state() != NONE && survives() {
            // An exchange: that of the checksum thread comes before it or fails. SeqCst: no store to the block's bytes
            // comes before the record is gone.
            self.state.swap(NONE, SeqCst);
        }
    }

    /// Makes a record valid whose state is still `state`; whether it was. Of the checksum thread.
    pub(crate) fn complete(
        &self,
        block: BlockId,
        state: u64,
        sum: u64,
        seed: u64,
        survives: impl Fn() -> bool,
    ) -> bool {
        // Relaxed: the exchange of the sum and that of the state both fail for what came meanwhile.
        let before = self.sum.load(Relaxed);
        if self.state() != state || !survives() {
            return false;
        }
        // The writer may have moved a valid block here since the state was looked at: its sum stays. Release: as in
        // [`put`].
        let _ = self.sum.compare_exchange(before, sum, Release, Relaxed);
        let valid = Words { sum, ..self.words() }.valid(block, seed);
        // AcqRel: the words are as they were when the writer stored `state`, and what follows sees the record.
        let exchange = || self.state.compare_exchange(state, valid, AcqRel, Acquire);
        survives() && exchange().is_ok()
    }

    /// The words, if the record is valid for this block.
    pub(crate) fn valid_words(&self, block: BlockId, seed: u64) -> Option<Words> {
        let state = self.state();
        let words = self.words();
        (state & 1 == 1 && state == words.valid(block, seed)).then_some(words)
    }
}

/// `in use:1 | pinned:1 | priority level:3 | number of the use:48`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage(pub(crate) u64);

impl Usage {
    const ORDER: u64 = (1 << 48) - 1;

    pub(crate) fn in_use(order: u64) -> Self {
        Self(1 << 52 | (Band::DEFAULT.index() as u64) << 48 | order & Self::ORDER)
    }

    pub(crate) fn queued(order: u64, band: Band, pinned: bool) -> Self {
        Self(u64::from(pinned) << 51 | (band.index() as u64) << 48 | order & Self::ORDER)
    }

    /// The same priority and pin, used as the `order`-th.
    pub(crate) fn used_again(self, order: u64) -> Self {
        Self(1 << 52 | self.0 & 0xf << 48 | order & Self::ORDER)
    }

    /// The same use with another priority and pin.
    pub(crate) fn classed(self, band: Band, pinned: bool) -> Self {
        let class = u64::from(pinned) << 51 | (band.index() as u64) << 48;
        Self(self.0 & !(0xf << 48) | class)
    }

    pub(crate) fn band(self) -> Band {
        Band::all().nth((self.0 >> 48 & 7) as usize).unwrap_or_default()
    }

    pub(crate) fn pinned(self) -> bool {
        self.0 >> 51 & 1 == 1
    }

    /// Rises in the order of eviction. What was in use counts as released at the end, the newest first, as the
    /// end of a prompt is before its beginning.
    pub(crate) fn rank(self) -> (bool, u64) {
        let (in_use, order) = (self.0 >> 52 & 1 == 1, self.0 & Self::ORDER);
        (in_use, if in_use { Self::ORDER - order } else { order })
    }
}

/// A record and its block, which the writer and the checksum thread change until the process dies.
#[cfg(all(test, loom))]
mod models {
    use std::cell::Cell;
    use std::sync::Arc;

    use loom::thread;

    use super::*;

    const SEED: u64 = 7;
    const BLOCK: BlockId = BlockId::new(3);

    /// What a writer or a checksum thread can do wrong.
    #[derive(Clone, Copy, PartialEq)]
    enum Wrong {
        Nothing,
        /// The bytes change before the record is withdrawn.
        WriteEarly,
        /// The record is written before the bytes.
        PublishEarly,
        /// Two publishings have one number.
        OneNumber,
        /// A record is made valid whatever its state is meanwhile.
        NoExchange,
    }

    struct Block {
        record: Record,
        /// Its bytes: the first word of the hash that they belong to.
        bytes: AtomicU64,
    }

    impl Block {
        fn new() -> Self {
            let word = || AtomicU64::new(0);
            let record = Record {
                state: word(),
                hash: std::array::from_fn(|_| word()),
                sum: word(),
                name: word(),
                usage: word(),
            };
            Self { record, bytes: word() }
        }

        fn publish(&self, content: u64, number: u64, wrong: Wrong, survives: &impl Fn() -> bool) {
            let words = Words { hash: [content, 0, 0, 0], sum: 0, name: 0 };
            let is_early = wrong == Wrong::PublishEarly;
            if is_early {
                self.record.write(&words, number, survives);
            }
            put(&self.bytes, content, survives);
            if !is_early {
                self.record.write(&words, number, survives);
            }
        }

        /// Two contents, one after the other.
        fn write(&self, wrong: Wrong, survives: &impl Fn() -> bool) {
            self.publish(1, 2, wrong, survives);
            if wrong == Wrong::WriteEarly {
                put(&self.bytes, 2, survives);
            }
            self.record.withdraw(survives);
            let number = if wrong == Wrong::OneNumber { 2 } else { 4 };
            self.publish(2, number, wrong, survives);
        }

        fn check(&self, wrong: Wrong, survives: &impl Fn() -> bool) {
            let state = self.record.state();
            if state == NONE || state & 1 == 1 {
                return;
            }
            // Acquire stands for the system call that reads the bytes.
            let sum = self.bytes.load(Acquire);
            let now = match wrong {
                Wrong::NoExchange => self.record.state(),
                _ => state,
            };
            let _ = self.record.complete(BLOCK, now, sum, SEED, survives);
        }
    }

    /// Lets that number of stores happen.
    fn lives_for(stores: u32) -> impl Fn() -> bool {
        let left = Cell::new(stores);
        move || left.replace(left.get().saturating_sub(1)) > 0
    }

    /// Each thread dies at each of its stores, in all interleavings of up to two preemptions: a record that is valid
    /// then fits its block.
    fn die_at_any_store(wrong: Wrong) {
        for stores in 8..=17 {
            for checks in 1..=2 {
                let mut builder = loom::model::Builder::new();
                builder.preemption_bound = builder.preemption_bound.or(Some(2));
                builder.check(move || {
                    let block = Arc::new(Block::new());
                    let other = Arc::clone(&block);
                    let checking = thread::spawn(move || other.check(wrong, &lives_for(checks)));
                    block.write(wrong, &lives_for(stores));
                    checking.join().unwrap();
                    if let Some(words) = block.record.valid_words(BLOCK, SEED) {
                        let bytes = block.bytes.load(Relaxed);
                        assert_eq!((words.hash[0], words.sum), (bytes, bytes), "a torn block");
                    }
                });
            }
        }
    }

    #[test]
    fn a_valid_record_fits_its_block() {
        die_at_any_store(Wrong::Nothing);
    }

    #[test]
    #[should_panic(expected = "a torn block")]
    fn bytes_that_change_early_are_found() {
        die_at_any_store(Wrong::WriteEarly);
    }

    #[test]
    #[should_panic(expected = "a torn block")]
    fn a_record_before_its_bytes_is_found() {
        die_at_any_store(Wrong::PublishEarly);
    }

    #[test]
    #[should_panic(expected = "a torn block")]
    fn one_number_for_two_publishings_is_found() {
        die_at_any_store(Wrong::OneNumber);
    }

    #[test]
    #[should_panic(expected = "a torn block")]
    fn a_record_that_is_made_valid_in_any_state_is_found() {
        die_at_any_store(Wrong::NoExchange);
    }
}
