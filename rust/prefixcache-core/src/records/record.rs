//! What a block holds: the words that a lookup compares.
//!
//! A writer erases the record before it changes it: `seq` is 0 while the content changes, and unique to each
//! registration. A reader loads `seq`, then the content, then `seq` again. The content's stores release and its
//! loads acquire, so a reader that saw a word of new content sees `seq` changed, and one that finds `seq` the same
//! around its loads has seen one registration whole.

use std::num::NonZeroU64;

use crate::id::{BlockHash, BlockKey, Epoch, GroupId};
use crate::sync::{AtomicU16, AtomicU32, AtomicU64, Fault, Ordering, planted};

use Ordering::{Acquire, Relaxed, Release};

/// In `seq`: the registration is entered in the index, and its final number is still to come.
pub(crate) const OPEN: u64 = 1 << 63;

/// What a block holds. 48 bytes: with 16 of a writer's own a cache line.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Record {
    /// Which registration, in the order of the pool's life, wrote the content; 0 for none.
    pub(crate) seq: AtomicU64,
    hash: [AtomicU64; 4],
    /// The low 32 bits of the epoch.
    epoch: AtomicU32,
    /// The other 16.
    epoch_high: AtomicU16,
    group: AtomicU16,
}

impl Record {
    /// Writes the content of an erased record that is the caller's. From the last store on, lookups find it.
    pub(crate) fn write(&self, content: &Content, epoch: Epoch, seq: u64) {
        // Release, all of them: a reader that acquires one sees the `seq` of 0 that stands before it,
        // and a reader that acquires the new `seq` sees all of them.
        for (word, value) in self.hash.iter().zip(content.hash) {
            word.store(value, Release);
        }
        self.group.store(content.group, Release);
        self.epoch.store(epoch.get() as u32, Release);
        self.epoch_high.store((epoch.get() >> 32) as u16, Release);
        self.seq.store(seq, Release);
    }

    /// Ends the content for lookups. The words stay, for the removal of the index entry.
    #[inline]
    pub(crate) fn erase(&self) {
        if !planted(Fault::KeepNumber) {
            // Release: so that a reader that acquires a word of the content to come sees this.
            self.seq.store(0, Release);
        }
    }

    /// The number of the registration whose content the block has; 0 for none.
    #[inline]
    pub(crate) fn seq(&self) -> u64 {
        self.seq.load(Acquire)
    }

    /// The content's epoch; whole as [`Self::content`] is. Halves of two epochs are never the epoch of now: they
    /// would have to be 2^32 epochs apart.
    #[inline]
    pub(crate) fn epoch(&self) -> Epoch {
        let (low, high) = (self.epoch.load(Acquire), self.epoch_high.load(Acquire));
        Epoch::new(u64::from(high) << 32 | u64::from(low))
    }

    /// The content's name. Whole only for who keeps the block from being recycled, or finds `seq` the same around it.
    #[inline]
    pub(crate) fn content(&self) -> Content {
        Content {
            hash: std::array::from_fn(|word| self.hash[word].load(Acquire)),
            group: self.group.load(Acquire),
        }
    }

    /// What the block is found by; whole as [`Self::content`] is.
    pub(crate) fn key(&self) -> BlockKey {
        self.content().key()
    }

    /// Whether the words are those of `content`, compared in registers: an iterator over both would be kept in
    /// memory, and gathering the words there first stalls.
    #[inline]
    fn equals(&self, content: &Content) -> bool {
        let differing = |word: usize| self.hash[word].load(Acquire) ^ content.hash[word];
        let group = u64::from(self.group.load(Acquire) ^ content.group);
        differing(0) | differing(1) | differing(2) | differing(3) | group == 0
    }

    /// The registration that gave the block `content` in `epoch`, if that is what it holds. One whose
    /// number is open is not found yet.
    #[inline]
    pub(crate) fn matches(&self, content: &Content, epoch: Epoch) -> Option<NonZeroU64> {
        let seq = self.seq();
        // One comparison for both: 0 wraps around.
        if seq.wrapping_sub(1) >= OPEN - 1 {
            return None;
        }
        self.stays_same(seq, content, epoch)
    }

    /// `seq`, if the block holds `content` of `epoch` from before it was read until after.
    #[inline]
    pub(crate) fn stays_same(
        &self,
        seq: u64,
        content: &Content,
        epoch: Epoch,
    ) -> Option<NonZeroU64> {
        let same = self.epoch() == epoch && self.equals(content);
        // Relaxed: the loads of the content acquire, so this one cannot pass before them.
        let same = same && self.seq.load(Relaxed) == seq;
        same.then(|| NonZeroU64::new(seq)).flatten()
    }
}

/// A [`BlockKey`] in words, as records and index compare it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Content {
    pub(crate) hash: [u64; 4],
    pub(crate) group: u16,
}

impl Content {
    pub(crate) fn key(self) -> BlockKey {
        let mut bytes = [0; 32];
        for (word, value) in bytes.chunks_exact_mut(8).zip(self.hash) {
            word.copy_from_slice(&value.to_le_bytes());
        }
        BlockKey::new(BlockHash::from_bytes(bytes), GroupId::new(self.group))
    }
}

impl From<&BlockKey> for Content {
    #[inline]
    fn from(key: &BlockKey) -> Self {
        let (words, _) = key.hash.as_bytes().as_chunks::<8>();
        Self {
            hash: std::array::from_fn(|word| u64::from_le_bytes(words[word])),
            group: key.group.get(),
        }
    }
}

#[cfg(all(test, loom))]
mod models {
    use loom::sync::Arc;

    use super::*;
    use crate::sync::{in_parallel, model};

    /// A block gets other content while a reader looks for a mix of both, which it never has.
    fn rewrite_with_lookup() {
        let record = Arc::new(Record::default());
        let epoch = Epoch::new(0);
        let content = |hash| Content { hash, group: 0 };
        record.write(&content([1; 4]), epoch, 1);
        let rewriting = in_parallel(&record, move |record| {
            record.erase();
            record.write(&content([2; 4]), epoch, 2);
        });
        let mixed = record.matches(&content([2, 2, 1, 1]), epoch);
        assert_eq!(mixed, None, "a torn record matched");
        rewriting.join().unwrap();
        assert!(record.matches(&content([2; 4]), epoch).is_some());
    }

    model!(rewrite_with_lookup, fails with KeepNumber("a torn record matched"));
}
