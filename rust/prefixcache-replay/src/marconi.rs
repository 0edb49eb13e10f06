//! Marconi's cache for models with states (Pan et al., MLSys 2025, arXiv 2411.19379), to compare with.
//!
//! Prompts lie in a radix tree. **Admission**: a snapshot is kept where a sequence ends, and where a prompt branches
//! off inside an edge, which the request that branches computes. **Eviction**: a node without a second child goes by
//! the least `recency + alpha * efficiency`, each from 0 to 1 among the candidates. Efficiency is what the node saves
//! beyond its parent, in tokens here, for each block that it frees. A leaf frees its blocks and its snapshot; of
//! another the snapshot goes alone, and the child takes the blocks.

use std::collections::HashMap;

use crate::cache::Outcome;
use crate::trace::{BlockKey, Request};

/// Weights of efficiency that are tried. The paper's cache finds one as it runs; the best of these is reported.
const ALPHAS: [f64; 5] = [0.0, 0.25, 0.5, 1.0, 2.0];

const ROOT: usize = 0;

/// One cache for each weight.
pub struct Marconi {
    trees: Vec<Tree>,
    block_size: usize,
    caches_answers: bool,
}

impl Marconi {
    /// Caches of `num_blocks` blocks of this many tokens, of which a snapshot takes `snapshot_blocks`.
    #[must_use]
    pub fn new(
        num_blocks: usize,
        snapshot_blocks: usize,
        block_size: usize,
        caches_answers: bool,
    ) -> Self {
        let tree = |alpha| Tree::new(alpha, num_blocks, snapshot_blocks);
        Self { trees: ALPHAS.map(tree).into(), block_size, caches_answers }
    }

    /// Runs a request.
    pub fn push(&mut self, request: &Request) {
        let most = request.most_hits(self.block_size);
        let blocks = match self.caches_answers {
            true => &request.blocks[..],
            false => request.prompt(),
        };
        for tree in &mut self.trees {
            let hits = tree.run(blocks, request.num_prompt_blocks, most);
            tree.outcome.push(request.input_tokens, hits * self.block_size, 0);
        }
    }

    /// What the requests found with the weight that suits them best.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        let best = self.trees.iter().max_by_key(|tree| tree.outcome.hit_tokens);
        best.map(|tree| tree.outcome.clone()).unwrap_or_default()
    }
}

/// The blocks after those of the parent, up to where paths part or end.
#[derive(Default)]
struct Node {
    parent: usize,
    children: Vec<usize>,
    keys: Vec<BlockKey>,
    /// Blocks up to its end.
    depth: usize,
    has_snapshot: bool,
    used: u64,
}

#[derive(Default)]
struct Tree {
    alpha: f64,
    capacity: usize,
    snapshot_blocks: usize,
    nodes: Vec<Node>,
    /// Nodes that are none any more.
    spare: Vec<usize>,
    /// The node of each block. A key is that of a whole prefix.
    places: HashMap<BlockKey, usize>,
    num_used: usize,
    time: u64,
    outcome: Outcome,
}

impl Tree {
    fn new(alpha: f64, capacity: usize, snapshot_blocks: usize) -> Self {
        Self { alpha, capacity, snapshot_blocks, nodes: vec![Node::default()], ..Self::default() }
    }

    /// The blocks of a request that hit.
    fn run(&mut self, blocks: &[BlockKey], num_prompt: usize, most: usize) -> usize {
        let room = self.capacity.saturating_sub(2 * self.snapshot_blocks);
        let blocks = &blocks[..blocks.len().min(room)];
        let known = blocks.iter().take_while(|key| self.places.contains_key(key));
        let known = known.count();
        self.time += 1;
        let hit = self.hit(&blocks[..known], most);
        self.nodes[hit].used = self.time;
        let hits = self.nodes[hit].depth;
        let end = self.insert(blocks, known, num_prompt);
        self.nodes[end].used = self.time;
        self.evict(end);
        hits
    }

