//! From keys to blocks.

use std::num::NonZeroU64;
use std::ops::Deref;

use super::index::{Index, Only, Spot};
use super::{Content, Record, Records};
use crate::id::{BlockId, BlockKey, Epoch};
use crate::sync::prefetch;
use crate::zeroed::Zeroable;

/// Keys that are looked up together.
const BATCH: usize = 16;

/// A block that holds what was looked for, and the registration that gave it that.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(crate) id: BlockId,
    pub(crate) seq: NonZeroU64,
}

/// Index positions of keys to look up, on their way into the processor's caches.
#[derive(Default)]
struct Ahead {
    spots: [Spot; BATCH],
    only: [Only; BATCH],
    count: usize,
}

impl Ahead {
    /// Fetches the buckets of the next keys.
    #[inline]
    fn fill(&mut self, index: &Index, epoch: Epoch, keys: &mut impl Iterator<Item = BlockKey>) {
        let mut count = 0;
        for (spot, key) in self.spots.iter_mut().zip(keys) {
            *spot = index.spot(&Content::from(&key), epoch);
            index.prefetch(*spot);
            count += 1;
        }
        self.count = count;
    }

    /// Looks into the buckets and fetches the records of the blocks there.
    #[inline]
    fn look<B>(&mut self, index: &Index, blocks: &[B]) {
        for (only, spot) in self.only.iter_mut().zip(&self.spots[..self.count]) {
            *only = index.only_candidate(*spot);
            if let Only::This(id) = *only
                && let Some(block) = blocks.get(id.index())
            {
                prefetch(block);
            }
        }
    }

    fn looked_at(&self) -> impl Iterator<Item = (Only, Spot)> {
        let spots = self.spots[..self.count].iter();
        self.only.iter().copied().zip(spots.copied())
    }
}

/// What decides whether content hits: read once for a call.
struct View<'a, B> {
    index: &'a Index,
    epoch: Epoch,
    blocks: &'a [B],
}

impl<B> Clone for View<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for View<'_, B> {}

impl<B: Deref<Target = Record>> View<'_, B> {
    /// The block, if it holds the content.
    #[inline]
    fn matching(self, id: BlockId, content: &Content) -> Option<Found> {
        let seq = self.blocks.get(id.index())?.matches(content, self.epoch)?;
        Some(Found { id, seq })
    }

    /// [`Self::first_copy`] out of the way of the loop that calls it, which has the key in registers. For a lookup
    /// too whose one candidate was another's: the content may have been moved from it.
    #[cold]
    #[inline(never)]
    fn find_among_several(self, spot: Spot, key: BlockKey) -> Option<Found> {
        self.first_copy(spot, &Content::from(&key), None)
    }

    /// The first registered block that holds the content of `spot`, not counting `but`.
    fn first_copy(self, spot: Spot, content: &Content, but: Option<BlockId>) -> Option<Found> {
        let mut first: Option<Found> = None;
        self.for_each_copy(spot, content, |copy| {
            if Some(copy.id) != but && first.is_none_or(|first| copy.seq < first.seq) {
                first = Some(copy);
            }
        });
        first
    }

    fn for_each_copy(self, spot: Spot, content: &Content, mut look: impl FnMut(Found)) {
        self.index.for_each_candidate(spot, |id| {
            if let Some(copy) = self.matching(id, content) {
                look(copy);
            }
        });
    }
}

impl<B: Zeroable + Deref<Target = Record>> Records<B> {
    fn view(&self) -> View<'_, B> {
        let blocks = &self.blocks()[..self.num_blocks()];
        View { index: &self.index, epoch: self.epoch(), blocks }
    }

    /// The first registered block that holds `key`.
    #[inline]
    pub(crate) fn find(&self, key: &BlockKey) -> Option<BlockId> {
        let view = self.view();
        let spot = self.index.spot(&Content::from(key), view.epoch);
        let hit = match self.index.only_candidate(spot) {
            Only::Nothing => None,
            Only::This(id) => view
                .matching(id, &Content::from(key))
                .or_else(|| view.find_among_several(spot, *key)),
            Only::Unclear => view.find_among_several(spot, *key),
        };
        hit.map(|hit| hit.id)
    }

    /// Calls `visit` with the blocks of the leading `keys` that hit, while it returns true.
    ///
    /// A lookup reads a bucket and then a record, both from anywhere in memory. So the buckets of the
    /// next batch are fetched while this batch's records are, and those before any is looked at.
    #[inline]
    pub(crate) fn find_leading(
        &self,
        mut keys: impl Iterator<Item = BlockKey> + Clone,
        mut visit: impl FnMut(Found) -> bool,
    ) {
        let view = self.view();
        let mut ahead = keys.clone();
        let (mut first, mut second) = (Ahead::default(), Ahead::default());
        let (mut here, mut next) = (&mut first, &mut second);
        here.fill(&self.index, view.epoch, &mut ahead);
        while here.count > 0 {
            next.fill(&self.index, view.epoch, &mut ahead);
            here.look(&self.index, view.blocks);
            for ((only, spot), key) in here.looked_at().zip(&mut keys) {
                // As in `find`; a function for both costs a twentieth of a long commit.
                let hit = match only {
                    Only::Nothing => None,
                    Only::This(id) => match view.matching(id, &Content::from(&key)) {
                        // No closure: it would keep the key in memory.
                        None => view.find_among_several(spot, key),
                        hit => hit,
                    },
                    Only::Unclear => view.find_among_several(spot, key),
                };
                if !hit.is_some_and(&mut visit) {
                    return;
                }
            }
            std::mem::swap(&mut here, &mut next);
        }
    }

    /// How many of the leading `keys` hit.
    pub(crate) fn count_leading(&self, keys: impl Iterator<Item = BlockKey> + Clone) -> usize {
        let mut count = 0;
        self.find_leading(keys, |_| {
            count += 1;
            true
        });
        count
    }

    /// Whether a block that cannot be recycled meanwhile has the content of `key`, in this epoch and in the pool.
    #[inline]
    pub(crate) fn holds(&self, id: BlockId, key: &BlockKey) -> bool {
        let hit = self.block(id).matches(&Content::from(key), self.epoch());
        hit.is_some() && !self.is_retired(id)
    }

    /// The first registered block of the pool that holds the content of `spot`, not counting `but`.
    pub(crate) fn first_copy(
        &self,
        spot: Spot,
        content: &Content,
        but: Option<BlockId>,
    ) -> Option<Found> {
        self.view().first_copy(spot, content, but)
    }

    /// Calls `look` with each block of the pool that holds the content of `spot`.
    pub(crate) fn for_each_copy(&self, spot: Spot, content: &Content, look: impl FnMut(Found)) {
        self.view().for_each_copy(spot, content, look);
    }

    /// Whether some block has the content in this epoch, be it about to leave the pool.
    pub(crate) fn has_copy(&self, spot: Spot, content: &Content) -> bool {
        let view = View { blocks: self.blocks(), ..self.view() };
        view.first_copy(spot, content, None).is_some()
    }

    /// Where the content that a block's record names belongs in the index, if that content's epoch has ended.
    pub(crate) fn spot_if_ended(&self, id: BlockId) -> Option<Spot> {
        let record = self.block(id);
        let epoch = record.epoch();
        // The epoch of now is read after the block's, which therefore cannot be a later one.
        (epoch != self.epoch()).then(|| self.index.spot(&record.content(), epoch))
    }
}
