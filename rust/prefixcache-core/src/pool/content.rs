//! What blocks hold: lookups, registrations, and how content is forgotten.

use std::num::NonZeroU64;

use super::index::{Index, Only, Spot};
use super::{BlockPool, add_to};
use crate::band::Band;
use crate::block::Transition::Done;
use crate::block::{Block, Class, Content, GiveUp, OPEN, State, Transition};
use crate::error::Misuse;
use crate::id::{BlockId, Epoch};
use crate::store::{BlockKey, MAX_COPIES, Registration};
use crate::sync::{AtomicU64, Fault, Mode, Ordering, OwnLine, planted, prefetch};

use Ordering::{Acquire, Relaxed, Release};

/// Keys that are looked up together.
const BATCH: usize = 16;

/// Blocks that are forgotten together.
const FORGET_BATCH: usize = 32;

/// The epoch, and counts over all content.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// On a line of its own: every lookup reads it and almost nobody writes it.
    epoch: OwnLine<AtomicU64>,
    /// One more than the epoch in which content was last lost, or may be lost yet, out of order; 0: none.
    disordered: AtomicU64,
    census: OwnLine<Census>,
}

#[derive(Debug, Default)]
struct Census {
    /// `low bits of the epoch:32 | blocks with content of that epoch:32`.
    cached: AtomicU64,
    /// Registrations so far.
    registrations: AtomicU64,
}

impl Contents {
    #[inline]
    pub(super) fn epoch(&self) -> Epoch {
        // Acquire: who sees a cleared index sees all that came before the clearing.
        Epoch::new(self.epoch.0.load(Acquire))
    }

    /// Ends the epoch, and with it all content.
    pub(super) fn clear<M: Mode>(&self) {
        M::add(&self.epoch.0, 1);
        self.count::<M>(self.epoch(), 0);
    }

    /// Says that content of this epoch may be lost out of order.
    pub(super) fn disorder(&self) {
        if !planted(Fault::KeepOrder) {
            // Release: whoever reads it sees the change that it stands for.
            self.disordered.store(self.epoch().get() + 1, Release);
        }
    }

    /// Whether all content of this epoch is lost in order.
    pub(super) fn is_in_order(&self) -> bool {
        // Acquire: pairs with the store.
        self.disordered.load(Acquire) != self.epoch().get() + 1
    }

    /// The number of the next registration; they start at 1.
    pub(super) fn next_seq<M: Mode>(&self) -> u64 {
        M::fetch_add(&self.census.0.registrations, 1) + 1
    }

    /// Adds to the number of blocks with content of `epoch`, if it is not over.
    fn count<M: Mode>(&self, epoch: Epoch, change: i32) {
        loop {
            let census = self.census.0.cached.load(Acquire);
            let (then, cached) = ((census >> 32) as u32, census as u32);
            // Epochs wrap around: an earlier one is less than half the circle behind.
            let behind = (epoch.get() as u32).wrapping_sub(then);
            let cached = match behind {
                0 => cached,
                _ if behind < 1 << 31 => 0,
                _ => return,
            };
            let new = epoch.get() << 32 | u64::from(cached.wrapping_add_signed(change));
            if M::exchange(&self.census.0.cached, census, new).is_ok() {
                return;
            }
        }
    }

    /// How many blocks hold content of the epoch.
    pub(super) fn cached(&self) -> usize {
        self.census.0.cached.load(Acquire) as u32 as usize
    }
}

/// A block that was found, and the registration that it was found by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) id: BlockId,
    pub(super) seq: NonZeroU64,
}

/// Places of keys to look up, on their way into the processor's caches.
#[derive(Default)]
struct Ahead {
    spots: [Spot; BATCH],
    only: [Only; BATCH],
    count: usize,
}

impl Ahead {
    /// Takes the next keys and fetches their buckets.
    #[inline]
    fn fill(&mut self, index: &Index, epoch: Epoch, keys: &mut impl Iterator<Item = BlockKey>) {
        let mut count = 0;
        for (spot, key) in self.spots.iter_mut().zip(keys) {
            *spot = index.spot(&Content::from(&key), epoch);
            index.prefetch(*spot);
            count += 1;
        }
        self.count = count;
    }

