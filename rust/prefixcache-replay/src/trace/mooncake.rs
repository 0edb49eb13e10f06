//! Lines of a Mooncake file: one object of JSON a request.

use std::collections::HashMap;

use serde::Deserialize;

use super::{Fault, Form, Node, Request, Trace, check_tokens};

/// Tokens in a block of every Mooncake trace.
const BLOCK_SIZE: usize = 512;

#[derive(Deserialize)]
struct Line {
    timestamp: u64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

/// The form: which node a hash id names under its parent.
#[derive(Default)]
pub(super) struct Mooncake {
    nodes: HashMap<(Option<Node>, u64), Node>,
}

impl Mooncake {
    pub(super) fn begin(&mut self, trace: &mut Trace) {
        trace.block_size = BLOCK_SIZE;
    }

    fn child(&mut self, trace: &mut Trace, parent: Option<Node>, id: u64) -> Result<Node, Fault> {
        if let Some(&node) = self.nodes.get(&(parent, id)) {
            return Ok(node);
        }
        let full = || {
            Fault::new(
                "hash_ids",
                "must not make more blocks than a trace can have",
            )
        };
        let node = trace.tree.add(parent).ok_or_else(full)?;
        self.nodes.insert((parent, id), node);
        Ok(node)
    }
}

impl Form for Mooncake {
    fn read_line(&mut self, line: &str, trace: &mut Trace) -> Result<(), Fault> {
        let line: Line = serde_json::from_str(line)
            .map_err(|error| Fault::new("object", format!("cannot be read: {error}")))?;
        let input_tokens = check_tokens("input_length", line.input_length)?;
        let blocks = input_tokens.div_ceil(BLOCK_SIZE);
        if line.hash_ids.len() != blocks {
            let reason = format!(
                "must be {blocks} ids for {input_tokens} tokens, not {}",
                line.hash_ids.len()
            );
            return Err(Fault::new("hash_ids", reason));
        }
        // The last id may be of a block that is not full.
        let mut prompt = None;
        for &id in &line.hash_ids[..input_tokens / BLOCK_SIZE] {
            prompt = Some(self.child(trace, prompt, id)?);
        }
        trace.push(Request {
            time_ms: line.timestamp,
            input_tokens,
            output_tokens: check_tokens("output_length", line.output_length)?,
            session: None,
            prompt,
            answer: prompt,
        })
    }
}
