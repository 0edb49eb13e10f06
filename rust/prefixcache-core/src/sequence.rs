//! A request's tokens, block hashes and block tables.

mod ends;
mod home;
pub mod retention;

use std::ops::Range;

use crate::groups::GroupSpec;
use crate::hash::{self, Extras, HashConfig, PrefixHashes, Scope};
use crate::hints::Hints;
use crate::id::{BlockHash, BlockId, Epoch, GroupId};
use crate::policy::{Names, Turn};
use crate::sync::Arc;
use crate::weights::Weights;

pub(crate) use home::{Abandoned, Home};
use retention::{Anchors, Retention};

/// The hashes of a token sequence's full blocks, to probe a cache with.
#[derive(Clone, Debug)]
pub struct BlockHashes(pub(crate) PrefixHashes);

impl BlockHashes {
    /// The hashes of the full blocks of `tokens`, where `root` is that of no scope.
    #[must_use]
    pub fn new(root: BlockHash, block_size: usize, scope: &Scope, tokens: &[u32]) -> Self {
        let root = hash::in_scope(root, scope);
        let mut hashes = PrefixHashes::new(block_size, root, Arc::default());
        hashes.extend_to(tokens);
        Self(hashes)
    }

    /// The state for another process; see [`PrefixHashes::to_bytes`].
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0.to_bytes()
    }

    /// What [`Self::to_bytes`] gave; None for anything else.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        PrefixHashes::from_bytes(bytes).map(Self)
    }

    /// The hashes, first block first.
    #[must_use]
    pub fn as_slice(&self) -> &[BlockHash] {
        self.0.as_slice()
    }
}

/// A request as the cache sees it; made by [`PrefixCache::new_sequence`](crate::cache::PrefixCache::new_sequence).
///
/// It holds blocks from a commit until its release, and can be committed again afterwards. One that is dropped
/// gives them back in the cache's next call that takes blocks or counts free ones.
#[derive(Debug)]
pub struct Sequence {
    pub(crate) home: Arc<Home>,
    pub(crate) scope: Scope,
    /// The version of the weights that the hashes stand for.
    pub(crate) weight_version: u64,
    /// Whether it stays with its version when the weights change.
    pub(crate) stays: bool,
    pub(crate) tokens: Vec<u32>,
    pub(crate) hashes: PrefixHashes,
    /// What the eviction policy calls the blocks, where not by their hashes.
    names: Option<Names>,
    pub(crate) holding: Option<Holding>,
    pub(crate) anchors: Anchors,
    pub(crate) hints: Option<Hints>,
}

/// What a committed sequence holds.
#[derive(Debug)]
pub(crate) struct Holding {
    /// The epoch from before the first block was allocated.
    pub(crate) epoch: Epoch,
    /// The block table of each group.
    pub(crate) tables: Vec<Table>,
    /// Tokens that have a slot in the groups that need the whole prefix, if there are any.
    pub(crate) num_slots: usize,
    /// Tokens that have a slot in every group.
    pub(crate) num_ready: usize,
    /// Leading blocks that were hits.
    pub(crate) num_hits: usize,
    /// Tokens whose KV is there.
    pub(crate) num_filled: usize,
    /// Leading blocks that were hits or have been offered to the index.
    pub(crate) num_published: usize,
    /// The turn of its conversation, where the eviction policy asks.
    pub(crate) turn: Turn,
    /// Full blocks that the sequence had when it was committed.
    pub(crate) num_prompt: usize,
    /// The place of its scope where ends are counted.
    pub(crate) ends: usize,
}

/// A sequence's blocks in one group: block `i` holds positions from `i * block_size` on.
#[derive(Debug, Default)]
pub(crate) struct Table {
    /// The null block where the sequence needs none any more, or never did.
    pub(crate) blocks: Vec<BlockId>,
    /// How many null blocks it begins with. Behind them are some in groups with gaps alone.
    pub(crate) first: usize,
}

impl Table {
    /// The blocks among these places that the sequence holds.
    pub(crate) fn held(&self, places: Range<usize>) -> impl DoubleEndedIterator<Item = BlockId> {
        let blocks = &self.blocks[places.start.max(self.first).min(places.end)..places.end];
        blocks.iter().copied().filter(|block| !block.is_null())
    }

    /// All blocks that the sequence holds, the last one first.
    pub(crate) fn held_from_the_end(&self) -> Vec<BlockId> {
        self.held(0..self.blocks.len()).rev().collect()
    }

