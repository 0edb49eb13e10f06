//! From content to block: a fixed table with open addressing, whose readers never wait.
//!
//! A bucket is one cache line: a word that counts overflows, and seven entries of
//! `block + 1:32 | fingerprint:32`. An insertion takes the first empty entry from its home bucket on
//! and counts itself in every bucket that it passed. A lookup goes on past a bucket only while that
//! count is not 0, so a removal just empties the entry and takes the counts back; no tombstone is ever
//! left. Chains end after [`MAX_CHAIN`] buckets, which bounds a lookup (wait-free); an insertion that
//! finds no room on its way is refused. At the load that the pool keeps, 4/7 at most, the longest of
//! a million chains has about ten buckets.
//!
//! The index only proposes: a fingerprint may be another's, and the block may have moved on since. The
//! caller looks at the block. Several blocks may hold the same content: it is for the caller to choose
//! among all that the lookup proposes.
//!
//! Each entry belongs to the thread that registers or forgets its block, and the block's state sees to
//! it that this is one at a time. So only empty entries are contended for.

use crate::block::Content;
use crate::id::BlockId;
use crate::sync::{AtomicU64, Fault, Mode, Ordering, planted, prefetch};
use crate::zeroed::{Zeroable, Zeroed};

use Ordering::{Acquire, Relaxed, Release};

/// Entries of a bucket. Two suffice a model check, and leave it more interleavings to look at.
const ENTRIES: usize = if cfg!(loom) { 2 } else { 7 };

/// Buckets that a chain may span.
pub(crate) const MAX_CHAIN: usize = if cfg!(loom) { 2 } else { 64 };

/// Blocks for each bucket: a load of 4 in 7.
const BLOCKS_PER_BUCKET: usize = 4;

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
    /// One bit for each entry with this fingerprint. Without a branch for each: they are looked at in
    /// every lookup, and one of them matches, no one knows which.
    #[inline]
    fn matching(&self, fingerprint: u32, order: Ordering) -> u32 {
        let same = |entry: &AtomicU64| u32::from(Spot::of(entry.load(order)) == fingerprint);
        let entries = self.entries.iter().enumerate();
        entries.fold(0, |bits, (place, entry)| bits | same(entry) << place)
    }
}

/// Where a content's chain starts, and what its entries start with.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Spot {
    home: usize,
    fingerprint: u32,
}

impl Spot {
    fn entry(self, block: BlockId) -> u64 {
        u64::from(block.get() + 1) << 32 | u64::from(self.fingerprint)
    }

    /// The fingerprint of an entry.
    #[inline]
    fn of(entry: u64) -> u32 {
        entry as u32
    }

    /// The block of an entry that is not empty.
    #[inline]
    fn block(entry: u64) -> BlockId {
        BlockId::new(((entry >> 32) as u32).wrapping_sub(1))
    }
}

