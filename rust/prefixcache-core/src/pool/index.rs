//! From content to block: a fixed table with open addressing, whose readers wait for nobody.
//!
//! A bucket is one cache line: a word that counts overflows, and seven entries of
//! `block:32 | epoch:8 | fingerprint:24`. The null block is never registered, so 0 is an empty entry.
//! An insertion takes the first place from its home bucket on that is empty or names content of an
//! ended epoch, and counts itself in every bucket that it passed. A lookup goes on past a bucket only
//! while that count is not 0, so a removal just empties the entry and takes the counts back; there are
//! no tombstones.
//!
//! The index only proposes: a fingerprint may be another's, and the block may have moved on since. The
//! caller looks at the block. Several blocks may hold the same content: it is for the caller to choose
//! among all that the lookup proposes.
//!
//! # Content of ended epochs
//!
//! Ending an epoch changes no entry. Lookups skip the entries of other epochs, as the low byte of the
//! epoch is compared along with the fingerprint. Insertions make room: one that finds a bucket full
//! takes the place of an entry whose epoch has ended, and clears those that stand further along its
//! chain. So whatever was registered before, a key's next entry passes only buckets that are full of
//! content of its own epoch. An entry from exactly 256 epochs ago looks like one of now; the caller's
//! look at the block tells them apart, and a later epoch clears it.
//!
//! # Who changes an entry
//!
//! An entry is emptied by the thread that forgets its block (the block's state admits one at a time),
//! or taken over by an insertion, of which [`MAX_COPIES`](crate::store::MAX_COPIES) speaks, too. Both exchange the entry as they read it, so one of them succeeds, and
//! that one takes the counts back. A block's record is rewritten only after its old entry is gone.
//! So when the exchange of an insertion succeeds, the record that it read just before, which
//! says what buckets the old entry had passed, was that entry's.
//!
//! # Where entries stand
//!
//! The chain of a key visits every bucket, in runs of eight neighbours; the runs of different keys lie
//! apart. So an insertion always finds room (a table has seven places for each four blocks), a lookup
//! ends after all buckets at the latest (wait-free), and a key that many blocks hold fills only one run
//! of its neighbours' way. With blocks of different content, the longest of a million chains
//! has about ten buckets.

use crate::block::Content;
use crate::id::{BlockId, Epoch};
use crate::sync::{AtomicU64, Fault, Mode, Ordering, fence, planted, prefetch};
use crate::zeroed::{Zeroable, Zeroed};

use Ordering::{Acquire, Relaxed, Release};

/// Entries of a bucket. Two suffice a model check, and leave it more interleavings to look at.
const ENTRIES: usize = if cfg!(loom) { 2 } else { 7 };

/// Blocks for each bucket: a load of 4 in 7.
const BLOCKS_PER_BUCKET: usize = 4;

/// Neighbouring buckets that a chain visits before it goes elsewhere.
const RUN: usize = 8;

/// Bits of an entry below its epoch.
const FINGERPRINT_BITS: u32 = 24;

#[derive(Debug, Default)]
#[repr(C, align(64))]
struct Bucket {
    /// Entries that stand in later buckets because this one was full.
    overflow: AtomicU64,
    entries: [AtomicU64; ENTRIES],
}

// SAFETY: atomic integers and an array of them: zero is valid, is their default, and needs no drop.
unsafe impl Zeroable for Bucket {}

impl Bucket {
    /// One bit for each entry with this tag. Without a branch for each: they are looked at in every
    /// lookup, and one of them matches, no one knows which.
    #[inline]
    fn matching(&self, tag: u32, order: Ordering) -> u32 {
        let same = |entry: &AtomicU64| u32::from(tag_of(entry.load(order)) == tag);
        let entries = self.entries.iter().enumerate();
        entries.fold(0, |bits, (place, entry)| bits | same(entry) << place)
    }

    fn place_of(&self, entry: u64) -> Option<&AtomicU64> {
        // Relaxed: whoever goes on to change the place exchanges it, which checks and acquires.
        self.entries.iter().find(|place| place.load(Relaxed) == entry)
    }

    fn is_passed(&self) -> bool {
        // Acquire: an insertion counts itself here before its entry stands further on, so who knows of
        // the entry also sees the count.
        self.overflow.load(Acquire) != 0
    }
}

