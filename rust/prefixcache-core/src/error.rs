//! What can go wrong: blocks are lacking, or the caller made a mistake.

use std::fmt;

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
#[non_exhaustive]
pub enum Misuse {
    /// The null block is never handed out, so it can be neither held nor given back.
    #[error("block 0 is the null block")]
    Null,
    /// The id was never a block of this pool.
    #[error("block {0} is not a block of this pool")]
    Foreign(BlockId),
    /// The pool shrank below this id.
    #[error("block {0} is retired: the pool now ends below it")]
    Retired(BlockId),
    /// Nobody holds the block: released twice, or never allocated.
    #[error("block {0} is not in use (released twice?)")]
    NotInUse(BlockId),
    /// The block holds the hash of other content.
    #[error("block {0} is registered under another hash")]
    OtherHash(BlockId),
}

/// The name of an argument, or of one element of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Argument {
    /// The name of the argument.
    pub name: &'static str,
    /// Which element of the list, if the argument is one.
    pub index: Option<usize>,
}

impl Argument {
    /// Element `index` of the list `name`.
    #[must_use]
    pub const fn element(name: &'static str, index: usize) -> Self {
        Self { name, index: Some(index) }
    }
}

impl From<&'static str> for Argument {
    fn from(name: &'static str) -> Self {
        Self { name, index: None }
    }
}

impl fmt::Display for Argument {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.index {
            None => formatter.write_str(self.name),
            Some(index) => write!(formatter, "{}[{index}]", self.name),
        }
    }
}

/// An argument outside its range.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{argument} {reason}")]
pub struct InvalidArgument {
    /// The name of the argument.
    pub argument: Argument,
    /// What it must be and what it was.
    pub reason: String,
}

impl InvalidArgument {
    /// An error for `argument`; `reason` goes on the sentence that the name begins.
    pub fn new(argument: impl Into<Argument>, reason: impl Into<String>) -> Self {
        Self { argument: argument.into(), reason: reason.into() }
    }
}

/// Fails for `argument` unless it is as it must be.
pub(crate) fn require<R: Into<String>>(
    is_valid: bool,
    argument: impl Into<Argument>,
    reason: impl FnOnce() -> R,
) -> Result<(), InvalidArgument> {
    if is_valid { Ok(()) } else { Err(InvalidArgument::new(argument, reason())) }
}

/// Why a pool was not made.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PoolError {
    /// An argument outside its range.
    #[error(transparent)]
    Invalid(#[from] InvalidArgument),
    /// The system has no memory for the records of that many blocks.
    #[error("max_blocks asks for more memory than there is: {max_blocks}")]
    OutOfMemory {
        /// The most blocks that the pool was to have, the null block counted.
        max_blocks: usize,
    },
}

/// Why a pool keeps no log of evictions, or not another one.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ListenError {
    /// An argument outside its range.
    #[error(transparent)]
    Invalid(#[from] InvalidArgument),
    /// The system has no memory for the log.
    #[error("capacity asks for more memory than there is: {capacity}")]
    OutOfMemory {
        /// The evictions that the log was to hold.
        capacity: usize,
    },
    /// Something is cached already.
    #[error("something is cached already, which nobody was notified of")]
    Late,
    /// Somebody listens already.
    #[error("somebody listens to this pool already")]
    Twice,
}

/// Why a pool kept its size.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ResizeError {
    /// A size that the pool cannot have.
    #[error(transparent)]
    Invalid(#[from] InvalidArgument),
    /// Another thread is inside a call that changes the pool.
    #[error("num_blocks cannot change while another thread is changing the pool: call again")]
    Busy,
    /// Moves were begun and neither finished nor aborted.
    #[error("moves are in flight: finish or abort them first")]
    Moving,
}

/// A broken invariant, found by `validate`.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("invariant broken: {0}")]
pub struct Broken(pub String);

/// What is wrong with the use of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SequenceFault {
    /// Another cache made the sequence.
    #[error("belongs to another cache")]
    OtherCache,
    /// The call needs a sequence that holds blocks.
    #[error("holds no blocks: it was not committed, or it was released already")]
    NotCommitted,
    /// The call needs a sequence that holds nothing.
    #[error("holds blocks already; release it before another commit")]
    Committed,
    /// It stays with a version of the weights whose content was forgotten since.
    #[error("stays with weights of a version that was forgotten: make another one")]
    Forgotten,
}

/// A call that the cache refused. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CacheError {
    /// An argument outside its range.
    #[error(transparent)]
    Invalid(#[from] InvalidArgument),
    /// A sequence that the call cannot accept.
    #[error("{argument} {fault}")]
    Sequence {
        /// The name of the argument.
        argument: Argument,
        /// What is wrong with it.
        fault: SequenceFault,
    },
    /// A block that the pool refused.
    #[error(transparent)]
    Block(#[from] Misuse),
}
