//! Committing: taking hits and new blocks, and more of them as a sequence grows.

use super::{PrefixCache, check_len, fault};
use crate::error::{Argument, CacheError, InvalidArgument, Misuse, SequenceFault, require};
use crate::groups::GroupSpec;
use crate::id::{BlockHash, BlockId, BlockKey, GroupId, MAX_BLOCKS};
use crate::policy::Turn;
use crate::sequence::retention::Fate;
use crate::sequence::{Holding, Sequence, Table};
use crate::store::BlockStore;
use crate::sync::Ordering;

/// A new block in the place of one that a hit needs and the pool does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MissingBlock {
    /// What it is to hold.
    pub key: BlockKey,
    /// Its place in the block table of its group.
    pub index: usize,
    /// The block.
    pub block: BlockId,
}

/// What a commit took from the pool.
pub(super) struct Taken {
    /// Leading blocks that hit: those of them that a group needs.
    pub(super) hits: usize,
    /// The block table of each group, hits first.
    pub(super) tables: Vec<Table>,
    /// Those of the hits that are new blocks, by their places.
    missing: Vec<MissingBlock>,
}

/// The blocks that a commit takes without content.
#[derive(Clone, Copy)]
pub(super) struct NewBlocks {
    /// For each group that needs the whole prefix.
    whole: usize,
    /// For each of the others.
    near: usize,
}

impl NewBlocks {
    pub(super) const NONE: Self = Self { whole: 0, near: 0 };

    /// How much longer the group's table becomes.
    fn of(self, spec: GroupSpec) -> usize {
        if spec.needs_whole_prefix() { self.whole } else { self.near }
    }

    /// The blocks that this takes.
    fn taken_by(self, spec: GroupSpec) -> usize {
        spec.num_new(self.of(spec))
    }
}

impl<S: BlockStore> PrefixCache<S> {
    /// Takes the first `hit_tokens` (a multiple of the block size) as hits and slots for `num_tokens`
    /// more, all or none. Returns the hit tokens really taken: the longest length up to `hit_tokens`
    /// that hits. None when blocks are lacking, and then nothing has changed.
    pub fn commit_prefix_plan(
        &mut self,
        sequence: &mut Sequence,
        hit_tokens: usize,
        num_tokens: usize,
    ) -> Result<Option<usize>, CacheError> {
        self.commit_in_chunks(sequence, hit_tokens, num_tokens, num_tokens)
    }

    /// [`Self::commit_prefix_plan`] of a prompt that is computed `chunk` tokens at a time: groups that do
    /// not need the whole prefix get slots for the first chunk alone, and for the next ones by
    /// [`Self::ensure_slots`]. Of a state they get the block alone where that chunk ends: see
    /// [`Self::keep_snapshots`].
    pub fn commit_in_chunks(
        &mut self,
        sequence: &mut Sequence,
        hit_tokens: usize,
        num_tokens: usize,
        chunk: usize,
    ) -> Result<Option<usize>, CacheError> {
        let missing = self
            .reclaimed(|cache| cache.commit(sequence, hit_tokens, num_tokens, chunk, Self::take))?;
        Ok(missing.map(|_| sequence.num_hits()))
    }

    /// [`Self::commit_in_chunks`] of a hit of which blocks are read from elsewhere: what it needs and does not hit
    /// gets new blocks, which are returned by their places. The caller fills them, and then publishes them by
    /// [`Self::mark_blocks_filled`] as far as all are filled. None when blocks are lacking, and then nothing has
    /// changed.
    pub fn commit_missing(
        &mut self,
        sequence: &mut Sequence,
        hit_tokens: usize,
        num_tokens: usize,
        chunk: usize,
    ) -> Result<Option<Vec<MissingBlock>>, CacheError> {
        self.reclaimed(|cache| {
            cache.commit(sequence, hit_tokens, num_tokens, chunk, Self::take_all)
        })
    }

