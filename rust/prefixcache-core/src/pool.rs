//! Pools of blocks.
//!
//! * [`Writer`]: one thread changes the pool, any number look at it. Plain data behind `&mut self`, an intrusive LRU
//!   list for each class. Every engine has this one.
//! * `many_writers`: several threads change the pool at a time, lock-free. Who has one writer need not know it.
//!
//! Both stand on the same records and index, which readers never wait for (`records.rs`), and follow the same rules
//! about where a block stands (`class.rs`).
//!
//! It does not buy throughput ... (table)

mod counters;
pub mod many_writers;
mod map;
mod one_writer;

pub use many_writers::{AnyReader, AnyWriter, MultiReader, MultiWriter};
pub use map::{BlockMap, BlockState};
pub use one_writer::{Reader, Writer};
