//! Retention hints: what is kept, for how long, for whom, and at whose cost.

use std::time::Duration;

use prefixcache_core::band::Band;
use prefixcache_core::cache::PrefixCache;
use prefixcache_core::groups::{GroupSpec, Groups};
use prefixcache_core::hash::{HashConfig, Scope};
use prefixcache_core::hints::{Hint, Hints, Owner};
use prefixcache_core::id::{BlockKey, GroupId};
use prefixcache_core::policy::EvictionPolicy;
use prefixcache_core::pool::Writer;
use prefixcache_core::retention::{MAX_OWNERS, RetentionTable};
use prefixcache_core::sequence::retention::{Pins, Retention};
use prefixcache_core::sequence::{BlockHashes, Sequence};
use prefixcache_core::store::sealed::Inner;
use prefixcache_core::store::{BlockStore, Lookup, PoolConfig};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::fill;

const SIZE: usize = 4;

/// Blocks of a prompt.
const BLOCKS: usize = 8;

struct Served {
    cache: PrefixCache<Writer>,
    table: RetentionTable,
}

/// A prompt of its own.
fn prompt(number: u32) -> Vec<u32> {
    (0..(BLOCKS * SIZE) as u32).map(|token| number << 8 | token).collect()
}

fn hint(end: Option<usize>, priority: u8, seconds: Option<u64>) -> Hint {
    let ttl = seconds.map(Duration::from_secs);
    Hint { start: 0, end, priority, ttl }
}

impl Served {
    /// A cache of `blocks` usable blocks, of which each owner may raise `share`.
    fn new(blocks: usize, share: f64) -> Self {
        Self::with(PoolConfig::new(blocks + 1), share, Groups::full(1).unwrap())
    }

    fn with(config: PoolConfig, share: f64, groups: Groups) -> Self {
        let hashing = HashConfig::new(SIZE, groups);
        let cache = PrefixCache::new(hashing, Writer::new(config).unwrap()).unwrap();
        let mut served = Self { cache, table: RetentionTable::new(share).unwrap() };
        served.at(0);
        served
    }

    /// Sets the time, in seconds.
    fn at(&mut self, seconds: u64) {
        self.cache.inner_mut().set_time(Duration::from_secs(seconds));
    }

    fn begin(&mut self, tokens: &[u32], owner: &str, hints: &[Hint]) -> Sequence {
        let mut sequence = self.cache.new_sequence(tokens.to_vec(), Scope::default(), vec![]);
        if !hints.is_empty() {
            sequence.set_hints(Hints::new(Owner::named(owner), hints.to_vec()).unwrap());
        }
        self.commit(&mut sequence);
        sequence
    }

    fn commit(&mut self, sequence: &mut Sequence) {
        let hits = self.cache.count_prefix_hits(sequence).unwrap();
        let rest = sequence.num_tokens() - hits;
        let taken = self.cache.commit_prefix_plan(sequence, hits, rest + 1).unwrap();
        assert_eq!(taken, Some(hits), "nothing is refused");
        self.table.note_hits(self.cache.inner_mut(), sequence);
    }

    fn end(&mut self, mut sequence: Sequence) {
        self.preempt(&mut sequence);
    }

    fn preempt(&mut self, sequence: &mut Sequence) {
        fill(&mut self.cache, sequence);
        self.table.keep(self.cache.inner_mut(), sequence);
        self.cache.release(&mut [sequence]).unwrap();
        self.cache.validate().unwrap();
    }

    fn serve(&mut self, number: u32, owner: &str, hints: &[Hint]) {
        let sequence = self.begin(&prompt(number), owner, hints);
        self.end(sequence);
    }

    /// Prompts of nobody, as many as fill the pool `pools` times.
    fn fill(&mut self, pools: usize) {
        let prompts = pools * self.cache.store().num_blocks() / BLOCKS + 1;
        for number in 0..prompts {
            self.serve(1000 + number as u32, "", &[]);
            self.table.demote_expired(self.cache.inner_mut(), 16);
        }
    }

    fn hashes(&self, tokens: &[u32]) -> BlockHashes {
        self.cache.compute_block_hashes(tokens, &Scope::default(), vec![])
    }

    /// Ends the owner's hints from block `first` of the tokens on.
    fn end_hints(&mut self, tokens: &[u32], owner: &str, first: usize) -> usize {
        let hashes = self.hashes(tokens);
        let ended = hashes.as_slice().iter().skip(first).rev();
        let keys = ended.map(|&hash| BlockKey::new(hash, GroupId::new(0)));
        self.table.end_of_owner(self.cache.inner_mut(), Owner::named(owner), keys)
    }

