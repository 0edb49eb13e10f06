//! What the tests ask of each pool that is compared with the plain one.

use std::time::Duration;

use prefixcache_core::evictions::Evictions;
use prefixcache_core::pool::many_writers::MultiPool;
use prefixcache_core::pool::{BlockMap, MultiReader, MultiWriter, Reader, Writer};
use prefixcache_core::store::{PoolConfig, WithReaders};

/// A pool to test, made and watched as its users do.
pub trait Tested: WithReaders<Reader: Watched> + Send + Sized {
    /// Whether a retention table can follow it.
    const HAS_HINTS: bool = true;

    /// Panics where the configuration is not sound.
    fn build(config: PoolConfig) -> Self;

    /// Content that it had no room for.
    fn drops(&self) -> u64 {
        0
    }
}

/// What people watch.
pub trait Watched {
    /// The evictions.
    fn evictions(&self) -> &Evictions;

    /// A map in up to `cells` cells; panics where there are none.
    fn map(&self, cells: usize, age_bounds: &[Duration]) -> BlockMap;
}

/// The methods of `Watched` are those of the reader, or of the pool behind it.
macro_rules! watched {
    ($reader:ty, $pool:ty) => {
        impl Watched for $reader {
            fn evictions(&self) -> &Evictions {
                <$pool>::evictions(self)
            }

            fn map(&self, cells: usize, age_bounds: &[Duration]) -> BlockMap {
                <$pool>::map(self, cells, age_bounds).expect("the arguments are sound")
            }
        }
    };
}

watched!(Reader, Reader);
watched!(MultiReader, MultiPool);

impl Tested for Writer {
    fn build(config: PoolConfig) -> Self {
        Self::new(config).expect("the configuration is sound")
    }
}

impl Tested for MultiWriter {
    const HAS_HINTS: bool = false;

    /// With rings that are short enough to be wrapped many times in a script, and have four slots a block.
    fn build(config: PoolConfig) -> Self {
        let slots = (4 * config.max_blocks).next_power_of_two().max(64);
        Self::with_ring_capacity(config, slots).expect("the configuration is sound")
    }

    fn drops(&self) -> u64 {
        self.content_drops()
    }
}
