//! The hashes of a growing token sequence.
//!
//! Digests of blocks are leaves of a tree in which eight neighbours have a parent. The hash of `i`
//! blocks is made of an earlier one and the node over the blocks since: `h_i = H(h_{i-w}, node)`, where
//! `w` is the largest power of eight that divides `i`. So the digests of a level of the tree, and a
//! seventh of the hashes that end there, need nothing of each other and are computed side by side.

use super::lanes::{Digest, KeyedHash, LANES};
use super::{Extras, MAX_BLOCK_SIZE};
use crate::id::BlockHash;
use crate::sync::Arc;

/// Neighbours in the tree that have one parent.
const ARITY: usize = 8;

const BLOCK_KEY: &[u8; 32] = b"prefixcache v2 block\0\0\0\0\0\0\0\0\0\0\0\0";
const EXTRA_KEY: &[u8; 32] = b"prefixcache v2 extra\0\0\0\0\0\0\0\0\0\0\0\0";
const NODE_KEY: &[u8; 32] = b"prefixcache v2 node\0\0\0\0\0\0\0\0\0\0\0\0\0";
const PREFIX_KEY: &[u8; 32] = b"prefixcache v2 prefix\0\0\0\0\0\0\0\0\0\0\0";

/// The hashes of a growing token sequence: each full block is hashed once.
#[derive(Clone, Debug)]
pub struct PrefixHashes {
    block_size: usize,
    extras: Arc<Extras>,
    /// `h_0`, then the hash of each full block.
    hashes: Vec<BlockHash>,
    /// The nodes of each level, leaves first, that have no parent yet: at most seven a level.
    levels: Vec<Vec<Digest>>,
}

/// Bytes of a digest, and of the two numbers before all.
const DIGEST: usize = 32;
const HEAD: usize = 16;

fn split_number(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    Some((usize::try_from(u64::from_le_bytes(*number)).ok()?, rest))
}

fn digests(bytes: &[u8]) -> impl Iterator<Item = [u8; DIGEST]> {
    bytes.as_chunks().0.iter().copied()
}

impl PrefixHashes {
    /// The hashes of no blocks yet, after the root.
    #[must_use]
    pub fn new(block_size: usize, root: BlockHash, extras: Arc<Extras>) -> Self {
        Self { block_size, extras, hashes: vec![root], levels: Vec::new() }
    }

    /// Drops all hashes and starts again from `root`.
    pub fn restart(&mut self, root: BlockHash) {
        self.hashes = vec![root];
        self.levels.clear();
    }

    /// The hashes of the same `tokens` after another root.
    #[must_use]
    pub fn after(&self, root: BlockHash, tokens: &[u32]) -> Self {
        let mut other = Self::new(self.block_size, root, Arc::clone(&self.extras));
        other.extend_to(tokens);
        other
    }

    /// The hashes of the full blocks.
    #[must_use]
    pub fn as_slice(&self) -> &[BlockHash] {
        &self.hashes[1..]
    }

    /// Whether these are hashes after `root` of as many blocks as `num_tokens` tokens fill.
    #[must_use]
    pub fn are_of(&self, root: BlockHash, block_size: usize, num_tokens: usize) -> bool {
        self.hashes[0] == root
            && self.block_size == block_size
            && self.as_slice().len() == num_tokens / block_size
    }

