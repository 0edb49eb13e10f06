//! Pins and priorities of content. The rules are those of [`Standing`]; here is which block they are applied to.

use super::Writer;
use super::block::State;
use super::give::Release;
use super::journal::Change;
use super::lists::Chain;
use crate::band::Band;
use crate::class::{Class, Destination, Standing};
use crate::error::Misuse;
use crate::id::{BlockId, BlockKey};
use crate::policy::Tick;
use crate::pool::counters::Counters;
use crate::records::Content;

impl Writer {
    /// Pins the content of blocks in use; how much of it was not pinned before.
    pub(super) fn pin_all(&mut self, ids: &[BlockId]) -> Result<usize, Misuse> {
        let mut pinned = 0;
        let outcome = ids.iter().try_for_each(|&id| {
            self.check_in_use(id)?;
            pinned += usize::from(self.pin_content(id));
            Ok(())
        });
        outcome.map(|()| pinned)
    }

    /// Pins the copy that hits for the content of a block in use: it is the one that later requests hit,
    /// and the others may go. Whether it was not pinned before.
    fn pin_content(&mut self, id: BlockId) -> bool {
        let records = &self.pool.records;
        if !records.is_cached(id) {
            return false;
        }
        let (content, epoch) = (records.block(id).content(), records.epoch());
        let hit = records.find(&content.key());
        let new = hit.filter(|&hit| !self.block(hit).state().standing().has_pin());
        let pinned = new.is_some_and(|hit| self.reclass(hit, Standing::pinned));
        let spot = self.pool.records.index.spot(&content, epoch);
        self.note_copies_above_default(spot, &content);
        pinned
    }

    /// Takes the pins from the content of blocks in use; how much of it was pinned.
    ///
    /// Blocks that follow them, in other requests, may stay pinned and outlive them.
    pub(super) fn unpin_all(&mut self, ids: &[BlockId]) -> Result<usize, Misuse> {
        let mut unpinned = 0;
        let outcome = ids.iter().try_for_each(|&id| {
            self.check_in_use(id)?;
            unpinned += usize::from(self.unpin_content(id));
            Ok(())
        });
        if unpinned > 0 {
            self.note_disorder();
        }
        outcome.map(|()| unpinned)
    }

    /// Takes the pins from a block in use and all copies of its content; whether there were any.
    fn unpin_content(&mut self, id: BlockId) -> bool {
        let records = &self.pool.records;
        let mut copies = vec![id];
        if records.is_cached(id) {
            let content = records.block(id).content();
            let spot = records.index.spot(&content, records.epoch());
            records.for_each_copy(spot, &content, |copy| copies.push(copy.id));
        }
        // All of them, so no `any`.
        copies.into_iter().filter(|&copy| self.reclass(copy, Standing::unpinned)).count() > 0
    }

    /// Takes the pins off the oldest `count` blocks in the pinned list, which join those of their own
    /// classes; how many.
    pub(super) fn demote_oldest(&mut self, count: usize) -> usize {
        let mut demoted = 0;
        let now = self.tick();
        // As in the pool with many writers, which needs a free block for each.
        while demoted < count
            && self.free > 0
            && let Some(id) = self.list(Class::PINNED).first()
        {
            self.unlist(Class::PINNED, id);
            self.block(id)
                .update(|state| state.listed(false).with_standing(state.standing().unpinned()));
            // One without content goes to the end of its list as well.
            self.rejoin(id, true, now);
            demoted += 1;
        }
        self.pool.counters.ended_pins.add_alone(demoted as u64);
        self.pool.counters.demotions.add_alone(demoted as u64);
        demoted
    }

    /// Gives the copy that hits for `key` this band, and a free one the last place of it; whether there
    /// is one. The caller may have a reference to `held`.
    pub(super) fn set_band_of(&mut self, key: &BlockKey, held: BlockId, band: Band) -> bool {
        self.journal.gives_bands = true;
        // A caller may hold a block of other content.
        let is_alone = self.is_only_copy(held) && self.pool.records.holds(held, key);
        let Some(hit) = is_alone.then_some(held).or_else(|| self.pool.records.find(key)) else {
            return false;
        };
        self.reclass(hit, |standing| standing.in_band(band));
        if band < Band::DEFAULT {
            // What follows the content in other requests may be of a higher band.
            self.note_disorder();
        } else if !held.is_null() && !is_alone {
            let content = Content::from(key);
            let spot = self.pool.records.index.spot(&content, self.pool.epoch());
            self.note_copies_above_default(spot, &content);
        }
        true
    }

    /// Whether a block in use is the one that hits for its content, and no other was ever registered with that.
    #[inline]
    pub(super) fn is_only_copy(&self, id: BlockId) -> bool {
        let is_alone = |id| self.pool.records.is_cached(id) && !self.block(id).state().is_copied();
        !id.is_null() && is_alone(id)
    }

    /// Gives a block with content the standing that `change` makes of its own; whether that is another. A free block
    /// keeps its place where it stays in its list, and else goes to the end of the other one.
    fn reclass(&mut self, id: BlockId, change: impl Fn(Standing) -> Standing) -> bool {
        let state = self.block(id).state();
        let new = change(state.standing());
        if new == state.standing() {
            return false;
        }
        let (begun, ended) = Counters::pin_changes(state.standing(), new);
        self.pool.counters.pins.add_alone(begun);
        self.pool.counters.ended_pins.add_alone(ended);
        match state.list() {
            Some(class) if class != new.class() => {
                self.unlist(class, id);
                self.block(id).set_state(state.listed(false).with_standing(new));
                self.rejoin(id, self.appends(), self.tick());
                self.keep_bound_now();
            }
            _ => {
                self.block(id).set_state(state.with_standing(new));
                self.note(Change::Reclassed(id, new));
            }
        }
        true
    }

    /// Lets a free block that was taken out of its list join that of its standing.
    fn rejoin(&mut self, id: BlockId, append: bool, now: Tick) {
        if self.is_above(id) {
            self.size.in_use_above += 1;
        } else {
            self.free -= 1;
        }
        self.block(id).update(State::with_one_more);
        let (to, observed) = (Destination::Same, self.is_observed());
        let mut front = Chain::default();
        self.let_go(id, &Release { append, to, now, observed }, &mut front);
        self.stack(&front);
    }
}
