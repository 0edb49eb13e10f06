//! How entries of the [index](crate::records::index) change, in both pools.
//!
//! An entry is emptied by the thread that forgets its block (one at a time does), or taken over by an insertion, of
//! which [`MAX_COPIES`](crate::store::MAX_COPIES) speaks, too. Of several writers both exchange the entry as they read
//! it, so one of them succeeds, and that one takes the counts back. A block's record is rewritten only after its old
//! entry is gone. So when the exchange of an insertion succeeds, the record that it read just before, which says what
//! buckets the old entry had passed, was that entry's.

use crate::id::BlockId;
use crate::records::index::{Bucket, Index, Spot, block_of, tag_of};
use crate::sync::{AtomicU64, Fault, Ordering, planted};

use Ordering::{AcqRel, Acquire, Relaxed, Release};

/// How a pool's writers change a word of the index.
pub(super) trait Words {
    /// Stores `new` if the word is `current`; whether it was.
    fn exchange(word: &AtomicU64, current: u64, new: u64) -> bool;

    /// Adds, wrapping around.
    fn add(word: &AtomicU64, amount: u64);
}

/// Of the only writer: plain stores.
pub(super) enum Alone {}

impl Words for Alone {
    #[inline]
    fn exchange(word: &AtomicU64, current: u64, new: u64) -> bool {
        // Relaxed: this thread wrote it last.
        debug_assert_eq!(word.load(Relaxed), current);
        // Release: with an entry its block's record is seen, and that the buckets before count it; who sees a place
        // empty sees the record erased.
        word.store(new, Release);
        true
    }

    #[inline]
    fn add(word: &AtomicU64, amount: u64) {
        // Relaxed: as above. Release: who sees an entry behind the bucket sees it counted.
        word.store(word.load(Relaxed).wrapping_add(amount), Release);
    }
}

/// Of several writers: one read-modify-write, with one order for all, as in `many_writers/words.rs`.
pub(super) enum Among {}

impl Words for Among {
    #[inline]
    fn exchange(word: &AtomicU64, current: u64, new: u64) -> bool {
        word.compare_exchange(current, new, AcqRel, Acquire).is_ok()
    }

    #[inline]
    fn add(word: &AtomicU64, amount: u64) {
        word.fetch_add(amount, AcqRel);
    }
}

impl Index {
    /// Enters a block; whether there was room, which there always is for an only writer.
    ///
    /// `ended` looks at a block's record and says where that content belongs, if its epoch has ended.
    pub(super) fn enter<W: Words>(
        &self,
        spot: Spot,
        block: BlockId,
        ended: impl Fn(BlockId) -> Option<Spot>,
    ) -> bool {
        let late = planted(Fault::CountLate);
        let entry = spot.entry(block);
        for (passed, bucket) in self.chain(spot).enumerate() {
            if fill_empty::<W>(bucket, entry)
                || self.replace_ended::<W>(spot, bucket, entry, &ended)
            {
                if late {
                    self.count::<W>(spot, passed, 1);
                }
                if bucket.is_passed() {
                    self.clear_ended::<W>(spot, passed + 1, &ended);
                }
                return true;
            }
            if !late {
                W::add(&bucket.overflow, 1);
            }
        }
        self.uncount::<W>(spot, self.buckets.len());
        false
    }

    /// Puts `new` in the place of one entry whose epoch has ended; whether there was one.
    #[cold]
    fn replace_ended<W: Words>(
        &self,
        spot: Spot,
        bucket: &Bucket,
        new: u64,
        ended: impl Fn(BlockId) -> Option<Spot>,
    ) -> bool {
        bucket.entries.iter().any(|place| {
            // Acquire: the record that `ended` looks at was written before its entry.
            let entry = place.load(Acquire);
            if entry == 0 || !spot.differs_in_epoch(entry) {
                return false;
            }
            // A record with another tag is not this entry's any more, which is about to be emptied.
            let Some(old) = ended(block_of(entry)).filter(|old| old.tag == tag_of(entry)) else {
                return false;
            };
            let replaced = W::exchange(place, entry, new);
            if replaced && !planted(Fault::KeepCounts) {
                let passed = self.chain(old).position(|on_way| std::ptr::eq(on_way, bucket));
                self.uncount::<W>(old, passed.unwrap_or(0));
            }
            replaced
        })
    }

