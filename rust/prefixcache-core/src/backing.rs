//! The memory behind a pool's blocks, where it outlives the process: what it must know of their content.
//!
//! Nothing of this exists until somebody gives a pool its [`BackingStore`]
//! ([`keep_in`](crate::BlockStore::keep_in)). Then the single writer reports each change of what blocks hold,
//! in order, before whoever caused it can write to a block. `docs/explanation/tiers.md` has the states of a block.

use std::fmt::Debug;

use crate::band::Band;
use crate::events::BlockTokens;
use crate::hints::Owner;
use crate::id::{BlockId, BlockKey};

/// What a backing store must know of a pool's blocks.
///
/// The single writer makes all calls, in the order in which content changes. They must be short and must not block;
/// [`is_sound`](Self::is_sound) alone may read the block's bytes.
pub trait BackingStore: Debug + Send + Sync {
    /// The block's bytes are complete and can be found under `key`. Somebody uses it.
    fn published(&self, block: BlockId, key: &BlockKey);

    /// The tokens of a block that was published, and the block before it: what KV events report of it. Called only
    /// where events are kept and the block may be reported.
    fn keep_tokens(&self, block: BlockId, tokens: BlockTokens<'_>);

    /// What [`keep_tokens`](Self::keep_tokens) was given for the block's content, by whichever process.
    fn kept_tokens(&self, block: BlockId) -> Option<BlockTokens<'static>>;

    /// Who asked for the priority that the block's content has or gets next, `band`, and for how long. Called before the
    /// block has it.
    fn keep_hint(&self, _block: BlockId, _band: Band, _hint: KeptHint) {}

    /// The block's content can be found no more. Its bytes do not change before this returns.
    fn withdrawn(&self, block: BlockId);

    /// The content of `from`, whose bytes were copied, is that of `to` from now on.
    fn moved(&self, from: BlockId, to: BlockId);

    /// These blocks were hit: somebody uses them.
    fn used(&self, blocks: &[BlockId]);

    /// Nobody uses the block any more: it is the last of its LRU list.
    fn queued(&self, block: BlockId, band: Band, pinned: bool);

    /// After [`queued`](Self::queued): no request is known to begin where the block is needed, so it goes first.
    fn unneeded(&self, _block: BlockId) {}

    /// The block's priority or pin is another, and its place is the same.
    fn classed(&self, block: BlockId, band: Band, pinned: bool);

    /// Whether the block has the bytes that it was published with. Asked before it is hit; a block that is not
    /// sound loses its content.
    fn is_sound(&self, block: BlockId) -> bool;

    /// Whether [`is_sound`](Self::is_sound) would have to read more than `most` of these blocks. Another thread
    /// then reads them first.
    fn reads_first(&self, _blocks: &mut dyn Iterator<Item = BlockId>, _most: usize) -> bool {
        false
    }

    /// Nothing that was published before can be found any more, by another process either.
    fn cleared(&self);

    /// The pool has that many blocks from now on, the null block included.
    fn resized(&self, _num_blocks: usize) {}

    /// Whether other processes may find what is published from now on. Before the first call they may not.
    fn set_durable(&self, durable: bool);
}

/// What was asked for a block: of several owners' hints the highest one, and of these the one that lasts longest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptHint {
    /// None: content that was lowered, which is nobody's.
    pub owner: Option<Owner>,
    /// How long it lasts after each use, in milliseconds; [`u64::MAX`]: for ever.
    pub ttl: u64,
    /// How long it still lasts, in milliseconds; [`u64::MAX`]: for ever.
    pub left: u64,
}

/// Content that a backing store has kept from another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptBlock {
    /// Where its bytes are.
    pub block: BlockId,
    /// What it is.
    pub key: BlockKey,
    /// Its priority level.
    pub band: Band,
    /// Who asked for that level; a priority of nobody ends.
    pub hint: Option<KeptHint>,
    /// Whether it is pinned.
    pub pinned: bool,
}
