//! Random requests to a cache over each pool: the plain pool and both lock-free ones answer alike.
//!
//! The plain pool counts hits block by block; the single writer's finds them by bisection, and its reader of events
//! knows at every moment what can be found under no salt.

use std::time::Duration;

use prefixcache_core::cache::PrefixCache;
use prefixcache_core::groups::{GroupSpec, Groups};
use prefixcache_core::hash::{HashConfig, Scope};
use prefixcache_core::hints::{Hint, Hints, Owner};
use prefixcache_core::id::BlockId;
use prefixcache_core::pool::{Shared, SingleWriter, Writer};
use prefixcache_core::retention::RetentionTable;
use prefixcache_core::sequence::Sequence;
use prefixcache_core::sequence::retention::{Pins, Retention};
use prefixcache_core::store::{BlockStore, Lookup, Moves, PoolConfig};
use prefixcache_core::weights::WeightsName;
use prefixcache_oracle::plain::PlainPool;
use prefixcache_oracle::plain_retention::{Hinting, PlainRetention};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::follower::Follower;
use crate::{Order, cases, fill, orders};

const MAX_BLOCKS: usize = 32;
const BLOCK_SIZE: usize = 2;

/// What a request may do. The numbers choose among what there is.
#[derive(Clone, Debug)]
enum Step {
    /// The tokens that are computed and published are behind the window, where there is one.
    Drop {
        which: usize,
    },
    /// A request whose windows get slots for one chunk at a time, to its end.
    Chunks {
        base: u32,
        len: usize,
        chunk: usize,
    },
    Retain {
        which: usize,
        interval: usize,
        anchor: usize,
        pins: bool,
    },
    /// Some requests with one prompt at once: each takes its hits, and all compute the rest.
    Serve {
        base: u32,
        len: usize,
        copies: usize,
        salted: bool,
    },
    Append {
        which: usize,
        count: usize,
    },
    Fill {
        which: usize,
    },
    Finish {
        which: usize,
    },
    Clear,
    NewWeights {
        name: Option<bool>,
    },
    Pin {
        which: usize,
        tokens: usize,
    },
    Unpin {
        which: usize,
    },
    Demote {
        count: usize,
    },
    Resize {
        num_blocks: usize,
    },
    /// A request's next release leaves this behind.
    Hint {
        which: usize,
        owner: u8,
        cuts: [usize; 3],
        priorities: [u8; 2],
        ttl: Option<u64>,
    },
    /// Time passes, and hints whose time is over are demoted.
    Expire {
        seconds: u64,
        most: usize,
    },
    /// One slice of a shrink that keeps what is worth most; nothing while one is in flight.
    BeginMoves {
        num_blocks: usize,
        most: usize,
    },
    EndMoves {
        finish: bool,
    },
    /// All slices, and the resize if nothing above is held. Or a resize to a greater size.
    Shrink {
        num_blocks: usize,
    },
    ReleaseCached {
        count: usize,
    },
    Bound {
        blocks: Option<usize>,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let which = 0..8_usize;
    prop_oneof![
        8 => (0..2_u32, 1..40_usize, 1..3_usize, proptest::bool::weighted(0.2))
            .prop_map(|(base, len, copies, salted)| Step::Serve { base, len, copies, salted }),
        3 => (which.clone(), 1..5_usize).prop_map(|(which, count)| Step::Append { which, count }),
        3 => which.clone().prop_map(|which| Step::Fill { which }),
        6 => which.clone().prop_map(|which| Step::Finish { which }),
        1 => Just(Step::Clear),
        1 => any::<Option<bool>>().prop_map(|name| Step::NewWeights { name }),
        4 => which.clone().prop_map(|which| Step::Drop { which }),
        3 => (0..2_u32, 1..40_usize, 1..9_usize)
            .prop_map(|(base, len, chunk)| Step::Chunks { base, len, chunk }),
        3 => (which.clone(), 0..9_usize, 0..40_usize, any::<bool>())
            .prop_map(|(which, interval, anchor, pins)| Step::Retain { which, interval, anchor, pins }),
        2 => (which.clone(), 0..40_usize).prop_map(|(which, tokens)| Step::Pin { which, tokens }),
        1 => which.prop_map(|which| Step::Unpin { which }),
        1 => (0..4_usize).prop_map(|count| Step::Demote { count }),
        1 => (2..=MAX_BLOCKS).prop_map(|num_blocks| Step::Resize { num_blocks }),
        4 => (0..8_usize, 0..6_u8, [0..30_usize, 1..20_usize, 1..20_usize], [0..=100_u8, 0..=100_u8],
              proptest::option::of(1..20_u64))
            .prop_map(|(which, owner, cuts, priorities, ttl)| Step::Hint {
                which, owner, cuts, priorities, ttl,
            }),
        2 => (0..10_u64, 0..12_usize).prop_map(|(seconds, most)| Step::Expire { seconds, most }),
        1 => (2..=MAX_BLOCKS, 0..4_usize)
            .prop_map(|(num_blocks, most)| Step::BeginMoves { num_blocks, most }),
        1 => any::<bool>().prop_map(|finish| Step::EndMoves { finish }),
        2 => (2..=MAX_BLOCKS).prop_map(|num_blocks| Step::Shrink { num_blocks }),
        1 => (0..4_usize).prop_map(|count| Step::ReleaseCached { count }),
        1 => proptest::option::of(0..MAX_BLOCKS).prop_map(|blocks| Step::Bound { blocks }),
    ]
}

/// Steps that do not end the order in which content is lost: all but unpins and resizes by ids.
fn in_order(step: &Step) -> bool {
    !matches!(step, Step::Unpin { .. } | Step::Resize { .. })
}

struct Driver<S, H> {
    cache: PrefixCache<S>,
    table: H,
    live: Vec<Sequence>,
    /// Milliseconds.
    time: u64,
    moves: Moves,
    follower: Option<Follower>,
    /// Everything that was answered.
    answers: Vec<String>,
}

impl<S: BlockStore, H: Hinting> Driver<S, H> {
    fn new(groups: &Groups, store: S, table: H) -> Self {
        let hashing = HashConfig::new(BLOCK_SIZE, groups.clone());
        Self {
            cache: PrefixCache::new(hashing, store).unwrap(),
            table,
            live: Vec::new(),
            time: 0,
            moves: Moves::default(),
            follower: None,
            answers: Vec::new(),
        }
    }