    /// Removes the entries of ended epochs from the buckets of a chain that a lookup reads from the
    /// bucket number `first` on. Each of them costs a look at a record, once.
    #[cold]
    fn clear_ended<W: Words>(
        &self,
        spot: Spot,
        first: usize,
        ended: impl Fn(BlockId) -> Option<Spot>,
    ) {
        for bucket in self.chain_in_use(spot).skip(first) {
            while self.replace_ended::<W>(spot, bucket, 0, &ended) {}
        }
    }

    /// Removes a block's entry, unless an insertion has taken its place.
    #[inline]
    pub(super) fn leave<W: Words>(&self, spot: Spot, block: BlockId) -> bool {
        let entry = spot.entry(block);
        let Some((passed, place)) = self.find_entry(spot, entry) else {
            return false;
        };
        let removed = if planted(Fault::BlindRemoval) {
            place.store(0, Release);
            true
        } else {
            W::exchange(place, entry, 0)
        };
        if removed {
            self.uncount::<W>(spot, passed);
        }
        removed
    }

    /// Puts a block in the place of another one of the same spot; whether that one still stood there.
    ///
    /// The counts of the buckets before it stay, as both come from the same home.
    pub(super) fn exchange<W: Words>(&self, spot: Spot, old: BlockId, new: BlockId) -> bool {
        let (old, new) = (spot.entry(old), spot.entry(new));
        self.find_entry(spot, old).is_some_and(|(_, place)| W::exchange(place, old, new))
    }

    #[inline]
    fn uncount<W: Words>(&self, spot: Spot, passed: usize) {
        self.count::<W>(spot, passed, 1_u64.wrapping_neg());
    }

    #[inline]
    fn count<W: Words>(&self, spot: Spot, passed: usize, change: u64) {
        self.chain(spot).take(passed).for_each(|bucket| W::add(&bucket.overflow, change));
    }
}

/// Fills the first empty place of a bucket; whether there was one.
fn fill_empty<W: Words>(bucket: &Bucket, entry: u64) -> bool {
    // Each exchange that fails means that another thread has filled the place.
    while let Some(place) = bucket.place_of(0) {
        if W::exchange(place, 0, entry) {
            return true;
        }
    }
    false
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use crate::id::Epoch;
    use crate::records::Content;
    use crate::records::index::{BLOCKS_PER_BUCKET, ENTRIES};

    const OLD: Epoch = Epoch::new(0);
    const NOW: Epoch = Epoch::new(1);

    /// Entries of an ended epoch fill the home bucket of a key, whose own entry comes next.
    fn after_a_reset(ended: impl Fn(&Index, BlockId) -> Option<Spot>) -> Result<(), String> {
        let index = Index::new(16 * BLOCKS_PER_BUCKET).unwrap();
        let content = Content::default();
        let spot_of = |id: BlockId| {
            let old = id.index() <= ENTRIES;
            index.spot(&content, if old { OLD } else { NOW })
        };
        for id in (1..=ENTRIES as u32 + 1).map(BlockId::new) {
            let ended = |id| ended(&index, id);
            assert!(index.enter::<Alone>(spot_of(id), id, ended));
        }
        index.check(NOW, spot_of)
    }

    #[test]
    fn ended_entries_make_room() {
        let ended = |index: &Index, _| Some(index.spot(&Content::default(), OLD));
        assert_eq!(after_a_reset(ended), Ok(()));
    }

    #[test]
    fn a_check_sees_ended_entries_that_were_passed() {
        let outcome = after_a_reset(|_, _| None);
        assert_eq!(outcome, Err("block 8 passed entries of ended epochs".into()));
    }
}

#[cfg(all(test, loom))]
mod models {
    use std::marker::PhantomData;

    use loom::sync::Arc;

    use super::*;
    use crate::id::Epoch;
    use crate::records::Content;
    use crate::records::index::{BLOCKS_PER_BUCKET, FINGERPRINT_BITS};
    use crate::sync::{in_parallel, model};

    const OLD: Epoch = Epoch::new(0);
    const NOW: Epoch = Epoch::new(1);

    /// The spots of blocks from 1 on, which start at the same bucket of a table of two.
    struct Table<W> {
        index: Index,
        spots: Vec<Spot>,
        words: PhantomData<W>,
    }

