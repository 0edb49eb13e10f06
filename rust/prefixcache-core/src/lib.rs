//! The heart of prefixcache: a pool of KV cache blocks that are found again by their content.
//!
//! This crate knows nothing of Python or tensors. [`PrefixCache`](cache::PrefixCache) is the face;
//! it stands on a [`BlockStore`](store::BlockStore).
#![warn(missing_docs)]

mod block;
pub mod cache;
mod credits;
pub mod error;
mod free_stack;
pub mod groups;
pub mod hash;
pub mod id;
mod index;
pub mod pool;
mod ring;
pub mod sequence;
pub mod stats;
pub mod store;
mod sync;
pub mod tables;
mod zeroed;
