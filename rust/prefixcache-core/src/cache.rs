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
pub mod tables;

use std::borrow::Borrow;
use std::time::Duration;

use crate::backing::{BackingStore, KeptBlock};
use crate::error::{
    Argument, Broken, CacheError, InvalidArgument, ListenError, Misuse, ResizeError, SequenceFault,
    require,
};
use crate::events::EventReader;
use crate::groups::GroupSpec;
use crate::hash::{self, Extras, HashConfig, PrefixHashes, Scope};
use crate::hints::Owner;
use crate::id::{BlockHash, BlockKey, GroupId};
use crate::policy::NameBlocks;
use crate::retention::{self, HintStats, RetentionTable};
use crate::sequence::{BlockHashes, Home, Sequence};
use crate::store::{BlockStore, Lookup, Moves, WithReaders, sealed};
use crate::sync::{Arc, Ordering};
use crate::weights::{self, WeightsName};

pub use committing::MissingBlock;
pub use publishing::Duplicate;

/// Lifetime counts of the cache, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheStats {
    /// Tokens of the sequences that were committed.
    pub queries: u64,
    /// Tokens of them that were hits.
    pub hits: u64,
}

/// A prefix cache over a pool `S`, which says what can be done with it: a [`Writer`](crate::Writer) may change
/// it and is the only one, of [`MultiWriter`](crate::MultiWriter)s each thread has a clone, and a cache over
/// [`Reader`](crate::Reader)s ([`PrefixCache::reader`]) can be cloned and counts hits.
#[derive(Debug)]
pub struct PrefixCache<S> {
    store: S,
    home: Arc<Home>,
    hints: Option<Box<RetentionTable>>,
}

impl<S: Clone> Clone for PrefixCache<S> {
    fn clone(&self) -> Self {
        // Hints are for one writer, which is no clone.
        self.over(self.store.clone())
    }
}

impl<S> PrefixCache<S> {
    fn over<T>(&self, store: T) -> PrefixCache<T> {
        let home = Arc::clone(&self.home);
        PrefixCache { store, home, hints: None }
    }

    /// The cache over a handle that `store` makes of its own.
    #[doc(hidden)]
    pub fn map_store<T>(self, store: impl FnOnce(S) -> T) -> PrefixCache<T> {
        let Self { store: own, home, hints } = self;
        PrefixCache { store: store(own), home, hints }
    }
}

impl<S: WithReaders> PrefixCache<S> {
    /// The cache to count hits in, for other threads.
    #[must_use]
    pub fn reader(&self) -> PrefixCache<S::Reader> {
        self.over(self.store.reader())
    }
}

impl<S: Lookup> PrefixCache<S> {
    /// The pool below.
    pub fn store(&self) -> &S {
        &self.store
    }

    /// Tokens in a block.
    pub fn block_size(&self) -> usize {
        self.home.config.block_size
    }

    /// The hash before the first block under the current weights, from which others can compute the
    /// hashes that this cache has.
    pub fn root_hash(&self, scope: &Scope) -> BlockHash {
        hash::in_scope(self.home.weights.get().root, scope)
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
        Sequence::new(&self.home, scope, tokens, extras)
    }

    /// Lets the eviction policy go by other names than hashes, for sequences made from now on: a recording that has
    /// these names can then be replayed. Once in a cache's life.
    pub fn name_blocks(&self, pseudonyms: Arc<dyn NameBlocks>) -> Result<(), InvalidArgument> {
        let set = self.home.pseudonyms.set(pseudonyms);
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
        Sequence::hashed(&self.home, scope, tokens, hashes)
    }

    /// How many KV cache groups there are.
    pub fn num_groups(&self) -> u16 {
        self.home.config.groups.count() as u16
    }

    /// The kind of a group that the cache has.
    pub(crate) fn group_spec(&self, group: GroupId) -> GroupSpec {
        self.home.config.groups.specs()[group.index()]
    }