    /// How many leading blocks of the tokens are there, looked for one by one.
    fn linear_hits(&self, tokens: &[u32]) -> usize {
        let hashes = self.hashes(tokens);
        let store = self.cache.store();
        let is_there = |hash| store.lookup(&BlockKey::new(hash, GroupId::new(0))).is_some();
        hashes.as_slice().iter().take_while(|&&hash| is_there(hash)).count()
    }

    /// The bisection must find what a linear look finds.
    fn check_counts(&self, prompts: impl IntoIterator<Item = Vec<u32>>) {
        for tokens in prompts {
            let counted = self.cache.probe(&self.hashes(&tokens)) / SIZE;
            let order = self.cache.store().free_order();
            assert_eq!(counted, self.linear_hits(&tokens), "{order:?}");
        }
    }

    /// How many blocks of a prompt hit.
    fn hits(&self, number: u32) -> usize {
        self.cache.probe(&self.hashes(&prompt(number))) / SIZE
    }
}

#[test]
fn a_hinted_prefix_outlives_ten_pools_and_goes_once_its_ttl_ends() {
    for eviction_policy in [EvictionPolicy::Lru, EvictionPolicy::ReuseQueue] {
        let config = PoolConfig::new(101).with_eviction_policy(eviction_policy);
        let mut served = Served::with(config, 0.2, Groups::full(1).unwrap());
        served.serve(1, "one", &[hint(Some(6 * SIZE), 60, Some(600))]);
        served.fill(10);
        assert_eq!(served.hits(1), 6, "the range and no more");
        // The hit starts the TTL again.
        served.at(599);
        served.serve(1, "another", &[]);
        served.at(1198);
        served.fill(2);
        assert_eq!(served.hits(1), 6);
        served.at(1199);
        served.fill(2);
        assert_eq!(served.hits(1), 0);
        assert_eq!((served.table.stats().expired, served.table.len()), (6, 0));
    }
}

#[test]
fn owners_over_budget_lose_their_own_oldest_and_touch_no_third() {
    let mut served = Served::new(160, 0.2);
    let for_ever = [hint(None, 50, None)];
    for number in 0..4 {
        served.serve(number, "quiet", &for_ever);
    }
    for number in 0..20 {
        for (place, owner) in ["loud", "louder"].iter().enumerate() {
            served.serve(100 * (place as u32 + 1) + number, owner, &[hint(None, 90, None)]);
        }
    }
    served.fill(3);
    assert!((0..4).all(|number| served.hits(number) == BLOCKS));
    for place in 1..=2_u32 {
        let kept = |number: u32| served.hits(100 * place + number) == BLOCKS;
        assert!((0..20).all(|number| kept(number) == (number >= 16)), "the last 32 blocks");
    }
    assert_eq!(served.table.stats().demoted, 2 * 16 * BLOCKS as u64);
}

#[test]
fn of_a_prompt_beyond_the_budget_the_head_is_kept() {
    let mut served = Served::new(40, 0.1);
    served.serve(1, "one", &[hint(None, 80, None)]);
    served.fill(3);
    assert_eq!(served.hits(1), 4);
}

#[test]
fn a_pool_full_of_the_highest_priority_serves_who_needs_all_of_it() {
    let mut served = Served::new(80, 1.0);
    for number in 0..10 {
        served.serve(number, "one", &[hint(None, 100, None)]);
    }
    // Of the first prompt a block went for the last one's slot.
    assert_eq!(served.table.stats().hinted, 79);
    let tokens: Vec<u32> = (0..80 * SIZE as u32 - 1).map(|token| 1 << 30 | token).collect();
    let all = served.begin(&tokens, "", &[]);
    assert_eq!(served.cache.store().num_free(), 0);
    served.end(all);
}

/// Whatever a prompt's length and however often it is asked for.
#[test]
fn a_range_costs_a_range_and_not_its_blocks() {
    let mut served = Served::new(100, 1.0);
    let mut second = hint(None, 60, Some(40));
    second.start = 3 * SIZE;
    let hints = [hint(Some(second.start), 90, Some(10)), second];
    for (owner, entries, ranges) in [("a", 1, 2), ("a", 1, 2), ("b", 2, 4), ("a", 2, 4)] {
        served.serve(1, owner, &hints);
        let table = &served.table;
        assert_eq!((table.len(), table.num_ranges()), (entries * BLOCKS, ranges));
    }
    served.at(1000);
    let moved = served.table.demote_expired(served.cache.inner_mut(), 100);
    assert_eq!((moved, served.table.num_ranges()), (BLOCKS + 3, 0));
}

