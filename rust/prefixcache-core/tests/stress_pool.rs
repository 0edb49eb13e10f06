//! Two threads that change the pool and two that probe it, for PREFIXCACHE_STRESS_SECONDS (3).
//!
//! A table next to the pool says what each block's KV would hold. A writer fills it before it registers
//! a block, and checks it at every hit, under its hold: a block that was recycled under a reader, or
//! handed to two writers, shows up as content that is not what the key says. At the end, at rest, every
//! block must be there once.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use prefixcache_core::id::{BlockId, BlockKey, Epoch};
use prefixcache_core::policy::{EvictionPolicy, Queue};
use prefixcache_core::pool::{MultiWriter, Writer};
use prefixcache_core::store::{BlockStore, FreeOrder, Lookup, Moves, PoolConfig, Registration};
use prefixcache_oracle::pools::{Tested, Watched};
use prefixcache_oracle::random::{Random, key};

const BLOCKS: usize = 600;
const DOCUMENTS: u64 = 60;
const LONGEST: u64 = 24;

/// The content of a block while nobody has computed it.
const BLANK: u64 = u64::MAX;

/// What the block at `place` of a document holds.
fn content(document: u64, place: u64) -> u64 {
    document * LONGEST + place
}

/// The pool, and what its blocks hold.
struct World<P: Tested> {
    pool: P::Reader,
    memory: Vec<AtomicU64>,
    stop: AtomicBool,
    hits: AtomicU64,
    rounds: AtomicU64,
    moved: AtomicU64,
}

impl<P: Tested<Reader: Sync>> World<P> {
    fn new(
        make: impl FnOnce(PoolConfig) -> P,
        free_order: FreeOrder,
        policy: EvictionPolicy,
    ) -> (Self, P) {
        let config = PoolConfig::new(BLOCKS)
            .with_max_blocks(BLOCKS + 100)
            .with_free_order(free_order)
            .with_eviction_policy(policy);
        let writer = make(config);
        let world = Self {
            pool: writer.reader(),
            memory: (0..config.max_blocks).map(|_| AtomicU64::new(BLANK)).collect(),
            stop: AtomicBool::new(false),
            hits: AtomicU64::new(0),
            rounds: AtomicU64::new(0),
            moved: AtomicU64::new(0),
        };
        (world, writer)
    }

    /// A request: hits, new blocks, "computing", registering, release. With `hard`, what a scheduler
    /// does rarely too.
    fn request(&self, pool: &mut P, random: &mut Random, hard: bool) {
        let document = random.below(DOCUMENTS);
        let length = 1 + random.below(LONGEST);
        let contents: Vec<u64> = (0..length).map(|place| content(document, place)).collect();
        let keys: Vec<BlockKey> = contents.iter().map(|&content| key(content)).collect();
        let epoch = pool.epoch();
        let expected = pool.count_leading(keys.iter().copied());
        let mut blocks = Vec::new();
        let new = contents.len() - expected + 1;
        let expected = keys[..expected].iter().copied();
        // Two writers never need as many blocks as there are.
        let hits = pool.commit(expected, new, &mut blocks);
        let hits = hits.expect("what fits is served");
        for (block, &content) in blocks[..hits].iter().zip(&contents) {
            self.check(*block, content, "a hit");
        }
        self.hits.fetch_add(hits as u64, Ordering::Relaxed);
        for (&block, &content) in blocks[hits..].iter().zip(&contents[hits..]) {
            self.compute(pool, block, content, epoch);
        }
        if hard {
            self.do_something_rare(pool, random, &blocks);
        }
        for (block, &content) in blocks.iter().zip(&contents) {
            self.check(*block, content, "a held block");
        }
        blocks.reverse();
        let queue = Queue::new(random.below(Queue::COUNT as u64) as u8);
        pool.release_to(&blocks, queue).unwrap();
    }

    /// A new block gets its content and is registered.
    fn compute(&self, pool: &mut P, block: BlockId, content: u64, epoch: Epoch) {
        self.memory[block.index()].store(content, Ordering::Release);
        let outcome = pool.register(block, key(content), epoch).unwrap();
        assert_ne!(outcome, Registration::Already, "a new block had content");
    }

    fn check(&self, block: BlockId, content: u64, what: &str) {
        let held = self.memory[block.index()].load(Ordering::Acquire);
        assert_eq!(held, content, "{what}, block {block}, holds something else");
    }

