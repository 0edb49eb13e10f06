//! What changes in a call, and who observes it: the eviction log, KV events, the backing store, the retention table.

use std::collections::VecDeque;

use super::Writer;
use crate::backing::BackingStore;
use crate::band::Band;
use crate::class::{Class, Standing};
use crate::events::EventLog;
use crate::evictions::Cause;
use crate::id::{BlockId, BlockKey};
use crate::records::Content;
use crate::records::index::Spot;
use crate::store::HintedChange;
use crate::sync::Arc;

/// Changes after which a long call drains the journal before its end.
const MOST: usize = 1 << 12;

/// A change of what a block holds or where it stands.
#[derive(Debug)]
pub(super) enum Change {
    /// Its content can be found.
    Published(BlockId),
    /// Somebody hit it and has a reference.
    Hit(BlockId),
    /// A reference is about to be given up.
    Released(BlockId),
    /// It stands last in its LRU list, with content.
    Listed(BlockId, Standing),
    /// Its priority or pin is another.
    Reclassed(BlockId, Standing),
    /// Its content, of an epoch that is over, is gone.
    Withdrawn(BlockId),
    /// Its content of this epoch is evicted.
    Evicted(Evicted),
    /// Content, of this band, is in another block.
    Moved { from: BlockId, to: BlockId, band: Band },
    /// Nothing can be found any more.
    Cleared,
    /// The pool has as many blocks.
    Resized(usize),
}

/// Content that is evicted.
#[derive(Debug)]
pub(super) struct Evicted {
    block: BlockId,
    content: Content,
    cause: Cause,
    class: Class,
    /// Whether no other block has the content.
    is_last: bool,
}

/// The changes of a call that is not over, and those of the observers that the writer itself has.
#[derive(Debug, Default)]
pub(super) struct Journal {
    changes: Vec<Change>,
    pub(super) events: Option<EventLog>,
    pub(super) backing: Option<Arc<dyn BackingStore>>,
    /// Whether any content was ever given a priority. Pins alone are reported to nobody.
    pub(super) gives_bands: bool,
    /// What became of content with another priority than the default one, until a retention table takes note of it.
    pub(super) hinted: VecDeque<HintedChange>,
}

impl Writer {
    /// Whether a change has to be noted.
    #[inline]
    pub(super) fn is_observed(&self) -> bool {
        let Journal { events, backing, gives_bands, .. } = &self.journal;
        self.pool.evictions.log().is_some() || events.is_some() || backing.is_some() || *gives_bands
    }

    #[inline]
    pub(super) fn note(&mut self, change: Change) {
        if self.is_observed() {
            self.write_down(change);
        }
    }

    pub(super) fn note_all(&mut self, blocks: &[BlockId], change: impl Fn(BlockId) -> Change) {
        if self.is_observed() {
            blocks.iter().for_each(|&block| self.write_down(change(block)));
        }
    }

    /// Notes that content of this epoch is evicted, after its entry is gone; `spot` is where that stood.
    pub(super) fn note_evicted(
        &mut self,
        block: BlockId,
        spot: Option<Spot>,
        class: Class,
        cause: Cause,
    ) {
        let content = self.pool.records.block(block).content();
        // A copy that was taken out of the index as one too many was none that others could find.
        let is_last = spot.is_some_and(|spot| !self.pool.records.has_copy(spot, &content));
        self.write_down(Change::Evicted(Evicted { block, content, cause, class, is_last }));
    }

    fn write_down(&mut self, change: Change) {
        self.journal.changes.push(change);
        if self.journal.changes.len() >= MOST {
            self.drain();
        }
    }

    /// Ends a call: observers learn of its changes, before the caller can write to a block, and readers of its counts.
    #[inline]
    pub(super) fn settle(&mut self) {
        self.publish_counts();
        if !self.journal.changes.is_empty() {
            self.drain();
        }
    }

    #[cold]
    fn drain(&mut self) {
        let changes = std::mem::take(&mut self.journal.changes);
        let _ = self.pool.evictions.log_now();
        for change in &changes {
            self.tell_log(change);
            self.tell_backing(change);
            self.tell_retention(change);
        }
        self.tell_events(&changes);
        self.journal.changes = changes;
        self.journal.changes.clear();
    }

    fn tell_log(&self, change: &Change) {
        let Some(log) = self.pool.evictions.log() else {
            return;
        };
        match *change {
            Change::Published(block) => log.registered(block),
            Change::Hit(block) => log.hit(&[block]),
            Change::Released(block) => log.released(block),
            Change::Moved { from, to, .. } => log.moved(from, to),
            Change::Cleared => log.note_clear(),
            Change::Evicted(Evicted { block, content, cause, class, is_last }) => {
                let discards = class == Class::UNNEEDED && cause == Cause::Evicted;
                let cause = if discards { Cause::Discarded } else { cause };
                log.evicted(block, content, cause, class.band(), is_last);
            }
            _ => {}
        }
    }

    fn tell_backing(&self, change: &Change) {
        let Some(backing) = &self.journal.backing else {
            return;
        };
        match *change {
            Change::Published(block) => {
                backing.published(block, &self.pool.records.block(block).key());
            }
            Change::Hit(block) => backing.used(&[block]),
            Change::Listed(block, standing) => {
                backing.queued(block, standing.own_class().band(), standing.has_pin());
                if standing.own_class() == Class::UNNEEDED {
                    backing.unneeded(block);
                }
            }
            Change::Reclassed(block, standing) => {
                backing.classed(block, standing.own_class().band(), standing.has_pin());
            }
            Change::Withdrawn(block) | Change::Evicted(Evicted { block, .. }) => {
                backing.withdrawn(block);
            }
            Change::Moved { from, to, .. } => backing.moved(from, to),
            Change::Cleared => backing.cleared(),
            Change::Resized(num_blocks) => backing.resized(num_blocks),
            Change::Released(_) => {}
        }
    }

    fn tell_retention(&mut self, change: &Change) {
        let hinted = match *change {
            _ if !self.journal.gives_bands => return,
            Change::Evicted(Evicted { block, class, .. }) if class.band() != Band::DEFAULT => {
                HintedChange::Evicted(block)
            }
            Change::Moved { from, to, band } if band != Band::DEFAULT => {
                HintedChange::Moved { from, to }
            }
            _ => return,
        };
        self.journal.hinted.push_back(hinted);
    }

    fn tell_events(&self, changes: &[Change]) {
        let Some(events) = &self.journal.events else {
            return;
        };
        let mut names = Vec::new();
        for change in changes {
            match change {
                Change::Evicted(Evicted { content, is_last: true, .. }) => {
                    let BlockKey { hash, group } = content.key();
                    names.push(((&hash).into(), group));
                }
                // What went before is reported before.
                Change::Cleared => {
                    events.removed(std::mem::take(&mut names));
                    events.cleared();
                }
                _ => {}
            }
        }
        events.removed(names);
    }
}