    fn answer(&mut self, what: impl std::fmt::Debug) {
        self.answers.push(format!("{what:?}"));
    }

    fn step(&mut self, step: &Step) {
        self.pass(300);
        match *step {
            Step::Serve { base, len, copies, salted } => self.serve(base, len, copies, salted),
            Step::Chunks { base, len, chunk } => self.serve_in_chunks(base, len, chunk),
            Step::Clear => self.cache.clear_cache_index(),
            Step::NewWeights { name } => {
                let name = name.map(|name| WeightsName::new(&format!("tag:{name}")).unwrap());
                let version = self.cache.new_weight_version(name);
                self.answer(version);
            }
            Step::Demote { count } => {
                let moved = self.cache.demote(count);
                self.answer(moved);
            }
            Step::Resize { num_blocks } => {
                let busy = self.cache.resize(num_blocks);
                self.answer(busy);
            }
            Step::Expire { seconds, most } => {
                self.pass(1000 * seconds);
                let moved = self.table.demote_expired(self.cache.store_mut(), most);
                self.answer(moved);
            }
            Step::BeginMoves { num_blocks, most } => self.begin_moves(num_blocks, most),
            Step::EndMoves { finish: true } => self.finish_moves(),
            Step::EndMoves { finish: false } => self.cache.abort_moves(&mut self.moves).unwrap(),
            Step::Shrink { num_blocks } => self.shrink(num_blocks),
            Step::ReleaseCached { count } => {
                let released = self.cache.release_cached(count);
                self.answer(released);
            }
            Step::Bound { blocks } => self.cache.set_max_cached(blocks),
            Step::Hint { which, .. }
            | Step::Append { which, .. }
            | Step::Fill { which }
            | Step::Finish { which }
            | Step::Drop { which }
            | Step::Retain { which, .. }
            | Step::Pin { which, .. }
            | Step::Unpin { which } => {
                if !self.live.is_empty() {
                    let sequence = self.live.swap_remove(which % self.live.len());
                    self.step_of(step, sequence);
                }
            }
        }
        self.look();
    }

