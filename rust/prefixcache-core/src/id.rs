//! The ids of the core: newtypes, so that no bare integer stands in a signature.

use std::fmt;

/// The most blocks a pool may hold, the null block counted: an id fits in 24 bits.
pub const MAX_BLOCKS: usize = 1 << 24;

/// A block of the KV cache.
///
/// Ids run from 0; block 0 is the null block, which is never handed out (as in vLLM).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(u32);

impl BlockId {
    /// The null block: it stands in a block table where no block is needed.
    pub const NULL: Self = Self(0);

    /// The block with this number.
    #[must_use]
    pub const fn new(id: u32) -> Self {
        Self(id)
    }

    /// The number of the block.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number of the block, as an index into an array.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Whether this is the null block.
    #[must_use]
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, formatter)
    }
}

/// A KV cache group: layers that share one block table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(u16);

impl GroupId {
    /// The group with this number.
    #[must_use]
    pub const fn new(id: u16) -> Self {
        Self(id)
    }

    /// The number of the group.
    #[must_use]
    pub const fn get(self) -> u16 {
        self.0
    }

    /// The number of the group, as an index into an array.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The life of an index between two clears. KV computed in one epoch is never registered in another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(u64);

impl Epoch {
    /// Bits of a number: what a block's record has room for. At a million clears a second they last nine years.
    pub const BITS: u32 = 48;

    /// The epoch with this number, of which [`Self::BITS`] count.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number & ((1 << Self::BITS) - 1))
    }

    /// The number of the epoch.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The epoch after this one; numbers wrap around.
    #[must_use]
    pub const fn next(self) -> Self {
        Self::new(self.0 + 1)
    }
}

/// The 256-bit hash of a block: it stands for the block's tokens and all tokens before them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash([u8; 32]);

impl BlockHash {
    /// A hash from its bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The bytes of the hash.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The hash as KV events name it: its last 8 bytes, big endian.
    #[must_use]
    pub fn short(&self) -> u64 {
        let [.., a, b, c, d, e, f, g, h] = self.0;
        u64::from_be_bytes([a, b, c, d, e, f, g, h])
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in &self.0[..8] {
            write!(formatter, "{byte:02x}")?;
        }
        formatter.write_str("..")
    }
}

/// What a block is found by: the hash of its content, and the group whose layers filled it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockKey {
    /// The hash of the content.
    pub hash: BlockHash,
    /// The group that the block belongs to.
    pub group: GroupId,
}

impl BlockKey {
    /// The key of content `hash` in `group`.
    #[must_use]
    pub const fn new(hash: BlockHash, group: GroupId) -> Self {
        Self { hash, group }
    }
}
