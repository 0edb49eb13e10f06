//! The hashes of a token sequence as `docs/reference/hashing.md` says, each computed from all its tokens.

use prefixcache_core::id::BlockHash;

/// The hashes of the full blocks of `tokens`, of `size` tokens each.
#[must_use]
pub fn block_hashes(
    size: usize,
    root: BlockHash,
    tokens: &[u32],
    extras: &[Vec<u8>],
) -> Vec<BlockHash> {
    let leaves: Vec<_> = (tokens.chunks_exact(size).enumerate())
        .map(|(index, block)| leaf(block, extras.get(index).map_or(&[], Vec::as_slice)))
        .collect();
    (1..=leaves.len())
        .map(|end| BlockHash::from_bytes(prefix(*root.as_bytes(), &leaves[..end])))
        .collect()
}

fn hash(purpose: &str, message: &[u8]) -> [u8; 32] {
    let mut key = [0; 32];
    key[..purpose.len()].copy_from_slice(purpose.as_bytes());
    blake3::keyed_hash(&key, message).into()
}

fn leaf(block: &[u32], extra: &[u8]) -> [u8; 32] {
    let mut message: Vec<u8> = block.iter().flat_map(|token| token.to_le_bytes()).collect();
    message.resize(message.len().next_multiple_of(64), 0);
    let leaf = hash("prefixcache v2 block", &message);
    if extra.is_empty() {
        return leaf;
    }
    hash("prefixcache v2 extra", &[&leaf, extra].concat())
}

/// The root of the tree over a power of eight of leaves.
fn node(leaves: &[[u8; 32]]) -> [u8; 32] {
    if let [leaf] = leaves {
        return *leaf;
    }
    let children: Vec<_> = leaves.chunks(leaves.len() / 8).map(node).collect();
    hash("prefixcache v2 node", children.as_flattened())
}

fn prefix(root: [u8; 32], leaves: &[[u8; 32]]) -> [u8; 32] {
    let mut width = 1;
    while leaves.len().is_multiple_of(8 * width) {
        if leaves.is_empty() {
            return root;
        }
        width *= 8;
    }
    let (before, last) = leaves.split_at(leaves.len() - width);
    hash("prefixcache v2 prefix", &[prefix(root, before), node(last)].concat())
}
