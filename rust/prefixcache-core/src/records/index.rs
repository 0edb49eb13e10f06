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
//! Here stands what readers do. How entries change stands in `pool/entries.rs`: an entry stands only once all buckets that
//! it passed count it, and a block's record is rewritten only after its old entry is gone.
//!
//! # Where entries stand
//!
//! The chain of a key visits every bucket, in runs of eight neighbours; the runs of different keys lie
//! apart. So an insertion always finds room (a table has seven places for each four blocks), a lookup
//! ends after all buckets at the latest (wait-free), and a key that many blocks hold fills only one run
//! of its neighbours' way. With blocks of different content, the longest of a million chains
//! has about ten buckets.

use super::Content;
use crate::id::{BlockId, Epoch};
use crate::sync::{AtomicU64, Fault, Ordering, fence, planted, prefetch};
use crate::zeroed::{Zeroable, Zeroed};

use Ordering::{Acquire, Relaxed};

/// Entries of a bucket. Two suffice a model check, and leave it more interleavings to look at.
pub(crate) const ENTRIES: usize = if cfg!(loom) { 2 } else { 7 };

/// Blocks for each bucket: a load of 4 in 7.
pub(crate) const BLOCKS_PER_BUCKET: usize = 4;

/// Neighbouring buckets that a chain visits before it goes elsewhere.
const RUN: usize = 8;

/// Bits of an entry below its epoch.
pub(crate) const FINGERPRINT_BITS: u32 = 24;

#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Bucket {
    /// Entries that stand in later buckets because this one was full.
    pub(crate) overflow: AtomicU64,
    pub(crate) entries: [AtomicU64; ENTRIES],
}

// SAFETY: atomic integers and an array of them: zero is valid, is their default, and needs no drop.
unsafe impl Zeroable for Bucket {}

impl Bucket {
    /// One bit for each entry that is `wanted`. Without a branch for each: one of them is, no one knows which.
    #[inline]
    fn bits(&self, order: Ordering, wanted: impl Fn(u64) -> bool) -> u32 {
        let entries = self.entries.iter().enumerate();
        entries.fold(0, |bits, (place, entry)| bits | u32::from(wanted(entry.load(order))) << place)
    }

    /// One bit for each entry with this tag.
    #[inline]
    fn matching(&self, tag: u32, order: Ordering) -> u32 {
        self.bits(order, |entry| tag_of(entry) == tag)
    }

    /// Where an entry stands; of 0, the first empty place.
    #[inline]
    pub(crate) fn place_of(&self, entry: u64) -> Option<&AtomicU64> {
        // Relaxed: whoever goes on to change the place exchanges it, which checks and acquires, or is the only writer.
        let places = self.bits(Relaxed, |other| other == entry);
        self.entries.get(places.trailing_zeros() as usize)
    }

    pub(crate) fn is_passed(&self) -> bool {
        // Acquire: an insertion counts itself here before its entry stands further on, so who knows of
        // the entry also sees the count.
        self.overflow.load(Acquire) != 0
    }
}

/// Epoch and fingerprint of an entry.
#[inline]
pub(crate) fn tag_of(entry: u64) -> u32 {
    entry as u32
}

/// The block of an entry, the null block for an empty one.
#[inline]
pub(crate) fn block_of(entry: u64) -> BlockId {
    BlockId::new((entry >> 32) as u32)
}

/// Where the chain of a content registered in one epoch starts, and what its entries start with.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Spot {
    pub(crate) home: usize,
    pub(crate) tag: u32,
}

impl Spot {
    pub(crate) fn entry(self, block: BlockId) -> u64 {
        u64::from(block.get()) << 32 | u64::from(self.tag)
    }

    /// Whether an entry, which is not empty, is of another epoch (or of one 256 epochs away).
    pub(crate) fn differs_in_epoch(self, entry: u64) -> bool {
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
fn fold(left: u64, right: u64) -> u64 {
    let product = u128::from(left) * u128::from(right);
    (product >> 64) as u64 ^ product as u64
}

/// The table. It never grows: it is made for the most blocks that the pool may have.
pub(crate) struct Index {
    pub(crate) buckets: Zeroed<Bucket>,
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
    pub(crate) fn chain(&self, spot: Spot) -> impl Iterator<Item = &Bucket> {
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
    pub(crate) fn chain_in_use(&self, spot: Spot) -> impl Iterator<Item = &Bucket> {
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
                // Content that was moved meanwhile (by a shrink) is in the block that stands here now: it
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

    /// Where an entry stands, and how many buckets it has passed.
    #[inline]
    pub(crate) fn find_entry(&self, spot: Spot, entry: u64) -> Option<(usize, &AtomicU64)> {
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

    /// The blocks in the table, once for each entry.
    pub(crate) fn walk(&self) -> impl Iterator<Item = BlockId> {
        let entries = self.buckets.iter().flat_map(|bucket| &bucket.entries);
        let entries = entries.map(|entry| entry.load(Acquire)).filter(|&entry| entry != 0);
        entries.map(block_of)
    }
}
