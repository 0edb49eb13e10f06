//! A pool in a kept file with a slower tier behind it: both learn of each change.
//!
//! A block that another process left is in the file, sound or not, and nobody may have compared it yet when it is
//! evicted. Its copy for the tier is compared with the sum in the block's record, by the thread that takes the copy.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use prefixcache_core::backing::{BackingStore, KeptBlock, KeptHint};
use prefixcache_core::band::Band;
use prefixcache_core::events::BlockTokens;
use prefixcache_core::id::{BlockId, BlockKey};

use crate::faults::Fault;
use crate::staging::Staging;
use crate::table::Table;

/// The record of each block, and the copies of evicted ones.
#[derive(Debug)]
pub(crate) struct Both {
    file: Arc<Table>,
    staging: Staging,
}

impl Both {
    /// `kept` is what another process left in the file, before anything is reported.
    pub(crate) fn new(file: Arc<Table>, staging: Staging, kept: &[KeptBlock]) -> Self {
        for kept in kept {
            // Relaxed: nobody writes to the record of a block that another process left before it is withdrawn.
            let sum = file.record(kept.block).sum.load(Relaxed);
            let compares = !file.injected.plants(Fault::StageUnread);
            staging.restore(kept.block, kept.key, compares.then_some(sum));
        }
        Self { file, staging }
    }
}

impl BackingStore for Both {
    fn published(&self, block: BlockId, key: &BlockKey) {
        self.file.published(block, key);
        self.staging.published(block, key);
    }

    fn keep_tokens(&self, block: BlockId, tokens: BlockTokens<'_>) {
        self.staging.keep_tokens(block, tokens.clone());
        self.file.keep_tokens(block, tokens);
    }

    /// Called where KV events are on: from then on they report the block, on the tier too.
    fn kept_tokens(&self, block: BlockId) -> Option<BlockTokens<'static>> {
        let tokens = self.file.kept_tokens(block)?;
        self.staging.keep_tokens(block, tokens.clone());
        Some(tokens)
    }

    fn keep_hint(&self, block: BlockId, band: Band, hint: KeptHint) {
        self.file.keep_hint(block, band, hint);
    }

    fn withdrawn(&self, block: BlockId) {
        self.file.withdrawn(block);
        self.staging.withdrawn(block);
    }

    fn moved(&self, from: BlockId, to: BlockId) {
        self.file.moved(from, to);
        self.staging.moved(from, to);
    }

    fn used(&self, blocks: &[BlockId]) {
        self.file.used(blocks);
        self.staging.used(blocks);
    }

    fn queued(&self, block: BlockId, band: Band, pinned: bool) {
        self.file.queued(block, band, pinned);
        self.staging.queued(block, band, pinned);
    }

    fn unneeded(&self, block: BlockId) {
        self.staging.unneeded(block);
    }

    fn classed(&self, block: BlockId, band: Band, pinned: bool) {
        self.file.classed(block, band, pinned);
        self.staging.classed(block, band, pinned);
    }

    fn is_sound(&self, block: BlockId) -> bool {
        self.file.is_sound(block)
    }

    fn reads_first(&self, blocks: &mut dyn Iterator<Item = BlockId>, most: usize) -> bool {
        self.file.reads_first(blocks, most)
    }

    fn cleared(&self) {
        self.file.cleared();
        self.staging.cleared();
    }

    fn resized(&self, num_blocks: usize) {
        self.staging.resized(num_blocks);
    }

    fn set_durable(&self, durable: bool) {
        self.file.set_durable(durable);
        self.staging.set_durable(durable);
    }
}