    /// Lets the sequence hold what `take` gets for the hashes of its hit: see [`Self::commit_missing`].
    fn commit(
        &mut self,
        sequence: &mut Sequence,
        hit_tokens: usize,
        num_tokens: usize,
        chunk: usize,
        take: impl FnOnce(&mut Self, &[BlockHash], NewBlocks) -> Result<Option<Taken>, Misuse>,
    ) -> Result<Option<Vec<MissingBlock>>, CacheError> {
        self.check_owner(sequence, "sequence".into())?;
        if sequence.is_committed() {
            return Err(fault("sequence", SequenceFault::Committed));
        }
        self.check_plan(sequence, hit_tokens, num_tokens, chunk)?;
        // Read before the blocks are taken: after a clear in between, they are refused at registration.
        // Read later, they would be registered in an epoch that their hits may not belong to.
        let epoch = self.store.epoch();
        self.refresh(sequence)?;
        let (size, near) = (self.block_size(), chunk.min(num_tokens));
        let new = NewBlocks { whole: num_tokens.div_ceil(size), near: near.div_ceil(size) };
        let Some(taken) = take(self, &sequence.hashes()[..hit_tokens / size], new)? else {
            return Ok(None);
        };
        let reuse = self.store.reuse_queue();
        let turn = reuse.map_or(Turn::FIRST, |reuse| reuse.begin(sequence.names()));
        // Leading blocks that are there.
        let complete = taken.missing.first().map_or(taken.hits, |one| one.index);
        let hit_tokens = taken.hits * size;
        let any_whole = self.home.config.groups.any_whole();
        let all_whole = self.home.config.groups.all_whole();
        sequence.holding = Some(Holding {
            epoch,
            tables: taken.tables,
            num_slots: hit_tokens + if any_whole { num_tokens } else { near },
            num_ready: hit_tokens + if all_whole { num_tokens } else { near },
            num_hits: taken.hits,
            num_filled: complete * size,
            num_published: complete,
            turn,
            num_prompt: sequence.hashes().len(),
            ends: self.home.ends.place(&sequence.scope),
        });
        self.count_query(sequence.num_tokens(), complete * size);
        let Self { store, hints, .. } = self;
        if let Some(hints) = hints {
            // The TTLs of what it hits begin again.
            hints.note_hits(store, sequence);
        }
        Ok(Some(taken.missing))
    }

    fn check_plan(
        &self,
        sequence: &Sequence,
        hit_tokens: usize,
        num_tokens: usize,
        chunk: usize,
    ) -> Result<(), InvalidArgument> {
        let size = self.block_size();
        let full = sequence.num_tokens() / size * size;
        require(hit_tokens.is_multiple_of(size) && hit_tokens <= full, "hit_tokens", || {
            format!("must be a multiple of {size} (block_size) up to {full}, not {hit_tokens}")
        })?;
        require(hit_tokens > 0 || num_tokens > 0, "num_tokens", || "must be at least 1")?;
        require(chunk > 0 || num_tokens == 0, "chunk", || "must be at least 1")?;
        self.check_num_slots("num_tokens".into(), num_tokens)
    }

    /// Fails for more tokens than any pool has slots.
    pub(super) fn check_num_slots(
        &self,
        argument: Argument,
        count: usize,
    ) -> Result<(), InvalidArgument> {
        let most = MAX_BLOCKS * self.block_size();
        require(count <= most, argument, || format!("must be at most {most}, not {count}"))
    }

    /// Takes the blocks that the longest hit within `hashes` needs, and new blocks; None when blocks are
    /// lacking.
    pub(super) fn take(
        &mut self,
        hashes: &[BlockHash],
        new: NewBlocks,
    ) -> Result<Option<Taken>, Misuse> {
        if self.home.config.groups.is_one_full() {
            return Ok(self.take_for_one(hashes, new.whole));
        }
        let mut most = hashes;
        loop {
            let length = self.longest_hit(most);
            let keys = self.needed_keys(&hashes[..length]);
            let specs = self.home.config.groups.specs();
            let num_new = specs.iter().map(|&spec| new.taken_by(spec)).sum();
            let mut blocks = Vec::new();
            let Ok(taken) = self.store.commit(keys.iter().copied(), num_new, &mut blocks) else {
                return Ok(None);
            };
            let Some(gone) = keys.get(taken) else {
                let all = vec![true; keys.len()];
                return Ok(Some(self.split(&hashes[..length], &all, &blocks, new)));
            };
            // Another thread took it since it was looked up. No length beyond that block hits, as each
            // that is longer than another needs nothing before what the other needs.
            self.store.release(&blocks)?;
            let position = hashes.iter().position(|hash| *hash == gone.hash);
            most = &hashes[..position.unwrap_or(0)];
        }
    }