    fn pass(&mut self, millis: u64) {
        self.time += millis;
        let now = Duration::from_millis(self.time);
        self.cache.store_mut().set_time(now);
    }

    fn begin_moves(&mut self, num_blocks: usize, most: usize) {
        let outcome = self.cache.begin_moves(num_blocks, most, &mut self.moves);
        let in_flight = self.moves.in_flight.clone();
        self.answer((outcome, in_flight));
    }

    fn finish_moves(&mut self) {
        let moved = self.cache.finish_moves(&mut self.moves);
        self.answer(moved);
    }

    fn shrink(&mut self, num_blocks: usize) {
        self.finish_moves();
        if num_blocks < self.cache.store().num_blocks() {
            self.begin_moves(num_blocks, 3);
            while !self.moves.in_flight.is_empty() {
                self.finish_moves();
                self.begin_moves(num_blocks, 3);
            }
            if self.cache.store().stats().held_above > 0 {
                return;
            }
        }
        let held = self.cache.resize(num_blocks);
        self.answer(held);
    }

    fn serve(&mut self, base: u32, len: usize, copies: usize, salted: bool) {
        let tokens: Vec<u32> = (0..len as u32).map(|token| token * base).collect();
        let scope = Scope { lora: None, cache_salt: salted.then(|| "salt".to_owned()) };
        for _ in 0..copies {
            let mut sequence = self.cache.new_sequence(tokens.clone(), scope.clone(), vec![]);
            let hits = self.cache.count_prefix_hits(&mut sequence).unwrap();
            let plan = self.cache.commit_prefix_plan(&mut sequence, hits, len - hits + 1);
            self.answer((hits, &plan));
            if plan.unwrap().is_some() {
                self.table.note_hits(self.cache.store_mut(), &sequence);
                self.live.push(sequence);
            }
        }
    }

    fn serve_in_chunks(&mut self, base: u32, len: usize, chunk: usize) {
        let tokens: Vec<u32> = (0..len as u32).map(|token| token * base).collect();
        let mut sequence = self.cache.new_sequence(tokens, Scope::default(), vec![]);
        sequence.set_retention(retention(0, true));
        sequence.add_anchor(len - 1);
        let most = len - 1;
        let hits = self.cache.count_prefix_hits_within(&mut sequence, most).unwrap();
        let rest = len - hits;
        let plan = self.cache.commit_in_chunks(&mut sequence, hits, rest, chunk);
        self.answer((hits, &plan));
        let Ok(Some(mut computed)) = plan else { return };
        self.table.note_hits(self.cache.store_mut(), &sequence);
        while computed < len {
            let upto = len.min(computed + chunk);
            let batch = &mut [&mut sequence];
            let dropped = self.cache.drop_unneeded(batch, &[computed]);
            let served = self.cache.ensure_slots(batch, &[upto]);
            if served != Ok(1) {
                break;
            }
            let kept = self.cache.keep_snapshots(batch, &[computed]);
            let duplicates = self.cache.mark_blocks_filled(batch, &[upto]);
            let held = (0..batch[0].num_groups()).map(|group| {
                let table = batch[0].block_table(group);
                table.iter().filter(|block| !block.is_null()).count()
            });
            let held: usize = held.sum();
            let most = self.cache.most_blocks(len, chunk);
            let snapshots = kept.clone().unwrap() * batch[0].num_groups();
            assert!(held <= most + snapshots, "{held} blocks are held, {most} were promised");
            computed = upto;
            self.answer((dropped, kept, duplicates));
        }
        self.live.push(sequence);
    }

