//! The chain of block hashes.
//!
//! The root stands for everything but the tokens that decides what a block's KV is:
//!
//! ```text
//! h_0 = blake3.derive_key("prefixcache chain v1", fields)
//! h_i = blake3.keyed_hash(key = h_{i-1}, tokens_i as u32 little endian [, extra_i])
//! ```
//!
//! The parent as *key* makes a block of 16 tokens one compression instead of two. A field or extra
//! is its length as u64 little endian, then its bytes; a number is a field of 8 bytes little endian;
//! what may be absent is one byte 0, or one byte 1 and the field. Only full blocks are hashed.

use std::sync::Arc;

use crate::error::InvalidArgument;
use crate::groups::Groups;
use crate::id::BlockHash;

const CONTEXT: &str = "prefixcache chain v1";

/// The largest number of tokens in a block.
pub const MAX_BLOCK_SIZE: usize = 256;

/// What all hashes of a cache have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainConfig {
    /// The model that computes the KV.
    pub model: String,
    /// The revision of the model's weights.
    pub revision: String,
    /// The element type of the KV.
    pub kv_dtype: String,
    /// Tokens in a block.
    pub block_size: usize,
    /// The KV cache groups.
    pub groups: Groups,
}

impl ChainConfig {
    /// Fails unless the block size is a power of two from 1 to 256.
    pub fn check(&self) -> Result<(), InvalidArgument> {
        let size = self.block_size;
        if size.is_power_of_two() && size <= MAX_BLOCK_SIZE {
            return Ok(());
        }
        let reason = format!("must be a power of two from 1 to {MAX_BLOCK_SIZE}, not {size}");
        Err(InvalidArgument::new("block_size", reason))
    }
}

/// Who may share blocks: requests of the same LoRA and the same salt. None and "" differ.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// The LoRA adapter of the request.
    pub lora: Option<String>,
    /// A secret that only requests with the same one share blocks with.
    pub cache_salt: Option<String>,
}

/// The hash before the first block.
#[must_use]
pub fn root(config: &ChainConfig, scope: &Scope, weight_version: u64) -> BlockHash {
    let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
    field(&mut hasher, config.model.as_bytes());
    field(&mut hasher, config.revision.as_bytes());
    field(&mut hasher, config.kv_dtype.as_bytes());
    field(&mut hasher, &(config.block_size as u64).to_le_bytes());
    optional_field(&mut hasher, scope.lora.as_deref());
    optional_field(&mut hasher, scope.cache_salt.as_deref());
    field(&mut hasher, &weight_version.to_le_bytes());
    field(&mut hasher, config.groups.layout().as_bytes());
    BlockHash::from_bytes(*hasher.finalize().as_bytes())
}

fn field(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

fn optional_field(hasher: &mut blake3::Hasher, value: Option<&str>) {
    hasher.update(&[u8::from(value.is_some())]);
    if let Some(value) = value {
        field(hasher, value.as_bytes());
    }
}

/// The hash of a block of at most [`MAX_BLOCK_SIZE`] tokens after `parent`. An empty `extra` is none.
#[must_use]
pub fn extend(parent: &BlockHash, tokens: &[u32], extra: &[u8]) -> BlockHash {
    let mut bytes = [0; 4 * MAX_BLOCK_SIZE];
    for (place, token) in bytes.chunks_exact_mut(4).zip(tokens) {
        place.copy_from_slice(&token.to_le_bytes());
    }
    let message = &bytes[..4 * tokens.len()];
    let hash = if extra.is_empty() {
        blake3::keyed_hash(parent.as_bytes(), message)
    } else {
        let mut hasher = blake3::Hasher::new_keyed(parent.as_bytes());
        hasher.update(message);
        field(&mut hasher, extra);
        hasher.finalize()
    };
    BlockHash::from_bytes(*hash.as_bytes())
}

/// Bytes besides the tokens that a block's KV depends on, such as an image's digest: one entry for
/// each block from the first on, empty where there is none.
pub type Extras = Vec<Vec<u8>>;

/// The hashes of a growing token sequence: each full block is hashed once.
#[derive(Clone, Debug)]
pub struct HashChain {
    block_size: usize,
    root: BlockHash,
    extras: Arc<Extras>,
    hashes: Vec<BlockHash>,
}

impl HashChain {
    /// A chain without blocks.
    #[must_use]
    pub fn new(block_size: usize, root: BlockHash, extras: Arc<Extras>) -> Self {
        Self {
            block_size,
            root,
            extras,
            hashes: Vec::new(),
        }
    }

    /// Hashes the full blocks of `tokens`, all of the sequence, that are not hashed yet.
    pub fn extend_to(&mut self, tokens: &[u32]) {
        let done = self.hashes.len();
        let mut parent = self.hashes.last().copied().unwrap_or(self.root);
        let blocks = tokens.chunks_exact(self.block_size).enumerate().skip(done);
        self.hashes.reserve(blocks.len());
        for (index, block) in blocks {
            let extra = self.extras.get(index).map_or(&[][..], Vec::as_slice);
            parent = extend(&parent, block, extra);
            self.hashes.push(parent);
        }
    }

    /// Drops all hashes and starts again from `root`.
    pub fn restart(&mut self, root: BlockHash) {
        self.root = root;
        self.hashes.clear();
    }

    /// The hashes of the full blocks, as an owned list.
    #[must_use]
    pub fn into_hashes(self) -> Vec<BlockHash> {
        self.hashes
    }

    /// The hashes of the full blocks.
    #[must_use]
    pub fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }
}
