//! Random schedules of longer lives than a model check can exhaust: three threads that hit, allocate,
//! register, pin, demote, clear, resize, move and release on a pool of few blocks and short rings.
//!
//! A thread reserves what its request may need before it asks the pool, and waits for its turn with
//! another request when all is reserved. So each request fits, and must be served.

use shuttle::rand::{Rng, thread_rng};
use shuttle::thread;

use super::MultiWriter;
use crate::id::{BlockHash, BlockId, BlockKey, GroupId};
use crate::store::{BlockStore, FreeOrder, Lookup, Moves, PoolConfig};
use crate::sync::{Arc, AtomicU64, Fault, Ordering, faults};

const BLOCKS: usize = 12;
const SHRUNK: usize = 9;
const CONTENTS: u64 = 12;

/// Two hits or new blocks, one more, and one that is being demoted.
const PER_REQUEST: u64 = 4;
const REQUESTS: usize = 6;

/// Schedules for each test, or PREFIXCACHE_SCHEDULES of them.
fn schedules() -> usize {
    let number = std::env::var("PREFIXCACHE_SCHEDULES").ok();
    number.and_then(|number| number.parse().ok()).unwrap_or(1500)
}

fn key(content: u64) -> BlockKey {
    BlockKey::new(BlockHash::from_bytes([content as u8; 32]), GroupId::default())
}

/// The pool, and what its blocks hold.
struct World {
    pool: MultiWriter,
    memory: Vec<AtomicU64>,
    /// Blocks that requests may need.
    reserved: AtomicU64,
}

impl World {
    fn new(free_order: FreeOrder, ring: usize) -> Arc<Self> {
        let config = PoolConfig::new(BLOCKS).with_free_order(free_order);
        let pool = MultiWriter::with_ring_capacity(config, ring).unwrap();
        let memory = (0..BLOCKS).map(|_| AtomicU64::new(0)).collect();
        let reserved = AtomicU64::new(0);
        Arc::new(Self { pool, memory, reserved })
    }

    fn check(&self, block: BlockId, content: u64) {
        let held = self.memory[block.index()].load(Ordering::SeqCst);
        assert_eq!(held, content, "block {block} holds something else");
    }

    /// Makes a request if it fits.
    fn request(&self) {
        let before = self.reserved.fetch_add(PER_REQUEST, Ordering::SeqCst);
        if before + PER_REQUEST < SHRUNK as u64 {
            self.make_request();
        }
        self.reserved.fetch_sub(PER_REQUEST, Ordering::SeqCst);
    }

    fn make_request(&self) {
        let mut pool = self.pool.clone();
        let first = thread_rng().gen_range(0..CONTENTS);
        let contents: Vec<u64> = (first..CONTENTS.min(first + 2)).collect();
        let keys: Vec<BlockKey> = contents.iter().map(|&content| key(content)).collect();
        let epoch = pool.epoch();
        let mut blocks = Vec::new();
        let hits = pool.commit(keys.into_iter(), 1, &mut blocks);
        let hits = hits.expect("what fits is served");
        for (&block, &content) in blocks[..hits].iter().zip(&contents) {
            self.check(block, content);
        }
        if let Some(&content) = contents.get(hits) {
            self.memory[blocks[hits].index()].store(content, Ordering::SeqCst);
            let _ = pool.register(blocks[hits], key(content), epoch).unwrap();
        }
        self.do_something_rare(&mut pool, &blocks);
        for (&block, &content) in blocks.iter().zip(&contents) {
            self.check(block, content);
        }
        blocks.reverse();
        pool.release(&blocks).unwrap();
    }

    fn do_something_rare(&self, pool: &mut MultiWriter, blocks: &[BlockId]) {
        match thread_rng().gen_range(0..24) {
            0 => pool.clear_index(),
            1..4 => drop(pool.pin(blocks).unwrap()),
            4 => drop(pool.unpin(blocks).unwrap()),
            5..7 => drop(pool.demote(1)),
            // Refused while another thread writes.
            7 => drop(pool.resize(SHRUNK)),
            10..13 => self.shrink(pool),
            13 => drop(pool.release_cached(1)),
            8..10 => drop(pool.resize(BLOCKS)),
            _ => {}
        }
    }

    /// One slice of a shrink. A request meanwhile may be short of the two blocks that content moves to.
    fn shrink(&self, pool: &mut MultiWriter) {
        let before = self.reserved.fetch_add(2, Ordering::SeqCst);
        let mut moves = Moves::default();
        if before + 2 < SHRUNK as u64 && pool.begin_moves(SHRUNK, 2, &mut moves).is_ok() {
            for step in &moves.in_flight {
                let kv = self.memory[step.from.index()].load(Ordering::SeqCst);
                self.memory[step.to.index()].store(kv, Ordering::SeqCst);
            }
            while pool.finish_moves(&mut moves).is_err() {
                thread::yield_now();
            }
        }
        self.reserved.fetch_sub(2, Ordering::SeqCst);
    }

    fn check_rest(&self) {
        self.pool.clone().resize(BLOCKS).unwrap();
        self.pool.validate().expect("the pool is whole");
        assert_eq!(self.pool.num_free(), BLOCKS - 1, "blocks were lost or doubled");
        for content in 0..CONTENTS {
            if let Some(block) = self.pool.lookup(&key(content)) {
                self.check(block, content);
            }
        }
    }
}

fn three_threads(free_order: FreeOrder, ring: usize) {
    let world = World::new(free_order, ring);
    let threads: Vec<_> = (0..2)
        .map(|_| {
            let world = world.clone();
            thread::spawn(move || (0..REQUESTS).for_each(|_| world.request()))
        })
        .collect();
    (0..REQUESTS).for_each(|_| world.request());
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    world.check_rest();
}

#[test]
fn random_schedules() {
    for (order, ring) in [(FreeOrder::UnhashedFirst, 32), (FreeOrder::Append, 32)] {
        shuttle::check_random(move || three_threads(order, ring), schedules());
    }
}

#[test]
fn schedules_on_rings_that_fill_up() {
    shuttle::check_random(|| three_threads(FreeOrder::Append, 4), schedules());
}

#[test]
fn schedules_with_rare_preemptions() {
    shuttle::check_pct(|| three_threads(FreeOrder::UnhashedFirst, 16), schedules(), 3);
}

macro_rules! schedules_find {
    ($($test:ident: $fault:ident),+) => {$(
        #[test]
        #[should_panic]
        fn $test() {
            faults::plant(Fault::$fault);
            shuttle::check_random(|| three_threads(FreeOrder::UnhashedFirst, 32), schedules());
        }
    )+};
}

schedules_find! {
    schedules_find_passed_slots: PassPending,
    schedules_find_a_forgotten_last_holder: ForgetLastHolder,
    schedules_find_slots_before_states: SlotBeforeState
}
