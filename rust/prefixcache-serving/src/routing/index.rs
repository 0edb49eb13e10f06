//! Which blocks each replica has cached, and what a prompt would hit where.
//!
//! A block is known by a hash of its content and of all before it, so the leading blocks of a prompt that a replica
//! holds are a prefix that it can serve. Events of a replica say what it stored and removed. What it was sent and has
//! not computed yet can be noted as well, so that requests with the same prefix go the same way before the first
//! of them was computed.
//!
//! Memory is bounded: a replica that tells of more blocks than the bound is not believed beyond it. What is unknown
//! costs a hit and never an answer, as the replica itself looks its cache up.

use std::collections::HashMap;
use std::collections::hash_map::{Entry, RandomState};
use std::hash::{BuildHasher, BuildHasherDefault};

use thiserror::Error;

use super::replica::ReplicaId;
use super::sets::{EMPTY, SetId, Sets, Slot};
use crate::mix::{Mixed, mix};

/// The most replicas of an index. Each takes two slots; the others serve for those that were cleared.
pub const MAX_REPLICAS: usize = 8192;

const MAX_SLOTS: usize = Slot::MAX as usize + 1;

/// Tables among which blocks are shared out, so that neither growth nor a sweep of one takes long.
const NUM_SHARDS: usize = 1024;

/// A shard is swept for this many blocks of a call, and one for the call.
const BLOCKS_PER_SWEPT_SHARD: usize = 64;

/// Why a call did nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum IndexError {
    /// The index has no such replica.
    #[error("{} is not in the index", .0.0)]
    Unknown(ReplicaId),
    /// The index has [`MAX_REPLICAS`].
    #[error("an index takes up to {MAX_REPLICAS} replicas")]
    TooMany,
}

type Shard = HashMap<u64, SetId, BuildHasherDefault<Mixed>>;

/// Blocks that are known of a replica in one way.
#[derive(Clone, Copy)]
struct Holder {
    slot: Slot,
    num_blocks: usize,
}

#[derive(Clone, Copy)]
struct Replica {
    cached: Holder,
    expected: Holder,
}

/// Slots, and which of them still stand in entries although nobody has them any more.
#[derive(Default)]
struct Slots {
    /// The replica of each slot; none for those that are free or retired.
    owners: Vec<Option<ReplicaId>>,
    free: Vec<Slot>,
    /// Retired since the sweep at hand began.
    waiting: Vec<Slot>,
    /// Retired before it began: free once it has been through all shards.
    swept: Vec<Slot>,
    next_shard: usize,
}

impl Slots {
    fn owner(&self, slot: Slot) -> Option<ReplicaId> {
        self.owners[usize::from(slot)]
    }

    fn take(&mut self, owner: ReplicaId) -> Option<Slot> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.owners.len() < MAX_SLOTS => {
                self.owners.push(None);
                (self.owners.len() - 1) as Slot
            }
            None => return None,
        };
        self.owners[usize::from(slot)] = Some(owner);
        Some(slot)
    }

    fn retire(&mut self, slot: Slot) {
        self.owners[usize::from(slot)] = None;
        self.waiting.push(slot);
    }

    /// The shard to sweep next, unless no entry can have a retired slot.
    fn shard_to_sweep(&mut self) -> Option<usize> {
        if self.swept.is_empty() {
            if self.waiting.is_empty() {
                return None;
            }
            self.swept = std::mem::take(&mut self.waiting);
            self.next_shard = 0;
        }
        Some(self.next_shard)
    }

    fn end_shard(&mut self) {
        self.next_shard += 1;
        if self.next_shard == NUM_SHARDS {
            self.free.append(&mut self.swept);
        }
    }
}

/// What the replicas of a router have cached.
pub struct ReplicaIndex {
    shards: Vec<Shard>,
    sets: Sets,
    slots: Slots,
    replicas: Vec<Option<Replica>>,
    max_blocks: usize,
    /// Unknown to clients, so that they cannot choose blocks that fall into the same places of a table.
    seed: u64,
}

impl ReplicaIndex {
    /// An index without replicas, which remembers up to `max_blocks` blocks of each, and as many that it expects.
    #[must_use]
    pub fn new(max_blocks: usize) -> Self {
        Self {
            shards: (0..NUM_SHARDS).map(|_| Shard::default()).collect(),
            sets: Sets::new(),
            slots: Slots::default(),
            replicas: Vec::new(),
            max_blocks,
            seed: RandomState::new().hash_one(0),
        }
    }

