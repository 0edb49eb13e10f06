//! What no order of eviction can beat: Belady's MIN, for blocks that form a tree.
//!
//! Of the blocks that the request at hand does not need, the one goes whose next use is the furthest; of
//! several with the same next use, the one that lies deepest in its prompt. A block is used whenever one
//! behind it is, so a prefix is never lost before what follows it, and every block that is kept can hit.

use std::collections::BTreeSet;

use crate::replay::{Outcome, most_hits};
use crate::trace::{Node, Request, Trace};

/// The request number of a use that never comes.
const NEVER: u32 = u32::MAX;

/// When a cached block is used next, and which it is: the last of all goes first. Blocks are numbered as they
/// first appear, so of two with the same next use the one behind the other goes first.
type Place = (u32, Node);

/// Runs a trace as [`replay`](crate::replay::replay) does, through `num_blocks` blocks that are always the
/// best to keep.
#[must_use]
pub fn optimum(trace: &Trace, num_blocks: usize) -> Outcome {
    let mut kept = Kept::new(trace, num_blocks);
    let mut outcome = Outcome::default();
    for (request, next_uses) in trace.requests.iter().zip(next_uses(trace)) {
        let mut prompt = trace.prompt(request);
        prompt.truncate(num_blocks);
        let hits = kept.count_hits(&prompt).min(most_hits(trace, request));
        kept.ask(&prompt, &next_uses);
        outcome.push(request, hits * trace.block_size);
    }
    outcome
}

/// For each block of each request, the request that uses it next.
fn next_uses(trace: &Trace) -> Vec<Vec<u32>> {
    let mut next = vec![NEVER; trace.tree.len()];
    let mut uses = |(number, request): (usize, &Request)| -> Vec<u32> {
        let prompt = trace.prompt(request).into_iter();
        prompt
            .map(|node| std::mem::replace(&mut next[node.index()], number as u32))
            .collect()
    };
    let requests = trace.requests.iter().enumerate();
    let mut all: Vec<_> = requests.rev().map(&mut uses).collect();
    all.reverse();
    all
}

/// The blocks that are cached, in the order of their next use.
struct Kept {
    capacity: usize,
    order: BTreeSet<Place>,
    places: Vec<Option<Place>>,
}

impl Kept {
    fn new(trace: &Trace, capacity: usize) -> Self {
        Self {
            capacity,
            order: BTreeSet::new(),
            places: vec![None; trace.tree.len()],
        }
    }

    fn count_hits(&self, prompt: &[Node]) -> usize {
        let cached = |node: &&Node| self.places[node.index()].is_some();
        prompt.iter().take_while(cached).count()
    }

    /// Makes room for a prompt and keeps all of it.
    fn ask(&mut self, prompt: &[Node], next_uses: &[u32]) {
        for node in prompt {
            if let Some(place) = self.places[node.index()].take() {
                self.order.remove(&place);
            }
        }
        while self.order.len() + prompt.len() > self.capacity
            && let Some((_, node)) = self.order.pop_last()
        {
            self.places[node.index()] = None;
        }
        for (&node, &next) in prompt.iter().zip(next_uses) {
            let place = (next, node);
            self.order.insert(place);
            self.places[node.index()] = Some(place);
        }
    }
}
