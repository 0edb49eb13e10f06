//! Recorded requests, run through the real cache without a model.
//!
//! A trace says which blocks each prompt has, and nothing of their tokens. [`trace`] reads it as a stream, and
//! [`replay`] passes each request to any number of caches side by side ([`cache`]), whose requests wait for a
//! [`server`] where computing takes time. [`history`] looks at the trace alone, and says what the best order of
//! eviction hits, and what a cache without a bound does.

pub mod cache;
pub mod disk;
pub mod history;
mod lines;
pub mod marconi;
pub mod optimum;
pub mod quantiles;
pub mod recording;
pub mod replay;
pub mod server;
pub mod trace;
