//! The heart of prefixcache: a pool of KV cache blocks that are found again by their content.
//!
//! This crate knows nothing of Python or tensors. `PrefixCache` is the face;
//! it stands on a [`BlockStore`](store::BlockStore).
#![warn(missing_docs)]

pub mod error;
pub mod id;
pub mod stats;
pub mod store;
