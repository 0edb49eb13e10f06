//! What the pool reports of content that blocks lose: see [`evictions`](crate::evictions).

use std::time::Duration;

use super::BlockPool;
use super::index::Spot;
use crate::band::Band;
use crate::block::{Class, Content};
use crate::error::ListenError;
use crate::events::{EventLog, EventReader};
use crate::evictions::{Cause, Eviction, EvictionLog, ReuseGaps};
use crate::id::BlockId;
use crate::store::{BlockKey, HintedChange};
use crate::sync::{Fault, Mode, Ordering::Relaxed, SingleWriter, planted};

impl BlockPool<SingleWriter> {
    /// Reports to the reader, from now on, blocks of `block_size` tokens that can be found and cannot any more; what
    /// was restored comes first. Once in a pool's life, before anything else is cached.
    ///
    /// Of one writer alone, whose changes have an order.
    pub(super) fn keep_events(&self, block_size: usize) -> Result<EventReader, ListenError> {
        // Relaxed: the only writer asks.
        let is_new = self.counters.allocations.get() == 0 && self.backing.get().is_some();
        if self.contents.cached() > 0 && !is_new {
            return Err(ListenError::Late);
        }
        let (event_log, reader) = EventLog::new(block_size, self.restored_tokens());
        self.event_log.set(event_log).map_err(|_| ListenError::Twice)?;
        Ok(reader)
    }
}

impl<M: Mode> BlockPool<M> {
    /// Keeps a log of evictions from now on, of up to `capacity` blocks rounded up to a power of two,
    /// and counts of the gaps between uses, by bounds that rise. Once in a pool's life; costs 64 bytes of memory a
    /// loss and 24 a block, once they are touched.
    pub fn listen(&self, capacity: usize, gap_bounds: &[Duration]) -> Result<(), ListenError> {
        let log = EvictionLog::new(capacity, gap_bounds, self.config.max_blocks, &self.clock)?;
        self.eviction_log.set(log).map_err(|_| ListenError::Twice)
    }

    /// Takes up to `most` evictions out of the log, the oldest first. From any thread, in parallel with those that
    /// change the pool; nothing where nobody listens.
    pub fn take_evictions(&self, most: usize, out: &mut Vec<Eviction>) {
        if let Some(log) = self.eviction_log.get() {
            log.take(most, out);
        }
    }

    /// Evictions for which the log had no room.
    #[must_use]
    pub fn missed_evictions(&self) -> u64 {
        self.eviction_log.get().map_or(0, EvictionLog::missed)
    }

    /// How long content waited between its uses; empty where nobody listens.
    #[must_use]
    pub fn reuse_gaps(&self) -> ReuseGaps {
        self.eviction_log.get().map(EvictionLog::gaps).unwrap_or_default()
    }

    /// A call begins that registers, hits, gives back or loses content.
    #[inline]
    pub(super) fn note_time_of_batch(&self) {
        if let Some(log) = self.eviction_log.get() {
            log.set_time(&self.clock);
        }
    }

    /// Content is about to be written to a block that the caller has claimed.
    #[inline]
    pub(super) fn note_registered(&self, id: BlockId) {
        if let Some(log) = self.eviction_log.get() {
            log.registered(id);
        }
    }

    /// The caller has hit these blocks and holds them.
    #[inline]
    pub(super) fn note_hits(&self, ids: &[BlockId]) {
        if let Some(log) = self.eviction_log.get() {
            log.hit(ids);
        }
        if let Some(backing) = self.backing() {
            backing.used(ids);
        }
    }

    /// The caller is about to give up its holds of these blocks, up to the first that nobody holds.
    #[inline]
    pub(super) fn note_released(&self, ids: &[BlockId]) {
        if let Some(log) = self.eviction_log.get() {
            log.set_time(&self.clock);
            let held = ids.iter().take_while(|&&id| self.check_held(id).is_ok());
            held.for_each(|&id| log.released(id));
        }
    }

