//! Growing and shrinking.

use super::BlockPool;
use crate::block::{State, Step};
use crate::error::InvalidArgument;
use crate::free_stack::Chain;
use crate::id::BlockId;
use crate::sync::{AtomicBool, AtomicUsize, Mode, Ordering, OwnLine};

use Ordering::{Acquire, Release};

/// How many blocks the pool has.
#[derive(Debug)]
pub(crate) struct Size {
    num_blocks: OwnLine<AtomicUsize>,
    /// The most that it ever had: above, no block was ever used.
    most_ever: AtomicUsize,
    changing: AtomicBool,
}

impl Size {
    pub(super) fn new(num_blocks: usize) -> Self {
        Self {
            num_blocks: OwnLine(AtomicUsize::new(num_blocks)),
            most_ever: AtomicUsize::new(num_blocks),
            changing: AtomicBool::new(false),
        }
    }

    #[inline]
    pub(crate) fn num_blocks(&self) -> usize {
        // Acquire: pairs with the store of `resize_to`.
        self.num_blocks.0.load(Acquire)
    }

    pub(crate) fn most_ever(&self) -> usize {
        // Acquire: pairs with the store of `grow`.
        self.most_ever.load(Acquire)
    }
}

/// Credits in the hands of a shrinking thread: one for each free block that it may take away.
struct Budget(usize);

impl Budget {
    fn spend(&mut self) -> bool {
        let enough = self.0 > 0;
        self.0 -= usize::from(enough);
        enough
    }
}

impl<M: Mode> BlockPool<M> {
    /// Whether the pool has shrunk below the block.
    #[inline]
    pub(crate) fn is_retired(&self, id: BlockId) -> bool {
        id.index() >= self.size.num_blocks()
    }

    /// How many blocks with this number or a higher one somebody holds.
    pub(crate) fn count_held_from(&self, num_blocks: usize) -> usize {
        let above = self
            .blocks
            .get(num_blocks..self.size.most_ever())
            .unwrap_or_default();
        above.iter().filter(|block| block.state().is_held()).count()
    }

    /// Sets the number of blocks; how many above it are still held.
    pub(super) fn resize_to(&self, num_blocks: usize) -> Result<usize, InvalidArgument> {
        if !M::try_set(&self.size.changing) {
            let reason = "is being changed by another call";
            return Err(InvalidArgument::new("num_blocks", reason));
        }
        let before = self.size.num_blocks();
        // Release: who sees the size sees what the last resize did to the blocks. Before the blocks
        // are looked at: a release that has not seen the new size yet is caught by the fence, here or
        // in `retire_late` and `retire_blank`.
        self.size.num_blocks.0.store(num_blocks, Release);
        M::fence();
        if num_blocks > before {
            self.grow(before, num_blocks);
        } else {
            self.shrink(num_blocks, before);
        }
        // Release: the next resize starts from what this one left.
        self.size.changing.store(false, Release);
        Ok(self.count_held_from(num_blocks))
    }

    fn grow(&self, before: usize, num_blocks: usize) {
        let most_ever = self.size.most_ever();
        let mut chain = Chain::EMPTY;
        let mut grown = 0;
        for id in (before..num_blocks).map(|index| BlockId::new(index as u32)) {
            let new = id.index() >= most_ever;
            if new || self.block(id).transition_to_revived::<M>() == Step::Done {
                chain.append(&self.blocks, id);
                grown += 1;
            }
        }
        // Release: the blocks below exist from here on.
        self.size
            .most_ever
            .store(most_ever.max(num_blocks), Release);
        self.stack.push::<M>(&self.blocks, &chain);
        self.credits.give::<M>(grown);
    }

    /// Takes the blocks from `floor` up to `before` out of the pool, the held ones when they are
    /// released.
    fn shrink(&self, floor: usize, before: usize) {
        let mut budget = Budget(self.credits.take_some::<M>(usize::MAX));
        self.retire_fresh(floor, &mut budget);
        self.retire_stacked(floor, &mut budget);
        for id in (floor..before).map(|index| BlockId::new(index as u32)) {
            self.retire_queued(id, &mut budget);
            self.forget_held(id);
        }
        self.credits.give::<M>(budget.0);
    }

    fn retire_fresh(&self, floor: usize, budget: &mut Budget) {
        let cut = self.fresh.cut::<M>(floor, budget.0);
        budget.0 -= cut.len();
        for id in cut.map(BlockId::new) {
            let step = self.block(id).transition_to_retired::<M>(State::IDLE);
            debug_assert_eq!(step, Step::Done, "a block of the run is nobody's");
        }
    }

    /// Takes the whole stack down and puts back what stays, in its order.
    fn retire_stacked(&self, floor: usize, budget: &mut Budget) {
        let mut ids = Vec::new();
        self.stack.pop::<M>(&self.blocks, usize::MAX, &mut ids);
        let mut rest = Chain::EMPTY;
        for id in ids {
            if id.index() < floor || !budget.spend() {
                rest.append(&self.blocks, id);
                continue;
            }
            let step = self.block(id).transition_to_retired::<M>(State::IDLE);
            debug_assert_eq!(
                step,
                Step::Done,
                "a block popped off the stack is the popper's"
            );
        }
        self.stack.push::<M>(&self.blocks, &rest);
    }

    /// Takes a queued block out of its line, and out of the pool.
    fn retire_queued(&self, id: BlockId, budget: &mut Budget) {
        let block = self.block(id);
        while let Some(place) = block.state().place() {
            if budget.0 == 0 {
                return;
            }
            if block.transition_to_evicted::<M>(place) == Step::Done {
                budget.0 -= 1;
                self.ring(place.tier).deaths().add(place.ticket);
                self.forget_all(&[id]);
                let step = block.transition_to_retired::<M>(State::HELD_ONCE);
                debug_assert_eq!(step, Step::Done, "an evicted block is the evictor's");
            }
        }
    }

    /// Retires released blocks that a shrinking thread may have taken for held ones. `limit` is the
    /// size that the release went by.
    pub(super) fn retire_late(&self, ids: &[BlockId], limit: usize) {
        M::fence();
        let floor = self.size.num_blocks();
        if floor >= limit {
            return;
        }
        let mut budget = Budget(self.credits.take_some::<M>(ids.len()));
        self.retire_stacked(floor, &mut budget);
        for &id in ids
            .iter()
            .filter(|id| (floor..self.blocks.len()).contains(&id.index()))
        {
            self.retire_queued(id, &mut budget);
        }
        self.credits.give::<M>(budget.0);
    }
}
