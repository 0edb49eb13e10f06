//! One block, and every change of its state.
//!
//! One word says who has the block; each change of it is one exchange, named `transition_to_*`:
//!
//! ```text
//!   bits 0..17   holders
//!   bit  17      HASHED       the record names the block's content, and a lookup may take a hold
//!   bit  18      QUEUED       free, with a place in the ring of its class
//!   bit  19      REGISTERING  one thread, which has a hold for it, writes or removes the content
//!   bits 20..25  Standing     the class that the content was given, and its pin; 0 without content
//!   bits 25..64  ticket of the place, while QUEUED
//!
//!              allocated                claimed                     unclaimed
//!   IDLE ────────────────► held ──► held|REGISTERING(+1 hold) ──► held|HASHED ◄──┐ touched
//!    ▲                      │ ▲                                        │         │
//!    │ idle                 │ │ evicted (HASHED goes)                  │ queued  │
//!    └──────────────────────┘ └────────────── QUEUED[|HASHED] ◄────────┴─────────┘
//! ```
//!
//! An idle block is on the free stack or, if the pool has shrunk below it, in no line at all.
//!
//! Why this is enough:
//!
//! * *One owner at a time.* A block leaves the line by `touched`, `evicted` or `unpinned` (QUEUED goes
//!   and a hold comes in the same exchange) or, from IDLE, by whoever unlinked it from the free
//!   stack. An exchange that read QUEUED with a ticket succeeds only while the block still stands at
//!   that place, as a ticket is given out once in 2^39.
//! * *A recycled block is never hit.* A touch needs HASHED; an eviction takes HASHED away in the
//!   exchange that takes the block, before anybody can give it new content.
//! * *The record is stable while held with HASHED.* It is written only between a registration's first and second
//!   exchange, when HASHED is off and REGISTERING keeps every other registration out. So who holds a block may
//!   compare its content at leisure. Who holds nothing goes by the record's `seq` (`records/record.rs`).

use std::ops::Deref;

use super::words::exchange;
use crate::class::{Class, Standing};
use crate::id::{BlockId, Epoch};
use crate::records::{Content, OPEN, Record};
use crate::store::Marks;
use crate::sync::{AtomicU16, AtomicU32, AtomicU64, Fault, Ordering, planted};
use crate::zeroed::Zeroable;

use Ordering::{AcqRel, Acquire, Relaxed, Release};

/// A place in a ring: the number of slots handed out before it, modulo 2^39.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticket(u64);

impl Ticket {
    pub(super) const BITS: u32 = 39;
    const MASK: u64 = (1 << Self::BITS) - 1;

    pub(super) const fn new(number: u64) -> Self {
        Self(number & Self::MASK)
    }

    pub(super) const fn get(self) -> u64 {
        self.0
    }

    pub(super) const fn plus(self, count: u64) -> Self {
        Self::new(self.0.wrapping_add(count))
    }

    pub(super) const fn minus(self, count: u64) -> Self {
        Self::new(self.0.wrapping_sub(count))
    }

    /// How many places lie from `earlier` to here; no ring is long enough for this to be ambiguous.
    pub(super) const fn since(self, earlier: Self) -> u64 {
        self.minus(earlier.0).0
    }

    /// Whether this place comes before `other`: less than half the circle behind it.
    pub(super) const fn is_before(self, other: Self) -> bool {
        self.0 != other.0 && other.since(self) < 1 << (Self::BITS - 1)
    }
}

/// Where a free block stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) class: Class,
    pub(super) ticket: Ticket,
}

/// The packed state of a block.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct State(u64);

const HOLDERS: u64 = (1 << 17) - 1;
const HASHED: u64 = 1 << 17;
const QUEUED: u64 = 1 << 18;
const REGISTERING: u64 = 1 << 19;
const STANDING_SHIFT: u32 = 20;
const STANDING: u64 = ((1 << Standing::BITS) - 1) << STANDING_SHIFT;
const TICKET_SHIFT: u32 = STANDING_SHIFT + Standing::BITS;

