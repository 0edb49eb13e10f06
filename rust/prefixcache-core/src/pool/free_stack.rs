//! Free blocks without content: a stack of those that were used before, above a run of those that
//! never were.
//!
//! The stack is Treiber's ("Systems Programming: Coping with Parallelism", 1986): a head word and a
//! link in each block. The head carries a tag that every change moves on, so a pop that was overtaken
//! by a pop and a push of the same block fails instead of putting a stale link in the head. A chain of
//! any length goes on, and comes off, with one exchange.
//!
//! The run is one word as well, its first and its end, so that a new pool writes to no block: a
//! million records are touched as they are handed out, not before.

use crate::block::Block;
use crate::id::BlockId;
use crate::sync::{AtomicU64, Fault, Mode, Ordering, OwnLine, planted};

use Ordering::{Acquire, Relaxed};

const ID_BITS: u32 = 24;
const ID_MASK: u64 = (1 << ID_BITS) - 1;

/// A stack of block ids, linked through the blocks.
#[derive(Debug, Default)]
pub(crate) struct FreeStack {
    /// `tag:40 | id:24`; the null block is the bottom.
    head: OwnLine<AtomicU64>,
}

/// A chain of blocks that its builder alone can reach, linked as it will stand on the stack.
#[derive(Debug)]
pub(crate) struct Chain {
    first: BlockId,
    last: BlockId,
}

impl Chain {
    pub(crate) const EMPTY: Self = Self { first: BlockId::NULL, last: BlockId::NULL };

    /// Puts a block at the chain's end.
    #[inline]
    pub(crate) fn append(&mut self, blocks: &[Block], block: BlockId) {
        if self.first.is_null() {
            self.first = block;
        } else {
            // Relaxed: the chain is its builder's until the push releases it.
            blocks[self.last.index()].next.store(block.get(), Relaxed);
        }
        self.last = block;
    }
}

impl FreeStack {
    fn top(head: u64) -> BlockId {
        BlockId::new((head & ID_MASK) as u32)
    }

    fn changed(head: u64, top: BlockId) -> u64 {
        let tag = if planted(Fault::KeepTag) { head >> ID_BITS } else { (head >> ID_BITS) + 1 };
        tag << ID_BITS | u64::from(top.get())
    }

    /// Puts a chain on top, its first block uppermost.
    pub(crate) fn push<M: Mode>(&self, blocks: &[Block], chain: &Chain) {
        if chain.first.is_null() {
            return;
        }
        // Relaxed: the exchange acquires what it builds on.
        let mut head = self.head.0.load(Relaxed);
        loop {
            // Relaxed: released by the exchange that makes the block reachable.
            blocks[chain.last.index()].next.store(Self::top(head).get(), Relaxed);
            match M::exchange(&self.head.0, head, Self::changed(head, chain.first)) {
                Ok(()) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Takes up to `max` blocks off the top and appends them to `out`; how many.
    pub(crate) fn pop<M: Mode>(
        &self,
        blocks: &[Block],
        max: usize,
        out: &mut Vec<BlockId>,
    ) -> usize {
        let first = out.len();
        loop {
            // Acquire: the links below the top were written before the pushes that this reads from.
            let head = self.head.0.load(Acquire);
            let mut top = Self::top(head);
            while !top.is_null() && out.len() - first < max {
                out.push(top);
                // Relaxed: ordered by the head's load; a link that changes meanwhile belongs to a
                // block that was popped, so the tag has moved on and the exchange fails.
                top = BlockId::new(blocks[top.index()].next.load(Relaxed));
            }
            let taken = out.len() - first;
            if taken == 0 || M::exchange(&self.head.0, head, Self::changed(head, top)).is_ok() {
                return taken;
            }
            out.truncate(first);
        }
    }

    /// The blocks on the stack, top first. Exact only at rest.
    pub(crate) fn walk<'a>(&self, blocks: &'a [Block]) -> impl Iterator<Item = BlockId> + use<'a> {
        let mut next = Self::top(self.head.0.load(Acquire));
        // No more steps than blocks: a damaged chain must not hang who looks for the damage.
        (0..blocks.len()).map_while(move |_| {
            let block = (!next.is_null()).then_some(next)?;
            next = BlockId::new(blocks.get(block.index())?.next.load(Acquire));
            Some(block)
        })
    }
}

/// The blocks that were never handed out: a run of ids, taken from its front.
#[derive(Debug)]
pub(crate) struct FreshRun {
    /// `next:32 | end:32`.
    bounds: OwnLine<AtomicU64>,
}

impl FreshRun {
    pub(crate) fn new(first: usize, end: usize) -> Self {
        Self { bounds: OwnLine(AtomicU64::new((first as u64) << 32 | end as u64)) }
    }

