//! `PrefixCache`: sequences over a block pool, and the published primitives.
//!
//! A request's life: `new_sequence`, `count_prefix_hits`, `commit_prefix_plan` (hits and new blocks in
//! one all-or-nothing step), then `append_slots` and `mark_blocks_filled` as it is computed, and
//! `release`. A released sequence can be committed again, which is how a preempted one resumes.
//!
//! Every method checks all its arguments before it changes anything.

use std::iter;

use crate::error::{
    Argument, Broken, CacheError, InvalidArgument, Misuse, ResizeError, SequenceFault,
};
use crate::events::Journal;
use crate::groups::GroupSpec;
use crate::hash::{self, Extras, HashConfig, PrefixHashes, Scope};
use crate::hints::RetentionTable;
use crate::id::{BlockHash, BlockId, GroupId, MAX_BLOCKS};
use crate::naming::Namer;
use crate::policy::{Queue, ReuseQueue, Turn};
use crate::retention::Fate;
use crate::sequence::{BlockHashes, Holding, Sequence, Table};
use crate::store::{BlockKey, BlockStore, Moves, Registration};
use crate::sync::{Arc, AtomicU64, OnceLock, Ordering};
use crate::weights::{CurrentWeights, WeightsName};

/// How many registrations ahead the store is told of a key, so that it fetches the key's bucket.
const EXPECT_AHEAD: usize = 8;

/// A block that was registered while another block already held the same content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Twin {
    /// Which of the sequences of the call.
    pub sequence: usize,
    /// The group of the block.
    pub group: GroupId,
    /// The block's index in the block table.
    pub index: usize,
    /// The block that already holds the content, and hits.
    pub holder: BlockId,
}

/// What a commit took from the pool.
struct Taken {
    /// Leading blocks that hit: those of them that a group needs.
    hits: usize,
    /// The block table of each group, hits first.
    tables: Vec<Table>,
}

/// The blocks that a commit takes without content.
#[derive(Clone, Copy)]
struct NewBlocks {
    /// For each group that needs the whole prefix.
    whole: usize,
    /// For each of the others.
    near: usize,
}

impl NewBlocks {
    const NONE: Self = Self { whole: 0, near: 0 };