    /// Adds a replica without blocks. Its number is the smallest that no replica has.
    pub fn add_replica(&mut self) -> Result<ReplicaId, IndexError> {
        let free = self.replicas.iter().position(Option::is_none);
        let place = free.unwrap_or(self.replicas.len());
        if place >= MAX_REPLICAS {
            return Err(IndexError::TooMany);
        }
        let id = ReplicaId(place as u16);
        let replica = Some(self.new_holders(id));
        match self.replicas.get_mut(place) {
            Some(place) => *place = replica,
            None => self.replicas.push(replica),
        }
        Ok(id)
    }

    /// Forgets a replica and its blocks.
    pub fn remove_replica(&mut self, id: ReplicaId) -> Result<(), IndexError> {
        self.retire_holders(id)?;
        self.replicas[id.index()] = None;
        while let Some(None) = self.replicas.last() {
            self.replicas.pop();
        }
        Ok(())
    }

    /// Forgets the blocks of a replica, those that it is expected to cache too.
    pub fn clear(&mut self, id: ReplicaId) -> Result<(), IndexError> {
        self.retire_holders(id)?;
        let holders = self.new_holders(id);
        self.replicas[id.index()] = Some(holders);
        Ok(())
    }

    fn new_holders(&mut self, id: ReplicaId) -> Replica {
        let mut holder = || Holder { slot: self.take_slot(id), num_blocks: 0 };
        Replica { cached: holder(), expected: holder() }
    }

    fn take_slot(&mut self, id: ReplicaId) -> Slot {
        loop {
            if let Some(slot) = self.slots.take(id) {
                return slot;
            }
            // Replicas have a quarter of the slots at most, so the others are retired.
            self.sweep(NUM_SHARDS);
        }
    }

    fn retire_holders(&mut self, id: ReplicaId) -> Result<(), IndexError> {
        let replica = *self.replica(id)?;
        self.slots.retire(replica.cached.slot);
        self.slots.retire(replica.expected.slot);
        Ok(())
    }

    fn replica(&mut self, id: ReplicaId) -> Result<&mut Replica, IndexError> {
        let replica = self.replicas.get_mut(id.index());
        let replica = replica.and_then(Option::as_mut);
        replica.ok_or(IndexError::Unknown(id))
    }

    /// A replica has cached blocks. Returns how many of them found no room.
    pub fn stored(&mut self, id: ReplicaId, hashes: &[u64]) -> Result<usize, IndexError> {
        self.each_block(id, hashes, |replica| &mut replica.cached, Self::insert_block)
    }

    /// A replica has evicted blocks. What it was not known to have is passed over.
    pub fn removed(&mut self, id: ReplicaId, hashes: &[u64]) -> Result<(), IndexError> {
        self.each_block(id, hashes, |replica| &mut replica.cached, Self::remove_block)?;
        Ok(())
    }

    /// A replica was sent a prompt of these blocks, so it counts as if it had them, until they are settled.
    /// Returns how many of them found no room.
    pub fn expected(&mut self, id: ReplicaId, hashes: &[u64]) -> Result<usize, IndexError> {
        self.each_block(id, hashes, |replica| &mut replica.expected, Self::insert_block)
    }

    /// Nothing more is expected of these blocks: they were stored, or never will be.
    ///
    /// Of blocks that two prompts have, nothing more is expected once the first is settled.
    pub fn settled(&mut self, id: ReplicaId, hashes: &[u64]) -> Result<(), IndexError> {
        self.each_block(id, hashes, |replica| &mut replica.expected, Self::remove_block)?;
        Ok(())
    }

    /// Changes what a replica holds; how many of the blocks `change` could not do.
    fn each_block(
        &mut self,
        id: ReplicaId,
        hashes: &[u64],
        holder_of: impl Fn(&mut Replica) -> &mut Holder,
        change: impl Fn(&mut Self, &mut Holder, u64) -> bool,
    ) -> Result<usize, IndexError> {
        let mut holder = *holder_of(self.replica(id)?);
        let mut refused = 0;
        for &hash in hashes {
            refused += usize::from(!change(self, &mut holder, hash));
        }
        *holder_of(self.replica(id)?) = holder;
        self.sweep(1 + hashes.len() / BLOCKS_PER_SWEPT_SHARD);
        Ok(refused)
    }