    /// Takes the blocks that a hit of all these `hashes` needs, and new blocks, some of them in the places of those
    /// that do not hit; None when blocks are lacking.
    fn take_all(&mut self, hashes: &[BlockHash], new: NewBlocks) -> Result<Option<Taken>, Misuse> {
        let keys = self.needed_keys(hashes);
        loop {
            let are_hits: Vec<bool> = keys.iter().map(|&key| self.is_hit(key)).collect();
            let hits = keys.iter().zip(&are_hits).filter(|(_, is_hit)| **is_hit);
            let hits: Vec<BlockKey> = hits.map(|(&key, _)| key).collect();
            let specs = self.home.config.groups.specs();
            let num_new: usize = specs.iter().map(|&spec| new.taken_by(spec)).sum();
            let num_missing = keys.len() - hits.len();
            let mut blocks = Vec::new();
            let taken = self.store.commit(hits.iter().copied(), num_missing + num_new, &mut blocks);
            let Ok(taken) = taken else { return Ok(None) };
            if taken == hits.len() {
                return Ok(Some(self.split(hashes, &are_hits, &blocks, new)));
            }
            // One of them is gone since it was looked up: it is missing too.
            self.store.release(&blocks)?;
        }
    }

    /// The common case: one group, which needs the whole prefix.
    fn take_for_one(&mut self, hashes: &[BlockHash], num_new: usize) -> Option<Taken> {
        let likely_new = self.store.num_free().min(num_new);
        let mut blocks = Vec::with_capacity(hashes.len() + likely_new);
        let key = |&hash| BlockKey::new(hash, GroupId::default());
        let outcome = self.store.commit(hashes.iter().map(key), num_new, &mut blocks);
        let hits = outcome.ok()?;
        let tables = vec![Table { blocks, first: 0 }];
        Some(Taken { hits, tables, missing: Vec::new() })
    }

    /// The tables of a hit of all these `hashes`: of `blocks`, those in the needed places that `are_hits` come
    /// first, group by group, then the new ones.
    fn split(
        &self,
        hashes: &[BlockHash],
        are_hits: &[bool],
        blocks: &[BlockId],
        new: NewBlocks,
    ) -> Taken {
        let num_hits = are_hits.iter().filter(|is_hit| **is_hit).count();
        let (hits, fresh) = blocks.split_at(num_hits);
        let (mut hits, mut fresh) = (hits.iter().copied(), fresh.iter().copied());
        let (mut are_hits, mut missing) = (are_hits.iter(), Vec::new());
        let mut tables = Vec::new();
        for (group, spec) in self.home.config.groups.each() {
            let first = self.first_needed(spec, hashes.len());
            let mut blocks = vec![BlockId::NULL; first];
            for (index, &hash) in hashes.iter().enumerate().skip(first) {
                let is_hit = are_hits.next() == Some(&true);
                let from: &mut dyn Iterator<Item = BlockId> =
                    if is_hit { &mut hits } else { &mut fresh };
                let block = from.next().unwrap_or(BlockId::NULL);
                if !is_hit {
                    let key = BlockKey::new(hash, group);
                    missing.push(MissingBlock { key, index, block });
                }
                blocks.push(block);
            }
            let mut table = Table { blocks, first };
            table.extend(spec, new.of(spec), &mut fresh);
            tables.push(table);
        }
        missing.sort_by_key(|one| one.index);
        Taken { hits: hashes.len(), tables, missing }
    }

    pub(super) fn count_query(&self, queries: usize, hits: usize) {
        // Relaxed: counters that order nothing.
        self.home.queries.fetch_add(queries as u64, Ordering::Relaxed);
        self.home.hits.fetch_add(hits as u64, Ordering::Relaxed);
    }

    /// Gives each sequence `counts[i]` more slots, in order. Returns how many leading sequences got
    /// all of theirs; it stops at the first that could not, which is unchanged as all after it.
    pub fn append_slots(
        &mut self,
        sequences: &mut [&mut Sequence],
        counts: &[usize],
    ) -> Result<usize, CacheError> {
        self.check_committed(sequences)?;
        check_len("counts", counts.len(), sequences.len())?;
        for (index, &count) in counts.iter().enumerate() {
            let argument = Argument::element("counts", index);
            require(count > 0, argument, || "must be at least 1")?;
            self.check_num_slots(argument, count)?;
        }
        let mut batch = sequences.iter_mut().zip(counts);
        let mut scratch = Vec::new();
        let lacking = self.reclaimed(|cache| {
            batch.position(|(sequence, &count)| {
                let upto = sequence.num_slots() + count;
                !cache.grow(sequence, upto, &mut scratch)
            })
        });
        Ok(lacking.unwrap_or(counts.len()))
    }

