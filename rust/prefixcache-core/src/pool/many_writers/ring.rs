//! The LRU line of one class: a ring of slots, oldest first.
//!
//! A block that joins the line gets the next ticket, which numbers its slot; the slot names the block
//! and the block's state names the ticket. A block that leaves from the middle only changes its state:
//! the slot then names a block that is elsewhere and is *vacant*. Nothing is searched or unlinked.
//!
//! Rules that make this safe from several threads:
//!
//! 1. *State, then slot.* A release publishes the state first. In between the slot is *pending*: its
//!    word still has the ticket of an earlier lap. The other way round the slot would look vacant.
//! 2. *The head never passes a pending slot*, or its block would be lost. Evictions look beyond it.
//! 3. *A slot is filled only over a word of an earlier lap.* A block may be touched, and so vacate its
//!    slot, while that is pending; then the head may pass by the count of rule 4, and the slot belong
//!    to a later lap when the first writer gets to it.
//! 4. *Vacated slots are counted for each segment of slots*, so that a run of them is skipped a segment
//!    at a time. The count is never reset: a slot is vacated once a lap, so after the n-th lap the count
//!    is n times the segment's length, and exactly then the whole segment is vacant. A slot is counted
//!    after it was vacated, so the count errs only on the side of not skipping. Tickets of a lap's
//!    segment are handed out only once the head has left that segment of the lap before.
//! 5. *The compactor reopens a slot before it moves a block there.* It moves a queued block rightward
//!    into a vacant slot: it takes one off the count, makes the slot pending, exchanges the block's
//!    ticket, and fills the slot. A walk goes from left to right, so it finds the block at its old slot,
//!    or it finds it gone from there; then it also sees (acquire) what came before the move, the pending
//!    slot and the count, and stops at the slot by rule 2. So no head that moves can pass the block.
//!
//! Without the compactor a cold block at the head would hold the ring open while the rest of the pool
//! is touched and released, until the ring is full. When it is full all the same (it is at least four
//! times as long as the pool has blocks, so a thread must have stalled between rule 1's two steps), a
//! release gets no ticket and drops the block's content instead.

mod compactor;
#[cfg(all(test, loom))]
mod models;
mod walk;

use super::block::{Block, Place, Ticket, Transition};
use super::words::{add, add_short, exchange};
use crate::class::Class;
use crate::id::BlockId;
use crate::sync::{AtomicU32, AtomicU64, Fault, Ordering, OwnLine, planted, prefetch};
use crate::zeroed::Zeroed;
use compactor::Compactor;
use walk::Walk;

use Ordering::{Acquire, Relaxed};

const ID_BITS: u32 = 24;
const ID_MASK: u64 = (1 << ID_BITS) - 1;

/// Slots that share a count of the vacated ones.
const SEGMENT: u64 = if cfg!(loom) { 2 } else { 256 };

/// How far ahead of an eviction the records of the blocks to come are fetched.
const PREFETCH_AHEAD: u64 = 12;

/// What a slot says at a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    /// Handed out, and not written yet (or no longer of this lap).
    Pending,
    /// Written without a block.
    Empty,
    /// Names a block, which may be elsewhere by now.
    Names(BlockId),
}

/// Tickets handed out to one thread, which must fill the slot of each or leave it empty.
#[derive(Debug)]
pub(super) struct Reservation {
    next: Ticket,
    left: u64,
}

impl Reservation {
    pub(super) const NONE: Self = Self { next: Ticket::new(0), left: 0 };

    /// The next ticket; it stays the next until [`Self::advance`].
    pub(super) fn peek(&self) -> Option<Ticket> {
        (self.left > 0).then_some(self.next)
    }

    pub(super) fn advance(&mut self) {
        self.next = self.next.plus(1);
        self.left -= 1;
    }
}

/// Counts vacated slots and reports them a segment at a time: neighbours in line often leave together.
pub(super) struct VacatedSlots<'a> {
    ring: &'a Ring,
    segment: usize,
    /// Those of the segment that are not reported yet.
    count: u32,
    total: u64,
}

