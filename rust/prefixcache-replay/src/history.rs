//! What one pass over a trace says of it: its blocks, what a cache without a bound hits, and the next use of each
//! block, which is all that the offline optimum asks. The blocks that one request used last and another one uses next are a range of
//! both prompts, so uses are kept as ranges.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use prefixcache_serving::mix::{Mixed, mix};

use crate::optimum::{self, Hits, Prompt, Reuse};
use crate::trace::{BlockKey, Request};

/// The uses of all blocks so far.
#[derive(Default)]
pub struct History {
    block_size: usize,
    caches_answers: bool,
    /// By the mixed keys, which are numbers in a row or hashes.
    last_use: HashMap<u64, u32, BuildHasherDefault<Mixed>>,
    prompts: Vec<Prompt>,
    reuses: Vec<Reuse>,
    input_tokens: u64,
    infinite: Hits,
}

impl History {
    /// The history of nothing; of prompts alone, or also of the blocks that answers fill.
    #[must_use]
    pub fn new(block_size: usize, caches_answers: bool) -> Self {
        Self { block_size, caches_answers, ..Self::default() }
    }

    /// Adds a request.
    pub fn push(&mut self, request: &Request) {
        let number = self.prompts.len() as u32;
        let blocks = match self.caches_answers {
            true => &request.blocks,
            false => request.prompt(),
        };
        let most = request.most_hits(self.block_size);
        let known = self.use_blocks(number, blocks);
        let hits = known.min(most);
        self.infinite.tokens += (hits * self.block_size) as u64;
        self.infinite.requests += u64::from(hits > 0);
        self.input_tokens += request.input_tokens as u64;
        self.prompts
            .push(Prompt { blocks: blocks.len() as u32, most_hits: most.min(blocks.len()) as u32 });
    }

    /// Notes the use of a prompt's blocks; how many of them were used before.
    fn use_blocks(&mut self, number: u32, blocks: &[BlockKey]) -> usize {
        let first = self.reuses.len();
        let mut known = 0;
        for (depth, &key) in blocks.iter().enumerate() {
            let Some(last) = self.last_use.insert(mix(key), number) else {
                continue;
            };
            known = depth + 1;
            match self.reuses[first..].last_mut() {
                Some(reuse) if reuse.last == last => reuse.end += 1,
                _ => self.reuses.push(Reuse {
                    last,
                    next: number,
                    start: depth as u32,
                    end: depth as u32 + 1,
                }),
            }
        }
        known
    }

    /// Tokens of all prompts.
    #[must_use]
    pub fn input_tokens(&self) -> u64 {
        self.input_tokens
    }

    /// How many requests there were.
    #[must_use]
    pub fn num_requests(&self) -> usize {
        self.prompts.len()
    }

    /// How many blocks all prompts have, each counted once.
    #[must_use]
    pub fn num_unique_blocks(&self) -> usize {
        self.last_use.len()
    }

    /// What a cache without a bound hits.
    #[must_use]
    pub fn infinite(&self) -> Hits {
        self.infinite
    }

    /// What a cache of each of these sizes hits at most, whatever order it evicts in.
    #[must_use]
    pub fn optimum(&self, sizes: &[usize]) -> Vec<Hits> {
        let mut reuses = self.reuses.clone();
        reuses.sort_by_key(|reuse| reuse.last);
        let hits = |&size: &usize| optimum::hits(&self.prompts, &reuses, size, self.block_size);
        sizes.iter().map(hits).collect()
    }
}
