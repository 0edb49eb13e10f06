//! The index against a plain map from blocks to replicas.

use std::collections::{BTreeMap, BTreeSet};

use prefixcache_serving::routing::index::{IndexError, MAX_REPLICAS, ReplicaIndex};
use prefixcache_serving::routing::replica::ReplicaId;
use proptest::prelude::*;

const MAX_BLOCKS: usize = 6;

/// More calls than two sweeps of all shards take, so that nothing of a cleared replica is left.
const CALLS_OF_TWO_SWEEPS: usize = 2 * 1024 + 2;

/// Blocks of one replica: cached, and expected.
type Holders = [BTreeSet<u64>; 2];

#[derive(Clone, Debug)]
enum Call {
    Add,
    RemoveReplica(u16),
    Clear(u16),
    /// Of cached blocks (0) or expected ones (1).
    Insert(u16, usize, Vec<u64>),
    Remove(u16, usize, Vec<u64>),
    Hits(Vec<u64>),
    Sweep(u16),
}

/// Replicas by number, each with its blocks in sets.
#[derive(Default)]
struct Plain(BTreeMap<u16, Holders>);

impl Plain {
    fn add(&mut self) -> u16 {
        let id = (0..).find(|id| !self.0.contains_key(id)).expect("a free number");
        self.0.insert(id, Holders::default());
        id
    }

    /// How many blocks found no room; none without such a replica.
    fn insert(&mut self, id: u16, kind: usize, hashes: &[u64]) -> Option<usize> {
        let held = &mut self.0.get_mut(&id)?[kind];
        let refused = hashes.iter().filter(|&&hash| {
            let has = held.contains(&hash) || held.len() < MAX_BLOCKS;
            if has {
                held.insert(hash);
            }
            !has
        });
        Some(refused.count())
    }

    fn hits(&self, hashes: &[u64]) -> Vec<u32> {
        let numbers = self.0.keys().last().map_or(0, |last| last + 1);
        let hits = |id| {
            self.0.get(&id).map_or(0, |[cached, expected]| {
                let has = |hash: &&u64| cached.contains(hash) || expected.contains(hash);
                hashes.iter().take_while(has).count() as u32
            })
        };
        (0..numbers).map(hits).collect()
    }

    /// For each block, who holds it in which way.
    fn holders(&self) -> BTreeMap<u64, BTreeSet<(u16, usize)>> {
        let mut holders: BTreeMap<u64, BTreeSet<(u16, usize)>> = BTreeMap::new();
        for (&id, kinds) in &self.0 {
            for (kind, held) in kinds.iter().enumerate() {
                for &hash in held {
                    holders.entry(hash).or_default().insert((id, kind));
                }
            }
        }
        holders
    }
}

fn hits(index: &ReplicaIndex, hashes: &[u64]) -> Vec<u32> {
    let mut hits = vec![7; 3];
    index.hits(hashes, &mut hits);
    hits
}

/// Makes a call to both, and compares what they answer.
fn call(index: &mut ReplicaIndex, plain: &mut Plain, call: Call) {
    match call {
        Call::Add => assert_eq!(index.add_replica(), Ok(ReplicaId(plain.add()))),
        Call::RemoveReplica(id) => {
            let removed = index.remove_replica(ReplicaId(id)).is_ok();
            assert_eq!(removed, plain.0.remove(&id).is_some());
        }
        Call::Clear(id) => {
            let cleared = index.clear(ReplicaId(id)).is_ok();
            assert_eq!(cleared, plain.0.contains_key(&id));
            plain.0.entry(id).and_modify(|held| *held = Holders::default());
        }
        Call::Insert(id, kind, hashes) => {
            let refused = match kind {
                0 => index.stored(ReplicaId(id), &hashes),
                _ => index.expected(ReplicaId(id), &hashes),
            };
            assert_eq!(refused.ok(), plain.insert(id, kind, &hashes));
        }
        Call::Remove(id, kind, hashes) => {
            let removed = match kind {
                0 => index.removed(ReplicaId(id), &hashes),
                _ => index.settled(ReplicaId(id), &hashes),
            };
            assert_eq!(removed.is_ok(), plain.0.contains_key(&id));
            if let Some(held) = plain.0.get_mut(&id) {
                held[kind].retain(|hash| !hashes.contains(hash));
            }
        }
        Call::Hits(hashes) => assert_eq!(hits(index, &hashes), plain.hits(&hashes)),
        Call::Sweep(calls) => sweep(index, plain, calls.into()),
    }
}