/// What a look at the home bucket alone can tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Only {
    /// No block holds the content.
    #[default]
    Nothing,
    /// If any block does, it is this one (or the null block, which is never in the pool's reach).
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
        Some(Self {
            buckets: Zeroed::new(buckets)?,
        })
    }

    /// Where `content` belongs.
    ///
    /// Hashes are uniform already, but nothing forces a caller to bring good ones, so all bits count:
    /// two folded products, as in wyhash (Wang Yi, 2019).
    #[inline]
    pub(crate) fn spot(&self, content: &Content) -> Spot {
        let [a, b, c, d] = content.hash;
        let head = fold(a ^ 0x9e37_79b9_7f4a_7c15, b ^ 0xc2b2_ae3d_27d4_eb4f);
        let tail = fold(
            c ^ 0x1656_67b1_9e37_79f9,
            d ^ 0xd6e8_feb8_6659_fd93 ^ u64::from(content.group),
        );
        let mixed = head ^ tail.rotate_left(32);
        Spot {
            home: (mixed >> 32) as usize & (self.buckets.len() - 1),
            fingerprint: mixed as u32,
        }
    }

    /// The buckets of a chain, in order.
    #[inline]
    fn chain(&self, home: usize) -> impl Iterator<Item = &Bucket> {
        let mask = self.buckets.len() - 1;
        (0..MAX_CHAIN.min(self.buckets.len())).map(move |step| &self.buckets[(home + step) & mask])
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
        let matching = bucket.matching(spot.fingerprint, Acquire);
        if matching & matching.wrapping_sub(1) != 0 || bucket.overflow.load(Acquire) != 0 {
            return Only::Unclear;
        }
        match bucket.entries.get(matching.trailing_zeros() as usize) {
            None => Only::Nothing,
            Some(entry) => Only::This(Spot::block(entry.load(Acquire))),
        }
    }

    /// Every block that may hold the content of `spot`: all that do are among them.
    #[inline]
    pub(crate) fn for_each_candidate(&self, spot: Spot, mut look: impl FnMut(BlockId)) {
        for bucket in self.chain(spot.home) {
            // Acquire: the block's content was written before its entry.
            let mut matching = bucket.matching(spot.fingerprint, Acquire);
            while matching != 0 {
                let entry = &bucket.entries[matching.trailing_zeros() as usize];
                // Acquire: as above. The entry may be another by now, or empty.
                let entry = entry.load(Acquire);
                if entry != 0 {
                    look(Spot::block(entry));
                }
                matching &= matching - 1;
            }
            // Acquire: an insertion counts itself here before its entry stands further on, so who
            // knows of the entry also sees the count.
            if bucket.overflow.load(Acquire) == 0 {
                return;
            }
        }
    }

    /// Enters a block; whether there was room.
    pub(crate) fn insert<M: Mode>(&self, spot: Spot, block: BlockId) -> bool {
        let late = planted(Fault::CountLate);
        for (passed, bucket) in self.chain(spot.home).enumerate() {
            if Self::fill_empty::<M>(bucket, spot.entry(block)) {
                if late {
                    self.chain(spot.home)
                        .take(passed)
                        .for_each(|b| M::add(&b.overflow, 1));
                }
                return true;
            }
            if !late {
                M::add(&bucket.overflow, 1);
            }
        }
        self.uncount::<M>(spot.home, MAX_CHAIN.min(self.buckets.len()));
        false
    }

    fn fill_empty<M: Mode>(bucket: &Bucket, entry: u64) -> bool {
        // Relaxed: the exchange checks again, and acquires.
        let mut places = bucket
            .entries
            .iter()
            .filter(|place| place.load(Relaxed) == 0);
        places.any(|place| M::exchange(place, 0, entry).is_ok())
    }

    /// Removes a block's entry; whether there was one.
    pub(crate) fn remove<M: Mode>(&self, spot: Spot, block: BlockId) -> bool {
        let entry = spot.entry(block);
        for (passed, bucket) in self.chain(spot.home).enumerate() {
            // Relaxed: the entry is this thread's; it sees its own, or that of the block's last owner,
            // through the block's state.
            let place = bucket
                .entries
                .iter()
                .find(|place| place.load(Relaxed) == entry);
            if let Some(place) = place {
                // Release: whoever fills the place again acquires it, and with it all that came before.
                place.store(0, Release);
                self.uncount::<M>(spot.home, passed);
                return true;
            }
        }
        false
    }

    fn uncount<M: Mode>(&self, home: usize, passed: usize) {
        for bucket in self.chain(home).take(passed) {
            M::add(&bucket.overflow, 1_u64.wrapping_neg());
        }
    }

    /// The blocks in the table, once for each entry.
    pub(crate) fn walk(&self) -> impl Iterator<Item = BlockId> {
        let entries = self.buckets.iter().flat_map(|bucket| &bucket.entries);
        let entries = entries
            .map(|entry| entry.load(Acquire))
            .filter(|&entry| entry != 0);
        entries.map(Spot::block)
    }

    /// Whether all `entries` are found and the overflow counts are theirs alone.
    pub(crate) fn is_exact(&self, entries: impl Iterator<Item = (BlockId, Content)>) -> bool {
        let mut counts = vec![0_u64; self.buckets.len()];
        let mask = self.buckets.len() - 1;
        for (block, content) in entries {
            let spot = self.spot(&content);
            let found = self.chain(spot.home).position(|bucket| {
                bucket
                    .entries
                    .iter()
                    .any(|entry| entry.load(Acquire) == spot.entry(block))
            });
            let Some(passed) = found else { return false };
            (0..passed).for_each(|step| counts[(spot.home + step) & mask] += 1);
        }
        let held = self
            .buckets
            .iter()
            .map(|bucket| bucket.overflow.load(Acquire));
        held.eq(counts)
    }
}

#[cfg(all(test, loom))]
mod models {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use crate::sync::{Shared, check, faults};

    /// Different contents whose chains start at the same bucket.
    fn neighbours(index: &Index, count: usize) -> Vec<Content> {
        let contents = (0..).map(|number| Content {
            hash: [number; 4],
            group: 0,
        });
        contents
            .filter(|content| index.spot(content).home == 0)
            .take(count)
            .collect()
    }

    fn finds(index: &Index, content: &Content, block: u32) -> bool {
        let mut found = false;
        index.for_each_candidate(index.spot(content), |id| found |= id.get() == block);
        found
    }

    /// The home bucket is full and a third entry stands behind it. One thread enters a fourth key, one
    /// removes the third, and a reader looks for the first (always there) and, twice, for the fourth.
    fn insert_beside_remove_and_lookup() {
        let index = Arc::new(Index::new(2 * BLOCKS_PER_BUCKET).unwrap());
        let keys = Arc::new(neighbours(&index, 4));
        for (block, key) in (0..3).zip(keys.iter()) {
            assert!(index.insert::<Shared>(index.spot(key), BlockId::new(block)));
        }
        let inserting = {
            let (index, keys) = (index.clone(), keys.clone());
            thread::spawn(move || {
                assert!(index.insert::<Shared>(index.spot(&keys[3]), BlockId::new(3)))
            })
        };
        let removing = {
            let (index, keys) = (index.clone(), keys.clone());
            thread::spawn(move || {
                assert!(index.remove::<Shared>(index.spot(&keys[2]), BlockId::new(2)))
            })
        };
        assert!(finds(&index, &keys[0], 0), "an entry was overlooked");
        let before = finds(&index, &keys[3], 3);
        assert!(
            finds(&index, &keys[3], 3) || !before,
            "an entry was overlooked"
        );
        inserting.join().unwrap();
        removing.join().unwrap();
        let left = [0, 1, 3].map(|block| (BlockId::new(block), keys[block as usize]));
        assert!(index.is_exact(left.into_iter()));
    }

    #[test]
    fn insert_vs_remove_vs_lookup() {
        check(insert_beside_remove_and_lookup);
    }

    #[test]
    #[should_panic(expected = "overlooked")]
    fn insert_vs_remove_vs_lookup_fails_with_late_counts() {
        faults::check_with(Fault::CountLate, insert_beside_remove_and_lookup);
    }
}
