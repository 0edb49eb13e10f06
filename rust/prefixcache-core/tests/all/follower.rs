//! What a reader of events knows of a cache, held against the cache itself.

use std::collections::{BTreeMap, HashMap};

use prefixcache_core::cache::PrefixCache;
use prefixcache_core::events::{Change, EventReader, Run, ShortHash};
use prefixcache_core::hash::Scope;
use prefixcache_core::id::{BlockKey, GroupId};
use prefixcache_core::sequence::Sequence;
use prefixcache_core::store::BlockStore;

type Name = (GroupId, ShortHash);

/// The parent of each block and its tokens.
type Known = BTreeMap<Name, (Option<ShortHash>, Vec<u32>)>;

/// A reader that takes a few changes now and then, and all blocks that sequences ever had.
pub struct Follower {
    reader: EventReader,
    known: Known,
    /// Whether they are under a salt.
    blocks: HashMap<BlockKey, bool>,
    looks: usize,
    block_size: usize,
}

impl Follower {
    pub fn new(reader: EventReader, block_size: usize) -> Self {
        Self { reader, known: Known::new(), blocks: HashMap::new(), looks: 0, block_size }
    }

    /// Checks, now and then, what it knows: names, parents and tokens of what can be found, no salted block, and
    /// the same in a snapshot.
    pub fn check<S: BlockStore>(&mut self, cache: &PrefixCache<S>, live: &[Sequence]) {
        for sequence in live {
            let is_salted = sequence.scope() != &Scope::default();
            for &hash in sequence.hashes() {
                let groups = (0..sequence.num_groups() as u16).map(GroupId::new);
                self.blocks.extend(groups.map(|group| (BlockKey::new(hash, group), is_salted)));
            }
        }
        self.looks += 1;
        // Reports lag behind what can be found for some steps.
        match self.looks % 4 {
            1 => self.take(2),
            3 => {
                while self.reader.snapshot().is_none() {
                    self.take(3);
                }
                self.take(usize::MAX);
                self.compare(cache);
            }
            _ => {}
        }
    }

    fn take(&mut self, most: usize) {
        let changes = self.reader.take(most);
        apply(&mut self.known, changes, self.block_size);
    }

    fn compare<S: BlockStore>(&self, cache: &PrefixCache<S>) {
        let found = self.blocks.iter().filter(|(key, _)| cache.store().lookup(key).is_some());
        let mut open: Vec<Name> = found
            .filter(|&(_, &is_salted)| !is_salted)
            .map(|(key, _)| (key.group, (&key.hash).into()))
            .collect();
        open.sort_unstable();
        let known: Vec<Name> = self.known.keys().copied().collect();
        assert_eq!(known, open, "what was reported is not what can be found");
        for &name in self.known.keys() {
            if let Some(prompt) = self.prompt(name) {
                let hashes = cache.compute_block_hashes(&prompt, &Scope::default(), vec![]);
                let last = hashes.as_slice().last().map(ShortHash::from);
                assert_eq!(last, Some(name.1), "its tokens or its parent are others");
            }
        }
        let snapshot = self.reader.snapshot().expect("all is taken");
        let num_blocks = snapshot.num_blocks();
        let mut known = Known::new();
        apply(&mut known, snapshot.map(Change::Stored), self.block_size);
        assert_eq!((num_blocks, &known), (self.known.len(), &self.known));
    }

    /// The tokens up to a block's end, where all blocks before it are known.
    fn prompt(&self, mut name: Name) -> Option<Vec<u32>> {
        let mut parts = Vec::new();
        loop {
            let (parent, tokens) = self.known.get(&name)?;
            parts.push(tokens.clone());
            let Some(parent) = parent else { break };
            name = (name.0, *parent);
        }
        parts.reverse();
        Some(parts.concat())
    }
}

fn apply(known: &mut Known, changes: impl IntoIterator<Item = Change>, block_size: usize) {
    for change in changes {
        match change {
            Change::Cleared => known.clear(),
            Change::Removed(group, hashes) => {
                for hash in hashes {
                    assert!(known.remove(&(group, hash)).is_some(), "removed twice");
                }
            }
            Change::Stored(Run { group, mut parent, hashes, tokens }) => {
                assert_eq!(tokens.len(), hashes.len() * block_size);
                for (&hash, tokens) in hashes.iter().zip(tokens.chunks(block_size)) {
                    let block = (parent, tokens.to_vec());
                    assert_eq!(known.insert((group, hash), block), None, "stored twice");
                    parent = Some(hash);
                }
            }
        }
    }
}