    /// Fails unless the cache has this group.
    pub(crate) fn check_group(&self, group: GroupId) -> Result<(), InvalidArgument> {
        let groups = self.home.config.groups.count();
        require(group.index() < groups, "group", || {
            format!("must be below {groups} (num_groups), not {}", group.get())
        })
    }

    /// Counts the changes of the weights; 0 at first.
    pub fn weight_version(&self) -> u64 {
        self.home.weights.version()
    }

    /// What every hash calls the weights of now: their name, or the version's digits.
    pub fn weights_name(&self) -> String {
        self.home.weights.get().name.clone()
    }

    /// Lifetime counts in tokens; the pool counts blocks.
    pub fn stats(&self) -> CacheStats {
        // Relaxed: counters that order nothing.
        CacheStats {
            queries: self.home.queries.load(Ordering::Relaxed),
            hits: self.home.hits.load(Ordering::Relaxed),
        }
    }

    /// Fails unless this cache made all of these `sequences`.
    pub fn check_made_here(&self, sequences: &[impl Borrow<Sequence>]) -> Result<(), CacheError> {
        let mut all = sequences.iter().enumerate();
        all.try_for_each(|(index, sequence)| {
            self.check_owner(sequence.borrow(), Argument::element("sequences", index))
        })
    }

    pub(crate) fn check_owner(
        &self,
        sequence: &Sequence,
        argument: Argument,
    ) -> Result<(), CacheError> {
        if Arc::ptr_eq(&sequence.home, &self.home) {
            return Ok(());
        }
        Err(fault(argument, SequenceFault::OtherCache))
    }

    fn check_committed(&self, sequences: &[impl Borrow<Sequence>]) -> Result<(), CacheError> {
        self.check_made_here(sequences)?;
        let idle = sequences.iter().position(|sequence| !sequence.borrow().is_committed());
        idle.map_or(Ok(()), |index| {
            let argument = Argument::element("sequences", index);
            Err(fault(argument, SequenceFault::NotCommitted))
        })
    }
}

/// What a cache begins with.
#[derive(Debug)]
pub struct CacheBuilder {
    hash_config: HashConfig,
    weights: Option<WeightsName>,
    budget: Option<f64>,
}

impl CacheBuilder {
    /// A cache that hashes by this configuration, names its weights by their version and does not look at hints.
    #[must_use]
    pub fn new(hash_config: HashConfig) -> Self {
        Self { hash_config, weights: None, budget: None }
    }

    /// With a name for the weights that it begins with.
    #[must_use]
    pub fn weights(self, name: WeightsName) -> Self {
        Self { weights: Some(name), ..self }
    }

    /// With retention hints, which may raise up to this share of the pool, from 0 to 1, for each owner. They need one
    /// writer.
    #[must_use]
    pub fn hints(self, budget: f64) -> Self {
        Self { budget: Some(budget), ..self }
    }

    /// The cache over an unused pool. Fails where one of these is out of its range, or the pool has several writers
    /// and there are hints.
    pub fn build<S: BlockStore>(self, store: S) -> Result<PrefixCache<S>, InvalidArgument> {
        self.hash_config.check()?;
        let allows_hints = self.budget.is_none() || store.is_at_rest();
        require(allows_hints, "hints", || "need a pool that one thread writes to")?;
        let hints = self.budget.map(RetentionTable::new).transpose()?.map(Box::new);
        let home = Arc::new(Home::new(self.hash_config, self.weights));
        Ok(PrefixCache { store, home, hints })
    }
}

impl<S: BlockStore> sealed::Inner for PrefixCache<S> {
    type Inner = S;

    fn inner_mut(&mut self) -> &mut S {
        &mut self.store
    }
}

impl<S: BlockStore> PrefixCache<S> {
    /// A cache over an unused pool, as [`CacheBuilder::build`] makes it of its defaults.
    pub fn new(hash_config: HashConfig, store: S) -> Result<Self, InvalidArgument> {
        CacheBuilder::new(hash_config).build(store)
    }

