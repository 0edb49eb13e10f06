//! Small traces, and runs of them.

use std::collections::{HashMap, HashSet};
use std::env::temp_dir;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};

use prefixcache_core::EvictionPolicy;
use prefixcache_replay::cache::{CacheConfig, Outcome};
use prefixcache_replay::history::History;
use prefixcache_replay::replay::Simulation;
use prefixcache_replay::server::Server;
use prefixcache_replay::trace::{Reader, Request, TraceError};
use proptest::prelude::*;

/// Tokens in a block of the small traces.
pub const BLOCK_SIZE: usize = 512;

/// A reader of a file of this text. Its name ends in `text`.
pub fn reader(text: &str) -> Result<Reader, TraceError> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    // Relaxed: the numbers differ, and nothing else is read by them.
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let path = temp_dir().join(format!("prefixcache-{}-{number}-text", std::process::id()));
    fs::write(&path, text).unwrap();
    let reader = Reader::open(&path);
    fs::remove_file(&path).unwrap();
    reader
}

/// Prompts as lists of symbols: two that begin alike share the blocks of what they have in common.
pub fn trace_of(prompts: &[Vec<u8>]) -> Vec<Request> {
    let key = |prefix: &[u8]| {
        let mut hasher = DefaultHasher::new();
        prefix.hash(&mut hasher);
        hasher.finish()
    };
    let requests = prompts.iter().zip(0..).map(|(prompt, time_ms)| Request {
        time_ms,
        // One token more than the blocks hold: it is computed in any case, so that every block can hit.
        input_tokens: prompt.len() * BLOCK_SIZE + 1,
        output_tokens: 1,
        blocks: (1..=prompt.len()).map(|length| key(&prompt[..length])).collect(),
        num_prompt_blocks: prompt.len(),
        ..Request::default()
    });
    requests.collect()
}

/// Up to `requests` prompts of up to `length` blocks, which share much.
pub fn prompts(requests: usize, length: usize) -> impl Strategy<Value = Vec<Vec<u8>>> {
    prop::collection::vec(prop::collection::vec(0..2_u8, 0..=length), 1..=requests)
}

/// The first line of a recording.
pub const RECORDING: &str = r#"{"prefixcache_trace": 1, "recording": "ab", "part": 0, "block_size": 4, "num_blocks": 9, "max_blocks": 9, "max_cached_blocks": null, "groups": ["full"], "eviction_policy": "lru", "free_order": "unhashed_first", "retention_budget": 0.2, "merge_twins": false, "retention": null}"#;

/// An LRU cache of `num_blocks` blocks of prompts.
pub fn lru(num_blocks: usize) -> CacheConfig {
    CacheConfig::new(num_blocks, EvictionPolicy::Lru)
}

/// What requests find in the real cache.
pub fn replay(requests: &[Request], config: &CacheConfig, block_size: usize) -> Outcome {
    simulate(requests, config, None, block_size).outcome()
}

/// The real cache after requests, which a server answers if there is one.
pub fn simulate(
    requests: &[Request],
    config: &CacheConfig,
    server: Option<Server>,
    block_size: usize,
) -> Simulation {
    let mut simulation = Simulation::new(config, server, block_size).unwrap();
    requests.iter().for_each(|request| simulation.push(request).unwrap());
    simulation.finish().unwrap();
    simulation
}

/// The history of requests.
pub fn history(requests: &[Request], block_size: usize) -> History {
    let mut history = History::new(block_size, false);
    requests.iter().for_each(|request| history.push(request));
    history
}

/// A trace of the benches' folder: its requests and its block size.
pub fn public_trace(name: &str) -> (Vec<Request>, usize) {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/traces/");
    let reader = Reader::open(format!("{folder}{name}").as_ref()).unwrap();
    let block_size = reader.block_size();
    (reader.collect::<Result<_, _>>().unwrap(), block_size)
}

/// A block by all symbols up to it.
pub type Block = Vec<u8>;

