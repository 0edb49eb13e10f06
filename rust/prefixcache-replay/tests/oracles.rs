//! The replay through the real cache, and the offline optimum, against their obvious forms.

mod common;

use std::collections::{BTreeSet, HashMap};

use common::{hit_blocks, prompts, trace_of};
use prefixcache_core::EvictionPolicy;
use prefixcache_replay::optimum::optimum;
use prefixcache_replay::replay::replay;
use prefixcache_replay::trace::Trace;
use proptest::prelude::*;

/// A block by all symbols up to it.
type Block = Vec<u8>;

fn blocks(prompt: &[u8], capacity: usize) -> Vec<Block> {
    let lengths = 1..=prompt.len().min(capacity);
    lengths.map(|length| prompt[..length].to_vec()).collect()
}

/// Blocks that hit in a list that is kept in the order of last use, the tail of a prompt before its head.
fn hits_of_plain_lru(prompts: &[Vec<u8>], capacity: usize) -> u64 {
    let mut line: Vec<Block> = Vec::new();
    let mut hits = 0;
    for prompt in prompts {
        let wanted = blocks(prompt, capacity);
        hits += wanted
            .iter()
            .take_while(|block| line.contains(block))
            .count() as u64;
        line.retain(|block| !wanted.contains(block));
        let surplus = (line.len() + wanted.len()).saturating_sub(capacity);
        line.drain(..surplus);
        line.extend(wanted.into_iter().rev());
    }
    hits
}

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
    let hits = wanted
        .iter()
        .take_while(|block| cached.contains(*block))
        .count() as u64;
    let others: Vec<&Block> = cached
        .iter()
        .filter(|block| !wanted.contains(block))
        .collect();
    let room = capacity - wanted.len();
    let choices = (0_u32..1 << others.len())
        .filter(|choice| choice.count_ones() as usize == room.min(others.len()));
    let rest = choices.map(|choice| {
        let kept = others
            .iter()
            .enumerate()
            .filter(|(bit, _)| choice >> bit & 1 == 1);
        let next = kept
            .map(|(_, block)| (*block).clone())
            .chain(wanted.iter().cloned());
        most_hits(prompts, at + 1, &next.collect(), capacity, known)
    });
    let most = hits + rest.max().unwrap_or(0);
    known.insert((at, cached.clone()), most);
    most
}

proptest! {
    #[test]
    fn the_cache_hits_what_a_plain_lru_list_hits(prompts in prompts(40, 6), capacity in 1..12_usize) {
        let trace = trace_of(&prompts);
        let outcome = replay(&trace, capacity, EvictionPolicy::Lru).unwrap();
        prop_assert_eq!(
            hit_blocks(&trace, outcome.hit_rate()),
            hits_of_plain_lru(&prompts, capacity)
        );
    }

    #[test]
    fn no_choice_of_blocks_hits_more_than_the_optimum(prompts in prompts(8, 4), capacity in 1..6_usize) {
        let trace = trace_of(&prompts);
        let outcome = optimum(&trace, capacity);
        let most = most_hits(&prompts, 0, &BTreeSet::new(), capacity, &mut HashMap::new());
        prop_assert_eq!(hit_blocks(&trace, outcome.hit_rate()), most);
    }
}

fn public_trace(name: &str) -> Trace {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/traces/");
    Trace::read(format!("{folder}{name}").as_ref()).unwrap()
}

/// Token hit rates in percent: of LRU and of the optimum, with a pool of so many blocks.
fn rates(trace: &Trace, num_blocks: usize) -> [f64; 2] {
    let lru = replay(trace, num_blocks, EvictionPolicy::Lru).unwrap();
    [lru, optimum(trace, num_blocks)].map(|outcome| 100.0 * outcome.hit_rate())
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
    for (name, num_blocks, known) in cases {
        let found = rates(&public_trace(name), num_blocks);
        for (found, known) in found.into_iter().zip(known) {
            assert!(
                (found - known).abs() <= 0.1,
                "{name}: {found} is not {known}"
            );
        }
    }
}

#[test]
fn both_forms_of_one_trace_say_the_same() {
    let [ours, original] = [
        "mooncake_conv.ptt.gz",
        "mooncake_conversation_trace.jsonl.xz",
    ]
    .map(public_trace);
    assert_eq!(ours.requests.len(), original.requests.len());
    assert_eq!(ours.num_prompt_blocks(), 170_899);
    assert_eq!(original.num_prompt_blocks(), 170_899);
    for (one, other) in ours.requests.iter().zip(&original.requests) {
        assert_eq!(
            (one.time_ms, one.input_tokens),
            (other.time_ms, other.input_tokens)
        );
    }
}
