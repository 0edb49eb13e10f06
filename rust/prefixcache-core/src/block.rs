//! The record of one block, and every change of its state.
//!
//! One word says who has the block; each change of it is one exchange, named `transition_to_*`:
//!
//! ```text
//!   bits 0..20   holders
//!   bit  20      HASHED   the record names the block's content, and a lookup may take a hold
//!   bit  21      PINNED   when free, the block stands in the pinned tier
//!   bit  22      QUEUED   free, with a place in the ring of its tier
//!   bit  23      ASIDE    held: one thread is writing or removing the index entry
//!                         free: retired, not in the pool
//!   bits 24..64  ticket of the place, while QUEUED
//!
//!              allocated                registering         hashed
//!   IDLE ────────────────► held ──► held|ASIDE(+1 hold) ──► held|HASHED ◄──┐ touched
//!    ▲                      │ ▲                                  │         │
//!    │ idle (front of line) │ │ evicted (HASHED goes)            │ queued  │
//!    └──────────────────────┘ └──────────── QUEUED[|HASHED] ◄────┴─────────┘
//! ```
//!
//! Why this is enough:
//!
//! * *One owner at a time.* A block leaves the line by `touched`, `evicted` or `demoted` (QUEUED goes
//!   and a hold comes in the same exchange) or, from IDLE, by whoever unlinked it from the free
//!   stack. An exchange that read QUEUED with a ticket succeeds only while the block still stands at
//!   that place, as a ticket is given out once in 2^40.
//! * *A recycled block is never hit.* A touch needs HASHED; an eviction takes HASHED away in the
//!   exchange that takes the block, before anybody can give it new content.
//! * *The record is stable while held with HASHED.* `hash`, `group` and `epoch` are written only
//!   between a registration's first and second exchange, when HASHED is off and ASIDE keeps every
//!   other registration out. So who holds a block may compare its content at leisure.
//! * *Readers that hold nothing* read `seq`, then the content, then `seq` again. `seq` is 0 while the
//!   content changes and unique to each registration; the content's stores release and its loads
//!   acquire, so a reader that saw new content sees `seq` changed.

mod place;

use std::num::NonZeroU64;

use crate::id::Epoch;
use crate::store::BlockKey;
use crate::sync::{AtomicU16, AtomicU32, AtomicU64, Fault, Mode, Ordering, planted};
use crate::zeroed::Zeroable;

pub(crate) use place::{Place, Ticket, Tier};

use Ordering::{Acquire, Relaxed, Release};

/// The packed state of a block.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct State(u64);

impl State {
    const HOLDERS: u64 = (1 << 20) - 1;
    const HASHED: u64 = 1 << 20;
    const PINNED: u64 = 1 << 21;
    const QUEUED: u64 = 1 << 22;
    const ASIDE: u64 = 1 << 23;
    const TICKET_SHIFT: u32 = 24;

    /// Neither held nor queued nor retired: on the free stack, or on its way there or from there.
    pub(crate) const IDLE: Self = Self(0);
    /// Held by one, without content.
    pub(crate) const HELD_ONCE: Self = Self(1);
    const RETIRED: Self = Self(Self::ASIDE);

    #[inline]
    fn queued(place: Place, hashed: bool) -> Self {
        let pinned = if place.tier == Tier::Pinned {
            Self::PINNED
        } else {
            0
        };
        let hashed = if hashed { Self::HASHED } else { 0 };
        Self(Self::QUEUED | pinned | hashed | place.ticket.get() << Self::TICKET_SHIFT)
    }

    #[inline]
    pub(crate) fn holders(self) -> u64 {
        self.0 & Self::HOLDERS
    }

    #[inline]
    pub(crate) fn is_held(self) -> bool {
        self.holders() > 0
    }

    #[inline]
    pub(crate) fn is_hashed(self) -> bool {
        self.0 & Self::HASHED != 0
    }

    #[inline]
    pub(crate) fn is_retired(self) -> bool {
        self == Self::RETIRED
    }

    /// The tier that the block is in, or would join at its release.
    #[inline]
    pub(crate) fn tier(self) -> Tier {
        if self.0 & Self::PINNED != 0 {
            Tier::Pinned
        } else {
            Tier::Regular
        }
    }

    /// Where the block stands, when it is queued.
    #[inline]
    pub(crate) fn place(self) -> Option<Place> {
        let queued = self.0 & Self::QUEUED != 0;
        queued.then(|| Place {
            tier: self.tier(),
            ticket: Ticket::new(self.0 >> Self::TICKET_SHIFT),
        })
    }

    #[inline]
    fn is_at(self, place: Place) -> bool {
        self == Self::queued(place, self.is_hashed())
    }

    /// Whether one thread is registering or forgetting the content of the block, which it holds.
    #[inline]
    pub(crate) fn is_claimed(self) -> bool {
        self.is_held() && self.is_aside()
    }

    #[inline]
    pub(crate) fn is_full(self) -> bool {
        self.holders() == Self::HOLDERS
    }

