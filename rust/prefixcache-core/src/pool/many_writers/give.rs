//! Giving blocks back.

use super::MultiPool;
use super::block::{Block, GiveUp, State, Ticket, Transition};
use super::free_stack::Chain;
use super::ring::Reservation;
use crate::class::{ByClass, Class, ClassSet, Destination};
use crate::error::Misuse;
use crate::evictions::Cause;
use crate::id::BlockId;
use crate::policy::{Queue, ReuseQueue, Tick};
use crate::store::FreeOrder;
use crate::sync::{Fault, planted};

/// Blocks that get their tickets with one exchange.
const CHUNK: usize = 64;

/// Slots that the compactor looks at for each block released: it is done with half a ring before the
/// other half has filled up.
const COMPACTION_STEPS: usize = 4;

/// Blocks on their way back into the line.
struct Return {
    /// Blank blocks, which go to the front together at the end, in the order in which they came.
    front: Chain,
    tickets: ByClass<Reservation>,
    /// The classes of the chunk's tickets.
    classes: ClassSet,
    queued: usize,
    /// Whether blank blocks join the end of the line.
    append: bool,
    to: Destination,
    now: Tick,
    /// The first block that is not handed out; no resize changes that while the call runs.
    end: usize,
}

impl Return {
    /// The state by whose class the block joins its ring, from the one that it had with its last holder.
    #[inline]
    fn reclassed(&self, last: State) -> State {
        match last.is_hashed() {
            true => last.with_standing(last.standing().released(self.to)),
            false => last,
        }
    }
}

impl MultiPool {
    /// Gives up one hold of each block, in this order, up to the first that nobody holds.
    pub(super) fn release(&self, ids: &[BlockId]) -> Result<(), Misuse> {
        self.give_back(ids, Destination::Same)
    }

    /// [`Self::release`], but content of the default band is evicted before all other.
    pub(super) fn release_unneeded(&self, ids: &[BlockId]) -> Result<(), Misuse> {
        self.give_back(ids, Destination::Front)
    }

    /// [`Self::release`], but content of the default band joins this queue.
    pub(super) fn release_to(&self, ids: &[BlockId], queue: Queue) -> Result<(), Misuse> {
        let queue = self.reuse.as_ref().map(|_| Destination::Queue(queue));
        self.give_back(ids, queue.unwrap_or(Destination::Same))
    }

    fn give_back(&self, ids: &[BlockId], to: Destination) -> Result<(), Misuse> {
        self.report_release(ids);
        self.give_back_as(ids, self.appends(), to)
    }

    /// Gives up the holds of blocks that this call itself took, which were no uses.
    #[cold]
    pub(super) fn give_back_all(&self, ids: &[BlockId]) {
        let outcome = self.give_back_as(ids, self.appends(), Destination::Same);
        debug_assert!(outcome.is_ok(), "a hold was lost: {outcome:?}");
    }

    fn appends(&self) -> bool {
        self.config.free_order == FreeOrder::Append
    }

    /// The caller is about to give up its holds of these blocks, up to the first that nobody holds.
    #[inline]
    pub(super) fn report_release(&self, ids: &[BlockId]) {
        if let Some(log) = self.evictions.log_now() {
            let held = ids.iter().take_while(|&&id| self.check_held(id).is_ok());
            held.for_each(|&id| log.released(id));
        }
    }

    /// The policy's time; of no meaning without one that asks for it.
    #[inline]
    pub(super) fn tick(&self) -> Tick {
        self.reuse.as_ref().map_or_else(Tick::default, ReuseQueue::now)
    }

    fn give_back_as(&self, ids: &[BlockId], append: bool, to: Destination) -> Result<(), Misuse> {
        let mut inside = self.credits.enter();
        let mut batch = Return {
            front: Chain::EMPTY,
            tickets: [const { Reservation::NONE }; _],
            classes: ClassSet::EMPTY,
            queued: 0,
            append,
            to,
            now: self.tick(),
            end: self.size.end(),
        };
        let outcome =
            ids.chunks(CHUNK).try_for_each(|chunk| self.give_back_chunk(chunk, &mut batch));
        self.stack.push(self.records.blocks(), &batch.front);
        inside.give_at_end(batch.front.len());
        drop(inside);
        self.keep_bound();
        outcome
    }

    fn give_back_chunk(&self, chunk: &[BlockId], batch: &mut Return) -> Result<(), Misuse> {
        self.reserve(chunk, batch);
        let outcome = chunk.iter().try_for_each(|&id| {
            self.check_held(id)?;
            self.unhold(id, batch)
        });
        self.finish_queued(batch);
        outcome
    }

    /// Gets tickets for the blocks that will need one by the look of them now.
    fn reserve(&self, chunk: &[BlockId], batch: &mut Return) {
        let mut wanted: ByClass<usize> = [0; _];
        let blocks = chunk.iter().filter_map(|id| self.records.blocks().get(id.index()));
        for state in blocks.map(Block::state) {
            if state.holders() == 1 && (state.is_hashed() || batch.append) {
                let class = batch.reclassed(state).standing().class();
                wanted[class.index()] += 1;
                batch.classes = batch.classes.with(class);
            }
        }
        for class in batch.classes {
            self.reserve_in(class, wanted[class.index()], batch);
        }
    }

