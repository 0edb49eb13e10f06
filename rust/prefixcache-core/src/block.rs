//! The record of one block, and every change of its state.
//!
//! One word says who has the block; each change of it is one exchange, named `transition_to_*`:
//!
//! ```text
//!   bits 0..17   holders
//!   bit  17      HASHED       the record names the block's content, and a lookup may take a hold
//!   bit  18      QUEUED       free, with a place in the ring of its class
//!   bit  19      REGISTERING  one thread, which has a hold for it, writes or removes the content
//!   bits 20..24  the content's own class; 0 is the default
//!   bit  24      PINNED       the block is of the pinned class, unless its own is above that
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
//! * *One owner at a time.* A block leaves the line by `touched`, `evicted` or `demoted` (QUEUED goes
//!   and a hold comes in the same exchange) or, from IDLE, by whoever unlinked it from the free
//!   stack. An exchange that read QUEUED with a ticket succeeds only while the block still stands at
//!   that place, as a ticket is given out once in 2^39.
//! * *A recycled block is never hit.* A touch needs HASHED; an eviction takes HASHED away in the
//!   exchange that takes the block, before anybody can give it new content.
//! * *The record is stable while held with HASHED.* `hash`, `group` and `epoch` are written only
//!   between a registration's first and second exchange, when HASHED is off and REGISTERING keeps
//!   every other registration out. So who holds a block may compare its content at leisure.
//! * *Readers that hold nothing* read `seq`, then the content, then `seq` again. `seq` is 0 while the
//!   content changes and unique to each registration; the content's stores release and its loads
//!   acquire, so a reader that saw new content sees `seq` changed.

mod place;

use std::num::NonZeroU64;

use crate::id::Epoch;
use crate::store::{BlockKey, Marks};
use crate::sync::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Fault, Mode, Ordering, planted};
use crate::zeroed::Zeroable;

pub(crate) use crate::records::Content;
pub(crate) use place::{ByClass, Class, ClassSet, Place, Ticket};

use Ordering::{Acquire, Relaxed, Release};

/// The packed state of a block.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct State(u64);

const HOLDERS: u64 = (1 << 17) - 1;
const HASHED: u64 = 1 << 17;
const QUEUED: u64 = 1 << 18;
const REGISTERING: u64 = 1 << 19;
const CLASS_SHIFT: u32 = 20;
const CLASS: u64 = 15 << CLASS_SHIFT;
const PINNED: u64 = 1 << 24;
const TICKET_SHIFT: u32 = 25;

/// What a block keeps when it joins its line or leaves it with its content.
const KEPT: u64 = HASHED | CLASS | PINNED;

/// Holders that hits may bring a block to: the last hold that it can count is for a registration.
const MOST_TOUCHED: u64 = HOLDERS - 1;

impl State {
    /// Neither held nor queued: on the free stack, on its way there or from there, or retired.
    pub(crate) const IDLE: Self = Self(0);
    /// Held by one, without content.
    pub(crate) const HELD_ONCE: Self = Self(1);

    /// The state of the block when it stands at this place in the ring of its class.
    #[inline]
    pub(crate) fn queued(self, ticket: Ticket) -> Self {
        Self(QUEUED | ticket.get() << TICKET_SHIFT | self.0 & KEPT)
    }

    /// The state with another class of its own, which is kept as its difference to the default one: a
    /// blank state is of the default class.
    #[inline]
    pub(crate) fn with_own_class(self, class: Class) -> Self {
        let code = (class.index() ^ Class::DEFAULT.index()) as u64;
        Self(self.0 & !CLASS | code << CLASS_SHIFT)
    }

    /// The state with a pin, which makes it forget in which of the default band's classes it stood.
    #[inline]
    pub(crate) fn pinned(self) -> Self {
        let own = match self.own_class().is_of_default_band() {
            true => Class::DEFAULT,
            false => self.own_class(),
        };
        self.with_own_class(own).with(PINNED, true)
    }

    /// The state without a pin.
    pub(crate) fn unpinned(self) -> Self {
        self.with(PINNED, false)
    }

