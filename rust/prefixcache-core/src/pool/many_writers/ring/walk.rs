//! How the head moves: over what is vacant, and never over what is pending (rule 2).

use super::super::block::Ticket;
use super::super::words::exchange;
use super::{Ring, Slot};
use crate::sync::{Fault, planted};

/// A walk from the head toward the tail, which takes the head along as far as it may go.
pub(super) struct Walk<'a> {
    ring: &'a Ring,
    start: Ticket,
    at: Ticket,
    tail: Ticket,
    /// Where the head may go: everything before is vacant, and was when it was read.
    edge: Ticket,
    /// Whether nothing before `at` holds the head back.
    clear: bool,
    /// Whether the segment of `at` has to be looked at.
    fresh_segment: bool,
}

impl<'a> Walk<'a> {
    pub(super) fn new(ring: &'a Ring) -> Self {
        let start = ring.head();
        Self {
            ring,
            start,
            at: start,
            tail: ring.tail(),
            edge: start,
            clear: true,
            fresh_segment: true,
        }
    }

    /// The next slot of a segment that is not all vacant; [`Self::pass`] goes on behind it.
    #[inline(always)]
    pub(super) fn next_slot(&mut self) -> Option<(Ticket, Slot)> {
        while self.fresh_segment && self.at.is_before(self.tail) {
            if !self.ring.segment_is_vacant(self.at) {
                self.fresh_segment = false;
                break;
            }
            self.step_to(self.ring.segment_end(self.at));
        }
        // Nothing to look at is left in the part of the ring that was handed out when this began.
        self.at.is_before(self.tail).then(|| (self.at, self.ring.slot(self.at)))
    }

    /// Goes on behind a slot that is vacant or was just taken from, or, where it is pending, looks beyond.
    #[inline]
    pub(super) fn pass(&mut self, slot: Slot) {
        if slot == Slot::Pending && !planted(Fault::PassPending) {
            self.clear = false;
        }
        let next = self.at.plus(1);
        self.fresh_segment = self.ring.starts_segment(next);
        self.step_to(next);
    }

    #[inline]
    fn step_to(&mut self, next: Ticket) {
        self.at = next;
        if self.clear {
            self.edge = next;
        }
    }

    /// Moves the head; when the exchange is lost, another walk has moved it.
    #[inline]
    pub(super) fn finish(self) {
        if self.edge != self.start {
            let _ = exchange(&self.ring.head.0, self.start.get(), self.edge.get());
        }
    }
}
