//! What the eviction policy calls blocks, where it does not go by their hashes.
//!
//! The policy samples blocks by the first bytes of a name. A replay that has names alone samples the same blocks
//! only if the recorded cache went by them too.

use crate::id::BlockHash;
use crate::sync::Arc;

/// What the name of a request's next block follows from. Its first 8 bytes are the name of the block before.
pub type Chain = [u8; 32];

/// Gives blocks names other than their hashes: see [`PrefixCache::name_blocks`](crate::PrefixCache::name_blocks).
pub trait NameBlocks: std::fmt::Debug + Send + Sync {
    /// The chain before the first block of requests with this cache salt.
    fn begin(&self, salt: Option<&str>) -> Chain;

    /// The chain behind a block of these tokens, which follows the blocks that `before` stands for.
    fn next(&self, before: &Chain, tokens: &[u32]) -> Chain;
}

/// The names of a sequence's full blocks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names {
    /// What makes the next ones, and the chain before the first block; nothing where names are given.
    pseudonyms: Option<(Arc<dyn NameBlocks>, Chain)>,
    /// The chain behind each block.
    names: Vec<BlockHash>,
}

impl Names {
    /// Names that are made as tokens become known.
    pub(crate) fn keyed(pseudonyms: &Arc<dyn NameBlocks>, salt: Option<&str>) -> Self {
        Self {
            pseudonyms: Some((Arc::clone(pseudonyms), pseudonyms.begin(salt))),
            names: Vec::new(),
        }
    }

    /// Names the full blocks of `tokens`, all of the sequence, that have no name yet.
    pub(crate) fn extend_to(&mut self, tokens: &[u32], block_size: usize) {
        let Some((pseudonyms, first)) = &self.pseudonyms else {
            return;
        };
        for block in tokens[self.names.len() * block_size..].chunks_exact(block_size) {
            let before = self.names.last().map_or(first, BlockHash::as_bytes);
            let chain = pseudonyms.next(before, block);
            self.names.push(BlockHash::from_bytes(chain));
        }
    }

    /// Adds names that are known from elsewhere.
    pub(crate) fn give(&mut self, names: &[u64]) {
        let chains = names.iter().map(|name| {
            let mut chain = Chain::default();
            chain[..8].copy_from_slice(&name.to_be_bytes());
            BlockHash::from_bytes(chain)
        });
        self.names.extend(chains);
    }

    pub(crate) fn as_slice(&self) -> &[BlockHash] {
        &self.names
    }
}
