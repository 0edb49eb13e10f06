//! Registering content, and forgetting it.

use super::MultiPool;
use super::block::Transition::Done;
use super::block::{Block, GiveUp, State, Transition};
use super::words::{add, fence};
use crate::class::Class;
use crate::error::Misuse;
use crate::evictions::Cause;
use crate::id::{BlockId, BlockKey, Epoch};
use crate::pool::entries::Among;
use crate::records::index::{Only, Spot};
use crate::records::{Content, Found, OPEN};
use crate::store::{MAX_COPIES, Marks, Registration};
use crate::sync::{AtomicU64, Fault, Ordering, OwnLine, planted};

use Ordering::{AcqRel, Acquire};

/// Blocks that are forgotten together.
const BATCH: usize = 32;

/// Counts over all content.
#[derive(Debug, Default)]
pub(super) struct Census(OwnLine<Counts>);

#[derive(Debug, Default)]
struct Counts {
    /// `low bits of the epoch:32 | blocks with content of that epoch:32`.
    cached: AtomicU64,
    /// Registrations so far.
    registrations: AtomicU64,
}

impl Census {
    /// The number of the next registration; they start at 1.
    fn next_seq(&self) -> u64 {
        add(&self.0.0.registrations, 1) + 1
    }

    /// Adds to the number of blocks with content of `epoch`, if it is not over.
    pub(super) fn count(&self, epoch: Epoch, change: i32) {
        let _ = self.0.0.cached.fetch_update(AcqRel, Acquire, |census| {
            // Epochs wrap around: an earlier one is less than half the circle behind.
            let cached = match (epoch.get() as u32).wrapping_sub((census >> 32) as u32) {
                0 => census as u32,
                behind if behind < 1 << 31 => 0,
                _ => return None,
            };
            Some(epoch.get() << 32 | u64::from(cached.wrapping_add_signed(change)))
        });
    }

    /// How many blocks hold content of the epoch.
    pub(super) fn cached(&self) -> usize {
        self.0.0.cached.load(Acquire) as u32 as usize
    }
}

impl MultiPool {
    pub(super) fn mark(&self, id: BlockId, marks: Marks) {
        self.block(id).mark(marks);
    }

    pub(super) fn prefetch(&self, key: &BlockKey) {
        let spot = self.records.index.spot(&Content::from(key), self.records.epoch());
        self.records.index.prefetch(spot);
    }

    pub(super) fn clear_index(&self) {
        self.records.end_epoch();
        self.census.count(self.records.epoch(), 0);
        if let Some(log) = self.evictions.log() {
            log.note_clear();
        }
        self.classes.mark_stale();
    }

    /// Lets a block that the caller holds be found under `key`.
    pub(super) fn register(
        &self,
        id: BlockId,
        key: BlockKey,
        epoch: Epoch,
    ) -> Result<Registration, Misuse> {
        self.check_held(id)?;
        loop {
            let over = epoch != self.records.epoch() && !planted(Fault::EpochOfNow);
            if over || self.records.is_retired(id) {
                return Ok(Registration::Stale);
            }
            let state = self.block(id).state();
            if let Some(outcome) = self.settled(id, state, &key, epoch) {
                return outcome;
            }
            if self.claim(id, state) == Done {
                if state.is_hashed() {
                    // Of an ended epoch.
                    self.evict_all(&[id], Cause::Discarded, |_| Class::DEFAULT);
                }
                return Ok(self.write(id, &key, epoch));
            }
        }
    }

    /// Claims the content of a held block, which takes content and pin from it. The caller forgets what `state`
    /// says it had.
    pub(super) fn claim(&self, id: BlockId, state: State) -> Transition {
        let claim = self.block(id).transition_to_claimed(state);
        if state.standing().is_pinned() && claim == Done {
            self.counters.ended_pins.add(1);
        }
        claim
    }

