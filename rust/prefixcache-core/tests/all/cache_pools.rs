//! Random requests to a cache over each pool: the plain pool and both that ship answer alike.
//!
//! The plain pool counts hits block by block; the single writer's finds them by bisection, and its reader of events
//! knows at every moment what can be found under no salt.

use std::collections::HashSet;

use prefixcache_core::cache::PrefixCache;
use prefixcache_core::groups::{GroupSpec, Groups};
use prefixcache_core::hash::{HashConfig, Scope};
use prefixcache_core::id::BlockId;
use prefixcache_core::pool::{MultiWriter, Writer};
use prefixcache_core::sequence::Sequence;
use prefixcache_core::store::{BlockStore, Lookup, Moves, PoolConfig};
use prefixcache_oracle::cache_calls::{
    BLOCK_SIZE, Call, FINISH, KEEP_SNAPSHOTS, NEW_WEIGHTS, ROOM, SERVE, SERVE_IN_CHUNKS, SHRINK,
    assert_same_as_plain, ends_order,
};
use prefixcache_oracle::pools::Tested;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::follower::Follower;
use crate::{Order, cases, fill, orders};

/// Calls without extras, of which the reader of events knows nothing. Some bits of the second byte are as given.
fn call_of(what: impl Strategy<Value = u8>, bits: u8, set: u8) -> impl Strategy<Value = Call> {
    let all = (what, 0..0xe0_u8, any::<u8>());
    all.prop_map(move |(what, a, b)| [what, a & !bits | set, b])
}

fn call() -> impl Strategy<Value = Call> {
    let whole = |what| call_of(Just(what), 0, 0);
    let [hint, expire] = [call_of(Just(9), 12, 4), call_of(Just(9), 12, 12)];
    let [begin_moves, end_moves] = [call_of(Just(8), 3, 1), call_of(Just(8), 3, 2)];
    prop_oneof![
        8 => whole(SERVE),
        4 => whole(SERVE_IN_CHUNKS),
        8 => whole(FINISH),
        2 => whole(SHRINK),
        1 => whole(NEW_WEIGHTS),
        1 => whole(KEEP_SNAPSHOTS),
        5 => hint,
        3 => expire,
        1 => begin_moves,
        1 => end_moves,
        20 => call_of(0..SERVE, 0, 0),
    ]
}

fn check(groups: &Groups, order: Order, calls: &[Call]) {
    let config = PoolConfig::new(24)
        .with_max_blocks(24 + ROOM)
        .with_free_order(order.0)
        .with_eviction_policy(order.1);
    let mut single = Writer::new(config).unwrap();
    let reader = single.keep_events(BLOCK_SIZE).unwrap();
    let mut follower = Follower::new(reader, BLOCK_SIZE);
    assert_same_as_plain(groups, config, single, calls, |cache, live| follower.check(cache, live));
    let shared = MultiWriter::build(config);
    assert_same_as_plain(groups, config, shared, calls, |_, _| {});
}

fn groups() -> impl Strategy<Value = Groups> {
    let window = (1..14_usize).prop_map(|window| GroupSpec::SlidingWindow { window });
    let spec = prop_oneof![Just(GroupSpec::FullAttention), window, Just(GroupSpec::State)];
    vec(spec, 1..4).prop_map(|specs| Groups::new(specs).unwrap())
}

proptest! {
    #![proptest_config(cases(128))]

    #[test]
    fn all_pools_answer_alike(groups in groups(), order in orders(), calls in vec(call(), 1..80)) {
        check(&groups, order, &calls);
    }

    #[test]
    fn bisection_finds_what_counting_finds(
        order in orders(),
        calls in vec(call().prop_filter("in order", |&call| !ends_order(call)), 1..200),
    ) {
        check(&Groups::full(1).unwrap(), order, &calls);
    }
}

/// Blocks of a pool for [`Life`], but for the null block.
const LIFE_BLOCKS: usize = 30;

/// A call of one who plans with counts while sequences are dropped elsewhere.
#[derive(Clone, Copy, Debug)]
enum Life {
    /// Counts, maybe looks at the free blocks, and commits what was counted: a prompt of a run of tokens.
    Serve {
        first: u32,
        tokens: usize,
        looks: bool,
    },
    /// Another thread drops one of the sequences.
    Drop(usize),
    Release(usize),
    Grow(usize),
    Pin(usize),
    GiveUp(usize),
}

