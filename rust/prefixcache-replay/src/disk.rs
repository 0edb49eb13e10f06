//! A disk behind a cache: the server's own rule of what goes there ([`Staging`]), and in place of its file a list in
//! the order of last use. Blocks come back whenever a prompt hits them, as if loading were always sooner.

use std::collections::{BTreeMap, HashMap};
use std::ptr::NonNull;

use prefixcache_core::BlockStore;
use prefixcache_core::error::ListenError;
use prefixcache_core::id::{BlockHash, BlockKey, GroupId};
use prefixcache_core::{Lookup, Writer};
use prefixcache_file::staging::{Memory, Staging};

/// What a disk takes.
#[derive(Clone, Copy, Debug)]
pub struct DiskConfig {
    /// Blocks that it holds.
    pub num_blocks: usize,
    /// Uses of a block, its computing counted, from which it goes there.
    pub min_uses: u32,
}

/// When a block was used last, and of those used at once the one that was written first.
type Use = (u64, u64);

/// The disk behind one pool.
pub(crate) struct Disk {
    staging: Staging,
    num_blocks: usize,
    uses: HashMap<BlockKey, Use>,
    in_order: BTreeMap<Use, BlockKey>,
    num_written: u64,
    time: u64,
}

impl Disk {
    /// An empty disk behind a pool that was not used yet.
    pub(crate) fn new(config: DiskConfig, pool: &mut Writer) -> Result<Self, ListenError> {
        let num_blocks = pool.num_blocks();
        let mut bytes = vec![0_u8; num_blocks];
        let memory = Memory {
            tensors: NonNull::new(bytes.as_mut_ptr()).into_iter().collect(),
            block_bytes: 1,
            num_blocks,
            owner: Box::new(bytes),
        };
        // SAFETY: `owner` keeps the bytes, which nobody else has the address of.
        let staging = unsafe { Staging::new(memory, usize::MAX, config.min_uses) };
        pool.keep_in(staging.store(), &[])?;
        staging.store().set_durable(true);
        Ok(Self {
            staging,
            num_blocks: config.num_blocks,
            uses: HashMap::new(),
            in_order: BTreeMap::new(),
            num_written: 0,
            time: 0,
        })
    }

    /// How many leading ones of these blocks are there; they count as used.
    pub(crate) fn load(&mut self, hashes: &[BlockHash]) -> usize {
        let keys = hashes.iter().map(|&hash| BlockKey::new(hash, GroupId::new(0)));
        let count = self.staging.count_stored(keys.clone());
        self.time += 1;
        for key in keys.take(count) {
            if let Some(&last) = self.uses.get(&key) {
                self.in_order.remove(&last);
                self.put(key, (self.time, last.1));
            }
        }
        count
    }

    fn put(&mut self, key: BlockKey, used: Use) {
        self.uses.insert(key, used);
        self.in_order.insert(used, key);
    }

    /// Writes what was evicted since, in the place of what was not used for the longest time.
    pub(crate) fn write(&mut self) {
        let (era, _) = self.staging.era();
        let taken = self.staging.take(usize::MAX, era);
        let keys: Vec<_> = taken.into_iter().map(|(key, _)| key).collect();
        for &key in &keys {
            self.time += 1;
            self.num_written += 1;
            self.put(key, (self.time, self.num_written));
        }
        self.staging.add_stored(&keys, era);
        let mut removed = Vec::new();
        while self.in_order.len() > self.num_blocks
            && let Some((_, key)) = self.in_order.pop_first()
        {
            self.uses.remove(&key);
            removed.push(key);
        }
        self.staging.remove_stored(&removed);
    }

    /// Blocks that were written so far.
    pub(crate) fn num_written(&self) -> u64 {
        self.num_written
    }
}
