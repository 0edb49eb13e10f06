//! What a resize promises next to holders, registrations and other writers.

use std::cell::Cell;

use prefixcache_core::error::ResizeError;
use prefixcache_core::id::BlockId;
use prefixcache_core::pool::{MultiWriter, Writer};
use prefixcache_core::store::{BlockStore, Lookup, Moves, PoolConfig, Registration};
use prefixcache_oracle::pools::Tested;
use prefixcache_oracle::random::key;

use crate::allocate;

/// A pool of two blocks, the second of which holds content 1.
fn pool<P: Tested>() -> (P, BlockId) {
    let mut pool = P::build(PoolConfig::new(3));
    let blocks = allocate(&mut pool, 2);
    let outcome = pool.register(blocks[1], key(1), pool.epoch());
    assert_eq!(outcome, Ok(Registration::New));
    (pool, blocks[1])
}

/// Takes holds on the block by hits until it can count no more; how many.
fn hold_fully(pool: &mut impl BlockStore) -> usize {
    let mut held = Vec::new();
    let mut holders = 0;
    while pool.commit([key(1)].into_iter(), 0, &mut held) == Ok(1) {
        held.clear();
        holders += 1;
    }
    holders
}

#[test]
fn a_block_that_can_count_no_more_holders_leaves_the_pool() {
    let (mut pool, block) = pool::<MultiWriter>();
    let holders = hold_fully(&mut pool);
    assert_eq!(pool.resize(2), Ok(1));
    assert_eq!(pool.lookup(&key(1)), None);
    pool.release(&vec![block; holders]).unwrap();
    assert_eq!(pool.stats().in_use, 2);
    pool.release(&[block]).unwrap();
    assert_eq!(pool.stats().in_use, 1);
    pool.validate().unwrap();
}

/// Of blocks that are leaving no content can be given up.
#[test]
fn a_bound_on_cached_blocks_holds_once_blocks_are_not_leaving_any_more() {
    fn check<P: Tested>(come_back: impl Fn(&mut P)) {
        let (mut pool, block) = pool::<P>();
        pool.set_max_cached(Some(0));
        pool.begin_moves(2, 0, &mut Moves::default()).unwrap();
        pool.release(&[block]).unwrap();
        assert_eq!(pool.cached_blocks(), [block]);
        come_back(&mut pool);
        assert_eq!(pool.cached_blocks(), []);
        pool.validate().unwrap();
    }
    check::<Writer>(|pool| pool.begin_moves(3, 0, &mut Moves::default()).unwrap());
    check::<Writer>(|pool| assert_eq!(pool.resize(3), Ok(0)));
    check::<MultiWriter>(|pool| assert_eq!(pool.resize(3), Ok(0)));
}

#[test]
fn a_block_that_can_count_no_more_holders_is_registered_again() {
    let (mut pool, block) = pool::<Writer>();
    hold_fully(&mut pool);
    pool.clear_index();
    let outcome = pool.register(block, key(2), pool.epoch());
    assert_eq!(outcome, Ok(Registration::New));
    assert_eq!(pool.lookup(&key(2)), Some(block));
    pool.validate().unwrap();
}

/// The keys of a commit resize the pool, as another thread might while the commit takes its blocks.
#[test]
fn a_resize_with_a_writer_is_refused() {
    let (mut pool, block) = pool::<MultiWriter>();
    let other = pool.clone();
    let refusals = Cell::new(0);
    let keys = [1].into_iter().map(|content| {
        if let Err(refusal) = other.clone().resize(3) {
            assert_eq!(refusal, ResizeError::Busy);
            refusals.set(refusals.get() + 1);
        }
        key(content)
    });
    let mut held = Vec::new();
    assert_eq!(pool.commit(keys, 0, &mut held), Ok(1));
    assert!(refusals.get() > 0 && held == [block]);
    assert_eq!(pool.resize(2), Ok(1));
    pool.validate().unwrap();
}