    fn do_something_rare(&self, pool: &mut P, random: &mut Random, blocks: &[BlockId]) {
        match random.below(400) {
            0 => pool.clear_index(),
            1..20 => drop(pool.pin(blocks).unwrap()),
            20..40 => drop(pool.unpin(blocks).unwrap()),
            40..60 => drop(pool.demote(random.below(30) as usize)),
            64..68 => self.shrink(pool, random),
            68..70 => drop(pool.release_cached(random.below(20) as usize)),
            // Refused while the other thread writes.
            60..64 => drop(pool.resize(BLOCKS - 100 + random.below(200) as usize)),
            _ => {}
        }
    }

    /// A slice of a shrink. Its KV is copied as one registered content would be.
    fn shrink(&self, pool: &mut P, random: &mut Random) {
        let mut moves = Moves::default();
        let num_blocks = BLOCKS - 100 + random.below(80) as usize;
        // Refused while the other thread writes, and for more blocks than there are.
        if pool.begin_moves(num_blocks, 16, &mut moves).is_err() {
            return;
        }
        for one in moves.in_flight() {
            let kv = self.memory[one.from.index()].load(Ordering::Acquire);
            self.memory[one.to.index()].store(kv, Ordering::Release);
        }
        if random.below(4) == 0 {
            return pool.abort_moves(&mut moves).unwrap();
        }
        while pool.finish_moves(&mut moves).is_err() {
            std::thread::yield_now();
        }
        self.moved.fetch_add(1, Ordering::Relaxed);
    }

    /// Writes until it is stopped, and gives its right to write back.
    fn write(&self, mut pool: P, seed: u64, hard: bool) -> P {
        let mut random = Random(seed);
        while !self.stop.load(Ordering::Relaxed) {
            self.request(&mut pool, &mut random, hard);
            self.rounds.fetch_add(1, Ordering::Relaxed);
        }
        pool
    }

    fn probe(&self, seed: u64) {
        let mut random = Random(seed);
        while !self.stop.load(Ordering::Relaxed) {
            let document = random.below(DOCUMENTS);
            let keys = (0..LONGEST).map(|place| key(content(document, place)));
            let count = self.pool.count_leading(keys) as u64;
            assert!(count <= LONGEST);
            self.look_at_map();
        }
    }

    /// Every block is counted once, whatever happens to it meanwhile.
    fn look_at_map(&self) {
        let map = self.pool.map(8, &[]);
        let sizes: Vec<u32> = map.states.iter().map(|cell| cell.iter().sum()).collect();
        let blocks = sizes.iter().sum::<u32>() as usize + 1;
        assert!((BLOCKS - 100..=BLOCKS + 100).contains(&blocks), "{sizes:?}");
        assert!(sizes.iter().all(|size| sizes[0].abs_diff(*size) <= 1));
    }

    fn run(&self, writers: Vec<P>, hard: bool, duration: Duration) -> Vec<P> {
        let seed = seed();
        println!("PREFIXCACHE_TEST_SEED={seed} repeats the choices, though not the threads' turns");
        std::thread::scope(|scope| {
            let writers = (0..).zip(writers);
            let writers: Vec<_> = writers
                .map(|(i, writer)| scope.spawn(move || self.write(writer, seed + i, hard)))
                .collect();
            (2..4).for_each(|i| drop(scope.spawn(move || self.probe(seed + i))));
            let start = Instant::now();
            let is_enough = || start.elapsed() >= duration && self.has_run();
            while !is_enough() && !writers.iter().any(|writer| writer.is_finished()) {
                std::thread::sleep(Duration::from_millis(20));
            }
            self.stop.store(true, Ordering::Relaxed);
            let ended = writers.into_iter().map(|writer| writer.join());
            ended.map(|pool| pool.expect("a writer failed")).collect()
        })
    }

    /// On a busy machine the time alone says nothing.
    fn has_run(&self) -> bool {
        [&self.rounds, &self.hits].iter().all(|count| count.load(Ordering::Relaxed) > 1000)
    }

    /// At rest nobody holds anything, and all is where it belongs.
    fn check_rest(&self, pool: &P) {
        pool.validate().expect("the pool is whole");
        assert_eq!(self.pool.num_free(), self.pool.num_blocks() - 1, "blocks were lost");
        let stats = self.pool.stats();
        assert_eq!((stats.in_use, stats.free), (0, self.pool.num_blocks() - 1));
        let all = DOCUMENTS * LONGEST;
        for (content, block) in (0..all).filter_map(|c| Some((c, self.pool.lookup(&key(c))?))) {
            self.check(block, content, "at rest, a hit");
        }
        let (rounds, hits) = (&self.rounds, &self.hits);
        println!(
            "{rounds:?} requests, {hits:?} hits, {} drops, {:?} slices of shrinks",
            pool.drops(),
            self.moved
        );
    }
}

