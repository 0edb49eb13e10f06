//! The real cache of one configuration, and what its requests found.

use std::time::Duration;

use prefixcache_core::cache::CacheBuilder;
use prefixcache_core::error::{CacheError, InvalidArgument, ListenError, PoolError};
use prefixcache_core::hints::{Hint, Hints, Owner};
use prefixcache_core::id::BlockHash;
use prefixcache_core::sequence::retention::Retention;
use prefixcache_core::{
    EvictionPolicy, Extras, GroupSpec, Groups, HashConfig, Lookup, PoolConfig, PrefixCache, Scope,
    Sequence, Writer,
};
use thiserror::Error;

use crate::disk::{Disk, DiskConfig};
use crate::quantiles::Quantiles;
use crate::trace::{BlockKey, Request};

/// A block of the trace is two tokens here, the halves of its key: so are blocks the same as often as in the trace.
const BLOCK_SIZE: usize = 2;

/// The most contents whose TTL ends at once, as a server does before each step.
const MAX_EXPIRED: usize = 256;

/// The tokens that a step of the server computes for models with states.
const STEP_TOKENS: usize = 512;

/// Where snapshots of the states of a model are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Snapshots {
    /// Where the server keeps them: at anchors, and where its steps end.
    Anchors,
    /// Where prompts and answers end.
    Ends,
    /// At the end of every block.
    Every,
}

/// How a cache is run.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// Blocks of the pool.
    pub num_blocks: usize,
    /// Which block goes first.
    pub eviction_policy: EvictionPolicy,
    /// What is said of every prompt, in tokens of the trace; none: what the trace says.
    pub hints: Vec<Hint>,
    /// Whether blocks that answers fill are cached too, where the trace knows them.
    pub caches_answers: bool,
    /// Of a model with states, where snapshots are kept, and how many blocks one takes.
    pub snapshots: Option<(Snapshots, usize)>,
    /// The disk behind it; not for models with states.
    pub disk: Option<DiskConfig>,
}

impl CacheConfig {
    /// A cache of prompts alone, without hints, states or a disk.
    #[must_use]
    pub fn new(num_blocks: usize, eviction_policy: EvictionPolicy) -> Self {
        Self {
            num_blocks,
            eviction_policy,
            hints: Vec::new(),
            caches_answers: false,
            snapshots: None,
            disk: None,
        }
    }

    /// The groups of the pool, its blocks, and how many of them no request's keys and values may take.
    fn pool(&self) -> Result<(Groups, usize, usize), InvalidArgument> {
        let (groups, num_blocks) = (Groups::full(1)?, self.num_blocks);
        Ok(match self.snapshots {
            None => (groups, num_blocks, 0),
            // All that belongs to a block comes and goes together.
            Some((Snapshots::Every, size)) => (groups, num_blocks / (1 + size), 0),
            Some((_, size)) => {
                let mut specs = vec![GroupSpec::State; size];
                let held = Groups::new(specs.clone())?.most_blocks(usize::MAX, 1, BLOCK_SIZE);
                specs.insert(0, GroupSpec::FullAttention);
                (Groups::new(specs)?, num_blocks, held)
            }
        })
    }
}

/// What a trace's requests found in a cache.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Requests that were asked.
    pub requests: u64,
    /// Those that hit a block or more.
    pub hit_requests: u64,
    /// Tokens of all prompts.
    pub input_tokens: u64,
    /// Those that hit in the pool.
    pub hit_tokens: u64,
    /// Those that hit on its disk.
    pub disk_tokens: u64,
    /// Blocks that were written to the disk.
    pub disk_writes: u64,
    /// Blocks whose content was evicted for another's.
    pub evictions: u64,
    /// Of each request, the tokens of its prompt that had to be computed.
    pub computed: Quantiles,
}

impl Outcome {
    /// The share of all prompts' tokens that hit, from 0 to 1.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        self.hit_tokens as f64 / self.input_tokens.max(1) as f64
    }

    pub(crate) fn push(&mut self, input_tokens: usize, hit_tokens: usize, disk_tokens: usize) {
        let saved = hit_tokens + disk_tokens;
        self.requests += 1;
        self.hit_requests += u64::from(saved > 0);
        self.input_tokens += input_tokens as u64;
        self.hit_tokens += hit_tokens as u64;
        self.disk_tokens += disk_tokens as u64;
        self.computed.push((input_tokens - saved) as u64);
    }
}

