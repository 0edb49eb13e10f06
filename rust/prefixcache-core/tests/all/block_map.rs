//! Maps that are drawn next to a thread that changes the pool. `pool_scripts.rs` compares maps at rest with those of
//! the plain pool, after each step.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use prefixcache_core::band::Band;
use prefixcache_core::id::{BlockId, BlockKey};
use prefixcache_core::pool::{BlockMap, BlockState, MultiWriter, Writer};
use prefixcache_core::store::{BlockStore, PoolConfig, WithReaders};
use prefixcache_oracle::pools::{Tested, Watched};
use prefixcache_oracle::random::{Random, key};
use proptest::prelude::*;

use crate::{cases, hold};

const BLOCKS: usize = 401;
/// Blocks of each state that stays what it is.
const STEADY: usize = 30;

/// Blocks that stay as they are, whatever others do: held, pinned and cached.
fn steady<P: Tested>(pool: &mut P) -> Vec<(BlockState, Vec<BlockId>)> {
    let part = |first| (0..STEADY).map(move |at| first + at as u64);
    let [held, pinned, cached] = [0, 1000, 2000].map(|first| hold(pool, part(first)));
    assert_eq!(pool.pin(&pinned), Ok(STEADY));
    for (number, &block) in (2000..).zip(&cached) {
        assert_eq!(pool.set_band(&key(number), block, Band::of(100)), P::HAS_HINTS);
    }
    pool.release(&pinned).unwrap();
    pool.release(&cached).unwrap();
    let mut steady = vec![(BlockState::Held, held), (BlockState::Pinned, pinned)];
    if P::HAS_HINTS {
        steady.push((BlockState::Cached, cached));
    }
    steady
}

/// Requests that hit, evict, and give up content, on what is left.
fn churn(pool: &mut impl BlockStore, seed: u64, stop: &AtomicBool) {
    let mut random = Random(seed);
    while !stop.load(Ordering::Relaxed) {
        let first = 10_000 + 40 * random.below(12);
        let keys: Vec<BlockKey> = (first..first + 40).map(key).collect();
        let hits = pool.count_leading(keys.iter().copied());
        let mut blocks = Vec::new();
        let taken = pool.commit(keys[..hits].iter().copied(), 40 - hits, &mut blocks);
        let taken = taken.expect("there is room");
        for (number, &block) in (first..).zip(&blocks).skip(taken) {
            let _ = pool.register(block, key(number), pool.epoch()).unwrap();
        }
        blocks.reverse();
        match random.below(4) {
            0 => pool.release_unneeded(&blocks).unwrap(),
            _ => pool.release(&blocks).unwrap(),
        }
    }
}

fn check(map: &BlockMap, steady: &[(BlockState, Vec<BlockId>)]) {
    let count =
        |state: BlockState| -> u32 { map.states.iter().map(|cell| cell[state as usize]).sum() };
    assert!(map.states.iter().all(|cell| cell.iter().sum::<u32>() == 1));
    for (state, blocks) in steady {
        for block in blocks {
            let cell = map.states[block.index() - 1];
            assert_eq!(cell[*state as usize], 1, "block {block} was seen as {cell:?}");
        }
    }
    assert_eq!(count(BlockState::Pinned) as usize, STEADY);
    let known: u32 = map.ages.iter().sum();
    let content = BLOCKS as u32 - 1 - count(BlockState::Free);
    assert!(known <= content, "{known} ages of {content} blocks");
}

/// Ends the writer, also where a check fails: it is waited for then too.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn draw_with_a_writer<P: Tested>(seed: u64, maps: usize) {
    let mut pool = P::build(PoolConfig::new(BLOCKS));
    let reader = pool.reader();
    reader.evictions().listen(64, &[]).unwrap();
    let steady = steady(&mut pool);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| churn(&mut pool, seed, &stop));
        let ending = Ending(&stop);
        let ages = [Duration::from_micros(50), Duration::from_millis(5)];
        let mut drawn = 0;
        while drawn < maps && !writer.is_finished() {
            check(&reader.map(BLOCKS, &ages), &steady);
            drawn += 1;
        }
        drop(ending);
        writer.join().expect("the writer was served");
    });
    pool.validate().expect("the pool is whole");
}

proptest! {
    #![proptest_config(cases(8))]

    #[test]
    fn what_stays_as_it_is_is_seen_so_with_a_writer(seed in any::<u64>()) {
        draw_with_a_writer::<MultiWriter>(seed, 200);
        draw_with_a_writer::<Writer>(seed, 200);
    }
}

#[test]
fn a_map_that_cannot_be_is_refused() {
    let pool = Writer::new(PoolConfig::new(5)).unwrap().reader();
    let second = Duration::from_secs(1);
    for (cells, ages, names) in [
        (0, vec![], "cells"),
        (1 << 17, vec![], "cells"),
        (4, vec![second, second], "age_bounds"),
        (4, vec![second; 65], "age_bounds"),
    ] {
        let error = pool.map(cells, &ages).expect_err("it was refused");
        assert!(error.to_string().starts_with(names), "{error}");
    }
    assert_eq!(pool.map(9, &[second]).unwrap().states, [[1, 0, 0, 0]; 4]);
}
