//! A pool over memory that outlives the process: see [`backing`](crate::backing).

use super::{BlockPool, Writer, add_to};
use crate::backing::{BackingStore, BlockTokens, KeptBlock, KeptHint};
use crate::band::Band;
use crate::block::{Class, State};
use crate::error::{ListenError, require};
use crate::evictions::Cause;
use crate::id::BlockId;
use crate::store::{BlockKey, BlockStore, Lookup, Registration};
use crate::sync::{Arc, Mode, Ordering::Relaxed, SingleWriter};

impl Writer<SingleWriter> {
    /// Restores the content that `store` has kept, in the order of eviction, and reports to it from now on.
    ///
    /// Once in a pool's life and before its first use. All or nothing: it fails for a block that the pool does not
    /// have or that is listed twice. Returns how many blocks were restored.
    pub fn keep_in(
        &mut self,
        store: Arc<dyn BackingStore>,
        kept: &[KeptBlock],
    ) -> Result<usize, ListenError> {
        self.0.check_kept(kept)?;
        let held = self.hold_all();
        let restored = self.restore(kept);
        let has_content = self.0.marked(&restored);
        for one in kept.iter().filter(|one| !has_content[one.block.index()]) {
            store.withdrawn(one.block);
        }
        store.resized(self.num_blocks());
        self.0.backing.set(store).map_err(|_| ListenError::Twice)?;
        let blank: Vec<_> = held.into_iter().filter(|id| !has_content[id.index()]).collect();
        let outcome = self.release(&blank).and_then(|()| self.release(&restored));
        debug_assert!(outcome.is_ok(), "a hold was lost: {outcome:?}");
        Ok(restored.len())
    }

    /// Whether more than `most` of the blocks that hold these `keys` are still to be read before they can be hit:
    /// see [`BackingStore::reads_first`].
    pub fn reads_first(&self, keys: impl Iterator<Item = BlockKey>, most: usize) -> bool {
        let mut blocks = keys.filter_map(|key| self.lookup(&key));
        self.0.backing().is_some_and(|backing| backing.reads_first(&mut blocks, most))
    }

    fn hold_all(&mut self) -> Vec<BlockId> {
        let mut held = Vec::new();
        let all = self.allocate(self.num_blocks() - 1, &mut held);
        debug_assert!(all.is_ok(), "an unused pool has blocks in use");
        self.0.counters.allocations.set(0);
        held
    }

    /// Registers the content of held blocks, what is evicted last first: of copies that one hits. Returns those
    /// whose content can be found, in the order of `kept`.
    fn restore(&mut self, kept: &[KeptBlock]) -> Vec<BlockId> {
        let epoch = self.epoch();
        let mut restored = Vec::with_capacity(kept.len());
        for one in kept.iter().rev() {
            let outcome = self.register(one.block, one.key, epoch);
            if matches!(outcome, Ok(Registration::New | Registration::Duplicate(_))) {
                self.0.restore_class(one);
                restored.push(one.block);
            }
        }
        restored.reverse();
        // Some of what a request held may be missing, whatever is evicted first.
        self.0.contents.disorder();
        restored
    }
}

impl<M: Mode> BlockPool<M> {
    /// The memory behind the blocks; a pool that several threads change has none.
    #[inline]
    pub(super) fn backing(&self) -> Option<&dyn BackingStore> {
        match M::SHARED {
            true => None,
            false => self.backing.get().map(|backing| &**backing),
        }
    }

    /// For each block of the pool, whether it is one of `ids`.
    fn marked(&self, ids: &[BlockId]) -> Vec<bool> {
        let mut marked = vec![false; self.size.num_blocks()];
        ids.iter().for_each(|id| marked[id.index()] = true);
        marked
    }