#[test]
fn the_table_is_bounded_whoever_asks() {
    let owners =
        if std::env::var_os("PREFIXCACHE_LONG_TESTS").is_some() { 1_000_000 } else { 20_000 };
    let mut served = Served::new(64, 0.5);
    for number in 0..owners {
        // New content for each, and one prompt that all of them ask for.
        let number = if number % 5 == 0 { 0 } else { number };
        let (tokens, owner) = (prompt(number), number.to_string());
        let mut sequence = served.begin(&tokens, &owner, &[hint(None, 100, None)]);
        fill(&mut served.cache, &mut sequence);
        served.table.keep(served.cache.inner_mut(), &sequence);
        served.cache.release(&mut [&mut sequence]).unwrap();
        let most = MAX_OWNERS * 64;
        assert!(served.table.len() <= most, "{} entries", served.table.len());
    }
    assert!(served.table.stats().hinted <= 64, "what is there alone");
}

#[test]
fn a_pin_and_a_hint_end_apart() {
    let mut served = Served::new(60, 0.5);
    let hinted = [hint(None, 60, Some(10))];
    for number in [1, 2] {
        let mut sequence = served.begin(&prompt(number), "one", &hinted);
        fill(&mut served.cache, &mut sequence);
        assert_eq!(served.cache.pin(&mut sequence, BLOCKS * SIZE).unwrap(), BLOCKS);
        served.end(sequence);
    }
    // The pin of the first ends, and its hint keeps it.
    assert_eq!(served.cache.demote(BLOCKS), BLOCKS);
    served.fill(3);
    assert_eq!((served.hits(1), served.hits(2)), (BLOCKS, BLOCKS));
    // Both hints end, and the pin keeps the second.
    served.at(11);
    served.fill(3);
    assert_eq!((served.hits(1), served.hits(2)), (0, BLOCKS));
    let stats = served.cache.store().stats();
    assert_eq!((stats.pinned, stats.demotions), (BLOCKS, BLOCKS as u64));
}

#[test]
fn a_slice_of_what_has_ended_leaves_prefixes() {
    let mut served = Served::new(60, 0.5);
    served.serve(1, "one", &[hint(None, 90, Some(1))]);
    served.at(5);
    assert_eq!(served.table.demote_expired(served.cache.inner_mut(), 5), 5);
    // Those of the end are as any others now.
    let prompts = 60 / BLOCKS as u32;
    (0..prompts).for_each(|number| served.serve(1000 + number, "", &[]));
    assert_eq!(served.hits(1), 3);
    assert_eq!(served.table.demote_expired(served.cache.inner_mut(), 5), 3);
}

#[test]
fn what_was_raised_before_a_clear_goes_first() {
    let mut served = Served::new(60, 0.5);
    served.serve(1, "one", &[hint(None, 100, None)]);
    served.cache.clear_cache_index();
    let line = served.cache.store().free_order();
    let mut first: Vec<u32> = line[..BLOCKS].iter().map(|block| block.get()).collect();
    first.sort_unstable();
    assert_eq!(first, Vec::from_iter(1..=BLOCKS as u32));
    served.serve(2, "one", &[hint(None, 100, None)]);
    assert_eq!(served.table.stats().hinted, BLOCKS, "what was before is forgotten");
}

#[test]
fn a_preempted_sequence_keeps_what_it_hinted() {
    let mut served = Served::new(60, 0.5);
    let mut sequence = served.begin(&prompt(1), "one", &[hint(None, 70, None)]);
    served.preempt(&mut sequence);
    served.fill(3);
    served.commit(&mut sequence);
    assert_eq!(sequence.num_hits(), BLOCKS * SIZE);
    served.end(sequence);
}

#[test]
fn what_nobody_wants_goes_before_the_rest_until_somebody_hits_it() {
    let mut served = Served::new(60, 0.5);
    served.serve(1, "", &[]);
    served.serve(2, "one", &[hint(None, 0, None)]);
    served.serve(3, "one", &[hint(None, 20, None)]);
    let sequence = served.begin(&prompt(3), "", &[]);
    served.end(sequence);
    (0..5).for_each(|number| served.serve(1000 + number, "", &[]));
    let hits = [1, 2, 3].map(|number| served.hits(number));
    // 64 blocks and the last one's slot for an answer, of 60.
    assert_eq!(hits, [BLOCKS, BLOCKS - 5, BLOCKS]);
}