    impl<W: Words> Table<W> {
        /// A table that holds the first blocks already, each registered in its epoch.
        fn new(epochs: &[Epoch]) -> Arc<Self> {
            let index = Index::new(2 * BLOCKS_PER_BUCKET).unwrap();
            let contents = (0..).map(|number| Content { hash: [number; 4], group: 0 });
            let at_home = contents.filter(|content| index.spot(content, OLD).home == 0);
            let epochs_of_all = epochs.iter().copied().chain([NOW; 2]);
            let spots = at_home.zip(epochs_of_all);
            let spots = spots.map(|(content, epoch)| index.spot(&content, epoch)).collect();
            let table = Self { index, spots, words: PhantomData };
            for block in 1..=epochs.len() as u32 {
                // Nothing has ended while the table is filled.
                table.enter(block, |_| None);
            }
            Arc::new(table)
        }

        fn spot_of(&self, block: BlockId) -> Spot {
            self.spots[block.index() - 1]
        }

        fn enter(&self, block: u32, ended: impl Fn(BlockId) -> Option<Spot>) {
            let block = BlockId::new(block);
            assert!(self.index.enter::<W>(self.spot_of(block), block, ended));
        }

        fn insert(&self, block: u32) {
            let is_old = |spot: &Spot| u64::from(spot.tag >> FINGERPRINT_BITS) == OLD.get();
            self.enter(block, |block| Some(self.spot_of(block)).filter(is_old));
        }

        fn remove(&self, block: u32) {
            let block = BlockId::new(block);
            self.index.leave::<W>(self.spot_of(block), block);
        }

        fn finds(&self, block: u32) -> bool {
            let block = BlockId::new(block);
            let mut finds = false;
            self.index.for_each_candidate(self.spot_of(block), |id| finds |= id == block);
            finds
        }

        /// Looks for block 1, which is always there, and twice for `new`.
        fn look(&self, new: u32) {
            assert!(self.finds(1), "an entry was overlooked");
            let before = self.finds(new);
            assert!(self.finds(new) || !before, "an entry was overlooked");
        }

        /// At rest, with these in the table.
        fn check_rest(&self, left: &[u32]) {
            let mut blocks: Vec<u32> = self.index.walk().map(BlockId::get).collect();
            blocks.sort_unstable();
            assert_eq!(blocks, left, "an entry was lost or left");
            self.index.check(NOW, |block| self.spot_of(block)).expect("the table is whole");
        }
    }

    /// The home bucket is full and a third entry stands behind it. One thread enters a fourth key, one
    /// removes the third, and a reader looks.
    fn insert_with_remove_and_lookup() {
        let table = Table::<Among>::new(&[NOW; 3]);
        let inserting = in_parallel(&table, |table| table.insert(4));
        let removing = in_parallel(&table, |table| table.remove(3));
        table.look(4);
        inserting.join().unwrap();
        removing.join().unwrap();
        table.check_rest(&[1, 2, 4]);
    }

    model!(insert_with_remove_and_lookup, fails with CountLate("overlooked"));

    /// The only writer enters a third key behind a full home bucket and removes the second, while a reader looks.
    fn insert_and_remove_with_lookup() {
        let table = Table::<Alone>::new(&[NOW; 2]);
        let writing = in_parallel(&table, |table| {
            table.insert(3);
            table.remove(2);
        });
        table.look(3);
        writing.join().unwrap();
        table.check_rest(&[1, 3]);
    }

    model!(insert_and_remove_with_lookup);

    /// The second and third entries are of an epoch that has ended; the third stands behind the home
    /// bucket. One thread enters a fourth key, which takes the second's place and clears the third's,
    /// while their blocks are recycled and a reader looks.
    fn replace_with_remove_and_lookup() {
        let table = Table::<Among>::new(&[NOW, OLD, OLD]);
        let inserting = in_parallel(&table, |table| table.insert(4));
        let removing = in_parallel(&table, |table| {
            table.remove(2);
            table.remove(3);
        });
        table.look(4);
        inserting.join().unwrap();
        removing.join().unwrap();
        table.check_rest(&[1, 4]);
    }

    model!(
        replace_with_remove_and_lookup,
        fails with BlindRemoval("the table is whole"), KeepCounts("overflows that are not there")
    );

    /// Two keys are entered at once where one place has an ended entry.
    fn two_replacements() {
        let table = Table::<Among>::new(&[NOW, OLD]);
        let other = in_parallel(&table, |table| table.insert(4));
        table.insert(3);
        assert!(table.finds(3), "an entry was overlooked");
        other.join().unwrap();
        assert!(table.finds(4), "an entry was overlooked");
        table.check_rest(&[1, 3, 4]);
    }

    model!(two_replacements);
}