    /// Reports to the reader, from now on, blocks that can be found and cannot any more. What another process has kept
    /// comes first. Once in a cache's life, before anything else is cached, and for one writer.
    pub fn keep_events(&mut self) -> Result<EventReader, ListenError> {
        let block_size = self.block_size();
        self.store.keep_events(block_size)
    }

    /// Forgets everything cached, in constant time. Sequences keep their blocks and publish no more.
    pub fn clear_cache_index(&mut self) {
        self.store.clear_index();
    }

    /// Forgets everything cached, and hashes under other weights from now on: those of this name, or of the
    /// next version's number. Returns the version.
    ///
    /// A name may come back. Content of before does not: it is of an earlier epoch, as are the sequences
    /// that hold blocks, which publish no more.
    pub fn new_weight_version(&mut self, name: Option<WeightsName>) -> u64 {
        // Before the clear: a thread that sees the new epoch sees the new weights too, as the version's
        // store is released by the clear's.
        let is_durable = name.as_ref().is_some_and(WeightsName::is_of_content);
        let version = self.home.change_weights(name);
        self.home.forget_before(version);
        self.store.clear_index();
        self.store.set_durable(is_durable);
        version
    }

    /// Hashes under other weights from now on, and forgets nothing: what was cached under older ones is found by
    /// sequences of their versions ([`Sequence::at_version`]), and sequences that hold blocks go on to publish in
    /// the chain of theirs. Returns the version.
    ///
    /// A chain may so hold blocks that newer weights computed on older blocks. Weights whose name comes back would
    /// find these in a chain of their own: then everything is forgotten as by [`Self::new_weight_version`]. Nothing
    /// is kept in a backing store from then on.
    pub fn next_weight_version(&mut self, name: Option<WeightsName>) -> u64 {
        let returns = name.as_ref().is_some_and(|name| self.home.had(name));
        if returns {
            return self.new_weight_version(name);
        }
        self.store.set_durable(false);
        self.home.change_weights(name)
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
        let held = tables.flat_map(|table| table.held(0..table.blocks.len()));
        let moving = moves.in_flight.iter().map(|one| one.to);
        self.store.validate_holds(held.chain(moving))
    }

    /// Restores what `store` has kept of another process, in the order of eviction, and lets it keep what is
    /// published from now on, while the weights are named by their content. Returns how many blocks were restored.
    ///
    /// A priority ends where its hint was not kept or its TTL has ended meanwhile, where its owner has raised more than
    /// today's share, what was used longest ago first, and all of them in a cache that does not look at hints.
    ///
    /// Once, before the cache's first use, and for one writer. All or nothing.
    pub fn keep_in(
        &mut self,
        store: Arc<dyn BackingStore>,
        kept: &[KeptBlock],
    ) -> Result<usize, ListenError> {
        kept.iter().try_for_each(|block| self.check_group(block.key.group))?;
        let is_durable = weights::is_of_content(&self.weights_name());
        if !is_durable {
            store.cleared();
        }
        let mut kept = if is_durable { kept.to_vec() } else { Vec::new() };
        let most = self.hints.as_ref().map(|hints| hints.budget(self.store.num_blocks()));
        retention::end_kept(&mut kept, most);
        let restored = self.store.keep_in(store, &kept)?;
        if let Some(hints) = &mut self.hints {
            hints.adopt(&mut self.store, &kept);
        }
        self.store.set_durable(is_durable);
        Ok(restored)
    }

    /// Whether a hit of the first `hit_tokens` needs more than `most` blocks of another process that were not
    /// compared with their checksums yet. They are read on another thread then: who commits later need not do it.
    pub fn reads_first(
        &self,
        sequence: &mut Sequence,
        hit_tokens: usize,
        most: usize,
    ) -> Result<bool, CacheError> {
        let keys = self.needed_keys(self.asked_hashes(sequence, hit_tokens)?);
        Ok(self.store.reads_first(keys.into_iter(), most))
    }