fn life() -> impl Strategy<Value = Life> {
    let serve = (0..4_u32, 1..40_usize, any::<bool>());
    prop_oneof![
        4 => serve.prop_map(|(first, tokens, looks)| Life::Serve { first, tokens, looks }),
        2 => (0..8_usize).prop_map(Life::Drop),
        1 => (0..8_usize).prop_map(Life::Release),
        1 => (0..8_usize).prop_map(Life::Grow),
        1 => (0..8_usize).prop_map(Life::Pin),
        1 => (0..4_usize).prop_map(Life::GiveUp),
    ]
}

struct Planner {
    cache: PrefixCache<Writer>,
    live: Vec<Sequence>,
    bound: usize,
}

impl Planner {
    fn held(&self) -> HashSet<BlockId> {
        let groups = 0..usize::from(self.cache.num_groups());
        let tables =
            groups.flat_map(|group| self.live.iter().map(move |held| held.block_table(group)));
        tables.flatten().copied().filter(|block| !block.is_null()).collect()
    }

    fn free(&self) -> usize {
        LIFE_BLOCKS - self.held().len()
    }

    fn check_bound(&self) {
        let held = self.held();
        let cached = self.cache.store().cached_blocks();
        let free = cached.iter().filter(|block| !held.contains(block)).count();
        assert!(free <= self.bound, "{free} free blocks are cached, {} may be", self.bound);
    }

    fn serve(&mut self, first: u32, tokens: usize, looks: bool) {
        let tokens: Vec<u32> = (0..tokens as u32).map(|place| place.max(8) * first).collect();
        let mut sequence = self.cache.new_sequence(tokens, Scope::default(), vec![]);
        let counted = self.cache.count_prefix_hits(&mut sequence).unwrap();
        if looks {
            assert_eq!(self.cache.num_free(), self.free(), "blocks that nobody holds");
        }
        let rest = sequence.num_tokens() - counted + 1;
        let most = self.cache.most_blocks(counted + rest, rest);
        match self.cache.commit_prefix_plan(&mut sequence, counted, rest).unwrap() {
            Some(taken) => assert_eq!(taken, counted, "the hits that were counted"),
            None => assert!(self.free() < most, "blocks are lacking"),
        }
        if sequence.is_committed() {
            fill(&mut self.cache, &mut sequence);
            self.live.push(sequence);
        }
        self.check_bound();
    }

    fn call(&mut self, life: Life) {
        let at = |number: usize| number.checked_rem(self.live.len());
        match life {
            Life::Serve { first, tokens, looks } => self.serve(first, tokens, looks),
            Life::Drop(number) => {
                if let Some(at) = at(number) {
                    let dropped = self.live.swap_remove(at);
                    std::thread::spawn(|| drop(dropped)).join().unwrap();
                }
            }
            Life::Release(number) => {
                if let Some(at) = at(number) {
                    let mut released = self.live.swap_remove(at);
                    self.cache.release(&mut [&mut released]).unwrap();
                }
            }
            Life::Grow(number) => {
                if let Some(at) = at(number) {
                    self.cache.append_slots(&mut [&mut self.live[at]], &[BLOCK_SIZE]).unwrap();
                }
            }
            Life::Pin(number) => {
                if let Some(at) = at(number) {
                    let tokens = self.live[at].num_tokens();
                    self.cache.pin(&mut self.live[at], tokens).unwrap();
                }
            }
            Life::GiveUp(count) => {
                let given_up = self.cache.release_cached(count);
                assert!(given_up <= count);
            }
        }
    }
}

proptest! {
    #![proptest_config(cases(128))]

    #[test]
    fn what_was_counted_is_taken_while_others_drop_sequences(
        groups in groups(),
        order in orders(),
        bound in 0..=LIFE_BLOCKS,
        calls in vec(life(), 1..60),
    ) {
        let config = PoolConfig::new(LIFE_BLOCKS + 1)
            .with_free_order(order.0)
            .with_eviction_policy(order.1);
        let pool = Writer::new(config).unwrap();
        let mut cache = PrefixCache::new(HashConfig::new(BLOCK_SIZE, groups), pool).unwrap();
        cache.set_max_cached(Some(bound));
        let mut planner = Planner { cache, live: Vec::new(), bound };
        calls.into_iter().for_each(|life| planner.call(life));
        let live: Vec<&Sequence> = planner.live.iter().collect();
        assert_eq!(planner.cache.num_free(), planner.free());
        planner.cache.validate_holds(&live, &Moves::default()).unwrap();
        planner.cache.validate().unwrap();
    }
}

