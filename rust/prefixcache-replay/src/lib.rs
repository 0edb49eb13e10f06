//! Recorded requests, run through the real cache without a model.
//!
//! A trace says which blocks each prompt has, and nothing of their tokens. [`trace`] reads it, [`replay`]
//! asks a cache for it, and [`optimum`] says how many of its tokens any order of eviction could have saved.

pub mod optimum;
pub mod replay;
pub mod trace;