    /// Sets the number of blocks as [`BlockStore::resize`] does.
    pub fn resize(&mut self, num_blocks: usize) -> Result<usize, ResizeError> {
        self.reclaim();
        self.store.resize(num_blocks)
    }

    /// Begins one slice of a shrink that keeps what is worth most: see [`BlockStore::begin_moves`].
    pub fn begin_moves(
        &mut self,
        num_blocks: usize,
        most: usize,
        moves: &mut Moves,
    ) -> Result<(), ResizeError> {
        self.reclaim();
        self.store.begin_moves(num_blocks, most, moves)
    }

    /// Ends the slice, whose KV was copied. Returns how many blocks moved.
    pub fn finish_moves(&mut self, moves: &mut Moves) -> Result<usize, ResizeError> {
        self.store.finish_moves(moves)
    }

    /// Takes the slice back.
    pub fn abort_moves(&mut self, moves: &mut Moves) -> Result<(), Misuse> {
        self.store.abort_moves(moves)
    }

    /// Gives up the content of the `count` free blocks that would lose it first. Returns how many there were.
    pub fn release_cached(&mut self, count: usize) -> usize {
        self.reclaimed(|cache| cache.store.release_cached(count))
    }

    /// Bounds the free blocks that keep their content, as [`BlockStore::set_max_cached`] does.
    pub fn set_max_cached(&mut self, blocks: Option<usize>) {
        self.reclaim();
        self.store.set_max_cached(blocks);
    }

    /// Sets the time that TTLs, evictions and the eviction policy go by, and ends the use of the system's clock.
    pub fn set_time(&mut self, now: Duration) {
        self.store.set_time(now);
    }

    /// Gives content whose TTL has ended the priority that it has without, of `most` blocks at most, those that
    /// ended first. Returns how many moved. To be called before each step of a scheduler.
    pub fn demote_expired(&mut self, most: usize) -> usize {
        let Self { store, hints, .. } = self;
        hints.as_mut().map_or(0, |hints| hints.demote_expired(store, most))
    }

    /// Ends what `owner` asked for the sequence's full blocks from number `first` on, whoever released them. Returns
    /// how many moved to another priority.
    ///
    /// Counts look at each block, to the end of the epoch, once this ends hints before those of what the owner has
    /// raised behind them.
    pub fn end_hints(
        &mut self,
        owner: Owner,
        sequence: &Sequence,
        first: usize,
    ) -> Result<usize, CacheError> {
        self.check_owner(sequence, "sequence".into())?;
        let Self { store, hints, home } = self;
        let groups = &home.config.groups;
        let hashes = sequence.hashes().iter().skip(first).rev();
        let keys = hashes.flat_map(|&hash| {
            let groups = groups.each();
            groups.map(move |(group, _)| BlockKey::new(hash, group))
        });
        let ended = |hints: &mut Box<RetentionTable>| hints.end_of_owner(store, owner, keys);
        Ok(hints.as_mut().map_or(0, ended))
    }

    /// Forgets the hints of what the pool has evicted, and says how many there are.
    pub fn hint_stats(&mut self) -> HintStats {
        let Self { store, hints, .. } = self;
        hints.as_mut().map_or_else(HintStats::default, |hints| {
            hints.forget_evicted(store);
            hints.stats()
        })
    }
}

fn fault(argument: impl Into<Argument>, fault: SequenceFault) -> CacheError {
    CacheError::Sequence { argument: argument.into(), fault }
}

fn check_len(argument: &'static str, len: usize, sequences: usize) -> Result<(), InvalidArgument> {
    require(len == sequences, argument, || {
        format!("must have one entry for each of {sequences} sequences, not {len}")
    })
}
