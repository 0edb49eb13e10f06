//! The peer of the benches: a hash map and a linked list, the block pool that an engineer writes in an afternoon.
//!
//! One thread, LRU alone: no pins, epochs, second copies of content, resizes, readers or counts.

use prefixcache_core::id::{BlockHash, BlockId, BlockKey, GroupId};
use prefixcache_core::store::BlockStore;

/// What the benches ask of each pool.
pub trait Measured {
    /// Takes the blocks of the leading `keys` that hit, then `num_new` others; how many hits there were. Panics where
    /// too few are free.
    fn take(&mut self, keys: &[BlockKey], num_new: usize, out: &mut Vec<BlockId>) -> usize;

    /// Lets a block that is in use be found by `key`.
    fn put(&mut self, block: BlockId, key: BlockKey);

    /// Gives blocks back, the first to be evicted first.
    fn give(&mut self, blocks: &[BlockId]);

    /// How many of the leading `keys` hit.
    fn count(&self, keys: &[BlockKey]) -> usize;

    /// The block that hits for `key`.
    fn find(&self, key: &BlockKey) -> Option<BlockId>;
}

impl<P: BlockStore> Measured for P {
    fn take(&mut self, keys: &[BlockKey], num_new: usize, out: &mut Vec<BlockId>) -> usize {
        self.commit(keys.iter().copied(), num_new, out).expect("enough blocks are free")
    }

    fn put(&mut self, block: BlockId, key: BlockKey) {
        let _ = self.register(block, key, self.epoch()).expect("the block is in use");
    }

    fn give(&mut self, blocks: &[BlockId]) {
        self.release(blocks).expect("the blocks are in use");
    }

    fn count(&self, keys: &[BlockKey]) -> usize {
        self.count_leading(keys.iter().copied())
    }

    #[inline]
    fn find(&self, key: &BlockKey) -> Option<BlockId> {
        self.lookup(key)
    }
}

#[derive(Clone)]
struct Block {
    holders: u32,
    prev: u32,
    next: u32,
    /// The next block in the same bucket of the map.
    chained: u32,
    key: BlockKey,
    is_cached: bool,
}

/// A pool of blocks for one thread. The null block is both ends of the list of free blocks, and the end of each chain.
pub struct MapAndList {
    blocks: Vec<Block>,
    /// The first block of each bucket. Keys are hashes already: a part of one chooses the bucket.
    buckets: Vec<u32>,
}

impl MapAndList {
    /// A pool of `num_blocks` blocks, the null block counted, all of them free.
    #[must_use]
    pub fn new(num_blocks: usize) -> Self {
        let key = BlockKey::new(BlockHash::from_bytes([0; 32]), GroupId::default());
        let block = Block { holders: 0, prev: 0, next: 0, chained: 0, key, is_cached: false };
        let buckets = vec![0; (2 * num_blocks).next_power_of_two()];
        let mut pool = Self { blocks: vec![block; num_blocks], buckets };
        (1..num_blocks as u32).for_each(|id| pool.link(id, 0));
        pool
    }

    /// Puts a block before another.
    fn link(&mut self, id: u32, next: u32) {
        let prev = std::mem::replace(&mut self.blocks[next as usize].prev, id);
        self.blocks[prev as usize].next = id;
        let block = &mut self.blocks[id as usize];
        (block.prev, block.next) = (prev, next);
    }

    fn unlink(&mut self, id: u32) {
        let Block { prev, next, .. } = self.blocks[id as usize];
        self.blocks[prev as usize].next = next;
        self.blocks[next as usize].prev = prev;
    }

    fn hold(&mut self, id: u32) {
        if self.blocks[id as usize].holders == 0 {
            self.unlink(id);
        }
        self.blocks[id as usize].holders += 1;
    }

    fn evict(&mut self) -> BlockId {
        let id = self.blocks[0].next;
        assert_ne!(id, 0, "enough blocks are free");
        self.hold(id);
        if std::mem::take(&mut self.blocks[id as usize].is_cached) {
            self.forget(id);
        }
        BlockId::new(id)
    }

    fn bucket(&self, key: &BlockKey) -> usize {
        let [a, b, c, d, ..] = *key.hash.as_bytes();
        u32::from_le_bytes([a, b, c, d]) as usize & (self.buckets.len() - 1)
    }

    /// Takes a block out of the map.
    fn forget(&mut self, id: u32) {
        let Block { chained, ref key, .. } = self.blocks[id as usize];
        let bucket = self.bucket(key);
        let mut at = self.buckets[bucket];
        if at == id {
            self.buckets[bucket] = chained;
            return;
        }
        while self.blocks[at as usize].chained != id {
            at = self.blocks[at as usize].chained;
        }
        self.blocks[at as usize].chained = chained;
    }
}

impl Measured for MapAndList {
    fn take(&mut self, keys: &[BlockKey], num_new: usize, out: &mut Vec<BlockId>) -> usize {
        let first = out.len();
        out.extend(keys.iter().map_while(|key| self.find(key)));
        let hits = out.len() - first;
        out[first..].iter().for_each(|hit| self.hold(hit.get()));
        out.extend((0..num_new).map(|_| self.evict()));
        hits
    }

    fn put(&mut self, block: BlockId, key: BlockKey) {
        if self.find(&key).is_none() {
            let bucket = self.bucket(&key);
            let chained = std::mem::replace(&mut self.buckets[bucket], block.get());
            let block = &mut self.blocks[block.index()];
            (block.key, block.is_cached, block.chained) = (key, true, chained);
        }
    }

    fn give(&mut self, blocks: &[BlockId]) {
        for &id in blocks {
            let block = &mut self.blocks[id.index()];
            block.holders -= 1;
            if block.holders == 0 {
                let next = if block.is_cached { 0 } else { self.blocks[0].next };
                self.link(id.get(), next);
            }
        }
    }

    fn count(&self, keys: &[BlockKey]) -> usize {
        keys.iter().take_while(|key| self.find(key).is_some()).count()
    }

    #[inline]
    fn find(&self, key: &BlockKey) -> Option<BlockId> {
        let mut at = self.buckets[self.bucket(key)];
        while at != 0 && self.blocks[at as usize].key != *key {
            at = self.blocks[at as usize].chained;
        }
        (at != 0).then(|| BlockId::new(at))
    }
}