/// Why a cache could not be made.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The pool could not be made.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The cache could not be made.
    #[error(transparent)]
    Argument(#[from] InvalidArgument),
    /// There is no memory for the log of evictions.
    #[error(transparent)]
    Listen(#[from] ListenError),
}

/// A cache, and what its requests found.
pub struct Cache {
    cache: PrefixCache<Writer>,
    /// What is said of every prompt, whatever the trace says.
    hints: Vec<Hint>,
    /// The most blocks of a request.
    most_blocks: usize,
    snapshots: Option<Snapshots>,
    block_size: usize,
    caches_answers: bool,
    disk: Option<Disk>,
    outcome: Outcome,
}

/// A request that has not begun.
pub struct Waiting {
    sequence: Sequence,
    answer: Vec<u32>,
    most_hits: usize,
    pub(crate) input_tokens: usize,
}

impl Waiting {
    /// The blocks of its prompt that have a place in the pool, as KV events name them.
    #[must_use]
    pub fn hashes(&self) -> Vec<u64> {
        self.sequence.hashes().iter().map(BlockHash::short).collect()
    }
}

impl Cache {
    /// A cache without content, for traces of this block size.
    pub fn new(config: &CacheConfig, block_size: usize) -> Result<Self, ConfigError> {
        let (groups, num_blocks, of_states) = config.pool()?;
        let mut pool = Writer::new(
            PoolConfig::new(num_blocks.saturating_add(1).max(2))
                .with_eviction_policy(config.eviction_policy),
        )?;
        let disk = config.disk.map(|disk| Disk::new(disk, &mut pool));
        let hashing = HashConfig::new(BLOCK_SIZE, groups).with_model("trace", "", "");
        let has_groups = |&(rule, _): &(Snapshots, usize)| rule != Snapshots::Every;
        Ok(Self {
            cache: CacheBuilder::new(hashing).hints(1.0).build(pool)?,
            hints: config.hints.clone(),
            most_blocks: num_blocks.saturating_sub(of_states),
            snapshots: config.snapshots.filter(has_groups).map(|(rule, _)| rule),
            block_size,
            caches_answers: config.caches_answers,
            disk: disk.transpose()?,
            outcome: Outcome::default(),
        })
    }

    /// Hashes a request. Of one that is longer than the pool the end is computed without a place in it.
    ///
    /// Fails for hints of the trace that are none.
    pub fn prepare(&self, request: &Request) -> Result<Waiting, CacheError> {
        let blocks = &request.blocks[..request.blocks.len().min(self.most_blocks)];
        let (prompt, answer) = blocks.split_at(request.num_prompt_blocks.min(blocks.len()));
        let answer = if self.caches_answers { answer } else { &[] };
        let scope = Scope::default();
        let mut sequence = self.cache.new_sequence(tokens(prompt), scope, Extras::new());
        let hints = match self.hints.is_empty() {
            true => &request.hints,
            false => &self.hints,
        };
        if !hints.is_empty() {
            sequence.set_hints(of_blocks(hints, self.block_size)?);
        }
        Ok(Waiting {
            sequence,
            answer: tokens(answer),
            most_hits: request.most_hits(self.block_size),
            input_tokens: request.input_tokens,
        })
    }

    /// The tokens of a request that would hit now.
    pub fn probe(&self, waiting: &mut Waiting) -> Result<usize, CacheError> {
        Ok(self.count_hits(waiting)? * self.block_size)
    }

    fn count_hits(&self, waiting: &mut Waiting) -> Result<usize, CacheError> {
        let most = waiting.most_hits * BLOCK_SIZE;
        let sequence = &mut waiting.sequence;
        Ok(self.cache.count_prefix_hits_within(sequence, most)? / BLOCK_SIZE)
    }

    /// Runs a request from its start to its end, at a time from the trace's start. Returns the tokens that hit.
    ///
    /// All of its blocks can be reused as soon as it is answered.
    pub fn run(&mut self, mut waiting: Waiting, now: Duration) -> Result<usize, CacheError> {
        self.cache.set_time(now);
        self.cache.demote_expired(MAX_EXPIRED);
        let (hits, on_disk) = match (waiting.sequence.num_tokens(), self.snapshots) {
            (0, _) => (0, 0),
            (_, None) => self.run_blocks(&mut waiting)?,
            (_, Some(snapshots)) => (self.run_steps(&mut waiting, snapshots)?, 0),
        };
        let [hit_tokens, disk_tokens] = [hits, on_disk].map(|blocks| blocks * self.block_size);
        self.outcome.push(waiting.input_tokens, hit_tokens, disk_tokens);
        Ok(hit_tokens)
    }

    /// Returns the blocks that hit in the pool, and those behind them that hit on the disk.
    fn run_blocks(&mut self, waiting: &mut Waiting) -> Result<(usize, usize), CacheError> {
        let hits = self.count_hits(waiting)?;
        let sequence = &mut waiting.sequence;
        let length = sequence.num_tokens();
        let hit_slots = hits * BLOCK_SIZE;
        let taken = self.cache.commit_prefix_plan(sequence, hit_slots, length - hit_slots)?;
        assert_eq!(taken, Some(hit_slots), "a pool that nobody else uses has room");
        let most = waiting.most_hits.min(sequence.hashes().len());
        let beyond = sequence.hashes().get(hits..most).unwrap_or_default();
        let on_disk = self.disk.as_mut().map_or(0, |disk| disk.load(beyond));
        let length = self.add_answer(sequence, &waiting.answer)?;
        self.cache.mark_blocks_filled(&mut [sequence], &[length])?;
        self.cache.release(&mut [sequence])?;
        if let Some(disk) = &mut self.disk {
            disk.write();
        }
        Ok((hits, on_disk))
    }

    /// Runs a request of a model with states step by step, as the server does.
    fn run_steps(
        &mut self,
        waiting: &mut Waiting,
        snapshots: Snapshots,
    ) -> Result<usize, CacheError> {
        let hits = self.count_hits(waiting)?;
        let most = waiting.most_hits * BLOCK_SIZE;
        let Waiting { sequence, answer, .. } = waiting;
        let (mut computed, length) = (hits * BLOCK_SIZE, sequence.num_tokens());
        let keeps_anchors = snapshots == Snapshots::Anchors;
        let mut step = length;
        if keeps_anchors {
            step = (STEP_TOKENS / self.block_size).max(1) * BLOCK_SIZE;
            let (interval, pins) = (0, None);
            sequence.set_retention(Retention::Anchors { interval, pins });
            // The prompt's end, and the place up to which attention could have hit.
            let whole = self.cache.count_whole_hits(sequence, most)?;
            sequence.add_prompt_end(most);
            if whole > computed {
                sequence.add_anchor(whole);
            }
        }
        let taken = self.cache.commit_in_chunks(sequence, computed, length - computed, step)?;
        assert_eq!(taken, Some(computed), "a pool that nobody else uses has room");
        while computed < length {
            let upto = length.min(computed + step);
            self.compute(sequence, computed, upto, keeps_anchors)?;
            computed = upto;
        }
        sequence.extend(answer);
        while computed < sequence.num_tokens() {
            let upto = if keeps_anchors { computed + BLOCK_SIZE } else { sequence.num_tokens() };
            self.compute(sequence, computed, upto, false)?;
            computed = upto;
        }
        self.cache.release(&mut [sequence])?;
        Ok(hits)
    }

    fn compute(
        &mut self,
        sequence: &mut Sequence,
        from: usize,
        upto: usize,
        keeps_anchors: bool,
    ) -> Result<(), CacheError> {
        let batch = &mut [sequence];
        let served = self.cache.ensure_slots(batch, &[upto])?;
        assert_eq!(served, 1, "a pool that nobody else uses has room");
        if keeps_anchors {
            self.cache.keep_snapshots(batch, &[from])?;
        }
        for one in self.cache.mark_blocks_filled(batch, &[upto])? {
            self.cache.replace_block(batch[0], one.group, one.index)?;
        }
        self.cache.drop_unneeded(batch, &[upto])?;
        Ok(())
    }

    /// The tokens that the sequence then has.
    fn add_answer(&mut self, sequence: &mut Sequence, answer: &[u32]) -> Result<usize, CacheError> {
        if !answer.is_empty() {
            sequence.extend(answer);
            let upto = sequence.num_tokens();
            self.cache.ensure_slots(&mut [sequence], &[upto])?;
        }
        Ok(sequence.num_tokens())
    }

    /// The pool.
    #[must_use]
    pub fn store(&self) -> &Writer {
        self.cache.store()
    }

    /// What the requests so far found.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        Outcome {
            evictions: self.cache.store().stats().evictions,
            disk_writes: self.disk.as_ref().map_or(0, Disk::num_written),
            ..self.outcome.clone()
        }
    }
}

fn tokens(blocks: &[BlockKey]) -> Vec<u32> {
    let halves = |&key: &BlockKey| [key as u32, (key >> 32) as u32];
    blocks.iter().flat_map(halves).collect()
}

/// Hints in tokens of the trace as those of the blocks here. They are of one owner, who may raise the whole pool.
fn of_blocks(hints: &[Hint], block_size: usize) -> Result<Hints, InvalidArgument> {
    let of_blocks = |hint: &Hint| Hint {
        start: hint.start / block_size * BLOCK_SIZE,
        end: hint.end.map(|end| end.div_ceil(block_size) * BLOCK_SIZE),
        ..*hint
    };
    Hints::new(Owner::named("trace"), hints.iter().map(of_blocks).collect())
}