    /// Content moves from a block to another.
    #[inline]
    pub(super) fn note_moved(&self, from: BlockId, to: BlockId) {
        if let Some(log) = self.eviction_log.get() {
            log.moved(from, to);
        }
        if let Some(backing) = self.backing() {
            backing.moved(from, to);
        }
        if self.reports_bands() && self.block(from).state().own_class().band() != Band::DEFAULT {
            self.hinted.push(HintedChange::Moved { from, to });
        }
    }

    pub(super) fn note_cleared(&self) {
        if let Some(log) = self.eviction_log.get() {
            log.note_clear();
        }
        // Before the event: who reads it looks then at what the backing store reports.
        if let Some(backing) = self.backing() {
            backing.cleared();
        }
        if let Some(event_log) = self.event_log.get() {
            event_log.cleared();
        }
    }

    /// Whether content may have a band that a hint gave it. Pins alone are reported to nobody.
    #[inline]
    fn reports_bands(&self) -> bool {
        // Relaxed: the one thread that gives bands also evicts.
        self.gives_bands.load(Relaxed)
    }

    /// [`Self::forget_all`], and reports it. `class_of` says of which class each block was, by its place in `ids`.
    #[inline]
    pub(super) fn evict_all(
        &self,
        ids: &[BlockId],
        cause: Cause,
        class_of: impl Fn(usize) -> Class,
    ) -> u64 {
        let (log, event_log) = (self.eviction_log.get(), self.event_log.get());
        let reports_bands = self.reports_bands();
        let is_hinted = |at| reports_bands && class_of(at).band() != Band::DEFAULT;
        if log.is_none() && event_log.is_none() && !(0..ids.len()).any(is_hinted) {
            return self.forget_all(ids);
        }
        let mut names = Vec::with_capacity(event_log.map_or(0, |_| ids.len()));
        let evicted = self.forget_each(ids, |at, spot| {
            let id = ids[at];
            let content = self.block(id).content();
            if is_hinted(at) {
                self.hinted.push(HintedChange::Evicted(id));
            }
            // A copy that was taken out of the index as one too many was none that others could find.
            let is_last = spot.is_some_and(|spot| self.is_gone(spot, &content));
            if let Some(log) = log {
                let cause = match class_of(at) == Class::UNNEEDED && cause == Cause::Evicted {
                    true => Cause::Discarded,
                    false => cause,
                };
                log.evicted(id, content, cause, class_of(at).band(), is_last);
            }
            if is_last && event_log.is_some() {
                let BlockKey { hash, group } = content.key();
                names.push(((&hash).into(), group));
            }
        });
        if let Some(event_log) = event_log {
            event_log.removed(names);
        }
        evicted
    }

    /// Whether no block has the content in this epoch. Of threads that remove copies of it at the same time, at
    /// least one finds it gone.
    fn is_gone(&self, spot: Spot, content: &Content) -> bool {
        // Each has erased its copy before it looks for others.
        if !planted(Fault::LookBeforeErased) {
            M::fence();
        }
        !self.has_copy(spot, content)
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use crate::hints::Band;
    use crate::id::{BlockHash, BlockId, GroupId};
    use crate::pool::Writer;
    use crate::store::{BlockKey, BlockStore, HintedChange, Lookup, PoolConfig};

    /// Without hints nobody takes such changes out of their queue.
    #[test]
    fn evictions_of_pins_are_reported_only_once_bands_are_given() {
        let mut pool = Writer::new(PoolConfig::new(4)).unwrap();
        let key = BlockKey::new(BlockHash::from_bytes([7; 32]), GroupId::new(0));
        for band in [None, Some(Band::of(100))] {
            let mut blocks = Vec::new();
            pool.allocate(1, &mut blocks).unwrap();
            let _registration = pool.register(blocks[0], key, pool.epoch()).unwrap();
            pool.pin(&blocks).unwrap();
            if let Some(band) = band {
                assert!(pool.set_band(&key, BlockId::NULL, band));
            }
            pool.release(&blocks).unwrap();
            assert_eq!(pool.release_cached(3), 1);
            let reported = band.map(|_| HintedChange::Evicted(blocks[0]));
            assert_eq!(pool.take_hinted_change(), reported);
        }
    }
}
