//! What medians hide: probes next to a busy writer, and eviction against the number of cached blocks.
//! Prints tables; takes about ten seconds.

use std::hint::black_box;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use prefixcache_core::clock::Clock;
use prefixcache_core::id::{BlockHash, BlockId, BlockKey};
use prefixcache_core::policy::{EvictionPolicy, Queue, ReuseQueue};
use prefixcache_core::pool::{MultiWriter, Writer};
use prefixcache_core::store::{BlockStore, Lookup, PoolConfig, WithReaders};
use prefixcache_oracle::map_and_list::{MapAndList, Measured};
use prefixcache_oracle::random::key;

/// Blocks of one request: a prompt of 32k tokens.
const REQUEST: usize = 2048;

/// Blocks of one probe.
const PROBE: usize = 8;

fn keys(first: usize, count: usize) -> Vec<BlockKey> {
    (first..first + count).map(|number| key(number as u64)).collect()
}

/// Takes blocks, registers them under `keys` and gives them back.
fn cache(pool: &mut impl Measured, keys: &[BlockKey]) {
    let mut blocks = Vec::with_capacity(keys.len());
    pool.take(&[], keys.len(), &mut blocks);
    blocks.iter().zip(keys).for_each(|(&block, &key)| pool.put(block, key));
    blocks.reverse();
    pool.give(&blocks);
}

/// One turn of the busy writer: a request that hits is taken and given back, and one that does not
/// evicts. `hot` stays cached, as it is taken again and again.
fn write_turn(pool: &mut impl Measured, hot: &[BlockKey], turn: usize) {
    let mut blocks = Vec::with_capacity(REQUEST);
    pool.take(hot, 0, &mut blocks);
    pool.give(&blocks);
    cache(pool, &keys((turn + 2) * REQUEST, REQUEST));
}

fn percentile(sorted: &[Duration], part: f64) -> Duration {
    sorted[((sorted.len() - 1) as f64 * part) as usize]
}

fn report(name: &str, mut samples: Vec<Duration>) {
    samples.sort_unstable();
    let [p50, p99, p999] = [0.5, 0.99, 0.999].map(|part| percentile(&samples, part));
    let (count, worst) = (samples.len(), samples[samples.len() - 1]);
    println!(
        "{name:32} p50 {p50:>9.2?}  p99 {p99:>9.2?}  p99.9 {p999:>9.2?}  max {worst:>9.2?}  n {count}"
    );
}

/// Times `probe` for two seconds while `write` runs in another thread.
fn with_writer(name: &str, mut write: impl FnMut(usize) + Send, probe: impl Fn() -> usize) {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop = &stop;
        scope.spawn(move || {
            let mut turn = 0;
            while !stop.load(Ordering::Relaxed) {
                write(turn);
                turn += 1;
            }
        });
        let start = Instant::now();
        let mut samples = Vec::with_capacity(1 << 22);
        while start.elapsed() < Duration::from_secs(2) {
            let before = Instant::now();
            black_box(probe());
            samples.push(before.elapsed());
        }
        stop.store(true, Ordering::Relaxed);
        report(name, samples);
    });
}

fn probe_with_writer() {
    println!("\nA probe of {PROBE} blocks next to a thread that evicts {REQUEST} at a time");
    let hot = keys(0, REQUEST);
    let config = PoolConfig::new(1 << 17);
    probe_pool("many writers", MultiWriter::shared(config).unwrap(), &hot);
    probe_pool("one writer", Writer::new(config).unwrap(), &hot);
    let mutex = Mutex::new(MapAndList::new(1 << 17));
    fill(&mut *mutex.lock().unwrap(), 1 << 17);
    let write = |turn| write_turn(&mut *mutex.lock().unwrap(), &hot, turn);
    let probe = || mutex.lock().unwrap().count(&hot[..PROBE]);
    with_writer("mutex around map and list", write, probe);
}

fn probe_pool(name: &str, mut pool: impl WithReaders<Reader: Sync> + Send, hot: &[BlockKey]) {
    fill(&mut pool, 1 << 17);
    let reader = pool.reader();
    let probe = || reader.count_leading(hot[..PROBE].iter().copied());
    with_writer(name, |turn| write_turn(&mut pool, hot, turn), probe);
}

/// Fills a pool with cached blocks, but for one request's.
fn fill(pool: &mut impl Measured, num_blocks: usize) {
    for first in (0..num_blocks - REQUEST).step_by(REQUEST) {
        cache(pool, &keys(first, REQUEST));
    }
}

/// Blocks of one eviction.
const EVICTED: usize = 16;

/// A pool that is full of `cached` blocks, and how long it took to evict.
struct Full<P> {
    pool: P,
    cached: usize,
    round: usize,
    samples: Vec<Duration>,
}

impl<P: Measured> Full<P> {
    fn new(mut pool: P, cached: usize) -> Self {
        cache(&mut pool, &keys(0, cached));
        Self { pool, cached, round: 1, samples: Vec::new() }
    }

