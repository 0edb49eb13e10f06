//! KV cache groups: layers that share one block table over the one pool.

use crate::error::InvalidArgument;
use crate::id::{BlockHash, GroupId};
use crate::store::BlockKey;

/// How a group's layers attend, which decides the blocks that they need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupSpec {
    /// Every position attends to all before it: all blocks are needed while the sequence lives.
    FullAttention,
}

impl GroupSpec {
    fn name(self) -> &'static str {
        match self {
            Self::FullAttention => "full",
        }
    }
}

/// The groups of a cache, at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Groups(Vec<GroupSpec>);

impl Groups {
    /// Fails without a group, or with more than a [`GroupId`] can name.
    pub fn new(specs: Vec<GroupSpec>) -> Result<Self, InvalidArgument> {
        let most = usize::from(u16::MAX);
        if (1..=most).contains(&specs.len()) {
            return Ok(Self(specs));
        }
        let reason = format!("must be from 1 to {most}, not {}", specs.len());
        Err(InvalidArgument::new("num_groups", reason))
    }

    /// How many groups there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The id of each group.
    pub fn ids(&self) -> impl Iterator<Item = GroupId> + use<> {
        (0..self.0.len()).map(|index| GroupId::new(index as u16))
    }

    /// The keys of the blocks with these hashes: each hash in every group, then the next.
    #[must_use]
    pub fn keys<'a>(&self, hashes: &'a [BlockHash]) -> Keys<'a> {
        Keys {
            hashes,
            groups: self.0.len() as u16,
            next_group: 0,
        }
    }

    /// Whether a block is needed for as long as any block after it.
    #[must_use]
    pub(crate) fn need_whole_prefixes(&self) -> bool {
        let full = |spec: &GroupSpec| matches!(spec, GroupSpec::FullAttention);
        self.0.iter().all(full)
    }

    /// The groups in words, for `h_0`.
    #[must_use]
    pub fn layout(&self) -> String {
        let names: Vec<&str> = self.0.iter().map(|spec| spec.name()).collect();
        names.join(",")
    }
}

/// The keys of some hashes in each of some groups: see [`Groups::keys`].
#[derive(Clone, Debug)]
pub struct Keys<'a> {
    hashes: &'a [BlockHash],
    groups: u16,
    /// The group of the next key, whose hash is the first one left.
    next_group: u16,
}

impl Iterator for Keys<'_> {
    type Item = BlockKey;

    #[inline]
    fn next(&mut self) -> Option<BlockKey> {
        let (&hash, rest) = self.hashes.split_first()?;
        let key = BlockKey::new(hash, GroupId::new(self.next_group));
        self.next_group += 1;
        if self.next_group == self.groups {
            self.next_group = 0;
            self.hashes = rest;
        }
        Some(key)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.hashes.len() * usize::from(self.groups) - usize::from(self.next_group);
        (left, Some(left))
    }
}

impl ExactSizeIterator for Keys<'_> {}
