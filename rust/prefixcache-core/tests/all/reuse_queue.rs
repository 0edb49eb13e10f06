//! Reuse-queue against LRU on small random workloads.

use std::time::Duration;

use prefixcache_core::hash::Scope;
use prefixcache_core::policy::EvictionPolicy;
use prefixcache_core::pool::Writer;
use prefixcache_core::store::sealed::Inner;
use prefixcache_core::store::{BlockStore, PoolConfig};
use prefixcache_oracle::random::Random;

use crate::{cache, serve};

const NUM_BLOCKS: usize = 400;
const REQUESTS: usize = 2_500;

/// A prompt, one token a block.
type Prompt = Vec<u32>;
/// The next prompt of a workload.
type Next = Box<dyn FnMut(&mut Random) -> Prompt>;

/// Its name, and its prompts.
type Workload = (&'static str, fn() -> Next);

/// A prompt that no other shares a block with.
fn fresh(random: &mut Random, len: usize) -> Prompt {
    let first = 1_000_000 + random.below(1 << 30) as u32;
    (0..len as u32).map(|at| first.wrapping_add(at)).collect()
}

/// Turns of many conversations, each of which ends after some.
fn conversations(system: usize) -> Next {
    let system: Prompt = (0..system as u32).collect();
    let mut open: Vec<Prompt> = Vec::new();
    Box::new(move |random| {
        if open.len() < 12 || random.below(4) == 0 {
            open.push(system.clone());
        }
        let at = random.below(open.len() as u64) as usize;
        let len = 4 + random.below(20) as usize;
        let more = fresh(random, len);
        open[at].extend(more);
        match open[at].len() > 150 || random.below(5) == 0 {
            true => open.swap_remove(at),
            false => open[at].clone(),
        }
    })
}

/// Whole documents asked again, the popular ones more often.
fn repeats(count: u64) -> Next {
    Box::new(move |random| {
        let document = random.below(count).min(random.below(count)) as u32;
        (0..16 + document % 40).map(|at| 1000 * document + at).collect()
    })
}

/// What nobody asks for again.
fn scan() -> Next {
    Box::new(|random| fresh(random, 30))
}

fn mixture(mut parts: Vec<Next>) -> Next {
    Box::new(move |random| {
        let part = random.below(parts.len() as u64) as usize;
        parts[part](random)
    })
}

/// Hit blocks, in percent of all.
fn hit_rate(policy: EvictionPolicy, mut next: Next, seed: u64) -> f64 {
    let config = PoolConfig::new(NUM_BLOCKS).with_eviction_policy(policy);
    let mut cache = cache::<Writer>(config, 1);
    let mut random = Random(seed);
    let (mut hits, mut asked) = (0, 0);
    for at in 0..REQUESTS {
        cache.inner_mut().set_time(Duration::from_millis(400 * at as u64));
        let prompt = next(&mut random);
        let len = prompt.len();
        let mut sequence = cache.new_sequence(prompt, Scope::default(), vec![]);
        let hit = serve(&mut cache, &mut sequence);
        cache.release(&mut [&mut sequence]).unwrap();
        (hits, asked) = (hits + hit, asked + len);
    }
    100.0 * hits as f64 / asked as f64
}

#[test]
fn it_is_hardly_ever_behind_lru() {
    let workloads: [Workload; 6] = [
        ("conversations", || conversations(0)),
        ("shared prompt", || conversations(30)),
        ("exact repeats", || repeats(60)),
        ("scan", scan),
        ("repeats and scan", || mixture(vec![repeats(40), scan()])),
        ("all", || mixture(vec![conversations(30), repeats(40), scan()])),
    ];
    let mut gain = 0.0;
    for (name, workload) in workloads {
        for seed in 1..=4 {
            let [lru, own] = [EvictionPolicy::Lru, EvictionPolicy::ReuseQueue]
                .map(|policy| hit_rate(policy, workload(), seed));
            assert!(own >= lru - 0.2, "{name}: {own:.2} % where LRU hits {lru:.2}");
            gain += own - lru;
        }
    }
    assert!(gain > 20.0, "{gain:.2} points more in all runs together");
}