    /// The state with a bit set or cleared.
    #[inline]
    fn with(self, bit: u64, set: bool) -> Self {
        Self(if set { self.0 | bit } else { self.0 & !bit })
    }

    #[inline]
    fn has(self, bit: u64) -> bool {
        self.0 & bit != 0
    }

    #[inline]
    pub(crate) fn holders(self) -> u64 {
        self.0 & HOLDERS
    }

    #[inline]
    pub(crate) fn is_held(self) -> bool {
        self.holders() > 0
    }

    #[inline]
    pub(crate) fn is_hashed(self) -> bool {
        self.has(HASHED)
    }

    /// Whether one thread is registering or forgetting the content of the block.
    #[inline]
    pub(crate) fn is_claimed(self) -> bool {
        self.has(REGISTERING)
    }

    #[inline]
    pub(crate) fn is_pinned(self) -> bool {
        self.has(PINNED)
    }

    /// The class that the content was given.
    #[inline]
    pub(crate) fn own_class(self) -> Class {
        Class::new((self.0 >> CLASS_SHIFT) as u8 ^ Class::DEFAULT.index() as u8)
    }

    /// The class whose ring the block stands in, or would join at its release.
    #[inline]
    pub(crate) fn class(self) -> Class {
        if self.is_pinned() { self.class_with_pin() } else { self.own_class() }
    }

    #[cold]
    fn class_with_pin(self) -> Class {
        self.own_class().max(Class::PINNED)
    }

    /// Where the block stands, when it is queued.
    #[inline]
    pub(crate) fn place(self) -> Option<Place> {
        self.has(QUEUED)
            .then(|| Place { class: self.class(), ticket: Ticket::new(self.0 >> TICKET_SHIFT) })
    }

    #[inline]
    fn is_at(self, place: Place) -> bool {
        if planted(Fault::IgnoreClass) {
            return self.place().map(|own| own.ticket) == Some(place.ticket);
        }
        // One comparison for a block without a pin.
        let plain = Self(QUEUED | place.ticket.get() << TICKET_SHIFT).with_own_class(place.class);
        self.with(HASHED, false) == plain || self.is_pinned() && self.place() == Some(place)
    }
}

/// What came of asking for a hold on a block with content.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Hold {
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
pub(crate) enum GiveUp {
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
pub(crate) enum Transition {
    /// It did.
    Done,
    /// Another thread had changed the state; nothing happened.
    Raced,
}

/// In `seq`: the registration is entered in the index, and its final number is still to come.
pub(crate) const OPEN: u64 = 1 << 63;

/// One block. The order of the fields keeps what a probe reads in one cache line.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Block {
    state: AtomicU64,
    hash: [AtomicU64; 4],
    /// Which registration, in the order of the pool's life, wrote the content; 0 for none.
    seq: AtomicU64,
    /// The block below on the free stack.
    pub(crate) next: AtomicU32,
    /// The low 32 bits of the epoch.
    epoch: AtomicU32,
    /// The other 16.
    epoch_high: AtomicU16,
    group: AtomicU16,
    /// Whether another block with the content was ever registered; known to a single writer alone.
    copied: AtomicBool,
    /// What the cache noted of the content: see [`Marks`].
    marks: AtomicU16,
}

#[cfg(not(any(loom, shuttle)))]
const _: () = assert!(size_of::<Block>() == 64);

// SAFETY: every field is an atomic integer or an array of them: zero is valid, is their default, and
// none needs to be dropped.
unsafe impl Zeroable for Block {}

impl Block {
    /// The state now. Acquire: what the last transition's thread did before it is seen.
    #[inline]
    pub(crate) fn state(&self) -> State {
        State(self.state.load(Acquire))
    }

    /// Puts the state that `decide` returns in the place of the one that it was given, and asks again
    /// when another thread was faster. Without a new state nothing changes.
    #[inline]
    fn update<M: Mode, T>(&self, mut decide: impl FnMut(State) -> (T, Option<State>)) -> T {
        let mut state = self.state();
        loop {
            let (outcome, new) = decide(state);
            let Some(new) = new else { return outcome };
            match M::exchange(&self.state, state.0, new.0) {
                Ok(()) => return outcome,
                Err(now) => state = State(now),
            }
        }
    }

