//! The operations recorded from vLLM's own manager: the same block ids, hits and free order from every
//! pool.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader};

use flate2::read::GzDecoder;
use prefixcache_core::cache::PrefixCache;
use prefixcache_core::groups::{GroupSpec, Groups};
use prefixcache_core::hash::{HashConfig, Scope};
use prefixcache_core::id::BlockId;
use prefixcache_core::pool::{Shared, SingleWriter, Writer};
use prefixcache_core::sequence::Sequence;
use prefixcache_core::store::{BlockStore, PoolConfig};
use prefixcache_oracle::plain::PlainPool;
use serde::Deserialize;

#[derive(Deserialize)]
struct Config {
    num_blocks: usize,
    block_size: usize,
    sliding_window: Option<usize>,
}

impl Config {
    fn groups(&self) -> Groups {
        let window = self.sliding_window;
        let window = window.map(|window| GroupSpec::SlidingWindow { window });
        let specs = std::iter::once(GroupSpec::FullAttention).chain(window);
        Groups::new(specs.collect()).unwrap()
    }
}

#[derive(Debug, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
enum Operation {
    New {
        req: String,
        tokens: Vec<u32>,
    },
    Match {
        req: String,
        hit_tokens: usize,
    },
    Allocate {
        req: String,
        new_tokens: usize,
        hit_tokens: usize,
        ok: bool,
        tables: Option<Vec<Vec<u32>>>,
        free: usize,
    },
    Sampled {
        req: String,
        token: u32,
    },
    Append {
        req: String,
        new_tokens: usize,
        ok: bool,
        tables: Option<Vec<Vec<u32>>>,
        free: usize,
    },
    Preempt {
        req: String,
        free_order: Vec<u32>,
    },
    Free {
        req: String,
        free_order: Vec<u32>,
    },
    Reset {
        ok: bool,
        free_order: Vec<u32>,
    },
    End {
        free_order: Vec<u32>,
        hashed: Vec<u32>,
    },
}

fn recording(kind: &str, number: u32) -> impl Iterator<Item = String> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors");
    let file = File::open(format!("{folder}/vllm_order_{kind}.{number}.jsonl.gz")).unwrap();
    BufReader::new(GzDecoder::new(file))
        .lines()
        .map(Result::unwrap)
}

fn numbers(blocks: &[BlockId]) -> Vec<u32> {
    blocks.iter().map(|block| block.get()).collect()
}

struct Replay<S> {
    cache: PrefixCache<S>,
    sequences: HashMap<String, Sequence>,
}

impl<S: BlockStore> Replay<S> {
    fn new(config: &Config, store: S) -> Self {
        let hashing = HashConfig::new(config.block_size, config.groups());
        Self {
            cache: PrefixCache::new(hashing, store).unwrap(),
            sequences: HashMap::new(),
        }
    }

    fn step(&mut self, operation: Operation) {
        match operation {
            Operation::New { req, tokens } => {
                let made = self
                    .cache
                    .new_sequence(tokens, Scope::default(), Vec::new());
                self.sequences.insert(req, made);
            }
            Operation::Match { req, hit_tokens } => self.matches(&req, hit_tokens),
            Operation::Allocate {
                req,
                new_tokens,
                hit_tokens,
                ok,
                tables,
                free,
            } => {
                let sequence = self.sequences.get_mut(&req).unwrap();
                let taken = self
                    .cache
                    .commit_prefix_plan(sequence, hit_tokens, new_tokens);
                assert_eq!(taken.unwrap(), ok.then_some(hit_tokens));
                self.fill(&req, ok, tables, free);
            }
            Operation::Append {
                req,
                new_tokens,
                ok,
                tables,
                free,
            } => {
                let sequence = self.sequences.get_mut(&req).unwrap();
                let computed = sequence.num_filled();
                self.cache
                    .drop_unneeded(&mut [sequence], &[computed])
                    .unwrap();
                let served = self.cache.append_slots(&mut [sequence], &[new_tokens]);
                assert_eq!(served.unwrap(), usize::from(ok));
                self.fill(&req, ok, tables, free);
            }
            Operation::Sampled { req, token } => {
                let sequence = self.sequences.get_mut(&req).unwrap();
                self.cache.append_tokens(&mut [sequence], &[token]).unwrap();
            }
            Operation::Preempt { req, free_order } => {
                self.cache
                    .release(&mut [self.sequences.get_mut(&req).unwrap()])
                    .unwrap();
                self.check_order(&free_order);
            }
            Operation::Free { req, free_order } => {
                let mut sequence = self.sequences.remove(&req).unwrap();
                self.cache.release(&mut [&mut sequence]).unwrap();
                self.check_order(&free_order);
            }
            // vLLM refuses to reset while blocks are live; this cache does not, so it must not be asked.
            Operation::Reset { ok: false, .. } => {}
            Operation::Reset { free_order, .. } => {
                self.cache.clear_cache_index();
                self.check_order(&free_order);
            }
            Operation::End { free_order, hashed } => {
                self.check_order(&free_order);
                assert_eq!(numbers(&self.cache.store().cached_blocks()), hashed);
            }
        }
    }

    /// At least one token of a prompt is always computed.
    fn matches(&mut self, req: &str, hit_tokens: usize) {
        let sequence = self.sequences.get_mut(req).unwrap();
        let computable = sequence.num_tokens() - 1;
        let hits = self.cache.count_prefix_hits_within(sequence, computable);
        assert_eq!(hits.unwrap(), hit_tokens);
    }

    /// The recording takes blocks as filled in the call that allocates them.
    fn fill(&mut self, req: &str, ok: bool, tables: Option<Vec<Vec<u32>>>, free: usize) {
        let sequence = self.sequences.get_mut(req).unwrap();
        if ok {
            let upto = sequence.num_slots();
            self.cache
                .mark_blocks_filled(&mut [sequence], &[upto])
                .unwrap();
            let groups = 0..sequence.num_groups();
            let own: Vec<_> = groups
                .map(|group| numbers(sequence.block_table(group)))
                .collect();
            assert_eq!(own, tables.unwrap());
        }
        assert_eq!(self.cache.store().num_free(), free);
    }

    fn check_order(&self, free_order: &[u32]) {
        assert_eq!(numbers(&self.cache.store().free_order()), free_order);
    }
}

fn replay<S: BlockStore>(make: impl Fn(PoolConfig) -> S) {
    for (kind, number) in ["full", "hybrid"]
        .iter()
        .flat_map(|kind| (1..=3).map(move |n| (kind, n)))
    {
        let mut lines = recording(kind, number);
        let config: Config = serde_json::from_str(&lines.next().unwrap()).unwrap();
        let mut replay = Replay::new(&config, make(PoolConfig::new(config.num_blocks)));
        let mut count = 0;
        for line in lines {
            replay.step(serde_json::from_str(&line).unwrap());
            replay.cache.validate().unwrap();
            count += 1;
        }
        assert!(count > 5000);
    }
}

#[test]
fn plain_pool() {
    replay(|config| PlainPool::new(config).unwrap());
}

#[test]
fn block_pool_with_a_single_writer() {
    replay(|config| Writer::<SingleWriter>::with_ring_capacity(config, 256).unwrap());
}

#[test]
fn block_pool_shared() {
    replay(|config| Writer::<Shared>::with_ring_capacity(config, 256).unwrap());
}
