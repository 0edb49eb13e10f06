//! Giving blocks back, and moving them between the tiers.

use super::BlockPool;
use crate::block::{Block, ByTier, GiveUp, State, Ticket, Tier, Transition};
use crate::credits::Inside;
use crate::error::Misuse;
use crate::free_stack::Chain;
use crate::id::BlockId;
use crate::ring::Reservation;
use crate::store::FreeOrder;
use crate::sync::{Fault, Mode, planted};

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
    tickets: ByTier<Reservation>,
    queued: usize,
    /// Whether blank blocks join the end of the line.
    append: bool,
}

impl Return {
    fn new(append: bool) -> Self {
        Self {
            front: Chain::EMPTY,
            in_front: 0,
            tickets: [const { Reservation::NONE }; _],
            queued: 0,
            append,
        }
    }
}

impl<M: Mode> BlockPool<M> {
    fn appends(&self) -> bool {
        self.config.free_order == FreeOrder::Append
    }

    /// Gives up one hold of each block, in this order, up to the first that nobody holds.
    pub(super) fn give_back(&self, ids: &[BlockId]) -> Result<(), Misuse> {
        let mut inside = self.credits.enter::<M>();
        self.give_back_inside(ids, &mut inside)
    }

    fn give_back_inside(&self, ids: &[BlockId], inside: &mut Inside<'_, M>) -> Result<(), Misuse> {
        let mut batch = Return::new(self.appends());
        let outcome = ids
            .chunks(CHUNK)
            .try_for_each(|chunk| self.give_back_chunk(chunk, &mut batch));
        self.push_front(batch, inside);
        outcome
    }

    /// Gives up the holds of blocks that this call itself took.
    #[cold]
    pub(super) fn give_back_all(&self, ids: &[BlockId]) {
        let outcome = self.give_back(ids);
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
        let mut wanted: ByTier<usize> = [0; _];
        for state in chunk
            .iter()
            .filter_map(|id| self.blocks.get(id.index()))
            .map(Block::state)
        {
            if state.holders() == 1 && (state.is_hashed() || batch.append) {
                wanted[state.tier().index()] += 1;
            }
        }
        for (tier, wanted) in Tier::ALL.into_iter().zip(wanted) {
            batch.tickets[tier.index()] = self.reserve_in(tier, wanted);
        }
    }

    fn reserve_in(&self, tier: Tier, wanted: usize) -> Reservation {
        if wanted == 0 {
            Reservation::NONE
        } else {
            self.ring(tier).reserve(wanted)
        }
    }

    /// Makes up for the tickets that were not needed, and lets the queued blocks be taken.
    fn finish_queued(&self, batch: &mut Return) {
        for (ring, tickets) in self.rings.iter().zip(&mut batch.tickets) {
            ring.leave_empty(std::mem::replace(tickets, Reservation::NONE));
        }
        self.credits.give::<M>(batch.queued);
        let steps = COMPACTION_STEPS * batch.queued;
        for ring in &self.rings {
            ring.maintain(&self.blocks, &self.credits, steps);
        }
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
        let retired = self.is_retired(id);
        if last.is_hashed() && (retired || !self.is_current(block)) {
            return self.blank(id, last);
        }
        if retired {
            return self.retire(id);
        }
        if (last.is_hashed() || batch.append)
            && let Some(ticket) = self.ticket(last.tier(), batch)
        {
            return self.queue(id, last, ticket, batch);
        }
        if last.is_hashed() {
            M::add(&self.counters.drops, 1);
            return self.blank(id, last);
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
    fn blank(&self, id: BlockId, last: State) -> Transition {
        if self.block(id).transition_to_blank::<M>(last) == Transition::Done {
            self.forget_all(&[id]);
        }
        Transition::Raced
    }

    /// Gives up the last hold of a block that the pool has shrunk below; it had lost its content then.
    #[cold]
    fn retire(&self, id: BlockId) -> Transition {
        let outcome = self.block(id).transition_to_idle::<M>();
        if outcome == Transition::Done {
            self.size.count_retired_release::<M>();
        }
        outcome
    }

    fn append_to_front(&self, id: BlockId, batch: &mut Return) {
        batch.front.append(&self.blocks, id);
        batch.in_front += 1;
    }

    #[inline]
    fn ticket(&self, tier: Tier, batch: &mut Return) -> Option<Ticket> {
        let tickets = &mut batch.tickets[tier.index()];
        if tickets.peek().is_none() {
            *tickets = self.ring(tier).reserve(1);
        }
        tickets.peek()
    }

    #[inline]
    fn queue(&self, id: BlockId, last: State, ticket: Ticket, batch: &mut Return) -> Transition {
        let ring = self.ring(last.tier());
        let early = planted(Fault::SlotBeforeState);
        if early {
            ring.fill(ticket, id);
        }
        let step = self
            .block(id)
            .transition_to_queued::<M>(last, ring.place(ticket));
        if step == Transition::Done {
            if !early {
                ring.fill(ticket, id);
            }
            batch.tickets[last.tier().index()].advance();
            batch.queued += 1;
        }
        step
    }

    // Tiers.

    /// Sets or takes the pins of held blocks with content; how many that changed.
    pub(super) fn set_pins(&self, ids: &[BlockId], pinned: bool) -> Result<usize, Misuse> {
        let mut changed = 0;
        for &id in ids {
            self.check_held(id)?;
            let block = self.block(id);
            let may_change = !pinned || self.is_current(block);
            if may_change && block.transition_to_pinned::<M>(pinned) {
                changed += 1;
            }
        }
        Ok(changed)
    }

    /// Moves the oldest `count` blocks of the pinned tier to the end of the regular one; how many.
    pub(super) fn demote_oldest(&self, count: usize) -> usize {
        let at_once = if planted(Fault::GreedyDemotion) {
            count
        } else {
            1
        };
        let mut moved = 0;
        while moved < count {
            let mut inside = self.credits.enter::<M>();
            let more = self.demote_next(at_once, &mut inside);
            if more == 0 {
                break;
            }
            moved += more;
        }
        moved
    }

    /// A block between the tiers cannot be found by others, so a credit is held for it meanwhile. For
    /// one block at a time: an allocation beside this may count on all others.
    fn demote_next(&self, count: usize, inside: &mut Inside<'_, M>) -> usize {
        let credits = self.credits.take_some::<M>(count);
        let mut ids = Vec::new();
        let take = |block: &Block, place| block.transition_to_demoted::<M>(place);
        let moved = self
            .ring(Tier::Pinned)
            .take_oldest(&self.blocks, credits, take, &mut ids);
        inside.give_at_end(credits - moved);
        let mut batch = Return::new(true);
        for chunk in ids.chunks(CHUNK) {
            let outcome = self.give_back_chunk(chunk, &mut batch);
            debug_assert!(outcome.is_ok(), "a hold was lost: {outcome:?}");
        }
        self.push_front(batch, inside);
        moved
    }
}
