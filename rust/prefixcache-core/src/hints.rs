//! Retention hints: how dear a client says that ranges of a request's tokens are.
//!
//! Soft, all of it: hints order eviction, and refuse nobody a block. The retention table keeps what they ask for.
//!
//! A block is of no use without those before it. So along a request a block is at least as dear as what follows
//! it: a range above the default band raises all before it as well, and after a lowered one everything is
//! lowered up to the next that is not.

use std::ops::Range;
use std::time::Duration;

use crate::band::Band;
use crate::error::{Argument, InvalidArgument, require};
use crate::groups::GroupSpec;
use crate::hash::HashConfig;

/// The most ranges that a request may have.
pub const MAX_HINTS: usize = 32;

/// A range of tokens, its priority and for how long that holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hint {
    /// The first token.
    pub start: usize,
    /// The token after the last; None: all up to the end of the sequence, what is generated included.
    pub end: Option<usize>,
    /// From 0 to [`Band::MOST`].
    pub priority: u8,
    /// How long the priority holds after the content was last used, more than nothing; None: for ever.
    pub ttl: Option<Duration>,
}

/// Whose budget hints count against: a name, of any length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner([u8; 16]);

impl Owner {
    /// The owner that has these bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// What stands for the name: a digest of it.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// The owner of this name.
    #[must_use]
    pub fn named(name: &str) -> Self {
        let mut id = [0; 16];
        blake3::Hasher::new().update(name.as_bytes()).finalize_xof().fill(&mut id);
        Self(id)
    }
}

/// The hints of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hints {
    owner: Owner,
    /// By their starts; no two overlap.
    ranges: Vec<Hint>,
}

/// A hint that holds for a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wish {
    pub(crate) band: Band,
    pub(crate) ttl: Option<Duration>,
}

impl Hints {
    /// Fails for more than [`MAX_HINTS`] ranges, for one that is empty, overlaps another, or has a priority above
    /// [`Band::MOST`] or a TTL of nothing.
    pub fn new(owner: Owner, mut ranges: Vec<Hint>) -> Result<Self, InvalidArgument> {
        require(ranges.len() <= MAX_HINTS, "hints", || {
            format!("must have at most {MAX_HINTS} ranges, not {}", ranges.len())
        })?;
        for (index, hint) in ranges.iter().enumerate() {
            hint.check(Argument::element("hints", index), &ranges[..index])?;
        }
        ranges.sort_by_key(|hint| hint.start);
        Ok(Self { owner, ranges })
    }

    /// Whose they are.
    #[must_use]
    pub fn owner(&self) -> Owner {
        self.owner
    }

    /// The ranges, by their starts.
    #[must_use]
    pub fn ranges(&self) -> &[Hint] {
        &self.ranges
    }

    /// Where the ranges above the default band end, in tokens.
    pub(crate) fn raised_ends(&self) -> impl Iterator<Item = usize> {
        self.raised().filter_map(|hint| hint.end)
    }

    fn raised(&self) -> impl Iterator<Item = &Hint> {
        let is_above = |hint: &&Hint| hint.band() > Band::DEFAULT;
        self.ranges.iter().filter(is_above)
    }

    /// What lowers a block: the last range that begins before it, if that and all behind it are below the
    /// default band; the highest of them counts. With the first block of those up to this one that it lowers alike.
    pub(crate) fn lowering(&self, index: usize, size: usize) -> Option<(usize, Wish)> {
        let mut band = Band::LOWEST;
        for hint in self.ranges.iter().rev() {
            if hint.band() >= Band::DEFAULT {
                return None;
            }
            band = band.max(hint.band());
            if hint.start <= index * size {
                return Some((hint.start.div_ceil(size), hint.wish(band)));
            }
        }
        None
    }
}

/// What raises the blocks of one group: every range that ends behind a block, where the group needs all blocks, and
/// otherwise those at whose end the block is needed.
pub(crate) struct Raising {
    /// The first group of the same kind.
    kind: usize,
    wishes: Vec<(Range<usize>, Wish)>,
    /// Blocks that the same wishes raise, the last that were looked at.
    alike: Range<usize>,
    here: Vec<Wish>,
}

impl Raising {
    /// Of each group, for `full` blocks that the sequence has published.
    pub(crate) fn of_groups(hints: &Hints, config: &HashConfig, full: usize) -> Vec<Self> {
        let size = config.block_size;
        let specs = config.groups.specs();
        let of = |spec: &GroupSpec| {
            let range = |hint: &Hint| {
                let end = hint.end_block(full, size);
                let first = match spec.needs_whole_prefix() {
                    true => 0,
                    false => spec.first_kept(end, size),
                };
                (first..end, hint.wish(hint.band()))
            };
            Self {
                kind: specs.iter().position(|one| one == spec).unwrap_or(0),
                wishes: hints.raised().map(range).collect(),
                alike: 0..0,
                here: Vec::new(),
            }
        };
        specs.iter().map(of).collect()
    }

    /// Behind the last block that is raised.
    pub(crate) fn end(&self) -> usize {
        let ends = self.wishes.iter().map(|(blocks, _)| blocks.end);
        ends.max().unwrap_or(0)
    }

    /// What raises a block, and a number that is the same for blocks which the same raises.
    #[inline]
    pub(crate) fn at(&mut self, index: usize) -> (&[Wish], usize) {
        if !self.alike.contains(&index) {
            self.go_to(index);
        }
        (&self.here, self.kind << 48 | self.alike.start)
    }

    fn go_to(&mut self, index: usize) {
        let wishes = self.wishes.iter();
        let bounds = wishes.clone().flat_map(|(blocks, _)| [blocks.start, blocks.end]);
        let start = bounds.clone().filter(|&bound| bound <= index).max();
        let end = bounds.filter(|&bound| bound > index).min();
        self.alike = start.unwrap_or(0)..end.unwrap_or(usize::MAX);
        let here = wishes.filter(|(blocks, _)| blocks.contains(&index));
        self.here = here.map(|&(_, wish)| wish).collect();
    }
}

impl Hint {
    fn band(&self) -> Band {
        Band::of(self.priority)
    }

    fn wish(&self, band: Band) -> Wish {
        Wish { band, ttl: self.ttl }
    }

    /// Behind the last block that lies in the range whole, of `full` blocks.
    fn end_block(&self, full: usize, size: usize) -> usize {
        self.end.map_or(full, |end| full.min(end / size))
    }

    fn last(&self) -> usize {
        self.end.unwrap_or(usize::MAX)
    }

    fn check(&self, argument: Argument, others: &[Self]) -> Result<(), InvalidArgument> {
        let (start, last) = (self.start, self.last());
        require(start < last, argument, || {
            format!("must end after its start, {start}, not at {last}")
        })?;
        let (priority, most) = (self.priority, Band::MOST);
        require(priority <= most, argument, || {
            format!("must have a priority from 0 to {most}, not {priority}")
        })?;
        require(self.ttl != Some(Duration::ZERO), argument, || "must have a TTL above 0")?;
        let overlaps = |other: &Self| start < other.last() && other.start < last;
        let other = others.iter().position(overlaps);
        require(other.is_none(), argument, || {
            format!("must not overlap range {}", other.unwrap_or_default())
        })
    }
}
