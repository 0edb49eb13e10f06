//! Retention hints: how dear a client says that ranges of a request's tokens are.
//!
//! Soft, all of it: hints order eviction, and refuse nobody a block. What becomes of them is the
//! [`Ledger`](crate::ledger::Ledger)'s affair.
//!
//! A block is of no use without those before it. So along a request a block is at least as dear as what follows
//! it: a range above the default band raises all before it as well, and after a lowered one everything is
//! lowered up to the next that is not.

use std::time::Duration;

use crate::band::Band;
use crate::error::{Argument, InvalidArgument};
use crate::groups::GroupSpec;

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
    /// The owner of this name.
    #[must_use]
    pub fn named(name: &str) -> Self {
        let mut id = [0; 16];
        blake3::Hasher::new()
            .update(name.as_bytes())
            .finalize_xof()
            .fill(&mut id);
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
        if ranges.len() > MAX_HINTS {
            let reason = format!("must have at most {MAX_HINTS} ranges, not {}", ranges.len());
            return Err(InvalidArgument::new("hints", reason));
        }
        for (index, hint) in ranges.iter().enumerate() {
            hint.check()
                .and_then(|()| hint.check_apart(&ranges[..index]))
                .map_err(|reason| {
                    InvalidArgument::new(Argument::element("hints", index), reason)
                })?;
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

    /// How many of the leading `full` blocks a range above the default band raises.
    pub(crate) fn raised_blocks(&self, full: usize, size: usize) -> usize {
        let ends = self.raised().map(|hint| hint.end_block(full, size));
        ends.max().unwrap_or(0)
    }

    /// What raises a block of a group, of `full` blocks that the sequence has: every range that ends behind it,
    /// where the group needs all of them, and otherwise those at whose end the block is needed.
    pub(crate) fn raising(
        &self,
        index: usize,
        spec: GroupSpec,
        full: usize,
        size: usize,
    ) -> impl Iterator<Item = Wish> {
        self.raised().filter_map(move |hint| {
            let end = hint.end_block(full, size);
            let first = if spec.needs_whole_prefix() {
                0
            } else {
                spec.first_kept(end, size)
            };
            (first..end)
                .contains(&index)
                .then(|| hint.wish(hint.band()))
        })
    }

    /// What lowers a block: the last range that begins before it, if that and all behind it are below the
    /// default band; the highest of them counts.
    pub(crate) fn lowering(&self, index: usize, size: usize) -> Option<Wish> {
        let mut band = Band::LOWEST;
        for hint in self.ranges.iter().rev() {
            if hint.band() >= Band::DEFAULT {
                return None;
            }
            band = band.max(hint.band());
            if hint.start <= index * size {
                return Some(hint.wish(band));
            }
        }
        None
    }
}

impl Hint {
    fn band(&self) -> Band {
        Band::of(self.priority)
    }

    fn wish(&self, band: Band) -> Wish {
        Wish {
            band,
            ttl: self.ttl,
        }
    }

    /// Behind the last block that lies in the range whole, of `full` blocks.
    fn end_block(&self, full: usize, size: usize) -> usize {
        self.end.map_or(full, |end| full.min(end / size))
    }

    fn last(&self) -> usize {
        self.end.unwrap_or(usize::MAX)
    }

    fn check(&self) -> Result<(), String> {
        if self.start >= self.last() {
            return Err(format!(
                "must end after its start, {}, not at {}",
                self.start,
                self.last()
            ));
        }
        if self.priority > Band::MOST {
            return Err(format!(
                "must have a priority from 0 to {}, not {}",
                Band::MOST,
                self.priority
            ));
        }
        match self.ttl {
            Some(Duration::ZERO) => Err("must have a TTL above 0".to_owned()),
            _ => Ok(()),
        }
    }

    fn check_apart(&self, others: &[Self]) -> Result<(), String> {
        let overlaps = |other: &Self| self.start < other.last() && other.start < self.last();
        let other = others.iter().position(overlaps);
        other.map_or(Ok(()), |other| {
            Err(format!("must not overlap range {other}"))
        })
    }
}
