//! Free blocks without content.
//!
//! The stack is Treiber's ("Systems Programming: Coping with Parallelism", 1986): a head word and a
//! link in each block. The head carries a tag that every change moves on, so a pop that was overtaken
//! by a pop and a push of the same block fails instead of putting a stale link in the head. A chain of
//! any length goes on, and comes off, with one exchange.
//!
//! A block that was never linked stands on the one with the next id. So a new pool writes to no block: a
//! million records are touched as they are handed out, not before.

use super::block::Block;
use super::words::exchange;
use crate::id::BlockId;
use crate::sync::{AtomicU64, Fault, Ordering, OwnLine, planted};

use Ordering::{Acquire, Relaxed};

const ID_BITS: u32 = 24;
const ID_MASK: u64 = (1 << ID_BITS) - 1;

/// A stack of block ids, linked through the blocks.
#[derive(Debug)]
pub(super) struct FreeStack {
    /// `tag:40 | id:24`; the null block is the bottom.
    head: OwnLine<AtomicU64>,
    /// The block before this one is the bottom of those that were never linked.
    unlinked_end: u32,
}

/// A chain of blocks that its builder alone can reach, linked as it will stand on the stack.
#[derive(Debug)]
pub(super) struct Chain {
    first: BlockId,
    last: BlockId,
    len: usize,
}

impl Chain {
    pub(super) const EMPTY: Self = Self { first: BlockId::NULL, last: BlockId::NULL, len: 0 };

    /// Puts a block at the chain's end.
    #[inline]
    pub(super) fn append(&mut self, blocks: &[Block], block: BlockId) {
        if self.first.is_null() {
            self.first = block;
        } else {
            // The chain is its builder's until the push releases it.
            blocks[self.last.index()].put_on(block);
        }
        self.last = block;
        self.len += 1;
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }
}

impl FreeStack {
    /// The blocks from 1 to the one before `end`, the first on top.
    pub(super) fn new(end: usize) -> Self {
        Self { head: OwnLine(AtomicU64::new(1)), unlinked_end: end as u32 }
    }

    fn top(head: u64) -> BlockId {
        BlockId::new((head & ID_MASK) as u32)
    }

    fn changed(head: u64, top: BlockId) -> u64 {
        let tag = if planted(Fault::KeepTag) { head >> ID_BITS } else { (head >> ID_BITS) + 1 };
        tag << ID_BITS | u64::from(top.get())
    }

    #[inline]
    fn below(&self, blocks: &[Block], block: BlockId) -> BlockId {
        blocks[block.index()].below().unwrap_or_else(|| {
            let next = block.get() + 1;
            if next < self.unlinked_end { BlockId::new(next) } else { BlockId::NULL }
        })
    }

    /// Puts a chain on top, its first block uppermost.
    pub(super) fn push(&self, blocks: &[Block], chain: &Chain) {
        if chain.first.is_null() {
            return;
        }
        // Relaxed: the exchange acquires what it builds on.
        let mut head = self.head.0.load(Relaxed);
        loop {
            // Released by the exchange that makes the block reachable.
            blocks[chain.last.index()].put_on(Self::top(head));
            match exchange(&self.head.0, head, Self::changed(head, chain.first)) {
                Ok(()) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Takes up to `max` blocks off the top and appends them to `out`.
    pub(super) fn pop(&self, blocks: &[Block], max: usize, out: &mut Vec<BlockId>) {
        let first = out.len();
        loop {
            // Acquire: the links below the top were written before the pushes that this reads from.
            let head = self.head.0.load(Acquire);
            let mut top = Self::top(head);
            while !top.is_null() && out.len() - first < max {
                out.push(top);
                // A link that changes meanwhile belongs to a block that was popped, so the tag has moved on and
                // the exchange fails.
                top = self.below(blocks, top);
            }
            if out.len() == first || exchange(&self.head.0, head, Self::changed(head, top)).is_ok()
            {
                return;
            }
            out.truncate(first);
        }
    }

    /// The blocks on the stack, top first. Exact only at rest.
    pub(super) fn walk(&self, blocks: &[Block]) -> impl Iterator<Item = BlockId> {
        let mut next = Self::top(self.head.0.load(Acquire));
        // No more steps than blocks: a damaged chain must not hang who looks for the damage.
        (0..blocks.len()).map_while(move |_| {
            let block = (!next.is_null() && next.index() < blocks.len()).then_some(next)?;
            next = self.below(blocks, block);
            Some(block)
        })
    }
}

#[cfg(all(test, loom))]
mod models {
    use loom::sync::Arc;

    use super::*;
    use crate::sync::{in_parallel, model};

    /// One thread pops a block; another pops two and puts the first of them back, then a chain.
    fn pop_with_pop_and_push() {
        let shared = Arc::new((FreeStack::new(4), [(); 5].map(|()| Block::default())));
        let other = in_parallel(&shared, |(stack, blocks)| {
            let mut mine = Vec::new();
            stack.pop(blocks, 2, &mut mine);
            let mut back = Chain::EMPTY;
            mine.drain(..1).chain([BlockId::new(4)]).for_each(|id| back.append(blocks, id));
            stack.push(blocks, &back);
            mine
        });
        let mut all = Vec::new();
        shared.0.pop(&shared.1, 1, &mut all);
        all.extend(other.join().unwrap());
        all.extend(shared.0.walk(&shared.1));
        all.sort_unstable();
        assert_eq!(all, [1, 2, 3, 4].map(BlockId::new), "a block was lost or doubled");
    }

    model!(pop_with_pop_and_push, fails with KeepTag("lost or doubled"));
}