/// What a block keeps when it joins its line or leaves it with its content.
const KEPT: u64 = HASHED | STANDING;

/// Holders that hits may bring a block to: the last hold that it can count is for a registration.
const MOST_TOUCHED: u64 = HOLDERS - 1;

impl State {
    /// Neither held nor queued: on the free stack, on its way there or from there, or retired.
    pub(super) const IDLE: Self = Self(0);
    /// Held by one, without content.
    pub(super) const HELD_ONCE: Self = Self(1);

    pub(super) fn queued(self, ticket: Ticket) -> Self {
        Self(QUEUED | ticket.get() << TICKET_SHIFT | self.0 & KEPT)
    }

    #[inline]
    fn taken(self) -> Self {
        Self(1 | self.0 & KEPT)
    }

    fn with_hash(self, set: bool) -> Self {
        Self(if set { self.0 | HASHED } else { self.0 & !HASHED })
    }

    pub(super) fn with_standing(self, standing: Standing) -> Self {
        Self(self.0 & !STANDING | u64::from(standing.bits()) << STANDING_SHIFT)
    }

    #[inline]
    pub(super) fn standing(self) -> Standing {
        Standing::from_bits((self.0 >> STANDING_SHIFT) as u8)
    }

    pub(super) fn holders(self) -> u64 {
        self.0 & HOLDERS
    }

    #[inline]
    pub(super) fn is_held(self) -> bool {
        self.holders() > 0
    }

    pub(super) fn is_hashed(self) -> bool {
        self.0 & HASHED != 0
    }

    /// Whether one thread is registering or forgetting the content of the block.
    pub(super) fn is_claimed(self) -> bool {
        self.0 & REGISTERING != 0
    }

    /// Where the block stands, when it is queued.
    #[inline]
    pub(super) fn place(self) -> Option<Place> {
        let (class, ticket) = (self.standing().class(), Ticket::new(self.0 >> TICKET_SHIFT));
        (self.0 & QUEUED != 0).then_some(Place { class, ticket })
    }

    #[inline]
    fn is_at(self, place: Place) -> bool {
        let is_of_class = |own: Place| own.class == place.class || planted(Fault::IgnoreClass);
        self.place().is_some_and(|own| own.ticket == place.ticket && is_of_class(own))
    }
}

/// What came of asking for a hold on a block with content.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub(super) enum Hold {
    /// Others hold the block too.
    Shared,
    /// The block was free and has left the line. Its slot, at this place, is vacant now: the caller has
    /// to count it as vacated.
    TakenFromLine(Place),
    /// The block is free, and the caller has no credit to take it with.
    NeedsCredit,
    /// The block holds no content, or cannot count another holder.
    Missed,
}

/// What came of giving up a hold.
#[must_use]
pub(super) enum GiveUp {
    /// Others hold the block still.
    StillHeld,
    /// It is the last one, and the caller still has it; this is the state that said so.
    LastHolder(State),
    /// Nobody held the block.
    NotHeld,
}

/// Whether a transition from an expected state took place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(super) enum Transition {
    /// It did.
    Done,
    /// Another thread had changed the state; nothing happened.
    Raced,
}

/// One block: a cache line.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Block {
    state: AtomicU64,
    record: Record,
    /// The block below on the free stack, the null block at its bottom.
    below: AtomicU32,
    /// What the cache noted of the content: see [`Marks`].
    marks: AtomicU16,
}

#[cfg(not(any(loom, shuttle)))]
const _: () = assert!(size_of::<Block>() == 64);

// SAFETY: every field is an atomic integer, or a record of them: zero is valid, is their default, and
// none needs to be dropped.
unsafe impl Zeroable for Block {}

impl Deref for Block {
    type Target = Record;

    #[inline]
    fn deref(&self) -> &Record {
        &self.record
    }
}

impl Block {
    /// The state now. Acquire: what the last transition's thread did before it is seen.
    #[inline]
    pub(super) fn state(&self) -> State {
        State(self.state.load(Acquire))
    }

