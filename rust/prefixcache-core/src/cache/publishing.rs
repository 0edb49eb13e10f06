//! Publishing: letting others find the blocks that were filled.

use std::iter;

use super::{PrefixCache, check_len, fault};
use crate::error::{Argument, CacheError, Misuse, SequenceFault, require};
use crate::events::{BlockTokens, EventLog};
use crate::hash::Scope;
use crate::id::{BlockHash, BlockId, BlockKey, GroupId};
use crate::sequence::{Holding, Sequence, Table};
use crate::store::{BlockStore, Registration};

/// How many registrations ahead the bucket of a key is fetched.
const EXPECT_AHEAD: usize = 8;

/// A block that was registered while another block already held the same content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Duplicate {
    /// Which of the sequences of the call.
    pub sequence: usize,
    /// The group of the block.
    pub group: GroupId,
    /// The block's index in the block table.
    pub index: usize,
    /// The block that already holds the content, and hits.
    pub holder: BlockId,
}

impl<S: BlockStore> PrefixCache<S> {
    /// Says that the KV of the first `upto[i]` tokens is there, and publishes the full blocks among
    /// them. Marking again, or less, changes nothing. Returns the duplicates among the blocks published.
    ///
    /// A sequence that was committed before the index was last cleared publishes nothing.
    pub fn mark_blocks_filled(
        &mut self,
        sequences: &mut [&mut Sequence],
        upto: &[usize],
    ) -> Result<Vec<Duplicate>, CacheError> {
        self.check_committed(sequences)?;
        check_len("upto", upto.len(), sequences.len())?;
        for (index, (sequence, &upto)) in sequences.iter().zip(upto).enumerate() {
            let most = sequence.num_ready_slots().min(sequence.num_tokens());
            require(upto <= most, Argument::element("upto", index), || {
                format!("must be at most {most}, the tokens with a slot, not {upto}")
            })?;
        }
        let mut duplicates = Vec::new();
        self.store.begin_registrations();
        for (index, (sequence, &upto)) in sequences.iter_mut().zip(upto).enumerate() {
            self.publish(sequence, index, upto, &mut duplicates)?;
        }
        Ok(duplicates)
    }

    fn publish(
        &mut self,
        sequence: &mut Sequence,
        number: usize,
        upto: usize,
        duplicates: &mut Vec<Duplicate>,
    ) -> Result<(), Misuse> {
        let Some(holding) = &mut sequence.holding else {
            return Ok(());
        };
        let full = upto / self.block_size();
        let hashes = &sequence.hashes.as_slice()[..full];
        // Blocks of a scope are not reported: whoever knows their hashes can find out what they hold.
        let is_open = sequence.scope == Scope::default();
        let is_reported = is_open && self.store.event_log().is_some();
        let (mut new, mut registered) = (Vec::new(), Vec::new());
        let outcome = self.register_all(holding, hashes, |group, index, outcome| {
            if is_reported && matches!(outcome, Registration::New | Registration::Duplicate(_)) {
                registered.push((group, index));
            }
            if let Registration::Duplicate(holder) = outcome {
                duplicates.push(Duplicate { sequence: number, group, index, holder });
            } else if is_reported && outcome == Registration::New {
                new.push((group, index));
            }
        });
        if let Some(event_log) = self.store.event_log().filter(|_| is_reported) {
            self.report_stored(event_log, new, hashes, &sequence.tokens);
        }
        let size = self.home.config.block_size;
        for (group, index) in registered {
            let tokens = BlockTokens {
                parent: index.checked_sub(1).map(|parent| (&hashes[parent]).into()),
                tokens: sequence.tokens[index * size..(index + 1) * size].into(),
            };
            let block = holding.tables[group.index()].blocks[index];
            self.store.keep_tokens(block, tokens);
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
        &mut self,
        holding: &Holding,
        hashes: &[BlockHash],
        mut done: impl FnMut(GroupId, usize, Registration),
    ) -> Result<(), Misuse> {
        for index in holding.num_published..hashes.len() {
            if let Some(&soon) = hashes.get(index + EXPECT_AHEAD) {
                for (group, _) in self.home.config.groups.each() {
                    self.store.prefetch(&BlockKey::new(soon, group));
                }
            }
            for (table, (group, _)) in holding.tables.iter().zip(self.home.config.groups.each()) {
                if table.blocks[index].is_null() {
                    continue;
                }
                let key = BlockKey::new(hashes[index], group);
                let outcome = self.store.register(table.blocks[index], key, holding.epoch)?;
                done(group, index, outcome);
            }
        }
        Ok(())
    }

    /// Tells of blocks of a sequence, by group and index, that can be found from now on.
    fn report_stored(
        &self,
        event_log: &EventLog,
        mut blocks: Vec<(GroupId, usize)>,
        hashes: &[BlockHash],
        tokens: &[u32],
    ) {
        blocks.sort_unstable();
        for run in blocks.chunk_by(|one, next| one.0 == next.0 && one.1 + 1 == next.1) {
            let (group, first) = run[0];
            let range = first..first + run.len();
            event_log.stored(group, range, hashes, tokens, self.block_size());
        }
    }

    /// Swaps a published block of a sequence for the one that hits for its content, and gives the own one up,
    /// which loses its content unless others hold it. The sequence keeps its block where that one hits, as after the
    /// duplicate was evicted, or where none does.
    pub fn replace_block(
        &mut self,
        sequence: &mut Sequence,
        group: GroupId,
        index: usize,
    ) -> Result<(), CacheError> {
        self.check_owner(sequence, "sequence".into())?;
        let key = self.published_key(sequence, group, index)?;
        let mut taken = Vec::with_capacity(1);
        if self.store.commit(iter::once(key), 0, &mut taken).unwrap_or(0) == 0 {
            return Ok(());
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
        let published = holding.num_published;
        require(index < published, "index", || {
            format!("must be below {published}, the blocks published, not {index}")
        })?;
        let Table { first, blocks } = &holding.tables[group.index()];
        require(index >= *first, "index", || {
            format!("must be at least {first}, the first block held, not {index}")
        })?;
        require(!blocks[index].is_null(), "index", || "must not be of the null block")?;
        Ok(BlockKey::new(sequence.hashes()[index], group))
    }
}
