//! The Python module `prefixcache._core`: translate arguments, call the core, map errors.
//!
//! Nothing is decided here. Arguments are checked once, with an error that names the argument; no
//! call panics, and none waits for another: what is in use by another thread raises.
#![warn(missing_docs)]

mod arguments;
mod block_hashes;
mod block_pool;
mod errors;
mod exclusive;
mod prefix_cache;
mod sequence;
mod tokens;

use pyo3::prelude::*;

/// The Rust core: block pool, prefix index, block tables.
#[pymodule]
mod _core {
    #[pymodule_export]
    use crate::block_hashes::BlockHashes;
    #[pymodule_export]
    use crate::block_pool::BlockPool;
    #[pymodule_export]
    use crate::prefix_cache::PrefixCache;
    #[pymodule_export]
    use crate::sequence::Sequence;
}
