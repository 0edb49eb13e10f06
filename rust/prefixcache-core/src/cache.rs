//! `PrefixCache`: sequences over a block pool, and the published primitives.
//!
//! A request's life: `new_sequence`, `count_prefix_hits`, `commit_prefix_plan` (hits and new blocks in
//! one all-or-nothing step), then `append_slots` and `mark_blocks_filled` as it is computed, and
//! `release`. A released sequence can be committed again, which is how a preempted one resumes.
//!
//! Every method checks all its arguments before it changes anything.

mod committing;
mod dropping;
mod publishing;
mod reading;

use crate::error::{
    Argument, Broken, CacheError, InvalidArgument, Misuse, ResizeError, SequenceFault,
};
use crate::groups::GroupSpec;
use crate::hash::{self, Extras, HashConfig, PrefixHashes, Scope};
use crate::id::{BlockHash, GroupId};
use crate::naming::Namer;
use crate::sequence::{BlockHashes, Sequence};
use crate::store::{BlockStore, Moves};
use crate::sync::{Arc, AtomicU64, OnceLock, Ordering};
use crate::weights::{CurrentWeights, WeightsName};

pub use publishing::Twin;

/// Lifetime counts of the cache, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Tokens of the sequences that were committed.
    pub queries: u64,
    /// Tokens of them that were hits.
    pub hits: u64,
}

/// The root hash of a cache without a scope, under the weights of this name.
fn whole_root(config: &HashConfig, weights: &str) -> BlockHash {
    hash::root(config, &Scope::default(), weights)
}

/// A prefix cache over a pool `S`; as safe to share between threads as that pool is.
#[derive(Debug)]
pub struct PrefixCache<S> {
    store: S,
    hash_config: Arc<HashConfig>,
    weights: CurrentWeights,
    queries: AtomicU64,
    hits: AtomicU64,
    /// What names blocks for the eviction policy, where it goes by names.
    namer: OnceLock<Namer>,
}

impl<S: BlockStore> PrefixCache<S> {
    /// A cache over an unused pool.
    pub fn new(hash_config: HashConfig, store: S) -> Result<Self, InvalidArgument> {
        hash_config.check()?;
        Ok(Self {
            store,
            weights: CurrentWeights::new(None, |name| whole_root(&hash_config, name)),
            hash_config: Arc::new(hash_config),
            queries: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            namer: OnceLock::new(),
        })
    }

    /// This cache with a name for the weights that it begins with.
    #[must_use]
    pub fn with_weights(self, name: WeightsName) -> Self {
        Self {
            weights: CurrentWeights::new(Some(name), |name| whole_root(&self.hash_config, name)),
            ..self
        }
    }

    /// The pool below.
    pub fn store(&self) -> &S {
        &self.store
    }

    /// Tokens in a block.
    pub fn block_size(&self) -> usize {
        self.hash_config.block_size
    }

    /// The hash before the first block under the current weights, from which others can compute the
    /// hashes that this cache has.
    pub fn root_hash(&self, scope: &Scope) -> BlockHash {
        hash::in_scope(self.weights.get().root, scope)
    }

    /// The hashes of the full blocks of `tokens` under the current weights.
    pub fn compute_block_hashes(
        &self,
        tokens: &[u32],
        scope: &Scope,
        extras: Extras,
    ) -> BlockHashes {
        let root = self.root_hash(scope);
        let mut hashes = PrefixHashes::new(self.block_size(), root, Arc::new(extras));
        hashes.extend_to(tokens);
        BlockHashes(hashes)
    }

    /// A sequence that holds nothing yet, its full blocks hashed.
    pub fn new_sequence(&self, tokens: Vec<u32>, scope: Scope, extras: Extras) -> Sequence {
        let config = Arc::clone(&self.hash_config);
        let weights = self.weights.get();
        Sequence::new(config, scope, weights, tokens, extras, self.namer.get())
    }

    /// Lets the eviction policy go by names under a key instead of hashes, for sequences made from now on: a
    /// recording that has these names can then be replayed. Once in a cache's life.
    pub fn name_blocks(&self, key: [u8; 32]) -> Result<(), InvalidArgument> {
        let namer = Namer::new(key, self.block_size())?;
        let set = self.namer.set(namer);
        set.map_err(|_| InvalidArgument::new("key", "must be given once"))
    }

    /// [`Self::new_sequence`] with hashes that [`BlockHashes::new`] made of these very tokens and scope.
    ///
    /// Those under other weights are not taken: the tokens are hashed then.
    pub fn new_hashed_sequence(
        &self,
        tokens: Vec<u32>,
        scope: Scope,
        hashes: BlockHashes,
    ) -> Sequence {
        let config = Arc::clone(&self.hash_config);
        let weights = self.weights.get();
        Sequence::hashed(config, scope, weights, tokens, hashes, self.namer.get())
    }

    /// The kind of a group that the cache has.
    pub(crate) fn group_spec(&self, group: GroupId) -> GroupSpec {
        self.hash_config.groups.specs()[group.index()]
    }

    /// Fails unless the cache has this group.
    pub(crate) fn check_group(&self, group: GroupId) -> Result<(), InvalidArgument> {
        let groups = self.hash_config.groups.count();
        if group.index() < groups {
            return Ok(());
        }
        let reason = format!("must be below {groups} (num_groups), not {}", group.get());
        Err(InvalidArgument::new("group", reason))
    }