    fn check_kept(&self, kept: &[KeptBlock]) -> Result<(), ListenError> {
        // Relaxed: the only writer asks.
        if self.counters.allocations.get() > 0 || self.contents.cached() > 0 {
            return Err(ListenError::Late);
        }
        if self.backing.get().is_some() {
            return Err(ListenError::Twice);
        }
        let mut seen = vec![false; self.size.num_blocks()];
        for one in kept {
            let place = seen.get_mut(one.block.index());
            let is_new = place.is_some_and(|seen| !std::mem::replace(seen, true));
            require(is_new && !one.block.is_null(), "kept", || {
                format!("must name each block of the pool once, not {}", one.block)
            })?;
        }
        Ok(())
    }

    /// Gives a held block the priority and the pin that its content had.
    fn restore_class(&self, one: &KeptBlock) {
        let block = self.block(one.block);
        if one.band != Band::DEFAULT {
            // Relaxed: the thread that gives bands evicts too.
            self.gives_bands.store(true, Relaxed);
            block
                .transition_to_classed::<M>(|state| state.with_own_class(Class::of_band(one.band)));
        }
        if one.pinned {
            block.transition_to_classed::<M>(State::pinned);
            add_to::<M>(&self.counters.pins, 1);
        }
    }

    /// Content of a block that the caller has claimed can be found.
    #[inline]
    pub(super) fn note_published(&self, id: BlockId) {
        if let Some(backing) = self.backing() {
            backing.published(id, &self.block(id).key());
        }
    }

    /// What KV events report of a block that was published.
    pub(super) fn keep_tokens(&self, id: BlockId, tokens: BlockTokens<'_>) {
        if let Some(backing) = self.backing() {
            backing.keep_tokens(id, tokens);
        }
    }

    /// Who asked for a priority of a block, and for how long.
    pub(super) fn keep_hint(&self, id: BlockId, band: Band, hint: KeptHint) {
        if let Some(backing) = self.backing() {
            backing.keep_hint(id, band, hint);
        }
    }

    /// What can be found and be reported, as another process left it.
    pub(super) fn restored_tokens(&self) -> Vec<(BlockKey, BlockTokens<'static>)> {
        let Some(backing) = self.backing() else {
            return Vec::new();
        };
        let named = |id| Some((self.block(id).key(), backing.kept_tokens(id)?));
        self.cached_blocks().into_iter().filter_map(named).collect()
    }

    /// These blocks lose their content, if they have any.
    #[inline]
    pub(super) fn note_withdrawn(&self, ids: &[BlockId]) {
        if let Some(backing) = self.backing() {
            ids.iter().for_each(|&id| backing.withdrawn(id));
        }
    }

    /// The block, in this state, is the last of its LRU list.
    #[inline]
    pub(super) fn note_queued(&self, id: BlockId, state: State) {
        if let Some(backing) = self.backing()
            && state.is_hashed()
        {
            let class = state.own_class();
            backing.queued(id, class.band(), state.is_pinned());
            if class == Class::UNNEEDED {
                backing.unneeded(id);
            }
        }
    }

    /// The class or the pin of the block is another.
    #[inline]
    pub(super) fn note_classed(&self, id: BlockId) {
        if let Some(backing) = self.backing() {
            let state = self.block(id).state();
            backing.classed(id, state.own_class().band(), state.is_pinned());
        }
    }

    /// Whether a block that the caller holds, and whose content hit, has the bytes that it was published with.
    #[inline]
    pub(super) fn is_sound(&self, id: BlockId) -> bool {
        self.backing().is_none_or(|backing| backing.is_sound(id))
    }

    /// Gives up the hold of a block that is not sound, and its content.
    #[cold]
    pub(super) fn drop_unsound(&self, id: BlockId) {
        let lost = self.forget_held(id, Cause::Dropped);
        add_to::<M>(&self.counters.evictions, lost);
        self.contents.disorder();
        self.give_back_all(&[id]);
    }

    /// Says whether what is published from now on may be found by other processes.
    pub(super) fn set_durable(&self, durable: bool) {
        if let Some(backing) = self.backing() {
            backing.set_durable(durable);
        }
    }
}
