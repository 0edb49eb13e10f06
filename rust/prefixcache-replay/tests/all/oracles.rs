//! The replay through the real cache, and the offline optimum, against their obvious forms.

use std::collections::{BTreeSet, HashMap};

use prefixcache_replay::disk::DiskConfig;
use prefixcache_replay::trace::Request;
use proptest::prelude::*;

use crate::common::{
    BLOCK_SIZE, Block, PlainDisk, PlainLru, blocks, history, lru, prompts, public_trace, replay,
    trace_of,
};

/// The most blocks that can hit from request `at` on, whichever blocks are given up at each request.
fn most_hits(
    prompts: &[Vec<u8>],
    at: usize,
    cached: &BTreeSet<Block>,
    capacity: usize,
    known: &mut HashMap<(usize, BTreeSet<Block>), u64>,
) -> u64 {
    let Some(prompt) = prompts.get(at) else {
        return 0;
    };
    if let Some(&hits) = known.get(&(at, cached.clone())) {
        return hits;
    }
    let wanted = blocks(prompt, capacity);
    let hits = wanted.iter().take_while(|block| cached.contains(*block)).count() as u64;
    let others: Vec<&Block> = cached.iter().filter(|block| !wanted.contains(block)).collect();
    let room = capacity - wanted.len();
    let choices = (0_u32..1 << others.len())
        .filter(|choice| choice.count_ones() as usize == room.min(others.len()));
    let rest = choices.map(|choice| {
        let kept = others.iter().enumerate().filter(|(bit, _)| choice >> bit & 1 == 1);
        let next = kept.map(|(_, block)| (*block).clone()).chain(wanted.iter().cloned());
        most_hits(prompts, at + 1, &next.collect(), capacity, known)
    });
    let most = hits + rest.max().unwrap_or(0);
    known.insert((at, cached.clone()), most);
    most
}

proptest! {
    #[test]
    fn the_cache_hits_what_a_plain_lru_list_hits(prompts in prompts(40, 6), capacity in 1..12_usize) {
        let outcome = replay(&trace_of(&prompts), &lru(capacity), BLOCK_SIZE);
        let mut line = PlainLru::new(capacity);
        let hits: u64 = prompts.iter().map(|prompt| line.take(prompt) as u64).sum();
        prop_assert_eq!(outcome.hit_tokens, hits * BLOCK_SIZE as u64);
    }

    #[test]
    fn a_pool_and_its_disk_hit_what_two_plain_lists_hit(
        prompts in prompts(40, 6), capacity in 1..12_usize, on_disk in 1..20_usize, min_uses in 1..4_u32,
    ) {
        let mut config = lru(capacity);
        config.disk = Some(DiskConfig { num_blocks: on_disk, min_uses });
        let outcome = replay(&trace_of(&prompts), &config, BLOCK_SIZE);
        let mut lists = PlainDisk::new(capacity, on_disk, min_uses);
        let hits = prompts.iter().map(|prompt| lists.take(prompt));
        let [memory, disk] = hits.fold([0, 0], |sum, one| [sum[0] + one[0], sum[1] + one[1]]);
        let size = BLOCK_SIZE as u64;
        prop_assert_eq!([outcome.hit_tokens, outcome.disk_tokens], [memory * size, disk * size]);
    }

    #[test]
    fn an_infinite_cache_hits_what_a_large_one_does(prompts in prompts(40, 6)) {
        let trace = trace_of(&prompts);
        let infinite = history(&trace, BLOCK_SIZE).infinite();
        let large = replay(&trace, &lru(1000), BLOCK_SIZE);
        prop_assert_eq!(infinite.tokens, large.hit_tokens);
        prop_assert_eq!(infinite.requests, large.hit_requests);
    }

    #[test]
    fn no_choice_of_blocks_hits_more_than_the_optimum(prompts in prompts(8, 4), capacity in 1..6_usize) {
        let history = history(&trace_of(&prompts), BLOCK_SIZE);
        let optimum = history.optimum(&[capacity])[0];
        let most = most_hits(&prompts, 0, &BTreeSet::new(), capacity, &mut HashMap::new());
        prop_assert_eq!(optimum.tokens, most * BLOCK_SIZE as u64);
    }
}

/// Token hit rates in percent with a pool of `num_blocks` blocks: of the LRU cache and of the optimum.
fn rates((trace, block_size): &(Vec<Request>, usize), num_blocks: usize) -> [f64; 2] {
    let lru = replay(trace, &lru(num_blocks), *block_size);
    let history = history(trace, *block_size);
    let optimum = history.optimum(&[num_blocks])[0];
    let percent = |tokens| 100.0 * tokens as f64 / history.input_tokens() as f64;
    [lru.hit_tokens, optimum.tokens].map(percent)
}

/// The answers were computed by other programs, which know nothing of this cache.
#[test]
fn public_traces_have_their_known_answers() {
    let cases = [
        ("mooncake_conv.ptt.gz", 3_418, [7.8, 31.1]),
        ("mooncake_conversation_trace.jsonl.xz", 3_418, [7.8, 31.1]),
        ("taubench.ptt.gz", 729, [57.7, 69.1]),
        ("taubench.ptt.gz", 1_822, [79.3, 87.4]),
    ];
    for (name, num_blocks, [lru, optimum]) in cases {
        let found = rates(&public_trace(name), num_blocks);
        for (found, known) in found.into_iter().zip([lru, optimum]) {
            assert!((found - known).abs() <= 0.1, "{name}: {found} is not {known}");
        }
    }
}

#[test]
fn both_forms_of_one_trace_say_the_same() {
    let [(ours, size), (original, same_size)] =
        ["mooncake_conv.ptt.gz", "mooncake_conversation_trace.jsonl.xz"].map(public_trace);
    assert_eq!(ours.len(), original.len());
    for (trace, size) in [(&ours, size), (&original, same_size)] {
        assert_eq!(history(trace, size).num_unique_blocks(), 170_899);
    }
    for (one, other) in ours.iter().zip(&original) {
        assert_eq!((one.time_ms, one.input_tokens), (other.time_ms, other.input_tokens));
    }
}