    fn step_of(&mut self, step: &Step, mut sequence: Sequence) {
        match *step {
            Step::Append { count, .. } => {
                let served = self.cache.append_slots(&mut [&mut sequence], &[count]);
                self.cache.append_tokens(&mut [&mut sequence], &[7]).unwrap();
                self.answer(served);
            }
            Step::Pin { tokens, .. } => {
                let pinned = self.cache.pin(&mut sequence, tokens);
                self.answer(pinned);
            }
            Step::Unpin { .. } => {
                let unpinned = self.cache.unpin(&mut sequence);
                self.answer(unpinned);
            }
            Step::Drop { .. } => {
                let upto = sequence.num_filled();
                let dropped = self.cache.drop_unneeded(&mut [&mut sequence], &[upto]);
                self.answer(dropped);
            }
            Step::Retain { interval, anchor, pins, .. } => {
                sequence.set_retention(retention(interval, pins));
                sequence.add_anchor(anchor);
            }
            Step::Finish { .. } => {
                self.fill(&mut sequence);
                let pinned = self.cache.pin_anchors(&[&mut sequence]);
                self.answer(pinned);
                self.table.keep(self.cache.store_mut(), &sequence);
                self.cache.release(&mut [&mut sequence]).unwrap();
                return;
            }
            Step::Hint { owner, cuts, priorities, ttl, .. } => {
                sequence.set_hints(hints(owner, cuts, priorities, ttl))
            }
            _ => self.fill(&mut sequence),
        }
        self.live.push(sequence);
    }

    fn fill(&mut self, sequence: &mut Sequence) {
        let upto = sequence.num_ready_slots().min(sequence.num_tokens());
        let duplicates = self.cache.mark_blocks_filled(&mut [sequence], &[upto]);
        self.answer(duplicates);
    }

    /// How much of each prompt hits, by whatever way the cache counts.
    fn count_prefixes(&self) -> [usize; 2] {
        let tokens = |base: u32| (0..40).map(|token| token * base).collect::<Vec<u32>>();
        let hashes =
            |base| self.cache.compute_block_hashes(&tokens(base), &Scope::default(), vec![]);
        [0, 1].map(|base| self.cache.probe(&hashes(base)))
    }