    /// Makes it `count` places longer, with the next of the blocks: where gaps may be, the last alone has one.
    pub(crate) fn extend(
        &mut self,
        spec: GroupSpec,
        count: usize,
        blocks: &mut impl Iterator<Item = BlockId>,
    ) {
        let taken = spec.num_new(count);
        let len = self.blocks.len() + count - taken;
        self.blocks.resize(len, BlockId::NULL);
        self.blocks.extend(blocks.take(taken));
    }
}

impl Sequence {
    pub(crate) fn new(home: &Arc<Home>, scope: Scope, tokens: Vec<u32>, extras: Extras) -> Self {
        let weights = home.weights.get();
        let root = hash::in_scope(weights.root, &scope);
        let mut hashes = PrefixHashes::new(home.config.block_size, root, Arc::new(extras));
        hashes.extend_to(&tokens);
        Self::with_hashes(home, scope, weights, tokens, hashes)
    }

    /// A sequence whose full blocks have these hashes, if they are hashes of as many blocks under the current
    /// weights; else it hashes them.
    pub(crate) fn hashed(
        home: &Arc<Home>,
        scope: Scope,
        tokens: Vec<u32>,
        known: BlockHashes,
    ) -> Self {
        let weights = home.weights.get();
        let root = hash::in_scope(weights.root, &scope);
        if known.0.are_of(root, home.config.block_size, tokens.len()) {
            return Self::with_hashes(home, scope, weights, tokens, known.0);
        }
        Self::new(home, scope, tokens, Extras::new())
    }

    fn with_hashes(
        home: &Arc<Home>,
        scope: Scope,
        weights: &Weights,
        tokens: Vec<u32>,
        hashes: PrefixHashes,
    ) -> Self {
        let pseudonyms = home.pseudonyms.get();
        let mut names =
            pseudonyms.map(|pseudonyms| Names::keyed(pseudonyms, scope.cache_salt.as_deref()));
        if let Some(names) = &mut names {
            names.extend_to(&tokens, home.config.block_size);
        }
        Self {
            home: Arc::clone(home),
            scope,
            weight_version: weights.version,
            stays: false,
            tokens,
            hashes,
            names,
            holding: None,
            anchors: Anchors::default(),
            hints: None,
        }
    }

    /// How its cache hashes.
    pub(crate) fn config(&self) -> &HashConfig {
        &self.home.config
    }

    /// Adds tokens, and the hashes of the blocks that they fill.
    pub fn extend(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
        self.hashes.extend_to(&self.tokens);
        if let Some(names) = &mut self.names {
            names.extend_to(&self.tokens, self.home.config.block_size);
        }
    }

    /// Tells the eviction policy what a recorded cache called the next full blocks, in place of their hashes:
    /// see [`PrefixCache::name_blocks`](crate::cache::PrefixCache::name_blocks). For caches that name none.
    pub fn give_names(&mut self, names: &[u64]) {
        self.names.get_or_insert_default().give(names);
    }

    /// The same tokens, holding nothing, under the weights of an older version or the current one, with which the
    /// new sequence stays: it finds and publishes what is cached under them. None for a version that has not been, or
    /// that was forgotten ([`PrefixCache::new_weight_version`](crate::cache::PrefixCache::new_weight_version)). Where
    /// that happens later, calls that count, commit or pin the new sequence fail.
    #[must_use]
    pub fn at_version(&self, version: u64) -> Option<Self> {
        let weights = self.home.weights_at(version)?;
        let root = hash::in_scope(weights.root, &self.scope);
        Some(Self {
            home: Arc::clone(&self.home),
            scope: self.scope.clone(),
            weight_version: version,
            stays: true,
            tokens: self.tokens.clone(),
            hashes: self.hashes.after(root, &self.tokens),
            names: self.names.clone(),
            holding: None,
            anchors: self.anchors.clone(),
            hints: self.hints.clone(),
        })
    }

    /// The version of the weights that its hashes stand for.
    #[must_use]
    pub fn weight_version(&self) -> u64 {
        self.weight_version
    }

    /// Whether its hashes are of no use any more: other weights are current, and it does not stay with its own, or
    /// these were forgotten.
    pub(crate) fn is_outdated(&self) -> bool {
        let kept = self.stays && self.home.weights_at(self.weight_version).is_some();
        !(kept || self.weight_version == self.home.weights.version())
    }

