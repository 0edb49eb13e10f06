//! Reading: how much of a prompt hits.

use super::{PrefixCache, fault};
use crate::error::{CacheError, SequenceFault};
use crate::groups::GroupSpec;
use crate::id::{BlockHash, BlockKey, GroupId};
use crate::sequence::{BlockHashes, Sequence};
use crate::store::Lookup;

impl<S: Lookup> PrefixCache<S> {
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

    /// [`PrefixCache::probe`] for a sequence, which is hashed again if the weights have changed.
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

    /// [`Self::count_prefix_hits_within`] where blocks count too that are `elsewhere`; and how many of these the
    /// hit needs.
    pub fn count_hits_with(
        &self,
        sequence: &mut Sequence,
        max_tokens: usize,
        elsewhere: impl Fn(&BlockKey) -> bool,
    ) -> Result<(usize, usize), CacheError> {
        let hashes = self.asked_hashes(sequence, max_tokens)?;
        let is_there = |key| self.is_hit(key) || elsewhere(&key);
        let whole = self.whole_groups().fold(hashes.len(), |length, (group, _)| {
            let keys = hashes[..length].iter().map(|&hash| BlockKey::new(hash, group));
            keys.take_while(|&key| is_there(key)).count()
        });
        let hit = &hashes[..self.longest_of_others(whole, hashes, is_there)];
        let keys = self.needed_keys(hit);
        let missing = keys.iter().filter(|&&key| !self.is_hit(key)).count();
        Ok((hit.len() * self.block_size(), missing))
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
        if !self.home.config.groups.any_whole() {
            return Ok(0);
        }
        Ok(self.longest_whole_hit(hashes) * self.block_size())
    }

    /// The current hashes of a sequence's blocks that are full within `max_tokens`.
    pub(super) fn asked_hashes<'a>(
        &self,
        sequence: &'a mut Sequence,
        max_tokens: usize,
    ) -> Result<&'a [BlockHash], CacheError> {
        self.check_owner(sequence, "sequence".into())?;
        self.refresh(sequence)?;
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
    pub(super) fn longest_hit(&self, hashes: &[BlockHash]) -> usize {
        let length = self.longest_whole_hit(hashes);
        self.longest_of_others(length, hashes, |key| self.is_hit(key))
    }

    /// The longest length up to `length` for the groups that do not need the whole prefix.
    fn longest_of_others(
        &self,
        mut length: usize,
        hashes: &[BlockHash],
        is_there: impl Fn(BlockKey) -> bool,
    ) -> usize {
        let groups = &self.home.config.groups;
        let others = || groups.each().filter(|(_, spec)| !spec.needs_whole_prefix());
        loop {
            let before = length;
            for (group, spec) in others() {
                length = spec.longest_hit(length, self.block_size(), |block| {
                    is_there(BlockKey::new(hashes[block], group))
                });
            }
            if length == before {
                return length;
            }
        }
    }

    fn whole_groups(&self) -> impl Iterator<Item = (GroupId, GroupSpec)> {
        let groups = self.home.config.groups.each();
        groups.filter(|(_, spec)| spec.needs_whole_prefix())
    }

    /// Leading blocks that all groups have which need the whole prefix.
    fn longest_whole_hit(&self, hashes: &[BlockHash]) -> usize {
        self.whole_groups().fold(hashes.len(), |length, (group, _)| {
            self.count_leading_hits(group, &hashes[..length])
        })
    }

    /// The blocks that a hit of these hashes needs, group by group.
    pub(super) fn needed_keys(&self, hashes: &[BlockHash]) -> Vec<BlockKey> {
        let groups = self.home.config.groups.each();
        groups
            .flat_map(|(group, spec)| {
                let needed = &hashes[self.first_needed(spec, hashes.len())..];
                needed.iter().map(move |&hash| BlockKey::new(hash, group))
            })
            .collect()
    }

    /// The first block that a hit of `length` blocks needs.
    pub(super) fn first_needed(&self, spec: GroupSpec, length: usize) -> usize {
        spec.first_needed(length * self.block_size(), self.block_size())
    }

    /// Leading blocks that the group, which needs the whole prefix, has.
    fn count_leading_hits(&self, group: GroupId, hashes: &[BlockHash]) -> usize {
        let key = |hash: &BlockHash| BlockKey::new(*hash, group);
        if self.keeps_prefixes() {
            let length = hashes.partition_point(|hash| self.is_hit(key(hash)));
            debug_assert!(
                !self.store.is_at_rest()
                    || length == self.store.count_leading(hashes.iter().map(key)),
                "content of group {group:?} was evicted out of order"
            );
            return length;
        }
        self.store.count_leading(hashes.iter().map(key))
    }

    /// Whether a block of a group that needs the whole prefix hits only if all blocks before it do, so that
    /// a binary search finds the last hit.
    ///
    /// Who holds a block holds those before it in its prompt, and gives it back before them, so it stands
    /// before them in the eviction order as long as its priority is not above theirs. The pool notes where
    /// that ends ([`Lookup::evicts_in_order`]); debug builds check it where a count is exact
    /// (`count_leading_hits`) and where blocks join the order (`PrefixCache::release`).
    fn keeps_prefixes(&self) -> bool {
        self.store.evicts_in_order()
    }

    /// Whether a count looks at as many blocks as a binary search does, and not at each.
    pub fn counts_by_bisection(&self) -> bool {
        self.keeps_prefixes()
            && self.home.config.groups.each().all(|(_, spec)| spec.needs_whole_prefix())
    }

    /// The most blocks that a sequence of `num_tokens` holds at once: see
    /// [`Groups::most_blocks`](crate::groups::Groups::most_blocks).
    pub fn most_blocks(&self, num_tokens: usize, chunk: usize) -> usize {
        let groups = &self.home.config.groups;
        groups.most_blocks(num_tokens, chunk, self.block_size())
    }

    pub(super) fn is_hit(&self, key: BlockKey) -> bool {
        self.store.lookup(&key).is_some()
    }

    /// A sequence that holds nothing follows the current weights. Fails where it stays with others, and these were
    /// forgotten.
    pub(super) fn refresh(&self, sequence: &mut Sequence) -> Result<(), CacheError> {
        if self.hashes_are_current(sequence) {
            return Ok(());
        }
        if sequence.stays {
            return Err(fault("sequence", SequenceFault::Forgotten));
        }
        sequence.rehash(self.home.weights.get());
        Ok(())
    }

    /// Whether the next call will take the sequence's hashes as they are. If not the weights have changed, and the
    /// sequence holds nothing: the call hashes all tokens again, or fails for one that stays with forgotten weights.
    pub fn hashes_are_current(&self, sequence: &Sequence) -> bool {
        sequence.is_committed() || !sequence.is_outdated()
    }
}

