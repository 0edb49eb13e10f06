//! The hashes that name blocks; `docs/reference/hashing.md` specifies them byte by byte, with the reasons.
//!
//! The root stands for everything but the tokens that decides what a block's KV is, the hash of a block
//! for all that and the tokens up to the block's end:
//!
//! ```text
//! root = derive_key("prefixcache v2 root", fields)
//! h_0  = root, or derive_key("prefixcache v2 scope", root, lora, cache_salt)
//! h_i  = keyed_hash("prefixcache v2 prefix", h_{i-w}, node over the last w blocks),
//!        w the largest power of eight that divides i
//! ```
//!
//! A field is its length as u64 little endian, then its bytes; a number is a field of 8 bytes little
//! endian; what may be absent is one byte 0, or one byte 1 and the field. Only full blocks are hashed.

mod lanes;
mod prefixes;

use crate::error::{InvalidArgument, require};
use crate::groups::Groups;
use crate::id::BlockHash;

pub use prefixes::PrefixHashes;

const ROOT_CONTEXT: &str = "prefixcache v2 root";
const SCOPE_CONTEXT: &str = "prefixcache v2 scope";

/// The largest number of tokens in a block.
pub const MAX_BLOCK_SIZE: usize = 256;

/// What all hashes of a cache have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HashConfig {
    /// The model that computes the KV.
    pub model: String,
    /// The revision of the model's weights.
    pub revision: String,
    /// The element type of the KV.
    pub kv_dtype: String,
    /// What the model computes with, such as "bfloat16".
    pub arithmetic: String,
    /// Tokens in a block.
    pub block_size: usize,
    /// The KV cache groups.
    pub groups: Groups,
}

impl HashConfig {
    /// The configuration of a model without a name: what makes its KV valid is to be set.
    #[must_use]
    pub fn new(block_size: usize, groups: Groups) -> Self {
        Self {
            model: String::new(),
            revision: String::new(),
            kv_dtype: String::new(),
            arithmetic: String::new(),
            block_size,
            groups,
        }
    }

    /// This, for the KV of `model`, of this element type, computed with `arithmetic`.
    #[must_use]
    pub fn with_model(self, model: &str, kv_dtype: &str, arithmetic: &str) -> Self {
        Self {
            model: model.into(),
            kv_dtype: kv_dtype.into(),
            arithmetic: arithmetic.into(),
            ..self
        }
    }

    /// This, for the KV of another revision of the model's weights.
    #[must_use]
    pub fn with_revision(self, revision: &str) -> Self {
        Self { revision: revision.into(), ..self }
    }

    /// Fails unless the block size is a power of two from 1 to 256.
    pub fn check(&self) -> Result<(), InvalidArgument> {
        check_block_size(self.block_size)
    }
}

/// Fails unless the block size is a power of two from 1 to 256.
pub fn check_block_size(size: usize) -> Result<(), InvalidArgument> {
    require(size.is_power_of_two() && size <= MAX_BLOCK_SIZE, "block_size", || {
        format!("must be a power of two from 1 to {MAX_BLOCK_SIZE}, not {size}")
    })
}

/// Who may share blocks: requests of the same LoRA and the same salt. None and "" differ.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// The LoRA adapter of the request.
    pub lora: Option<String>,
    /// A secret that only requests with the same one share blocks with.
    pub cache_salt: Option<String>,
}

/// `h_0`, the hash before the first block, under the weights of this name.
///
/// That of a scope follows from that without one, so whoever knows the latter can hash for any salt.
#[must_use]
pub fn root(config: &HashConfig, scope: &Scope, weights: &str) -> BlockHash {
    let mut hasher = blake3::Hasher::new_derive_key(ROOT_CONTEXT);
    field(&mut hasher, config.model.as_bytes());
    field(&mut hasher, config.revision.as_bytes());
    field(&mut hasher, weights.as_bytes());
    field(&mut hasher, config.kv_dtype.as_bytes());
    field(&mut hasher, config.arithmetic.as_bytes());
    field(&mut hasher, &(config.block_size as u64).to_le_bytes());
    field(&mut hasher, config.groups.layout().as_bytes());
    in_scope(BlockHash::from_bytes(hasher.finalize().into()), scope)
}

/// `h_0` of a scope, from `root`, that without one.
#[must_use]
pub fn in_scope(root: BlockHash, scope: &Scope) -> BlockHash {
    if *scope == Scope::default() {
        return root;
    }
    let mut hasher = blake3::Hasher::new_derive_key(SCOPE_CONTEXT);
    hasher.update(root.as_bytes());
    optional_field(&mut hasher, scope.lora.as_deref());
    optional_field(&mut hasher, scope.cache_salt.as_deref());
    BlockHash::from_bytes(hasher.finalize().into())
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

/// Bytes besides the tokens that a block's KV depends on, such as an image's digest: one entry for
/// each block from the first on, empty where there is none.
pub type Extras = Vec<Vec<u8>>;
