//! `PrefixCache`: sequences over a block pool, and the published primitives.
//!
//! A request's life: `new_sequence`, `count_prefix_hits`, `commit_prefix_plan` (hits and new blocks in
//! one all-or-nothing step), then `append_slots` and `mark_blocks_filled` as it is computed, and
//! `release`. A released sequence can be committed again, which is how a preempted one resumes.
//!
//! Every method checks all its arguments before it changes anything.

use std::iter;
use std::sync::Arc;

use crate::error::{
    Argument, Broken, CacheError, InvalidArgument, Misuse, ResizeError, SequenceFault,
};
use crate::hash::{Extras, HashConfig, PrefixHashes, Scope};
use crate::id::{BlockHash, BlockId, GroupId, MAX_BLOCKS};
use crate::sequence::{self, BlockHashes, Holding, Sequence};
use crate::store::{BlockKey, BlockStore, Registration};
use crate::sync::{AtomicU64, Ordering};

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
    /// Leading blocks that hit, in every group.
    hits: usize,
    /// The block table of each group, hits first.
    tables: Vec<Vec<BlockId>>,
}

/// Lifetime counts of the cache, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Tokens of the sequences that were committed.
    pub queries: u64,
    /// Tokens of them that were hits.
    pub hits: u64,
}

/// A prefix cache over a pool `S`; as safe to share between threads as that pool is.
#[derive(Debug)]
pub struct PrefixCache<S> {
    store: S,
    hash_config: Arc<HashConfig>,
    weight_version: AtomicU64,
    queries: AtomicU64,
    hits: AtomicU64,
}

impl<S: BlockStore> PrefixCache<S> {
    /// A cache over an unused pool.
    pub fn new(hash_config: HashConfig, store: S) -> Result<Self, InvalidArgument> {
        hash_config.check()?;
        Ok(Self {
            store,
            hash_config: Arc::new(hash_config),
            weight_version: AtomicU64::new(0),
            queries: AtomicU64::new(0),
            hits: AtomicU64::new(0),
        })
    }

    /// The pool below.
    pub fn store(&self) -> &S {
        &self.store
    }

    /// Tokens in a block.
    pub fn block_size(&self) -> usize {
        self.hash_config.block_size
    }

    fn num_groups(&self) -> usize {
        self.hash_config.groups.count()
    }

    // Hashing.

    /// The hash before the first block under the current weights, from which others can compute the
    /// hashes that this cache has.
    pub fn root_hash(&self, scope: &Scope) -> BlockHash {
        sequence::root(&self.hash_config, scope, self.weight_version())
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
        Sequence::new(config, scope, self.weight_version(), tokens, extras)
    }

    // Reading.

    /// How many leading tokens are cached, in full blocks. Changes nothing.
    pub fn probe(&self, hashes: &BlockHashes) -> usize {
        self.count_leading_hits(hashes.as_slice()) * self.block_size()
    }

    /// [`PrefixCache::probe`] for a sequence, which is hashed anew if the weights have changed.
    pub fn count_prefix_hits(&self, sequence: &mut Sequence) -> Result<usize, CacheError> {
        self.check_owner(sequence, "sequence".into())?;
        self.refresh(sequence);
        Ok(self.count_leading_hits(sequence.hashes()) * self.block_size())
    }

    /// Leading blocks that every group has.
    fn count_leading_hits(&self, hashes: &[BlockHash]) -> usize {
        if self.keeps_prefixes() {
            return hashes.partition_point(|&hash| self.is_hit(hash));
        }
        let keys = self.hash_config.groups.keys(hashes);
        self.store.count_leading(keys) / self.num_groups()
    }

    /// Whether a block hits only if all blocks before it do, so that a binary search finds the last hit.
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
    /// 5. A shrinking pool loses blocks by their ids, and a full ring those released last: both end the
    ///    order. A clear takes everything, and the order is whole again.
    ///
    /// A commit looks at every block again: beside a writer a count may be out of date in any case.
    fn keeps_prefixes(&self) -> bool {
        self.hash_config.groups.need_whole_prefixes() && self.store.evicts_in_order()
    }

    fn is_hit(&self, hash: BlockHash) -> bool {
        self.keys_of(hash)
            .all(|key| self.store.lookup(&key).is_some())
    }

    fn keys_of(&self, hash: BlockHash) -> impl Iterator<Item = BlockKey> {
        self.hash_config
            .groups
            .ids()
            .map(move |group| BlockKey::new(hash, group))
    }

