//! KV blocks in a file that outlives the process.
//!
//! One file holds the KV tensors of a pool and a table with a record for each block. The tensors are mapped shared, so
//! nothing is copied on the way out, and what a killed process has written stays in the system's page cache. A record
//! is written after the bytes of its block and withdrawn before they change, so that the next process finds only
//! blocks whose bytes are complete. After a power loss that order is not kept on the disk: there the checksum of the
//! bytes, which is compared before a block is hit for the first time, refuses what is torn.
//!
//! | part | bytes |
//! |---|---|
//! | header | 4096: [`Layout`], its checksum, the epoch, how many records were ever used |
//! | records | 64 for each block |
//! | hints | 40 for each block: who asked for its priority, for how long, and when that ends |
//! | tokens | what KV events report of a block, where they are on: the block before it and its tokens |
//! | tensors | one after the other, each of `capacity` blocks; holes where nothing was allocated |
//!
//! [`KvFile`] opens it. Who names, locks and removes files is not decided here. All numbers are little endian.
#![warn(missing_docs)]
// For the model checker the record alone, whose words are its own.
#![cfg_attr(loom, allow(dead_code))]

#[cfg(not(loom))]
mod both;
#[cfg(not(loom))]
mod checker;
#[cfg(not(loom))]
mod faults;
#[cfg(not(loom))]
mod hint;
#[cfg(not(loom))]
mod kv_file;
mod layout;
mod record;
#[cfg(not(loom))]
mod space;
#[cfg(not(loom))]
pub mod staging;
#[cfg(not(loom))]
mod table;

#[cfg(all(test, not(loom)))]
mod kills;
#[cfg(all(test, not(loom)))]
mod lives;

#[cfg(not(loom))]
pub use kv_file::{Counts, KvFile};
pub use layout::{FORMAT_VERSION, Layout, OpenError, describe};
#[cfg(not(loom))]
pub use space::duplicate;
#[cfg(not(loom))]
pub use table::Kept;