    /// Puts the state that `decide` returns in the place of the one that it was given, and asks again
    /// when another thread was faster. Without a new state nothing changes.
    #[inline]
    fn update<T>(&self, mut decide: impl FnMut(State) -> (T, Option<State>)) -> T {
        let mut state = self.state();
        loop {
            let (outcome, new) = decide(state);
            let Some(new) = new else { return outcome };
            match exchange(&self.state, state.0, new.0) {
                Ok(()) => return outcome,
                Err(now) => state = State(now),
            }
        }
    }

    /// Puts `new` in the place of `expected`; with `blind`, which is a planted fault, of whatever stands there.
    #[inline]
    fn exchange(&self, expected: State, new: State, blind: Option<Fault>) -> Transition {
        if blind.is_some_and(planted) {
            self.state.store(new.0, Release);
            return Transition::Done;
        }
        match exchange(&self.state, expected.0, new.0) {
            Ok(()) => Transition::Done,
            Err(_) => Transition::Raced,
        }
    }

    /// Leaves `place` for the state that `new` makes of the one there. Raced when the block is elsewhere.
    #[inline]
    fn leave(&self, place: Place, new: impl Fn(State) -> State) -> Transition {
        let state = self.state();
        match state.is_at(place) {
            true => self.exchange(state, new(state), None),
            false => Transition::Raced,
        }
    }

    #[inline]
    pub(super) fn transition_to_touched(&self, has_credit: bool) -> Hold {
        self.update(|state| {
            if !state.is_hashed() || state.holders() >= MOST_TOUCHED {
                return (Hold::Missed, None);
            }
            match state.place() {
                None => (Hold::Shared, Some(State(state.0 + 1))),
                Some(_) if !has_credit => (Hold::NeedsCredit, None),
                Some(place) => (Hold::TakenFromLine(place), Some(state.taken())),
            }
        })
    }

    /// Takes the block from its place for new content; what it held can be hit no more.
    #[inline]
    pub(super) fn transition_to_evicted(&self, place: Place) -> Transition {
        self.leave(place, |_| State::HELD_ONCE.with_hash(planted(Fault::EvictHashed)))
    }

    /// Takes the block from its place with its content, and the pin off.
    pub(super) fn transition_to_unpinned(&self, place: Place) -> Transition {
        let held = |state: State| state.taken().with_standing(state.standing().unpinned());
        if planted(Fault::BlindDemotion) && self.state().is_at(place) {
            self.state.store(held(self.state()).0, Release);
            return Transition::Done;
        }
        self.leave(place, held)
    }

    /// Of an idle block that the caller has unlinked, so that nobody else can reach it.
    #[inline]
    pub(super) fn transition_to_allocated(&self) {
        debug_assert!(self.state() == State::IDLE);
        // Release: as the exchanges, so that whoever sees this state sees what came before it.
        self.state.store(State::HELD_ONCE.0, Release);
    }

    /// Gives up one hold, unless it is the last: that one stays with the caller.
    #[inline]
    pub(super) fn transition_to_one_less_held(&self) -> GiveUp {
        self.update(|state| match state.holders() {
            0 => (GiveUp::NotHeld, None),
            // The only hold is that of a claim, so the caller has none.
            1 if state.is_claimed() => (GiveUp::NotHeld, None),
            1 => (GiveUp::LastHolder(state), None),
            _ if planted(Fault::ForgetLastHolder) => {
                self.state.fetch_sub(1, AcqRel);
                (GiveUp::StillHeld, None)
            }
            _ => (GiveUp::StillHeld, Some(State(state.0 - 1))),
        })
    }

    /// The last holder, who found the block at `last`, lets it stand in line as `queued` says.
    #[inline]
    pub(super) fn transition_to_queued(&self, last: State, queued: State) -> Transition {
        debug_assert!(queued.place().is_some());
        self.exchange(last, queued, None)
    }

    /// The last holder takes content and class from the block and holds it on.
    pub(super) fn transition_to_blank(&self, last: State) -> Transition {
        self.exchange(last, State::HELD_ONCE, Some(Fault::BlindBlank))
    }