#[cfg(all(test, debug_assertions, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use crate::band::Band;
    use crate::error::CacheError;
    use crate::groups::Groups;
    use crate::hash::{HashConfig, Scope};
    use crate::pool::Writer;
    use crate::store::{BlockStore, PoolConfig};
    use crate::sync::{Fault, faults};

    /// A cache of six blocks, and a committed sequence of three of its own.
    fn filled() -> Result<(PrefixCache<Writer>, Sequence), CacheError> {
        let config = HashConfig::new(1, Groups::full(1)?);
        let pool = Writer::new(PoolConfig::new(7)).expect("there is memory");
        let mut cache = PrefixCache::new(config, pool)?;
        let mut sequence = cache.new_sequence(vec![1, 2, 3], Scope::default(), Vec::new());
        cache.commit_prefix_plan(&mut sequence, 0, 3)?;
        cache.mark_blocks_filled(&mut [&mut sequence], &[3])?;
        Ok((cache, sequence))
    }

    #[test]
    #[should_panic(expected = "was evicted out of order")]
    fn a_count_fails_where_the_pool_does_not_note_that_the_order_ends() {
        faults::plant(Fault::KeepOrder);
        let (mut cache, mut whole) = filled().unwrap();
        cache.release(&mut [&mut whole]).unwrap();
        cache.pin(&mut whole, 3).unwrap();
        let mut head = cache.new_sequence(vec![1], Scope::default(), Vec::new());
        cache.unpin(&mut head).unwrap();
        let mut other = cache.new_sequence(vec![9; 4], Scope::default(), Vec::new());
        cache.commit_prefix_plan(&mut other, 0, 4).unwrap();
        let _ = cache.count_prefix_hits(&mut whole);
    }

    #[test]
    #[should_panic(expected = "priority is above")]
    fn a_release_fails_where_a_block_has_a_higher_priority_than_the_one_before_it() {
        let (mut cache, mut whole) = filled().unwrap();
        let key = BlockKey::new(whole.hashes()[1], GroupId::default());
        let highest = Band::all().last().unwrap();
        let block = whole.block_table(0)[1];
        cache.store.set_band(&key, block, highest);
        let _ = cache.release(&mut [&mut whole]);
    }
}