    /// Forgets everything cached, in constant time. Sequences keep their blocks and publish no more.
    pub fn clear_cache_index(&self) {
        self.store.clear_index();
    }

    /// Forgets everything cached, and hashes under other weights from now on: those of this name, or of the
    /// next version's number. Returns the version.
    ///
    /// A name may come back. Content of before does not: it is of an earlier epoch, as are the sequences
    /// that hold blocks, which publish no more.
    pub fn new_weight_version(&self, name: Option<WeightsName>) -> u64 {
        // Before the clear: a thread that sees the new epoch sees the new weights too, as the version's
        // store is released by the clear's.
        let root_of = |name: &str| whole_root(&self.hash_config, name);
        let version = self.weights.change(name, root_of);
        self.store.clear_index();
        version
    }

    /// Counts the changes of the weights; 0 at first.
    pub fn weight_version(&self) -> u64 {
        self.weights.version()
    }

    /// What every hash calls the weights of now: their name, or the version's digits.
    pub fn weights_name(&self) -> String {
        self.weights.get().name.clone()
    }

    /// Sets the number of blocks as [`BlockStore::resize`] does.
    pub fn resize(&self, num_blocks: usize) -> Result<usize, ResizeError> {
        self.store.resize(num_blocks)
    }

    /// Begins one slice of a shrink that keeps what is worth most: see [`BlockStore::begin_moves`].
    pub fn begin_moves(
        &self,
        num_blocks: usize,
        most: usize,
        moves: &mut Moves,
    ) -> Result<(), ResizeError> {
        self.store.begin_moves(num_blocks, most, moves)
    }

    /// Ends the slice, whose KV was copied. Returns how many blocks moved.
    pub fn finish_moves(&self, moves: &mut Moves) -> Result<usize, ResizeError> {
        self.store.finish_moves(moves)
    }

    /// Takes the slice back.
    pub fn abort_moves(&self, moves: &mut Moves) -> Result<(), Misuse> {
        self.store.abort_moves(moves)
    }

    /// Gives up the content of the `count` free blocks that would lose it first. Returns how many there were.
    pub fn release_cached(&self, count: usize) -> usize {
        self.store.release_cached(count)
    }

    /// Bounds the free blocks that keep their content, as [`BlockStore::set_max_cached`] does.
    pub fn set_max_cached(&self, blocks: Option<usize>) {
        self.store.set_max_cached(blocks);
    }

    /// Lifetime counts in tokens; the pool counts blocks.
    pub fn stats(&self) -> CacheStats {
        // Relaxed: counters that order nothing.
        CacheStats {
            queries: self.queries.load(Ordering::Relaxed),
            hits: self.hits.load(Ordering::Relaxed),
        }
    }

    /// Checks every invariant of the pool, which must be at rest.
    pub fn validate(&self) -> Result<(), Broken> {
        self.store.validate()
    }

    /// Checks that blocks count the holds of these sequences and moves, which are all that there are, and no
    /// more: one count a block. All must be of this cache.
    pub fn validate_holds(&self, sequences: &[&Sequence], moves: &Moves) -> Result<(), Broken> {
        let holding = sequences.iter().filter_map(|one| one.holding.as_ref());
        let tables = holding.flat_map(|holding| &holding.tables);
        let held = tables.flat_map(|table| &table.blocks[table.first..]);
        let moving = moves.under_way.iter().map(|one| &one.to);
        self.store.validate_holds(held.chain(moving).copied())
    }

    /// Fails unless this cache made all of these `sequences`.
    pub fn check_made_here(&self, sequences: &[&Sequence]) -> Result<(), CacheError> {
        let mut all = sequences.iter().enumerate();
        all.try_for_each(|(index, sequence)| {
            self.check_owner(sequence, Argument::element("sequences", index))
        })
    }

    pub(crate) fn check_owner(
        &self,
        sequence: &Sequence,
        argument: Argument,
    ) -> Result<(), CacheError> {
        if Arc::ptr_eq(&sequence.hash_config, &self.hash_config) {
            return Ok(());
        }
        Err(fault(argument, SequenceFault::OtherCache))
    }

    fn check_owners(&self, sequences: &[&mut Sequence]) -> Result<(), CacheError> {
        let mut all = sequences.iter().enumerate();
        all.try_for_each(|(index, sequence)| {
            self.check_owner(sequence, Argument::element("sequences", index))
        })
    }

    fn check_committed(&self, sequences: &[&mut Sequence]) -> Result<(), CacheError> {
        self.check_owners(sequences)?;
        let idle = sequences
            .iter()
            .position(|sequence| !sequence.is_committed());
        idle.map_or(Ok(()), |index| {
            let argument = Argument::element("sequences", index);
            Err(fault(argument, SequenceFault::NotCommitted))
        })
    }
}

fn fault(argument: impl Into<Argument>, fault: SequenceFault) -> CacheError {
    CacheError::Sequence {
        argument: argument.into(),
        fault,
    }
}

pub(crate) fn check_len(
    argument: &'static str,
    len: usize,
    sequences: usize,
) -> Result<(), InvalidArgument> {
    if len == sequences {
        return Ok(());
    }
    let reason = format!("must have one entry for each of {sequences} sequences, not {len}");
    Err(InvalidArgument::new(argument, reason))
}
