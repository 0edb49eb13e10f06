//! What can go wrong: blocks are lacking, or the caller made a mistake.

use thiserror::Error;

use crate::id::BlockId;

/// Too few free blocks. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{needed} blocks are needed and {free} are free")]
pub struct Exhausted {
    /// Blocks that the call would have taken from the free ones.
    pub needed: usize,
    /// Blocks that were free.
    pub free: usize,
}

/// A block id that the call cannot accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Misuse {
    /// The null block is never handed out, so it can be neither held nor given back.
    #[error("block 0 is the null block")]
    Null,
    /// The id was never a block of this pool.
    #[error("block {0} is not a block of this pool")]
    Foreign(BlockId),
    /// The pool shrank below this id.
    #[error("block {0} is retired: the pool was resized below it")]
    Retired(BlockId),
    /// Nobody holds the block: released twice, or never allocated.
    #[error("block {0} is not in use (released twice?)")]
    NotInUse(BlockId),
    /// The block holds the hash of other content.
    #[error("block {0} is registered under another hash")]
    OtherHash(BlockId),
    /// One more holder than a block can count.
    #[error("block {0} has too many holders")]
    TooManyHolders(BlockId),
}

/// An argument outside its range.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{argument} {reason}")]
pub struct InvalidArgument {
    /// The name of the argument.
    pub argument: &'static str,
    /// What it must be and what it was.
    pub reason: String,
}

impl InvalidArgument {
    /// An error for `argument`; `reason` goes on the sentence that the name begins.
    pub fn new(argument: &'static str, reason: impl Into<String>) -> Self {
        Self {
            argument,
            reason: reason.into(),
        }
    }
}

/// A broken invariant, found by `validate`.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("invariant broken: {0}")]
pub struct Broken(pub String);