/// Epoch and fingerprint of an entry.
#[inline]
fn tag_of(entry: u64) -> u32 {
    entry as u32
}

/// The block of an entry, the null block for an empty one.
#[inline]
fn block_of(entry: u64) -> BlockId {
    BlockId::new((entry >> 32) as u32)
}

/// Where the chain of a content registered in one epoch starts, and what its entries start with.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Spot {
    home: usize,
    tag: u32,
}

impl Spot {
    fn entry(self, block: BlockId) -> u64 {
        u64::from(block.get()) << 32 | u64::from(self.tag)
    }

    /// Whether an entry, which is not empty, is of another epoch (or of one 256 epochs away).
    fn differs_in_epoch(self, entry: u64) -> bool {
        (tag_of(entry) ^ self.tag) >> FINGERPRINT_BITS != 0
    }
}

/// What a look at the home bucket alone can tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Only {
    /// No block holds the content.
    #[default]
    Nothing,
    /// If any block does, it is this one. The null block, which holds no content, stands here when the
    /// entry was emptied between two looks at it.
    This(BlockId),
    /// Two or more may.
    Unclear,
}

/// The high half of a product on its low half: every bit of both factors counts everywhere.
#[inline]
fn fold(one: u64, other: u64) -> u64 {
    let product = u128::from(one) * u128::from(other);
    (product >> 64) as u64 ^ product as u64
}

/// The table. It never grows: it is made for the most blocks that the pool may have.
pub(crate) struct Index {
    buckets: Zeroed<Bucket>,
}

impl Index {
    /// A table for `max_blocks` blocks, or nothing when there is no memory for it.
    pub(crate) fn new(max_blocks: usize) -> Option<Self> {
        let buckets = max_blocks.div_ceil(BLOCKS_PER_BUCKET).next_power_of_two();
        Some(Self { buckets: Zeroed::new(buckets)? })
    }

    /// Where `content` that is registered in `epoch` belongs.
    ///
    /// Hashes are uniform already, but nothing forces a caller to bring good ones, so all bits count:
    /// two folded products, as in wyhash (Wang Yi, 2019).
    #[inline]
    pub(crate) fn spot(&self, content: &Content, epoch: Epoch) -> Spot {
        let [a, b, c, d] = content.hash;
        let head = fold(a ^ 0x9e37_79b9_7f4a_7c15, b ^ 0xc2b2_ae3d_27d4_eb4f);
        let tail =
            fold(c ^ 0x1656_67b1_9e37_79f9, d ^ 0xd6e8_feb8_6659_fd93 ^ u64::from(content.group));
        let mixed = head ^ tail.rotate_left(32);
        let fingerprint = mixed as u32 & ((1 << FINGERPRINT_BITS) - 1);
        Spot {
            home: (mixed >> 32) as usize & (self.buckets.len() - 1),
            tag: (epoch.get() as u32) << FINGERPRINT_BITS | fingerprint,
        }
    }

    /// The buckets of a chain, in order: all of the table, each once.
    #[inline]
    fn chain(&self, spot: Spot) -> impl Iterator<Item = &Bucket> {
        let mask = self.buckets.len() - 1;
        // An odd number of runs: its multiples visit every run of the table before one comes again.
        let stride = (spot.tag as usize | 1).wrapping_mul(RUN);
        (0..self.buckets.len()).map(move |step| {
            let run = (step / RUN).wrapping_mul(stride);
            &self.buckets[(spot.home + step % RUN).wrapping_add(run) & mask]
        })
    }

    /// The buckets of a chain up to the first that no entry has passed: all that a lookup reads.
    #[inline]
    fn chain_in_use(&self, spot: Spot) -> impl Iterator<Item = &Bucket> {
        let mut passed = true;
        self.chain(spot)
            .take_while(move |bucket| std::mem::replace(&mut passed, bucket.is_passed()))
    }

    /// Starts to fetch the bucket that a lookup reads first.
    #[inline]
    pub(crate) fn prefetch(&self, spot: Spot) {
        prefetch(&self.buckets[spot.home]);
    }

