//! The queue before a server, against one that looks at all requests again for each start.

use prefixcache_replay::quantiles::Quantiles;
use prefixcache_replay::server::{Admission, PrefillTime, Server};
use prefixcache_replay::trace::Request;
use proptest::prelude::*;

use crate::common::{BLOCK_SIZE, PlainLru, lru, prompts, simulate, trace_of};

const PREFILL: PrefillTime = PrefillTime { ms_per_request: 0.25, ms_per_token: 0.003 };
const OBJECTIVE_MS: f64 = 20.0;

/// Which of the requests that wait at a time starts next.
fn choose(
    prompts: &[Vec<u8>],
    requests: &[Request],
    waiting: &[usize],
    cache: &PlainLru,
    now: f64,
    admission: Admission,
) -> usize {
    let oldest = waiting[0];
    let Admission::CacheAware { max_delay_ms } = admission else {
        return oldest;
    };
    if now - requests[oldest].time_ms as f64 >= max_delay_ms {
        return oldest;
    }
    let window = &waiting[..waiting.len().min(64)];
    let mut by_hits = window.to_vec();
    by_hits.sort_by_key(|&one| std::cmp::Reverse(cache.hits(&prompts[one])));
    by_hits[0]
}

/// Milliseconds from each request's arrival to the end of its prefill, in the order of starts.
fn waits(
    prompts: &[Vec<u8>],
    requests: &[Request],
    capacity: usize,
    admission: Admission,
) -> Vec<f64> {
    let mut cache = PlainLru::new(capacity);
    let mut left: Vec<usize> = (0..requests.len()).collect();
    let (mut free_at, mut found) = (0.0_f64, Vec::new());
    while let Some(&oldest) = left.first() {
        let now = free_at.max(requests[oldest].time_ms as f64);
        let waiting: Vec<usize> =
            left.iter().copied().filter(|&one| requests[one].time_ms as f64 <= now).collect();
        let next = choose(prompts, requests, &waiting, &cache, now, admission);
        let computed = requests[next].input_tokens - cache.take(&prompts[next]) * BLOCK_SIZE;
        free_at = now + (PREFILL.ms_per_request + PREFILL.ms_per_token * computed as f64);
        found.push(free_at - requests[next].time_ms as f64);
        left.retain(|&one| one != next);
    }
    found
}

/// Runs requests that come `gaps` milliseconds after each other through server and oracle.
fn check(prompts: &[Vec<u8>], gaps: &[u64], capacity: usize, admission: Admission) {
    let mut requests = trace_of(prompts);
    let mut time_ms = 0;
    for (request, gap) in requests.iter_mut().zip(gaps) {
        time_ms += gap;
        request.time_ms = time_ms;
    }
    let server = Server::new(PREFILL, admission, OBJECTIVE_MS);
    let cache = lru(capacity);
    let simulation = simulate(&requests, &cache, Some(server), BLOCK_SIZE);
    let latency = simulation.latency().unwrap();
    let expected = waits(prompts, &requests, capacity, admission);
    let mut ttft_us = Quantiles::default();
    for ms in &expected {
        ttft_us.push((ms * 1e3) as u64);
    }
    for percentile in 0..=100 {
        let (found, known) = (latency.ttft_us.at(percentile), ttft_us.at(percentile));
        assert_eq!(found, known, "percentile {percentile}");
    }
    let good = expected.iter().filter(|&&ms| ms <= OBJECTIVE_MS).count();
    assert_eq!(latency.good, good as u64);
}

proptest! {
    #[test]
    fn requests_wait_as_in_a_queue_that_is_searched_again_for_each_start(
        prompts in prompts(90, 4),
        gaps in prop::collection::vec(0..4_u64, 90),
        capacity in 4..12_usize,
        admission in prop_oneof![
            Just(Admission::Fcfs),
            (0.0..60.0_f64).prop_map(|max_delay_ms| Admission::CacheAware { max_delay_ms }),
        ],
    ) {
        check(&prompts, &gaps, capacity, admission);
    }
}

/// The one prompt that hits is the last of those that are looked at, or the first of those that are not.
#[test]
fn a_window_of_the_queue_is_searched() {
    let admission = Admission::CacheAware { max_delay_ms: 1e9 };
    for others in [63, 64] {
        let mut prompts: Vec<Vec<u8>> = (0..=others).map(|symbol| vec![symbol]).collect();
        prompts.push(vec![0]);
        let at_once = vec![0; prompts.len()];
        check(&prompts, &at_once, 100, admission);
    }
}
