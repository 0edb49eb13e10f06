//! Free blocks without content.
//!
//! The stack is Treiber's ("Systems Programming: Coping with Parallelism", 1986): a head word and a
//! link in each block. The head carries a tag that every change moves on, so a pop that was overtaken
//! by a pop and a push of the same block fails instead of putting a stale link in the head. A chain of
//! any length goes on, and comes off, with one exchange.
//!
//! Below it stands a run of blocks that were never handed out, which no link names. So a new pool writes to no block: a
//! million records are touched as they are handed out, not before.

use std::ops::Range;

use super::block::Block;
use super::words::exchange;
use crate::id::BlockId;
use crate::sync::{AtomicU64, Fault, Ordering, OwnLine, planted};

use Ordering::{Acquire, Relaxed, Release};

const ID_BITS: u32 = 24;
const ID_MASK: u64 = (1 << ID_BITS) - 1;

fn pack(run: Range<u32>) -> u64 {
    u64::from(run.start) << 32 | u64::from(run.end)
}

fn unpack(word: u64) -> Range<u32> {
    (word >> 32) as u32..word as u32
}

/// A stack of block ids, linked through the blocks.
#[derive(Debug)]
pub(super) struct FreeStack {
    /// `tag:40 | id:24`; the null block is the bottom.
    head: OwnLine<AtomicU64>,
    /// `first:32 | end:32` of the run below, which only gets shorter.
    fresh: OwnLine<AtomicU64>,
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
        let fresh = OwnLine(AtomicU64::new(pack(1..end as u32)));
        Self { head: OwnLine::default(), fresh }
    }

    fn top(head: u64) -> BlockId {
        BlockId::new((head & ID_MASK) as u32)
    }

    fn changed(head: u64, top: BlockId) -> u64 {
        let tag = if planted(Fault::KeepTag) { head >> ID_BITS } else { (head >> ID_BITS) + 1 };
        tag << ID_BITS | u64::from(top.get())
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
        self.pop_linked(blocks, max, out);
        self.take_fresh(max - (out.len() - first), out);
    }

    fn take_fresh(&self, max: usize, out: &mut Vec<BlockId>) {
        // Relaxed: nothing is read through the run, and the exchange checks again.
        let mut word = self.fresh.0.load(Relaxed);
        loop {
            let Range { start, end } = unpack(word);
            let next = end.min(start.saturating_add(max.try_into().unwrap_or(u32::MAX)));
            if next <= start {
                return;
            }
            match exchange(&self.fresh.0, word, pack(next..end)) {
                Err(now) if !planted(Fault::BlindFresh) => word = now,
                _ => return out.extend((start..next).map(BlockId::new)),
            }
        }
    }

    fn pop_linked(&self, blocks: &[Block], max: usize, out: &mut Vec<BlockId>) {
        let first = out.len();
        loop {
            // Acquire: the links below the top were written before the pushes that this reads from.
            let head = self.head.0.load(Acquire);
            let mut top = Self::top(head);
            while !top.is_null() && out.len() - first < max {
                out.push(top);
                // A link that changes meanwhile belongs to a block that was popped, so the tag has moved on and
                // the exchange fails.
                top = blocks[top.index()].below();
            }
            if out.len() == first || exchange(&self.head.0, head, Self::changed(head, top)).is_ok()
            {
                return;
            }
            out.truncate(first);
        }
    }

    /// Takes the blocks from `floor` on out, and leaves the order of the others; how many. No other thread takes blocks.
    pub(super) fn cut(&self, blocks: &[Block], floor: usize) -> usize {
        let mut linked = Vec::new();
        self.pop_linked(blocks, usize::MAX, &mut linked);
        let mut rest = Chain::EMPTY;
        linked.iter().filter(|id| id.index() < floor).for_each(|&id| rest.append(blocks, id));
        self.push(blocks, &rest);
        let Range { start, end } = unpack(self.fresh.0.load(Acquire));
        let kept = end.min(start.max(floor as u32));
        // Release: as an exchange.
        self.fresh.0.store(pack(start..kept), Release);
        linked.len() - rest.len() + (end - kept) as usize
    }

    /// The free blocks without content, the next first. Exact only at rest.
    pub(super) fn walk(&self, blocks: &[Block]) -> impl Iterator<Item = BlockId> {
        let mut next = Self::top(self.head.0.load(Acquire));
        // No more steps than blocks: a damaged chain must not hang who looks for the damage.
        let linked = (0..blocks.len()).map_while(move |_| {
            let block = (!next.is_null() && next.index() < blocks.len()).then_some(next)?;
            next = blocks[block.index()].below();
            Some(block)
        });
        linked.chain(unpack(self.fresh.0.load(Acquire)).map(BlockId::new))
    }
}

#[cfg(all(test, loom))]
mod models {
    use loom::sync::Arc;

    use super::*;
    use crate::sync::{in_parallel, model};

    /// A stack of blocks 1 to `linked`, above a run of those up to `end`.
    fn shared(linked: u32, end: u32) -> Arc<(FreeStack, [Block; 5])> {
        let stack = FreeStack::new(0);
        stack.fresh.0.store(pack(linked + 1..end), Relaxed);
        let blocks = [(); 5].map(|()| Block::default());
        let mut chain = Chain::EMPTY;
        (1..=linked).for_each(|id| chain.append(&blocks, BlockId::new(id)));
        stack.push(&blocks, &chain);
        Arc::new((stack, blocks))
    }

    /// One thread pops a block; another pops two and puts the first of them back, then a chain.
    fn pop_with_pop_and_push() {
        let shared = shared(3, 4);
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

    /// Two threads pop what was put on the stack and what was never handed out.
    fn pop_with_pop_of_fresh() {
        let shared = shared(1, 4);
        let other = in_parallel(&shared, |(stack, blocks)| {
            let mut mine = Vec::new();
            stack.pop(blocks, 2, &mut mine);
            mine
        });
        let mut all = Vec::new();
        shared.0.pop(&shared.1, 1, &mut all);
        all.extend(other.join().unwrap());
        all.sort_unstable();
        assert_eq!(all, [1, 2, 3].map(BlockId::new), "a block was lost or doubled");
    }

    model!(pop_with_pop_of_fresh, fails with BlindFresh("lost or doubled"));
}