/// The blocks of a prompt that a cache of `capacity` can hold.
pub fn blocks(prompt: &[u8], capacity: usize) -> Vec<Block> {
    let lengths = 1..=prompt.len().min(capacity);
    lengths.map(|length| prompt[..length].to_vec()).collect()
}

/// A list that is kept in the order of last use, the tail of a prompt before its head.
pub struct PlainLru {
    line: Vec<Block>,
    capacity: usize,
}

impl PlainLru {
    /// A cache without content.
    pub fn new(capacity: usize) -> Self {
        Self { line: Vec::new(), capacity }
    }

    /// How many leading blocks of a prompt it holds.
    pub fn hits(&self, prompt: &[u8]) -> usize {
        let wanted = blocks(prompt, self.capacity);
        let hits = wanted.iter().take_while(|block| self.line.contains(block));
        hits.count()
    }

    /// Uses a prompt's blocks; how many leading ones hit.
    pub fn take(&mut self, prompt: &[u8]) -> usize {
        let (hits, wanted) = (self.hits(prompt), blocks(prompt, self.capacity));
        self.line.retain(|block| !wanted.contains(block));
        let surplus = (self.line.len() + wanted.len()).saturating_sub(self.capacity);
        self.line.drain(..surplus);
        self.line.extend(wanted.into_iter().rev());
        hits
    }
}

/// A plain list, and another one for what goes from it after `min_uses` uses.
pub struct PlainDisk {
    memory: PlainLru,
    uses: HashMap<Block, u32>,
    /// What went before it was used often enough: the last blocks, and those before them.
    seen: [HashSet<Block>; 2],
    /// When it was used last, and as which one it was written.
    disk: HashMap<Block, (u64, u64)>,
    capacity: usize,
    min_uses: u32,
    time: u64,
}

impl PlainDisk {
    /// Lists without content.
    pub fn new(capacity: usize, on_disk: usize, min_uses: u32) -> Self {
        Self {
            memory: PlainLru::new(capacity),
            uses: HashMap::new(),
            seen: Default::default(),
            disk: HashMap::new(),
            capacity: on_disk,
            min_uses,
            time: 0,
        }
    }

    /// Uses a prompt's blocks; how many leading ones hit in memory, and how many behind them on the disk.
    pub fn take(&mut self, prompt: &[u8]) -> [u64; 2] {
        let before = self.memory.line.clone();
        let hits = self.memory.take(prompt);
        let wanted = blocks(prompt, self.memory.capacity);
        let beyond = wanted[hits..].iter();
        let loaded = beyond.take_while(|block| self.disk.contains_key(*block));
        let loaded: Vec<Block> = loaded.cloned().collect();
        self.time += 1;
        for block in &loaded {
            let number = self.disk[block].1;
            self.disk.insert(block.clone(), (self.time, number));
        }
        self.evict(before.into_iter());
        for block in wanted {
            let is_seen = self.seen.iter().any(|blocks| blocks.contains(&block));
            *self.uses.entry(block).or_insert(u32::from(is_seen)) += 1;
        }
        [hits as u64, loaded.len() as u64]
    }

    fn evict(&mut self, before: impl Iterator<Item = Block>) {
        let mut written = Vec::new();
        let evicted: Vec<_> = before.filter(|block| !self.memory.line.contains(block)).collect();
        for block in evicted {
            let uses = self.uses.remove(&block).unwrap_or_default();
            if self.disk.contains_key(&block) {
                continue;
            }
            if uses >= self.min_uses {
                written.push(block);
            } else {
                self.remember(block);
            }
        }
        for block in written {
            self.time += 1;
            self.disk.insert(block, (self.time, self.time));
        }
        while self.disk.len() > self.capacity {
            let oldest = self.disk.iter().min_by_key(|(_, used)| **used);
            let oldest = oldest.map(|(block, _)| block.clone()).unwrap();
            self.disk.remove(&oldest);
        }
    }

    fn remember(&mut self, block: Block) {
        if self.seen[0].len() >= 4 * (self.memory.capacity + 1) {
            self.seen.swap(0, 1);
            self.seen[0].clear();
        }
        self.seen[0].insert(block);
    }
}