    /// The last node on a path, up to `most` blocks, that can be gone on from; the root where there is none.
    fn hit(&self, path: &[BlockKey], most: usize) -> usize {
        let mut at = path.last().map_or(ROOT, |key| self.places[key]);
        let most = most.min(path.len());
        while at != ROOT && !(self.nodes[at].has_snapshot && self.nodes[at].depth <= most) {
            at = self.nodes[at].parent;
        }
        at
    }

    /// The node where these blocks end, of which the first `known` are there.
    fn insert(&mut self, blocks: &[BlockKey], known: usize, num_prompt: usize) -> usize {
        let Some(last) = known.checked_sub(1) else {
            return self.add(ROOT, blocks);
        };
        let mut at = self.places[&blocks[last]];
        if self.nodes[at].depth > known {
            at = self.split(at, known);
            // Of an answer no states are kept on the way.
            self.set_snapshot(at, known <= num_prompt);
        }
        if known < blocks.len() {
            return self.add(at, &blocks[known..]);
        }
        self.set_snapshot(at, true);
        at
    }

    fn add(&mut self, parent: usize, keys: &[BlockKey]) -> usize {
        if keys.is_empty() {
            return parent;
        }
        let depth = self.nodes[parent].depth + keys.len();
        let at = self.new_node(parent, keys.to_vec(), depth);
        self.nodes[parent].children.push(at);
        self.num_used += keys.len();
        self.set_snapshot(at, true);
        at
    }

    /// A node, which its parent does not know yet.
    fn new_node(&mut self, parent: usize, keys: Vec<BlockKey>, depth: usize) -> usize {
        let at = self.spare.pop().unwrap_or_else(|| {
            self.nodes.push(Node::default());
            self.nodes.len() - 1
        });
        self.places.extend(keys.iter().map(|&key| (key, at)));
        self.nodes[at] = Node { parent, keys, depth, used: self.time, ..Node::default() };
        at
    }

    /// Cuts a node after `depth` blocks; the upper part.
    fn split(&mut self, at: usize, depth: usize) -> usize {
        let node = &mut self.nodes[at];
        let (parent, first) = (node.parent, node.depth - node.keys.len());
        let lower = node.keys.split_off(depth - first);
        let keys = std::mem::replace(&mut node.keys, lower);
        let upper = self.new_node(parent, keys, depth);
        self.nodes[at].parent = upper;
        self.nodes[upper].children.push(at);
        self.exchange(parent, at, upper);
        upper
    }

    fn exchange(&mut self, parent: usize, child: usize, other: usize) {
        let children = self.nodes[parent].children.iter_mut();
        children.filter(|one| **one == child).for_each(|one| *one = other);
    }

    fn set_snapshot(&mut self, at: usize, has_snapshot: bool) {
        let node = &mut self.nodes[at];
        if at == ROOT || node.has_snapshot == has_snapshot {
            return;
        }
        node.has_snapshot = has_snapshot;
        match has_snapshot {
            true => self.num_used += self.snapshot_blocks,
            false => self.num_used -= self.snapshot_blocks,
        }
    }

    /// Evicts until all fits, but for the node that was used last.
    fn evict(&mut self, last: usize) {
        while self.num_used > self.capacity {
            let Some(at) = self.least(last) else { return };
            self.outcome.evictions += 1;
            self.set_snapshot(at, false);
            match self.nodes[at].children[..] {
                [] => self.remove(at),
                _ => self.merge(at),
            }
        }
    }

    fn least(&self, last: usize) -> Option<usize> {
        let candidates: Vec<_> = (1..self.nodes.len())
            .filter(|&at| at != last)
            .filter_map(|at| Some((at, self.nodes[at].used as f64, self.efficiency(at)?)))
            .collect();
        let range = |of: fn(&(usize, f64, f64)) -> f64| {
            let all = candidates.iter().map(of);
            let (low, high) =
                all.fold((f64::MAX, f64::MIN), |(low, high), x| (low.min(x), high.max(x)));
            (low, (high - low).max(f64::MIN_POSITIVE))
        };
        let (oldest, ages) = range(|one| one.1);
        let (worst, gains) = range(|one| one.2);
        let utility = |&(_, used, gain): &(usize, f64, f64)| {
            (used - oldest) / ages + self.alpha * (gain - worst) / gains
        };
        let least = candidates.iter().min_by(|a, b| utility(a).total_cmp(&utility(b)));
        least.map(|one| one.0)
    }

