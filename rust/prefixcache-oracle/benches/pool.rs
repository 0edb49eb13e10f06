//! The pool next to a plain one and a mutex around a plain one, in nanoseconds a block: medians.
//!
//! Blocks stand in line in a shuffled order, so that the records of neighbours in line are not
//! neighbours in memory, as after some hours of use.

use std::hint::black_box;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use prefixcache_core::id::BlockId;
use prefixcache_core::pool::{MultiWriter, Writer};
use prefixcache_core::store::{BlockKey, BlockStore, Lookup, Moves, PoolConfig};
use prefixcache_oracle::plain::PlainPool;
use prefixcache_oracle::pools::Tested;
use prefixcache_oracle::random::{Random, key};

/// Blocks of one request: a prompt of 32k tokens.
const REQUEST: usize = 2048;

const SIZES: [usize; 3] = [1 << 14, 1 << 17, 1 << 20];

/// What is measured: a pool, and how its calls are made.
trait Subject {
    const NAME: &'static str;
    type Pool: BlockStore;
    fn new(num_blocks: usize) -> Self;
    fn with<T>(&mut self, work: impl FnOnce(&mut Self::Pool) -> T) -> T;
    fn drops(&self) -> u64 {
        0
    }
}

impl Subject for PlainPool {
    const NAME: &'static str = "plain";
    type Pool = Self;
    fn new(num_blocks: usize) -> Self {
        Self::new(PoolConfig::new(num_blocks)).unwrap()
    }
    fn with<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        work(self)
    }
}

impl Subject for Mutex<PlainPool> {
    const NAME: &'static str = "mutex";
    type Pool = PlainPool;
    fn new(num_blocks: usize) -> Self {
        Self::new(<PlainPool as Subject>::new(num_blocks))
    }
    fn with<T>(&mut self, work: impl FnOnce(&mut PlainPool) -> T) -> T {
        let shared: &Self = self;
        work(&mut shared.lock().unwrap())
    }
}

/// A pool that no thread waits for.
macro_rules! subject {
    ($pool:ty, $name:literal, $make:path) => {
        impl Subject for $pool {
            const NAME: &'static str = $name;
            type Pool = Self;
            fn new(num_blocks: usize) -> Self {
                $make(PoolConfig::new(num_blocks)).unwrap()
            }
            fn with<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
                work(self)
            }
            fn drops(&self) -> u64 {
                Tested::drops(self)
            }
        }
    };
}

subject!(Writer, "one_writer", Writer::new);
subject!(MultiWriter, "many_writers", MultiWriter::shared);

/// The keys of a request's blocks, head first.
fn keys(request: usize) -> Vec<BlockKey> {
    (0..REQUEST).map(|at| key((request * REQUEST + at) as u64)).collect()
}

fn register_all(pool: &mut impl BlockStore, blocks: &[BlockId], keys: &[BlockKey]) {
    for (&block, &key) in blocks.iter().zip(keys) {
        let _ = pool.register(block, key, pool.epoch()).unwrap();
    }
}

/// A pool that is full of requests' content, all of it free; how many requests.
fn full<S: Subject>(num_blocks: usize) -> (S, usize) {
    let mut subject = S::new(num_blocks + 1);
    let requests = num_blocks / REQUEST;
    subject.with(|pool| {
        let mut blocks = Vec::new();
        pool.allocate(num_blocks, &mut blocks).unwrap();
        let mut random = Random(1);
        for at in (1..blocks.len()).rev() {
            blocks.swap(at, random.below(at as u64 + 1) as usize);
        }
        for (request, blocks) in blocks.chunks_exact(REQUEST).enumerate() {
            register_all(pool, blocks, &keys(request));
        }
        blocks.reverse();
        pool.release(&blocks).unwrap();
    });
    (subject, requests)
}

fn time<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let start = Instant::now();
    let result = black_box(work());
    (start.elapsed(), result)
}

/// Prints the median time of a block, if the name has all words of the command line. `once` returns the time of
/// one round with `blocks` blocks.
fn measure<S: Subject>(what: &str, size: usize, blocks: usize, mut once: impl FnMut() -> Duration) {
    const SAMPLE: Duration = Duration::from_millis(2);
    let name = format!("{what}/{}/{size}", S::NAME);
    let mut words = std::env::args().skip(1).filter(|word| word != "--bench");
    if !words.all(|word| name.contains(&word)) {
        return;
    }
    let mut run = |rounds| (0..rounds).map(|_| once()).sum::<Duration>();
    let mut rounds = 1;
    while run(rounds) < SAMPLE {
        rounds *= 2;
    }
    let mut samples = [(); 15].map(|()| run(rounds));
    samples.sort_unstable();
    let ns = samples[7].as_nanos() as f64 / (rounds as usize * blocks) as f64;
    println!("{name:50} {ns:>12.1}");
}

