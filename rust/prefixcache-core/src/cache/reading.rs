//! Reading: how much of a prompt hits.

use super::PrefixCache;
use crate::error::CacheError;
use crate::id::{BlockHash, GroupId};
use crate::sequence::{BlockHashes, Sequence};
use crate::store::{BlockKey, BlockStore};

impl<S: BlockStore> PrefixCache<S> {
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
    pub(super) fn longest_hit(&self, hashes: &[BlockHash]) -> usize {
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

    pub(super) fn is_hit(&self, key: BlockKey) -> bool {
        self.store.lookup(&key).is_some()
    }

    /// A sequence that holds nothing follows the current weights.
    pub(super) fn refresh(&self, sequence: &mut Sequence) {
        if !self.hashes_are_current(sequence) {
            sequence.rehash(self.weights.get());
        }
    }

    /// Whether the next call will take the sequence's hashes as they are. If not it hashes all tokens
    /// anew: the weights have changed, and the sequence holds nothing.
    pub fn hashes_are_current(&self, sequence: &Sequence) -> bool {
        sequence.is_committed() || sequence.weight_version == self.weight_version()
    }
}