    #[inline]
    fn exchange<M: Mode>(&self, expected: State, new: State) -> Transition {
        match M::exchange(&self.state, expected.0, new.0) {
            Ok(()) => Transition::Done,
            Err(_) => Transition::Raced,
        }
    }

    /// Leaves `place` for the state that `new` makes of the one there. Raced only when the block is elsewhere:
    /// while it stands at its place its own class may change.
    #[inline]
    fn leave<M: Mode>(&self, place: Place, new: impl Fn(State) -> State) -> Transition {
        let mut state = self.state();
        while state.is_at(place) {
            match M::exchange(&self.state, state.0, new(state).0) {
                Ok(()) => return Transition::Done,
                Err(_) if planted(Fault::LeaveOnce) => break,
                Err(now) => state = State(now),
            }
        }
        Transition::Raced
    }

    // Taking a hold.

    /// Takes a hold on a block with content.
    #[inline]
    pub(crate) fn transition_to_touched<M: Mode>(&self, has_credit: bool) -> Hold {
        self.update::<M, _>(|state| {
            if !state.is_hashed() || state.holders() >= MOST_TOUCHED {
                return (Hold::Missed, None);
            }
            match state.place() {
                None => (Hold::Shared, Some(State(state.0 + 1))),
                Some(_) if !has_credit => (Hold::NeedsCredit, None),
                Some(place) => {
                    let held = State(1 | state.0 & KEPT);
                    (Hold::TakenFromLine(place), Some(held))
                }
            }
        })
    }

    /// Takes the block from its place for new content; what it held can be hit no more.
    #[inline]
    pub(crate) fn transition_to_evicted<M: Mode>(&self, place: Place) -> Transition {
        self.leave::<M>(place, |_| State::HELD_ONCE.with(HASHED, planted(Fault::EvictHashed)))
    }

    /// Takes the block from its place with its content, and the pin off.
    pub(crate) fn transition_to_unpinned<M: Mode>(&self, place: Place) -> Transition {
        let held = |state: State| State(1 | state.0 & KEPT).unpinned();
        if planted(Fault::BlindDemotion) && self.state().is_at(place) {
            self.state.store(held(self.state()).0, Release);
            return Transition::Done;
        }
        self.leave::<M>(place, held)
    }

    /// Gives an idle block, which the caller has unlinked and nobody else can reach, its first hold.
    #[inline]
    pub(crate) fn transition_to_allocated(&self) {
        debug_assert!(self.state() == State::IDLE);
        // Release: as the exchanges, so that whoever sees this state sees what came before it.
        self.state.store(State::HELD_ONCE.0, Release);
    }

    // Giving up a hold.

    /// Gives up one hold, unless it is the last: that one stays with the caller.
    #[inline]
    pub(crate) fn transition_to_one_less_held<M: Mode>(&self) -> GiveUp {
        self.update::<M, _>(|state| match state.holders() {
            0 => (GiveUp::NotHeld, None),
            // The only hold is that of a claim, so the caller has none.
            1 if state.is_claimed() => (GiveUp::NotHeld, None),
            1 => (GiveUp::LastHolder(state), None),
            _ if planted(Fault::ForgetLastHolder) => {
                self.state.fetch_sub(1, Ordering::AcqRel);
                (GiveUp::StillHeld, None)
            }
            _ => (GiveUp::StillHeld, Some(State(state.0 - 1))),
        })
    }

    /// The last holder, who found the block at `last`, lets it stand in line as `queued` says.
    #[inline]
    pub(crate) fn transition_to_queued<M: Mode>(&self, last: State, queued: State) -> Transition {
        debug_assert!(queued.place().is_some());
        self.exchange::<M>(last, queued)
    }

