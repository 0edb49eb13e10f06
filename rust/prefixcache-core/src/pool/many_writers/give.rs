//! Giving blocks back, and moving them between the classes.

use super::MultiPool;
use super::block::{Block, GiveUp, Place, State, Ticket, Transition};
use super::credits::Inside;
use super::free_stack::Chain;
use super::ring::Reservation;
use crate::class::{ByClass, Class, ClassSet, Destination};
use crate::error::Misuse;
use crate::evictions::Cause;
use crate::id::BlockId;
use crate::policy::{ReuseQueue, Tick};
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
    in_front: usize,
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
    fn new(append: bool, to: Destination) -> Self {
        Self {
            front: Chain::EMPTY,
            in_front: 0,
            tickets: [const { Reservation::NONE }; _],
            classes: ClassSet::EMPTY,
            queued: 0,
            append,
            to,
            now: Tick::default(),
            end: 0,
        }
    }

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
    fn appends(&self) -> bool {
        self.config.free_order == FreeOrder::Append
    }

    /// Gives up one hold of each block, in this order, up to the first that nobody holds.
    pub(super) fn give_back(&self, ids: &[BlockId], to: Destination) -> Result<(), Misuse> {
        self.report_release(ids);
        self.give_back_as(ids, Return::new(self.appends(), to))
    }

    /// The caller is about to give up its holds of these blocks, up to the first that nobody holds.
    #[inline]
    pub(super) fn report_release(&self, ids: &[BlockId]) {
        if let Some(log) = self.eviction_log.get() {
            log.set_time(&self.clock);
            let held = ids.iter().take_while(|&&id| self.check_held(id).is_ok());
            held.for_each(|&id| log.released(id));
        }
    }

    /// The policy's time; of no meaning without one that asks for it.
    #[inline]
    pub(super) fn tick(&self) -> Tick {
        self.reuse.as_ref().map_or_else(Tick::default, ReuseQueue::now)
    }

    /// Reads what stays the same until the call ends. The caller is inside.
    #[inline]
    fn begin_return(&self, batch: &mut Return) {
        batch.now = self.tick();
        batch.end = self.size.end();
    }

    fn give_back_as(&self, ids: &[BlockId], mut batch: Return) -> Result<(), Misuse> {
        let mut inside = self.credits.enter();
        self.begin_return(&mut batch);
        let outcome =
            ids.chunks(CHUNK).try_for_each(|chunk| self.give_back_chunk(chunk, &mut batch));
        self.push_front(batch, &mut inside);
        drop(inside);
        self.keep_bound();
        outcome
    }

    /// Gives up the holds of blocks that this call itself took, which were no uses.
    #[cold]
    pub(super) fn give_back_all(&self, ids: &[BlockId]) {
        let outcome = self.give_back_as(ids, Return::new(self.appends(), Destination::Same));
        debug_assert!(outcome.is_ok(), "a hold was lost: {outcome:?}");
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
        for state in
            chunk.iter().filter_map(|id| self.records.blocks().get(id.index())).map(Block::state)
        {
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

    fn push_front(&self, batch: Return, inside: &mut Inside<'_>) {
        self.stack.push(self.records.blocks(), &batch.front);
        inside.give_at_end(batch.in_front);
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
        let above = id.index() >= batch.end;
        let retired = above && self.records.is_retired(id);
        if last.is_hashed() && (retired || !self.records.is_current(block)) {
            let cause = if retired { Cause::Resized } else { Cause::Discarded };
            return self.blank(id, last, cause);
        }
        if above && !last.is_hashed() {
            return self.retire(id);
        }
        if last.is_hashed() || batch.append {
            let joining = batch.reclassed(last);
            let class = joining.standing().class();
            if let Some(ticket) = self.ticket(class, batch) {
                let place = Place { class, ticket };
                return self.queue(id, last, joining.queued(ticket), place, batch);
            }
        }
        if last.is_hashed() {
            self.counters.drops.add(1);
            return self.blank(id, last, Cause::Dropped);
        }
        let step = block.transition_to_idle();
        if step == Transition::Done {
            self.append_to_front(id, batch);
        }
        step
    }

    /// Takes the content from a block of which the caller has the last hold; the hold stays, and the
    /// state is another in any case.
    #[cold]
    fn blank(&self, id: BlockId, last: State, cause: Cause) -> Transition {
        if self.block(id).transition_to_blank(last) == Transition::Done {
            if last.standing().is_pinned() {
                self.counters.ended_pins.add(1);
            }
            self.evict_all(&[id], cause, |_| last.standing().class());
        }
        Transition::Raced
    }

    /// Gives up the last hold of a block without content that the pool has shrunk below, or is about to.
    #[cold]
    fn retire(&self, id: BlockId) -> Transition {
        let outcome = self.block(id).transition_to_idle();
        if outcome == Transition::Done {
            self.size.count_release_above();
        }
        outcome
    }

    fn append_to_front(&self, id: BlockId, batch: &mut Return) {
        batch.front.append(self.records.blocks(), id);
        batch.in_front += 1;
    }

    #[inline]
    fn ticket(&self, class: Class, batch: &mut Return) -> Option<Ticket> {
        if batch.tickets[class.index()].peek().is_none() {
            self.reserve_in(class, 1, batch);
        }
        batch.tickets[class.index()].peek()
    }

    #[inline]
    fn queue(
        &self,
        id: BlockId,
        last: State,
        queued: State,
        place: Place,
        batch: &mut Return,
    ) -> Transition {
        let ring = self.ring(place.class);
        if let Some(reuse) = &self.reuse {
            // Before others can find the block in line.
            reuse.stamp(id, batch.now);
        }
        let early = planted(Fault::SlotBeforeState);
        if early {
            ring.fill(place.ticket, id);
        }
        let step = self.block(id).transition_to_queued(last, queued);
        if step == Transition::Done {
            if !early {
                ring.fill(place.ticket, id);
            }
            batch.tickets[place.class.index()].advance();
            if id.index() >= batch.end {
                self.size.count_rejoined();
            } else {
                batch.queued += 1;
            }
        }
        step
    }

    // Pins.

    /// Takes the pins off the oldest `count` blocks in the pinned line, which join those of their own
    /// classes; how many.
    pub(super) fn unpin_oldest(&self, count: usize) -> usize {
        let at_once = if planted(Fault::GreedyDemotion) { count } else { 1 };
        let mut moved = 0;
        while moved < count {
            let mut inside = self.credits.enter();
            let more = self.unpin_next(at_once, &mut inside);
            if more == 0 {
                break;
            }
            moved += more;
        }
        moved
    }

    /// A block between two lines cannot be found by others, so a credit is held for it meanwhile. For
    /// one block at a time: an allocation meanwhile may count on all others.
    fn unpin_next(&self, count: usize, inside: &mut Inside<'_>) -> usize {
        let credits = self.credits.take_some(count);
        let mut ids = Vec::new();
        let take = |id, place| Some(self.block(id).transition_to_unpinned(place));
        let moved =
            self.ring(Class::PINNED).take_oldest(self.records.blocks(), credits, take, &mut ids);
        // No credit stands for a leaving block.
        let above = ids.iter().filter(|&&id| self.is_above(id)).count();
        self.size.count_holds_above(above);
        inside.give_at_end(credits - (moved - above));
        let mut batch = Return::new(true, Destination::Same);
        self.begin_return(&mut batch);
        for chunk in ids.chunks(CHUNK) {
            let outcome = self.give_back_chunk(chunk, &mut batch);
            debug_assert!(outcome.is_ok(), "a hold was lost: {outcome:?}");
        }
        self.push_front(batch, inside);
        moved
    }
}