#[test]
fn a_call_counts_the_blocks_of_sequences_that_were_dropped() {
    /// What a call comes to where the only sequence, of three blocks in the end of the pool, was dropped.
    type Look = fn(&mut SmallCache, &mut Sequence) -> usize;
    let calls: [(&str, Look, usize); 6] = [
        ("num_free", |cache, _| cache.num_free(), 6),
        ("pin", |cache, prompt| cache.pin(prompt, PROMPT.len()).unwrap(), 3),
        ("unpin", |cache, prompt| cache.unpin(prompt).unwrap(), 0),
        ("release_cached", |cache, _| cache.release_cached(9), 3),
        ("resize", |cache, _| cache.resize(2).unwrap(), 0),
        ("append_slots", |cache, _| cache.append_slots(&mut [], &[]).unwrap(), 0),
    ];
    for (name, call, outcome) in calls {
        let mut cache = small_cache();
        drop(commit_and_fill(&mut cache));
        let mut prompt = cache.new_sequence(PROMPT.to_vec(), Scope::default(), vec![]);
        assert_eq!(call(&mut cache, &mut prompt), outcome, "{name}");
        assert_eq!(cache.store().num_free(), cache.store().num_blocks() - 1, "{name}");
    }
}

/// Tokens in a block of the caches below.
const SMALL_SIZE: usize = 2;
const PROMPT: [u32; 6] = [1, 2, 3, 4, 5, 6];

type SmallCache = PrefixCache<Writer>;

fn small_cache() -> SmallCache {
    crate::cache(PoolConfig::new(7), SMALL_SIZE)
}

fn commit(cache: &mut SmallCache, tokens: &[u32]) -> Sequence {
    let mut sequence = cache.new_sequence(tokens.to_vec(), Scope::default(), vec![]);
    let plan = cache.commit_prefix_plan(&mut sequence, 0, tokens.len());
    assert_eq!(plan.unwrap(), Some(0));
    sequence
}

/// A sequence of three blocks of its own, published and held.
fn commit_and_fill(cache: &mut SmallCache) -> Sequence {
    let mut sequence = commit(cache, &PROMPT);
    fill(cache, &mut sequence);
    sequence
}

/// A released sequence of three cached blocks.
fn cached(cache: &mut SmallCache) -> Sequence {
    let mut sequence = commit_and_fill(cache);
    cache.release(&mut [&mut sequence]).unwrap();
    assert_eq!(cache.count_prefix_hits(&mut sequence).unwrap(), PROMPT.len());
    sequence
}

#[test]
fn a_head_that_loses_its_pin_is_missed_though_its_tail_stays() {
    let mut cache = small_cache();
    let mut whole = cached(&mut cache);
    assert_eq!(cache.pin(&mut whole, PROMPT.len()).unwrap(), 3);
    let mut head = cache.new_sequence(PROMPT[..SMALL_SIZE].to_vec(), Scope::default(), vec![]);
    assert_eq!(cache.unpin(&mut head).unwrap(), 1);
    commit(&mut cache, &[9; 4 * SMALL_SIZE]);
    assert_eq!(cache.store().cached_blocks().len(), 2);
    assert_eq!(cache.count_prefix_hits(&mut whole).unwrap(), 0);
    assert!(!bisects(&mut cache));
}

/// Hits are found by bisection as long as the pool says so.
fn bisects(cache: &mut SmallCache) -> bool {
    cache.store().evicts_in_order()
}

#[test]
fn a_pin_and_a_demotion_leave_the_bisection_on() {
    let mut cache = small_cache();
    let mut whole = cached(&mut cache);
    assert_eq!(cache.pin(&mut whole, PROMPT.len()).unwrap(), 3);
    assert_eq!(cache.demote(1), 1);
    assert_eq!(cache.resize(7), Ok(0));
    assert!(bisects(&mut cache));
}

