//! KV cache groups: layers that share one block table over the one pool.
//!
//! A kind of group is one rule, [`GroupSpec::first_needed`]: what is needed to compute on from a position.
//! From it follow a hit (every block from there to its end), a drop (every block before), the pages that
//! the attention reads and the blocks that an anchor keeps. A new kind is a new variant here; neither the
//! cache nor the pool knows of any.

use crate::error::{Argument, InvalidArgument, require};
use crate::id::GroupId;

/// How a group's layers attend, which decides the blocks that they need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GroupSpec {
    /// Every position attends to all before it: all blocks are needed while the sequence lives.
    FullAttention,
    /// Each position attends to the `window` last ones, itself among them.
    SlidingWindow {
        /// Tokens, at least 1.
        window: usize,
    },
    /// A state that passes from token to token: each position needs the one after the token before. The state
    /// after the last token computed in a block is what the block keeps, so only some blocks need to be there.
    State,
}

impl GroupSpec {
    /// The first block that is needed to compute the token at `position` and those after it.
    #[must_use]
    #[inline]
    pub const fn first_needed(self, position: usize, block_size: usize) -> usize {
        match self {
            Self::FullAttention => 0,
            Self::SlidingWindow { window } => {
                position.saturating_add(1).saturating_sub(window) / block_size
            }
            Self::State => position.saturating_sub(1) / block_size,
        }
    }

    /// Whether all blocks before a position are needed, whatever the position.
    #[must_use]
    pub const fn needs_whole_prefix(self) -> bool {
        matches!(self, Self::FullAttention)
    }

    /// Whether a sequence may lack blocks between those that it holds.
    pub(crate) const fn has_gaps(self) -> bool {
        matches!(self, Self::State)
    }

    /// The blocks that a table needs to be `count` longer: where it may have gaps its last one alone.
    pub(crate) fn num_new(self, count: usize) -> usize {
        if self.has_gaps() { count.min(1) } else { count }
    }

    /// The first block worth keeping for a request that stands after `length` blocks, or one block
    /// earlier as it differs in its last tokens. A state is too large to be kept twice.
    pub(crate) fn first_kept(self, length: usize, block_size: usize) -> usize {
        let needed = self.first_needed(length * block_size, block_size);
        needed.saturating_sub(usize::from(!self.has_gaps()))
    }

    /// The longest length in blocks, up to `most`, of which every needed block hits. From the right.
    pub(crate) fn longest_hit(
        self,
        most: usize,
        block_size: usize,
        mut hits: impl FnMut(usize) -> bool,
    ) -> usize {
        let (mut length, mut seen) = (most, most);
        while seen > self.first_needed(length * block_size, block_size) {
            seen -= 1;
            if !hits(seen) {
                length = seen;
            }
        }
        length
    }

    /// The most blocks that a sequence of `num_tokens` holds in the group when `chunk` tokens at a time
    /// are computed, and what is behind them dropped.
    fn most_blocks(self, num_tokens: usize, chunk: usize, block_size: usize) -> usize {
        let all = num_tokens.div_ceil(block_size);
        if self.has_gaps() {
            // The last full block, which it keeps, the one that fills, and that where a chunk ends.
            return all.min(3);
        }
        let full = num_tokens / block_size;
        let behind = full - self.first_kept(full, block_size);
        // One more, as a chunk may begin and end within a block.
        all.min(chunk.div_ceil(block_size).saturating_add(behind + 1))
    }

    fn name(self) -> String {
        match self {
            Self::FullAttention => "full".to_owned(),
            Self::SlidingWindow { window } => format!("sliding_window:{window}"),
            Self::State => "state".to_owned(),
        }
    }
}

/// The groups of a cache, at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Groups(Vec<GroupSpec>);

impl Groups {
    /// Fails without a group, with more than a [`GroupId`] can name, or with a window of no tokens.
    pub fn new(specs: Vec<GroupSpec>) -> Result<Self, InvalidArgument> {
        for (index, spec) in specs.iter().enumerate() {
            let is_empty = *spec == GroupSpec::SlidingWindow { window: 0 };
            require(
                !is_empty,
                Argument::element("groups", index),
                || "must have a window of at least 1 token, not 0",
            )?;
        }
        Self::check_count("groups", specs.len())?;
        Ok(Self(specs))
    }

    /// `count` groups of full attention.
    pub fn full(count: usize) -> Result<Self, InvalidArgument> {
        Self::check_count("num_groups", count)?;
        Ok(Self(vec![GroupSpec::FullAttention; count]))
    }

    fn check_count(argument: &'static str, count: usize) -> Result<(), InvalidArgument> {
        let most = usize::from(u16::MAX);
        require((1..=most).contains(&count), argument, || match argument {
            "groups" => format!("must have from 1 to {most} entries, not {count}"),
            _ => format!("must be from 1 to {most}, not {count}"),
        })
    }

    /// How many groups there are.
    #[must_use]
    #[inline]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Each group's kind, in the order of their ids.
    #[must_use]
    #[inline]
    pub fn specs(&self) -> &[GroupSpec] {
        &self.0
    }

    /// Each group with its kind.
    pub fn each(&self) -> impl Iterator<Item = (GroupId, GroupSpec)> {
        let specs = self.0.iter().enumerate();
        specs.map(|(index, &spec)| (GroupId::new(index as u16), spec))
    }

    /// Whether one group of full attention is all there is.
    #[inline]
    pub(crate) fn is_one_full(&self) -> bool {
        self.0 == [GroupSpec::FullAttention]
    }

    /// Whether every group needs all blocks before a position.
    pub(crate) fn all_whole(&self) -> bool {
        self.0.iter().all(|spec| spec.needs_whole_prefix())
    }

    /// Whether some group's tables may have gaps.
    pub(crate) fn any_gaps(&self) -> bool {
        self.0.iter().any(|spec| spec.has_gaps())
    }

    /// The first group of a state, and the first that needs all blocks before a position, where there are both.
    pub(crate) fn state_and_whole(&self) -> Option<(usize, usize)> {
        let state = self.0.iter().position(|spec| spec.has_gaps())?;
        let whole = self.0.iter().position(|spec| spec.needs_whole_prefix())?;
        Some((state, whole))
    }

    /// Whether some group needs all blocks before a position.
    pub(crate) fn any_whole(&self) -> bool {
        self.0.iter().any(|spec| spec.needs_whole_prefix())
    }

    /// The most blocks that a sequence of `num_tokens` holds at once in all groups, when `chunk` tokens at
    /// a time are computed and what is behind windows is dropped before each: what admission has to
    /// find free, and whether it can ever fit.
    #[must_use]
    pub fn most_blocks(&self, num_tokens: usize, chunk: usize, block_size: usize) -> usize {
        let most = |spec: &GroupSpec| spec.most_blocks(num_tokens, chunk, block_size);
        self.0.iter().map(most).fold(0, usize::saturating_add)
    }

    /// The groups in words, for `h_0`.
    #[must_use]
    pub fn layout(&self) -> String {
        let names: Vec<String> = self.0.iter().map(|spec| spec.name()).collect();
        names.join(",")
    }
}
