//! Giving blocks back, and moving them between the classes.

use super::credits::Inside;
use super::free_stack::Chain;
use super::ring::Reservation;
use super::{BlockPool, add_to};
use crate::block::{Block, ByClass, Class, ClassSet, GiveUp, Place, State, Ticket, Transition};
use crate::error::Misuse;
use crate::evictions::Cause;
use crate::id::BlockId;
use crate::policy::{Queue, Tick};
use crate::store::FreeOrder;
use crate::sync::{Fault, Mode, planted};

/// Blocks that get their tickets with one exchange.
const CHUNK: usize = 64;

/// Slots that the compactor looks at for each block released: it is done with half a ring before the
/// other half has filled up.
const COMPACTION_STEPS: usize = 4;

/// Where blocks of the default band go that have content.
#[derive(Clone, Copy)]
enum Destination {
    /// To the queue in which they stood before.
    Same,
    /// To this queue.
    Queue(Queue),
    /// To where the next evictions take from.
    Front,
}

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
        if !last.is_hashed() || !last.class().is_of_default_band() {
            return last;
        }
        let class = match self.to {
            Destination::Front => Class::UNNEEDED,
            Destination::Queue(queue) => Class::of(queue),
            Destination::Same => last.class().max(Class::DEFAULT),
        };
        last.with_own_class(class)
    }
}

impl<M: Mode> BlockPool<M> {
    fn appends(&self) -> bool {
        self.config.free_order == FreeOrder::Append
    }

    /// Gives up one hold of each block, in this order, up to the first that nobody holds.
    pub(super) fn release(&self, ids: &[BlockId]) -> Result<(), Misuse> {
        self.give_back_to(ids, Destination::Same)
    }

    /// [`Self::release`], but content of the default band is evicted before all other.
    pub(super) fn release_unneeded(&self, ids: &[BlockId]) -> Result<(), Misuse> {
        self.give_back_to(ids, Destination::Front)
    }

    /// [`Self::release`], but content of the default band joins this queue.
    pub(super) fn release_to(&self, ids: &[BlockId], queue: Queue) -> Result<(), Misuse> {
        let queue = self.reuse.as_ref().map(|_| Destination::Queue(queue));
        self.give_back_to(ids, queue.unwrap_or(Destination::Same))
    }

    fn give_back_to(&self, ids: &[BlockId], to: Destination) -> Result<(), Misuse> {
        self.note_released(ids);
        self.give_back_as(ids, Return::new(self.appends(), to))
    }

    /// Reads what stays the same until the call ends. The caller is inside.
    #[inline]
    fn begin_return(&self, batch: &mut Return) {
        batch.now = self.tick();
        batch.end = self.size.end();
    }

    fn give_back_as(&self, ids: &[BlockId], mut batch: Return) -> Result<(), Misuse> {
        let mut inside = self.credits.enter::<M>();
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
        for state in chunk.iter().filter_map(|id| self.blocks.get(id.index())).map(Block::state) {
            if state.holders() == 1 && (state.is_hashed() || batch.append) {
                let class = batch.reclassed(state).class();
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
        self.classes.mark_used::<M>(class);
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
        self.credits.give::<M>(batch.queued);
        let steps = COMPACTION_STEPS * batch.queued;
        for class in batch.classes {
            self.ring(class).maintain(&self.blocks, &self.credits, steps);
        }
        batch.classes = ClassSet::EMPTY;
        batch.queued = 0;
    }

    fn push_front(&self, batch: Return, inside: &mut Inside<'_, M>) {
        self.stack.push::<M>(&self.blocks, &batch.front);
        inside.give_at_end(batch.in_front);
    }

    /// Gives up one hold.
    #[inline]
    fn unhold(&self, id: BlockId, batch: &mut Return) -> Result<(), Misuse> {
        loop {
            match self.block(id).transition_to_one_less_held::<M>() {
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
        let retired = above && self.is_retired(id);
        if last.is_hashed() && (retired || !self.is_current(block)) {
            let cause = if retired { Cause::Resized } else { Cause::Discarded };
            return self.blank(id, last, cause);
        }
        if above && !last.is_hashed() {
            return self.retire(id);
        }
        if last.is_hashed() || batch.append {
            let joining = batch.reclassed(last);
            let class = joining.class();
            if let Some(ticket) = self.ticket(class, batch) {
                let place = Place { class, ticket };
                return self.queue(id, last, joining.queued(ticket), place, batch);
            }
        }
        if last.is_hashed() {
            add_to::<M>(&self.counters.drops, 1);
            return self.blank(id, last, Cause::Dropped);
        }
        let step = block.transition_to_idle::<M>();
        if step == Transition::Done {
            self.append_to_front(id, batch);
        }
        step
    }

    /// Takes the content from a block of which the caller has the last hold; the hold stays, and the
    /// state is another in any case.
    #[cold]
    fn blank(&self, id: BlockId, last: State, cause: Cause) -> Transition {
        if self.block(id).transition_to_blank::<M>(last) == Transition::Done {
            if last.is_pinned() {
                add_to::<M>(&self.counters.ended_pins, 1);
            }
            self.evict_all(&[id], cause, |_| last.class());
        }
        Transition::Raced
    }

    /// Gives up the last hold of a block without content that the pool has shrunk below, or is about to.
    #[cold]
    fn retire(&self, id: BlockId) -> Transition {
        let outcome = self.block(id).transition_to_idle::<M>();
        if outcome == Transition::Done {
            self.size.count_release_above::<M>();
        }
        outcome
    }

    fn append_to_front(&self, id: BlockId, batch: &mut Return) {
        batch.front.append(&self.blocks, id);
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
        let step = self.block(id).transition_to_queued::<M>(last, queued);
        if step == Transition::Done {
            if !early {
                ring.fill(place.ticket, id);
            }
            batch.tickets[place.class.index()].advance();
            self.note_queued(id, queued);
            if id.index() >= batch.end {
                self.size.count_rejoined::<M>();
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
            let mut inside = self.credits.enter::<M>();
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
    fn unpin_next(&self, count: usize, inside: &mut Inside<'_, M>) -> usize {
        let credits = self.credits.take_some::<M>(count);
        let mut ids = Vec::new();
        let take = |id, place| Some(self.block(id).transition_to_unpinned::<M>(place));
        let moved = self.ring(Class::PINNED).take_oldest(&self.blocks, credits, take, &mut ids);
        // No credit stands for a leaving block.
        let above = ids.iter().filter(|&&id| self.is_above(id)).count();
        self.size.count_holds_above::<M>(above);
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
