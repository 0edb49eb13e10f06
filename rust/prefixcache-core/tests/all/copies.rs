//! Many blocks with one content: they crowd out nothing, and the next one hits when the first is lost.

use prefixcache_core::id::BlockId;
use prefixcache_core::pool::{MultiWriter, Writer};
use prefixcache_core::store::{BlockStore, MAX_COPIES, PoolConfig, Registration};
use prefixcache_oracle::plain::PlainPool;
use prefixcache_oracle::pools::Tested;
use prefixcache_oracle::random::key;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::{allocate, cases};

fn register(pool: &mut impl BlockStore, block: BlockId, number: u64) -> Registration {
    pool.register(block, key(number), pool.epoch()).unwrap()
}

/// Far more copies than a chain had room for once, all held.
fn held_copies<P: Tested>() {
    let mut pool = P::build(PoolConfig::new(4097));
    let copies = allocate(&mut pool, 3000);
    assert_eq!(register(&mut pool, copies[0], 0), Registration::New);
    for &copy in &copies[1..] {
        assert_eq!(register(&mut pool, copy, 0), Registration::Duplicate(copies[0]));
    }
    let others = allocate(&mut pool, 250);
    for (number, &block) in (1..).zip(&others) {
        assert_eq!(register(&mut pool, block, number), Registration::New);
        assert_eq!(pool.lookup(&key(number)), Some(block));
    }
    assert_eq!(pool.lookup(&key(0)), Some(copies[0]));
    assert_eq!(pool.drops(), 0);
    assert_eq!(pool.cached_blocks().len(), 3250);
    pool.validate().unwrap();
    pool.release(&copies).unwrap();
    // The blank ones first, then the copies in turn.
    let mut taken = allocate(&mut pool, 846 + 2000);
    assert_eq!(pool.lookup(&key(0)), Some(copies[2000]));
    taken.extend(&others);
    pool.release(&taken).unwrap();
    pool.validate().unwrap();
}

#[test]
fn held_copies_are_all_found_and_crowd_out_nothing() {
    held_copies::<MultiWriter>();
    held_copies::<Writer>();
}

/// A prompt that is asked for again and again leaves a copy of its last block each time.
fn released_copies<P: Tested>() {
    let mut pool = P::build(PoolConfig::new(1 << 14));
    for _ in 0..10_000 {
        let block = allocate(&mut pool, 1)[0];
        let _ = register(&mut pool, block, 0);
        pool.release(&[block]).unwrap();
    }
    pool.validate().unwrap();
    assert_eq!(pool.drops(), 0);
    // All stand in line as cached blocks do, though few can be found.
    assert_eq!(pool.cached_blocks().len(), 10_000);
    let first = pool.lookup(&key(0));
    assert_eq!(first, Some(pool.free_order()[(1 << 14) - 1 - 10_000]));
    // Whatever is lost, the content hits as long as the last one stands.
    let mut taken = Vec::new();
    while pool.lookup(&key(0)).is_some() {
        taken.extend(allocate(&mut pool, 1));
    }
    assert_eq!(taken.len(), (1 << 14) - 1);
}

#[test]
fn released_copies_leave_one_that_hits_to_the_end() {
    released_copies::<MultiWriter>();
    released_copies::<Writer>();
}

#[derive(Clone, Debug)]
enum Step {
    /// Copies of one key, of which some are released at once.
    Register {
        key: u64,
        count: usize,
        held: usize,
    },
    Release {
        which: usize,
        count: usize,
    },
    Pin {
        which: usize,
    },
    Demote,
    Evict {
        count: usize,
    },
    Clear,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..2_u64, 1..20_usize, 0..4_usize)
            .prop_map(|(key, count, held)| Step::Register { key, count, held }),
        3 => (0..64_usize, 1..9_usize).prop_map(|(which, count)| Step::Release { which, count }),
        1 => (0..64_usize).prop_map(|which| Step::Pin { which }),
        1 => Just(Step::Demote),
        3 => (1..40_usize).prop_map(|count| Step::Evict { count }),
        1 => Just(Step::Clear),
    ]
}

/// Does a step; the blocks that stay held.
fn apply(pool: &mut impl BlockStore, held: &mut Vec<BlockId>, step: &Step) -> String {
    match *step {
        Step::Register { key, count, held: keep } => {
            let blocks = allocate(pool, count.min(pool.num_free()));
            let outcomes: Vec<_> = blocks.iter().map(|&block| register(pool, block, key)).collect();
            let (kept, released) = blocks.split_at(keep.min(blocks.len()));
            pool.release(released).unwrap();
            held.extend(kept);
            format!("{outcomes:?}")
        }
        Step::Release { which, count } => {
            let from = which % (held.len() + 1);
            let released: Vec<BlockId> = held.drain(from..held.len().min(from + count)).collect();
            format!("{:?}", pool.release(&released))
        }
        Step::Pin { which } => {
            let pinned = held.get(which % held.len().max(1)).copied();
            format!("{:?}", pool.pin(pinned.as_slice()))
        }
        Step::Demote => format!("{:?}", pool.demote(2)),
        Step::Evict { count } => {
            let blocks = allocate(pool, count.min(pool.num_free()));
            format!("{:?}", pool.release(&blocks))
        }
        Step::Clear => format!("{:?}", pool.clear_index()),
    }
}

fn answers(pool: &mut impl BlockStore, steps: &[Step]) -> Vec<String> {
    let mut held = Vec::new();
    let look = |step| {
        let outcome = apply(pool, &mut held, step);
        pool.validate().unwrap();
        let hits = [0, 1].map(|number| pool.lookup(&key(number)));
        let line = (pool.free_order(), pool.cached_blocks());
        format!("{outcome} {hits:?} {line:?} {:?}", pool.stats())
    };
    steps.iter().map(look).collect()
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn all_pools_find_the_same_copy(steps in vec(step(), 1..80)) {
        let config = PoolConfig::new(4 * MAX_COPIES);
        let plain = answers(&mut PlainPool::new(config).unwrap(), &steps);
        prop_assert_eq!(&plain, &answers(&mut MultiWriter::build(config), &steps));
        prop_assert_eq!(&plain, &answers(&mut Writer::build(config), &steps));
    }
}