    /// Gives each sequence slots in every group for its first `upto[i]` tokens, in order: those of
    /// the next chunk, where [`Self::commit_in_chunks`] gave some groups no more. Returns how many
    /// leading sequences have theirs; it stops at the first that could not get them, which is
    /// unchanged as all after it.
    ///
    /// Of a state the block of the last of these tokens is given, where a step has to end, and none of those
    /// between it and the ones that the sequence had: see [`Self::keep_snapshots`].
    pub fn ensure_slots(
        &mut self,
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
        let lacking = self.reclaimed(|cache| {
            batch.position(|(sequence, &upto)| !cache.grow(sequence, upto, &mut scratch))
        });
        Ok(lacking.unwrap_or(upto.len()))
    }

    /// Gives each sequence blocks for the snapshots of its states that are worth keeping, as its retention says,
    /// in the places from token `starts[i]` on where it has none yet: to be called before the step that computes
    /// this token and those after it, once their slots are there. Returns how many snapshots got their blocks.
    ///
    /// A snapshot that has no block is not kept. None is a reason to wait: while fewer blocks are free than
    /// twice what it takes, it gets none.
    pub fn keep_snapshots(
        &mut self,
        sequences: &mut [&mut Sequence],
        starts: &[usize],
    ) -> Result<usize, CacheError> {
        self.check_committed(sequences)?;
        check_len("starts", starts.len(), sequences.len())?;
        self.reclaim();
        let size = self.block_size();
        let states = self.home.config.groups.each().filter(|(_, spec)| spec.has_gaps());
        let states: Vec<_> = states.map(|(group, _)| group.index()).collect();
        let (mut count, mut blocks) = (0, Vec::new());
        for (sequence, start) in sequences.iter_mut().zip(starts) {
            let Sequence { holding: Some(holding), anchors, hashes, .. } = &mut **sequence else {
                continue;
            };
            let Some(&any) = states.first() else { continue };
            let table = &holding.tables[any];
            let end = table.blocks.len().min(hashes.as_slice().len());
            for index in (start / size).max(table.first)..end {
                let is_worth = || anchors.fate(GroupSpec::State, index, size) != Fate::Unneeded;
                if !holding.tables[any].blocks[index].is_null() || !is_worth() {
                    continue;
                }
                let has_room = self.store.num_free() >= 2 * states.len();
                if !has_room || self.store.allocate(states.len(), &mut blocks).is_err() {
                    break;
                }
                for (&group, block) in states.iter().zip(blocks.drain(..)) {
                    holding.tables[group].blocks[index] = block;
                }
                count += 1;
            }
        }
        Ok(count)
    }

    /// Gives a committed sequence slots for its first `upto` tokens in every group; false when blocks are
    /// lacking. `scratch` is empty before and after.
    fn grow(&mut self, sequence: &mut Sequence, upto: usize, scratch: &mut Vec<BlockId>) -> bool {
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

    /// Allocates blocks until each table has `blocks` places, the last with a block; false when they are lacking.
    fn grow_tables(
        &mut self,
        tables: &mut [Table],
        blocks: usize,
        scratch: &mut Vec<BlockId>,
    ) -> bool {
        let groups = &self.home.config.groups;
        let missing = |table: &Table| blocks.saturating_sub(table.blocks.len());
        if !groups.any_gaps()
            && let [table] = tables
        {
            let count = missing(table);
            return count == 0 || self.store.allocate(count, &mut table.blocks).is_ok();
        }
        let specs = groups.specs();
        // A place that is there, and has no block.
        let new_at = |table: &Table| {
            let last = blocks.checked_sub(1).filter(|&last| last >= table.first)?;
            table.blocks.get(last)?.is_null().then_some(last)
        };
        let needed = |(table, spec): (&Table, &GroupSpec)| match new_at(table) {
            Some(_) => 1,
            None => spec.num_new(missing(table)),
        };
        let count = tables.iter().zip(specs).map(needed).sum();
        if count > 0 && self.store.allocate(count, scratch).is_err() {
            return false;
        }
        let mut new = scratch.drain(..);
        for (table, spec) in tables.iter_mut().zip(specs) {
            match new_at(table) {
                Some(place) => table.blocks[place] = new.next().unwrap_or(BlockId::NULL),
                None => table.extend(*spec, missing(table), &mut new),
            }
        }
        true
    }

    /// Adds one token to each sequence.
    pub fn append_tokens(
        &mut self,
        sequences: &mut [&mut Sequence],
        tokens: &[u32],
    ) -> Result<(), CacheError> {
        self.check_made_here(sequences)?;
        check_len("tokens", tokens.len(), sequences.len())?;
        for (sequence, token) in sequences.iter_mut().zip(tokens) {
            sequence.extend(std::slice::from_ref(token));
        }
        Ok(())
    }
}