#[test]
fn what_ends_the_bisection_ends_it_until_the_next_clear() {
    let ends: [fn(&mut SmallCache, &mut Sequence); 4] = [
        |cache, whole| assert_eq!(cache.unpin(whole).unwrap(), 3),
        // What a request holds goes before what stays in line.
        |cache, whole| {
            let hits = cache.commit_prefix_plan(whole, PROMPT.len(), 0);
            assert_eq!(hits.unwrap(), Some(PROMPT.len()));
            assert_eq!(cache.resize(3), Ok(1));
        },
        // The duplicate comes after the pin.
        |cache, _| drop(commit_and_fill(cache)),
        // The pin comes after the duplicate.
        |cache, whole| {
            assert_eq!(cache.unpin(whole).unwrap(), 3);
            cache.clear_cache_index();
            let [_held, _duplicate] = [commit_and_fill(cache), commit_and_fill(cache)];
            assert!(bisects(cache));
            assert_eq!(cache.pin(whole, PROMPT.len()).unwrap(), 3);
        },
    ];
    for end in ends {
        let mut cache = small_cache();
        let mut whole = cached(&mut cache);
        assert_eq!(cache.pin(&mut whole, PROMPT.len()).unwrap(), 3);
        assert!(bisects(&mut cache));
        end(&mut cache, &mut whole);
        assert!(!bisects(&mut cache));
        cache.clear_cache_index();
        assert!(bisects(&mut cache));
    }
}

#[test]
fn a_shrink_that_moves_leaves_the_bisection_on() {
    let mut cache = small_cache();
    let mut blank = commit(&mut cache, &PROMPT);
    cache.release(&mut [&mut blank]).unwrap();
    let mut whole = cached(&mut cache);
    let mut moves = Moves::default();
    // The head stands in the last of three blocks, and the shrunk pool has two.
    cache.begin_moves(3, 8, &mut moves).unwrap();
    assert_eq!(moves.in_flight().len(), 1);
    assert_eq!(cache.finish_moves(&mut moves), Ok(1));
    assert_eq!(cache.resize(3), Ok(0));
    assert!(bisects(&mut cache));
    assert_eq!(cache.count_prefix_hits(&mut whole).unwrap(), 2 * SMALL_SIZE);
}

#[test]
fn a_head_that_is_retired_is_missed_though_its_tail_stays() {
    let mut cache = small_cache();
    // Blank blocks come back tail first, so that the head gets the highest id.
    let mut blank = commit(&mut cache, &PROMPT);
    cache.release(&mut [&mut blank]).unwrap();
    let mut whole = cached(&mut cache);
    assert_eq!(cache.resize(3), Ok(0));
    assert_eq!(cache.store().cached_blocks().len(), 2);
    assert_eq!(cache.count_prefix_hits(&mut whole).unwrap(), 0);
    assert!(!bisects(&mut cache));
}

#[test]
fn slots_that_were_not_used_are_given_back() {
    let groups = [GroupSpec::FullAttention, GroupSpec::SlidingWindow { window: 4 }];
    let hashing = HashConfig::new(2, Groups::new(groups.to_vec()).unwrap());
    let pool = Writer::new(PoolConfig::new(40)).unwrap();
    let mut cache = PrefixCache::new(hashing, pool).unwrap();
    let mut sequence = cache.new_sequence((0..9).collect(), Scope::default(), Vec::new());
    cache.commit_prefix_plan(&mut sequence, 0, 9).unwrap();
    cache.mark_blocks_filled(&mut [&mut sequence], &[9]).unwrap();
    let (free, tables) =
        (cache.num_free(), [0, 1].map(|group| sequence.block_table(group).to_vec()));
    cache.append_slots(&mut [&mut sequence], &[12]).unwrap();
    assert_eq!(cache.num_free(), free - 12);
    assert_eq!(cache.revert_slots(&mut [&mut sequence], &[11]), Ok(10));
    assert_eq!((sequence.num_slots(), sequence.num_ready_slots()), (11, 11));
    assert!(cache.revert_slots(&mut [&mut sequence], &[8]).is_err(), "KV of nine tokens is there");
    assert_eq!(cache.revert_slots(&mut [&mut sequence], &[9]), Ok(2));
    assert_eq!([0, 1].map(|group| sequence.block_table(group).to_vec()), tables);
    assert_eq!(cache.num_free(), free);
    assert_eq!(cache.append_slots(&mut [&mut sequence], &[5]), Ok(1));
    cache.validate_holds(&[&sequence], &Moves::default()).unwrap();
    cache.validate().unwrap();
}
