//! The heart of prefixcache: a pool of KV cache blocks that are found again by their content.
//!
//! This crate knows nothing of Python or tensors. [`PrefixCache`](cache::PrefixCache) is the face;
//! it stands on a [`BlockStore`](store::BlockStore).
#![warn(missing_docs)]

pub mod cache;
pub mod error;
pub mod groups;
pub mod hash;
pub mod id;
pub mod plain;
pub mod sequence;
pub mod stats;
pub mod store;
pub mod tables;
