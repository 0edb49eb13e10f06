//! Values by key in files of a folder: bounded bytes, checksums, deadlines.
//!
//! A value is a file that holds its bytes and no others. Its name is the digest of its key, the checksum of its bytes
//! and their number, so that nothing else is written down, and what is torn, damaged or swapped is not of its name. A
//! file gets its name once it is complete; a killed process leaves at most files with other names, which the next one
//! removes. Nothing is synchronised: after a power loss the checksum refuses what is torn.
//!
//! [`Store`] is the door. One process has the folder at a time.
#![warn(missing_docs)]

mod files;
mod memory;
mod store;
mod workers;

pub use files::OpenError;
pub use memory::Memory;
pub use store::{Counts, Store};
