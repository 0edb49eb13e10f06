//! The index checked against the records, at rest.

use super::index::{Bucket, FINGERPRINT_BITS, Index, Spot};
use crate::id::{BlockId, Epoch};
use crate::sync::{AtomicU64, Ordering::Acquire};

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
