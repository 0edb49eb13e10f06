//! The index checked against the records, at rest.

use std::collections::HashSet;
use std::ops::Deref;

use super::index::{Bucket, FINGERPRINT_BITS, Index, Spot};
use super::{Record, Records};
use crate::id::{BlockId, Epoch};
use crate::sync::{AtomicU64, Ordering::Acquire};
use crate::zeroed::Zeroable;

impl<B: Zeroable + Deref<Target = Record>> Records<B> {
    /// Checks the index over all content; how many blocks are cached.
    ///
    /// Every entry is that of a block with content, and all blocks of this epoch have one, but for as many copies as
    /// were too many. Content of ended epochs may have lost its entry to a registration.
    pub(crate) fn check_contents(&self, surplus: u64) -> Result<usize, String> {
        let ids = (1..self.blocks().len() as u32).map(BlockId::new);
        let with_content: Vec<BlockId> = ids.filter(|&id| self.block(id).seq() != 0).collect();
        let seqs: HashSet<u64> = with_content.iter().map(|&id| self.block(id).seq()).collect();
        if seqs.len() < with_content.len() {
            return Err("two registrations have one number".into());
        }
        let entries: Vec<BlockId> = self.index.walk().collect();
        let indexed: HashSet<BlockId> = entries.iter().copied().collect();
        if indexed.len() < entries.len() {
            return Err("a block is in the index twice".into());
        }
        if let Some(id) = entries.iter().find(|&&id| self.block(id).seq() == 0) {
            return Err(format!("block {id} is in the index and has no content"));
        }
        let cached = || with_content.iter().filter(|&&id| self.is_cached(id));
        let missing = cached().filter(|id| !indexed.contains(id)).count() as u64;
        if missing > surplus {
            return Err(format!("{missing} blocks are cached and not in the index, of {surplus}"));
        }
        let spot_of = |id| self.index.spot(&self.block(id).content(), self.block(id).epoch());
        self.index.check(self.epoch(), spot_of)?;
        Ok(cached().count())
    }
}

impl Index {
    /// Checks that every entry can be found by what its block's record says (`spot_of`), that
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
