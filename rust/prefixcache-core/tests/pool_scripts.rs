//! One thread: the lock-free pool in both modes against the plain one, step by step.

use prefixcache_core::policy::EvictionPolicy;
use prefixcache_core::pool::{Mode, Shared, SingleWriter, Writer};
use prefixcache_core::store::FreeOrder;
use prefixcache_oracle::differential::{assert_conserves, assert_same_as_plain, config};
use proptest::collection::vec;
use proptest::prelude::*;

const MAX_BLOCKS: usize = 40;

/// Short enough to be wrapped many times in a script, and four slots a block.
const RING: usize = 256;

fn pool<M: Mode>(order: Order, ring: usize) -> Writer<M> {
    Writer::with_ring_capacity(config(MAX_BLOCKS, order.0, order.1), ring).unwrap()
}

fn compare<M: Mode>(order: Order, steps: &[[u8; 3]]) {
    let config = config(MAX_BLOCKS, order.0, order.1);
    assert_same_as_plain(config, &mut pool::<M>(order, RING), steps);
}

/// Where released blocks go, and which of them is evicted first.
type Order = (FreeOrder, EvictionPolicy);

fn order() -> impl Strategy<Value = Order> {
    let free = prop_oneof![Just(FreeOrder::UnhashedFirst), Just(FreeOrder::Append)];
    let policy = prop_oneof![Just(EvictionPolicy::Lru), Just(EvictionPolicy::ReuseQueue)];
    (free, policy)
}

fn script() -> impl Strategy<Value = Vec<[u8; 3]>> {
    vec(any::<[u8; 3]>(), 1..400)
}

/// As many as fit a test run; more by the environment, as proptest has it.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|cases| cases.parse().ok())
        .unwrap_or(96)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    #[test]
    fn shared_pool_does_what_the_plain_one_does(order in order(), steps in script()) {
        compare::<Shared>(order, &steps);
    }

    #[test]
    fn single_writer_pool_does_what_the_plain_one_does(order in order(), steps in script()) {
        compare::<SingleWriter>(order, &steps);
    }

    #[test]
    fn pool_with_short_rings_drops_content_and_no_block(order in order(), steps in script()) {
        assert_conserves(&mut pool::<Shared>(order, 8), &steps);
        assert_conserves(&mut pool::<SingleWriter>(order, 8), &steps);
    }
}
