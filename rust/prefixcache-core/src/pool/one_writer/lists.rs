//! Free blocks: an intrusive LRU list for each class, and those that hold nothing.
//!
//! A block's links stand in its own record, so push, remove, pop and replace are O(1) in the worst case.
//!
//! Following links waits for memory at each block, as the next address is known only then. So each block also names
//! one that joined the list [`AHEAD`] places later, whose record an eviction fetches in advance: jump pointers (Luk
//! and Mowry, "Compiler-based prefetching for recursive data structures", 1996; Roth and Sohi, "Effective
//! jump-pointer prefetching for linked data structures", 1999). Where that one has left the list since, a fetch is
//! wasted and nothing else happens.

use super::block::{Block, State, id};
use crate::id::BlockId;
use crate::sync::prefetch;

/// How many places ahead of an eviction a record is fetched.
const AHEAD: usize = 12;

/// An LRU list, the least recently used block first.
#[derive(Debug, Default)]
pub(super) struct List {
    first: BlockId,
    last: BlockId,
    len: usize,
    /// The blocks that joined last, in turns.
    joined: [BlockId; AHEAD],
    turn: usize,
}

impl List {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The least recently used block.
    #[inline]
    pub(super) fn first(&self) -> Option<BlockId> {
        (!self.first.is_null()).then_some(self.first)
    }

    /// Fetches the record of a block that will be evicted some blocks after this one.
    #[inline]
    pub(super) fn prefetch_behind(blocks: &[Block], block: BlockId) {
        prefetch(&blocks[id(&blocks[block.index()].ahead).index()]);
    }

    /// Adds a block as the most recently used one.
    #[inline]
    pub(super) fn push(&mut self, blocks: &[Block], block: BlockId) {
        let own = &blocks[block.index()];
        own.prev.set(self.last.get());
        own.next.set(BlockId::NULL.get());
        match self.last {
            BlockId::NULL => self.first = block,
            last => blocks[last.index()].next.set(block.get()),
        }
        self.last = block;
        self.len += 1;
        let earlier = std::mem::replace(&mut self.joined[self.turn], block);
        blocks[earlier.index()].ahead.set(block.get());
        self.turn = (self.turn + 1) % AHEAD;
    }

    /// Removes a block of the list.
    #[inline]
    pub(super) fn remove(&mut self, blocks: &[Block], block: BlockId) {
        let own = &blocks[block.index()];
        let (prev, next) = (id(&own.prev), id(&own.next));
        match prev {
            BlockId::NULL => self.first = next,
            prev => blocks[prev.index()].next.set(next.get()),
        }
        match next {
            BlockId::NULL => self.last = prev,
            next => blocks[next.index()].prev.set(prev.get()),
        }
        self.len -= 1;
    }

    /// Puts a block in the place of another one.
    pub(super) fn replace(&mut self, blocks: &[Block], old: BlockId, new: BlockId) {
        let (from, to) = (&blocks[old.index()], &blocks[new.index()]);
        to.ahead.set(from.ahead.get());
        to.prev.set(from.prev.get());
        to.next.set(from.next.get());
        match id(&from.prev) {
            BlockId::NULL => self.first = new,
            prev => blocks[prev.index()].next.set(new.get()),
        }
        match id(&from.next) {
            BlockId::NULL => self.last = new,
            next => blocks[next.index()].prev.set(new.get()),
        }
    }

    /// Whether these are all blocks of the list and linked both ways.
    pub(super) fn is_linked(&self, blocks: &[Block], listed: &[BlockId]) -> bool {
        let mut before = BlockId::NULL;
        let linked = listed.iter().all(|block| {
            let prev = std::mem::replace(&mut before, *block);
            id(&blocks[block.index()].prev) == prev
        });
        linked && before == self.last && listed.len() == self.len
    }

    /// The blocks of the list, the least recently used one first.
    pub(super) fn walk<'a>(&self, blocks: &'a [Block]) -> impl Iterator<Item = BlockId> + use<'a> {
        walk(blocks, self.first, self.len)
    }
}

/// Up to `most` linked blocks from `first` on.
fn walk(blocks: &[Block], first: BlockId, most: usize) -> impl Iterator<Item = BlockId> {
    let mut next = first;
    (0..most).map_while(move |_| {
        let block = (!next.is_null()).then_some(next)?;
        next = id(&blocks[block.index()].next);
        Some(block)
    })
}

/// Blocks linked as they will stand on the stack of free ones, in a caller's hands.
#[derive(Debug, Default)]
pub(super) struct Chain {
    first: BlockId,
    last: BlockId,
    len: usize,
}

impl Chain {
    /// Puts a block at the end.
    #[inline]
    pub(super) fn append(&mut self, blocks: &[Block], block: BlockId) {
        match self.last {
            BlockId::NULL => self.first = block,
            last => blocks[last.index()].next.set(block.get()),
        }
        self.last = block;
        self.len += 1;
    }
}

/// Free blocks that hold nothing: a stack of those that were used before, above a run of those that never were, so
/// that a new pool writes to no record.
#[derive(Debug)]
pub(super) struct Blank {
    top: BlockId,
    stacked: usize,
    pub(super) fresh: std::ops::Range<u32>,
}

impl Blank {
    pub(super) fn new(num_blocks: usize) -> Self {
        Self { top: BlockId::NULL, stacked: 0, fresh: 1..num_blocks as u32 }
    }

    /// Puts a chain on top, its first block uppermost.
    #[inline]
    pub(super) fn push(&mut self, blocks: &[Block], chain: &Chain) {
        if chain.len > 0 {
            blocks[chain.last.index()].next.set(self.top.get());
            self.top = chain.first;
            self.stacked += chain.len;
        }
    }

    #[inline]
    fn pop(&mut self, blocks: &[Block]) -> Option<BlockId> {
        if self.top.is_null() {
            return self.fresh.next().map(BlockId::new);
        }
        self.stacked -= 1;
        let next = id(&blocks[self.top.index()].next);
        Some(std::mem::replace(&mut self.top, next))
    }

    /// Gives blocks their first reference, until `out` has `end` blocks or none is left; how many.
    #[inline]
    pub(super) fn take(&mut self, blocks: &[Block], end: usize, out: &mut Vec<BlockId>) -> usize {
        let first = out.len();
        while out.len() < end
            && let Some(block) = self.pop(blocks)
        {
            blocks[block.index()].set_state(State::ALLOCATED);
            out.push(block);
        }
        out.len() - first
    }

    /// Takes the blocks from `floor` on out, and leaves the order of the others; how many.
    pub(super) fn cut(&mut self, blocks: &[Block], floor: usize) -> usize {
        let mut kept = Chain::default();
        let below = walk(blocks, self.top, self.stacked).filter(|block| block.index() < floor);
        // A link is read before the chain overwrites it.
        below.for_each(|block| kept.append(blocks, block));
        let before = self.stacked + self.fresh.len();
        (self.top, self.stacked) = (BlockId::NULL, 0);
        self.push(blocks, &kept);
        self.fresh.end = self.fresh.end.min(self.fresh.start.max(floor as u32));
        before - self.stacked - self.fresh.len()
    }

    /// The blocks, in the order in which they are handed out.
    pub(super) fn walk<'a>(&self, blocks: &'a [Block]) -> impl Iterator<Item = BlockId> + use<'a> {
        walk(blocks, self.top, self.stacked).chain(self.fresh.clone().map(BlockId::new))
    }
}