    #[inline]
    fn is_aside(self) -> bool {
        self.0 & Self::ASIDE != 0
    }
}

/// What a touch came to.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Touch {
    /// One more hold on a block that others hold.
    Shared,
    /// The first hold: the block left this place, which the caller must bury.
    Unqueued(Place),
    /// The block is free, and the caller has no credit to take it with.
    NeedsCredit,
    /// The block holds no content, or as many holders as it can count.
    Missed,
}

/// What giving up one hold came to.
#[must_use]
pub(crate) enum Unhold {
    /// Others hold the block still.
    StillHeld,
    /// The caller has the last hold, and has it still; this is the state that said so.
    Last(State),
    /// Nobody held the block.
    NotHeld,
}

/// Whether an exchange took place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Step {
    /// It did.
    Done,
    /// The state was another by then.
    Lost,
}

/// What claiming the index entry of a held block came to.
#[must_use]
pub(crate) enum Claim {
    /// Nobody else may register or forget the block until the claim is given up. The claim is a hold.
    Claimed {
        /// Whether the block held content, which the caller must now forget.
        was_hashed: bool,
    },
    /// The state was another by then.
    Lost,
}

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
    epoch: AtomicU32,
    group: AtomicU16,
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

    #[inline]
    fn exchange<M: Mode>(&self, current: State, new: State) -> Step {
        match M::exchange(&self.state, current.0, new.0) {
            Ok(()) => Step::Done,
            Err(_) => Step::Lost,
        }
    }

    // Taking a hold.

    /// Takes a hold on a block with content.
    #[inline]
    pub(crate) fn transition_to_touched<M: Mode>(&self, has_credit: bool) -> Touch {
        loop {
            let state = self.state();
            let place = state.place();
            if !state.is_hashed() || state.is_full() {
                return Touch::Missed;
            }
            if place.is_some() && !has_credit {
                return Touch::NeedsCredit;
            }
            let kept = State(state.0 & (State::PINNED | State::HASHED));
            let touched = place.map_or(State(state.0 + 1), |_| State(kept.0 + 1));
            if self.exchange::<M>(state, touched) == Step::Done {
                return place.map_or(Touch::Shared, Touch::Unqueued);
            }
        }
    }

    /// Takes the block from its place for new content; what it held can be hit no more.
    #[inline]
    pub(crate) fn transition_to_evicted<M: Mode>(&self, place: Place) -> Step {
        let state = self.state();
        if !state.is_at(place) {
            return Step::Lost;
        }
        let hashed = if planted(Fault::EvictHashed) {
            State::HASHED
        } else {
            0
        };
        self.exchange::<M>(state, State(1 | hashed))
    }

    /// Takes the block from its place with its content and without its pin.
    pub(crate) fn transition_to_demoted<M: Mode>(&self, place: Place) -> Step {
        let state = self.state();
        if !state.is_at(place) {
            return Step::Lost;
        }
        let held = State(1 | state.0 & State::HASHED);
        if planted(Fault::BlindDemotion) {
            self.state.store(held.0, Release);
            return Step::Done;
        }
        self.exchange::<M>(state, held)
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
    pub(crate) fn transition_to_one_less_held<M: Mode>(&self) -> Unhold {
        loop {
            let state = self.state();
            match state.holders() {
                0 => return Unhold::NotHeld,
                // The only hold is that of a claim, so the caller has none.
                1 if state.is_aside() => return Unhold::NotHeld,
                1 => return Unhold::Last(state),
                _ if planted(Fault::ForgetLastHolder) => {
                    self.state.fetch_sub(1, Ordering::AcqRel);
                    return Unhold::StillHeld;
                }
                _ => {}
            }
            if self.exchange::<M>(state, State(state.0 - 1)) == Step::Done {
                return Unhold::StillHeld;
            }
        }
    }

    /// The last holder lets the block stand in line, from `last` on its state.
    #[inline]
    pub(crate) fn transition_to_queued<M: Mode>(&self, last: State, place: Place) -> Step {
        self.exchange::<M>(last, State::queued(place, last.is_hashed()))
    }

    /// The last holder takes content and pin from the block and holds it on.
    pub(crate) fn transition_to_blank<M: Mode>(&self, last: State) -> Step {
        self.exchange::<M>(last, State::HELD_ONCE)
    }

    /// The last holder of a blank block gives it up, to link it into the free stack.
    #[inline]
    pub(crate) fn transition_to_idle<M: Mode>(&self) -> Step {
        self.exchange::<M>(State::HELD_ONCE, State::IDLE)
    }

    /// Takes a blank block that the caller holds, or an idle one that it has unlinked, out of the pool.
    pub(crate) fn transition_to_retired<M: Mode>(&self, blank: State) -> Step {
        debug_assert!(blank == State::HELD_ONCE || blank == State::IDLE);
        self.exchange::<M>(blank, State::RETIRED)
    }

    /// Brings a retired block back, for the caller alone.
    pub(crate) fn transition_to_revived<M: Mode>(&self) -> Step {
        self.exchange::<M>(State::RETIRED, State::IDLE)
    }

    // Changing where a block stands or will stand.

    /// Moves a queued block to another place of its tier.
    pub(crate) fn transition_to_moved<M: Mode>(&self, from: Place, to: Place) -> Step {
        let state = self.state();
        if !state.is_at(from) {
            return Step::Lost;
        }
        self.exchange::<M>(state, State::queued(to, state.is_hashed()))
    }

    /// Sets or takes the pin of a held block with content; whether that changed anything.
    pub(crate) fn transition_to_pinned<M: Mode>(&self, pinned: bool) -> bool {
        let pin = if pinned { State::PINNED } else { 0 };
        loop {
            let state = self.state();
            let new = State(state.0 & !State::PINNED | pin);
            if !state.is_held() || !state.is_hashed() || new == state {
                return false;
            }
            if self.exchange::<M>(state, new) == Step::Done {
                return true;
            }
        }
    }

    // Content.

    /// Claims the index entry of a held block, and takes content and pin from it.
    pub(crate) fn transition_to_claimed<M: Mode>(&self, held: State) -> Claim {
        if !held.is_held() || held.is_aside() || held.is_full() {
            return Claim::Lost;
        }
        match self.exchange::<M>(held, State((held.holders() + 1) | State::ASIDE)) {
            Step::Done => Claim::Claimed {
                was_hashed: held.is_hashed(),
            },
            Step::Lost => Claim::Lost,
        }
    }

    /// Gives the claim up, and the hold that came with it unless that is the last one by now.
    pub(crate) fn transition_to_unclaimed<M: Mode>(&self, hashed: bool) -> Unhold {
        let hashed = if hashed { State::HASHED } else { 0 };
        loop {
            let state = self.state();
            debug_assert!(state.is_held() && state.is_aside());
            let holders = state.holders();
            let new = State((holders.max(2) - 1) | hashed);
            match self.exchange::<M>(state, new) {
                Step::Done if holders == 1 => return Unhold::Last(new),
                Step::Done => return Unhold::StillHeld,
                Step::Lost => {}
            }
        }
    }

    /// Writes the content of a claimed block. From the last store on, lookups find it.
    pub(crate) fn write_content(&self, content: &Content, epoch: Epoch, seq: u64) {
        // Release, all of them: a reader that acquires one sees the `seq` of 0 that stands before it,
        // and a reader that acquires the new `seq` sees all of them.
        for (word, value) in self.hash.iter().zip(content.hash) {
            word.store(value, Release);
        }
        self.group.store(content.group, Release);
        self.epoch.store(epoch.get(), Release);
        self.seq.store(seq, Release);
    }

    /// Ends the content for lookups. The words stay, for the removal of the index entry.
    #[inline]
    pub(crate) fn erase_content(&self) {
        // Release: so that a reader that acquires a word of the content to come sees this.
        self.seq.store(0, Release);
    }

    /// The number of the registration whose content the block has; 0 for none.
    #[inline]
    pub(crate) fn seq(&self) -> u64 {
        self.seq.load(Acquire)
    }

    /// The content's epoch.
    #[inline]
    pub(crate) fn epoch(&self) -> Epoch {
        Epoch::new(self.epoch.load(Acquire))
    }

    /// The content's name. Whole only for who holds the block, or finds `seq` the same around it.
    #[inline]
    pub(crate) fn content(&self) -> Content {
        Content {
            hash: std::array::from_fn(|word| self.hash[word].load(Acquire)),
            group: self.group.load(Acquire),
        }
    }

    /// Whether the block's words are those of `content`, compared in registers: an iterator over both
    /// would be kept in memory, and gathering the words there first stalls.
    #[inline]
    fn equals(&self, content: &Content) -> bool {
        let differing = |word: usize| self.hash[word].load(Acquire) ^ content.hash[word];
        let group = u64::from(self.group.load(Acquire) ^ content.group);
        differing(0) | differing(1) | differing(2) | differing(3) | group == 0
    }

    /// The registration that gave the block `content` in `epoch`, if that is what it holds.
    #[inline]
    pub(crate) fn matches(&self, content: &Content, epoch: Epoch) -> Option<NonZeroU64> {
        let seq = NonZeroU64::new(self.seq())?;
        let same = self.epoch() == epoch && self.equals(content);
        // Relaxed: the loads of the content acquire, so this one cannot pass before them.
        (same && self.seq.load(Relaxed) == seq.get()).then_some(seq)
    }
}

/// A [`BlockKey`] in words, as blocks and index compare it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Content {
    pub(crate) hash: [u64; 4],
    pub(crate) group: u16,
}

impl From<&BlockKey> for Content {
    #[inline]
    fn from(key: &BlockKey) -> Self {
        let (words, _) = key.hash.as_bytes().as_chunks::<8>();
        Self {
            hash: std::array::from_fn(|word| u64::from_le_bytes(words[word])),
            group: key.group.get(),
        }
    }
}
