//! The pools next to a map and a list, in nanoseconds a block: medians.
//!
//! Blocks stand in line in a shuffled order, so that the records of neighbours in line are not
//! neighbours in memory, as after some hours of use.

use std::hint::black_box;
use std::time::{Duration, Instant};

use prefixcache_core::id::{BlockId, BlockKey};
use prefixcache_core::pool::{MultiWriter, Writer};
use prefixcache_core::store::{BlockStore, Moves, PoolConfig};
use prefixcache_oracle::map_and_list::{MapAndList, Measured};
use prefixcache_oracle::pools::Tested;
use prefixcache_oracle::random::{Random, key};

/// Blocks of one request: a prompt of 32k tokens.
const REQUEST: usize = 2048;

const SIZES: [usize; 3] = [1 << 14, 1 << 17, 1 << 20];

/// A pool, as the bench makes it.
trait Subject: Measured {
    const NAME: &'static str;
    fn make(num_blocks: usize) -> Self;
    fn drops(&self) -> u64 {
        0
    }
}

impl Subject for MapAndList {
    const NAME: &'static str = "map_and_list";
    fn make(num_blocks: usize) -> Self {
        Self::new(num_blocks)
    }
}

impl Subject for Writer {
    const NAME: &'static str = "one_writer";
    fn make(num_blocks: usize) -> Self {
        Self::new(PoolConfig::new(num_blocks)).unwrap()
    }
}

impl Subject for MultiWriter {
    const NAME: &'static str = "many_writers";
    fn make(num_blocks: usize) -> Self {
        Self::shared(PoolConfig::new(num_blocks)).unwrap()
    }
    fn drops(&self) -> u64 {
        Tested::drops(self)
    }
}

/// The keys of a request's blocks, head first.
fn keys(request: usize) -> Vec<BlockKey> {
    (0..REQUEST).map(|at| key((request * REQUEST + at) as u64)).collect()
}

fn put_all(pool: &mut impl Measured, blocks: &[BlockId], keys: &[BlockKey]) {
    blocks.iter().zip(keys).for_each(|(&block, &key)| pool.put(block, key));
}

/// A pool that is full of requests' content, all of it free; how many requests.
fn full<S: Subject>(num_blocks: usize) -> (S, usize) {
    let mut pool = S::make(num_blocks + 1);
    let requests = num_blocks / REQUEST;
    let mut blocks = Vec::new();
    pool.take(&[], num_blocks, &mut blocks);
    let mut random = Random(1);
    for at in (1..blocks.len()).rev() {
        blocks.swap(at, random.below(at as u64 + 1) as usize);
    }
    for (request, blocks) in blocks.chunks_exact(REQUEST).enumerate() {
        put_all(&mut pool, blocks, &keys(request));
    }
    blocks.reverse();
    pool.give(&blocks);
    (pool, requests)
}

fn time<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let start = Instant::now();
    let result = black_box(work());
    (start.elapsed(), result)
}

/// The name of a measurement, if it has all words of the command line.
fn named<S: Subject>(what: &str, size: usize) -> Option<String> {
    let name = format!("{what}/{}/{size}", S::NAME);
    let mut words = std::env::args().skip(1).filter(|word| word != "--bench");
    words.all(|word| name.contains(&word)).then_some(name)
}

/// Prints the median time of a block. `once` returns the time of one round with `blocks` blocks.
fn measure(name: Option<String>, blocks: usize, mut once: impl FnMut() -> Duration) {
    const SAMPLE: Duration = Duration::from_millis(2);
    let Some(name) = name else { return };
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
        let mut pool = S::make(size + 1);
        let mut blocks = Vec::with_capacity(batch);
        // Together: a clock between them would take as long as one block.
        let mut rounds = || {
            for _ in 0..REQUEST / batch {
                blocks.clear();
                pool.take(&[], batch, &mut blocks);
                pool.give(&blocks);
            }
        };
        let what = format!("allocate_and_free_{batch}");
        measure(named::<S>(&what, size), REQUEST, || time(&mut rounds).0);
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
        let name = named::<S>(&format!("{what}_{batch}"), size);
        if name.is_none() {
            continue;
        }
        let (mut pool, requests) = full::<S>(size);
        measure(name, batch, || work(&mut pool, requests));
        assert_eq!(pool.drops(), 0, "content was dropped");
    }
}

fn evict<S: Subject>(batch: usize) {
    // More than any pool holds.
    let mut fresh = 1 << 20;
    on_full_pools::<S>("evict", batch, |pool, _| {
        let mut blocks = Vec::with_capacity(batch);
        let (elapsed, _) = time(|| pool.take(&[], batch, &mut blocks));
        fresh += 1;
        put_all(pool, &blocks, &keys(fresh));
        pool.give(&blocks);
        elapsed
    });
}

fn touch_and_release<S: Subject>() {
    let mut random = Random(2);
    on_full_pools::<S>("touch_and_release", REQUEST, |pool, requests| {
        let keys = keys(random.below(requests as u64) as usize);
        let mut blocks = Vec::with_capacity(REQUEST);
        let (taking, hits) = time(|| pool.take(&keys, 0, &mut blocks));
        assert_eq!(hits, REQUEST);
        blocks.reverse();
        taking + time(|| pool.give(&blocks)).0
    });
}

fn probe<S: Subject>() {
    let mut random = Random(3);
    on_full_pools::<S>("probe", REQUEST, |pool, requests| {
        let keys = keys(random.below(requests as u64) as usize);
        let (elapsed, hits) = time(|| keys.iter().filter(|key| pool.find(key).is_some()).count());
        assert_eq!(hits, REQUEST);
        elapsed
    });
}

fn build<S: Subject>() {
    measure(named::<S>("build", 1 << 20), 1, || time(|| S::make(1 << 20)).0);
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

fn resize<S: Subject + BlockStore>() {
    let bench = |what: &str, prepare: fn(&mut S), work: fn(&mut S)| {
        measure(named::<S>(what, RESIZED), 1, || {
            let (mut pool, _) = full::<S>(RESIZED);
            prepare(&mut pool);
            time(|| work(&mut pool)).0
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
    all_of::<MapAndList>();
    all_of::<MultiWriter>();
    all_of::<Writer>();
    resize::<MultiWriter>();
    resize::<Writer>();
}