    /// The last holder takes content and class from the block and holds it on.
    pub(crate) fn transition_to_blank<M: Mode>(&self, last: State) -> Transition {
        if planted(Fault::BlindBlank) {
            self.state.store(State::HELD_ONCE.0, Release);
            return Transition::Done;
        }
        self.exchange::<M>(last, State::HELD_ONCE)
    }

    /// The last holder of a blank block gives it up, to link it into the free stack or to retire it.
    #[inline]
    pub(crate) fn transition_to_idle<M: Mode>(&self) -> Transition {
        self.exchange::<M>(State::HELD_ONCE, State::IDLE)
    }

    /// A block that its one holder gave content takes the place, class and pin of one in line.
    pub(crate) fn transition_to_replacing<M: Mode>(&self, other: State) -> Transition {
        self.exchange::<M>(State::HELD_ONCE, other)
    }

    /// Takes a queued block out of its line for good; the place that it left, and whether it was pinned.
    pub(crate) fn transition_to_unqueued<M: Mode>(&self) -> Option<(Place, bool)> {
        self.update::<M, _>(|state| {
            let left = state.place().map(|place| (place, state.is_pinned()));
            (left, left.map(|_| State::IDLE))
        })
    }

    // Changing where a block stands or will stand.

    /// Moves a queued block to another place of its class.
    pub(crate) fn transition_to_moved<M: Mode>(&self, from: Place, to: Place) -> Transition {
        debug_assert!(from.class == to.class);
        self.leave::<M>(from, |state| state.queued(to.ticket))
    }

    /// Changes class and pin of a held block with content; whether they are others then.
    pub(crate) fn transition_to_classed<M: Mode>(&self, change: impl Fn(State) -> State) -> bool {
        self.update::<M, _>(|state| {
            let new = change(state);
            let changes = state.is_held() && state.is_hashed() && new != state;
            if changes && planted(Fault::BlindClass) {
                self.state.store(new.0, Release);
                return (true, None);
            }
            (changes, changes.then_some(new))
        })
    }

    /// Gives a queued block, which stays at its place, the class of its own and the pin that `new` has.
    pub(crate) fn transition_in_place<M: Mode>(&self, queued: State, new: State) -> Transition {
        debug_assert!(queued.place().is_some() && new.place() == queued.place());
        if planted(Fault::BlindClass) {
            self.state.store(new.0, Release);
            return Transition::Done;
        }
        self.exchange::<M>(queued, new)
    }

    // Content.

    /// Claims the content of a held block, and takes it and the class from the block. The claim is a hold: nobody
    /// else may register or forget the block until it is given up.
    pub(crate) fn transition_to_claimed<M: Mode>(&self, held: State) -> Transition {
        if !held.is_held() || held.is_claimed() {
            return Transition::Raced;
        }
        self.exchange::<M>(held, State((held.holders() + 1) | REGISTERING))
    }

    /// Gives the claim up, and the hold that came with it unless that is the last one by now.
    pub(crate) fn transition_to_unclaimed<M: Mode>(&self, hashed: bool) -> GiveUp {
        self.update::<M, _>(|state| {
            debug_assert!(state.is_held() && state.is_claimed());
            match state.holders() {
                1 => {
                    let last = State::HELD_ONCE.with(HASHED, hashed);
                    (GiveUp::LastHolder(last), Some(last))
                }
                holders => {
                    let held = State(holders - 1).with(HASHED, hashed);
                    (GiveUp::StillHeld, Some(held))
                }
            }
        })
    }

    /// Writes the content of a claimed block. From the last store on, lookups find it.
    pub(crate) fn write_content(&self, content: &Content, epoch: Epoch, seq: u64) {
        // Release, all of them: a reader that acquires one sees the `seq` of 0 that stands before it,
        // and a reader that acquires the new `seq` sees all of them.
        for (word, value) in self.hash.iter().zip(content.hash) {
            word.store(value, Release);
        }
        self.group.store(content.group, Release);
        self.epoch.store(epoch.get() as u32, Release);
        self.epoch_high.store((epoch.get() >> 32) as u16, Release);
        // Relaxed: one thread alone reads it.
        self.copied.store(false, Relaxed);
        self.marks.store(0, Relaxed);
        self.seq.store(seq, Release);
    }