    /// The state as bytes, for another process; without extras, which it must not have.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD + self.hashes.len() * DIGEST + DIGEST);
        bytes.extend_from_slice(&(self.block_size as u64).to_le_bytes());
        bytes.extend_from_slice(&(self.hashes.len() as u64).to_le_bytes());
        for hash in &self.hashes {
            bytes.extend_from_slice(hash.as_bytes());
        }
        for level in &self.levels {
            bytes.push(level.len() as u8);
            bytes.extend_from_slice(level.as_flattened());
        }
        bytes
    }

    /// What [`Self::to_bytes`] gave. None for anything else, but that the digests are those of tokens is
    /// the caller's word.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (block_size, rest) = split_number(bytes)?;
        let (count, mut rest) = split_number(rest)?;
        if block_size == 0 || block_size > MAX_BLOCK_SIZE || count == 0 {
            return None;
        }
        let hashes = digests(rest.get(..count.checked_mul(DIGEST)?)?);
        rest = &rest[count * DIGEST..];
        let mut levels = Vec::new();
        while let Some((&len, after)) = rest.split_first() {
            let size = usize::from(len) * DIGEST;
            if usize::from(len) >= ARITY || after.len() < size {
                return None;
            }
            levels.push(digests(&after[..size]).collect());
            rest = &after[size..];
        }
        let fits = |(level, nodes): (usize, &Vec<Digest>)| {
            nodes.len() == (count - 1) / ARITY.pow(level as u32) % ARITY
        };
        let holds = ARITY.checked_pow(u32::try_from(levels.len()).ok()?)?;
        if holds < count || !levels.iter().enumerate().all(fits) {
            return None;
        }
        Some(Self {
            block_size,
            extras: Arc::default(),
            hashes: hashes.map(BlockHash::from_bytes).collect(),
            levels,
        })
    }

    /// Hashes the full blocks of `tokens`, all of the sequence, that are not hashed yet.
    pub fn extend_to(&mut self, tokens: &[u32]) {
        let known = self.as_slice().len();
        let count = tokens.len() / self.block_size;
        if count <= known {
            return;
        }
        self.push_leaves(&tokens[known * self.block_size..count * self.block_size]);
        self.push_parents();
        self.hashes.resize(1 + count, self.hashes[0]);
        let hash = KeyedHash::new(PREFIX_KEY);
        for level in (0..self.levels.len()).rev() {
            // What ends with an eighth node ends with its parent too.
            for place in 0..ARITY - 1 {
                self.hash_prefixes(&hash, level, place, known);
            }
        }
        self.levels.iter_mut().for_each(drop_children);
    }

    /// Adds the digests of new blocks.
    fn push_leaves(&mut self, tokens: &[u32]) {
        if self.levels.is_empty() {
            self.levels.push(Vec::new());
        }
        let leaves = &mut self.levels[0];
        let first = leaves.len();
        match 4 * self.block_size {
            0..=64 => push_digests::<64>(tokens, self.block_size, leaves),
            65..=128 => push_digests::<128>(tokens, self.block_size, leaves),
            129..=256 => push_digests::<256>(tokens, self.block_size, leaves),
            257..=512 => push_digests::<512>(tokens, self.block_size, leaves),
            _ => push_digests::<{ 4 * MAX_BLOCK_SIZE }>(tokens, self.block_size, leaves),
        }
        let extras = self.extras.iter().skip(self.hashes.len() - 1);
        for (leaf, extra) in leaves[first..].iter_mut().zip(extras) {
            if !extra.is_empty() {
                *leaf = blake3::keyed_hash(EXTRA_KEY, &[&leaf[..], extra].concat()).into();
            }
        }
    }

    /// Adds the parents of nodes that are eight now.
    fn push_parents(&mut self) {
        let hash = KeyedHash::new(NODE_KEY);
        for level in 1.. {
            let siblings = self.levels[level - 1].as_flattened().as_chunks().0;
            if siblings.is_empty() {
                return;
            }
            let mut parents = vec![Digest::default(); siblings.len()];
            hash.digest::<{ ARITY * size_of::<Digest>() }>(siblings, &mut parents);
            match self.levels.get_mut(level) {
                Some(nodes) => nodes.append(&mut parents),
                None => self.levels.push(parents),
            }
        }
    }

    /// Hashes the prefixes that end with every eighth node of a level, all those that end with nodes
    /// before them being there.
    fn hash_prefixes(&mut self, hash: &KeyedHash, level: usize, place: usize, known: usize) {
        let width = 1 << (level as u32 * ARITY.ilog2());
        // Blocks before the first node of the level that is kept: a multiple of those under a parent.
        let start = known & !(ARITY * width - 1);
        let end_of = |node: usize| start + (node + 1) * width;
        let is_known = end_of(place) <= known;
        let first = place + if is_known { ARITY } else { 0 };
        if first >= self.levels[level].len() {
            return;
        }
        let mut messages = [[Digest::default(); 2]; LANES];
        let mut digests = [Digest::default(); LANES];
        for batch in (first..self.levels[level].len()).step_by(ARITY * LANES) {
            let nodes = self.levels[level][batch..].iter().step_by(ARITY);
            let count = nodes.len().min(LANES);
            let ends = (end_of(batch)..).step_by(ARITY * width);
            for ((message, node), end) in messages.iter_mut().zip(nodes).zip(ends.clone()) {
                message[0] = *self.hashes[end - width].as_bytes();
                message[1] = *node;
            }
            let bytes = messages[..count].as_flattened().as_flattened();
            hash.digest::<64>(bytes.as_chunks().0, &mut digests[..count]);
            for (digest, end) in digests[..count].iter().zip(ends) {
                self.hashes[end] = BlockHash::from_bytes(*digest);
            }
        }
    }
}

/// Appends the digests of blocks whose tokens, filled up with zeros, have `N` bytes.
fn push_digests<const N: usize>(tokens: &[u32], block_size: usize, digests: &mut Vec<Digest>) {
    let hash = KeyedHash::new(BLOCK_KEY);
    let first = digests.len();
    digests.resize(first + tokens.len() / block_size, Digest::default());
    let digests = &mut digests[first..];
    if cfg!(target_endian = "little") && N == size_of::<u32>() * block_size {
        // The messages are what lies in memory.
        return hash.digest::<N>(bytemuck::cast_slice::<_, u8>(tokens).as_chunks().0, digests);
    }
    let mut messages = [[0; N]; LANES];
    let batches = digests.chunks_mut(LANES);
    for (tokens, digests) in tokens.chunks(LANES * block_size).zip(batches) {
        let blocks = tokens.chunks_exact(block_size);
        for (message, block) in messages.iter_mut().zip(blocks) {
            for (bytes, token) in message.chunks_exact_mut(4).zip(block) {
                bytes.copy_from_slice(&token.to_le_bytes());
            }
        }
        hash.digest(&messages[..digests.len()], digests);
    }
}

/// Drops the nodes that have a parent.
fn drop_children(nodes: &mut Vec<Digest>) {
    let orphans = nodes.len() % ARITY;
    if orphans < nodes.len() {
        *nodes = nodes.split_off(nodes.len() - orphans);
    }
}