impl<'a> VacatedSlots<'a> {
    #[inline]
    pub(super) fn add(&mut self, ring: &'a Ring, ticket: Ticket) {
        if ring.class != self.ring.class {
            *self = ring.vacated_slots();
        }
        let segment = ring.segment(ticket);
        if segment != self.segment {
            self.report();
            self.segment = segment;
        }
        self.count += 1;
    }

    #[inline]
    fn report(&mut self) {
        if self.count > 0 {
            add_short(&self.ring.vacated[self.segment], self.count);
            self.total += u64::from(self.count);
            self.count = 0;
        }
    }
}

impl Drop for VacatedSlots<'_> {
    #[inline]
    fn drop(&mut self) {
        self.report();
        if self.total > 0 {
            add(&self.ring.num_vacated.0, self.total);
        }
    }
}

/// The line of one class.
pub(super) struct Ring {
    class: Class,
    /// `ticket:39 | block:24`; the null block stands for none.
    slots: Zeroed<AtomicU64>,
    /// Slots vacated so far in each segment, as far as [`Self::count_mask`] reaches.
    vacated: Zeroed<AtomicU32>,
    /// The capacity, a power of two, less one.
    mask: u64,
    capacity_bits: u32,
    segment_bits: u32,
    count_mask: u32,
    /// The oldest ticket that may live.
    head: OwnLine<AtomicU64>,
    /// The ticket to hand out next.
    tail: OwnLine<AtomicU64>,
    /// Slots vacated so far in all segments, counted from where the tail began.
    num_vacated: OwnLine<AtomicU64>,
    compactor: OwnLine<Compactor>,
}

impl Ring {
    /// A ring of `capacity` slots (a power of two), or nothing when there is no memory for it.
    pub(super) fn new(class: Class, capacity: usize) -> Option<Self> {
        assert!(capacity.is_power_of_two());
        let capacity_bits = capacity.trailing_zeros();
        let segment_bits = SEGMENT.trailing_zeros().min(capacity_bits / 2);
        let laps = 1_u64 << (Ticket::BITS - capacity_bits);
        let count_mask = u32::try_from((laps << segment_bits) - 1).unwrap_or(u32::MAX);
        // The first lap is lap 1: the zeroes that the slots start with are then tickets of lap 0.
        let start = || OwnLine(AtomicU64::new(capacity as u64));
        Some(Self {
            class,
            slots: Zeroed::new(capacity)?,
            vacated: Zeroed::new(capacity >> segment_bits)?,
            mask: capacity as u64 - 1,
            capacity_bits,
            segment_bits,
            count_mask,
            head: start(),
            tail: start(),
            num_vacated: start(),
            compactor: OwnLine(Compactor::default()),
        })
    }

    pub(super) fn capacity(&self) -> u64 {
        self.mask + 1
    }

    pub(super) fn place(&self, ticket: Ticket) -> Place {
        Place { class: self.class, ticket }
    }

    fn word(&self, ticket: Ticket) -> &AtomicU64 {
        &self.slots[(ticket.get() & self.mask) as usize]
    }

    fn pack(ticket: Ticket, block: BlockId) -> u64 {
        ticket.get() << ID_BITS | u64::from(block.get())
    }

    fn unpack(word: u64) -> (Ticket, BlockId) {
        (Ticket::new(word >> ID_BITS), BlockId::new((word & ID_MASK) as u32))
    }

    fn slot(&self, ticket: Ticket) -> Slot {
        // Acquire: with the word comes the state that was published before it.
        match Self::unpack(self.word(ticket).load(Acquire)) {
            (at, _) if at != ticket => Slot::Pending,
            (_, BlockId::NULL) => Slot::Empty,
            (_, block) => Slot::Names(block),
        }
    }

    /// The oldest ticket that may live.
    pub(super) fn head(&self) -> Ticket {
        // Acquire: pairs with `Walk::finish`, so that a slot is given to the next lap only after the
        // walk that let it go has read it.
        Ticket::new(self.head.0.load(Acquire))
    }

    pub(super) fn tail(&self) -> Ticket {
        // Acquire: pairs with the exchange in `reserve`, so that the tail is never behind a head that
        // was read before.
        Ticket::new(self.tail.0.load(Acquire))
    }