#[test]
fn the_end_of_a_range_stays_behind_a_window() {
    let specs = vec![GroupSpec::FullAttention, GroupSpec::SlidingWindow { window: 5 }];
    let mut served = Served::with(PoolConfig::new(61), 0.5, Groups::new(specs).unwrap());
    let mut sequence = served.begin(&prompt(1), "one", &[hint(Some(3 * SIZE), 60, None)]);
    let pins = None::<Pins>;
    sequence.set_retention(Retention::Anchors { interval: 0, pins });
    fill(&mut served.cache, &mut sequence);
    served.cache.drop_unneeded(&mut [&mut sequence], &[BLOCKS * SIZE]).unwrap();
    served.end(sequence);
    served.fill(3);
    assert_eq!(served.hits(1), 3, "the whole group up to there, and the window before it");
    // Three blocks, and of the window the last one and one below.
    assert_eq!(served.table.stats().hinted, 3 + 2);
}

#[test]
fn bad_hints_name_the_range() {
    let owner = Owner::named("one");
    let range = |start, end, priority| Hint { start, end, priority, ttl: None };
    let zero = Some(Duration::ZERO);
    for (ranges, message) in [
        (vec![range(3, Some(3), 50)], "hints[0] must end after its start, 3, not at 3"),
        (vec![range(0, None, 101)], "hints[0] must have a priority from 0 to 100, not 101"),
        (vec![range(0, Some(4), 1), range(3, None, 2)], "hints[1] must not overlap range 0"),
        (vec![range(5, None, 1), range(3, None, 2)], "hints[1] must not overlap range 0"),
        (vec![Hint { ttl: zero, ..range(0, None, 1) }], "hints[0] must have a TTL above 0"),
    ] {
        let error = Hints::new(owner, ranges).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
    let many = (0..33).map(|at| range(at, Some(at + 1), 50)).collect();
    assert!(Hints::new(owner, many).is_err());
    assert!([-0.1, 1.1, f64::NAN].map(RetentionTable::new).iter().all(Result::is_err));
    assert_eq!([0, 14, 15, 35, 89, 100].map(|p| Band::of(p).index()), [0, 0, 1, 2, 6, 7]);
}

#[test]
fn what_ends_late_ends_in_the_order_of_its_time() {
    let mut served = Served::new(16, 1.0);
    let head = Hint { end: Some(SIZE), ..hint(None, 95, Some(60)) };
    let rest = Hint { start: SIZE, ..hint(None, 65, Some(3600)) };
    served.serve(1, "one", &[head, rest]);
    served.at(4000);
    served.table.demote_expired(served.cache.inner_mut(), 256);
    served.cache.inner_mut().release_cached(1);
    assert_eq!(served.linear_hits(&prompt(1)), BLOCKS - 1);
    served.check_counts([prompt(1)]);
}

#[test]
fn what_comes_back_is_nobodys() {
    let mut served = Served::new(40, 1.0);
    served.serve(1, "one", &[hint(Some((BLOCKS - 1) * SIZE), 95, None)]);
    served.cache.inner_mut().release_cached(2);
    served.serve(1, "one", &[hint(None, 55, None)]);
    served.cache.inner_mut().release_cached(2);
    served.check_counts([prompt(1)]);
    assert_eq!(served.linear_hits(&prompt(1)), BLOCKS - 2);

    // It counts against no share, either: the younger prompt keeps its priority.
    let mut served = Served::new(2 * BLOCKS + 2, 0.5);
    served.serve(1, "one", &[hint(None, 95, None)]);
    served.cache.inner_mut().release_cached(BLOCKS);
    served.serve(2, "one", &[hint(None, 95, None)]);
    assert_eq!(served.table.stats().hinted, BLOCKS);
    assert_eq!(served.table.stats().demoted, 0);
}

#[test]
fn hints_that_end_before_those_of_what_follows_end_the_bisection() {
    // Who ends the hints of how many blocks of a prompt, from which on; and whether counts go on to bisect.
    let ends = [
        (BLOCKS, "one", 0, true),
        (BLOCKS, "one", 3, true),
        (BLOCKS, "two", 0, true),
        (BLOCKS, "nobody", 0, true),
        (3, "one", 2, false),
        (1, "two", 0, false),
    ];
    for (blocks, owner, first, bisects) in ends {
        let mut served = Served::new(60, 1.0);
        served.serve(1, "one", &[hint(None, 60, None)]);
        served.serve(1, "two", &[hint(Some(5 * SIZE), 80, None)]);
        served.end_hints(&prompt(1)[..blocks * SIZE], owner, first);
        assert_eq!(served.cache.counts_by_bisection(), bisects, "{owner} {blocks} {first}");
        served.cache.clear_cache_index();
        assert!(served.cache.counts_by_bisection());
    }
}

#[test]
fn of_two_prompts_that_part_the_own_tail_of_each_ends_first() {
    let mut served = Served::new(60, 1.0);
    for number in [2, 3] {
        let sequence = served.begin(&related(number, BLOCKS), "one", &[hint(None, 60, None)]);
        served.end(sequence);
    }
    assert_eq!(served.end_hints(&related(2, BLOCKS), "one", BLOCKS / 2), BLOCKS / 2);
    assert_eq!(served.end_hints(&related(3, BLOCKS), "one", 0), BLOCKS);
    assert!(served.cache.counts_by_bisection());
    assert_eq!(served.table.stats().hinted, 0);
}

/// Something that happens to a cache with hints.
#[derive(Clone, Debug)]
enum Event {
    Serve(u32, usize, u8, Vec<(u8, Option<u16>)>),
    Wait(u16),
    Expire(usize),
    Evict(usize),
    End(u32, usize, u8, usize),
    Clear,
}

fn event() -> impl Strategy<Value = Event> {
    let hints = vec((0u8..=100, proptest::option::of(1u16..100)), 0..3);
    prop_oneof![
        6 => (0u32..6, 1..=BLOCKS, 0u8..3, hints).prop_map(|(n, b, o, h)| Event::Serve(n, b, o, h)),
        2 => (1u16..200).prop_map(Event::Wait),
        2 => (1usize..9).prop_map(Event::Expire),
        3 => (1usize..6).prop_map(Event::Evict),
        2 => (0u32..6, 1..=BLOCKS, 0u8..3, 0..BLOCKS).prop_map(|(n, b, o, f)| Event::End(n, b, o, f)),
        1 => Just(Event::Clear),
    ]
}

/// Prompts of which two and two have their first half in common.
fn related(number: u32, blocks: usize) -> Vec<u32> {
    let own = |token: u32| match token < (BLOCKS * SIZE / 2) as u32 {
        true => number / 2,
        false => 100 + number,
    };
    (0..(blocks * SIZE) as u32).map(|token| own(token) << 8 | token).collect()
}

/// Ranges of as many tokens each, the last one without an end.
fn ranges(blocks: usize, given: &[(u8, Option<u16>)]) -> Vec<Hint> {
    let length = blocks * SIZE / given.len().max(1);
    let of = |(index, &(priority, seconds)): (usize, &(u8, Option<u16>))| Hint {
        start: index * length,
        end: (index + 1 < given.len()).then_some((index + 1) * length),
        ..hint(None, priority, seconds.map(u64::from))
    };
    given.iter().enumerate().map(of).collect()
}

proptest! {
    /// Whatever was hinted, however late it ended and whatever came back: what the bisection counts is there, and
    /// what is there is counted.
    #[test]
    fn counts_are_what_is_there(share in 0.1f64..1.0, events in vec(event(), 1..60)) {
        let mut served = Served::new(24, share);
        let mut now = 0;
        for event in events {
            match event {
                Event::Serve(number, blocks, owner, hints) => {
                    let tokens = related(number, blocks);
                    let owner = owner.to_string();
                    let sequence = served.begin(&tokens, &owner, &ranges(blocks, &hints));
                    served.end(sequence);
                }
                Event::Wait(seconds) => {
                    now += u64::from(seconds);
                    served.at(now);
                }
                Event::Expire(most) => {
                    served.table.demote_expired(served.cache.inner_mut(), most);
                }
                Event::Evict(count) => {
                    served.cache.inner_mut().release_cached(count);
                }
                Event::End(number, blocks, owner, first) => {
                    served.end_hints(&related(number, blocks), &owner.to_string(), first);
                }
                Event::Clear => served.cache.clear_cache_index(),
            }
            served.check_counts((0..6).map(|number| related(number, BLOCKS)));
            served.table.forget_evicted(served.cache.inner_mut());
            let cached = served.cache.store().cached_blocks().len();
            prop_assert!(served.table.stats().hinted <= cached);
        }
    }
}