    /// Hashes again under other weights.
    pub(crate) fn rehash(&mut self, weights: &Weights) {
        self.weight_version = weights.version;
        self.hashes.restart(hash::in_scope(weights.root, &self.scope));
        self.hashes.extend_to(&self.tokens);
    }

    /// Who it shares blocks with.
    #[must_use]
    pub fn scope(&self) -> &Scope {
        &self.scope
    }

    /// Tokens known: the prompt and what was generated.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens that have a KV slot in the groups that need the whole prefix; where there is no such group,
    /// in every one; 0 while the sequence holds nothing.
    #[must_use]
    pub fn num_slots(&self) -> usize {
        self.holding.as_ref().map_or(0, |holding| holding.num_slots)
    }

    /// Tokens that have a KV slot in every group, so that they can be computed.
    #[must_use]
    pub fn num_ready_slots(&self) -> usize {
        self.holding.as_ref().map_or(0, |holding| holding.num_ready)
    }

    /// Says what the blocks that the sequence drops leave behind.
    pub fn set_retention(&mut self, retention: Retention) {
        self.anchors.retention = retention;
    }

    /// Makes `position` (tokens) an anchor: a later request can stand at the last full block before it.
    pub fn add_anchor(&mut self, position: usize) {
        self.anchors.add(position);
    }

    /// Makes `position` (tokens) an anchor, since the prompt ends there.
    pub fn add_prompt_end(&mut self, position: usize) {
        self.anchors.add_prompt_end(position);
    }

    /// Says how dear its tokens are, in the place of what was said before. It counts from the next release on.
    pub fn set_hints(&mut self, hints: Hints) {
        self.anchors.keep(hints.raised_ends());
        self.hints = Some(hints);
    }

    /// Tokens whose KV is there; 0 while the sequence holds nothing.
    #[must_use]
    pub fn num_filled(&self) -> usize {
        self.holding.as_ref().map_or(0, |holding| holding.num_filled)
    }

    /// Leading tokens that were hits; 0 while the sequence holds nothing.
    #[must_use]
    pub fn num_hits(&self) -> usize {
        let blocks = self.holding.as_ref().map_or(0, |holding| holding.num_hits);
        blocks * self.home.config.block_size
    }

    /// The epoch in which it was committed, while it holds blocks.
    #[must_use]
    pub fn epoch(&self) -> Option<Epoch> {
        self.holding.as_ref().map(|holding| holding.epoch)
    }

    /// What was said of how dear its tokens are.
    #[must_use]
    pub fn hints(&self) -> Option<&Hints> {
        self.hints.as_ref()
    }

    /// Whether the sequence is committed.
    #[must_use]
    pub fn is_committed(&self) -> bool {
        self.holding.is_some()
    }

    /// How many groups the sequence's cache has.
    #[must_use]
    pub fn num_groups(&self) -> usize {
        self.home.config.groups.count()
    }

    /// The block table of a group: block `i` holds positions from `i * block_size` on, and is the null
    /// block where the group needs none. Empty while the sequence holds nothing, and for a group that is
    /// none.
    #[must_use]
    pub fn block_table(&self, group: usize) -> &[BlockId] {
        self.holding
            .as_ref()
            .and_then(|holding| holding.tables.get(group))
            .map_or(&[], |table| table.blocks.as_slice())
    }

    /// The first block that the sequence holds in a group.
    pub(crate) fn first_held(&self, group: GroupId) -> usize {
        let holding = self.holding.as_ref();
        holding.map_or(0, |holding| holding.tables[group.index()].first)
    }

    /// Leaves what it holds to the cache, which takes it back in its next call that takes blocks or counts free ones.
    pub fn abandon(&mut self) {
        if let Some(holding) = self.holding.take() {
            let names = self.names()[..holding.num_published].to_vec();
            self.home.abandoned.push(Abandoned { holding, names });
        }
    }

    /// The hashes of the full blocks.
    #[must_use]
    pub fn hashes(&self) -> &[BlockHash] {
        self.hashes.as_slice()
    }

    /// What the eviction policy goes by: the names of the full blocks, or else their hashes.
    pub(crate) fn names(&self) -> &[BlockHash] {
        let hashes = self.hashes.as_slice();
        let names = self.names.as_ref().map(Names::as_slice);
        names.filter(|names| names.len() == hashes.len()).unwrap_or(hashes)
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        self.abandon();
    }
}
