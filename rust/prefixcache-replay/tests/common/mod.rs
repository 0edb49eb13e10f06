//! Small traces.

use prefixcache_replay::trace::Trace;
use proptest::prelude::*;

/// Prompts as lists of symbols: two that begin alike share the blocks of what they have in common.
pub fn trace_of(prompts: &[Vec<u8>]) -> Trace {
    let lines = prompts.iter().enumerate().map(|(time, prompt)| {
        let ids: Vec<String> = prompt.iter().map(u8::to_string).collect();
        // One token more than the blocks hold: it is computed in any case, so that every block can hit.
        let (length, ids) = (prompt.len() * 512 + 1, ids.join(","));
        let comma = if prompt.is_empty() { "" } else { "," };
        format!(
            r#"{{"timestamp": {time}, "input_length": {length}, "output_length": 1, "hash_ids": [{ids}{comma}999]}}"#
        )
    });
    let text: Vec<String> = lines.collect();
    Trace::read_lines("prompts", text.join("\n").as_bytes()).unwrap()
}

/// Up to `requests` prompts of up to `length` blocks, which share much.
pub fn prompts(requests: usize, length: usize) -> impl Strategy<Value = Vec<Vec<u8>>> {
    prop::collection::vec(prop::collection::vec(0..2_u8, 0..=length), 1..=requests)
}

/// How many blocks hit in all, of an outcome's rate.
pub fn hit_blocks(trace: &Trace, hit_rate: f64) -> u64 {
    let tokens: usize = trace
        .requests
        .iter()
        .map(|request| request.input_tokens)
        .sum();
    (hit_rate * tokens as f64 / 512.0).round() as u64
}
