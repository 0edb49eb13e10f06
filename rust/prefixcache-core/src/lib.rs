#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

pub mod backing;
pub mod band;
pub mod cache;
mod class;
pub mod clock;
pub mod error;
pub mod events;
pub mod evictions;
pub mod groups;
pub mod hash;
pub mod hints;
pub mod id;
pub mod policy;
pub mod pool;
mod records;
pub mod retention;
pub mod sequence;
mod shared_stack;
pub mod store;
mod sync;
pub mod weights;
mod zeroed;

pub use cache::tables::TableBuffers;
pub use cache::{CacheBuilder, PrefixCache};
pub use groups::{GroupSpec, Groups};
pub use hash::{Extras, HashConfig, Scope};
pub use id::{BlockHash, BlockId, GroupId};
pub use policy::EvictionPolicy;
pub use pool::{MultiWriter, Reader, Writer};
pub use sequence::retention::Retention;
pub use sequence::{BlockHashes, Sequence};
pub use store::{BlockStore, Lookup, PoolConfig, WithReaders};
pub use weights::WeightsName;
