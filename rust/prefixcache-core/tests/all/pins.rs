//! Pins are of content, not holds: they last through hits and releases, and never past their epoch.

use prefixcache_core::band::Band;
use prefixcache_core::id::BlockId;
use prefixcache_core::pool::{MultiWriter, Writer};
use prefixcache_core::store::{BlockStore, Lookup, PoolConfig, Registration};
use prefixcache_oracle::plain::PlainPool;
use prefixcache_oracle::pools::Tested;
use prefixcache_oracle::random::key;

use crate::{allocate, hold};

const BLOCKS: usize = 8;

fn registered(pool: &mut impl BlockStore, number: u64) -> BlockId {
    hold(pool, std::iter::once(number))[0]
}

fn hit(pool: &mut impl BlockStore, number: u64) -> BlockId {
    let mut blocks = Vec::new();
    let hits = pool.commit(std::iter::once(key(number)), 0, &mut blocks);
    assert_eq!(hits, Ok(1));
    blocks[0]
}

/// A free pinned block with content.
fn pinned(pool: &mut impl BlockStore, number: u64) -> BlockId {
    let block = registered(pool, number);
    assert_eq!(pool.pin(&[block]), Ok(1));
    pool.release(&[block]).unwrap();
    block
}

/// Runs a test on each pool.
macro_rules! on_each_pool {
    ($($(#[$doc:meta])* fn $name:ident($pool:ident) $body:block)*) => {$(
        $(#[$doc])*
        #[test]
        fn $name() {
            fn run($pool: &mut impl BlockStore) {
                $body
                $pool.validate().unwrap();
            }
            let config = PoolConfig::new(BLOCKS + 1);
            run(&mut PlainPool::new(config).unwrap());
            run(&mut Writer::build(config));
            run(&mut MultiWriter::build(config));
        }
    )*};
}

on_each_pool! {
    fn a_pin_lasts_when_two_who_hit_the_block_let_go(pool) {
        let block = pinned(pool, 1);
        assert_eq!(pool.stats().pinned_free, 1);
        let both = [hit(pool, 1), hit(pool, 1)];
        pool.release(&both[..1]).unwrap();
        assert_eq!(pool.num_free(), BLOCKS - 1, "one still holds it");
        pool.release(&both[1..]).unwrap();
        assert_eq!((pool.num_free(), pool.stats().pinned_free), (BLOCKS, 1));
        assert_eq!(pool.free_order().last(), Some(&block));
    }

    fn an_unpinned_block_stays_unpinned_through_a_hit(pool) {
        pinned(pool, 1);
        let block = hit(pool, 1);
        assert_eq!(pool.unpin(&[block]), Ok(1));
        pool.release(&[block]).unwrap();
        let again = hit(pool, 1);
        pool.release(&[again]).unwrap();
        assert_eq!(pool.stats().pinned_free, 0);
        let third = hit(pool, 1);
        assert_eq!(pool.unpin(&[third]), Ok(0));
    }

    fn a_pin_is_kept_through_a_hit_and_its_release(pool) {
        let block = pinned(pool, 1);
        for _ in 0..3 {
            let block = hit(pool, 1);
            pool.release(&[block]).unwrap();
            assert_eq!(pool.stats().pinned_free, 1);
        }
        // All others go before it.
        let others = allocate(pool, BLOCKS - 1);
        assert!(!others.contains(&block));
        assert_eq!(pool.lookup(&key(1)), Some(block));
        pool.release(&others).unwrap();
    }

    fn a_pin_is_no_hold(pool) {
        let block = pinned(pool, 1);
        assert_eq!(pool.num_free(), BLOCKS, "a pinned block is free");
        assert!(pool.release(&[block]).is_err(), "nobody holds it");
        assert!(pool.pin(&[block]).is_err() && pool.unpin(&[block]).is_err());
        assert_eq!(pool.num_free(), BLOCKS);
        // What needs the whole pool gets it in one call.
        assert_eq!(allocate(pool, BLOCKS).last(), Some(&block));
        assert_eq!(pool.lookup(&key(1)), None);
    }

    fn a_pin_of_a_duplicate_is_on_the_copy_that_hits(pool) {
        let first = registered(pool, 1);
        let duplicate = registered(pool, 1);
        pool.release(&[first]).unwrap();
        assert_eq!(pool.pin(&[duplicate]), Ok(1), "the free copy moves to the pinned tier");
        assert_eq!((pool.stats().pinned_free, pool.free_order().last()), (1, Some(&first)));
        assert_eq!(pool.pin(&[duplicate]), Ok(0));
        pool.release(&[duplicate]).unwrap();
        assert_eq!(pool.stats().pinned_free, 1, "one copy is enough");
        let others = allocate(pool, BLOCKS - 1);
        assert_eq!(pool.lookup(&key(1)), Some(first));
        pool.release(&others).unwrap();
    }

    fn an_unpin_of_a_duplicate_takes_the_pin_off_the_copy_that_has_it(pool) {
        let first = pinned(pool, 1);
        let duplicate = registered(pool, 1);
        assert_eq!(pool.unpin(&[duplicate]), Ok(1));
        assert_eq!((pool.stats().pinned_free, pool.free_order().last()), (0, Some(&first)));
        pool.release(&[duplicate]).unwrap();
    }

    fn an_unpin_leaves_copies_without_a_pin_at_their_places(pool) {
        let [first, copy, other] = [1, 1, 2].map(|number| registered(pool, number));
        pool.release(&[first, other]).unwrap();
        let order = pool.free_order();
        assert_eq!(pool.unpin(&[copy]), Ok(0));
        assert_eq!(pool.free_order(), order);
        pool.release(&[copy]).unwrap();
    }

    fn pins_of_an_ended_epoch_go_first(pool) {
        let [held, free] = [registered(pool, 1), registered(pool, 2)];
        let cached = registered(pool, 3);
        assert_eq!(pool.pin(&[held, free]), Ok(2));
        pool.release(&[free, cached]).unwrap();
        pool.clear_index();
        pool.release(&[held]).unwrap();
        assert_eq!(pool.free_order()[0], free);
        let current = pinned(pool, 4);
        assert_eq!(pool.free_order()[0], held, "blank blocks are next, the stale pin is gone");
        assert_eq!(pool.free_order().last(), Some(&current));
        // A block of the regular tier that was cleared keeps its place before the pinned one.
        assert_eq!(allocate(pool, BLOCKS), [&[held][..], &[4, 5, 6, 7, 8].map(BlockId::new), &[cached, current]].concat());
    }

    fn pins_are_counted_from_the_first_to_the_last(pool) {
        let counts = |pool: &_| {
            let stats = Lookup::stats(pool);
            [stats.pins, stats.demotions, stats.pinned_evictions, stats.pinned_hits, stats.pinned as u64]
        };
        let [one, two, plain] = [1, 2, 3].map(|number| registered(pool, number));
        assert_eq!(pool.pin(&[one, two, one]), Ok(2));
        assert_eq!(counts(pool), [2, 0, 0, 0, 2], "a held block carries its pin too");
        pool.release(&[one, two, plain]).unwrap();
        let hits = [2, 3].map(|number| hit(pool, number));
        pool.release(&hits).unwrap();
        assert_eq!(counts(pool), [2, 0, 0, 1, 2], "a hit of another block is none of a pinned one");
        assert_eq!(pool.demote(5), 2);
        assert_eq!(counts(pool), [2, 2, 0, 1, 0]);
        let [one, two] = [1, 2].map(|number| hit(pool, number));
        assert_eq!(pool.pin(&[one, two]), Ok(2));
        assert_eq!(pool.unpin(&[one]), Ok(1));
        pool.release(&[one, two]).unwrap();
        assert_eq!(counts(pool), [4, 2, 0, 1, 1]);
        let all = allocate(pool, BLOCKS);
        pool.release(&all).unwrap();
        assert_eq!(counts(pool), [4, 2, 1, 1, 0], "one of the evictions was of a pinned block");
    }

    fn a_pin_from_before_a_clear_ends_without_an_eviction(pool) {
        let [held, again, free] = [1, 2, 3].map(|number| registered(pool, number));
        assert_eq!(pool.pin(&[held, again, free]), Ok(3));
        pool.release(&[free]).unwrap();
        pool.clear_index();
        assert_eq!(pool.stats().pinned, 3);
        pool.release(&[held]).unwrap();
        assert_eq!(pool.register(again, key(4), pool.epoch()), Ok(Registration::New));
        assert_eq!(pool.stats().pinned, 1, "the one in line is left");
        let others = allocate(pool, 1);
        assert_eq!((pool.stats().pinned, pool.stats().pinned_evictions), (0, 0));
        pool.release(&[&others[..], &[again]].concat()).unwrap();
    }

    fn a_pin_ends_when_its_block_leaves_the_pool(pool) {
        let [_, held, free] = [1, 2, 3].map(|number| registered(pool, number));
        assert_eq!(pool.pin(&[held, free]), Ok(2));
        pool.release(&[free]).unwrap();
        assert_eq!(pool.resize(2), Ok(1));
        assert_eq!((pool.stats().pins, pool.stats().pinned), (2, 0));
    }
}

/// A demotion finds pinned blocks in their list, and content of the highest priority stands in another. The pool for many
/// writers gives no priorities.
#[test]
fn a_pin_under_a_higher_priority_counts_once_that_ends() {
    fn run(pool: &mut impl BlockStore) {
        let counts = |pool: &_| {
            let stats = Lookup::stats(pool);
            [stats.pins as usize, stats.demotions as usize, stats.pinned, stats.pinned_free]
        };
        let ids = [1, 2, 3].map(|number| registered(pool, number));
        assert!(pool.set_band(&key(1), ids[0], Band::of(100)));
        assert_eq!(pool.pin(&ids[..2]), Ok(2));
        assert!(pool.set_band(&key(2), ids[1], Band::of(100)));
        assert_eq!(pool.pin(&ids), Ok(1));
        assert_eq!(counts(pool), [2, 0, 1, 0]);
        pool.release(&ids).unwrap();
        assert_eq!(pool.demote(pool.stats().pinned), 1);
        assert_eq!(counts(pool), [2, 1, 0, 0]);
        assert_eq!(hit(pool, 1), ids[0]);
        pool.release(&ids[..1]).unwrap();
        assert_eq!(pool.stats().pinned_hits, 0, "the priority kept it");
        for number in [1, 2] {
            assert!(pool.set_band(&key(number), BlockId::NULL, Band::DEFAULT));
        }
        assert_eq!(counts(pool), [4, 1, 2, 2]);
        assert_eq!(pool.demote(5), 2);
        assert_eq!(counts(pool), [4, 3, 0, 0]);
        pool.validate().unwrap();
    }
    let config = PoolConfig::new(BLOCKS + 1);
    run(&mut PlainPool::new(config).unwrap());
    run(&mut Writer::build(config));
}
