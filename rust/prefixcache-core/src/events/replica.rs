//! What can be found in a cache, as its changes say, and walks over all of it.

use std::collections::HashMap;

use super::{Change, Name, Run, Sent, ShortHash};

/// Blocks in one change.
const MAX_BLOCKS: usize = 1 << 10;

/// Tokens in one change, as long as it is about several blocks.
const MAX_TOKENS: usize = 1 << 13;

/// The blocks that can be found, each once however many copies there are.
#[derive(Clone, Debug)]
pub(super) struct Replica {
    block_size: usize,
    /// Indices into `blocks`.
    places: Places,
    blocks: Vec<Block>,
    /// Those of `blocks[i]` begin at `i * block_size`.
    tokens: Vec<u32>,
}

/// A map in [`SHARDS`] parts. A map that grows moves all its entries within one call, which may be the writer's. Parts
/// grow one by one, but many of them at about the same time: the more there are, the fewer names move in a call.
#[derive(Clone, Debug)]
struct Places(Vec<HashMap<Name, u32>>);

/// See [`Places`].
const SHARDS: usize = 1 << 12;

impl Places {
    fn new() -> Self {
        Self(vec![HashMap::new(); SHARDS])
    }

    /// The part of a name: its hash is evenly spread already.
    fn of(&mut self, name: &Name) -> &mut HashMap<Name, u32> {
        &mut self.0[name.0.0 as usize % SHARDS]
    }

    fn get(&self, name: &Name) -> Option<u32> {
        self.0[name.0.0 as usize % SHARDS].get(name).copied()
    }

    fn clear(&mut self) {
        self.0.iter_mut().for_each(HashMap::clear);
    }
}

#[derive(Clone, Copy, Debug)]
struct Block {
    name: Name,
    parent: Option<ShortHash>,
}

impl Block {
    fn parent(&self) -> Option<Name> {
        self.parent.map(|parent| (parent, self.name.1))
    }
}

/// The most blocks in one change.
fn most_blocks(block_size: usize) -> usize {
    (MAX_TOKENS / block_size).clamp(1, MAX_BLOCKS)
}