fn sweep(index: &mut ReplicaIndex, plain: &Plain, calls: usize) {
    if let Some(&id) = plain.0.keys().next() {
        for _ in 0..calls {
            index.removed(ReplicaId(id), &[]).expect("a replica that is there");
        }
    }
}

/// Nothing is left in memory but what the plain one holds.
fn check_memory(index: &mut ReplicaIndex, plain: &Plain) {
    for (&id, [cached, _]) in &plain.0 {
        assert_eq!(index.num_cached(ReplicaId(id)), Ok(cached.len()));
    }
    assert_eq!(index.num_ids(), plain.hits(&[]).len());
    if plain.0.is_empty() {
        return;
    }
    sweep(index, plain, CALLS_OF_TWO_SWEEPS);
    let holders = plain.holders();
    assert_eq!(index.num_blocks(), holders.len());
    let sets: BTreeSet<_> = holders.values().collect();
    assert_eq!(index.num_sets(), sets.len());
}

/// A few prompts that begin alike, so that hits are long and partial.
fn hashes() -> impl Strategy<Value = Vec<u64>> {
    let path = (0_u64..9, 0..3_u64).prop_map(|(length, branch)| {
        let block = |depth| {
            if depth < 3 { depth } else { depth + 100 * branch }
        };
        (0..length).map(block).collect::<Vec<_>>()
    });
    prop_oneof![3 => path, 1 => prop::collection::vec(0_u64..9, 0..5)]
}

fn one_call() -> impl Strategy<Value = Call> {
    let id = 0_u16..5;
    prop_oneof![
        1 => Just(Call::Add),
        1 => id.clone().prop_map(Call::RemoveReplica),
        1 => id.clone().prop_map(Call::Clear),
        8 => (id.clone(), 0..2_usize, hashes()).prop_map(|(id, kind, on)| Call::Insert(id, kind, on)),
        4 => (id, 0..2_usize, hashes()).prop_map(|(id, kind, on)| Call::Remove(id, kind, on)),
        4 => hashes().prop_map(Call::Hits),
        1 => (0_u16..1500).prop_map(Call::Sweep),
    ]
}

proptest! {
    #[test]
    fn the_index_knows_what_a_plain_map_knows(calls in prop::collection::vec(one_call(), 0..60)) {
        let (mut index, mut plain) = (ReplicaIndex::new(MAX_BLOCKS), Plain::default());
        for _ in 0..3 {
            call(&mut index, &mut plain, Call::Add);
        }
        for one in calls {
            call(&mut index, &mut plain, one);
            let all: Vec<u64> = (0..9).collect();
            assert_eq!(hits(&index, &all), plain.hits(&all));
        }
        check_memory(&mut index, &plain);
    }
}

#[test]
fn a_replica_that_is_cleared_again_and_again_takes_no_memory() {
    let mut index = ReplicaIndex::new(1 << 12);
    let id = index.add_replica().expect("room");
    let blocks: Vec<u64> = (0..4096).collect();
    let mut most = 0;
    for _ in 0..200 {
        index.stored(id, &blocks).expect("a replica");
        index.clear(id).expect("a replica");
        most = most.max(index.num_sets());
    }
    // The same blocks each time: only their sets could pile up.
    assert!(index.num_blocks() <= blocks.len());
    assert!(most < 64, "{most} sets");
}

#[test]
fn slots_of_cleared_replicas_come_back() {
    let mut index = ReplicaIndex::new(1);
    let ids: Vec<_> = (0..4).map(|_| index.add_replica().expect("room")).collect();
    for round in 0..40_000 {
        index.clear(ids[round % 4]).expect("a replica");
    }
    assert_eq!(index.stored(ids[0], &[1]), Ok(0));
    assert_eq!(hits(&index, &[1]), [1, 0, 0, 0]);
}

#[test]
fn the_number_of_replicas_is_bounded() {
    let mut index = ReplicaIndex::new(1);
    for number in 0..MAX_REPLICAS {
        assert_eq!(index.add_replica(), Ok(ReplicaId(number as u16)));
    }
    assert_eq!(index.add_replica(), Err(IndexError::TooMany));
    index.remove_replica(ReplicaId(7)).expect("a replica");
    assert_eq!(index.add_replica(), Ok(ReplicaId(7)));
}