    /// The block that a lookup will look at, when it is plain that there is at most one and that it is
    /// this one; else the lookup has to go the whole way.
    #[inline]
    pub(crate) fn only_candidate(&self, spot: Spot) -> Only {
        let bucket = &self.buckets[spot.home];
        // Acquire: as in `for_each_candidate`.
        let matching = bucket.matching(spot.tag, Acquire);
        if matching & matching.wrapping_sub(1) != 0 || bucket.is_passed() {
            return Only::Unclear;
        }
        match bucket.entries.get(matching.trailing_zeros() as usize) {
            None => Only::Nothing,
            Some(entry) => Only::This(block_of(entry.load(Acquire))),
        }
    }

    /// Every block that may hold the content of `spot`: all that do are among them.
    #[inline]
    pub(crate) fn for_each_candidate(&self, spot: Spot, mut look: impl FnMut(BlockId)) {
        for bucket in self.chain(spot) {
            // Acquire: the block's content was written before its entry.
            let mut matching = bucket.matching(spot.tag, Acquire);
            while matching != 0 {
                let entry = &bucket.entries[matching.trailing_zeros() as usize];
                // Acquire: as above. The entry may be another by now, or empty.
                let first = entry.load(Acquire);
                look(block_of(first));
                // Content that was moved meanwhile (`pool/moves.rs`) is in the block that stands here now: it
                // was erased in the first one after the entry was exchanged. Acquire: whoever saw it erased,
                // be it by a relaxed load, sees the entry exchanged.
                fence(Acquire);
                let now = entry.load(Acquire);
                if now != first && !planted(Fault::LookOnce) {
                    look(block_of(now));
                }
                matching &= matching - 1;
            }
            if !bucket.is_passed() {
                return;
            }
        }
    }

    /// Enters a block; whether there was room.
    ///
    /// `ended` looks at a block's record and says where that content belongs, if its epoch has ended.
    pub(crate) fn insert<M: Mode>(
        &self,
        spot: Spot,
        block: BlockId,
        ended: impl Fn(BlockId) -> Option<Spot>,
    ) -> bool {
        let late = planted(Fault::CountLate);
        let entry = spot.entry(block);
        for (passed, bucket) in self.chain(spot).enumerate() {
            if Self::fill_empty::<M>(bucket, entry)
                || self.replace_ended::<M>(spot, bucket, entry, &ended)
            {
                if late {
                    self.chain(spot).take(passed).for_each(|b| M::add(&b.overflow, 1));
                }
                if bucket.is_passed() {
                    self.clear_ended::<M>(spot, passed + 1, &ended);
                }
                return true;
            }
            if !late {
                M::add(&bucket.overflow, 1);
            }
        }
        self.uncount::<M>(spot, self.buckets.len());
        false
    }

    fn fill_empty<M: Mode>(bucket: &Bucket, entry: u64) -> bool {
        // Relaxed: the exchange checks again, and acquires.
        let mut places = bucket.entries.iter().filter(|place| place.load(Relaxed) == 0);
        places.any(|place| M::exchange(place, 0, entry).is_ok())
    }

