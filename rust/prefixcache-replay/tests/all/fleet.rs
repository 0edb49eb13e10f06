//! Servers behind a router, against one server.

#[path = "../../benches/replicas/fleet.rs"]
mod replicas;

use prefixcache_replay::server::{Admission, PrefillTime, Server};
use prefixcache_replay::trace::Request;
use prefixcache_serving::routing::choice::Weights;
use proptest::prelude::*;
use replicas::{Fleet, FleetConfig, FleetOutcome, Policy, spread};

use crate::common::{BLOCK_SIZE, history, lru, prompts, replay, simulate, trace_of};

fn run(
    requests: &[Request],
    num_replicas: usize,
    num_blocks: usize,
    ms_per_token: f64,
    policy: Policy,
) -> FleetOutcome {
    let config = FleetConfig {
        num_replicas,
        cache: lru(num_blocks),
        prefill: prefill(ms_per_token),
        policy,
        seed: 7,
    };
    let mut fleet = Fleet::new(config, BLOCK_SIZE).unwrap();
    for request in requests {
        fleet.push(request).unwrap();
    }
    fleet.finish().unwrap()
}

fn prefill(ms_per_token: f64) -> PrefillTime {
    PrefillTime { ms_per_request: 0.0, ms_per_token }
}

fn prefix(balance: f64) -> Policy {
    Policy::Prefix(Weights { balance, ..Weights::default() })
}

fn policies() -> impl Strategy<Value = Policy> {
    prop_oneof![Just(Policy::RoundRobin), Just(Policy::PowerOfTwo), Just(prefix(1.0)),]
}

proptest! {
    #[test]
    fn a_fleet_of_one_is_one_server(
        prompts in prompts(24, 6),
        num_blocks in 6..20_usize,
        ms_per_token in 0.0..0.01_f64,
        policy in policies(),
    ) {
        let requests = trace_of(&prompts);
        let fleet = run(&requests, 1, num_blocks, ms_per_token, policy);
        let server = Server::new(prefill(ms_per_token), Admission::Fcfs, 0.0);
        let cache = lru(num_blocks);
        let one = simulate(&requests, &cache, Some(server), BLOCK_SIZE);
        prop_assert_eq!(fleet.hit_tokens, one.outcome().hit_tokens);
        prop_assert_eq!(fleet.requests, [requests.len() as u64]);
        let latency = one.latency().unwrap();
        for percentile in [0, 50, 90, 100] {
            prop_assert_eq!(fleet.ttft_us.at(percentile), latency.ttft_us.at(percentile));
        }
    }

    #[test]
    fn with_room_and_no_waiting_the_longest_prefix_is_always_found(
        prompts in prompts(24, 6),
        num_replicas in 1..5_usize,
    ) {
        let requests = trace_of(&prompts);
        let fleet = run(&requests, num_replicas, 200, 0.0, prefix(0.0));
        let one = replay(&requests, &lru(200), BLOCK_SIZE);
        prop_assert_eq!(fleet.hit_tokens, one.hit_tokens);
        let blocks = history(&requests, BLOCK_SIZE).num_unique_blocks();
        prop_assert_eq!(fleet.index_blocks, blocks);
    }

    #[test]
    fn no_token_is_lost_on_the_way(
        prompts in prompts(24, 6),
        num_replicas in 1..5_usize,
        ms_per_token in 0.0..0.01_f64,
        policy in policies(),
    ) {
        let requests = trace_of(&prompts);
        let fleet = run(&requests, num_replicas, 8, ms_per_token, policy);
        let tokens: usize = requests.iter().map(|request| request.input_tokens).sum();
        let computed: u64 = fleet.computed_tokens.iter().sum();
        prop_assert_eq!(fleet.input_tokens, tokens as u64);
        prop_assert_eq!(fleet.hit_tokens + computed, tokens as u64);
        prop_assert_eq!(fleet.requests.iter().sum::<u64>(), requests.len() as u64);
    }
}

#[test]
fn a_spread_is_the_most_over_the_mean() {
    assert_eq!(spread(&[2, 2, 2]), 1.0);
    assert_eq!(spread(&[6, 0, 0]), 3.0);
}
