#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

mod block;
pub mod cache;
pub mod clock;
mod credits;
pub mod digests;
pub mod error;
pub mod events;
mod free_stack;
pub mod groups;
pub mod hash;
pub mod hints;
pub mod id;
mod index;
pub mod losses;
pub mod naming;
pub mod policy;
pub mod pool;
pub mod retention;
mod ring;
pub mod sequence;
pub mod stats;
pub mod store;
mod sync;
pub mod tables;
pub mod weights;
mod zeroed;

pub use cache::PrefixCache;
pub use groups::{GroupSpec, Groups};
pub use hash::{Extras, HashConfig, Scope};
pub use hints::band;
pub use id::{BlockHash, BlockId, GroupId};
pub use policy::EvictionPolicy;
pub use pool::{BlockPool, Shared, SingleWriter};
pub use retention::Retention;
pub use sequence::{BlockHashes, Sequence};
pub use store::{BlockStore, PoolConfig};
pub use tables::TableBuffers;
pub use weights::WeightsName;
