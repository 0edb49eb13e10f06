//! Publishing content, and losing it.

use super::Writer;
use super::block::State;
use super::journal::Change;
use crate::class::{Class, ClassSet};
use crate::error::Misuse;
use crate::evictions::Cause;
use crate::id::{BlockId, BlockKey, Epoch};
use crate::pool::entries::Alone;
use crate::records::index::{Only, Spot};
use crate::records::{Content, Found};
use crate::store::{MAX_COPIES, Registration};

/// Blocks whose entries are removed together.
const BATCH: usize = 32;

impl Writer {
    /// Lets a block in use be found under `key`.
    pub(super) fn register_block(
        &mut self,
        id: BlockId,
        key: &BlockKey,
        epoch: Epoch,
    ) -> Result<Registration, Misuse> {
        self.check_in_use(id)?;
        let content = Content::from(key);
        let block = self.block(id);
        if epoch != self.pool.epoch() || self.pool.records.is_retired(id) {
            return Ok(Registration::Stale);
        }
        if block.has_content() && block.epoch() == epoch {
            return match block.content() == content {
                true => Ok(Registration::Already),
                false => Err(Misuse::OtherHash(id)),
            };
        }
        self.take_content(id);
        Ok(self.write(id, content, epoch))
    }

    /// Takes content of an epoch that is over from a block in use.
    fn take_content(&mut self, id: BlockId) {
        let state = self.block(id).state();
        self.pool.counters.ended_pins.add_alone(u64::from(state.is_pinned()));
        self.block(id).set_state(state.without_content());
        if self.block(id).has_content() {
            self.evict_all(&[id], Cause::Discarded, |_| Class::DEFAULT);
        }
    }

    /// Writes the content of a block that has none, and enters it.
    fn write(&mut self, id: BlockId, content: Content, epoch: Epoch) -> Registration {
        self.registrations += 1;
        let spot = self.pool.records.index.spot(&content, epoch);
        self.block(id).write(&content, epoch, self.registrations);
        if !self.replace_excess(id, spot, &content) {
            let records = &self.pool.records;
            let entered = records.index.enter::<Alone>(spot, id, |id| records.spot_if_ended(id));
            debug_assert!(entered, "the index is full");
        }
        self.cached += 1;
        self.note(Change::Published(id));
        let Some(earlier) = self.pool.records.first_copy(spot, &content, Some(id)) else {
            return Registration::New;
        };
        self.block(id).update(State::copied);
        self.block(earlier.id).update(State::copied);
        self.note_copies_above_default(spot, &content);
        Registration::Duplicate(earlier.id)
    }

    // Duplicates.

    /// Gives a block the index entry of a copy of its content that is one too many; whether there was one.
    ///
    /// The copy is free and the block is in use, so the block is given back after it: whatever stands in
    /// the order before the copy still stands before a block with its content.
    fn replace_excess(&self, id: BlockId, spot: Spot, content: &Content) -> bool {
        let records = &self.pool.records;
        if records.index.only_candidate(spot) != Only::Unclear {
            return false;
        }
        let surplus = self.excess_copy(spot, content);
        if let Some(copy) = surplus {
            records.index.exchange::<Alone>(spot, copy, id);
            self.pool.counters.surplus.add_alone(1);
        }
        surplus.is_some()
    }

    /// Of [`MAX_COPIES`] or more blocks with one content, the last registered one, but for the first, that
    /// is free in the default band.
    #[cold]
    fn excess_copy(&self, spot: Spot, content: &Content) -> Option<BlockId> {
        let mut copies: Vec<Found> = Vec::new();
        self.pool.records.for_each_copy(spot, content, |copy| copies.push(copy));
        if copies.len() < MAX_COPIES {
            return None;
        }
        copies.sort_unstable_by_key(|copy| copy.seq);
        let is_free = |copy: &&Found| {
            self.block(copy.id).state().list().is_some_and(Class::is_of_default_band)
        };
        copies[1..].iter().rev().find(is_free).map(|copy| copy.id)
    }

    /// Content whose copies are of different classes may be evicted out of order: those who hold one of the
    /// others may hold, further on, blocks that outlive it by their class.
    pub(super) fn note_copies_above_default(&self, spot: Spot, content: &Content) {
        let (mut copies, mut above) = (0, false);
        self.pool.records.for_each_copy(spot, content, |copy| {
            copies += 1;
            above |= self.block(copy.id).state().standing().class().is_above_default();
        });
        if above && copies > 1 {
            self.note_disorder();
        }
    }

    // Evicting.

    /// Takes the content from blocks that have left their lists, or are in use; how many held content of this
    /// epoch. `class_of` says of which class each was, by its place in `ids`. States are the caller's to change.
    pub(super) fn evict_all(
        &mut self,
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
        &mut self,
        batch: &[BlockId],
        cause: Cause,
        class_of: impl Fn(usize) -> Class,
    ) -> u64 {
        let records = &self.pool.records;
        let mut spots = [None; BATCH];
        for (spot, block) in spots.iter_mut().zip(batch.iter().map(|&id| records.block(id))) {
            if block.has_content() {
                let content_spot = records.index.spot(&block.content(), block.epoch());
                records.index.prefetch(content_spot);
                *spot = Some(content_spot);
            }
        }
        let (now, observed) = (records.epoch(), self.is_observed());
        let mut evicted = 0;
        for (at, (&id, spot)) in batch.iter().zip(spots).enumerate() {
            let Some(spot) = spot else { continue };
            let records = &self.pool.records;
            let block = records.block(id);
            block.erase();
            let is_current = block.epoch() == now;
            // The entry is gone already where a registration took its place.
            let removed = records.index.leave::<Alone>(spot, id);
            if is_current {
                self.cached -= 1;
                evicted += 1;
            }
            match observed {
                true if is_current => {
                    self.note_evicted(id, removed.then_some(spot), class_of(at), cause);
                }
                true => self.note(Change::Withdrawn(id)),
                false => {}
            }
        }
        evicted
    }

    /// Forgets every hash.
    pub(super) fn clear(&mut self) {
        self.pool.records.end_epoch();
        self.cached = 0;
        self.note(Change::Cleared);
        // Blocks of the default class and those below keep their places: they go soon in any case.
        self.stale = ClassSet::from_bits(self.stale.bits() | self.used.above_default().bits());
    }
}
