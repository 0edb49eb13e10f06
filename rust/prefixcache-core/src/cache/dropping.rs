//! Dropping: giving blocks back, and what keeps their content.

use std::borrow::Borrow;
use std::cmp::Reverse;

use super::committing::{NewBlocks, Taken};
use super::{PrefixCache, check_len};
use crate::error::{Argument, CacheError, Misuse, require};
use crate::groups::GroupSpec;
use crate::id::{BlockHash, BlockId, BlockKey};
use crate::policy::Queue;
use crate::sequence::retention::{Anchors, Fate};
use crate::sequence::{Abandoned, Holding, Sequence, Table};
use crate::store::{BlockStore, Marks};

impl<S: BlockStore> PrefixCache<S> {
    /// Gives all blocks of each sequence back, the tail first, so that it is evicted before the head. What the
    /// sequences' hints ask for is done before, where the cache looks at hints.
    pub fn release(&mut self, sequences: &mut [&mut Sequence]) -> Result<(), CacheError> {
        self.check_committed(sequences)?;
        let Self { store, hints, .. } = self;
        for sequence in &*sequences {
            if let Some(hints) = hints {
                hints.keep(store, sequence);
            }
            debug_assert!(
                !store.is_at_rest()
                    || !store.evicts_in_order()
                    || sequence.epoch() != Some(store.epoch())
                    || falls_in_priority(store, sequence),
                "a block's priority is above that of one before it in its prompt"
            );
        }
        for sequence in sequences {
            if let Some(holding) = sequence.holding.take() {
                self.release_all(holding, sequence.names())?;
            }
        }
        Ok(())
    }

    /// Gives back what sequences held that were dropped. It evicts nothing: what was counted before still hits.
    pub fn reclaim(&mut self) {
        if self.home.abandoned.is_empty() {
            return;
        }
        self.store.defer_bound(true);
        for Abandoned { holding, names } in self.home.abandoned.take() {
            let outcome = self.release_all(holding, &names);
            debug_assert!(outcome.is_ok(), "a hold was lost: {outcome:?}");
        }
        self.store.defer_bound(false);
    }

