//! How the one writer changes the index: plain stores, in the order that readers rely on.

use crate::id::BlockId;
use crate::records::index::{Bucket, Index, Spot, block_of, tag_of};
use crate::sync::{AtomicU64, Fault, Ordering, planted};

use Ordering::{Relaxed, Release};

/// Adds, wrapping around, to a word that nobody else changes.
fn add(word: &AtomicU64, amount: u64) {
    // Relaxed: this thread wrote it last. Release: who sees an entry behind the bucket sees it counted.
    word.store(word.load(Relaxed).wrapping_add(amount), Release);
}

impl Index {
    /// Enters a block. A table has room for all blocks.
    ///
    /// `ended` looks at a block's record and says where that content belongs, if its epoch has ended.
    pub(super) fn enter(
        &self,
        spot: Spot,
        block: BlockId,
        ended: impl Fn(BlockId) -> Option<Spot>,
    ) {
        let entry = spot.entry(block);
        for (passed, bucket) in self.chain(spot).enumerate() {
            if let Some(place) = bucket.place_of(0) {
                // Release: with the entry the block's record is seen, and that the buckets before count it.
                place.store(entry, Release);
            } else if !self.replace_ended(spot, bucket, entry, &ended) {
                add(&bucket.overflow, 1);
                continue;
            }
            if bucket.is_passed() {
                self.clear_ended(spot, passed + 1, &ended);
            }
            return;
        }
        debug_assert!(false, "the index is full");
    }

    /// Puts `new` in the place of one entry whose epoch has ended; whether there was one.
    #[cold]
    fn replace_ended(
        &self,
        spot: Spot,
        bucket: &Bucket,
        new: u64,
        ended: impl Fn(BlockId) -> Option<Spot>,
    ) -> bool {
        bucket.entries.iter().any(|place| {
            let entry = place.load(Relaxed);
            if entry == 0 || !spot.differs_in_epoch(entry) {
                return false;
            }
            let Some(old) = ended(block_of(entry)).filter(|old| old.tag == tag_of(entry)) else {
                return false;
            };
            // Release: as in `enter`.
            place.store(new, Release);
            if !planted(Fault::KeepCounts) {
                let passed = self.chain(old).position(|on_way| std::ptr::eq(on_way, bucket));
                self.uncount(old, passed.unwrap_or(0));
            }
            true
        })
    }

    /// Removes the entries of ended epochs from the buckets of a chain that a lookup reads from the
    /// bucket number `first` on. Each of them costs a look at a record, once.
    #[cold]
    fn clear_ended(&self, spot: Spot, first: usize, ended: impl Fn(BlockId) -> Option<Spot>) {
        for bucket in self.chain_in_use(spot).skip(first) {
            while self.replace_ended(spot, bucket, 0, &ended) {}
        }
    }

    /// Removes a block's entry; false where a registration has taken its place.
    #[inline]
    pub(super) fn leave(&self, spot: Spot, block: BlockId) -> bool {
        let Some((passed, place)) = self.find_entry(spot, spot.entry(block)) else {
            return false;
        };
        // Release: who sees the place empty sees the record erased.
        place.store(0, Release);
        self.uncount(spot, passed);
        true
    }

    /// Puts a block in the place of another one of the same spot, if that has an entry.
    ///
    /// The counts of the buckets before it stay, as both come from the same home.
    pub(super) fn exchange(&self, spot: Spot, old: BlockId, new: BlockId) {
        if let Some((_, place)) = self.find_entry(spot, spot.entry(old)) {
            // Release: as in `enter`.
            place.store(spot.entry(new), Release);
        }
    }

    #[inline]
    fn uncount(&self, spot: Spot, passed: usize) {
        for bucket in self.chain(spot).take(passed) {
            add(&bucket.overflow, 1_u64.wrapping_neg());
        }
    }
}

#[cfg(all(test, loom))]
mod models {
    use loom::sync::Arc;

    use super::*;
    use crate::id::Epoch;
    use crate::records::Content;
    use crate::records::index::BLOCKS_PER_BUCKET;
    use crate::sync::{in_parallel, model};

    const EPOCH: Epoch = Epoch::new(0);

    /// Contents whose chains start at the first of two buckets, with room for two entries each.
    fn at_home(index: &Index) -> impl Iterator<Item = Spot> {
        let contents = (0..).map(|number| Content { hash: [number; 4], group: 0 });
        contents.map(|content| index.spot(&content, EPOCH)).filter(|spot| spot.home == 0)
    }

    fn finds(index: &Index, spot: Spot, block: u32) -> bool {
        let mut is_there = false;
        index.for_each_candidate(spot, |id| is_there |= id == BlockId::new(block));
        is_there
    }

    /// The home bucket is full. The writer enters a third block behind it and removes the second, while a reader
    /// looks: what stays is found, and what was found is found again.
    fn enter_and_leave_with_lookup() {
        let index = Index::new(2 * BLOCKS_PER_BUCKET).unwrap();
        let spots: Vec<Spot> = at_home(&index).take(3).collect();
        for (spot, block) in spots[..2].iter().zip(1..) {
            index.enter(*spot, BlockId::new(block), |_| None);
        }
        let shared = Arc::new((index, spots));
        let writing = in_parallel(&shared, |(index, spots)| {
            index.enter(spots[2], BlockId::new(3), |_| None);
            assert!(index.leave(spots[1], BlockId::new(2)));
        });
        let (index, spots) = &*shared;
        assert!(finds(index, spots[0], 1), "an entry was overlooked");
        let before = finds(index, spots[2], 3);
        assert!(finds(index, spots[2], 3) || !before, "an entry was overlooked");
        writing.join().unwrap();
        let mut left: Vec<BlockId> = index.walk().collect();
        left.sort_unstable();
        assert_eq!(left, [1, 3].map(BlockId::new));
        index.check(EPOCH, |id| spots[id.index() - 1]).expect("the table is whole");
    }

    model!(enter_and_leave_with_lookup);
}
