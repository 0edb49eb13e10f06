//! A trace through the real cache: what hits.

use std::time::Duration;

use prefixcache_core::error::{CacheError, InvalidArgument, PoolError};
use prefixcache_core::{
    BlockPool, BlockStore, EvictionPolicy, Extras, Groups, HashConfig, PoolConfig, PrefixCache,
    Scope, SingleWriter,
};
use thiserror::Error;

use crate::trace::{Request, Trace};

/// What a trace's requests found in a cache.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    input_tokens: u64,
    /// Of each request, the tokens of its prompt that had to be computed.
    computed: Vec<usize>,
}

/// Why a trace could not be run.
#[derive(Debug, Error)]
pub enum ReplayError {
    /// The pool could not be made.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The cache could not be made.
    #[error(transparent)]
    Argument(#[from] InvalidArgument),
    /// The cache refused a call.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

impl Outcome {
    pub(crate) fn push(&mut self, request: &Request, hit_tokens: usize) {
        self.input_tokens += request.input_tokens as u64;
        self.computed.push(request.input_tokens - hit_tokens);
    }

    /// The share of all prompts' tokens that hit, from 0 to 1.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        let computed: usize = self.computed.iter().sum();
        1.0 - computed as f64 / self.input_tokens.max(1) as f64
    }

    /// The tokens that a request has to compute, at a percentile from 0 to 100 of all requests. With every
    /// token at one cost, and without waiting, this is the time to the first token.
    #[must_use]
    pub fn computed_at(&self, percentile: usize) -> usize {
        let mut computed = self.computed.clone();
        computed.sort_unstable();
        let rank = (computed.len() * percentile).div_ceil(100);
        computed.get(rank.saturating_sub(1)).copied().unwrap_or(0)
    }
}

/// The tokens of a prompt that may hit, in blocks: at least one token is always computed.
pub(crate) fn most_hits(trace: &Trace, request: &Request) -> usize {
    request.input_tokens.saturating_sub(1) / trace.block_size
}

/// Runs a trace through a cache of `num_blocks` blocks, request by request.
///
/// Every block of a prompt can be reused as soon as its request is answered; blocks that answers fill are
/// left out. Of a prompt that is longer than the pool the end is computed without a place in it.
pub fn replay(
    trace: &Trace,
    num_blocks: usize,
    eviction_policy: EvictionPolicy,
) -> Result<Outcome, ReplayError> {
    let pool = BlockPool::<SingleWriter>::new(PoolConfig {
        eviction_policy,
        ..PoolConfig::new(num_blocks + 1)
    })?;
    let cache = PrefixCache::new(one_token_blocks()?, pool)?;
    let mut outcome = Outcome::default();
    for request in &trace.requests {
        if let Some(reuse) = cache.store().reuse_queue() {
            reuse.set_time(Duration::from_millis(request.time_ms));
        }
        let hits = ask(&cache, trace, request, num_blocks)?;
        outcome.push(request, hits * trace.block_size);
    }
    Ok(outcome)
}

/// A block of the trace is one token here, its number: so are blocks the same as often as in the trace.
fn one_token_blocks() -> Result<HashConfig, InvalidArgument> {
    Ok(HashConfig {
        model: "trace".into(),
        revision: String::new(),
        kv_dtype: String::new(),
        arithmetic: String::new(),
        block_size: 1,
        groups: Groups::full(1)?,
    })
}

/// A request's whole life; how many of its blocks hit.
fn ask(
    cache: &PrefixCache<BlockPool<SingleWriter>>,
    trace: &Trace,
    request: &Request,
    num_blocks: usize,
) -> Result<usize, CacheError> {
    let mut tokens: Vec<u32> = trace
        .prompt(request)
        .iter()
        .map(|node| node.index() as u32)
        .collect();
    tokens.truncate(num_blocks);
    if tokens.is_empty() {
        return Ok(0);
    }
    let length = tokens.len();
    let mut sequence = cache.new_sequence(tokens, Scope::default(), Extras::new());
    let most = most_hits(trace, request);
    let hits = cache.count_prefix_hits_within(&mut sequence, most)?;
    let taken = cache.commit_prefix_plan(&mut sequence, hits, length - hits)?;
    assert_eq!(taken, Some(hits), "a pool that nobody else uses has room");
    cache.mark_blocks_filled(&mut [&mut sequence], &[length])?;
    cache.release(&mut [&mut sequence])?;
    Ok(hits)
}
