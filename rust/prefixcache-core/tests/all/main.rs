//! The tests of what the crate offers, as one program, which is linked once.

mod block_map;
mod cache_pools;
#[path = "../../../prefixcache-cpu/tests/common/cases.rs"]
mod cases;
mod copies;
mod follower;
mod hints;
mod hybrid;
mod memory;
mod pins;
mod pool_scripts;
mod prefix_hashes;
mod resets;
mod resize;
mod reuse_queue;
mod weight_versions;

use cases::cases;
use prefixcache_core::cache::PrefixCache;
use prefixcache_core::groups::Groups;
use prefixcache_core::hash::HashConfig;
use prefixcache_core::id::BlockId;
use prefixcache_core::policy::EvictionPolicy;
use prefixcache_core::sequence::Sequence;
use prefixcache_core::store::{BlockStore, FreeOrder, PoolConfig, Registration};
use prefixcache_oracle::pools::Tested;
use prefixcache_oracle::random::key;
use proptest::prelude::*;

fn allocate(pool: &mut impl BlockStore, count: usize) -> Vec<BlockId> {
    let mut blocks = Vec::new();
    pool.allocate(count, &mut blocks).expect("there is room");
    blocks
}

/// New blocks that hold the content of these numbers, first or as duplicates.
fn hold(pool: &mut impl BlockStore, numbers: impl ExactSizeIterator<Item = u64>) -> Vec<BlockId> {
    let blocks = allocate(pool, numbers.len());
    for (&block, number) in blocks.iter().zip(numbers) {
        let outcome = pool.register(block, key(number), pool.epoch()).unwrap();
        assert_ne!(outcome, Registration::Stale);
    }
    blocks
}

fn cache<P: Tested>(config: PoolConfig, block_size: usize) -> PrefixCache<P> {
    let hashing = HashConfig::new(block_size, Groups::full(1).unwrap());
    PrefixCache::new(hashing, P::build(config)).unwrap()
}

/// Publishes all that a sequence holds.
fn fill<S: BlockStore>(cache: &mut PrefixCache<S>, sequence: &mut Sequence) {
    let upto = sequence.num_tokens();
    cache.mark_blocks_filled(&mut [sequence], &[upto]).unwrap();
}

/// Takes what hits and computes and publishes the rest; the hits, in tokens.
fn serve<S: BlockStore>(cache: &mut PrefixCache<S>, sequence: &mut Sequence) -> usize {
    let hits = cache.count_prefix_hits(sequence).unwrap();
    let plan = cache.commit_prefix_plan(sequence, hits, sequence.num_tokens() - hits);
    assert_eq!(plan, Ok(Some(hits)));
    fill(cache, sequence);
    hits
}

/// Where released blocks go, and which of them is evicted first.
type Order = (FreeOrder, EvictionPolicy);

fn orders() -> impl Strategy<Value = Order> {
    let free = prop_oneof![Just(FreeOrder::UnhashedFirst), Just(FreeOrder::Append)];
    let policy = prop_oneof![Just(EvictionPolicy::Lru), Just(EvictionPolicy::ReuseQueue)];
    (free, policy)
}