    /// The last holder of a blank block gives it up, to link it into the free stack or to retire it.
    #[inline]
    pub(super) fn transition_to_idle(&self) -> Transition {
        self.exchange(State::HELD_ONCE, State::IDLE, None)
    }

    /// A block that its one holder gave content takes the place, class and pin of one in line.
    pub(super) fn transition_to_replacing(&self, other: State) -> Transition {
        self.exchange(State::HELD_ONCE, other, None)
    }

    /// Takes a queued block out of its line for good; the state that it left.
    pub(super) fn transition_to_unqueued(&self) -> Option<State> {
        self.update(|state| {
            let left = state.place().map(|_| state);
            (left, left.map(|_| State::IDLE))
        })
    }

    pub(super) fn transition_to_moved(&self, from: Place, to: Place) -> Transition {
        debug_assert!(from.class == to.class);
        self.leave(from, |state| state.queued(to.ticket))
    }

    /// Changes class and pin of a held block with content; what they were and are, if these are others.
    pub(super) fn transition_to_classed(
        &self,
        change: impl Fn(Standing) -> Standing,
    ) -> Option<(Standing, Standing)> {
        self.update(|state| {
            let new = state.with_standing(change(state.standing()));
            let changes = state.is_held() && state.is_hashed() && new != state;
            if changes && planted(Fault::BlindClass) {
                self.state.store(new.0, Release);
                return (Some((state.standing(), new.standing())), None);
            }
            (changes.then_some((state.standing(), new.standing())), changes.then_some(new))
        })
    }

    /// Claims the content of a held block, and takes it and the class from the block. The claim is a hold: nobody
    /// else may register or forget the block until it is given up.
    pub(super) fn transition_to_claimed(&self, held: State) -> Transition {
        if !held.is_held() || held.is_claimed() {
            return Transition::Raced;
        }
        self.exchange(held, State((held.holders() + 1) | REGISTERING), None)
    }

    /// Gives the claim up, and the hold that came with it unless that is the last one by now.
    pub(super) fn transition_to_unclaimed(&self, hashed: bool) -> GiveUp {
        self.update(|state| {
            debug_assert!(state.is_held() && state.is_claimed());
            let held = |holders| State(holders).with_hash(hashed);
            match state.holders() {
                1 => (GiveUp::LastHolder(held(1)), Some(held(1))),
                holders => (GiveUp::StillHeld, Some(held(holders - 1))),
            }
        })
    }

    /// Writes the content of a claimed block. From the last store on, lookups find it.
    pub(super) fn write_content(&self, content: &Content, epoch: Epoch, seq: u64) {
        // Relaxed: marks order nothing, see `Marks`.
        self.marks.store(0, Relaxed);
        self.record.write(content, epoch, seq);
    }

    /// Gives the registration, whose number is `open`, its final one, unless another thread has.
    pub(super) fn number_registration(&self, open: u64, number: u64) {
        // A lost exchange means that the number is final, or the content gone.
        let _ = exchange(&self.record.seq, open, number);
    }

    /// The open number of a registration that gives the block `content` in `epoch`.
    pub(super) fn matches_open(&self, content: &Content, epoch: Epoch) -> Option<u64> {
        let seq = self.seq();
        let same = seq & OPEN != 0 && self.stays_same(seq, content, epoch).is_some();
        same.then_some(seq)
    }

    pub(super) fn marks(&self) -> Marks {
        // Relaxed, also below: see `write_content`.
        Marks(self.marks.load(Relaxed))
    }

    pub(super) fn mark(&self, marks: Marks) {
        self.marks.fetch_or(marks.0, Relaxed);
    }

    /// The block below on the free stack.
    #[inline]
    pub(super) fn below(&self) -> BlockId {
        // Relaxed, also below: the head of the stack orders the links (`free_stack.rs`).
        BlockId::new(self.below.load(Relaxed))
    }

    #[inline]
    pub(super) fn put_on(&self, below: BlockId) {
        self.below.store(below.get(), Relaxed);
    }
}
