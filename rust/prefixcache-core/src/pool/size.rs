//! Growing and shrinking.

use super::BlockPool;
use crate::block::{Block, State, Step};
use crate::error::InvalidArgument;
use crate::free_stack::Chain;
use crate::id::BlockId;
use crate::sync::{AtomicBool, AtomicUsize, Fault, Mode, Ordering, OwnLine, planted};

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
        self.count_from(num_blocks, State::is_held)
    }

    fn count_from(&self, num_blocks: usize, counts: impl Fn(State) -> bool) -> usize {
        let above = self.blocks.get(num_blocks..self.size.most_ever());
        let states = above.unwrap_or_default().iter().map(Block::state);
        states.filter(|&state| counts(state)).count()
    }

    /// Sets the number of blocks; how many above it are not retired yet. Those are held, or, beside
    /// allocations in other threads, were being handed out; the same call again looks again.
    pub(super) fn resize_to(&self, num_blocks: usize) -> Result<usize, InvalidArgument> {
        if !M::try_set(&self.size.changing) {
            let reason = "is being changed by another call";
            return Err(InvalidArgument::new("num_blocks", reason));
        }
        let before = self.size.num_blocks();
        // Release: who sees the size sees what the last resize did to the blocks. Before the blocks
        // are looked at: a release that has not seen the new size yet is caught by the fence, here or
        // in `retire_late` and `revive_grown`.
        self.size.num_blocks.0.store(num_blocks, Release);
        M::fence();
        if num_blocks > before {
            self.grow(before, num_blocks);
        }
        // Also after growing: an earlier call may have left free blocks above, as another thread had
        // their credits, and gave them back.
        let may_leave = num_blocks > before && planted(Fault::GrowAlone);
        if self.count_above(num_blocks) > 0 && !may_leave {
            self.shrink(num_blocks);
        }
        // Release: the next resize starts from what this one left.
        self.size.changing.store(false, Release);
        Ok(self.count_above(num_blocks))
    }

    /// How many blocks with this number or a higher one are not retired.
    fn count_above(&self, num_blocks: usize) -> usize {
        self.count_from(num_blocks, |state| !state.is_retired())
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

    /// Takes the blocks from `floor` on out of the pool, the held ones when they are released.
    fn shrink(&self, floor: usize) {
        let mut budget = Budget(self.credits.take_some::<M>(usize::MAX));
        self.retire_fresh(floor, &mut budget);
        self.retire_stacked(floor, &mut budget);
        for id in (floor..self.size.most_ever()).map(|index| BlockId::new(index as u32)) {
            self.retire_queued(id, &mut budget);
            self.forget_held(id);
        }
        self.credits.give::<M>(budget.0);
    }

    fn retire_fresh(&self, floor: usize, budget: &mut Budget) {
        let cut = self.fresh.cut::<M>(floor, budget.0);
        budget.0 -= cut.len();
        for id in cut.map(BlockId::new) {
            self.retire(id, State::IDLE);
        }
    }

    /// Takes the whole stack down and puts back what stays, in its order.
    fn retire_stacked(&self, floor: usize, budget: &mut Budget) {
        let mut ids = Vec::new();
        self.stack.pop::<M>(&self.blocks, usize::MAX, &mut ids);
        let mut rest = Chain::EMPTY;
        for id in ids {
            if id.index() >= floor && budget.spend() {
                self.retire(id, State::IDLE);
            } else {
                rest.append(&self.blocks, id);
            }
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
                self.retire(id, State::HELD_ONCE);
            }
        }
    }

    /// Retires a blank block that is this thread's alone.
    fn retire(&self, id: BlockId, blank: State) {
        let step = self.block(id).transition_to_retired::<M>(blank);
        debug_assert_eq!(step, Step::Done, "block {id} was somebody else's too");
    }

    /// Retires released blocks that a shrinking thread took for held ones, as it came in between.
    pub(super) fn retire_late(&self, ids: &[BlockId]) {
        if planted(Fault::SkipRetireLate) {
            return;
        }
        M::fence();
        let floor = self.size.num_blocks();
        let late = |id: &BlockId| {
            let state = self.blocks.get(id.index()).map(Block::state);
            id.index() >= floor
                && state.is_some_and(|state| !state.is_held() && !state.is_retired())
        };
        if ids.iter().any(late) {
            self.retire_released(ids, floor);
        }
    }

    #[cold]
    fn retire_released(&self, ids: &[BlockId], floor: usize) {
        let mut budget = Budget(self.credits.take_some::<M>(ids.len()));
        self.retire_stacked(floor, &mut budget);
        for &id in ids
            .iter()
            .filter(|id| (floor..self.blocks.len()).contains(&id.index()))
        {
            self.retire_queued(id, &mut budget);
        }
        self.credits.give::<M>(budget.0);
        self.revive_grown(floor);
    }

    /// Brings back what this thread retired from `floor` on although the pool had grown meanwhile: the
    /// growing thread may have looked before. A thread that shrinks it again may have, too.
    pub(super) fn revive_grown(&self, floor: usize) {
        if planted(Fault::SkipReviveGrown) {
            return;
        }
        M::fence();
        let ids = (floor..self.size.num_blocks()).map(|index| BlockId::new(index as u32));
        let retired = |id: &BlockId| self.block(*id).transition_to_revived::<M>() == Step::Done;
        let revived: Vec<BlockId> = ids.filter(retired).collect();
        let mut chain = Chain::EMPTY;
        revived
            .iter()
            .for_each(|&id| chain.append(&self.blocks, id));
        self.stack.push::<M>(&self.blocks, &chain);
        self.credits.give::<M>(revived.len());
        if !revived.is_empty() {
            self.retire_late(&revived);
        }
    }
}
