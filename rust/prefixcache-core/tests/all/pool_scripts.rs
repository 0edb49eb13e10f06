//! One thread: each pool against the plain one, step by step.

use prefixcache_core::policy::EvictionPolicy;
use prefixcache_core::pool::{MultiWriter, Writer};
use prefixcache_core::store::FreeOrder;
use prefixcache_oracle::differential::{assert_conserves, assert_same_as_plain, config};
use prefixcache_oracle::pools::Tested;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::{Order, cases, orders};

const MAX_BLOCKS: usize = 40;

fn compare<P: Tested>(order: Order, steps: &[[u8; 3]]) {
    let config = config(MAX_BLOCKS, order.0, order.1);
    assert_same_as_plain(config, &mut P::build(config), steps);
}

fn script() -> impl Strategy<Value = Vec<[u8; 3]>> {
    vec(any::<[u8; 3]>(), 1..400)
}

proptest! {
    #![proptest_config(cases(96))]

    #[test]
    fn pool_of_many_writers_does_what_the_plain_one_does(order in orders(), steps in script()) {
        compare::<MultiWriter>(order, &steps);
    }

    #[test]
    fn pool_with_short_rings_drops_content_and_no_block(order in orders(), steps in script()) {
        let config = config(MAX_BLOCKS, order.0, order.1);
        assert_conserves(&mut MultiWriter::with_ring_capacity(config, 8).unwrap(), &steps);
    }

    #[test]
    fn single_writer_pool_does_what_the_plain_one_does(order in orders(), steps in script()) {
        compare::<Writer>(order, &steps);
    }
}

#[test]
fn a_block_that_was_not_needed_has_lost_its_queue() {
    let steps = [
        [0, 0, 9],  // takes block 1,
        [4, 0, 0],  // registers it as key 0,
        [8, 0, 13], // releases it to queue 3,
        [0, 0, 1],  // hits it,
        [8, 0, 0],  // releases it as not needed,
        [0, 0, 1],  // hits it,
        [8, 0, 2],  // and releases it: before what joins queue 1.
        [0, 1, 9],
        [4, 0, 1],
        [8, 0, 5],
    ];
    let order = (FreeOrder::UnhashedFirst, EvictionPolicy::ReuseQueue);
    compare::<MultiWriter>(order, &steps);
    compare::<Writer>(order, &steps);
}
