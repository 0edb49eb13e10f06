//! Bytes as operations on a block pool, and on the plain one.
//!
//! The first byte chooses the pool (of one writer or of many), the order of the free line and the eviction policy. It
//! may also choose many writers with rings of eight slots for up to 63 blocks, which fill up: content is dropped then,
//! and nothing else may go wrong. With longer rings the two pools must agree in everything.

#![no_main]

use libfuzzer_sys::fuzz_target;
use prefixcache_core::policy::EvictionPolicy;
use prefixcache_core::pool::{MultiWriter, Writer};
use prefixcache_core::store::FreeOrder;
use prefixcache_oracle::differential::{assert_conserves, assert_same_as_plain, config};
use prefixcache_oracle::pools::Tested;

const SHORT_RING: usize = 8;

fuzz_target!(|input: (u8, Vec<[u8; 3]>)| {
    let (choice, steps) = input;
    if choice & 1 == 0 { run::<MultiWriter>(choice, &steps) } else { run::<Writer>(choice, &steps) }
});

fn run<P: Tested>(choice: u8, steps: &[[u8; 3]]) {
    let order = if choice & 2 == 0 { FreeOrder::UnhashedFirst } else { FreeOrder::Append };
    let policy = if choice & 8 == 0 { EvictionPolicy::Lru } else { EvictionPolicy::ReuseQueue };
    let config = config(4 + usize::from(choice >> 3) * 2, order, policy);
    if choice & 4 == 0 {
        assert_same_as_plain(config, &mut P::build(config), steps);
    } else {
        let short_rings = MultiWriter::with_ring_capacity(config, SHORT_RING);
        assert_conserves(&mut short_rings.unwrap(), steps);
    }
}