fn allocate_and_free<S: Subject>(batch: usize) {
    for size in SIZES {
        let mut subject = S::new(size + 1);
        let mut blocks = Vec::with_capacity(batch);
        // Together: a clock between them would take as long as one block.
        let mut rounds = || {
            for _ in 0..REQUEST / batch {
                blocks.clear();
                let taken = subject.with(|pool| pool.allocate(batch, &mut blocks));
                taken.unwrap();
                subject.with(|pool| pool.release(&blocks)).unwrap();
            }
        };
        let what = format!("allocate_and_free_{batch}");
        measure::<S>(&what, size, REQUEST, || time(&mut rounds).0);
    }
}

/// Measures `work`, which returns the time that counts, on full pools of each size. Its argument is how many
/// requests they hold.
fn on_full_pools<S: Subject>(
    what: &str,
    batch: usize,
    mut work: impl FnMut(&mut S, usize) -> Duration,
) {
    for size in SIZES {
        let (mut subject, requests) = full::<S>(size);
        let what = format!("{what}_{batch}");
        measure::<S>(&what, size, batch, || work(&mut subject, requests));
        assert_eq!(subject.drops(), 0, "content was dropped");
    }
}

fn evict<S: Subject>(batch: usize) {
    // More than any pool holds.
    let mut fresh = 1 << 20;
    on_full_pools::<S>("evict", batch, |subject, _| {
        let mut blocks = Vec::with_capacity(batch);
        let (elapsed, outcome) = time(|| subject.with(|pool| pool.allocate(batch, &mut blocks)));
        outcome.unwrap();
        fresh += 1;
        subject.with(|pool| {
            register_all(pool, &blocks, &keys(fresh));
            pool.release(&blocks).unwrap();
        });
        elapsed
    });
}

fn touch_and_release<S: Subject>() {
    let mut random = Random(2);
    on_full_pools::<S>("touch_and_release", REQUEST, |subject, requests| {
        let keys = keys(random.below(requests as u64) as usize);
        let hits = keys.iter().copied();
        let mut blocks = Vec::with_capacity(REQUEST);
        let (taking, hits) = time(|| subject.with(|pool| pool.commit(hits, 0, &mut blocks)));
        assert_eq!(hits, Ok(REQUEST));
        blocks.reverse();
        let (giving, outcome) = time(|| subject.with(|pool| pool.release(&blocks)));
        outcome.unwrap();
        taking + giving
    });
}

fn probe<S: Subject>() {
    let mut random = Random(3);
    on_full_pools::<S>("probe", REQUEST, |subject, requests| {
        let keys = keys(random.below(requests as u64) as usize);
        let hits =
            |pool: &mut S::Pool| keys.iter().filter(|key| pool.lookup(key).is_some()).count();
        let (elapsed, hits) = time(|| subject.with(hits));
        assert_eq!(hits, REQUEST);
        elapsed
    });
}

fn build<S: Subject>() {
    measure::<S>("build", 1 << 20, 1, || time(|| S::new(1 << 20)).0);
}

/// Blocks of a pool that is resized, about 100,000.
const RESIZED: usize = 48 * REQUEST;

/// Shrinks a pool to half, which keeps the last half in the order of eviction, without copying their KV.
fn shrink(pool: &mut impl BlockStore) {
    let half = RESIZED / 2 + 1;
    let mut moves = Moves::default();
    loop {
        pool.begin_moves(half, REQUEST, &mut moves).unwrap();
        if moves.in_flight().is_empty() {
            break;
        }
        pool.finish_moves(&mut moves).unwrap();
    }
    assert_eq!(pool.resize(half), Ok(0));
    assert_eq!(pool.stats().cached, half - 1);
}

fn resize<S: Subject>() {
    let bench = |what: &str, prepare: fn(&mut S::Pool), work: fn(&mut S::Pool)| {
        measure::<S>(what, RESIZED, 1, || {
            let (mut subject, _) = full::<S>(RESIZED);
            subject.with(prepare);
            time(|| subject.with(work)).0
        });
    };
    bench("shrink_to_half", |_| {}, shrink);
    bench("grow_to_twice", shrink, |pool| {
        assert_eq!(pool.resize(RESIZED + 1), Ok(0));
    });
}

fn all_of<S: Subject>() {
    allocate_and_free::<S>(1);
    allocate_and_free::<S>(REQUEST);
    evict::<S>(16);
    evict::<S>(REQUEST);
    touch_and_release::<S>();
    probe::<S>();
    build::<S>();
}

fn main() {
    all_of::<PlainPool>();
    all_of::<Mutex<PlainPool>>();
    all_of::<MultiWriter>();
    all_of::<Writer>();
    // The plain pool looks through its whole line for each move.
    resize::<MultiWriter>();
    resize::<Writer>();
}