    pub(super) fn end_claim(&self, id: BlockId, hashed: bool) {
        // Whoever asked for this may have released the block meanwhile.
        if let GiveUp::LastHolder(_) = self.block(id).transition_to_unclaimed(hashed) {
            self.give_back_all(&[id]);
        }
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
    ///
    /// Of several threads that register the same content exactly one learns that it is the first, and
    /// its block is the one that hits. A number is drawn after the entry stands, by the registering
    /// thread or one that helps it. So whoever draws a later number sees the entry, and numbers it
    /// before it compares. If that comes in time, the helped registration is the later one after all.
    fn write(&self, id: BlockId, key: &BlockKey, epoch: Epoch) -> Registration {
        let block = self.block(id);
        let epoch = if planted(Fault::EpochOfNow) { self.records.epoch() } else { epoch };
        let content = Content::from(key);
        let spot = self.records.index.spot(&content, epoch);
        let look = || self.records.first_copy(spot, &content, Some(id));
        let early = planted(Fault::LookEarly).then(look);
        let open = if planted(Fault::NumberEarly) { 0 } else { OPEN };
        let seq = self.census.next_seq() | open;
        if let Some(log) = self.evictions.log() {
            log.registered(id);
        }
        block.write_content(&content, epoch, seq);
        let entered = self.enter_index(id, spot, &content, epoch);
        if entered && open != 0 {
            self.number(block, seq);
            self.number_others(spot, &content, epoch);
        }
        let before = |other: &Found| other.seq.get() < block.seq();
        let duplicate = early.unwrap_or_else(|| look().filter(before));
        self.end_claim(id, entered);
        match duplicate {
            _ if !entered => Registration::Stale,
            Some(other) => Registration::Duplicate(other.id),
            None => Registration::New,
        }
    }

    /// Gives a registration its final number. The content can be found from here on.
    fn number(&self, block: &Block, open: u64) {
        block.number_registration(open, self.census.next_seq());
    }

    fn number_others(&self, spot: Spot, content: &Content, epoch: Epoch) {
        self.records.index.for_each_candidate(spot, |id| {
            let block = self.block(id);
            if let Some(open) = block.matches_open(content, epoch) {
                self.number(block, open);
            }
        });
    }

    /// Makes the index entry of a claimed block whose content is written, or takes that content back;
    /// whether the entry stands.
    fn enter_index(&self, id: BlockId, spot: Spot, content: &Content, epoch: Epoch) -> bool {
        let ended = |id| self.records.spot_if_ended(id);
        let room = self.replace_excess(id, spot, content)
            || self.records.index.enter::<Among>(spot, id, ended);
        if !room {
            self.counters.drops.add(1);
        }
        // A resize that does not see the claim on a block which it retires has its new size seen here.
        fence();
        let retired = self.records.is_retired(id) && !planted(Fault::RegisterRetired);
        // Where the epoch has ended meanwhile, one of the next may have passed the place already.
        let over = epoch != self.records.epoch() || retired;
        if room && over {
            self.records.index.leave::<Among>(spot, id);
        }
        let entered = room && !over;
        if entered {
            self.census.count(epoch, 1);
        } else {
            self.block(id).erase();
        }
        entered
    }

    /// Gives a block the index entry of a copy of its content that is one too many; whether there was one.
    ///
    /// The copy is free and the block is held, so the block is given back after it: whatever stands in
    /// line before the copy still stands before a block with its content. The copy may be touched meanwhile. It is
    /// a valid hit, and can be found no more.
    fn replace_excess(&self, id: BlockId, spot: Spot, content: &Content) -> bool {
        if self.records.index.only_candidate(spot) != Only::Unclear {
            return false;
        }
        let surplus = self.excess_copy(spot, content);
        let replaced =
            surplus.is_some_and(|copy| self.records.index.exchange::<Among>(spot, copy, id));
        if replaced {
            self.counters.surplus.add(1);
        }
        replaced
    }

    /// Of [`MAX_COPIES`] or more blocks with one content, the last registered one, but for the first, that
    /// is free in the default class.
    #[cold]
    fn excess_copy(&self, spot: Spot, content: &Content) -> Option<BlockId> {
        let mut copies = Vec::new();
        self.records.for_each_copy(spot, content, |copy| copies.push(copy));
        copies.sort_unstable_by_key(|copy| copy.seq);
        let is_free = |copy: &&Found| {
            let place = self.block(copy.id).state().place();
            place.is_some_and(|place| place.class.is_of_default_band())
        };
        let surplus = copies.iter().skip(1).rev().find(is_free)?;
        (copies.len() >= MAX_COPIES).then_some(surplus.id)
    }

    // Forgetting.

    /// Removes blocks, each of which is the caller's alone, from the index, and reports what was of this epoch; how
    /// many. `class_of` says of which class each block was, by its place in `ids`.
    pub(super) fn evict_all(
        &self,
        ids: &[BlockId],
        cause: Cause,
        class_of: impl Fn(usize) -> Class,
    ) -> u64 {
        let batches = ids.chunks(BATCH).enumerate();
        batches
            .map(|(number, batch)| {
                self.evict_batch(batch, cause, |at| class_of(number * BATCH + at))
            })
            .sum()
    }

    #[inline]
    fn evict_batch(
        &self,
        batch: &[BlockId],
        cause: Cause,
        class_of: impl Fn(usize) -> Class,
    ) -> u64 {
        let mut spots = [Spot::default(); BATCH];
        for (spot, block) in spots.iter_mut().zip(batch.iter().map(|&id| self.block(id))) {
            if block.seq() != 0 {
                *spot = self.records.index.spot(&block.content(), block.epoch());
                self.records.index.prefetch(*spot);
            }
        }
        let now = self.records.epoch();
        let mut current = 0;
        for (at, (&id, &spot)) in batch.iter().zip(&spots).enumerate() {
            let block = self.block(id);
            if block.seq() == 0 {
                continue;
            }
            block.erase();
            // The entry is gone already where a registration took its place.
            let removed = self.records.index.leave::<Among>(spot, id);
            if block.epoch() != now {
                // Over, unless it began just now.
                self.census.count(block.epoch(), -1);
                continue;
            }
            current += 1;
            self.report_eviction(id, removed.then_some(spot), cause, class_of(at));
        }
        self.census.count(now, -current);
        current as u64
    }

    /// `spot` is where the block's entry was.
    #[inline]
    fn report_eviction(&self, id: BlockId, spot: Option<Spot>, cause: Cause, class: Class) {
        let Some(log) = self.evictions.log() else {
            return;
        };
        let content = self.block(id).content();
        let cause = match class == Class::UNNEEDED && cause == Cause::Evicted {
            true => Cause::Discarded,
            false => cause,
        };
        // A copy that was taken out of the index as one too many was none that others could find.
        let is_last = spot.is_some_and(|spot| self.is_gone(spot, &content));
        log.evicted(id, content, cause, class.band(), is_last);
    }

    /// Whether no block has the content in this epoch. Of threads that remove copies of it at the same time, at
    /// least one finds it gone.
    fn is_gone(&self, spot: Spot, content: &Content) -> bool {
        // Each has erased its copy before it looks for others.
        if !planted(Fault::LookBeforeErased) {
            fence();
        }
        !self.records.has_copy(spot, content)
    }
}