    /// A sequence that holds nothing follows the current weights.
    fn refresh(&self, sequence: &mut Sequence) {
        if !self.hashes_are_current(sequence) {
            sequence.rehash(self.weight_version());
        }
    }

    /// Whether the next call will take the sequence's hashes as they are. If not it hashes all tokens
    /// anew: the weights have changed, and the sequence holds nothing.
    pub fn hashes_are_current(&self, sequence: &Sequence) -> bool {
        sequence.is_committed() || sequence.weight_version == self.weight_version()
    }

    // Writing.

    /// Takes the first `hit_tokens` (a multiple of the block size) as hits and slots for `num_tokens`
    /// more, all or none. Returns the hit tokens really taken, fewer than asked where some are gone
    /// meanwhile, or None when blocks are lacking, and then nothing has changed.
    pub fn commit_prefix_plan(
        &self,
        sequence: &mut Sequence,
        hit_tokens: usize,
        num_tokens: usize,
    ) -> Result<Option<usize>, CacheError> {
        self.check_owner(sequence, "sequence".into())?;
        if sequence.is_committed() {
            return Err(fault("sequence", SequenceFault::Committed));
        }
        self.check_plan(sequence, hit_tokens, num_tokens)?;
        // Read before the blocks are taken: after a clear in between, they are refused at registration.
        // Read later, they would be registered in an epoch that their hits may not belong to.
        let epoch = self.store.epoch();
        self.refresh(sequence);
        let hit_blocks = hit_tokens / self.block_size();
        let new_blocks = num_tokens.div_ceil(self.block_size());
        let Some(Taken { hits, tables }) =
            self.take(&sequence.hashes()[..hit_blocks], new_blocks)?
        else {
            return Ok(None);
        };
        let hit_tokens = hits * self.block_size();
        sequence.holding = Some(Holding {
            epoch,
            tables,
            num_slots: hit_tokens + num_tokens,
            num_filled: hit_tokens,
            num_published: hits,
        });
        self.count_query(sequence.num_tokens(), hit_tokens);
        Ok(Some(hit_tokens))
    }

