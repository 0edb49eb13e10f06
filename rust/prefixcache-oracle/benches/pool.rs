//! The pool next to a plain one and a mutex around a plain one, in nanoseconds a block.
//!
//! Blocks stand in line in a shuffled order, so that the records of neighbours in line are not
//! neighbours in memory, as after some hours of use.

#[path = "../../prefixcache-core/tests/common/random.rs"]
mod random;

use std::hint::black_box;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use prefixcache_core::id::{BlockHash, BlockId, GroupId};
use prefixcache_core::pool::{Mode, Shared, SingleWriter, Writer};
use prefixcache_core::store::{BlockKey, BlockStore, Lookup, Moves, PoolConfig};
use prefixcache_oracle::plain::PlainPool;
use random::Random;

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

trait Named: Mode {
    const NAME: &'static str;
}

impl Named for Shared {
    const NAME: &'static str = "shared";
}

impl Named for SingleWriter {
    const NAME: &'static str = "single_writer";
}

impl<M: Named> Subject for Writer<M> {
    const NAME: &'static str = M::NAME;
    type Pool = Self;
    fn new(num_blocks: usize) -> Self {
        Self::in_mode(PoolConfig::new(num_blocks)).unwrap()
    }
    fn with<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        work(self)
    }
    fn drops(&self) -> u64 {
        self.content_drops()
    }
}

fn key(number: u64) -> BlockKey {
    let mut random = Random(number);
    let words: [[u8; 8]; 4] = std::array::from_fn(|_| random.next().to_le_bytes());
    BlockKey::new(
        BlockHash::from_bytes(words.concat().try_into().unwrap()),
        GroupId::default(),
    )
}

/// The keys of a request's blocks, head first.
fn keys(request: usize) -> Vec<BlockKey> {
    (0..REQUEST)
        .map(|at| key((request * REQUEST + at) as u64))
        .collect()
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

fn allocate_and_free<S: Subject>(criterion: &mut Criterion, batch: usize) {
    let mut group = criterion.benchmark_group(format!("allocate_and_free_{batch}"));
    group.throughput(Throughput::Elements(batch as u64));
    for size in SIZES {
        let mut subject = S::new(size + 1);
        let mut blocks = Vec::with_capacity(batch);
        group.bench_function(BenchmarkId::new(S::NAME, size), |bencher| {
            bencher.iter(|| {
                blocks.clear();
                subject
                    .with(|pool| pool.allocate(batch, &mut blocks))
                    .unwrap();
                subject.with(|pool| pool.release(&blocks)).unwrap();
            });
        });
    }
}

/// Measures `work`, which returns the time that counts, on full pools of each size. Its argument is how many
/// requests they hold.
fn on_full_pools<S: Subject>(
    criterion: &mut Criterion,
    name: &str,
    batch: usize,
    mut work: impl FnMut(&mut S, usize) -> Duration,
) {
    let mut group = criterion.benchmark_group(format!("{name}_{batch}"));
    group.throughput(Throughput::Elements(batch as u64));
    for size in SIZES {
        let (mut subject, requests) = full::<S>(size);
        group.bench_function(BenchmarkId::new(S::NAME, size), |bencher| {
            bencher.iter_custom(|rounds| (0..rounds).map(|_| work(&mut subject, requests)).sum());
        });
        assert_eq!(subject.drops(), 0, "content was dropped");
    }
}

fn evict<S: Subject>(criterion: &mut Criterion, batch: usize) {
    // More than any pool holds.
    let mut fresh = 1 << 20;
    on_full_pools::<S>(criterion, "evict", batch, |subject, _| {
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

fn touch_and_release<S: Subject>(criterion: &mut Criterion) {
    let mut random = Random(2);
    on_full_pools::<S>(
        criterion,
        "touch_and_release",
        REQUEST,
        |subject, requests| {
            let keys = keys(random.below(requests as u64) as usize);
            let hits = keys.iter().copied();
            let mut blocks = Vec::with_capacity(REQUEST);
            let (taking, hits) = time(|| subject.with(|pool| pool.commit(hits, 0, &mut blocks)));
            assert_eq!(hits, Ok(REQUEST));
            blocks.reverse();
            let (giving, outcome) = time(|| subject.with(|pool| pool.release(&blocks)));
            outcome.unwrap();
            taking + giving
        },
    );
}

fn probe<S: Subject>(criterion: &mut Criterion) {
    let mut random = Random(3);
    on_full_pools::<S>(criterion, "probe", REQUEST, |subject, requests| {
        let keys = keys(random.below(requests as u64) as usize);
        let hits =
            |pool: &mut S::Pool| keys.iter().filter(|key| pool.lookup(key).is_some()).count();
        let (elapsed, hits) = time(|| subject.with(hits));
        assert_eq!(hits, REQUEST);
        elapsed
    });
}

fn build<S: Subject>(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("build");
    group.bench_function(BenchmarkId::new(S::NAME, 1 << 20), |bencher| {
        bencher.iter_with_large_drop(|| S::new(1 << 20));
    });
}

/// Blocks of a pool that is resized, about 100,000.
const RESIZED: usize = 48 * REQUEST;

/// Shrinks a pool to half, which keeps the last half in the order of eviction, without copying their KV.
fn shrink(pool: &mut impl BlockStore) {
    let half = RESIZED / 2 + 1;
    let mut moves = Moves::default();
    loop {
        pool.begin_moves(half, REQUEST, &mut moves).unwrap();
        if moves.in_flight.is_empty() {
            break;
        }
        pool.finish_moves(&mut moves).unwrap();
    }
    assert_eq!(pool.resize(half), Ok(0));
    assert_eq!(pool.stats().cached, half - 1);
}

fn resize<S: Subject>(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("resize");
    let mut bench = |name: &str, prepare: fn(&mut S::Pool), work: fn(&mut S::Pool)| {
        let name = format!("{name}/{}", S::NAME);
        group.bench_function(BenchmarkId::new(name, RESIZED), |bencher| {
            let once = || {
                let (mut subject, _) = full::<S>(RESIZED);
                subject.with(prepare);
                time(|| subject.with(work)).0
            };
            bencher.iter_custom(|rounds| (0..rounds).map(|_| once()).sum());
        });
    };
    bench("shrink_to_half", |_| {}, shrink);
    bench("grow_to_twice", shrink, |pool| {
        assert_eq!(pool.resize(RESIZED + 1), Ok(0));
    });
}

fn all_of<S: Subject>(criterion: &mut Criterion) {
    allocate_and_free::<S>(criterion, 1);
    allocate_and_free::<S>(criterion, REQUEST);
    evict::<S>(criterion, 16);
    evict::<S>(criterion, REQUEST);
    touch_and_release::<S>(criterion);
    probe::<S>(criterion);
    build::<S>(criterion);
}

fn all(criterion: &mut Criterion) {
    all_of::<PlainPool>(criterion);
    all_of::<Mutex<PlainPool>>(criterion);
    all_of::<Writer<Shared>>(criterion);
    all_of::<Writer<SingleWriter>>(criterion);
    // The plain pool looks through its whole line for each move.
    resize::<Writer<Shared>>(criterion);
    resize::<Writer<SingleWriter>>(criterion);
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600))
        .without_plots();
    targets = all
}
criterion_main!(benches);