    #[inline]
    fn reserve_in(&self, class: Class, wanted: usize, batch: &mut Return) {
        self.classes.mark_used(class);
        batch.classes = batch.classes.with(class);
        batch.tickets[class.index()] = self.ring(class).reserve(wanted);
    }

    /// Makes up for the tickets that were not needed, and lets the queued blocks be taken.
    fn finish_queued(&self, batch: &mut Return) {
        for class in batch.classes {
            let tickets = &mut batch.tickets[class.index()];
            let left = std::mem::replace(tickets, Reservation::NONE);
            self.ring(class).leave_empty(left);
        }
        self.credits.give(batch.queued);
        let steps = COMPACTION_STEPS * batch.queued;
        for class in batch.classes {
            self.ring(class).maintain(self.records.blocks(), &self.credits, steps);
        }
        batch.classes = ClassSet::EMPTY;
        batch.queued = 0;
    }

    /// Gives up one hold.
    #[inline]
    fn unhold(&self, id: BlockId, batch: &mut Return) -> Result<(), Misuse> {
        loop {
            match self.block(id).transition_to_one_less_held() {
                GiveUp::StillHeld => return Ok(()),
                GiveUp::NotHeld => return Err(Misuse::NotInUse(id)),
                GiveUp::LastHolder(last) if self.let_go(id, last, batch) == Transition::Done => {
                    return Ok(());
                }
                GiveUp::LastHolder(_) => {}
            }
        }
    }

    /// Gives up the last hold. Raced also when the block first had to lose content that is of no use any
    /// more: its state is another then, and the caller looks again.
    fn let_go(&self, id: BlockId, last: State, batch: &mut Return) -> Transition {
        let block = self.block(id);
        let is_above = id.index() >= batch.end;
        if last.is_hashed() {
            if is_above && self.records.is_retired(id) {
                return self.blank(id, last, Cause::Resized);
            }
            if !self.records.is_current(block) {
                return self.blank(id, last, Cause::Discarded);
            }
            let step = self.queue(id, last, batch);
            return step.unwrap_or_else(|| self.blank(id, last, Cause::Dropped));
        }
        if batch.append
            && !is_above
            && let Some(step) = self.queue(id, last, batch)
        {
            return step;
        }
        let step = block.transition_to_idle();
        if step == Transition::Done && is_above {
            // It leaves the pool.
            self.size.count_held_above(-1);
        } else if step == Transition::Done {
            batch.front.append(self.records.blocks(), id);
        }
        step
    }

    /// Takes the content from a block of which the caller has the last hold; the hold stays, and the
    /// state is another in any case.
    #[cold]
    fn blank(&self, id: BlockId, last: State, cause: Cause) -> Transition {
        if self.block(id).transition_to_blank(last) == Transition::Done {
            self.counters.drops.add(u64::from(cause == Cause::Dropped));
            self.counters.ended_pins.add(u64::from(last.standing().is_pinned()));
            self.evict_all(&[id], cause, |_| last.standing().class());
        }
        Transition::Raced
    }

    /// Lets the last holder put a block in line, unless the ring is full.
    #[inline]
    fn queue(&self, id: BlockId, last: State, batch: &mut Return) -> Option<Transition> {
        let joining = batch.reclassed(last);
        let class = joining.standing().class();
        let ring = self.ring(class);
        let ticket = self.ticket(class, batch)?;
        if let Some(reuse) = &self.reuse {
            // Before others can find the block in line.
            reuse.stamp(id, batch.now);
        }
        if planted(Fault::SlotBeforeState) {
            ring.fill(ticket, id);
        }
        let step = self.block(id).transition_to_queued(last, joining.queued(ticket));
        if step == Transition::Done {
            ring.fill(ticket, id);
            batch.tickets[class.index()].advance();
            match id.index() < batch.end {
                true => batch.queued += 1,
                false => self.size.count_rejoined(),
            }
        }
        Some(step)
    }

    #[inline]
    fn ticket(&self, class: Class, batch: &mut Return) -> Option<Ticket> {
        if batch.tickets[class.index()].peek().is_none() {
            self.reserve_in(class, 1, batch);
        }
        batch.tickets[class.index()].peek()
    }

    /// Takes the pin off the oldest block in the pinned line, which joins that of its own class; whether there was
    /// one.
    ///
    /// A block between two lines cannot be found by others, so a credit is held for it meanwhile. One
    /// block at a time: an allocation meanwhile may count on all others.
    pub(super) fn unpin_oldest(&self) -> bool {
        let mut inside = self.credits.enter();
        let wanted = if planted(Fault::GreedyDemotion) { usize::MAX } else { 1 };
        let credits = self.credits.take_some(wanted);
        let mut ids = Vec::new();
        let unpin = |id, place| Some(self.block(id).transition_to_unpinned(place));
        let ring = self.ring(Class::PINNED);
        ring.take_oldest(self.records.blocks(), credits.min(1), unpin, &mut ids);
        // No credit stands for a leaving block.
        let above = ids.iter().filter(|&&id| self.is_above(id)).count();
        self.size.count_held_above(above as i64);
        inside.give_at_end(credits - (ids.len() - above));
        let outcome = self.give_back_as(&ids, true, Destination::Same);
        debug_assert!(outcome.is_ok(), "a hold was lost: {outcome:?}");
        !ids.is_empty()
    }
}