    fn check_plan(
        &self,
        sequence: &Sequence,
        hit_tokens: usize,
        num_tokens: usize,
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

    /// Takes the blocks that hold `hits` and `new_blocks` more for each group; None when blocks are
    /// lacking.
    fn take(&self, hits: &[BlockHash], new_blocks: usize) -> Result<Option<Taken>, Misuse> {
        let groups = self.num_groups();
        let new = new_blocks * groups;
        let likely_new = self.store.num_free().min(new);
        let mut blocks = Vec::with_capacity(hits.len() * groups + likely_new);
        let outcome = if groups == 1 {
            // The common case without the iterator over groups, which costs a few ns for each key.
            let key = |&hash| BlockKey::new(hash, GroupId::default());
            self.store.commit(hits.iter().map(key), new, &mut blocks)
        } else {
            let keys = self.hash_config.groups.keys(hits);
            self.store.commit(keys, new, &mut blocks)
        };
        let Ok(taken) = outcome else {
            return Ok(None);
        };
        // A position hits where every group has its block: those of the last, if some are gone, go back.
        let partial = taken - taken % groups..taken;
        self.store.release(&blocks[partial.clone()])?;
        blocks.drain(partial);
        let hits = taken / groups;
        if groups == 1 {
            let tables = vec![blocks];
            return Ok(Some(Taken { hits, tables }));
        }
        let (hit, new) = blocks.split_at(hits * groups);
        let table = |group: usize| {
            let own_hits = hit.iter().skip(group).step_by(groups);
            let own_new = &new[group * new_blocks..][..new_blocks];
            own_hits.chain(own_new).copied().collect()
        };
        let tables = (0..groups).map(table).collect();
        Ok(Some(Taken { hits, tables }))
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
        Ok(batch
            .position(|(sequence, &count)| !self.append(sequence, count))
            .unwrap_or(counts.len()))
    }

    /// Gives a committed sequence `count` more slots; false when blocks are lacking.
    fn append(&self, sequence: &mut Sequence, count: usize) -> bool {
        let Some(holding) = &mut sequence.holding else {
            return false;
        };
        let num_slots = holding.num_slots + count;
        let missing = num_slots.div_ceil(self.block_size()) - holding.tables[0].len();
        if missing > 0 && !self.append_blocks(&mut holding.tables, missing) {
            return false;
        }
        holding.num_slots = num_slots;
        true
    }

    /// Allocates `count` blocks for each table; false when blocks are lacking.
    fn append_blocks(&self, tables: &mut [Vec<BlockId>], count: usize) -> bool {
        if let [table] = tables {
            return self.store.allocate(count, table).is_ok();
        }
        let mut blocks = Vec::new();
        if self
            .store
            .allocate(count * tables.len(), &mut blocks)
            .is_err()
        {
            return false;
        }
        for (table, new) in tables.iter_mut().zip(blocks.chunks_exact(count)) {
            table.extend_from_slice(new);
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
            let most = sequence.num_slots().min(sequence.num_tokens());
            if upto > most {
                let reason = format!("must be at most {most}, the tokens with a slot, not {upto}");
                return Err(InvalidArgument::new(Argument::element("upto", index), reason).into());
            }
        }
        let mut twins = Vec::new();
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
        for index in holding.num_published..full {
            if let Some(&soon) = hashes.get(index + EXPECT_AHEAD) {
                self.keys_of(soon).for_each(|key| self.store.expect(&key));
            }
            let hash = hashes[index];
            for (table, key) in holding.tables.iter().zip(self.keys_of(hash)) {
                let outcome = self.store.register(table[index], key, holding.epoch)?;
                if let Registration::Twin(holder) = outcome {
                    twins.push(Twin {
                        sequence: number,
                        group: key.group,
                        index,
                        holder,
                    });
                }
            }
        }
        holding.num_published = holding.num_published.max(full);
        holding.num_filled = holding.num_filled.max(upto);
        Ok(())
    }

    /// Swaps a published block of a sequence for `block`, its twin that hits, and releases the own one.
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
            std::mem::swap(&mut holding.tables[group.index()][index], &mut taken[0]);
        }
        self.store.release(&taken)?;
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
        Ok(BlockKey::new(sequence.hashes()[index], group))
    }

    /// Fails unless the cache has this group.
    pub(crate) fn check_group(&self, group: GroupId) -> Result<(), InvalidArgument> {
        let groups = self.num_groups();
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
                for mut table in holding.tables {
                    table.reverse();
                    self.store.release(&table)?;
                }
            }
        }
        Ok(())
    }

    // Invalidation.

    /// Forgets everything cached, in constant time. Sequences keep their blocks and publish no more.
    pub fn clear_cache_index(&self) {
        self.store.clear_index();
    }

    /// Forgets everything cached, and hashes under the next version of the weights from now on.
    pub fn new_weight_version(&self) -> u64 {
        // AcqRel, and before the clear: a thread that sees the new epoch sees the new version too.
        let version = self.weight_version.fetch_add(1, Ordering::AcqRel) + 1;
        self.store.clear_index();
        version
    }

    /// The version of the weights, which stands in every hash; 0 at first.
    pub fn weight_version(&self) -> u64 {
        // Acquire: pairs with the step in `new_weight_version`.
        self.weight_version.load(Ordering::Acquire)
    }

    // The pinned tier.

    /// Pins the cached full blocks among the first `num_tokens` tokens, whether the sequence holds
    /// them or not. Returns how many blocks were not pinned before.
    pub fn pin(&self, sequence: &mut Sequence, num_tokens: usize) -> Result<usize, CacheError> {
        self.check_owner(sequence, "sequence".into())?;
        self.refresh(sequence);
        let full = num_tokens.min(sequence.num_tokens()) / self.block_size();
        self.with_hits(&sequence.hashes()[..full], |blocks| self.store.pin(blocks))
    }

    /// Takes the pins off the sequence's cached blocks. Returns how many were pinned.
    pub fn unpin(&self, sequence: &mut Sequence) -> Result<usize, CacheError> {
        self.check_owner(sequence, "sequence".into())?;
        self.refresh(sequence);
        self.with_hits(sequence.hashes(), |blocks| self.store.unpin(blocks))
    }

    /// Calls `act`, which sets pins, on the leading blocks that hit. They are held meanwhile, so that no
    /// other thread recycles a block after it was found and before it is pinned.
    fn with_hits(
        &self,
        hashes: &[BlockHash],
        act: impl FnOnce(&[BlockId]) -> Result<usize, Misuse>,
    ) -> Result<usize, CacheError> {
        let Some(Taken { tables, .. }) = self.take(hashes, 0)? else {
            return Ok(0);
        };
        let mut blocks: Vec<BlockId> = tables.into_iter().flatten().collect();
        let changed = act(&blocks)?;
        blocks.reverse();
        self.store.release(&blocks)?;
        Ok(changed)
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

    // Checks.

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