    /// How many slots are occupied or pending: at rest, how many blocks stand in line.
    pub(super) fn len(&self) -> usize {
        // Acquire, and before the tail: what was vacated was handed out before.
        let vacated = Ticket::new(self.num_vacated.0.load(Acquire));
        self.tail().since(vacated) as usize
    }

    /// Hands out up to `wanted` tickets, fewer when the ring is full.
    #[inline]
    pub(super) fn reserve(&self, wanted: usize) -> Reservation {
        loop {
            let head = self.head();
            let tail = self.tail();
            // From the start of the head's segment: while a slot there is of one lap and another of the
            // next, the vacated ones could not be distinguished (rule 4).
            let used = tail.since(self.segment_start(head));
            let room = self.capacity() - used.min(self.capacity());
            let left = room.min(wanted as u64);
            if left == 0 {
                return Reservation::NONE;
            }
            if exchange(&self.tail.0, tail.get(), tail.plus(left).get()).is_ok() {
                return Reservation { next: tail, left };
            }
        }
    }

    /// Lets the slot of `ticket` name `block`, whose state says so already (rules 1 and 3).
    #[inline]
    pub(super) fn fill(&self, ticket: Ticket, block: BlockId) {
        let slot = self.word(ticket);
        // Relaxed: the exchange checks again; the word's ticket alone matters.
        let mut word = slot.load(Relaxed);
        let blind = planted(Fault::BlindSlotStore);
        while blind || Self::unpack(word).0.is_before(ticket) {
            match exchange(slot, word, Self::pack(ticket, block)) {
                Ok(()) => return,
                Err(now) => word = now,
            }
        }
    }

    /// Lets the slot of `ticket` name `block` in the place of the one that stood there. No walk is running.
    pub(super) fn replace(&self, ticket: Ticket, from: BlockId, block: BlockId) {
        let replaced =
            exchange(self.word(ticket), Self::pack(ticket, from), Self::pack(ticket, block));
        debug_assert!(replaced.is_ok(), "block {from} stood elsewhere");
    }

    /// Gives up the tickets that a reservation has left.
    pub(super) fn leave_empty(&self, mut reservation: Reservation) {
        while let Some(ticket) = reservation.peek() {
            reservation.advance();
            self.fill(ticket, BlockId::NULL);
            self.vacated_slots().add(self, ticket);
        }
    }

