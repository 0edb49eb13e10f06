//! Growing and shrinking.
//!
//! A resize has the free blocks to itself: no other thread is inside a call that takes or gives back
//! any (see [`Credits`](crate::credits::Credits)). Lookups, registrations and pins go on beside it.

use super::BlockPool;
use crate::block::{Claim, Class};
use crate::error::ResizeError;
use crate::free_stack::Chain;
use crate::id::BlockId;
use crate::losses::Cause;
use crate::sync::{AtomicU64, AtomicUsize, Fault, Mode, Ordering, OwnLine, planted, yield_now};

use Ordering::{Acquire, Release};

/// How many blocks the pool has.
#[derive(Debug)]
pub(super) struct Size {
    num_blocks: OwnLine<AtomicUsize>,
    /// Retired blocks that somebody holds still.
    retired_held: AtomicU64,
}

impl Size {
    pub(super) fn new(num_blocks: usize) -> Self {
        Self {
            num_blocks: OwnLine(AtomicUsize::new(num_blocks)),
            retired_held: AtomicU64::new(0),
        }
    }

    #[inline]
    pub(super) fn num_blocks(&self) -> usize {
        // Acquire: pairs with `set`.
        self.num_blocks.0.load(Acquire)
    }

    /// How many blocks that the pool has shrunk below are held still.
    pub(super) fn retired_held(&self) -> usize {
        self.retired_held.load(Acquire) as usize
    }

    /// Says that the last holder of a retired block has given it up.
    pub(super) fn count_retired_release<M: Mode>(&self) {
        M::add(&self.retired_held, 1_u64.wrapping_neg());
    }

    fn set(&self, num_blocks: usize) {
        // Release: a lookup that sees the size sees the blocks as they were when it was set.
        self.num_blocks.0.store(num_blocks, Release);
    }
}

fn ids(range: std::ops::Range<usize>) -> impl Iterator<Item = BlockId> + Clone {
    range.map(|index| BlockId::new(index as u32))
}

impl<M: Mode> BlockPool<M> {
    /// Whether the pool has shrunk below the block.
    #[inline]
    pub(super) fn is_retired(&self, id: BlockId) -> bool {
        id.index() >= self.size.num_blocks()
    }

    /// Sets the number of blocks; how many above it are still held. Refused beside another writer.
    pub(super) fn resize_to(&self, num_blocks: usize) -> Result<usize, ResizeError> {
        let Some(_resizing) = self.credits.begin_resize::<M>() else {
            return Err(ResizeError::Busy);
        };
        self.tell_time_of_batch();
        let before = self.size.num_blocks();
        if num_blocks < before {
            self.shrink(before, num_blocks);
        } else {
            self.grow(before, num_blocks);
        }
        Ok(self.size.retired_held())
    }

    /// Puts the blocks from `before` on that nobody holds in front of the line.
    fn grow(&self, before: usize, num_blocks: usize) {
        let mut chain = Chain::EMPTY;
        let mut grown = 0;
        for id in ids(before..num_blocks) {
            if self.block(id).state().is_held() {
                self.size.count_retired_release::<M>();
            } else {
                chain.append(&self.blocks, id);
                grown += 1;
            }
        }
        self.size.set(num_blocks);
        self.stack.push::<M>(&self.blocks, &chain);
        self.credits.give::<M>(grown);
    }

    /// Takes the blocks from `floor` on out of the pool; the held ones only lose their content.
    fn shrink(&self, before: usize, floor: usize) {
        self.size.set(floor);
        // Which blocks go is decided by their ids alone.
        self.contents.disorder();
        // A registration that does not see the new size has its claim seen here.
        M::fence();
        let fresh = self.fresh.cut::<M>(floor);
        // Nothing but the run knows of the fresh blocks; those around it have a state.
        let used = ids(floor..fresh.start.min(before)).chain(ids(fresh.end.max(floor)..before));
        let unqueued = self.unqueue_all(used.clone());
        let free = fresh.len() + self.unstack_from(floor) + unqueued;
        let taken = self.credits.take::<M>(free);
        debug_assert!(taken.is_ok(), "free blocks without credits: {taken:?}");
        let held: Vec<BlockId> = used
            .filter(|&id| self.block(id).state().is_held())
            .collect();
        M::add(&self.size.retired_held, held.len() as u64);
        held.into_iter().for_each(|id| self.forget_held(id));
    }

    /// Takes the queued ones of `ids` out of their lines and removes their content; how many.
    fn unqueue_all(&self, ids: impl Iterator<Item = BlockId>) -> usize {
        let mut vacated = self.vacated_slots();
        let mut pinned = 0;
        let unqueued = ids.filter_map(|id| {
            let (place, was_pinned) = self.block(id).transition_to_unqueued::<M>()?;
            vacated.add(place);
            pinned += usize::from(was_pinned);
            Some((id, place.class))
        });
        let (unqueued, classes): (Vec<BlockId>, Vec<Class>) = unqueued.unzip();
        self.pins.count_ended::<M>(pinned);
        if !planted(Fault::KeepRetired) {
            self.lose_all(&unqueued, Cause::Resized, |at| classes[at]);
        }
        unqueued.len()
    }

    /// Takes content and pin from a held block, once no other thread is registering it.
    fn forget_held(&self, id: BlockId) {
        loop {
            let state = self.block(id).state();
            if state.is_claimed() {
                yield_now();
            } else if !state.is_hashed() {
                return;
            } else if let Claim::Claimed { .. } = self.claim(id, state) {
                self.note_released(&[id]);
                self.lose_all(&[id], Cause::Resized, |_| state.class());
                return self.end_claim(id, false);
            }
        }
    }

    /// Takes the blocks from `floor` on off the stack, and leaves the order of the others; how many.
    fn unstack_from(&self, floor: usize) -> usize {
        let mut stacked = Vec::new();
        self.stack.pop::<M>(&self.blocks, usize::MAX, &mut stacked);
        let mut rest = Chain::EMPTY;
        let mut taken = 0;
        for id in stacked {
            if id.index() < floor {
                rest.append(&self.blocks, id);
            } else {
                taken += 1;
            }
        }
        self.stack.push::<M>(&self.blocks, &rest);
        taken
    }
}
