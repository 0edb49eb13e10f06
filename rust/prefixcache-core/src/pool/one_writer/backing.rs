//! A pool over memory that outlives the process: see [`backing`](crate::backing).

use super::Writer;
use crate::backing::{BackingStore, KeptBlock};
use crate::band::Band;
use crate::class::{Destination, Standing};
use crate::error::{ListenError, require};
use crate::events::{BlockTokens, EventLog, EventReader};
use crate::evictions::Cause;
use crate::id::{BlockId, BlockKey};
use crate::store::{BlockStore, Lookup, Registration};
use crate::sync::Arc;

impl Writer {
    /// See [`BlockStore::keep_events`].
    pub(super) fn report_events(&mut self, block_size: usize) -> Result<EventReader, ListenError> {
        let is_new = self.pool.counters.allocations.get() == 0 && self.journal.backing.is_some();
        if self.cached > 0 && !is_new {
            return Err(ListenError::Late);
        }
        if self.journal.events.is_some() {
            return Err(ListenError::Twice);
        }
        let (events, reader) = EventLog::new(block_size, self.restored_tokens());
        self.journal.events = Some(events);
        Ok(reader)
    }

    /// See [`BlockStore::keep_in`].
    pub(super) fn restore_from(
        &mut self,
        store: Arc<dyn BackingStore>,
        kept: &[KeptBlock],
    ) -> Result<usize, ListenError> {
        self.check_kept(kept)?;
        let mut allocated = Vec::new();
        self.hand_out(self.free, &mut allocated);
        let restored = self.restore(kept);
        let mut has_content = vec![false; self.num_blocks()];
        restored.iter().for_each(|id| has_content[id.index()] = true);
        for block in kept.iter().filter(|kept| !has_content[kept.block.index()]) {
            store.withdrawn(block.block);
        }
        store.resized(self.num_blocks());
        // What was restored is no news to the store.
        self.settle();
        self.journal.backing = Some(store);
        let blank: Vec<_> = allocated.into_iter().filter(|id| !has_content[id.index()]).collect();
        let outcome = self
            .release_all(&blank, Destination::Same)
            .and_then(|()| self.release_all(&restored, Destination::Same));
        debug_assert!(outcome.is_ok(), "a reference was lost: {outcome:?}");
        self.settle();
        Ok(restored.len())
    }

    fn check_kept(&self, kept: &[KeptBlock]) -> Result<(), ListenError> {
        if self.pool.counters.allocations.get() > 0 || self.cached > 0 {
            return Err(ListenError::Late);
        }
        if self.journal.backing.is_some() {
            return Err(ListenError::Twice);
        }
        let mut seen = vec![false; self.num_blocks()];
        for kept in kept {
            let slot = seen.get_mut(kept.block.index());
            let is_new = slot.is_some_and(|seen| !std::mem::replace(seen, true));
            require(is_new && !kept.block.is_null(), "kept", || {
                format!("must name each block of the pool once, not {}", kept.block)
            })?;
        }
        Ok(())
    }

    /// Registers the content of blocks in use, what is evicted last first: of copies that one hits. Returns those
    /// whose content can be found, in the order of `kept`.
    fn restore(&mut self, kept: &[KeptBlock]) -> Vec<BlockId> {
        let epoch = self.epoch();
        let mut restored = Vec::with_capacity(kept.len());
        for kept in kept.iter().rev() {
            let outcome = self.register_block(kept.block, &kept.key, epoch);
            if matches!(outcome, Ok(Registration::New | Registration::Duplicate(_))) {
                self.restore_standing(kept);
                restored.push(kept.block);
            }
        }
        restored.reverse();
        // Some of what a request held may be missing, whatever is evicted first.
        self.note_disorder();
        restored
    }

    /// Gives a block in use the priority and the pin that its content had.
    fn restore_standing(&mut self, kept: &KeptBlock) {
        let mut standing = Standing::default().in_band(kept.band);
        self.journal.gives_bands |= kept.band != Band::DEFAULT;
        if kept.pinned {
            standing = standing.pinned();
        }
        self.pool.counters.pins.add_alone(u64::from(standing.is_pinned()));
        self.block(kept.block).update(|state| state.with_standing(standing));
    }

    /// What can be found and be reported, as another process left it.
    fn restored_tokens(&self) -> Vec<(BlockKey, BlockTokens<'static>)> {
        let Some(backing) = &self.journal.backing else {
            return Vec::new();
        };
        let named = |id| Some((self.block(id).key(), backing.kept_tokens(id)?));
        self.cached_blocks().into_iter().filter_map(named).collect()
    }

    /// Whether a block in use, whose content hit, has the bytes that it was published with.
    #[inline]
    pub(super) fn is_sound(&self, id: BlockId) -> bool {
        self.journal.backing.as_ref().is_none_or(|backing| backing.is_sound(id))
    }

    /// Gives up the reference to a block that is not sound, and its content.
    #[cold]
    pub(super) fn drop_unsound(&mut self, id: BlockId) {
        let lost = self.forget_in_use(id, Cause::Dropped);
        self.pool.counters.evictions.add_alone(lost);
        self.note_disorder();
        let outcome = self.release_all(&[id], Destination::Same);
        debug_assert!(outcome.is_ok(), "a reference was lost: {outcome:?}");
    }
}