    /// Looks into the buckets and fetches the records of the blocks there.
    #[inline]
    fn look(&mut self, index: &Index, blocks: &[Block]) {
        for (only, spot) in self.only.iter_mut().zip(&self.spots[..self.count]) {
            *only = index.only_candidate(*spot);
            if let Only::This(id) = *only
                && let Some(block) = blocks.get(id.index())
            {
                prefetch(block);
            }
        }
    }

    fn looked_at(&self) -> impl Iterator<Item = (Only, Spot)> {
        let spots = self.spots[..self.count].iter();
        self.only.iter().copied().zip(spots.copied())
    }
}

/// What decides whether content hits: read once for a call.
#[derive(Clone, Copy)]
struct Now<'a> {
    epoch: Epoch,
    /// Those that are not retired.
    blocks: &'a [Block],
}

impl<M: Mode> BlockPool<M> {
    // Looking.

    fn now(&self) -> Now<'_> {
        Now { epoch: self.contents.epoch(), blocks: &self.blocks[..self.size.num_blocks()] }
    }

    /// The first registered block that holds `key`.
    #[inline]
    pub(super) fn find(&self, key: &BlockKey) -> Option<BlockId> {
        let now = self.now();
        let spot = self.index.spot(&Content::from(key), now.epoch);
        let found = match self.index.only_candidate(spot) {
            Only::Nothing => None,
            Only::This(id) => Self::matching(now, id, &Content::from(key))
                .or_else(|| self.find_among_several(now, spot, *key)),
            Only::Unclear => self.find_among_several(now, spot, *key),
        };
        found.map(|found| found.id)
    }

    /// The block, if it holds the content.
    #[inline]
    fn matching(now: Now<'_>, id: BlockId, content: &Content) -> Option<Found> {
        let seq = now.blocks.get(id.index())?.matches(content, now.epoch)?;
        Some(Found { id, seq })
    }

    /// [`Self::find_at`] out of the way of the loop that calls it, which has the key in registers. For a lookup
    /// too whose one candidate was another's: the content may have been moved from it.
    #[cold]
    #[inline(never)]
    fn find_among_several(&self, now: Now<'_>, spot: Spot, key: BlockKey) -> Option<Found> {
        self.find_at(now, spot, &Content::from(&key), None)
    }

    /// The first registered block that holds the content of `spot`, not counting `but`.
    fn find_at(
        &self,
        now: Now<'_>,
        spot: Spot,
        content: &Content,
        but: Option<BlockId>,
    ) -> Option<Found> {
        let mut best: Option<Found> = None;
        self.index.for_each_candidate(spot, |id| {
            if Some(id) != but
                && let Some(found) = Self::matching(now, id, content)
                && best.is_none_or(|best| found.seq < best.seq)
            {
                best = Some(found);
            }
        });
        best
    }

    /// Calls `visit` with the blocks of the leading `keys` that hit, while it returns true.
    ///
    /// A lookup reads a bucket and then a record, both from anywhere in memory. So the buckets of the
    /// next batch are fetched while this batch's records are, and those before any is looked at.
    #[inline]
    pub(super) fn find_leading(
        &self,
        mut keys: impl Iterator<Item = BlockKey> + Clone,
        mut visit: impl FnMut(Found) -> bool,
    ) {
        let now = self.now();
        let mut ahead = keys.clone();
        let (mut one, mut other) = (Ahead::default(), Ahead::default());
        let (mut here, mut next) = (&mut one, &mut other);
        here.fill(&self.index, now.epoch, &mut ahead);
        while here.count > 0 {
            next.fill(&self.index, now.epoch, &mut ahead);
            here.look(&self.index, now.blocks);
            for ((only, spot), key) in here.looked_at().zip(&mut keys) {
                // As in `find`; a function for both costs a twentieth of a long commit.
                let found = match only {
                    Only::Nothing => None,
                    Only::This(id) => match Self::matching(now, id, &Content::from(&key)) {
                        // No closure: it would keep the key in memory.
                        None => self.find_among_several(now, spot, key),
                        found => found,
                    },
                    Only::Unclear => self.find_among_several(now, spot, key),
                };
                if !found.is_some_and(&mut visit) {
                    return;
                }
            }
            std::mem::swap(&mut here, &mut next);
        }
    }

    /// Whether a block that the caller holds has the content of `key`, in this epoch and in the pool.
    #[inline]
    pub(super) fn holds(&self, id: BlockId, key: &BlockKey) -> bool {
        let content = Content::from(key);
        let found = self.block(id).matches(&content, self.contents.epoch());
        found.is_some() && !self.is_retired(id)
    }

    /// Whether the content that the block's record names is of this epoch.
    #[inline]
    pub(super) fn is_current(&self, block: &Block) -> bool {
        block.epoch() == self.contents.epoch()
    }

    /// Whether a lookup of the right key would find the block, or one registered before it.
    pub(super) fn is_cached(&self, id: BlockId) -> bool {
        let block = self.block(id);
        block.state().is_hashed() && self.is_current(block) && !self.is_retired(id)
    }

    // Registering.

    /// Lets a block that the caller holds be found under `key`.
    pub(super) fn register(
        &self,
        id: BlockId,
        key: BlockKey,
        epoch: Epoch,
    ) -> Result<Registration, Misuse> {
        self.check_held(id)?;
        loop {
            let over = epoch != self.contents.epoch() && !planted(Fault::EpochOfNow);
            if over || self.is_retired(id) {
                return Ok(Registration::Stale);
            }
            let state = self.block(id).state();
            if let Some(outcome) = self.settled(id, state, &key, epoch) {
                return outcome;
            }
            if self.claim(id, state) == Done {
                if state.is_hashed() {
                    self.forget_all(&[id]);
                }
                return Ok(self.write(id, &key, epoch));
            }
        }
    }

    /// Claims the content of a held block, which takes content and pin from it. The caller forgets what `state`
    /// says it had.
    pub(super) fn claim(&self, id: BlockId, state: State) -> Transition {
        let claim = self.block(id).transition_to_claimed::<M>(state);
        if state.is_pinned() && claim == Done {
            add_to::<M>(&self.counters.ended_pins, 1);
        }
        claim
    }

    /// The outcome of a registration that changes nothing.
    fn settled(
        &self,
        id: BlockId,
        state: State,
        key: &BlockKey,
        epoch: Epoch,
    ) -> Option<Result<Registration, Misuse>> {
        let block = self.block(id);
        if !state.is_held() {
            return Some(Err(Misuse::NotInUse(id)));
        }
        if state.is_claimed() {
            // Another thread is about to answer for this block.
            return Some(Ok(Registration::Already));
        }
        let current = state.is_hashed() && block.epoch() == epoch;
        current.then(|| match block.content() == Content::from(key) {
            true => Ok(Registration::Already),
            false => Err(Misuse::OtherHash(id)),
        })
    }

    /// Writes the content of a claimed block, enters it, and ends the claim.
    fn write(&self, id: BlockId, key: &BlockKey, epoch: Epoch) -> Registration {
        let block = self.block(id);
        let epoch = if planted(Fault::EpochOfNow) { self.contents.epoch() } else { epoch };
        let content = Content::from(key);
        let spot = self.index.spot(&content, epoch);
        let look = || self.find_at(self.now(), spot, &content, Some(id));
        let early = planted(Fault::LookEarly).then(look);
        let open = M::SHARED && !planted(Fault::NumberEarly);
        let seq = self.contents.next_seq::<M>() | if open { OPEN } else { 0 };
        self.note_registered(id);
        block.write_content(&content, epoch, seq);
        let entered = self.enter_index(id, spot, &content, epoch);
        if entered && open {
            self.number(block, seq);
            self.number_others(spot, &content, epoch);
        }
        let before = |other: &Found| other.seq.get() < block.seq();
        let duplicate = early.unwrap_or_else(|| look().filter(before));
        if entered {
            self.note_published(id);
        }
        self.end_claim(id, entered);
        match duplicate {
            _ if !entered => Registration::Stale,
            Some(other) => {
                if !M::SHARED {
                    block.note_copy();
                    self.block(other.id).note_copy();
                }
                self.note_duplicates_above_default(key);
                Registration::Duplicate(other.id)
            }
            None => Registration::New,
        }
    }

    /// Makes the index entry of a claimed block whose content is written, or takes that content back;
    /// whether the entry stands.
    fn enter_index(&self, id: BlockId, spot: Spot, content: &Content, epoch: Epoch) -> bool {
        let ended = |id| self.spot_if_ended(id);
        let room =
            self.replace_excess(id, spot, content) || self.index.insert::<M>(spot, id, ended);
        if !room {
            add_to::<M>(&self.counters.drops, 1);
        }
        // A resize that does not see the claim on a block which it retires has its new size seen here.
        M::fence();
        let retired = self.is_retired(id) && !planted(Fault::RegisterRetired);
        // Where the epoch has ended meanwhile, one of the next may have passed the place already.
        let over = epoch != self.contents.epoch() || retired;
        if room && over {
            self.index.remove::<M>(spot, id);
        }
        let entered = room && !over;
        if entered {
            self.contents.count::<M>(epoch, 1);
        } else {
            self.block(id).erase_content();
        }
        entered
    }

    // Duplicates.

    /// Gives a block the index entry of a copy of its content that is one too many; whether there was one.
    ///
    /// The copy is free and the block is held, so the block is given back after it: whatever stands in
    /// line before the copy still stands before a block with its content. In a pool that several
    /// threads change, the copy may be touched meanwhile. It is a valid hit, and can be found no more.
    fn replace_excess(&self, id: BlockId, spot: Spot, content: &Content) -> bool {
        if self.index.only_candidate(spot) != Only::Unclear {
            return false;
        }
        let surplus = self.excess_copy(spot, content);
        let replaced = surplus.is_some_and(|copy| self.index.replace::<M>(spot, copy, id));
        if replaced {
            add_to::<M>(&self.counters.surplus, 1);
        }
        replaced
    }

    /// Of [`MAX_COPIES`] or more blocks with one content, the last registered one, but for the first, that
    /// is free in the default class.
    #[cold]
    fn excess_copy(&self, spot: Spot, content: &Content) -> Option<BlockId> {
        let (mut copies, mut first, mut last_free) = (0, None::<Found>, None::<Found>);
        self.for_each_copy(spot, content, |copy| {
            copies += 1;
            if first.is_none_or(|first| copy.seq < first.seq) {
                first = Some(copy);
            }
            let place = self.block(copy.id).state().place();
            let is_free = place.is_some_and(|place| place.class.is_of_default_band());
            if is_free && last_free.is_none_or(|last| last.seq < copy.seq) {
                last_free = Some(copy);
            }
        });
        let surplus = last_free.filter(|last| first.is_some_and(|first| first.seq < last.seq))?;
        (copies >= MAX_COPIES).then_some(surplus.id)
    }

    fn for_each_copy(&self, spot: Spot, content: &Content, mut look: impl FnMut(Found)) {
        let now = self.now();
        self.index.for_each_candidate(spot, |id| {
            if let Some(found) = Self::matching(now, id, content) {
                look(found);
            }
        });
    }

    /// Content whose copies are of different classes may be lost out of order: those who hold one of the
    /// others may hold, further on, blocks that outlive it by their class.
    fn note_duplicates_above_default(&self, key: &BlockKey) {
        let content = Content::from(key);
        let spot = self.index.spot(&content, self.contents.epoch());
        let (mut copies, mut above) = (0, false);
        self.for_each_copy(spot, &content, |copy| {
            copies += 1;
            above |= self.block(copy.id).state().class().is_above_default();
        });
        if above && copies > 1 {
            self.contents.disorder();
        }
    }

    // Pins.

    pub(super) fn is_pinned(&self, id: BlockId) -> bool {
        self.block(id).state().is_pinned()
    }

    /// Pins the content of held blocks; how much of it was not pinned before.
    pub(super) fn pin(&self, ids: &[BlockId]) -> Result<usize, Misuse> {
        let mut pinned = 0;
        let outcome = ids.iter().try_for_each(|&id| {
            self.check_held(id)?;
            pinned += usize::from(self.pin_content(id));
            Ok(())
        });
        add_to::<M>(&self.counters.pins, pinned as u64);
        outcome.map(|()| pinned)
    }

    /// Pins the copy that hits for the content of a held block: it is the one that later requests hold,
    /// and the others may go. Whether it was not pinned before.
    fn pin_content(&self, id: BlockId) -> bool {
        if !self.is_cached(id) {
            return false;
        }
        let key = self.block(id).key();
        let pinned = self
            .find(&key)
            .filter(|&hit| !self.is_pinned(hit))
            .is_some_and(|hit| self.classify(hit, id, &key, State::pinned));
        self.note_duplicates_above_default(&key);
        pinned
    }

    /// Takes the pins from the content of held blocks; how much of it was pinned.
    ///
    /// Blocks that follow them, in other requests, may stay pinned and outlive them.
    pub(super) fn unpin(&self, ids: &[BlockId]) -> Result<usize, Misuse> {
        let mut unpinned = 0;
        let outcome = ids.iter().try_for_each(|&id| {
            self.check_held(id)?;
            unpinned += usize::from(self.unpin_content(id));
            Ok(())
        });
        if unpinned > 0 {
            self.contents.disorder();
        }
        outcome.map(|()| unpinned)
    }

    /// Takes the pins from a held block and all copies of its content; whether there were any.
    fn unpin_content(&self, id: BlockId) -> bool {
        let key = self.block(id).key();
        let mut copies = vec![id];
        if self.is_cached(id) {
            let content = Content::from(&key);
            let spot = self.index.spot(&content, self.contents.epoch());
            self.for_each_copy(spot, &content, |copy| copies.push(copy.id));
        }
        let unpin = |&copy: &BlockId| {
            self.is_pinned(copy) && self.classify(copy, id, &key, State::unpinned)
        };
        // All of them, so no `any`.
        let unpinned = copies.iter().filter(|copy| unpin(copy)).count();
        add_to::<M>(&self.counters.ended_pins, unpinned as u64);
        unpinned > 0
    }

    // Bands.

    /// Gives the copy that hits for `key` this band, and a free one the last place of it; whether there
    /// is one. The caller may hold `held`.
    pub(super) fn set_band(&self, key: &BlockKey, held: BlockId, band: Band) -> bool {
        // Relaxed: the thread that gives bands evicts too.
        self.gives_bands.store(true, Relaxed);
        // A caller may hold a block of other content.
        let is_alone = self.is_only_copy(held) && self.holds(held, key);
        let Some(hit) = is_alone.then_some(held).or_else(|| self.find(key)) else {
            return false;
        };
        let change = |state: State| match state.own_class().band() == band {
            // Of the default one's queues the block keeps its own.
            true => state,
            false => state.with_own_class(Class::of_band(band)),
        };
        self.classify(hit, held, key, change);
        if band < Band::DEFAULT {
            // What follows the content in other requests may be of a higher band.
            self.contents.disorder();
        } else if !held.is_null() && !is_alone {
            self.note_duplicates_above_default(key);
        }
        true
    }

    /// Says that content of this epoch may be evicted out of order.
    pub(super) fn end_order(&self) {
        self.contents.disorder();
    }

    /// Whether a block that the caller holds is the one that hits for its content, and no other was ever registered
    /// with that. Always false where several threads register.
    #[inline]
    pub(super) fn is_only_copy(&self, id: BlockId) -> bool {
        if M::SHARED || id.is_null() {
            return false;
        }
        let block = self.block(id);
        block.seq() != 0 && !block.is_copied() && self.is_current(block) && !self.is_retired(id)
    }

    /// Gives a block, which the caller holds if it is `held`, the class and the pin that `change` makes of
    /// its own, as long as it has the content of `key`; whether they are others. A block in line keeps its place
    /// where it stays in its line.
    fn classify(
        &self,
        id: BlockId,
        held: BlockId,
        key: &BlockKey,
        change: impl Fn(State) -> State,
    ) -> bool {
        if id == held {
            let changed = self.block(id).transition_to_classed::<M>(change);
            self.note_classed(id);
            return changed;
        }
        // So that no resize moves the block meanwhile.
        let inside = self.credits.enter::<M>();
        let mut state = self.block(id).state();
        while state.place().is_some() && change(state).place() == state.place() {
            // Read after the state: as long as that is the same, the block is in line with this content.
            if !self.holds(id, key) && !planted(Fault::SkipContentCheck) {
                return false;
            }
            let new = change(state);
            if new == state || self.block(id).transition_in_place::<M>(state, new) == Done {
                self.note_classed(id);
                return new != state;
            }
            state = self.block(id).state();
        }
        drop(inside);
        // A hold takes a free block out of its line, and its release puts it into that of its new class.
        let Some(hold) = self.hold_copy(id, key) else {
            return false;
        };
        let changed = self.block(hold).transition_to_classed::<M>(change);
        self.give_back_all(&[hold]);
        changed
    }

    /// Where the content that a block's record names belongs, if that content's epoch has ended.
    fn spot_if_ended(&self, id: BlockId) -> Option<Spot> {
        let block = self.block(id);
        let epoch = block.epoch();
        // The epoch of now is read after the block's, which therefore cannot be a later one.
        (epoch != self.contents.epoch()).then(|| self.index.spot(&block.content(), epoch))
    }

    pub(super) fn end_claim(&self, id: BlockId, hashed: bool) {
        match self.block(id).transition_to_unclaimed::<M>(hashed) {
            GiveUp::StillHeld | GiveUp::NotHeld => {}
            // Whoever asked for this has released the block meanwhile.
            GiveUp::LastHolder(_) => self.give_back_all(&[id]),
        }
    }

    // Forgetting.

    /// Removes blocks, each of which is the caller's alone, from the index; how many held content of
    /// this epoch.
    pub(super) fn forget_all(&self, ids: &[BlockId]) -> u64 {
        self.forget_each(ids, |_, _| {})
    }

    /// [`Self::forget_all`], which calls `lost` for each block that held content of this epoch, with its place
    /// in `ids` and its spot in the index, if it was there.
    #[inline]
    pub(super) fn forget_each(
        &self,
        ids: &[BlockId],
        mut lost: impl FnMut(usize, Option<Spot>),
    ) -> u64 {
        let batches = ids.chunks(FORGET_BATCH).enumerate();
        batches
            .map(|(number, batch)| {
                let first = number * FORGET_BATCH;
                self.forget_batch(batch, |at, spot| lost(first + at, spot))
            })
            .sum()
    }

    #[inline]
    fn forget_batch(&self, batch: &[BlockId], mut lost: impl FnMut(usize, Option<Spot>)) -> u64 {
        self.note_withdrawn(batch);
        let mut spots = [Spot::default(); FORGET_BATCH];
        for (spot, block) in spots.iter_mut().zip(batch.iter().map(|&id| self.block(id))) {
            if block.seq() != 0 {
                *spot = self.index.spot(&block.content(), block.epoch());
                self.index.prefetch(*spot);
            }
        }
        let now = self.contents.epoch();
        let mut current = 0;
        for (at, (&id, &spot)) in batch.iter().zip(&spots).enumerate() {
            match self.forget(id, spot) {
                Some((epoch, removed)) if epoch == now => {
                    current += 1;
                    lost(at, removed.then_some(spot));
                }
                // Of another epoch: over, unless it began just now.
                Some((epoch, _)) => self.contents.count::<M>(epoch, -1),
                None => {}
            }
        }
        self.contents.count::<M>(now, -current);
        current as u64
    }

    /// Removes one block from the index; the epoch of the content that it held, and whether it was there.
    #[inline]
    fn forget(&self, id: BlockId, spot: Spot) -> Option<(Epoch, bool)> {
        let block = self.block(id);
        if block.seq() == 0 {
            return None;
        }
        block.erase_content();
        // The entry is gone already where a registration took its place.
        let removed = self.index.remove::<M>(spot, id);
        Some((block.epoch(), removed))
    }

    /// Whether some block has the content in this epoch, be it about to leave the pool.
    pub(super) fn has_copy(&self, spot: Spot, content: &Content) -> bool {
        let now = Now { epoch: self.contents.epoch(), blocks: &self.blocks };
        self.find_at(now, spot, content, None).is_some()
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::super::SingleWriter;
    use super::*;
    use crate::id::{BlockHash, GroupId};
    use crate::store::{Lookup, PoolConfig};

    /// After 2^32 clears content would be found again if the record kept 32 bits of its epoch alone.
    #[test]
    fn content_is_not_found_after_as_many_clears_as_32_bits_count() {
        let pool = BlockPool::<SingleWriter>::new(PoolConfig::new(8)).unwrap();
        let key = BlockKey::new(BlockHash::from_bytes([7; 32]), GroupId::new(0));
        let mut blocks = Vec::new();
        pool.allocate(1, &mut blocks).unwrap();
        let _registration = pool.register(blocks[0], key, pool.epoch()).unwrap();
        pool.contents.epoch.0.store((1 << 32) - 1, Ordering::Release);
        pool.clear_index();
        assert_eq!(pool.epoch().get(), 1 << 32);
        assert_eq!(pool.lookup(&key), None);
        assert_ne!(Epoch::new(0), Epoch::new(1 << 32));
        assert_eq!(Epoch::new((1 << 48) - 1).next(), Epoch::new(0));
    }
}