    fn unpack(bounds: u64) -> (u32, u32) {
        ((bounds >> 32) as u32, bounds as u32)
    }

    /// Takes up to `max` blocks and appends them to `out`; how many.
    pub(crate) fn take<M: Mode>(&self, max: usize, out: &mut Vec<BlockId>) -> usize {
        loop {
            // Relaxed: nothing is published through the bounds; the exchange checks them.
            let bounds = self.bounds.0.load(Relaxed);
            let (next, end) = Self::unpack(bounds);
            let taken = max.min((end - next) as usize);
            if taken == 0 {
                return 0;
            }
            let rest = bounds + ((taken as u64) << 32);
            let blind = planted(Fault::BlindRunStore);
            if blind {
                self.bounds.0.store(rest, Relaxed);
            }
            if blind || M::exchange(&self.bounds.0, bounds, rest).is_ok() {
                out.extend((next..next + taken as u32).map(BlockId::new));
                return taken;
            }
        }
    }

    /// Ends the run at `floor`; the blocks that it had from there on. No thread takes any meanwhile.
    pub(crate) fn cut<M: Mode>(&self, floor: usize) -> std::ops::Range<usize> {
        // Relaxed: as in `take`.
        let bounds = self.bounds.0.load(Relaxed);
        let (next, end) = Self::unpack(bounds);
        let new_end = end.min(next.max(floor as u32));
        let rest = u64::from(next) << 32 | u64::from(new_end);
        let cut = M::exchange(&self.bounds.0, bounds, rest);
        debug_assert!(cut.is_ok(), "fresh blocks were taken during a resize");
        new_end as usize..end as usize
    }

    /// The ids of the run.
    pub(crate) fn ids(&self) -> std::ops::Range<u32> {
        let (next, end) = Self::unpack(self.bounds.0.load(Acquire));
        next..end
    }

    /// The blocks of the run.
    pub(crate) fn walk(&self) -> impl Iterator<Item = BlockId> + use<> {
        self.ids().map(BlockId::new)
    }
}

#[cfg(all(test, loom))]
mod models {
    use loom::sync::Arc;

    use super::*;
    use crate::sync::{Shared, in_parallel, model};

    fn chain(blocks: &[Block], ids: &[u32]) -> Chain {
        let mut chain = Chain::EMPTY;
        ids.iter().for_each(|&id| chain.append(blocks, BlockId::new(id)));
        chain
    }

    /// One thread pops a block; another pops two and puts the first of them back, then a chain.
    fn pop_with_pop_and_push() {
        let shared = Arc::new((FreeStack::default(), [(); 5].map(|()| Block::default())));
        shared.0.push::<Shared>(&shared.1, &chain(&shared.1, &[1, 2, 3]));
        let other = in_parallel(&shared, |(stack, blocks)| {
            let mut mine = Vec::new();
            stack.pop::<Shared>(blocks, 2, &mut mine);
            let back: Vec<u32> = mine.drain(..1).map(BlockId::get).chain([4]).collect();
            stack.push::<Shared>(blocks, &chain(blocks, &back));
            mine
        });
        let mut all = Vec::new();
        shared.0.pop::<Shared>(&shared.1, 1, &mut all);
        all.extend(other.join().unwrap());
        all.extend(shared.0.walk(&shared.1));
        all.sort_unstable();
        assert_eq!(all, [1, 2, 3, 4].map(BlockId::new), "a block was lost or doubled");
    }

    model!(pop_with_pop_and_push, fails with KeepTag("lost or doubled"));

    /// Two threads take fresh blocks.
    fn take_with_take() {
        let run = Arc::new(FreshRun::new(1, 5));
        let other = in_parallel(&run, |run| {
            let mut mine = Vec::new();
            run.take::<Shared>(2, &mut mine);
            mine
        });
        let mut all = Vec::new();
        run.take::<Shared>(1, &mut all);
        all.extend(other.join().unwrap());
        all.extend(run.walk());
        all.sort_unstable();
        assert_eq!(all, [1, 2, 3, 4].map(BlockId::new), "a block was lost or doubled");
    }

    model!(take_with_take, fails with BlindRunStore("lost or doubled"));
}