    /// Evicts so often, and gives back by `give` what was evicted, with new content.
    fn evict(&mut self, times: usize, give: impl Fn(&mut P, &[BlockId], usize)) {
        for round in self.round..self.round + times {
            let mut blocks = Vec::with_capacity(EVICTED);
            let before = Instant::now();
            self.pool.take(&[], EVICTED, &mut blocks);
            self.samples.push(before.elapsed());
            let keys = keys(self.cached + EVICTED * round, EVICTED);
            blocks.iter().zip(keys).for_each(|(&block, key)| self.pool.put(block, key));
            give(&mut self.pool, &blocks, round);
        }
        self.round += times;
    }
}

/// Gives back to one queue after the other, of requests of which every other one is asked again ten seconds later.
fn give_to_queue(pool: &mut Writer, blocks: &[BlockId], round: usize) {
    let reuse = pool.reuse_queue().expect("the policy is reuse-queue");
    reuse.set_time(Duration::from_millis(100 * round as u64));
    let hashes = |round| keys(EVICTED * round, EVICTED).into_iter().map(|key| key.hash);
    let again: Vec<_> = hashes(round.saturating_sub(100) / 2 * 2).collect();
    let turn = reuse.begin(&again);
    reuse.end(&hashes(round).collect::<Vec<_>>(), turn, EVICTED, 0);
    pool.release_to(blocks, Queue::new((round % Queue::COUNT) as u8)).unwrap();
}

/// Calls `report` with the times of the peer and of the pool with one writer, at each number of blocks.
fn evict_against_cached(mut report: impl FnMut(&str, usize, Vec<Duration>)) {
    for cached in [1_000, 10_000, 100_000, 1_000_000] {
        let pool = |policy| {
            let config = PoolConfig::new(cached + 1).with_eviction_policy(policy);
            Full::new(Writer::new(config).unwrap(), cached)
        };
        let mut peer = Full::new(MapAndList::new(cached + 1), cached);
        let mut lru = pool(EvictionPolicy::Lru);
        let mut listened = pool(EvictionPolicy::Lru);
        let reader = listened.pool.reader();
        reader.evictions().listen(4 * EVICTED, &[]).unwrap();
        let mut queues = pool(EvictionPolicy::ReuseQueue);
        // In turns: what else the machine does is then shared fairly.
        for _ in 0..20 {
            peer.evict(100, |pool, blocks, _| pool.give(blocks));
            lru.evict(100, |pool, blocks, _| pool.give(blocks));
            listened.evict(100, |pool, blocks, _| {
                pool.give(blocks);
                reader.evictions().take(EVICTED, &mut Vec::new());
            });
            queues.evict(100, give_to_queue);
        }
        report("map and list", cached, peer.samples);
        report("one writer", cached, lru.samples);
        report("one writer, evictions are reported", cached, listened.samples);
        report("one writer, reuse-queue", cached, queues.samples);
    }
}

fn print_evictions() {
    println!("\nEvicting {EVICTED} blocks of a pool that is full of as many cached ones");
    evict_against_cached(|pool, cached, samples| {
        report(&format!("{pool}, {cached} cached"), samples);
    });
}

/// One JSON object a line, for `benches/core/recorded.py`.
fn print_evictions_as_json() {
    evict_against_cached(|pool, cached, mut samples| {
        samples.sort_unstable();
        let [p50, p99] = [0.5, 0.99].map(|part| percentile(&samples, part).as_nanos());
        println!(
            r#"{{"pool": "{pool}", "cached": {cached}, "evicted": {EVICTED}, "p50_ns": {p50}, "p99_ns": {p99}}}"#
        );
    });
}

/// What reuse-queue asks of the blocks of a request when it begins and when it ends.
fn print_policy_calls() {
    println!("\nThe policy's part of a request of {REQUEST} blocks that nobody asked for before");
    for max_blocks in [10_000, 1_000_000] {
        let policy = ReuseQueue::new(max_blocks, Clock::default()).unwrap();
        let mut times = [const { Vec::new() }; 3];
        for round in 0..500 {
            policy.set_time(Duration::from_millis(100 * round as u64));
            let hashes: Vec<BlockHash> =
                keys(REQUEST * round, REQUEST).into_iter().map(|key| key.hash).collect();
            let start = Instant::now();
            let turn = policy.begin(&hashes);
            let begun = Instant::now();
            let shared = policy.count_shared(&hashes);
            let counted = Instant::now();
            policy.end(&hashes, turn, REQUEST, shared);
            times[0].push(begun - start);
            times[1].push(counted - begun);
            times[2].push(counted.elapsed());
        }
        for (what, samples) in ["begin", "count_shared", "end"].into_iter().zip(times) {
            report(&format!("{what}, pool of {max_blocks}"), samples);
        }
    }
}

fn main() {
    let is_asked_for = |name: &str| std::env::args().any(|argument| argument == name);
    if is_asked_for("--evictions-as-json") {
        return print_evictions_as_json();
    }
    if is_asked_for("--policy-calls") {
        return print_policy_calls();
    }
    probe_with_writer();
    print_evictions();
    print_policy_calls();
}
