//! What no order of eviction can beat: Belady's MIN, for blocks that form a tree.
//!
//! Of the blocks that the request at hand does not need, the one goes whose next use is the furthest; of
//! several with the same next use, the one that lies deepest in its prompt. A block is used whenever one
//! behind it is, so a prefix is never lost before what follows it, and every block that is kept can hit.
//!
//! The blocks that a request uses next are a range of its prompt: what lies before them is used earlier by another
//! one. So a cache is a range for each coming request, and blocks without a next use need not be kept.

use std::collections::BTreeMap;
use std::ops::Range;

/// What a cache of some size hits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hits {
    /// Requests that hit a block or more.
    pub requests: u64,
    /// Tokens that hit.
    pub tokens: u64,
}

/// A range of blocks of two prompts, between whose requests nobody uses them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reuse {
    /// The earlier request.
    pub(crate) last: u32,
    /// The later one.
    pub(crate) next: u32,
    /// The first block, counted from the beginning of both prompts.
    pub(crate) start: u32,
    /// The block after the last.
    pub(crate) end: u32,
}

/// A request's full blocks, and those of them that may hit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prompt {
    pub(crate) blocks: u32,
    pub(crate) most_hits: u32,
}

/// What requests hit in `num_blocks` blocks that are always the best to keep. `reuses` come by their `last`.
pub(crate) fn hits(
    prompts: &[Prompt],
    mut reuses: &[Reuse],
    num_blocks: usize,
    block_size: usize,
) -> Hits {
    let mut kept = Kept::default();
    let mut hits = Hits::default();
    for (number, prompt) in (0_u32..).zip(prompts) {
        let found = kept.take(number).min(prompt.most_hits as usize);
        hits.tokens += (found * block_size) as u64;
        hits.requests += u64::from(found > 0);
        kept.shrink(num_blocks - num_blocks.min(prompt.blocks as usize));
        let of_this = reuses.partition_point(|reuse| reuse.last == number);
        let (these, later) = reuses.split_at(of_this);
        for reuse in these {
            let end = (reuse.end as usize).min(num_blocks);
            kept.add(reuse.next, reuse.start as usize..end);
        }
        reuses = later;
    }
    hits
}

/// The blocks that are cached, by the request that uses them next: a range of its prompt.
#[derive(Default)]
struct Kept {
    ranges: BTreeMap<u32, Range<usize>>,
    count: usize,
}

impl Kept {
    /// Takes out what a request uses; how many leading blocks of its prompt that is.
    fn take(&mut self, request: u32) -> usize {
        let range = self.ranges.remove(&request).unwrap_or_default();
        self.count -= range.len();
        range.end
    }

    /// Gives up blocks until at most `most` are kept.
    fn shrink(&mut self, most: usize) {
        while self.count > most
            && let Some(mut last) = self.ranges.last_entry()
        {
            let range = last.get_mut();
            let surplus = (self.count - most).min(range.len());
            range.end -= surplus;
            self.count -= surplus;
            if range.start == range.end {
                last.remove();
            }
        }
    }

    /// Keeps blocks before those that are kept for the same request.
    fn add(&mut self, request: u32, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        self.count += range.len();
        let kept = self.ranges.entry(request).or_insert(range.end..range.end);
        kept.start = range.start;
    }
}
