//! Names of blocks under a key: hashes that tell nothing to whoever lacks the key.
//!
//! A recording of what a cache was asked for has these in the place of the cache's own hashes, which anybody can
//! compute from a known prompt. `docs/recording.md` specifies them.

use crate::error::InvalidArgument;
use crate::id::BlockHash;

/// What the name of a request's next block follows from. Its first 8 bytes are the name of the block before.
pub type Chain = [u8; 32];

/// Names blocks under one key.
#[derive(Clone)]
pub struct Namer {
    key: [u8; 32],
    block_size: usize,
}

impl std::fmt::Debug for Namer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Namer").finish_non_exhaustive()
    }
}

impl Namer {
    /// A namer with a key that is used for nothing else. Fails for blocks without tokens.
    pub fn new(key: [u8; 32], block_size: usize) -> Result<Self, InvalidArgument> {
        if block_size == 0 {
            return Err(InvalidArgument::new(
                "block_size",
                "must be at least 1, not 0",
            ));
        }
        Ok(Self { key, block_size })
    }

    /// Tokens in a block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// The chain before the first block of requests with this cache salt.
    #[must_use]
    pub fn begin(&self, salt: Option<&str>) -> Chain {
        let mut bytes = vec![u8::from(salt.is_some())];
        bytes.extend_from_slice(salt.unwrap_or_default().as_bytes());
        blake3::keyed_hash(&self.key, &bytes).into()
    }

    /// The chains behind each of the full blocks of `tokens`, which follow those that `chain` stands for.
    pub fn extend(&self, mut chain: Chain, tokens: &[u32]) -> impl Iterator<Item = Chain> {
        let mut bytes = Vec::with_capacity(chain.len() + 4 * self.block_size);
        tokens.chunks_exact(self.block_size).map(move |block| {
            bytes.clear();
            bytes.extend_from_slice(&chain);
            bytes.extend(block.iter().flat_map(|token| token.to_le_bytes()));
            chain = blake3::keyed_hash(&self.key, &bytes).into();
            chain
        })
    }
}

/// What a sequence's full blocks are called where the eviction policy does not go by their hashes.
///
/// The policy samples blocks, and takes the first bytes of a hash for the block. A replay that has names alone
/// samples the same blocks only if the recorded cache went by them too.
#[derive(Debug, Default)]
pub(crate) struct Names {
    /// The chain before the first block, and what makes the next ones; nothing where names are given.
    namer: Option<(Namer, Chain)>,
    /// The chain behind each block.
    names: Vec<BlockHash>,
}

impl Names {
    /// Names that are made as tokens become known.
    pub(crate) fn keyed(namer: &Namer, salt: Option<&str>) -> Self {
        Self {
            namer: Some((namer.clone(), namer.begin(salt))),
            names: Vec::new(),
        }
    }

    /// Names the full blocks of `tokens`, all of the sequence, that have no name yet.
    pub(crate) fn extend_to(&mut self, tokens: &[u32]) {
        let Some((namer, first)) = &self.namer else {
            return;
        };
        let rest = &tokens[self.names.len() * namer.block_size..];
        let chain = self.names.last().map_or(first, BlockHash::as_bytes);
        let chains = namer.extend(*chain, rest);
        self.names.extend(chains.map(BlockHash::from_bytes));
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
