//! The tree of all blocks of a trace: a block's parent is the one before it in its prompt.

use std::iter;

/// A block of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Node(u32);

impl Node {
    /// The block's number, in the order of first appearance.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Blocks by their parents.
#[derive(Clone, Debug, Default)]
pub struct Tree {
    parents: Vec<Option<Node>>,
}

impl Tree {
    /// How many blocks there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.parents.len()
    }

    /// Whether there is no block.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.parents.is_empty()
    }

    /// The block `index`, if there is one.
    #[must_use]
    pub fn node(&self, index: usize) -> Option<Node> {
        (index < self.len()).then_some(Node(index as u32))
    }

    /// A new block under `parent`; none when there are too many.
    pub(super) fn add(&mut self, parent: Option<Node>) -> Option<Node> {
        let node = Node(u32::try_from(self.len()).ok()?);
        self.parents.push(parent);
        Some(node)
    }

    /// The blocks from `end` up to the root.
    pub fn upward(&self, end: Option<Node>) -> impl Iterator<Item = Node> {
        iter::successors(end, |node| self.parents[node.index()])
    }

    /// The blocks from the root down to `end`.
    #[must_use]
    pub fn path(&self, end: Option<Node>) -> Vec<Node> {
        let mut path: Vec<Node> = self.upward(end).collect();
        path.reverse();
        path
    }

    pub(super) fn depth(&self, end: Option<Node>) -> usize {
        self.upward(end).count()
    }
}
