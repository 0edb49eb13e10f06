//! Paged attention on the CPU, and short convolutions and the gated delta rule over the same pages.
//!
//! Keys and values stay where they are: the kernel reads the block table. They are met in tiles of
//! 64 that start at multiples of 64 from the sequence's first token, so an output row sees the same
//! additions in the same order whether its token is decoded alone, computed in a chunk of a prompt,
//! or in a batch of other sequences. What a tile holds beyond a row's sight adds exact zeros. That
//! holds bit for bit within a [`prefixcache_cpu::Form`], for numbers that are finite, at any number
//! of threads.
//!
//! Per row and tile this is the online softmax of FlashAttention: scores, their maximum, the
//! rescaling of what was summed before, and the weighted sum of the values. Probabilities are
//! rounded to the type of the values before they are multiplied; all sums are `f32`.
//!
//! Letters of shapes: T tokens in the step, S sequences, H query heads, K key-value heads, D head
//! size, P pages (blocks), B tokens a block. The cache of a layer is [P, 2 * K * B * D]: its part of each
//! page, which others may share. Where keys and values are kept in eight bits it has bytes in place of numbers.

mod codes;
mod conv;
mod delta;
mod kept;
mod kernel;
mod paged;
mod plan;
mod rotation;
mod state;

pub use codes::{CODE_TOKENS, append_codes};
pub use conv::{MAX_TAPS, ShortConv, short_conv};
pub use delta::{DeltaHeads, DeltaRule, HEAD_STEP, StatePart, delta_rule, replay_delta_rule};
pub use kept::{KvPages, KvPagesMut};
pub use kernel::attend;
pub use paged::{KvElement, append};
pub use plan::{BlockTables, NO_PAGE, Plan, PlanError};

/// The constants of a model's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Multiplies the dot products.
    pub scale: f32,
    /// A query at position i sees the keys from `i - window_left` to `i`; all up to i without it.
    pub window_left: Option<usize>,
    /// Replaces a scaled score x by `c * tanh(x / c)`.
    pub softcap: Option<f32>,
}

/// The most query heads.
const MAX_HEADS: usize = 1 << 16;

/// The most numbers of a head.
const MAX_HEAD_DIM: usize = 512;

/// The heads of a model do not fit the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// Query heads are shared out evenly among the key-value heads.
    #[error("num_heads ({0}) must be a positive multiple of num_kv_heads ({1})")]
    Heads(usize, usize),
    /// More heads than any model has, so that no product of sizes can overflow.
    #[error("num_heads ({0}) must be at most {MAX_HEADS}")]
    TooManyHeads(usize),
    /// A head fills whole vectors.
    #[error("head_dim ({0}) must be a multiple of 16, from 16 to {MAX_HEAD_DIM}")]
    HeadDim(usize),
}

impl Attention {
    /// Full attention of these heads with a scale.
    pub fn new(
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        scale: f32,
    ) -> Result<Self, ShapeError> {
        if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(ShapeError::Heads(heads, kv_heads));
        }
        if heads > MAX_HEADS {
            return Err(ShapeError::TooManyHeads(heads));
        }
        if !head_dim.is_multiple_of(16) || !(16..=MAX_HEAD_DIM).contains(&head_dim) {
            return Err(ShapeError::HeadDim(head_dim));
        }
        Ok(Self { heads, kv_heads, head_dim, scale, window_left: None, softcap: None })
    }

    /// Query heads.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Key-value heads.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Numbers of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Query heads that share a key-value head.
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// The first position that a query at `position` sees.
    fn first_seen(&self, position: usize) -> usize {
        self.window_left.map_or(0, |left| position.saturating_sub(left))
    }
}
