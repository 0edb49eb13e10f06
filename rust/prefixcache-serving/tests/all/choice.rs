//! The choice against its costs as they are written down, and what follows from them.

use prefixcache_serving::routing::choice::{Chooser, Prompt, Weights};
use prefixcache_serving::routing::replica::ReplicaId;
use proptest::prelude::*;

const WEIGHTS: Weights = Weights {
    overlap_weight: 2.0,
    request_tokens: 10.0,
    window_tokens: 500.0,
    balance: 0.5,
    affinity: 0.5,
};

fn chooser(replicas: u16) -> Chooser {
    chooser_with(WEIGHTS, replicas)
}

fn chooser_with(weights: Weights, replicas: u16) -> Chooser {
    let mut chooser = Chooser::new(weights, 1).expect("sound weights");
    for replica in 0..replicas {
        chooser.add_replica(ReplicaId(replica), &format!("replica {replica}"));
    }
    chooser
}

/// The numbers of the best replicas.
fn best(chooser: &mut Chooser, prompt: &Prompt<'_>, most: usize) -> Vec<usize> {
    let chosen = chooser.choose(prompt, most);
    chosen.iter().map(|id| usize::from(id.0)).collect()
}

fn note(chooser: &mut Chooser, replica: usize, tokens: usize) {
    chooser.note(ReplicaId(replica as u16), tokens);
}

fn recent_tokens(chooser: &Chooser, replica: usize) -> f64 {
    chooser.recent_tokens(ReplicaId(replica as u16))
}

fn prompt<'a>(num_tokens: usize, hit_tokens: &'a [u32], loads: &'a [f64]) -> Prompt<'a> {
    Prompt { num_tokens, hit_tokens, loads, key: None }
}

/// Recent work of each replica from the list of all work: each amount counts for less by what came after it, and by itself.
fn recent(work: &[(usize, usize)], replicas: usize) -> Vec<f64> {
    let mut recent = vec![0.0; replicas];
    let mut after = 0.0;
    for &(replica, tokens) in work.iter().rev() {
        let tokens = tokens as f64 + WEIGHTS.request_tokens;
        after += tokens / (WEIGHTS.window_tokens * replicas as f64);
        recent[replica] += tokens * f64::exp(-after);
    }
    recent
}

fn costs(prompt: &Prompt<'_>, recent: &[f64]) -> Vec<f64> {
    let open: Vec<usize> =
        (0..recent.len()).filter(|&replica| prompt.loads[replica].is_finite()).collect();
    let sum: f64 = open.iter().map(|&replica| recent[replica]).sum();
    let mean = sum / open.len() as f64;
    let cost = |replica: usize| {
        let missing = prompt.num_tokens.saturating_sub(prompt.hit_tokens[replica] as usize);
        let surplus = f64::max(recent[replica] - mean, 0.0);
        let imbalance = surplus * surplus / f64::max(0.1 * mean, 4096.0);
        prompt.loads[replica] + 2.0 * missing as f64 + WEIGHTS.balance * imbalance
    };
    (0..recent.len()).map(cost).collect()
}

proptest! {
    #[test]
    fn the_order_is_that_of_the_costs(
        work in prop::collection::vec((0..5_usize, 0..4000_usize), 0..60),
        hits in prop::collection::vec(0..1000_u32, 5),
        loads in prop::collection::vec(prop_oneof![4 => 0.0..800.0, 1 => Just(f64::INFINITY)], 5),
        most in 0..6_usize,
    ) {
        let (mut one, mut other) = (chooser(5), chooser(5));
        for &(replica, tokens) in &work {
            note(&mut one, replica, tokens);
            note(&mut other, replica, tokens);
        }
        let recent = recent(&work, 5);
        for (replica, &tokens) in recent.iter().enumerate() {
            prop_assert!((recent_tokens(&one, replica) - tokens).abs() < 1e-6);
        }
        let prompt = prompt(800, &hits, &loads);
        let order = best(&mut one, &prompt, 5);
        let costs = costs(&prompt, &recent);
        prop_assert_eq!(order.len(), loads.iter().filter(|load| load.is_finite()).count());
        prop_assert!(order.is_sorted_by(|&a, &b| costs[a] <= costs[b] + 1e-6), "{:?} {:?}", order, costs);
        let first = best(&mut other, &prompt, most);
        prop_assert_eq!(&first[..], &order[..most.min(order.len())]);
    }

    #[test]
    fn a_key_goes_with_its_replica_until_that_one_leaves(key: u64, gone in 0..8_usize) {
        let mut all = chooser(8);
        let (hits, loads) = ([0; 8], [0.0; 8]);
        let keyed = |loads| Prompt { key: Some(key), ..prompt(100, &hits, loads) };
        let named = best(&mut all, &keyed(&loads), 1);
        note(&mut all, named[0], 20);
        prop_assert_eq!(&best(&mut all, &keyed(&loads), 1), &named);
        let mut closed = loads;
        closed[gone] = f64::INFINITY;
        let after = best(&mut all, &keyed(&closed), 1);
        prop_assert!(after == named || named == [gone]);
        let mut behind = loads;
        behind[named[0]] = 101.0;
        prop_assert_ne!(best(&mut all, &keyed(&behind), 1), named, "it is behind by more than half of the prompt");
    }
}

