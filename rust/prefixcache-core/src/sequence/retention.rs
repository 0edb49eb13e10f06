//! Which blocks behind a window are evicted before all others, and which of them are pinned.
//!
//! An *anchor* is a position at which a later request can stand. The blocks that it needs, and one below
//! them, are worth keeping; the rest of what a group drops would only push others out, and goes first.

use std::iter;

use crate::groups::GroupSpec;

/// What becomes of blocks that a sequence drops. By default they are as other free blocks are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Retention {
    /// Every block that is dropped is evicted in the order of other free blocks.
    #[default]
    Everything,
    /// Blocks of anchors are evicted in that order; the others before all content.
    Anchors {
        /// Every multiple of this many tokens is an anchor too; 0 for none.
        interval: usize,
        /// Whether anchors are pinned, and which.
        pins: Option<Pins>,
    },
}

/// How anchors are pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pins {
    /// An anchor fewer than this many blocks past the last pinned one, or the start, is not pinned; for the
    /// prompt's end the start alone counts.
    pub min_distance: usize,
    /// Whether groups that need the whole prefix pin it, up to the last pinned anchor.
    pub prefix: bool,
}

impl Pins {
    /// Pins of anchors at least `min_distance` blocks apart, and of the `prefix` or not.
    #[must_use]
    pub const fn new(min_distance: usize, prefix: bool) -> Self {
        Self { min_distance, prefix }
    }
}

/// A sequence's anchors, and what becomes of their blocks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Anchors {
    pub(crate) retention: Retention,
    /// Tokens, ascending.
    positions: Vec<usize>,
    /// Others at which a later request can stand, which are no anchors to pin. Tokens, ascending.
    kept: Vec<usize>,
    /// The anchor that stands where the prompt ends, in tokens.
    prompt_end: Option<usize>,
}

/// What becomes of a block that is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fate {
    Unneeded,
    Kept,
    Pinned,
}

impl Anchors {
    pub(crate) fn add(&mut self, position: usize) {
        if let Err(place) = self.positions.binary_search(&position) {
            self.positions.insert(place, position);
        }
    }

    pub(crate) fn add_prompt_end(&mut self, position: usize) {
        self.prompt_end = Some(position);
        self.add(position);
    }

    /// Whether the prompt's anchor stands where the block at `index` ends.
    pub(crate) fn end_prompt_with(&self, index: usize, size: usize) -> bool {
        self.prompt_end.is_some_and(|end| end / size == index + 1)
    }

    /// Whether what is no anchor's is evicted first.
    pub(crate) fn matter(&self) -> bool {
        matches!(self.retention, Retention::Anchors { .. })
    }

    /// Keeps what a request needs that stands at one of these positions, in the place of those before.
    pub(crate) fn keep(&mut self, positions: impl Iterator<Item = usize>) {
        self.kept = positions.collect();
        self.kept.sort_unstable();
    }

    /// The first block that is not to be dropped when the tokens before `position` are computed: where
    /// anchors matter, the answer may end here, and that is one.
    pub(crate) fn first_held(&self, spec: GroupSpec, position: usize, size: usize) -> usize {
        match self.retention {
            Retention::Everything => spec.first_needed(position, size),
            Retention::Anchors { .. } => spec.first_kept(position / size, size),
        }
    }

    /// What becomes of the block at `index` when it is dropped.
    pub(crate) fn fate(&self, spec: GroupSpec, index: usize, size: usize) -> Fate {
        let Retention::Anchors { pins, .. } = self.retention else {
            return Fate::Kept;
        };
        let mut fate = Fate::Unneeded;
        let mut anchor = self.next(index, size);
        while let Some(length) = anchor.filter(|&length| spec.first_kept(length, size) <= index) {
            fate = Fate::Kept;
            if pins.is_some_and(|pins| self.is_apart(length, pins, size)) {
                return Fate::Pinned;
            }
            anchor = self.next(length, size);
        }
        if self.is_kept(spec, index, size) {
            fate = Fate::Kept;
        }
        fate
    }

    fn is_kept(&self, spec: GroupSpec, index: usize, size: usize) -> bool {
        let from = (index + 1) * size;
        let next = self.kept.partition_point(|&position| position < from);
        let length = self.kept.get(next).map(|position| position / size);
        length.is_some_and(|length| spec.first_kept(length, size) <= index)
    }

    /// The anchors whose blocks are pinned, in blocks, for a sequence that ends after `end` blocks; the end
    /// is one.
    pub(crate) fn pinned_upto(&self, end: usize, size: usize) -> impl Iterator<Item = usize> {
        let (pins, first) = match self.retention {
            Retention::Anchors { pins: Some(pins), .. } => (Some(pins), self.next(0, size)),
            _ => (None, None),
        };
        let before_end = iter::successors(first, move |&length| self.next(length, size))
            .take_while(move |&length| length < end);
        let all = before_end.chain(pins.map(|_| end).filter(|&end| end > 0));
        all.filter(move |&length| pins.is_some_and(|pins| self.is_apart(length, pins, size)))
    }

    /// The next anchor after `length` blocks, in blocks.
    fn next(&self, length: usize, size: usize) -> Option<usize> {
        let from = length.saturating_add(1).saturating_mul(size);
        let place = self.positions.partition_point(|&position| position < from);
        let own = self.positions.get(place).copied();
        own.into_iter().chain(self.multiple_from(from)).min().map(|position| position / size)
    }

    /// Whether the anchor after `length` blocks is pinned.
    fn is_apart(&self, length: usize, pins: Pins, size: usize) -> bool {
        let least = pins.min_distance.max(1);
        if least == 1 || self.pinned_prompt_end(least, size) == Some(length) {
            return length >= pins.min_distance;
        }
        let next = |&pinned: &usize| self.next_pinned(pinned, least, size);
        let before = iter::successors(Some(0), next).take_while(|&pinned| pinned < length).last();
        length - before.unwrap_or(0) >= least
    }

    /// The next pinned anchor after the one of `pinned` blocks, in blocks.
    fn next_pinned(&self, pinned: usize, least: usize, size: usize) -> Option<usize> {
        let apart = self.next(pinned.saturating_add(least - 1), size);
        let prompt = self.pinned_prompt_end(least, size).filter(|&end| end > pinned);
        apart.into_iter().chain(prompt).min()
    }

    /// The prompt's anchor, in blocks, where it is far enough from the start to be pinned.
    fn pinned_prompt_end(&self, least: usize, size: usize) -> Option<usize> {
        self.prompt_end.map(|end| end / size).filter(|&end| end >= least)
    }

    /// Whether groups that need the whole prefix pin it.
    pub(crate) fn pins_prefix(&self) -> bool {
        matches!(self.retention, Retention::Anchors { pins: Some(Pins { prefix: true, .. }), .. })
    }

    fn interval(&self) -> usize {
        match self.retention {
            Retention::Anchors { interval, .. } => interval,
            Retention::Everything => 0,
        }
    }

    fn multiple_from(&self, position: usize) -> Option<usize> {
        position.checked_next_multiple_of(self.interval())
    }
}
