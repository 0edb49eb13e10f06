//! Pools of blocks.
//!
//! * [`Writer`]: one thread changes the pool, any number look at it (`one_writer/`). Plain data behind `&mut self`, an
//!   intrusive LRU list for each class. Every engine has this one.
//! * [`MultiWriter`]: several threads change the pool at a time, lock-free ([`many_writers`]). Who has one writer need
//!   not know it.
//!
//! Both stand on the same records and index, which readers never wait for (`records.rs`), and follow the same rules
//! about the list that a block stands in (`class.rs`). The plain pool of `prefixcache-oracle` is their obvious form.

mod counters;
mod entries;
pub mod many_writers;
mod map;
mod one_writer;

pub use many_writers::{AnyReader, AnyWriter, MultiReader, MultiWriter};
pub use map::{BlockMap, BlockState};
pub use one_writer::{Reader, Writer};