impl Replica {
    pub(super) fn new(block_size: usize) -> Self {
        Self { block_size, places: Places::new(), blocks: Vec::new(), tokens: Vec::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Applies a change, and reports what of it is new, in parts of a bounded size.
    pub(super) fn apply(&mut self, sent: Sent, mut report: impl FnMut(Change)) {
        match sent {
            Sent::Stored(run) => self.store(&run, report),
            Sent::Removed(names) => self.remove_all(names, report),
            Sent::Cleared => {
                self.places.clear();
                self.blocks.clear();
                self.tokens.clear();
                report(Change::Cleared);
            }
        }
    }

    fn store(&mut self, run: &Run, mut report: impl FnMut(Change)) {
        let mut known = Vec::with_capacity(run.hashes.len());
        for (index, tokens) in run.tokens.chunks(self.block_size).enumerate() {
            known.push(!self.insert(run.name(index), run.parent(index), tokens));
        }
        let mut start = 0;
        for part in known.chunk_by(|one, next| one == next) {
            let end = start + part.len();
            if !part[0] {
                for first in (start..end).step_by(most_blocks(self.block_size)) {
                    let last = end.min(first + most_blocks(self.block_size));
                    report(Change::Stored(run.part(first, last, self.block_size)));
                }
            }
            start = end;
        }
    }

    /// Whether the block is new.
    pub(super) fn insert(&mut self, name: Name, parent: Option<ShortHash>, tokens: &[u32]) -> bool {
        let place = self.blocks.len() as u32;
        if *self.places.of(&name).entry(name).or_insert(place) != place {
            return false;
        }
        self.blocks.push(Block { name, parent });
        self.tokens.extend_from_slice(tokens);
        true
    }

    fn remove_all(&mut self, mut names: Vec<Name>, mut report: impl FnMut(Change)) {
        names.retain(|name| self.remove(name));
        for part in names.chunk_by(|one, next| one.1 == next.1) {
            for part in part.chunks(MAX_BLOCKS) {
                let hashes = part.iter().map(|&(hash, _)| hash).collect();
                report(Change::Removed(part[0].1, hashes));
            }
        }
    }

    /// Whether the block was there. The last one takes its place.
    fn remove(&mut self, name: &Name) -> bool {
        let Some(place) = self.places.of(name).remove(name) else {
            return false;
        };
        let (place, size) = (place as usize, self.block_size);
        let last = self.blocks.len() - 1;
        self.blocks.swap_remove(place);
        self.tokens.copy_within(last * size..(last + 1) * size, place * size);
        self.tokens.truncate(last * size);
        if let Some(moved) = self.blocks.get(place) {
            let name = moved.name;
            self.places.of(&name).insert(name, place as u32);
        }
        true
    }

    /// All blocks, each behind its parent where that is there.
    pub(super) fn into_snapshot(self) -> Snapshot {
        const NONE: u32 = u32::MAX;
        // The first child of each block, and the next one with the same parent.
        let mut first = vec![NONE; self.blocks.len()];
        let mut next = vec![NONE; self.blocks.len()];
        let mut roots = Vec::new();
        for (place, block) in (0..).zip(&self.blocks) {
            let parent = block.parent().and_then(|parent| self.places.get(&parent));
            match parent.map(|parent| &mut first[parent as usize]) {
                Some(first) => next[place as usize] = std::mem::replace(first, place),
                None => roots.push(place),
            }
        }
        let mut order = Vec::with_capacity(self.blocks.len());
        while let Some(place) = roots.pop() {
            order.push(place);
            let mut child = first[place as usize];
            while child != NONE {
                roots.push(child);
                child = next[child as usize];
            }
        }
        Snapshot { replica: self, order, reported: 0 }
    }
}

impl Run {
    fn name(&self, index: usize) -> Name {
        (self.hashes[index], self.group)
    }

    fn parent(&self, index: usize) -> Option<ShortHash> {
        match index.checked_sub(1) {
            Some(before) => Some(self.hashes[before]),
            None => self.parent,
        }
    }

    fn part(&self, first: usize, last: usize, block_size: usize) -> Self {
        Self {
            group: self.group,
            parent: self.parent(first),
            hashes: self.hashes[first..last].to_vec(),
            tokens: self.tokens[first * block_size..last * block_size].to_vec(),
        }
    }
}

/// All blocks that could be found at one moment, as runs of a bounded length. A block comes behind its parent
/// where that could be found too.
#[derive(Debug)]
pub struct Snapshot {
    replica: Replica,
    /// Places of blocks.
    order: Vec<u32>,
    /// How many of them were reported.
    reported: usize,
}

impl Snapshot {
    /// All its blocks, each counted once a group.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.order.len()
    }

    fn block(&self, index: usize) -> Option<&Block> {
        let place = *self.order.get(index)?;
        Some(&self.replica.blocks[place as usize])
    }

    /// How many blocks of the order from the next on are each the parent of the one behind it.
    fn length(&self) -> usize {
        let follows = |index: usize| {
            let parent = self.block(index - 1).map(|block| block.name);
            let block = self.block(index);
            block.is_some_and(|block| block.parent().is_some() && block.parent() == parent)
        };
        let most = most_blocks(self.replica.block_size);
        let last = (self.reported + 1..self.reported + most).find(|&index| !follows(index));
        last.map_or(most, |last| last - self.reported)
    }
}

impl Iterator for Snapshot {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        let &Block { name, parent } = self.block(self.reported)?;
        let size = self.replica.block_size;
        let places = &self.order[self.reported..self.reported + self.length()];
        let places = places.iter().map(|&place| place as usize);
        let run = Run {
            group: name.1,
            parent,
            hashes: places.clone().map(|place| self.replica.blocks[place].name.0).collect(),
            tokens: places
                .flat_map(|place| &self.replica.tokens[place * size..(place + 1) * size])
                .copied()
                .collect(),
        };
        self.reported += run.hashes.len();
        Some(run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growing_moves_a_small_part_of_the_names() {
        const AT_ONCE: usize = 1 << 10;
        let mut places = Places::new();
        let names: Vec<Name> = (0..1_u32 << 17)
            .map(|number| {
                let hash = *blake3::hash(&number.to_le_bytes()).as_bytes();
                let hash = ShortHash::from(&crate::BlockHash::from_bytes(hash));
                (hash, crate::id::GroupId::new(0))
            })
            .collect();
        for call in names.chunks(AT_ONCE) {
            let mut moved = 0;
            for name in call {
                let part = places.of(name);
                let (room, before) = (part.capacity(), part.len());
                part.insert(*name, 0);
                moved += if part.capacity() == room { 0 } else { before };
            }
            assert!(moved < 3 * AT_ONCE, "{moved} names moved in one call");
        }
    }
}
