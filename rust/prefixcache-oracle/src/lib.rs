//! The obvious block pool, and scripts that drive it beside the lock-free one.
//!
//! For tests, fuzzing and benchmarks; nothing that is shipped depends on this crate.

pub mod differential;
pub mod plain;