    /// Says that another block with the content is registered.
    pub(crate) fn note_copy(&self) {
        // Relaxed: one thread alone reads it.
        self.copied.store(true, Relaxed);
    }

    /// Whether another block with the content was ever registered.
    pub(crate) fn is_copied(&self) -> bool {
        // Relaxed: as in `note_copy`.
        self.copied.load(Relaxed)
    }

    /// What was noted of the content.
    pub(crate) fn marks(&self) -> Marks {
        // Relaxed, also below: marks order nothing, see `Marks`.
        Marks(self.marks.load(Relaxed))
    }

    /// Notes more of the content.
    pub(crate) fn mark(&self, marks: Marks) {
        self.marks.fetch_or(marks.0, Relaxed);
    }

    /// Ends the content for lookups. The words stay, for the removal of the index entry.
    #[inline]
    pub(crate) fn erase_content(&self) {
        // Release: so that a reader that acquires a word of the content to come sees this.
        self.seq.store(0, Release);
    }

    /// Gives the registration, whose number is `open`, its final one, unless another thread has.
    pub(crate) fn number_registration<M: Mode>(&self, open: u64, number: u64) {
        // A lost exchange means that the number is final, or the content gone.
        let _ = M::exchange(&self.seq, open, number);
    }

    /// The number of the registration whose content the block has; 0 for none.
    #[inline]
    pub(crate) fn seq(&self) -> u64 {
        self.seq.load(Acquire)
    }

    /// The content's epoch; whole as [`Self::content`] is. Halves of two epochs are never the epoch of now: they
    /// would have to be 2^32 epochs apart.
    #[inline]
    pub(crate) fn epoch(&self) -> Epoch {
        let (low, high) = (self.epoch.load(Acquire), self.epoch_high.load(Acquire));
        Epoch::new(u64::from(high) << 32 | u64::from(low))
    }

    /// The content's name. Whole only for who holds the block, or finds `seq` the same around it.
    #[inline]
    pub(crate) fn content(&self) -> Content {
        Content {
            hash: std::array::from_fn(|word| self.hash[word].load(Acquire)),
            group: self.group.load(Acquire),
        }
    }

    /// What the block is found by; whole as [`Self::content`] is.
    pub(crate) fn key(&self) -> BlockKey {
        self.content().key()
    }

    /// Whether the block's words are those of `content`, compared in registers: an iterator over both
    /// would be kept in memory, and gathering the words there first stalls.
    #[inline]
    fn equals(&self, content: &Content) -> bool {
        let differing = |word: usize| self.hash[word].load(Acquire) ^ content.hash[word];
        let group = u64::from(self.group.load(Acquire) ^ content.group);
        differing(0) | differing(1) | differing(2) | differing(3) | group == 0
    }

    /// The registration that gave the block `content` in `epoch`, if that is what it holds. One whose
    /// number is open is not found yet.
    #[inline]
    pub(crate) fn matches(&self, content: &Content, epoch: Epoch) -> Option<NonZeroU64> {
        let seq = self.seq();
        // One comparison for both: 0 wraps around.
        if seq.wrapping_sub(1) >= OPEN - 1 {
            return None;
        }
        self.stays_same(seq, content, epoch)
    }

    /// The open number of a registration that gives the block `content` in `epoch`.
    pub(crate) fn matches_open(&self, content: &Content, epoch: Epoch) -> Option<u64> {
        let seq = self.seq();
        let same = seq & OPEN != 0 && self.stays_same(seq, content, epoch).is_some();
        same.then_some(seq)
    }

    /// `seq`, if the block holds `content` of `epoch` from before it was read until after.
    #[inline]
    fn stays_same(&self, seq: u64, content: &Content, epoch: Epoch) -> Option<NonZeroU64> {
        let same = self.epoch() == epoch && self.equals(content);
        // Relaxed: the loads of the content acquire, so this one cannot pass before them.
        let same = same && self.seq.load(Relaxed) == seq;
        same.then(|| NonZeroU64::new(seq)).flatten()
    }
}