    /// Everything that can be seen, and that it is sound.
    fn look(&mut self) {
        self.cache.validate().unwrap();
        let live: Vec<&Sequence> = self.live.iter().collect();
        self.cache.validate_holds(&live, &self.moves).unwrap();
        let prefixes = self.count_prefixes();
        self.answer(prefixes);
        let tables: Vec<Vec<BlockId>> = self
            .live
            .iter()
            .flat_map(|one| (0..one.num_groups()).map(|group| one.block_table(group).to_vec()))
            .collect();
        let store = self.cache.store();
        let seen = (
            store.free_order(),
            store.cached_blocks(),
            store.stats(),
            (self.cache.stats(), self.table.stats()),
            tables,
        );
        self.answer(seen);
        if let Some(follower) = &mut self.follower {
            follower.check(&self.cache, &self.live);
        }
    }
}

/// Two ranges with a gap between them, of which the second may have no end.
fn hints(owner: u8, cuts: [usize; 3], priorities: [u8; 2], ttl: Option<u64>) -> Hints {
    let [start, len, gap] = cuts;
    let first = Hint {
        start,
        end: Some(start + len),
        priority: priorities[0],
        ttl: ttl.map(Duration::from_secs),
    };
    let second = Hint {
        start: start + len + gap - 1,
        end: (gap % 3 > 0).then_some(start + len + gap + 6),
        priority: priorities[1],
        ttl: ttl.filter(|ttl| ttl % 2 == 0).map(|ttl| Duration::from_millis(700 * ttl)),
    };
    let ranges = if gap % 4 == 0 { vec![first] } else { vec![first, second] };
    Hints::new(Owner::named(&owner.to_string()), ranges).unwrap()
}

/// Of the pool's blocks for each owner: seven at most.
const SHARE: f64 = 0.25;

fn answers<S: BlockStore>(
    groups: &Groups,
    store: S,
    table: impl Hinting,
    steps: &[Step],
) -> Vec<String> {
    run(Driver::new(groups, store, table), steps)
}

fn run<S: BlockStore>(mut driver: Driver<S, impl Hinting>, steps: &[Step]) -> Vec<String> {
    steps.iter().for_each(|step| driver.step(step));
    driver.answers
}

fn check(groups: &Groups, order: Order, steps: &[Step]) -> Result<(), TestCaseError> {
    let config = PoolConfig::new(MAX_BLOCKS * 3 / 4)
        .with_max_blocks(MAX_BLOCKS)
        .with_free_order(order.0)
        .with_eviction_policy(order.1);
    let plain_table = PlainRetention::new(groups.clone(), BLOCK_SIZE, SHARE);
    let plain = answers(groups, PlainPool::new(config).unwrap(), plain_table, steps);
    let table = || RetentionTable::new(SHARE).unwrap();
    let mut single = Writer::<SingleWriter>::with_ring_capacity(config, 128).unwrap();
    let reader = single.keep_events(BLOCK_SIZE).unwrap();
    let mut single = Driver::new(groups, single, table());
    single.follower = Some(Follower::new(reader, BLOCK_SIZE));
    same(&plain, &run(single, steps))?;
    let shared = Writer::<Shared>::with_ring_capacity(config, 128).unwrap();
    same(&plain, &answers(groups, shared, table(), steps))
}

/// Shows the first answers that differ.
fn same(plain: &[String], other: &[String]) -> Result<(), TestCaseError> {
    plain.iter().zip(other).enumerate().try_for_each(|(number, (plain, other))| {
        prop_assert_eq!(plain, other, "answer {}", number);
        Ok(())
    })
}

fn retention(interval: usize, pins: bool) -> Retention {
    let pins = pins.then_some(Pins::new(2, interval.is_multiple_of(2)));
    Retention::Anchors { interval, pins }
}

fn groups() -> impl Strategy<Value = Groups> {
    let window = (1..14_usize).prop_map(|window| GroupSpec::SlidingWindow { window });
    let spec = prop_oneof![Just(GroupSpec::FullAttention), window, Just(GroupSpec::State)];
    vec(spec, 1..4).prop_map(|specs| Groups::new(specs).unwrap())
}

proptest! {
    #![proptest_config(cases(128))]

    #[test]
    fn all_pools_answer_alike(groups in groups(), order in orders(), steps in vec(step(), 1..80)) {
        check(&groups, order, &steps)?;
    }

    #[test]
    fn bisection_finds_what_counting_finds(
        order in orders(),
        steps in vec(step().prop_filter("in order", in_order), 1..200),
    ) {
        check(&Groups::full(1).unwrap(), order, &steps)?;
    }
}

const PROMPT: [u32; 6] = [1, 2, 3, 4, 5, 6];

type SmallCache = PrefixCache<Writer>;

fn small_cache() -> SmallCache {
    Driver::new(
        &Groups::full(1).unwrap(),
        Writer::new(PoolConfig::new(7)).unwrap(),
        RetentionTable::new(SHARE).unwrap(),
    )
    .cache
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
    let mut head = cache.new_sequence(PROMPT[..BLOCK_SIZE].to_vec(), Scope::default(), vec![]);
    assert_eq!(cache.unpin(&mut head).unwrap(), 1);
    commit(&mut cache, &[9; 4 * BLOCK_SIZE]);
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
    assert_eq!(moves.in_flight.len(), 1);
    assert_eq!(cache.finish_moves(&mut moves), Ok(1));
    assert_eq!(cache.resize(3), Ok(0));
    assert!(bisects(&mut cache));
    assert_eq!(cache.count_prefix_hits(&mut whole).unwrap(), 2 * BLOCK_SIZE);
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
