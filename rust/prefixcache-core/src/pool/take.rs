//! Taking blocks: hits with their content, and blocks from the front of the line.

use super::BlockPool;
use crate::block::{Place, Tier, Touch};
use crate::error::Exhausted;
use crate::id::BlockId;
use crate::ring::Deaths;
use crate::store::BlockKey;
use crate::sync::{Fault, Mode, pause, planted};

/// The places that a batch of touches left, counted tier by tier.
struct Buried<'a, M: Mode> {
    regular: Deaths<'a, M>,
    pinned: Deaths<'a, M>,
}

impl<M: Mode> Buried<'_, M> {
    #[inline]
    fn add(&mut self, place: Place) {
        match place.tier {
            Tier::Regular => self.regular.add(place.ticket),
            Tier::Pinned => self.pinned.add(place.ticket),
        }
    }
}

impl<M: Mode> BlockPool<M> {
    /// Takes the leading `keys` that hit and `num_new` other blocks, or nothing; the number of hits.
    pub(super) fn take(
        &self,
        keys: &[BlockKey],
        num_new: usize,
        out: &mut Vec<BlockId>,
    ) -> Result<usize, Exhausted> {
        let first = out.len();
        self.find_leading(keys, out);
        let is_free = |id: &&BlockId| !self.block(**id).state().is_held();
        let free_hits = out[first..].iter().filter(is_free).count();
        if let Err(exhausted) = self.credits.take::<M>(free_hits.saturating_add(num_new)) {
            out.truncate(first);
            return Err(exhausted);
        }
        let hits = self.touch_leading(keys, free_hits, first, out);
        self.hand_out(num_new, out);
        Ok(hits)
    }

    /// Takes a hold on the blocks from `first` on, which were found under `keys`, and cuts them off
    /// `out` from the first one that does not hold its content any more; how many it took.
    fn touch_leading(
        &self,
        keys: &[BlockKey],
        mut credits: usize,
        first: usize,
        out: &mut Vec<BlockId>,
    ) -> usize {
        let mut buried = Buried {
            regular: self.regular.deaths(),
            pinned: self.pinned.deaths(),
        };
        let found = out[first..].iter().zip(keys);
        let hits = found.take_while(|(id, key)| self.touch(**id, key, &mut credits, &mut buried));
        let hits = hits.count();
        drop(buried);
        out.truncate(first + hits);
        self.credits.give::<M>(credits);
        M::add(&self.counters.touches, hits as u64);
        hits
    }

    /// Takes a hold on a block if it holds `key`; whether it did.
    #[inline]
    fn touch(
        &self,
        id: BlockId,
        key: &BlockKey,
        credits: &mut usize,
        buried: &mut Buried<'_, M>,
    ) -> bool {
        loop {
            match self.block(id).transition_to_touched::<M>(*credits > 0) {
                Touch::Shared => break,
                Touch::Unqueued(place) => {
                    *credits -= 1;
                    buried.add(place);
                    break;
                }
                // It was held when the credits were counted.
                Touch::NeedsCredit if self.credits.take::<M>(1).is_ok() => *credits += 1,
                Touch::NeedsCredit | Touch::Missed => return false,
            }
        }
        // Nobody can recycle the block from here on; it may have been before.
        let holds = self.holds(id, key) || planted(Fault::SkipRecheck);
        if !holds {
            self.give_back_one(id);
        }
        holds
    }

    /// Takes `count` blocks from the front of the line. The caller has a credit for each.
    fn hand_out(&self, count: usize, out: &mut Vec<BlockId>) {
        let end = out.len() + count;
        out.reserve(count);
        while out.len() < end {
            self.take_blank(end, out);
            self.take_from_ring(Tier::Regular, end, out);
            self.take_from_ring(Tier::Pinned, end, out);
            if out.len() < end {
                // Credits say that the blocks are there: they moved between two looks.
                pause();
            }
        }
        M::add(&self.counters.allocations, count as u64);
    }

    fn take_blank(&self, end: usize, out: &mut Vec<BlockId>) {
        let first = out.len();
        self.stack.pop::<M>(&self.blocks, end - first, out);
        self.fresh.take::<M>(end - out.len(), out);
        for &id in &out[first..] {
            self.block(id).transition_to_allocated();
        }
    }

    fn take_from_ring(&self, tier: Tier, end: usize, out: &mut Vec<BlockId>) {
        let first = out.len();
        if first < end {
            let take = |block: &crate::block::Block, place| block.transition_to_evicted::<M>(place);
            self.ring(tier)
                .take_oldest(&self.blocks, end - first, take, out);
            let evicted = self.forget_all(&out[first..]);
            M::add(&self.counters.evictions, evicted);
        }
    }
}