    /// What a node saves for each block that it frees; none for one that frees nothing.
    fn efficiency(&self, at: usize) -> Option<f64> {
        let node = &self.nodes[at];
        let snapshot = usize::from(node.has_snapshot) * self.snapshot_blocks;
        let freed = match node.children.len() {
            0 => node.keys.len() + snapshot,
            1 => snapshot,
            _ => 0,
        };
        (freed > 0).then(|| node.keys.len() as f64 / freed as f64)
    }

    fn remove(&mut self, at: usize) {
        let Node { parent, keys, .. } = std::mem::take(&mut self.nodes[at]);
        self.spare.push(at);
        self.num_used -= keys.len();
        for key in keys {
            self.places.remove(&key);
        }
        self.nodes[parent].children.retain(|&child| child != at);
        if parent != ROOT
            && !self.nodes[parent].has_snapshot
            && self.nodes[parent].children.len() == 1
        {
            self.merge(parent);
        }
    }

    /// Gives the blocks of a node with one child to that.
    fn merge(&mut self, at: usize) {
        let Node { parent, children, mut keys, .. } = std::mem::take(&mut self.nodes[at]);
        self.spare.push(at);
        let child = children[0];
        self.places.extend(keys.iter().map(|&key| (key, child)));
        keys.append(&mut self.nodes[child].keys);
        self.nodes[child].keys = keys;
        self.nodes[child].parent = parent;
        self.exchange(parent, at, child);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prompts of 4 and 6 blocks that share 2; a snapshot takes 3 blocks.
    fn branched(capacity: usize) -> Tree {
        let mut tree = Tree::new(0.0, capacity, 3);
        assert_eq!(tree.run(&[1, 2, 3, 4], 4, 4), 0);
        assert_eq!(tree.run(&[1, 2, 13, 14, 15, 16], 6, 6), 0, "no snapshot where they part");
        tree
    }

    #[test]
    fn a_snapshot_is_kept_where_prompts_part_and_where_they_end() {
        let mut tree = branched(100);
        assert_eq!(tree.num_used, 8 + 3 * 3);
        assert_eq!(tree.run(&[1, 2, 23], 3, 3), 2);
        assert_eq!(tree.run(&[1, 2, 3, 4, 5], 5, 5), 4);
        assert_eq!(tree.run(&[1, 2, 3, 4, 5], 5, 4), 4, "a token is left to compute");
    }

    #[test]
    fn the_oldest_goes_and_a_lone_child_takes_the_blocks_of_its_parent() {
        let mut tree = branched(19);
        let long = [1, 2, 13, 14, 15, 16];
        assert_eq!(tree.run(&long, 6, 6), 6);
        // The first prompt's end goes, so that the branch has one child and its snapshot goes next.
        tree.run(&[31, 32], 2, 2);
        assert_eq!(tree.num_used, 6 + 2 * 3 + 2 + 3);
        tree.run(&[41, 42], 2, 2);
        assert_eq!(tree.num_used, 6 + 3 + 2 * (2 + 3));
        assert_eq!(tree.run(&long, 6, 5), 0, "no snapshot where they part");
        assert_eq!(tree.run(&long, 6, 6), 6);
    }

    #[test]
    fn with_a_weight_long_prefixes_stay_that_are_older() {
        let long: Vec<_> = (0..20).collect();
        let hits = |alpha| {
            let mut tree = Tree::new(alpha, 30, 3);
            tree.run(&long, 20, 20);
            tree.run(&[101], 1, 1);
            tree.run(&[102, 103], 2, 2);
            tree.run(&long, 20, 20)
        };
        assert_eq!((hits(0.0), hits(2.0)), (0, 20));
    }
}