#[test]
fn the_longest_prefix_wins_unless_its_replica_is_behind_by_more_than_it_saves() {
    let mut chooser = chooser(3);
    assert_eq!(best(&mut chooser, &prompt(1000, &[0, 600, 200], &[0.0, 799.0, 0.0]), 3), [1, 2, 0]);
    assert_eq!(best(&mut chooser, &prompt(1000, &[0, 600, 200], &[0.0, 801.0, 0.0]), 3), [2, 1, 0]);
}

#[test]
fn prompts_without_hits_go_round() {
    let mut chooser = chooser(8);
    let mut given = [0; 8];
    for _ in 0..80 {
        let replica = best(&mut chooser, &prompt(100, &[0; 8], &[0.0; 8]), 1)[0];
        note(&mut chooser, replica, 100);
        given[replica] += 1;
    }
    assert_eq!(given, [10; 8]);
}

#[test]
fn equal_replicas_are_drawn_by_the_seed() {
    let first = |seed| {
        let mut chooser = Chooser::new(WEIGHTS, seed).expect("sound weights");
        (0..16).for_each(|replica| chooser.add_replica(ReplicaId(replica), &replica.to_string()));
        best(&mut chooser, &prompt(1, &[0; 16], &[0.0; 16]), 16)
    };
    assert_eq!(first(3), first(3));
    assert_ne!(first(3), first(4));
}

#[test]
fn a_prefix_in_high_demand_comes_to_a_second_replica() {
    let mut chooser = chooser_with(Weights::default(), 4);
    let mut cached = [0; 4];
    let mut given = [0; 4];
    for _ in 0..2000 {
        let replica = best(&mut chooser, &prompt(350, &cached, &[0.0; 4]), 1)[0];
        note(&mut chooser, replica, 350 - cached[replica] as usize);
        cached[replica] = 300;
        given[replica] += 1;
    }
    assert!(given.iter().all(|&count| count > 60), "{given:?}");
    assert_eq!(cached, [300; 4]);
}

#[test]
fn a_little_more_work_is_no_reason_to_compute_a_prefix_again() {
    let mut chooser = chooser_with(Weights::default(), 3);
    note(&mut chooser, 1, 4000);
    let hits = [0, 600, 0];
    assert_eq!(best(&mut chooser, &prompt(601, &hits, &[0.0; 3]), 1), [1]);
    note(&mut chooser, 1, 4000);
    assert_eq!(best(&mut chooser, &prompt(601, &hits, &[0.0; 3]), 3)[2], 1);
}

#[test]
fn who_joins_late_begins_with_the_mean() {
    let mut chooser = chooser(2);
    (0..100).for_each(|turn| note(&mut chooser, turn % 2, 90));
    chooser.add_replica(ReplicaId(2), "late");
    let others = [0, 1].map(|replica| recent_tokens(&chooser, replica));
    assert!((recent_tokens(&chooser, 2) - (others[0] + others[1]) / 2.0).abs() < 1e-6);
    chooser.remove_replica(ReplicaId(0));
    assert_eq!(best(&mut chooser, &prompt(9, &[0; 3], &[0.0; 3]), 9).len(), 2);
}

#[test]
fn much_work_does_not_lose_the_count() {
    let mut chooser = chooser(2);
    for _ in 0..100_000 {
        note(&mut chooser, 0, 1_000_000);
        note(&mut chooser, 1, 1_000_000);
    }
    let recent = [0, 1].map(|replica| recent_tokens(&chooser, replica));
    assert!(recent.iter().all(|tokens| tokens.is_finite()), "{recent:?}");
}
