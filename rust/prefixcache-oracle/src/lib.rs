//! The obvious block pool, scripts that drive it, and a cache over it, next to the fast ones, and the obvious hashes.
//!
//! For tests, fuzzing and benchmarks; nothing that is shipped depends on this crate.

pub mod cache_calls;
pub mod differential;
pub mod hashes;
pub mod map_and_list;
pub mod plain;
pub mod plain_retention;
pub mod pools;
pub mod random;
