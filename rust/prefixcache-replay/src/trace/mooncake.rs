//! Lines of a Mooncake file: one object of JSON a request.

use prefixcache_serving::mix::mix;
use serde::Deserialize;

use super::{BlockKey, Fault, Form, Request, check_tokens};

/// Tokens in a block of every Mooncake trace.
pub(super) const BLOCK_SIZE: usize = 512;

#[derive(Deserialize)]
struct Line {
    timestamp: u64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

/// The form; the first line is a request already.
pub(super) struct Mooncake;

/// The block that `id` names behind another one; 0 stands for the root.
///
/// Ids name blocks by their content alone. Two of a billion keys are the same once in 37 traces of such a size.
fn key_behind(parent: BlockKey, id: u64) -> BlockKey {
    mix(mix(parent ^ 0x9e37_79b9_7f4a_7c15).wrapping_add(id))
}

impl Form for Mooncake {
    fn read_line(&mut self, line: &str, request: &mut Request) -> Result<(), Fault> {
        let line: Line = serde_json::from_str(line)
            .map_err(|error| Fault::new("object", format!("cannot be read: {error}")))?;
        let input_tokens = check_tokens("input_length", line.input_length)?;
        let blocks = input_tokens.div_ceil(BLOCK_SIZE);
        if line.hash_ids.len() != blocks {
            let reason = format!(
                "must be {blocks} ids, of blocks of {BLOCK_SIZE}, for {input_tokens} tokens, not {}",
                line.hash_ids.len()
            );
            return Err(Fault::new("hash_ids", reason));
        }
        // The last id may be of a block that is not full.
        let full = &line.hash_ids[..input_tokens / BLOCK_SIZE];
        let mut key = 0;
        request.blocks.clear();
        request.blocks.extend(full.iter().map(|&id| {
            key = key_behind(key, id);
            key
        }));
        request.num_prompt_blocks = full.len();
        request.time_ms = line.timestamp;
        request.input_tokens = input_tokens;
        request.output_tokens = check_tokens("output_length", line.output_length)?;
        request.session = None;
        Ok(())
    }
}