    fn of(self, spec: GroupSpec) -> usize {
        if spec.needs_whole_prefix() {
            self.whole
        } else {
            self.near
        }
    }
}

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

    // Hashing.

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

    // Reading.

    /// How many leading tokens hit, in full blocks: the longest length of which every group has the
    /// blocks that it needs. Changes nothing.
    pub fn probe(&self, hashes: &BlockHashes) -> usize {
        self.probe_within(hashes, usize::MAX)
    }

    /// The longest such length up to `max_tokens`, which may be any: where a group does not need whole
    /// prefixes, a length that hits says nothing of shorter ones.
    pub fn probe_within(&self, hashes: &BlockHashes, max_tokens: usize) -> usize {
        self.longest_hit(self.within(hashes.as_slice(), max_tokens)) * self.block_size()
    }

    /// [`PrefixCache::probe`] for a sequence, which is hashed anew if the weights have changed.
    pub fn count_prefix_hits(&self, sequence: &mut Sequence) -> Result<usize, CacheError> {
        self.count_prefix_hits_within(sequence, usize::MAX)
    }

    /// [`PrefixCache::probe_within`] for a sequence.
    pub fn count_prefix_hits_within(
        &self,
        sequence: &mut Sequence,
        max_tokens: usize,
    ) -> Result<usize, CacheError> {
        let hashes = self.asked_hashes(sequence, max_tokens)?;
        Ok(self.longest_hit(hashes) * self.block_size())
    }

    /// How many leading tokens, in full blocks up to `max_tokens`, hit in all groups that need the whole
    /// prefix, whatever the others have; 0 where no group does. What this is above
    /// [`Self::count_prefix_hits_within`] is lost for want of a window's blocks.
    pub fn count_whole_hits(
        &self,
        sequence: &mut Sequence,
        max_tokens: usize,
    ) -> Result<usize, CacheError> {
        let hashes = self.asked_hashes(sequence, max_tokens)?;
        if !self.hash_config.groups.any_whole() {
            return Ok(0);
        }
        Ok(self.longest_whole_hit(hashes) * self.block_size())
    }

    /// The current hashes of a sequence's blocks that are full within `max_tokens`.
    fn asked_hashes<'a>(
        &self,
        sequence: &'a mut Sequence,
        max_tokens: usize,
    ) -> Result<&'a [BlockHash], CacheError> {
        self.check_owner(sequence, "sequence".into())?;
        self.refresh(sequence);
        Ok(self.within(sequence.hashes(), max_tokens))
    }

    /// The hashes of the blocks that are full within `max_tokens`.
    fn within<'a>(&self, hashes: &'a [BlockHash], max_tokens: usize) -> &'a [BlockHash] {
        &hashes[..hashes.len().min(max_tokens / self.block_size())]
    }

    /// The longest length, in blocks, of which every group has the blocks that it needs.
    ///
    /// Groups that need the whole prefix come first: once they hit they hit at every shorter length. The
    /// others are asked in turns, each for its longest length up to that of the one before, until all
    /// agree.
    fn longest_hit(&self, hashes: &[BlockHash]) -> usize {
        let groups = &self.hash_config.groups;
        let mut length = self.longest_whole_hit(hashes);
        let others = || groups.each().filter(|(_, spec)| !spec.needs_whole_prefix());
        loop {
            let before = length;
            for (group, spec) in others() {
                length = spec.longest_hit(length, self.block_size(), |block| {
                    self.is_hit(BlockKey::new(hashes[block], group))
                });
            }
            if length == before {
                return length;
            }
        }
    }

    /// Leading blocks that all groups have which need the whole prefix.
    fn longest_whole_hit(&self, hashes: &[BlockHash]) -> usize {
        let groups = self.hash_config.groups.each();
        let whole = groups.filter(|(_, spec)| spec.needs_whole_prefix());
        whole.fold(hashes.len(), |length, (group, _)| {
            self.count_leading_hits(group, &hashes[..length])
        })
    }

    /// Leading blocks that the group, which needs the whole prefix, has.
    fn count_leading_hits(&self, group: GroupId, hashes: &[BlockHash]) -> usize {
        let key = |hash: &BlockHash| BlockKey::new(*hash, group);
        if self.keeps_prefixes() {
            return hashes.partition_point(|hash| self.is_hit(key(hash)));
        }
        self.store.count_leading(hashes.iter().map(key))
    }

    /// Whether a block of a group that needs the whole prefix hits only if all blocks before it do, so that
    /// a binary search finds the last hit.
    ///
    /// To show: for a block that hits and each position before it, there is a block with the content
    /// of that position that is lost later. "Held" is later than every place in line, the pinned tier
    /// later than the regular one, and within a tier the end later than the front.
    ///
    /// 1. Whoever holds a block holds one for each position before it: hits are taken from the first
    ///    position on, and blocks are published in order. All of them can be found: a copy too many is
    ///    taken out of the index only while it is free, and for one that is held.
    /// 2. A sequence is released tail first. So when its block joins the line, the blocks before it
    ///    are still held, or join the line behind it: in the same tier by the order of release, and
    ///    never in an earlier tier, because of 3. A touch takes the blocks before it along.
    /// 3. Among the blocks that a sequence holds, the pinned ones come first. `pin` pins from the first
    ///    position on, and where a key has one block alone, all who hold that key hold the pin. A pin
    ///    beside a twin ends the order instead, and so does unpinning, which may leave pins behind it.
    /// 4. `demote` takes the oldest pinned blocks, so those that follow a block go before it, and it
    ///    appends them to the regular tier in that order.
    /// 5. A shrink by moves loses what an eviction would take, from the front of the line, and what moves
    ///    keeps its place. A resize ends the order if it loses what stands behind content that stays, or
    ///    leaves blocks to holders, whose later registrations have gaps. So does a full ring, which loses
    ///    what was released last. A clear takes everything, and the order is whole again.
    ///
    /// A commit looks at every block again: beside a writer a count may be out of date in any case.
    fn keeps_prefixes(&self) -> bool {
        self.store.evicts_in_order()
    }

    /// Whether a count looks at as many blocks as a binary search does, and not at each.
    pub fn counts_by_bisection(&self) -> bool {
        self.keeps_prefixes()
            && self
                .hash_config
                .groups
                .each()
                .all(|(_, spec)| spec.needs_whole_prefix())
    }

    fn is_hit(&self, key: BlockKey) -> bool {
        self.store.lookup(&key).is_some()
    }

    /// A sequence that holds nothing follows the current weights.
    fn refresh(&self, sequence: &mut Sequence) {
        if !self.hashes_are_current(sequence) {
            sequence.rehash(self.weights.get());
        }
    }

    /// Whether the next call will take the sequence's hashes as they are. If not it hashes all tokens
    /// anew: the weights have changed, and the sequence holds nothing.
    pub fn hashes_are_current(&self, sequence: &Sequence) -> bool {
        sequence.is_committed() || sequence.weight_version == self.weight_version()
    }

    // Writing.

    /// Takes the first `hit_tokens` (a multiple of the block size) as hits and slots for `num_tokens`
    /// more, all or none. Returns the hit tokens really taken: the longest length up to `hit_tokens`
    /// that hits. None when blocks are lacking, and then nothing has changed.
    pub fn commit_prefix_plan(
        &self,
        sequence: &mut Sequence,
        hit_tokens: usize,
        num_tokens: usize,
    ) -> Result<Option<usize>, CacheError> {
        self.commit_in_chunks(sequence, hit_tokens, num_tokens, num_tokens)
    }

    /// [`Self::commit_prefix_plan`] of a prompt that is computed `chunk` tokens at a time: groups that do
    /// not need the whole prefix get slots for the first chunk alone, and for the next ones by
    /// [`Self::ensure_slots`].
    pub fn commit_in_chunks(
        &self,
        sequence: &mut Sequence,
        hit_tokens: usize,
        num_tokens: usize,
        chunk: usize,
    ) -> Result<Option<usize>, CacheError> {
        self.check_owner(sequence, "sequence".into())?;
        if sequence.is_committed() {
            return Err(fault("sequence", SequenceFault::Committed));
        }
        self.check_plan(sequence, hit_tokens, num_tokens, chunk)?;
        // Read before the blocks are taken: after a clear in between, they are refused at registration.
        // Read later, they would be registered in an epoch that their hits may not belong to.
        let epoch = self.store.epoch();
        self.refresh(sequence);
        let hit_blocks = hit_tokens / self.block_size();
        let near = chunk.min(num_tokens);
        let new_blocks = NewBlocks {
            whole: num_tokens.div_ceil(self.block_size()),
            near: near.div_ceil(self.block_size()),
        };
        let Some(Taken { hits, tables }) =
            self.take(&sequence.hashes()[..hit_blocks], new_blocks)?
        else {
            return Ok(None);
        };
        let reuse = self.store.reuse_queue();
        let turn = reuse.map_or(Turn::FIRST, |reuse| reuse.begin(sequence.names()));
        let hit_tokens = hits * self.block_size();
        let any_whole = self.hash_config.groups.any_whole();
        let all_whole = self.hash_config.groups.all_whole();
        sequence.holding = Some(Holding {
            epoch,
            tables,
            num_slots: hit_tokens + if any_whole { num_tokens } else { near },
            num_ready: hit_tokens + if all_whole { num_tokens } else { near },
            num_hits: hits,
            num_filled: hit_tokens,
            num_published: hits,
            turn,
            num_prompt: sequence.hashes().len(),
        });
        self.count_query(sequence.num_tokens(), hit_tokens);
        Ok(Some(hit_tokens))
    }

    fn check_plan(
        &self,
        sequence: &Sequence,
        hit_tokens: usize,
        num_tokens: usize,
        chunk: usize,
    ) -> Result<(), CacheError> {
        let size = self.block_size();
        let full = sequence.num_tokens() / size * size;
        if !hit_tokens.is_multiple_of(size) || hit_tokens > full {
            let reason =
                format!("must be a multiple of {size} (block_size) up to {full}, not {hit_tokens}");
            return Err(InvalidArgument::new("hit_tokens", reason).into());
        }
        if hit_tokens == 0 && num_tokens == 0 {
            return Err(InvalidArgument::new("num_tokens", "must be at least 1").into());
        }
        if chunk == 0 && num_tokens > 0 {
            return Err(InvalidArgument::new("chunk", "must be at least 1").into());
        }
        self.check_num_slots("num_tokens".into(), num_tokens)
    }

    /// Fails for more tokens than any pool has slots.
    fn check_num_slots(&self, argument: Argument, count: usize) -> Result<(), CacheError> {
        let most = MAX_BLOCKS * self.block_size();
        if count <= most {
            return Ok(());
        }
        let reason = format!("must be at most {most}, not {count}");
        Err(InvalidArgument::new(argument, reason).into())
    }

    /// Takes the blocks that the longest hit within `hashes` needs, and new blocks; None when blocks are
    /// lacking.
    fn take(&self, hashes: &[BlockHash], new: NewBlocks) -> Result<Option<Taken>, Misuse> {
        if self.hash_config.groups.is_one_full() {
            return Ok(self.take_for_one(hashes, new.whole));
        }
        let mut most = hashes;
        loop {
            let length = self.longest_hit(most);
            let keys = self.needed_keys(&hashes[..length]);
            let specs = self.hash_config.groups.specs();
            let num_new = specs.iter().map(|&spec| new.of(spec)).sum();
            let mut blocks = Vec::new();
            let Ok(taken) = self
                .store
                .commit(keys.iter().copied(), num_new, &mut blocks)
            else {
                return Ok(None);
            };
            let Some(gone) = keys.get(taken) else {
                let tables = self.split(&blocks, length, new);
                return Ok(Some(Taken {
                    hits: length,
                    tables,
                }));
            };
            // Another thread took it since it was looked up. No length beyond that block hits, as each
            // that is longer than another needs nothing before what the other needs.
            self.store.release(&blocks)?;
            let position = hashes.iter().position(|hash| *hash == gone.hash);
            most = &hashes[..position.unwrap_or(0)];
        }
    }

    /// The common case: one group, which needs the whole prefix.
    fn take_for_one(&self, hashes: &[BlockHash], num_new: usize) -> Option<Taken> {
        let likely_new = self.store.num_free().min(num_new);
        let mut blocks = Vec::with_capacity(hashes.len() + likely_new);
        let key = |&hash| BlockKey::new(hash, GroupId::default());
        let outcome = self
            .store
            .commit(hashes.iter().map(key), num_new, &mut blocks);
        let hits = outcome.ok()?;
        let tables = vec![Table { blocks, first: 0 }];
        Some(Taken { hits, tables })
    }

    /// The blocks that a hit of these hashes needs, group by group.
    fn needed_keys(&self, hashes: &[BlockHash]) -> Vec<BlockKey> {
        let groups = self.hash_config.groups.each();
        groups
            .flat_map(|(group, spec)| {
                let needed = &hashes[self.first_needed(spec, hashes.len())..];
                needed.iter().map(move |&hash| BlockKey::new(hash, group))
            })
            .collect()
    }

    /// The first block that a hit of `length` blocks needs.
    fn first_needed(&self, spec: GroupSpec, length: usize) -> usize {
        spec.first_needed(length * self.block_size(), self.block_size())
    }

    /// The table of each group, out of the hits that each needs and then the new blocks of each.
    fn split(&self, blocks: &[BlockId], length: usize, new: NewBlocks) -> Vec<Table> {
        let specs = self.hash_config.groups.specs();
        let num_hits = |spec| length - self.first_needed(spec, length);
        let all_hits: usize = specs.iter().map(|&spec| num_hits(spec)).sum();
        let (mut hits, mut fresh) = blocks.split_at(all_hits);
        let table = |&spec: &GroupSpec| {
            let first = self.first_needed(spec, length);
            let mut blocks = vec![BlockId::NULL; first];
            for (part, count) in [(&mut hits, length - first), (&mut fresh, new.of(spec))] {
                let (own, rest) = part.split_at(count);
                blocks.extend_from_slice(own);
                *part = rest;
            }
            Table { blocks, first }
        };
        specs.iter().map(table).collect()
    }

    fn count_query(&self, queries: usize, hits: usize) {
        // Relaxed: counters that order nothing.
        self.queries.fetch_add(queries as u64, Ordering::Relaxed);
        self.hits.fetch_add(hits as u64, Ordering::Relaxed);
    }

    /// Gives each sequence `counts[i]` more slots, in order. Returns how many leading sequences got
    /// all of theirs; it stops at the first that could not, which is unchanged as all after it.
    pub fn append_slots(
        &self,
        sequences: &mut [&mut Sequence],
        counts: &[usize],
    ) -> Result<usize, CacheError> {
        self.check_committed(sequences)?;
        check_len("counts", counts.len(), sequences.len())?;
        for (index, &count) in counts.iter().enumerate() {
            let argument = Argument::element("counts", index);
            if count == 0 {
                return Err(InvalidArgument::new(argument, "must be at least 1").into());
            }
            self.check_num_slots(argument, count)?;
        }
        let mut batch = sequences.iter_mut().zip(counts);
        let mut scratch = Vec::new();
        Ok(batch
            .position(|(sequence, &count)| {
                let upto = sequence.num_slots() + count;
                !self.grow(sequence, upto, &mut scratch)
            })
            .unwrap_or(counts.len()))
    }

    /// Gives each sequence slots in every group for its first `upto[i]` tokens, in order: those of
    /// the next chunk, where [`Self::commit_in_chunks`] gave some groups no more. Returns how many
    /// leading sequences have theirs; it stops at the first that could not get them, which is
    /// unchanged as all after it.
    pub fn ensure_slots(
        &self,
        sequences: &mut [&mut Sequence],
        upto: &[usize],
    ) -> Result<usize, CacheError> {
        self.check_committed(sequences)?;
        check_len("upto", upto.len(), sequences.len())?;
        for (index, &upto) in upto.iter().enumerate() {
            self.check_num_slots(Argument::element("upto", index), upto)?;
        }
        let mut batch = sequences.iter_mut().zip(upto);
        let mut scratch = Vec::new();
        Ok(batch
            .position(|(sequence, &upto)| !self.grow(sequence, upto, &mut scratch))
            .unwrap_or(upto.len()))
    }

    /// Gives a committed sequence slots for its first `upto` tokens in every group; false when blocks are
    /// lacking. `scratch` is empty before and after.
    fn grow(&self, sequence: &mut Sequence, upto: usize, scratch: &mut Vec<BlockId>) -> bool {
        let Some(holding) = &mut sequence.holding else {
            return false;
        };
        let blocks = upto.div_ceil(self.block_size());
        if !self.grow_tables(&mut holding.tables, blocks, scratch) {
            return false;
        }
        holding.num_slots = holding.num_slots.max(upto);
        holding.num_ready = holding.num_ready.max(upto);
        true
    }

    /// Allocates blocks until each table has `blocks` of them; false when they are lacking.
    fn grow_tables(&self, tables: &mut [Table], blocks: usize, scratch: &mut Vec<BlockId>) -> bool {
        let missing = |table: &Table| blocks.saturating_sub(table.blocks.len());
        if let [table] = tables {
            let count = missing(table);
            return count == 0 || self.store.allocate(count, &mut table.blocks).is_ok();
        }
        let count = tables.iter().map(missing).sum();
        if count > 0 && self.store.allocate(count, scratch).is_err() {
            return false;
        }
        let mut new = scratch.drain(..);
        for table in tables {
            let count = missing(table);
            table.blocks.extend(new.by_ref().take(count));
        }
        true
    }

    /// Adds one token to each sequence.
    pub fn append_tokens(
        &self,
        sequences: &mut [&mut Sequence],
        tokens: &[u32],
    ) -> Result<(), CacheError> {
        self.check_owners(sequences)?;
        check_len("tokens", tokens.len(), sequences.len())?;
        for (sequence, token) in sequences.iter_mut().zip(tokens) {
            sequence.extend(std::slice::from_ref(token));
        }
        Ok(())
    }

    /// Says that the KV of the first `upto[i]` tokens is there, and publishes the full blocks among
    /// them. Marking again, or less, changes nothing. Returns the twins among the blocks published.
    ///
    /// A sequence that was committed before the index was last cleared publishes nothing.
    pub fn mark_blocks_filled(
        &self,
        sequences: &mut [&mut Sequence],
        upto: &[usize],
    ) -> Result<Vec<Twin>, CacheError> {
        self.check_committed(sequences)?;
        check_len("upto", upto.len(), sequences.len())?;
        for (index, (sequence, &upto)) in sequences.iter().zip(upto).enumerate() {
            let most = sequence.num_ready_slots().min(sequence.num_tokens());
            if upto > most {
                let reason = format!("must be at most {most}, the tokens with a slot, not {upto}");
                return Err(InvalidArgument::new(Argument::element("upto", index), reason).into());
            }
        }
        let mut twins = Vec::new();
        self.store.begin_registrations();
        for (index, (sequence, &upto)) in sequences.iter_mut().zip(upto).enumerate() {
            self.publish(sequence, index, upto, &mut twins)?;
        }
        Ok(twins)
    }

    fn publish(
        &self,
        sequence: &mut Sequence,
        number: usize,
        upto: usize,
        twins: &mut Vec<Twin>,
    ) -> Result<(), Misuse> {
        let Some(holding) = &mut sequence.holding else {
            return Ok(());
        };
        let full = upto / self.block_size();
        let hashes = &sequence.hashes.as_slice()[..full];
        // Blocks of a scope are not told of: whoever knows their hashes can find out what they hold.
        let is_open = sequence.scope == Scope::default();
        let journal = self.store.journal().filter(|_| is_open);
        let mut new = Vec::new();
        let outcome = self.register_all(holding, hashes, |group, index, outcome| {
            if let Registration::Twin(holder) = outcome {
                twins.push(Twin {
                    sequence: number,
                    group,
                    index,
                    holder,
                });
            } else if journal.is_some() && outcome == Registration::New {
                new.push((group, index));
            }
        });
        if let Some(journal) = journal {
            self.tell_stored(journal, new, hashes, &sequence.tokens);
        }
        outcome?;
        holding.num_published = holding.num_published.max(full);
        holding.num_filled = holding.num_filled.max(upto);
        Ok(())
    }

    /// Registers the blocks of these hashes that were not published yet; calls `done` with group, index and
    /// outcome of each.
    #[inline]
    fn register_all(
        &self,
        holding: &Holding,
        hashes: &[BlockHash],
        mut done: impl FnMut(GroupId, usize, Registration),
    ) -> Result<(), Misuse> {
        for index in holding.num_published..hashes.len() {
            if let Some(&soon) = hashes.get(index + EXPECT_AHEAD) {
                for (group, _) in self.hash_config.groups.each() {
                    self.store.expect(&BlockKey::new(soon, group));
                }
            }
            for (table, (group, _)) in holding.tables.iter().zip(self.hash_config.groups.each()) {
                if index < table.first {
                    continue;
                }
                let key = BlockKey::new(hashes[index], group);
                let outcome = self
                    .store
                    .register(table.blocks[index], key, holding.epoch)?;
                done(group, index, outcome);
            }
        }
        Ok(())
    }

    /// Tells of blocks of a sequence, by group and index, that can be found from now on.
    fn tell_stored(
        &self,
        journal: &Journal,
        mut blocks: Vec<(GroupId, usize)>,
        hashes: &[BlockHash],
        tokens: &[u32],
    ) {
        blocks.sort_unstable();
        for run in blocks.chunk_by(|one, next| one.0 == next.0 && one.1 + 1 == next.1) {
            let (group, first) = run[0];
            let range = first..first + run.len();
            journal.stored(group, range, hashes, tokens, self.block_size());
        }
    }

    /// Swaps a published block of a sequence for `block`, its twin that hits, and gives the own one up,
    /// which loses its content unless others hold it.
    pub fn replace_block(
        &self,
        sequence: &mut Sequence,
        group: GroupId,
        index: usize,
        block: BlockId,
    ) -> Result<(), CacheError> {
        self.check_owner(sequence, "sequence".into())?;
        let key = self.published_key(sequence, group, index)?;
        let mut taken = Vec::with_capacity(1);
        let hit = self
            .store
            .commit(iter::once(key), 0, &mut taken)
            .unwrap_or(0)
            == 1;
        if !hit || taken[0] != block {
            self.store.release(&taken)?;
            let reason = format!("must be the block that hits for this content, not {block}");
            return Err(InvalidArgument::new("block", reason).into());
        }
        if let Some(holding) = &mut sequence.holding {
            let table = &mut holding.tables[group.index()];
            std::mem::swap(&mut table.blocks[index], &mut taken[0]);
        }
        // A copy that nobody needs would push out what somebody does.
        self.store.release_unneeded(&taken)?;
        Ok(())
    }

    fn published_key(
        &self,
        sequence: &Sequence,
        group: GroupId,
        index: usize,
    ) -> Result<BlockKey, CacheError> {
        let Some(holding) = &sequence.holding else {
            return Err(fault("sequence", SequenceFault::NotCommitted));
        };
        self.check_group(group)?;
        if index >= holding.num_published {
            let published = holding.num_published;
            let reason = format!("must be below {published}, the blocks published, not {index}");
            return Err(InvalidArgument::new("index", reason).into());
        }
        let first = holding.tables[group.index()].first;
        if index < first {
            let reason = format!("must be at least {first}, the first block held, not {index}");
            return Err(InvalidArgument::new("index", reason).into());
        }
        Ok(BlockKey::new(sequence.hashes()[index], group))
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

    /// Gives all blocks of each sequence back, the tail first, so that it is evicted before the head.
    pub fn release(&self, sequences: &mut [&mut Sequence]) -> Result<(), CacheError> {
        self.check_committed(sequences)?;
        for sequence in sequences {
            if let Some(holding) = sequence.holding.take() {
                match self.store.reuse_queue() {
                    None => self.release_all(holding)?,
                    Some(reuse) => self.release_to_queues(holding, sequence.names(), reuse)?,
                }
            }
        }
        Ok(())
    }

    /// [`Self::release`] of sequences that may have hints, which act before it.
    pub fn release_with_hints(
        &self,
        table: &mut RetentionTable,
        sequences: &mut [&mut Sequence],
    ) -> Result<(), CacheError> {
        self.check_committed(sequences)?;
        for sequence in &*sequences {
            table.keep(&self.store, sequence);
        }
        self.release(sequences)
    }

    fn release_all(&self, holding: Holding) -> Result<(), Misuse> {
        for table in holding.tables {
            self.store.release(&table.into_held_from_the_end())?;
        }
        Ok(())
    }

    /// Gives each block to the queue that the policy has for it.
    fn release_to_queues(
        &self,
        holding: Holding,
        names: &[BlockHash],
        reuse: &ReuseQueue,
    ) -> Result<(), Misuse> {
        let names = &names[..holding.num_published];
        let shared = reuse.count_shared(names);
        for table in holding.tables {
            let first = table.first;
            let mut tail = table.into_held_from_the_end();
            let head = tail.split_off(tail.len() - shared.saturating_sub(first));
            self.store.release_to(&tail, Queue::of_turn(holding.turn))?;
            self.store.release_to(&head, Queue::SHARED)?;
        }
        reuse.end(names, holding.turn, holding.num_prompt, shared);
        Ok(())
    }

    /// Drops the blocks that no token from `upto[i]` on needs, where the tokens before are computed and
    /// their full blocks published. The null block stands in their places. Returns how many there were.
    ///
    /// The [`Retention`](crate::retention::Retention) of a sequence says which of them are evicted
    /// first, which as others are, and which are pinned. What others hold, and what was a hit, is as others are
    /// in any case.
    pub fn drop_unneeded(
        &self,
        sequences: &mut [&mut Sequence],
        upto: &[usize],
    ) -> Result<usize, CacheError> {
        self.check_committed(sequences)?;
        check_len("upto", upto.len(), sequences.len())?;
        for (index, (sequence, &upto)) in sequences.iter().zip(upto).enumerate() {
            let most = sequence.num_ready_slots();
            if upto > most {
                let reason = format!("must be at most {most}, its slots, not {upto}");
                return Err(InvalidArgument::new(Argument::element("upto", index), reason).into());
            }
        }
        let mut dropped = Dropped::default();
        let mut count = 0;
        for (sequence, &upto) in sequences.iter_mut().zip(upto) {
            let Sequence {
                holding, anchors, ..
            } = &mut **sequence;
            let Some(holding) = holding else { continue };
            let specs = self.hash_config.groups.specs();
            for (table, &spec) in holding.tables.iter_mut().zip(specs) {
                let end = anchors.first_held(spec, upto, self.block_size());
                if table.first < end {
                    count += end - table.first;
                    dropped.sort(table, end, |index| match index < holding.num_hits {
                        true => anchors.fate(spec, index, self.block_size()).max(Fate::Kept),
                        false => anchors.fate(spec, index, self.block_size()),
                    });
                    self.give_up(&mut dropped)?;
                }
            }
        }
        Ok(count)
    }

    fn give_up(&self, dropped: &mut Dropped) -> Result<(), Misuse> {
        if !dropped.pinned.is_empty() {
            self.store.pin(&dropped.pinned)?;
        }
        self.store.release(&dropped.kept)?;
        self.store.release_unneeded(&dropped.unneeded)?;
        dropped.clear();
        Ok(())
    }

    /// Pins what the sequences' anchors need, as far as it was published and is held; the end of what was
    /// published is an anchor too. To be called before the release of a request that ended well.
    /// Returns how many pins are new.
    pub fn pin_anchors(&self, sequences: &[&mut Sequence]) -> Result<usize, CacheError> {
        self.check_committed(sequences)?;
        let mut pinned = 0;
        let size = self.block_size();
        for sequence in sequences {
            let Some(holding) = &sequence.holding else {
                continue;
            };
            let anchors = &sequence.anchors;
            let lengths: Vec<usize> = anchors.pinned_upto(holding.num_published, size).collect();
            for (table, &spec) in holding.tables.iter().zip(self.hash_config.groups.specs()) {
                let own = match spec.needs_whole_prefix() {
                    // The last anchor's blocks are those of all.
                    true if anchors.pins_prefix() => &lengths[lengths.len().saturating_sub(1)..],
                    true => &[],
                    false => &lengths[..],
                };
                for &length in own {
                    let first = spec.first_kept(length, size).max(table.first);
                    if first < length {
                        pinned += self.store.pin(&table.blocks[first..length])?;
                    }
                }
            }
        }
        Ok(pinned)
    }

    /// The most blocks that a sequence of `num_tokens` holds at once: see
    /// [`Groups::most_blocks`](crate::groups::Groups::most_blocks).
    pub fn most_blocks(&self, num_tokens: usize, chunk: usize) -> usize {
        let groups = &self.hash_config.groups;
        groups.most_blocks(num_tokens, chunk, self.block_size())
    }

    // Invalidation.

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

    // The pinned tier.

    /// Pins the blocks that the longest hit within the first `num_tokens` tokens needs, whether the
    /// sequence holds them or not. Returns how many pins are new.
    pub fn pin(&self, sequence: &mut Sequence, num_tokens: usize) -> Result<usize, CacheError> {
        self.check_owner(sequence, "sequence".into())?;
        self.refresh(sequence);
        let full = num_tokens.min(sequence.num_tokens()) / self.block_size();
        let Some(Taken { tables, .. }) = self.take(&sequence.hashes()[..full], NewBlocks::NONE)?
        else {
            return Ok(0);
        };
        // They are held meanwhile, so that no other thread recycles a block after it was found.
        let mut pinned = 0;
        for table in &tables {
            pinned += self.store.pin(&table.blocks[table.first..])?;
        }
        for table in tables {
            self.store.release(&table.into_held_from_the_end())?;
        }
        Ok(pinned)
    }

    /// Takes the pins off the sequence's cached blocks. Returns how many were pinned.
    pub fn unpin(&self, sequence: &mut Sequence) -> Result<usize, CacheError> {
        self.check_owner(sequence, "sequence".into())?;
        self.refresh(sequence);
        let mut unpinned = 0;
        for (group, _) in self.hash_config.groups.each() {
            let keys = sequence.hashes().iter();
            let keys = keys.map(|&hash| BlockKey::new(hash, group));
            // Of all blocks, as pinned anchors may stand anywhere.
            let cached: Vec<BlockKey> = keys.filter(|&key| self.is_hit(key)).collect();
            let mut blocks = Vec::with_capacity(cached.len());
            // Without new blocks it takes what it can, and only free hits need to be free.
            if self
                .store
                .commit(cached.into_iter(), 0, &mut blocks)
                .is_ok()
            {
                unpinned += self.store.unpin(&blocks)?;
                blocks.reverse();
                self.store.release(&blocks)?;
            }
        }
        Ok(unpinned)
    }

    /// Moves the oldest `count` free pinned blocks to the regular tier. Returns how many there were.
    pub fn demote(&self, count: usize) -> usize {
        self.store.demote(count)
    }

    // Size.

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

    // Looking.

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

    // Checks.

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

/// Blocks that a sequence drops, by what becomes of them, those of its end first.
#[derive(Default)]
struct Dropped {
    pinned: Vec<BlockId>,
    /// The pinned ones too.
    kept: Vec<BlockId>,
    unneeded: Vec<BlockId>,
}

impl Dropped {
    /// Takes the blocks before `end` out of a table.
    fn sort(&mut self, table: &mut Table, end: usize, fate: impl Fn(usize) -> Fate) {
        for index in (table.first..end).rev() {
            let block = std::mem::replace(&mut table.blocks[index], BlockId::NULL);
            let fate = fate(index);
            if fate == Fate::Pinned {
                self.pinned.push(block);
            }
            if fate == Fate::Unneeded {
                self.unneeded.push(block);
            } else {
                self.kept.push(block);
            }
        }
        table.first = end;
    }

    fn clear(&mut self) {
        self.pinned.clear();
        self.kept.clear();
        self.unneeded.clear();
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