    /// A count of vacated slots, which is reported when it is dropped.
    #[inline]
    pub(super) fn vacated_slots(&self) -> VacatedSlots<'_> {
        VacatedSlots { ring: self, segment: 0, count: 0, total: 0 }
    }

    /// Takes up to `max` blocks from the front, by `leave`, which may end this by None, and appends them to
    /// `out`.
    pub(super) fn take_oldest(
        &self,
        blocks: &[Block],
        max: usize,
        leave: impl Fn(BlockId, Place) -> Option<Transition>,
        out: &mut Vec<BlockId>,
    ) {
        let mut vacated = self.vacated_slots();
        let end = out.len() + max;
        self.walk_front(usize::MAX, |ticket, slot| {
            if out.len() == end {
                return false;
            }
            self.prefetch_block(blocks, ticket.plus(PREFETCH_AHEAD));
            let Slot::Names(block) = slot else {
                return true;
            };
            let step = leave(block, self.place(ticket));
            if step == Some(Transition::Done) {
                vacated.add(self, ticket);
                out.push(block);
            }
            step.is_some()
        });
    }

    #[inline]
    fn prefetch_block(&self, blocks: &[Block], ticket: Ticket) {
        // Relaxed: a hint.
        let (_, block) = Self::unpack(self.word(ticket).load(Relaxed));
        if let Some(block) = blocks.get(block.index()) {
            prefetch(block);
        }
    }

    /// The block at the front, if any stands in line. Takes the head over what is vacant before it, so that the next
    /// call does not look at that again.
    pub(super) fn oldest(&self, blocks: &[Block]) -> Option<BlockId> {
        let mut oldest = None;
        self.walk_front(usize::MAX, |ticket, slot| {
            if let Slot::Names(block) = slot
                && !self.is_vacant(blocks, ticket, slot)
            {
                oldest = Some(block);
            }
            oldest.is_none()
        });
        oldest
    }

    /// Moves the head over up to `budget` vacant slots and segments.
    fn skip_vacant(&self, blocks: &[Block], budget: usize) {
        self.walk_front(budget, |ticket, slot| self.is_vacant(blocks, ticket, slot));
    }

    /// Looks at up to `budget` slots from the head on, which goes along, while `look` says that the slot is vacant or
    /// pending.
    #[inline]
    fn walk_front(&self, budget: usize, mut look: impl FnMut(Ticket, Slot) -> bool) {
        let mut walk = Walk::new(self);
        for _ in 0..budget {
            match walk.next_slot() {
                Some((ticket, slot)) if look(ticket, slot) => walk.pass(slot),
                _ => break,
            }
        }
        walk.finish();
    }

    /// Whether the slot, as it was read at `ticket`, names no block that stands there.
    #[inline]
    fn is_vacant(&self, blocks: &[Block], ticket: Ticket, slot: Slot) -> bool {
        match slot {
            Slot::Pending => false,
            Slot::Empty => true,
            Slot::Names(block) => blocks[block.index()].state().place() != Some(self.place(ticket)),
        }
    }

    fn segment(&self, ticket: Ticket) -> usize {
        ((ticket.get() & self.mask) >> self.segment_bits) as usize
    }

    fn starts_segment(&self, ticket: Ticket) -> bool {
        ticket.get() & ((1 << self.segment_bits) - 1) == 0
    }

    /// The first ticket of the segment of `ticket`.
    fn segment_start(&self, ticket: Ticket) -> Ticket {
        ticket.minus(ticket.get() & ((1 << self.segment_bits) - 1))
    }

    fn segment_end(&self, ticket: Ticket) -> Ticket {
        self.segment_start(ticket).plus(1 << self.segment_bits)
    }

    /// Whether every slot of the segment has been vacated in the lap of `ticket` (rule 4).
    fn segment_is_vacant(&self, ticket: Ticket) -> bool {
        self.still_occupied(ticket) == 0
    }

    fn still_occupied(&self, ticket: Ticket) -> u32 {
        let laps = ticket.get() >> self.capacity_bits;
        let all = (laps << self.segment_bits) as u32;
        // Acquire: from now on the states with which blocks vacated these slots can be seen.
        all.wrapping_sub(self.vacated[self.segment(ticket)].load(Acquire)) & self.count_mask
    }

    /// The blocks in line, oldest first. Exact only at rest.
    pub(super) fn walk<'a>(
        &'a self,
        blocks: &'a [Block],
    ) -> impl Iterator<Item = (Ticket, BlockId)> {
        let head = self.head();
        let span = self.tail().since(head);
        (0..span).map(move |step| head.plus(step)).filter_map(move |ticket| {
            match self.slot(ticket) {
                slot @ Slot::Names(block) if !self.is_vacant(blocks, ticket, slot) => {
                    Some((ticket, block))
                }
                _ => None,
            }
        })
    }

    /// What is wrong with the counts of vacated slots, at rest.
    pub(super) fn check_vacated(&self, blocks: &[Block]) -> Result<(), String> {
        let (head, tail) = (self.head(), self.tail());
        let (first, segment) = (self.segment_start(head), 1 << self.segment_bits);
        let wrong = |what| Err(format!("{:?} ring: {what}", self.class));
        for start in (0..tail.since(first)).step_by(segment).map(|step| first.plus(step)) {
            let slots = (0..segment as u64).map(|step| start.plus(step));
            let is_occupied = |&at: &Ticket| {
                let is_passed = at.is_before(head);
                !at.is_before(tail) || !is_passed && !self.is_vacant(blocks, at, self.slot(at))
            };
            let (occupied, counted) =
                (slots.filter(is_occupied).count(), self.still_occupied(start));
            if occupied != counted as usize {
                return wrong(format!("{occupied} slots of {start:?} are occupied, not {counted}"));
            }
        }
        let (in_line, counted) = (self.walk(blocks).count(), self.len());
        match in_line == counted {
            true => Ok(()),
            false => wrong(format!("{in_line} blocks in line, {counted} counted")),
        }
    }
}