    /// Does `work` where no block waits to be given back, and then evicts what is beyond the bound of
    /// [`PrefixCache::set_max_cached`].
    pub(super) fn reclaimed<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        self.reclaim();
        let outcome = work(self);
        self.store.keep_bound();
        outcome
    }

    /// Blocks that nobody holds, those of dropped sequences among them. [`Lookup::num_free`](crate::Lookup::num_free) counts these only once
    /// a call that changes the cache has given them back.
    pub fn num_free(&mut self) -> usize {
        self.reclaim();
        self.store.num_free()
    }

    /// Gives each block back, to the queue that the policy has for it.
    fn release_all(&mut self, mut holding: Holding, names: &[BlockHash]) -> Result<(), Misuse> {
        self.note_end(&mut holding)?;
        let Some(reuse) = self.store.reuse_queue() else {
            let mut tables = holding.tables.iter();
            return tables.try_for_each(|table| self.store.release(&table.held_from_the_end()));
        };
        let names = &names[..holding.num_published];
        let shared = reuse.count_shared(names);
        for table in &holding.tables {
            let tail: Vec<_> = table.held(shared..table.blocks.len()).rev().collect();
            let head: Vec<_> = table.held(0..shared).rev().collect();
            self.store.release_to(&tail, Queue::of_turn(holding.turn))?;
            self.store.release_to(&head, Queue::SHARED)?;
        }
        if let Some(reuse) = self.store.reuse_queue() {
            reuse.end(names, holding.turn, holding.num_prompt, shared);
        }
        Ok(())
    }

    /// Notes that an answer, or a prompt with an answer of a few tokens, ended here. The snapshot of an answer's end is
    /// evicted first where requests go on from prompts.
    fn note_end(&mut self, holding: &mut Holding) -> Result<(), Misuse> {
        let Self { store, home, .. } = self;
        let ends = home.config.groups.state_and_whole();
        let (Some((state, whole)), Some(last)) = (ends, holding.num_published.checked_sub(1))
        else {
            return Ok(());
        };
        if last < holding.num_hits || holding.tables[state].blocks[last].is_null() {
            return Ok(());
        }
        let is_answer = last >= holding.num_prompt;
        let prompt = if is_answer { Marks::NONE } else { Marks::PROMPT };
        store.mark(holding.tables[whole].blocks[last], Marks::ANSWER.and(prompt));
        if is_answer && home.ends.at(holding.ends).are_prompts() {
            let tables = holding.tables.iter_mut().zip(home.config.groups.specs());
            for (table, _) in tables.filter(|(_, spec)| spec.has_gaps()) {
                let block = std::mem::replace(&mut table.blocks[last], BlockId::NULL);
                store.release_unneeded(&[block])?;
            }
        }
        Ok(())
    }

    /// What becomes of each snapshot that is dropped before `upto` tokens, by its place, where anchors matter.
    ///
    /// The first request that goes on from a snapshot leaves it to be evicted first: its own are worth more. From the
    /// second on it is where prompts part, and kept. So is one that a request makes where others were before.
    fn judge_snapshots(
        &mut self,
        holding: &Holding,
        anchors: &Anchors,
        upto: usize,
    ) -> Vec<(usize, Fate)> {
        let size = self.block_size();
        let Self { store, home, .. } = self;
        let counts = home.ends.at(holding.ends);
        let ends = home.config.groups.state_and_whole();
        let (Some((state, whole)), true) = (ends, anchors.matter()) else {
            return Vec::new();
        };
        let (snapshots, blocks) = (&holding.tables[state], &holding.tables[whole].blocks);
        let end = anchors.first_held(GroupSpec::State, upto, size);
        let dropped = (snapshots.first..end).filter(|&index| !snapshots.blocks[index].is_null());
        let judge = |index: usize| {
            let own = anchors.fate(GroupSpec::State, index, size);
            let is_hit = index < holding.num_hits;
            if !is_hit && own == Fate::Unneeded {
                return (index, own);
            }
            let before = store.marks(blocks[index]);
            let is_passed = before.has(Marks::PASSED);
            let ends_prompt = anchors.end_prompt_with(index, size);
            counts.note(before);
            let mark = if ends_prompt { Marks::PROMPT } else { Marks::PASSED };
            store.mark(blocks[index], mark);
            let goes_first = match own {
                Fate::Unneeded => !is_passed,
                Fate::Kept => ends_prompt && !is_hit && !is_passed && counts.are_answers(),
                Fate::Pinned => false,
            };
            (index, if goes_first { Fate::Unneeded } else { own.max(Fate::Kept) })
        };
        dropped.map(judge).collect()
    }

    /// Drops the blocks that no token from `upto[i]` on needs, where the tokens before are computed and
    /// their full blocks published. The null block stands in their places. Returns how many there were.
    ///
    /// The [`Retention`](crate::sequence::retention::Retention) of a sequence says which of them are evicted
    /// first, which as others are, and which are pinned. What others hold, and what was a hit, is as others are
    /// in any case, but for snapshots of states that nobody else went on from.
    pub fn drop_unneeded(
        &mut self,
        sequences: &mut [&mut Sequence],
        upto: &[usize],
    ) -> Result<usize, CacheError> {
        self.check_committed(sequences)?;
        check_len("upto", upto.len(), sequences.len())?;
        for (index, (sequence, &upto)) in sequences.iter().zip(upto).enumerate() {
            let most = sequence.num_ready_slots();
            require(upto <= most, Argument::element("upto", index), || {
                format!("must be at most {most}, its slots, not {upto}")
            })?;
        }
        let mut dropped = Dropped::default();
        let (mut count, size) = (0, self.block_size());
        for (sequence, &upto) in sequences.iter_mut().zip(upto) {
            let Sequence { holding, anchors, .. } = &mut **sequence;
            let Some(holding) = holding else { continue };
            let snapshots = self.judge_snapshots(holding, anchors, upto);
            let judged = |index| {
                let place = snapshots.binary_search_by_key(&index, |&(index, _)| index);
                place.ok().map(|place| snapshots[place].1)
            };
            let specs = self.home.config.groups.specs();
            for (table, &spec) in holding.tables.iter_mut().zip(specs) {
                let end = anchors.first_held(spec, upto, size);
                if table.first < end {
                    count += dropped.sort(table, end, |index| {
                        let own = || anchors.fate(spec, index, size);
                        match spec.has_gaps().then(|| judged(index)).flatten() {
                            Some(fate) => fate,
                            None if index < holding.num_hits => own().max(Fate::Kept),
                            None => own(),
                        }
                    });
                    dropped.give_up(&mut self.store)?;
                }
            }
        }
        Ok(count)
    }

    /// Gives back the blocks of slots behind the first `upto[i]` tokens, which were appended and not used: of guesses
    /// that were refused, or of a step that failed. Returns how many there were.
    pub fn revert_slots(
        &mut self,
        sequences: &mut [&mut Sequence],
        upto: &[usize],
    ) -> Result<usize, CacheError> {
        self.check_committed(sequences)?;
        check_len("upto", upto.len(), sequences.len())?;
        let size = self.block_size();
        for (index, (sequence, &upto)) in sequences.iter().zip(upto).enumerate() {
            let least = sequence.num_filled().max(sequence.num_hits());
            require(upto >= least, Argument::element("upto", index), || {
                format!("must be at least {least}, the tokens whose KV is there, not {upto}")
            })?;
        }
        let mut count = 0;
        for (sequence, &upto) in sequences.iter_mut().zip(upto) {
            let Some(holding) = &mut sequence.holding else { continue };
            for table in &mut holding.tables {
                let kept = upto.div_ceil(size).max(table.first).min(table.blocks.len());
                let unused: Vec<_> = table.held(kept..table.blocks.len()).rev().collect();
                table.blocks.truncate(kept);
                count += unused.len();
                self.store.release(&unused)?;
            }
            holding.num_slots = holding.num_slots.min(upto);
            holding.num_ready = holding.num_ready.min(upto);
        }
        Ok(count)
    }

    /// Pins what the sequences' anchors need, as far as it was published and is held; the end of what was
    /// published is an anchor too. To be called before the release of a request that ended well.
    /// Returns how many pins are new.
    pub fn pin_anchors(
        &mut self,
        sequences: &[impl Borrow<Sequence>],
    ) -> Result<usize, CacheError> {
        self.check_committed(sequences)?;
        let mut pinned = 0;
        let size = self.block_size();
        for sequence in sequences.iter().map(Borrow::<Sequence>::borrow) {
            let Some(holding) = &sequence.holding else {
                continue;
            };
            let anchors = &sequence.anchors;
            let lengths: Vec<usize> = anchors.pinned_upto(holding.num_published, size).collect();
            for (table, &spec) in holding.tables.iter().zip(self.home.config.groups.specs()) {
                let own = match spec.needs_whole_prefix() {
                    // The last anchor's blocks are those of all.
                    true if anchors.pins_prefix() => &lengths[lengths.len().saturating_sub(1)..],
                    true => &[],
                    false => &lengths[..],
                };
                for &length in own {
                    let first = spec.first_kept(length, size).max(table.first);
                    let blocks: Vec<_> = table.held(first..length.max(first)).collect();
                    pinned += self.store.pin(&blocks)?;
                }
            }
        }
        Ok(pinned)
    }

    /// Pins the blocks that the longest hit within the first `num_tokens` tokens needs, whether the
    /// sequence holds them or not. Returns how many pins are new.
    pub fn pin(&mut self, sequence: &mut Sequence, num_tokens: usize) -> Result<usize, CacheError> {
        self.check_owner(sequence, "sequence".into())?;
        self.refresh(sequence)?;
        self.reclaim();
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
        for table in &tables {
            self.store.release(&table.held_from_the_end())?;
        }
        Ok(pinned)
    }

    /// Takes the pins off the sequence's cached blocks. Returns how many were pinned.
    pub fn unpin(&mut self, sequence: &mut Sequence) -> Result<usize, CacheError> {
        self.check_owner(sequence, "sequence".into())?;
        self.refresh(sequence)?;
        self.reclaim();
        let mut unpinned = 0;
        for (group, _) in self.home.config.groups.each() {
            let keys = sequence.hashes().iter();
            let keys = keys.map(|&hash| BlockKey::new(hash, group));
            // Of all blocks, as pinned anchors may stand anywhere.
            let cached: Vec<BlockKey> = keys.filter(|&key| self.is_hit(key)).collect();
            let mut blocks = Vec::with_capacity(cached.len());
            // Without new blocks it takes what it can, and only free hits need to be free.
            if self.store.commit(cached.into_iter(), 0, &mut blocks).is_ok() {
                unpinned += self.store.unpin(&blocks)?;
                blocks.reverse();
                self.store.release(&blocks)?;
            }
        }
        Ok(unpinned)
    }

    /// Moves the oldest `count` free pinned blocks to the regular tier. Returns how many there were.
    pub fn demote(&mut self, count: usize) -> usize {
        self.reclaimed(|cache| cache.store.demote(count))
    }
}

