//! What one pass over a trace says of caches of every size.
//!
//! The stack of an LRU cache holds all blocks, the last used one on top; a cache of `n` blocks holds the top `n`.
//! A request puts the blocks of its prompt on top, the first one first, since the tail of a prompt goes before its
//! head. So the blocks that request `i` used last stand side by side in the stack, a range of its prompt from some
//! depth to its end, and a prompt's blocks by their last uses are a few such ranges. With the sizes of all ranges
//! in a tree of sums, the depth of a whole range in the stack is one question.
//!
//! The same ranges say when which blocks are used next, which is all that the offline optimum asks.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::optimum::{self, Hits, Prompt, Reuse};
use crate::trace::{BlockKey, Request};

/// How many blocks stood at each place of the stack when they were used.
#[derive(Default)]
struct Places {
    /// Differences between neighbouring places.
    differences: Vec<i64>,
}

impl Places {
    /// Counts `count` blocks that stood side by side.
    fn add(&mut self, first: usize, count: usize) {
        let end = first + count;
        if end >= self.differences.len() {
            self.differences.resize(end + 1, 0);
        }
        self.differences[first] += 1;
        self.differences[end] -= 1;
    }

    /// By size, how many of the blocks stood in a cache of it; the last entry holds for all larger ones.
    fn by_size(&self) -> Vec<u64> {
        let (mut at_place, mut upto) = (0, 0);
        let sums = self.differences.iter().map(|difference| {
            at_place += difference;
            upto += at_place;
            upto as u64
        });
        std::iter::once(0).chain(sums).collect()
    }
}

/// An LRU cache of some size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lru {
    /// What it hits.
    pub hits: Hits,
    /// Blocks that lose their content for another.
    pub evictions: u64,
}

/// The uses of all blocks so far.
pub struct History {
    block_size: usize,
    caches_answers: bool,
    last_use: HashMap<BlockKey, u32, BuildHasherDefault<KeyHasher>>,
    /// How many blocks each request was the last to use.
    sizes: Sums,
    prompts: Vec<Prompt>,
    reuses: Vec<Reuse>,
    input_tokens: u64,
    hinted: u64,
    infinite: Hits,
    /// Of all blocks.
    places: Places,
    /// Of those that may hit.
    hit_places: Places,
    /// Of first blocks that may hit.
    first_places: Places,
}

impl History {
    /// The history of nothing; of prompts alone, or also of the blocks that answers fill.
    #[must_use]
    pub fn new(block_size: usize, caches_answers: bool) -> Self {
        Self {
            block_size,
            caches_answers,
            last_use: HashMap::default(),
            sizes: Sums::default(),
            prompts: Vec::new(),
            reuses: Vec::new(),
            input_tokens: 0,
            hinted: 0,
            infinite: Hits::default(),
            places: Places::default(),
            hit_places: Places::default(),
            first_places: Places::default(),
        }
    }

    /// Adds a request.
    pub fn push(&mut self, request: &Request) {
        let number = self.prompts.len() as u32;
        let blocks = match self.caches_answers {
            true => &request.blocks,
            false => request.prompt(),
        };
        let most = request.most_hits(self.block_size);
        let first = self.reuses.len();
        let known = self.use_blocks(number, blocks);
        let hits = known.min(most);
        self.infinite.tokens += (hits * self.block_size) as u64;
        self.infinite.requests += u64::from(hits > 0);
        self.input_tokens += request.input_tokens as u64;
        self.hinted += u64::from(!request.hints.is_empty());
        for index in first..self.reuses.len() {
            self.count_places(index, most);
        }
        for index in first..self.reuses.len() {
            let Reuse {
                last, start, end, ..
            } = self.reuses[index];
            self.sizes.reduce(last as usize, u64::from(end - start));
        }
        self.sizes.push(blocks.len() as u64);
        self.prompts.push(Prompt {
            blocks: blocks.len() as u32,
            most_hits: most.min(blocks.len()) as u32,
        });
    }

    /// Notes the use of a prompt's blocks; how many of them were used before.
    fn use_blocks(&mut self, number: u32, blocks: &[BlockKey]) -> usize {
        let first = self.reuses.len();
        let mut known = 0;
        for (depth, &key) in blocks.iter().enumerate() {
            let Some(last) = self.last_use.insert(key, number) else {
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

    /// Counts the places of a range of blocks in the stack, of which those before `most` may hit.
    fn count_places(&mut self, index: usize, most: usize) {
        let Reuse {
            last, start, end, ..
        } = self.reuses[index];
        let place = self.sizes.after(last as usize) as usize;
        let (start, end) = (start as usize, end as usize);
        self.places.add(place, end - start);
        self.hit_places
            .add(place, end.min(most).saturating_sub(start));
        self.first_places
            .add(place, usize::from(start == 0 && most > 0));
    }

    /// Tokens of all prompts.
    #[must_use]
    pub fn input_tokens(&self) -> u64 {
        self.input_tokens
    }

    /// How many requests have hints of their own, which the stack of an LRU cache knows nothing of.
    #[must_use]
    pub fn num_hinted(&self) -> u64 {
        self.hinted
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

    /// LRU caches of these sizes.
    #[must_use]
    pub fn lru(&self, sizes: &[usize]) -> Vec<Lru> {
        let found = self.places.by_size();
        let hits = self.hit_places.by_size();
        let requests = self.first_places.by_size();
        let at = |sums: &[u64], size: usize| sums[size.min(sums.len() - 1)];
        let of_size = |&size: &usize| Lru {
            hits: Hits {
                requests: at(&requests, size),
                tokens: at(&hits, size) * self.block_size as u64,
            },
            evictions: self.num_stored(size)
                - at(&found, size)
                - size.min(self.num_unique_blocks()) as u64,
        };
        sizes.iter().map(of_size).collect()
    }

    /// The blocks that requests ask a cache of `size` for, each as often as it is asked for.
    fn num_stored(&self, size: usize) -> u64 {
        let stored = |prompt: &Prompt| u64::from(prompt.blocks).min(size as u64);
        self.prompts.iter().map(stored).sum()
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

/// Numbers in a row and the sums of their tails, which change in logarithmic time: a Fenwick tree.
#[derive(Default)]
struct Sums {
    /// At `i - 1`: the sum of the numbers from `i - lowest bit of i` on, `i` excluded.
    parts: Vec<u64>,
    total: u64,
}

impl Sums {
    /// Appends a number.
    fn push(&mut self, number: u64) {
        let end = self.parts.len() + 1;
        let start = end & (end - 1);
        let mut part = number;
        let mut at = end - 1;
        while at > start {
            part += self.parts[at - 1];
            at &= at - 1;
        }
        self.parts.push(part);
        self.total += number;
    }

    /// Takes `less` from the number at `index`.
    fn reduce(&mut self, index: usize, less: u64) {
        self.total -= less;
        let mut at = index + 1;
        while let Some(part) = self.parts.get_mut(at - 1) {
            *part -= less;
            at += at & at.wrapping_neg();
        }
    }

    /// The sum of the numbers after `index`.
    fn after(&self, index: usize) -> u64 {
        let mut upto = 0;
        let mut at = index + 1;
        while at > 0 {
            upto += self.parts[at - 1];
            at &= at - 1;
        }
        self.total - upto
    }
}

/// Spreads keys, which are numbers in a row or hashes.
#[derive(Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are words");
    }

    fn write_u64(&mut self, key: u64) {
        let spread = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = spread ^ (spread >> 32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
