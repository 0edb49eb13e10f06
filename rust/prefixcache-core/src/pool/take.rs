//! Taking blocks: hits with their content, and blocks from the front of the line.

use super::BlockPool;
use super::content::Found;
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
        keys: impl ExactSizeIterator<Item = BlockKey> + Clone,
        num_new: usize,
        out: &mut Vec<BlockId>,
    ) -> Result<usize, Exhausted> {
        let num_keys = keys.len();
        // With credits for the worst case, which is most of the time, one look at each block is enough.
        let credits = match self.credits.take::<M>(num_keys.saturating_add(num_new)) {
            Ok(()) => num_keys,
            Err(_) => self.take_exact_credits(keys.clone(), num_new)?,
        };
        let hits = if num_keys == 0 {
            0
        } else {
            self.touch_leading(keys, credits, out)
        };
        self.hand_out(num_new, out);
        Ok(hits)
    }

    /// Takes a credit for each new block and each free hit; the number of these.
    #[cold]
    fn take_exact_credits(
        &self,
        keys: impl Iterator<Item = BlockKey> + Clone,
        num_new: usize,
    ) -> Result<usize, Exhausted> {
        let mut free_hits = 0;
        self.find_leading(keys, |found| {
            free_hits += usize::from(!self.block(found.id).state().is_held());
            true
        });
        self.credits.take::<M>(free_hits.saturating_add(num_new))?;
        Ok(free_hits)
    }

    /// Takes a hold on the blocks of the leading `keys` that hit and appends them to `out`; how many.
    /// The credits that this does not spend go back.
    fn touch_leading(
        &self,
        keys: impl ExactSizeIterator<Item = BlockKey> + Clone,
        mut credits: usize,
        out: &mut Vec<BlockId>,
    ) -> usize {
        let first = out.len();
        let mut buried = Buried {
            regular: self.regular.deaths(),
            pinned: self.pinned.deaths(),
        };
        out.reserve(keys.len());
        self.find_leading(keys, |found| {
            let touched = self.touch(found, &mut credits, &mut buried);
            if touched {
                out.push(found.id);
            }
            touched
        });
        drop(buried);
        let hits = out.len() - first;
        self.credits.give::<M>(credits);
        M::add(&self.counters.touches, hits as u64);
        hits
    }

    /// Takes a hold on a block if it still has the content that it was found by; whether it did.
    #[inline(always)]
    fn touch(&self, found: Found, credits: &mut usize, buried: &mut Buried<'_, M>) -> bool {
        loop {
            match self
                .block(found.id)
                .transition_to_touched::<M>(*credits > 0)
            {
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
        // Nobody can recycle the block from here on; it may have been before, by another writer.
        let holds = !M::SHARED || self.holds(found) || planted(Fault::SkipRecheck);
        if !holds {
            self.give_back_one(found.id);
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