/// Whether no published block of the sequence has a higher priority than the one before it in its table.
fn falls_in_priority(store: &impl BlockStore, sequence: &Sequence) -> bool {
    let holding = sequence.holding.iter();
    let tables = holding.flat_map(|holding| {
        let published = |table: &'_ Table| table.first..holding.num_published.max(table.first);
        holding.tables.iter().map(move |table| &table.blocks[published(table)])
    });
    let specs = sequence.config().groups.specs();
    let mut whole = tables.zip(specs).filter(|(_, spec)| spec.needs_whole_prefix());
    whole.all(|(blocks, _)| blocks.is_sorted_by_key(|&block| Reverse(store.held_band(block))))
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
    /// Takes the blocks before `end` out of a table; how many there were.
    fn sort(&mut self, table: &mut Table, end: usize, fate: impl Fn(usize) -> Fate) -> usize {
        for index in (table.first..end).rev() {
            let block = std::mem::replace(&mut table.blocks[index], BlockId::NULL);
            if block.is_null() {
                continue;
            }
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
        self.kept.len() + self.unneeded.len()
    }

    fn give_up(&mut self, store: &mut impl BlockStore) -> Result<(), Misuse> {
        if !self.pinned.is_empty() {
            store.pin(&self.pinned)?;
        }
        store.release(&self.kept)?;
        store.release_unneeded(&self.unneeded)?;
        self.pinned.clear();
        self.kept.clear();
        self.unneeded.clear();
        Ok(())
    }
}