    /// Whether the holder has the block now.
    fn insert_block(&mut self, holder: &mut Holder, hash: u64) -> bool {
        let (shard, key) = self.place(hash);
        let is_full = holder.num_blocks == self.max_blocks;
        match self.shards[shard].entry(key) {
            Entry::Vacant(_) if is_full => return false,
            Entry::Vacant(entry) => drop(entry.insert(self.sets.insert(EMPTY, holder.slot))),
            Entry::Occupied(mut entry) => {
                let set = *entry.get();
                if is_full {
                    return self.sets.members(set).contains(&holder.slot);
                }
                entry.insert(self.sets.insert(set, holder.slot));
                if *entry.get() == set {
                    return true;
                }
            }
        }
        holder.num_blocks += 1;
        true
    }

    fn remove_block(&mut self, holder: &mut Holder, hash: u64) -> bool {
        let (shard, key) = self.place(hash);
        let Entry::Occupied(mut entry) = self.shards[shard].entry(key) else {
            return true;
        };
        let set = *entry.get();
        let left = self.sets.remove(set, holder.slot);
        holder.num_blocks -= usize::from(left != set);
        match left {
            EMPTY => drop(entry.remove()),
            left => drop(entry.insert(left)),
        }
        true
    }

    /// The shard of a block, and its key there.
    fn place(&self, hash: u64) -> (usize, u64) {
        let key = mix(hash ^ self.seed);
        // The table uses the lowest and the highest bits.
        ((key >> 32) as usize % NUM_SHARDS, key)
    }

    /// Takes retired slots out of the entries of some shards.
    fn sweep(&mut self, num_shards: usize) {
        for _ in 0..num_shards {
            let Some(shard) = self.slots.shard_to_sweep() else {
                return;
            };
            let (sets, slots) = (&mut self.sets, &self.slots);
            self.shards[shard].retain(|_, set| {
                *set = sets.retain(*set, |slot| slots.owner(slot).is_some());
                *set != EMPTY
            });
            self.slots.end_shard();
        }
    }

    /// Counts the leading blocks of a prompt that each replica has, or is expected to have. `hits[i]` becomes the
    /// number of replica i; 0 for numbers that no replica has.
    pub fn hits(&self, hashes: &[u64], hits: &mut Vec<u32>) {
        hits.clear();
        hits.resize(self.replicas.len(), 0);
        let mut walk = Walk::new(self.replicas.len());
        let mut last = EMPTY;
        for (&hash, length) in hashes.iter().zip(1..) {
            let (shard, key) = self.place(hash);
            let Some(&set) = self.shards[shard].get(&key) else {
                break;
            };
            // Who has all blocks so far is in the last set, so the same set again leaves nobody behind.
            if set != last {
                self.mark(set, length, &mut walk.reached);
                walk.drop_others(length, hits);
                last = set;
            }
            if walk.left.is_empty() {
                break;
            }
            walk.length = length;
        }
        for &id in &walk.left {
            hits[usize::from(id)] = walk.length;
        }
    }

    fn mark(&self, set: SetId, length: u32, reached: &mut [u32]) {
        let owners = self.sets.members(set).iter();
        for id in owners.filter_map(|&slot| self.slots.owner(slot)) {
            reached[id.index()] = length;
        }
    }

    /// How many numbers replicas have, from 0; a removed one among them counts until those above are removed.
    #[must_use]
    pub fn num_ids(&self) -> usize {
        self.replicas.len()
    }

    /// Blocks that a replica is known to have cached.
    pub fn num_cached(&self, id: ReplicaId) -> Result<usize, IndexError> {
        let replica = self.replicas.get(id.index()).copied().flatten();
        let replica = replica.ok_or(IndexError::Unknown(id))?;
        Ok(replica.cached.num_blocks)
    }

    /// Different blocks in the index, those among them that were cleared and not yet swept.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.shards.iter().map(HashMap::len).sum()
    }

    /// Different sets of replicas that blocks have.
    #[must_use]
    pub fn num_sets(&self) -> usize {
        self.sets.count()
    }
}

/// A walk along the blocks of a prompt.
struct Walk {
    /// Replicas that have all blocks so far.
    left: Vec<u16>,
    length: u32,
    /// For each replica, the last length at which it was in a set that was looked at.
    reached: Vec<u32>,
}

impl Walk {
    fn new(num_replicas: usize) -> Self {
        Self { left: (0..num_replicas as u16).collect(), length: 0, reached: vec![0; num_replicas] }
    }

    /// Notes the hits of replicas that lack the block at `length`.
    fn drop_others(&mut self, length: u32, hits: &mut [u32]) {
        let reached = &self.reached;
        self.left.retain(|&id| {
            let has = reached[usize::from(id)] == length;
            if !has {
                hits[usize::from(id)] = length - 1;
            }
            has
        });
    }
}
