//! Bytes as calls of a scheduler, to a cache over the plain pool and to one over a pool that ships.

#![no_main]

use libfuzzer_sys::fuzz_target;
use prefixcache_core::groups::{GroupSpec, Groups};
use prefixcache_core::pool::{MultiWriter, Writer};
use prefixcache_core::store::PoolConfig;
use prefixcache_oracle::cache_calls::{Call, ROOM, assert_same_as_plain};
use prefixcache_oracle::pools::Tested;

fuzz_target!(|input: (u8, Vec<Call>)| {
    let (choice, calls) = input;
    let window = |window| GroupSpec::SlidingWindow { window };
    let full = GroupSpec::FullAttention;
    let groups = [
        vec![full],
        vec![full, window(7)],
        vec![window(1), full, window(16)],
        vec![window(9), GroupSpec::State],
    ];
    let groups = Groups::new(groups[usize::from(choice >> 1 & 3)].clone()).unwrap();
    let num_blocks = 8 + usize::from(choice >> 3) * 3;
    let config = PoolConfig::new(num_blocks).with_max_blocks(num_blocks + ROOM);
    if choice & 1 == 0 {
        run::<MultiWriter>(&groups, config, &calls);
    } else {
        run::<Writer>(&groups, config, &calls);
    }
});

fn run<P: Tested>(groups: &Groups, config: PoolConfig, calls: &[Call]) {
    assert_same_as_plain(groups, config, P::build(config), calls, |_, _| {});
}