    /// Puts `new` in the place of one entry whose epoch has ended; whether there was one.
    #[cold]
    fn replace_ended<M: Mode>(
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
            let replaced = M::exchange(place, entry, new).is_ok();
            if replaced && !planted(Fault::KeepCounts) {
                let passed = self.chain(old).position(|on_way| std::ptr::eq(on_way, bucket));
                self.uncount::<M>(old, passed.unwrap_or(0));
            }
            replaced
        })
    }

    /// Removes the entries of ended epochs from the buckets of a chain that a lookup reads from the
    /// bucket number `first` on. Each of them costs a look at a record, once.
    #[cold]
    fn clear_ended<M: Mode>(
        &self,
        spot: Spot,
        first: usize,
        ended: impl Fn(BlockId) -> Option<Spot>,
    ) {
        for bucket in self.chain_in_use(spot).skip(first) {
            while self.replace_ended::<M>(spot, bucket, 0, &ended) {}
        }
    }

    /// Removes a block's entry, unless an insertion has taken its place.
    pub(crate) fn remove<M: Mode>(&self, spot: Spot, block: BlockId) -> bool {
        let entry = spot.entry(block);
        let Some((passed, place)) = self.find_entry(spot, entry) else {
            return false;
        };
        let removed = if planted(Fault::BlindRemoval) {
            place.store(0, Release);
            true
        } else {
            M::exchange(place, entry, 0).is_ok()
        };
        if removed {
            self.uncount::<M>(spot, passed);
        }
        removed
    }

    /// Puts a block in the place of another one of the same spot; whether that one still stood there.
    ///
    /// The counts of the buckets before it stay, as both come from the same home.
    pub(crate) fn replace<M: Mode>(&self, spot: Spot, old: BlockId, new: BlockId) -> bool {
        let (old, new) = (spot.entry(old), spot.entry(new));
        self.find_entry(spot, old).is_some_and(|(_, place)| M::exchange(place, old, new).is_ok())
    }

    /// Where an entry stands, and how many buckets it has passed.
    #[inline]
    fn find_entry(&self, spot: Spot, entry: u64) -> Option<(usize, &AtomicU64)> {
        for (passed, bucket) in self.chain(spot).enumerate() {
            if let Some(place) = bucket.place_of(entry) {
                return Some((passed, place));
            }
            // As long as the entry stands, all buckets before it count it: who removes it sees its own
            // counts, or those of the block's last owner, through the block's state.
            if !bucket.is_passed() {
                return None;
            }
        }
        None
    }

    fn uncount<M: Mode>(&self, spot: Spot, passed: usize) {
        for bucket in self.chain(spot).take(passed) {
            M::add(&bucket.overflow, 1_u64.wrapping_neg());
        }
    }

    /// The blocks in the table, once for each entry.
    pub(crate) fn walk(&self) -> impl Iterator<Item = BlockId> {
        let entries = self.buckets.iter().flat_map(|bucket| &bucket.entries);
        let entries = entries.map(|entry| entry.load(Acquire)).filter(|&entry| entry != 0);
        entries.map(block_of)
    }

    /// Checks, at rest, that every entry can be found by what its block's record says (`spot_of`), that
    /// the overflow counts are those of the entries, and that no entry of `epoch` had to pass one of
    /// another epoch.
    pub(crate) fn check(
        &self,
        epoch: Epoch,
        spot_of: impl Fn(BlockId) -> Spot,
    ) -> Result<(), String> {
        let now = Spot { home: 0, tag: (epoch.get() as u32) << FINGERPRINT_BITS };
        let mut counts = vec![0_u64; self.buckets.len()];
        for block in self.walk() {
            let spot = spot_of(block);
            let found =
                self.chain(spot).position(|bucket| bucket.place_of(spot.entry(block)).is_some());
            let Some(passed) = found else {
                return Err(format!("the entry of block {block} cannot be found"));
            };
            for bucket in self.chain(spot).take(passed) {
                let differs = |entry: &AtomicU64| {
                    let entry = entry.load(Acquire);
                    entry != 0 && now.differs_in_epoch(entry)
                };
                if !now.differs_in_epoch(spot.entry(block)) && bucket.entries.iter().any(differs) {
                    return Err(format!("block {block} passed entries of ended epochs"));
                }
                counts[self.position_of(bucket)] += 1;
            }
        }
        let held = self.buckets.iter().map(|bucket| bucket.overflow.load(Acquire));
        if held.eq(counts) {
            return Ok(());
        }
        Err("the index counts overflows that are not there".into())
    }

    fn position_of(&self, bucket: &Bucket) -> usize {
        let offset = std::ptr::from_ref(bucket).addr() - self.buckets.as_ptr().addr();
        offset / size_of::<Bucket>()
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use crate::sync::Shared;

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
            assert!(index.insert::<Shared>(spot_of(id), id, ended));
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
    use loom::sync::Arc;

    use super::*;
    use crate::sync::{Shared, in_parallel, model};

    const OLD: Epoch = Epoch::new(0);
    const NOW: Epoch = Epoch::new(1);

    /// Contents whose chains start at the same bucket of a table of two; block `i + 1` holds number `i`.
    struct Table {
        index: Index,
        spots: Vec<Spot>,
    }

    impl Table {
        /// A table that holds `blocks` already, each registered in its epoch.
        fn new(blocks: &[Epoch]) -> Arc<Self> {
            let index = Index::new(2 * BLOCKS_PER_BUCKET).unwrap();
            let contents = (0..).map(|number| Content { hash: [number; 4], group: 0 });
            let at_home = contents.filter(|content| index.spot(content, OLD).home == 0);
            let epochs = blocks.iter().copied().chain(std::iter::repeat(NOW));
            let spots = at_home.zip(epochs).map(|(content, epoch)| index.spot(&content, epoch));
            let spots = spots.take(blocks.len() + 2).collect();
            let table = Self { index, spots };
            for (number, _) in blocks.iter().enumerate() {
                // Nothing has ended while the table is filled.
                let (spot, block) = (table.spots[number], Self::block(number));
                assert!(table.index.insert::<Shared>(spot, block, |_| None));
            }
            Arc::new(table)
        }

        fn block(number: usize) -> BlockId {
            BlockId::new(number as u32 + 1)
        }

        fn spot_of(&self, block: BlockId) -> Spot {
            self.spots[block.index() - 1]
        }

        fn insert(&self, number: usize) {
            let ended = |block: BlockId| {
                let spot = self.spot_of(block);
                (u64::from(spot.tag >> FINGERPRINT_BITS) == OLD.get()).then_some(spot)
            };
            let (spot, block) = (self.spots[number], Self::block(number));
            assert!(self.index.insert::<Shared>(spot, block, ended));
        }

        fn remove(&self, number: usize) {
            self.index.remove::<Shared>(self.spots[number], Self::block(number));
        }

        fn finds(&self, number: usize) -> bool {
            let mut found = false;
            self.index
                .for_each_candidate(self.spots[number], |id| found |= id == Self::block(number));
            found
        }

        /// Looks for number 0, which is always there, and twice for `new`.
        fn look(&self, new: usize) {
            assert!(self.finds(0), "an entry was overlooked");
            let before = self.finds(new);
            assert!(self.finds(new) || !before, "an entry was overlooked");
        }

        /// At rest, with these in the table.
        fn check_rest(&self, left: &[usize]) {
            let mut blocks: Vec<BlockId> = self.index.walk().collect();
            blocks.sort_unstable();
            let left = Vec::from_iter(left.iter().map(|&number| Self::block(number)));
            assert_eq!(blocks, left, "an entry was lost or left");
            let spot_of = |block| self.spot_of(block);
            self.index.check(NOW, spot_of).expect("the table is whole");
        }
    }

    /// The home bucket is full and a third entry stands behind it. One thread enters a fourth key, one
    /// removes the third, and a reader looks.
    fn insert_with_remove_and_lookup() {
        let table = Table::new(&[NOW; 3]);
        let inserting = in_parallel(&table, |table| table.insert(3));
        let removing = in_parallel(&table, |table| table.remove(2));
        table.look(3);
        inserting.join().unwrap();
        removing.join().unwrap();
        table.check_rest(&[0, 1, 3]);
    }

    model!(insert_with_remove_and_lookup, fails with CountLate("overlooked"));

    /// The second and third entries are of an epoch that has ended; the third stands behind the home
    /// bucket. One thread enters a fourth key, which takes the second's place and clears the third's,
    /// while their blocks are recycled and a reader looks.
    fn replace_with_remove_and_lookup() {
        let table = Table::new(&[NOW, OLD, OLD]);
        let inserting = in_parallel(&table, |table| table.insert(3));
        let removing = in_parallel(&table, |table| {
            table.remove(1);
            table.remove(2);
        });
        table.look(3);
        inserting.join().unwrap();
        removing.join().unwrap();
        table.check_rest(&[0, 3]);
    }

    model!(
        replace_with_remove_and_lookup,
        fails with BlindRemoval("the table is whole"), KeepCounts("overflows that are not there")
    );

    /// Two keys are entered at once where one place has an ended entry.
    fn two_replacements() {
        let table = Table::new(&[NOW, OLD]);
        let other = in_parallel(&table, |table| table.insert(3));
        table.insert(2);
        assert!(table.finds(2), "an entry was overlooked");
        other.join().unwrap();
        assert!(table.finds(3), "an entry was overlooked");
        table.check_rest(&[0, 2, 3]);
    }

    model!(two_replacements);
}