/// Another number at each run, or the one that is asked for.
fn seed() -> u64 {
    let asked = std::env::var("PREFIXCACHE_TEST_SEED").ok();
    asked
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| RandomState::new().hash_one(()) >> 32)
}

/// A sixth of the time for each of the six tests.
fn duration() -> Duration {
    let seconds = std::env::var("PREFIXCACHE_STRESS_SECONDS").ok();
    let seconds: f64 = seconds.and_then(|seconds| seconds.parse().ok()).unwrap_or(3.0);
    Duration::from_secs_f64(seconds / 6.0)
}

/// The content that two writers dropped.
fn drops_of_two(
    free_order: FreeOrder,
    eviction_policy: EvictionPolicy,
    ring: Option<usize>,
    hard: bool,
) -> u64 {
    let make = |config| match ring {
        Some(slots) => MultiWriter::with_ring_capacity(config, slots).unwrap(),
        None => MultiWriter::shared(config).unwrap(),
    };
    let (world, mut pool) = World::new(make, free_order, eviction_policy);
    world.run(vec![pool.clone(), pool.clone()], hard, duration());
    pool.resize(BLOCKS).unwrap();
    world.check_rest(&pool);
    pool.drops()
}

#[test]
fn two_writers() {
    assert_eq!(drops_of_two(FreeOrder::UnhashedFirst, EvictionPolicy::Lru, None, false), 0);
}

/// One writer asks for many blocks that miss and one new one, the other for a third of the pool.
#[test]
fn misses_with_allocations() {
    let pool = MultiWriter::shared(PoolConfig::new(301)).unwrap();
    let stop = AtomicBool::new(false);
    let serve = |ask: fn(&mut MultiWriter, &mut Vec<BlockId>)| {
        let (mut pool, mut blocks) = (pool.clone(), Vec::new());
        while !stop.load(Ordering::Relaxed) {
            ask(&mut pool, &mut blocks);
            pool.release(&blocks).unwrap();
            blocks.clear();
        }
    };
    std::thread::scope(|scope| {
        let both = [
            scope.spawn(|| {
                serve(|pool, blocks| {
                    let missing = (0..250_u64).collect::<Vec<_>>();
                    let hits = pool.commit(missing.into_iter().map(key), 1, blocks);
                    assert_eq!(hits, Ok(0), "what fits is served");
                });
            }),
            scope.spawn(|| {
                serve(|pool, blocks| {
                    let taken = pool.allocate(100, blocks);
                    assert_eq!(taken, Ok(()), "what fits is served");
                });
            }),
        ];
        let start = Instant::now();
        while start.elapsed() < duration() && !both.iter().any(|one| one.is_finished()) {
            std::thread::sleep(Duration::from_millis(1));
        }
        stop.store(true, Ordering::Relaxed);
    });
    pool.validate().expect("the pool is whole");
}

#[test]
fn two_writers_append_order() {
    assert_eq!(drops_of_two(FreeOrder::Append, EvictionPolicy::Lru, None, false), 0);
}

#[test]
fn two_writers_that_pin_clear_and_resize() {
    drops_of_two(FreeOrder::UnhashedFirst, EvictionPolicy::Lru, None, true);
}

#[test]
fn two_writers_with_queues() {
    for ring in [None, Some(256)] {
        drops_of_two(FreeOrder::UnhashedFirst, EvictionPolicy::ReuseQueue, ring, true);
    }
}

#[test]
fn two_writers_on_rings_that_fill_up() {
    let drops = drops_of_two(FreeOrder::UnhashedFirst, EvictionPolicy::Lru, Some(256), true);
    assert!(drops > 0, "the rings were meant to fill up");
}

#[test]
fn one_writer() {
    let (order, policy) = (FreeOrder::UnhashedFirst, EvictionPolicy::Lru);
    let (world, pool) = World::<Writer>::new(Tested::build, order, policy);
    let pool = world.run(vec![pool], true, duration()).pop();
    let mut pool = pool.expect("the writer came back");
    pool.resize(BLOCKS).unwrap();
    world.check_rest(&pool);
}
