//! However often the index was cleared, the cache is as good as new: every prompt can be cached, and is
//! found as quickly as before. PREFIXCACHE_RESETS sets the number of clears (20,000; `make test-long`
//! makes it a million).

use prefixcache_core::cache::PrefixCache;
use prefixcache_core::hash::Scope;
use prefixcache_core::pool::{MultiWriter, Writer};
use prefixcache_core::sequence::Sequence;
use prefixcache_core::store::PoolConfig;
use prefixcache_oracle::pools::Tested;

use crate::{fill, serve};

const BLOCK_SIZE: usize = 16;

fn resets() -> usize {
    let asked = std::env::var("PREFIXCACHE_RESETS").ok();
    asked.and_then(|asked| asked.parse().ok()).unwrap_or(20_000)
}

fn cache<P: Tested>(num_blocks: usize) -> PrefixCache<P> {
    crate::cache(PoolConfig::new(num_blocks), BLOCK_SIZE)
}

fn prompt<P: Tested>(cache: &PrefixCache<P>, number: u32, blocks: usize) -> Sequence {
    let tokens = (0..blocks * BLOCK_SIZE).map(|place| number + place as u32);
    cache.new_sequence(tokens.collect(), Scope::default(), Vec::new())
}

/// Serves a prompt and finds all of it afterwards.
fn put<P: Tested>(cache: &mut PrefixCache<P>, sequence: &mut Sequence) {
    serve(cache, sequence);
    cache.release(&mut [sequence]).unwrap();
    assert_eq!(
        cache.count_prefix_hits(sequence).unwrap(),
        sequence.num_tokens(),
        "a prompt was served and is not cached"
    );
}

fn check_good_as_new<P: Tested>(cache: &mut PrefixCache<P>, hits_by_bisection: bool) {
    cache.validate().unwrap();
    assert_eq!(cache.store().drops(), 0);
    assert_eq!(cache.store().evicts_in_order(), hits_by_bisection);
    // As long as the cache, but for a block.
    let mut long = prompt(cache, 1 << 20, cache.store().num_blocks() - 1);
    put(cache, &mut long);
    cache.validate().unwrap();
}

fn the_same_prompt_after_every_reset<P: Tested>(num_blocks: usize, by_bisection: bool) {
    let mut cache = cache::<P>(num_blocks);
    let mut same = prompt(&cache, 0, 8);
    for _ in 0..resets() {
        assert_eq!(cache.count_prefix_hits(&mut same).unwrap(), 0);
        put(&mut cache, &mut same);
        cache.clear_cache_index();
    }
    put(&mut cache, &mut same);
    cache.validate().unwrap();
    check_good_as_new(&mut cache, by_bisection);
}

#[test]
fn the_same_prompt_can_be_cached_after_every_reset() {
    the_same_prompt_after_every_reset::<Writer>(2048, true);
    the_same_prompt_after_every_reset::<Writer>(1 << 17, true);
    the_same_prompt_after_every_reset::<MultiWriter>(2048, false);
    the_same_prompt_after_every_reset::<MultiWriter>(1 << 17, false);
}

/// Some prompts of their own and one in a few copies, some of them served across the reset.
fn mixed_prompts_and_resets<P: Tested>(by_bisection: bool) {
    let mut cache = cache::<P>(2048);
    for round in 0..resets() as u32 / 4 {
        let mut copies: Vec<Sequence> = (0..3).map(|_| prompt(&cache, 0, 5)).collect();
        for copy in &mut copies {
            let plan = cache.commit_prefix_plan(copy, 0, 5 * BLOCK_SIZE);
            assert_eq!(plan, Ok(Some(0)));
        }
        for copy in &mut copies[..2] {
            fill(&mut cache, copy);
        }
        let mut own = prompt(&cache, round % 7 * 1000, 6);
        put(&mut cache, &mut own);
        cache.clear_cache_index();
        for copy in &mut copies {
            fill(&mut cache, copy);
            cache.release(&mut [copy]).unwrap();
        }
        put(&mut cache, &mut own);
        put(&mut cache, &mut copies[0]);
        if round % 512 == 0 {
            cache.validate().unwrap();
        }
    }
    check_good_as_new(&mut cache, by_bisection);
}

#[test]
fn other_prompts_and_copies_are_cached_after_every_reset() {
    mixed_prompts_and_resets::<Writer>(true);
    mixed_prompts_and_resets::<MultiWriter>(false);
}

/// What was full before a reset makes room for as much after it.
fn full_pool_and_resets<P: Tested>(by_bisection: bool) {
    let mut cache = cache::<P>(1 << 10);
    for round in 0..resets() as u32 / 256 {
        for number in 0..8 {
            let mut sequence = prompt(&cache, (round % 3 + number) * 10_000, 120);
            put(&mut cache, &mut sequence);
        }
        cache.validate().unwrap();
        cache.clear_cache_index();
    }
    check_good_as_new(&mut cache, by_bisection);
}

#[test]
fn a_full_pool_is_cached_again_after_every_reset() {
    full_pool_and_resets::<Writer>(true);
    full_pool_and_resets::<MultiWriter>(false);
}
