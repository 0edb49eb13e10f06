//! Packs the occupied slots of a ring rightward, so that its head can move past a cold block.
//!
//! A pass runs from the tail of its start down to the head, with two cursors: `source` looks for queued
//! blocks and `target` for vacant slots behind them, so that the order in line stays what it was. It is
//! done by the threads that release, a few steps at each release, and only once the line is half as
//! long as the ring. One thread at a time compacts; the others go on without, nobody waits.
//!
//! The compactor takes a credit for every block that it moves, for the time in which the block's old
//! slot is vacant and its new one not yet written; with no credit to be had it stops for now.

use super::super::block::{Block, Ticket, Transition};
use super::super::credits::Credits;
use super::super::words::{add, add_short, exchange};
use super::{Ring, Slot};
use crate::id::BlockId;
use crate::sync::{AtomicBool, AtomicU64, Fault, Ordering, planted};

use Ordering::{AcqRel, Relaxed, Release};

/// The cursors of a pass.
#[derive(Debug, Default)]
pub(super) struct Compactor {
    busy: AtomicBool,
    running: AtomicBool,
    source: AtomicU64,
    target: AtomicU64,
}

/// The cursors while one thread has them.
struct Pass<'a> {
    ring: &'a Ring,
    blocks: &'a [Block],
    credits: &'a Credits,
    source: Ticket,
    target: Ticket,
    finished: bool,
}

impl Ring {
    /// Keeps the ring from filling up, after a release of some blocks: up to `steps` slots are looked
    /// at.
    #[inline]
    pub(in super::super) fn maintain(&self, blocks: &[Block], credits: &Credits, steps: usize) {
        // Relaxed: a pass that another thread has just begun or ended can be seen the next time.
        if self.is_half_full() || self.compactor.0.running.load(Relaxed) {
            self.skip_vacant(blocks, steps);
            self.compact(blocks, credits, steps);
        }
    }

    #[inline]
    fn is_half_full(&self) -> bool {
        let head = self.head();
        self.tail().since(head) > self.capacity() / 2
    }

    #[cold]
    pub(super) fn compact(&self, blocks: &[Block], credits: &Credits, steps: usize) {
        let compactor = &self.compactor.0;
        // AcqRel: the cursors are as the thread that cleared the flag left them.
        if compactor.busy.swap(true, AcqRel) {
            return;
        }
        if let Some(pass) = self.resume(blocks, credits) {
            pass.run(steps, compactor);
        }
        // Release: the next thread that sets the flag has the cursors as they stand now.
        compactor.busy.store(false, Release);
    }

    /// The current pass, or a new one if the ring is still half full.
    fn resume<'a>(&'a self, blocks: &'a [Block], credits: &'a Credits) -> Option<Pass<'a>> {
        // Relaxed, as all loads and stores of the cursors: `busy` orders them.
        let compactor = &self.compactor.0;
        let (source, target) = if compactor.running.load(Relaxed) {
            (compactor.source.load(Relaxed), compactor.target.load(Relaxed))
        } else if self.is_half_full() {
            let last = self.tail().minus(1).get();
            (last, last)
        } else {
            return None;
        };
        let (source, target) = (Ticket::new(source), Ticket::new(target));
        Some(Pass { ring: self, blocks, credits, source, target, finished: false })
    }

    /// Makes a vacant slot pending again (rule 5); not if it belongs to a later lap by now.
    fn reopen(&self, ticket: Ticket) -> bool {
        let slot = self.word(ticket);
        // Relaxed: the exchange checks again.
        let word = slot.load(Relaxed);
        if Self::unpack(word).0 != ticket {
            return false;
        }
        self.count_reopened(ticket, 1_u32.wrapping_neg());
        let reopened = exchange(slot, word, self.pending(ticket)).is_ok();
        if !reopened {
            self.count_reopened(ticket, 1);
        }
        reopened
    }

    fn count_reopened(&self, ticket: Ticket, change: u32) {
        if !planted(Fault::SkipReopened) {
            add_short(&self.vacated[self.segment(ticket)], change);
            add(&self.num_vacated.0, i64::from(change.cast_signed()).cast_unsigned());
        }
    }

    /// The word that makes a slot pending: any of an earlier lap would do.
    fn pending(&self, ticket: Ticket) -> u64 {
        Self::pack(ticket.minus(self.capacity()), BlockId::NULL)
    }

    /// Fills a reopened slot, unless the block has left it and the head has passed it since.
    fn fill_reopened(&self, ticket: Ticket, block: BlockId) {
        let word = self.word(ticket);
        // A lost exchange means a later lap: nothing of this one is left to do.
        let _ = exchange(word, self.pending(ticket), Self::pack(ticket, block));
    }
}

impl Pass<'_> {
    fn run(mut self, steps: usize, compactor: &Compactor) {
        let _ = (0..steps).all(|_| self.step());
        // Relaxed: see `resume`.
        compactor.running.store(!self.finished, Relaxed);
        compactor.source.store(self.source.get(), Relaxed);
        compactor.target.store(self.target.get(), Relaxed);
    }

    /// Looks at one slot, or at one segment if it is vacant; whether to go on.
    fn step(&mut self) -> bool {
        let ring = self.ring;
        if self.source.is_before(ring.head()) {
            self.finished = true;
        } else if ring.starts_segment(self.source.plus(1)) && ring.segment_is_vacant(self.source) {
            self.source = ring.segment_start(self.source).minus(1);
        } else if !self.is_occupied(self.source) {
            self.source = self.source.minus(1);
        } else if self.source == self.target {
            self.source = self.source.minus(1);
            self.target = self.source;
        } else if !ring.is_vacant(self.blocks, self.target, ring.slot(self.target)) {
            self.target = self.target.minus(1);
        } else {
            return self.fill_target();
        }
        !self.finished
    }

    fn is_occupied(&self, ticket: Ticket) -> bool {
        let slot = self.ring.slot(ticket);
        slot != Slot::Pending && !self.ring.is_vacant(self.blocks, ticket, slot)
    }

    /// Moves the block at `source` to `target`, which is vacant and lies behind it, if there is a credit; whether to
    /// go on.
    fn fill_target(&mut self) -> bool {
        if self.credits.take(1).is_err() {
            return false;
        }
        let reopened = planted(Fault::MoveUnopened) || self.ring.reopen(self.target);
        if reopened {
            self.move_block();
        }
        self.credits.give(1);
        // If not, the head has passed the target, so no queued block is left before it.
        self.finished = !reopened;
        reopened
    }

    /// Moves the block at `source` to `target`, which is pending.
    fn move_block(&mut self) {
        let ring = self.ring;
        let (from, to) = (ring.place(self.source), ring.place(self.target));
        if let Slot::Names(block) = ring.slot(self.source)
            && self.blocks[block.index()].transition_to_moved(from, to) == Transition::Done
        {
            ring.fill_reopened(self.target, block);
            ring.vacated_slots().add(ring, self.source);
            self.target = self.target.minus(1);
        } else {
            ring.fill_reopened(self.target, BlockId::NULL);
            ring.count_reopened(self.target, 1);
        }
        self.source = self.source.minus(1);
    }
}
