//! Retention hints over several lives of a cache: who asked, for how long, and what is left of it.

use std::fs::File;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use prefixcache_core::WeightsName;
use prefixcache_core::backing::KeptHint;
use prefixcache_core::band::Band;
use prefixcache_core::cache::CacheBuilder;
use prefixcache_core::cache::PrefixCache;
use prefixcache_core::groups::Groups;
use prefixcache_core::hash::{HashConfig, Scope};
use prefixcache_core::hints::{Hint, Hints, Owner};
use prefixcache_core::id::{BlockId, BlockKey, GroupId};
use prefixcache_core::pool::Writer;
use prefixcache_core::store::{BlockStore, Lookup, Moves, PoolConfig};

use crate::KvFile;
use crate::hint::{of_words, to_words};
use crate::kills::{NUM_BLOCKS, file_in_memory, layout};

/// Tokens of a block.
const SIZE: usize = 4;
const HIGH: Band = Band::of(95);
const LOW: Band = Band::of(0);

struct Life {
    kv: KvFile,
    cache: PrefixCache<Writer>,
}

/// A prompt of two blocks.
fn prompt(number: u32) -> Vec<u32> {
    (0..2 * SIZE as u32).map(|token| number << 8 | token).collect()
}

impl Life {
    /// Each owner may raise this share of 11 blocks; None: hints are not looked at.
    fn begin(file: &File, share: Option<f64>) -> Self {
        let kv = KvFile::open_without_thread(file.try_clone().unwrap(), &layout()).unwrap();
        let pool = Writer::new(PoolConfig::new(NUM_BLOCKS)).unwrap();
        let hashing = HashConfig::new(SIZE, Groups::full(1).unwrap());
        let cache = CacheBuilder::new(hashing).weights(WeightsName::new("blake3:a").unwrap());
        let cache = match share {
            Some(share) => cache.hints(share),
            None => cache,
        };
        let cache = cache.build(pool).unwrap();
        let mut life = Self { kv, cache };
        life.at(0);
        let kept = life.kv.take_kept(NUM_BLOCKS, 1);
        life.cache.keep_in(life.kv.store(), &kept.blocks).unwrap();
        life
    }

    /// Sets the time, in seconds of this life; how many blocks have another priority then.
    fn at(&mut self, seconds: u64) -> usize {
        self.cache.set_time(Duration::from_secs(seconds));
        self.cache.demote_expired(NUM_BLOCKS)
    }

    /// Serves a prompt with a priority that lasts for some seconds.
    fn serve(&mut self, number: u32, owner: &str, priority: u8, seconds: Option<u64>) {
        let ttl = seconds.map(Duration::from_secs);
        let hints = vec![Hint { start: 0, end: None, priority, ttl }];
        let mut sequence = self.cache.new_sequence(prompt(number), Scope::default(), vec![]);
        sequence.set_hints(Hints::new(Owner::named(owner), hints).unwrap());
        let hits = self.cache.count_prefix_hits(&mut sequence).unwrap();
        let rest = 2 * SIZE - hits;
        self.cache.commit_prefix_plan(&mut sequence, hits, rest).unwrap().unwrap();
        self.cache.mark_blocks_filled(&mut [&mut sequence], &[2 * SIZE]).unwrap();
        self.cache.release(&mut [&mut sequence]).unwrap();
        self.cache.validate().unwrap();
        while self.kv.table().complete_next() {}
    }

    fn hit_first_block(&mut self, number: u32) {
        let mut hit = self.cache.new_sequence(prompt(number), Scope::default(), vec![]);
        self.cache.commit_prefix_plan(&mut hit, SIZE, SIZE).unwrap().unwrap();
        self.cache.release(&mut [&mut hit]).unwrap();
    }

    /// The priorities of a prompt's blocks.
    fn bands(&self, number: u32) -> Vec<Band> {
        let hashes = self.cache.compute_block_hashes(&prompt(number), &Scope::default(), vec![]);
        let keys = hashes.as_slice().iter().map(|&hash| BlockKey::new(hash, GroupId::default()));
        let pool = self.cache.store();
        keys.map(|key| pool.held_band(pool.lookup(&key).unwrap())).collect()
    }

    /// Those of these prompts of which both blocks are raised; the others have no priority.
    fn raised(&self, prompts: &[u32]) -> Vec<u32> {
        let is_raised = |&number: &u32| {
            let bands = self.bands(number);
            assert!(bands == [HIGH; 2] || bands == [Band::DEFAULT; 2], "{number}: {bands:?}");
            bands[0] == HIGH
        };
        prompts.iter().copied().filter(is_raised).collect()
    }
}

#[test]
fn a_ttl_goes_on_in_the_next_life_and_a_hit_starts_it_again() {
    let file = file_in_memory();
    let mut life = Life::begin(&file, Some(0.5));
    life.serve(1, "a", 95, Some(1000));
    life.serve(2, "a", 95, None);
    life.serve(3, "a", 0, Some(1000));
    let hint = KeptHint { owner: Some(Owner::named("a")), ttl: 1_000_000, left: 1 };
    life.kv.store().keep_hint(BlockId::new(1), HIGH, hint);
    life.hit_first_block(1);
    drop(life);
    let mut life = Life::begin(&file, Some(0.5));
    assert_eq!(life.raised(&[1, 2]), [1, 2]);
    assert_eq!(life.bands(3), [LOW; 2]);
    assert_eq!(life.at(800), 0);
    life.hit_first_block(1);
    // Lowered content, and what was not hit.
    assert_eq!(life.at(1001), 3);
    assert_eq!((life.bands(1), life.raised(&[2])), (vec![HIGH, Band::DEFAULT], vec![2]));
    assert_eq!(life.at(1801), 1);
    assert_eq!((life.raised(&[1, 2]), life.at(u32::MAX.into())), (vec![2], 0));
}

#[test]
fn of_two_owners_the_lower_priority_is_kept_once_the_higher_one_has_ended() {
    let file = file_in_memory();
    let mut life = Life::begin(&file, Some(0.5));
    life.serve(1, "a", 60, None);
    life.serve(1, "b", 95, Some(1000));
    assert_eq!((life.bands(1), life.at(1001)), (vec![HIGH; 2], 2));
    drop(life);
    assert_eq!(Life::begin(&file, Some(0.5)).bands(1), [Band::of(60); 2]);
}

#[test]
fn what_nobody_asked_to_lower_for_longer_is_as_dear_as_any_once_it_is_hit() {
    let file = file_in_memory();
    Life::begin(&file, Some(0.5)).serve(1, "a", 0, None);
    let mut life = Life::begin(&file, Some(0.5));
    assert_eq!(life.bands(1), [LOW; 2]);
    life.serve(1, "a", 35, None);
    assert_eq!(life.bands(1), [Band::DEFAULT; 2]);
}

#[test]
fn each_owner_has_the_budget_of_today_over_all_lives() {
    let file = file_in_memory();
    let mut life = Life::begin(&file, Some(0.4));
    life.serve(1, "a", 95, None);
    life.serve(2, "a", 95, None);
    life.serve(3, "b", 95, None);
    assert_eq!(life.raised(&[1, 2, 3]), [1, 2, 3]);
    drop(life);
    let mut life = Life::begin(&file, Some(0.2));
    assert_eq!(life.raised(&[1, 2, 3]), [2, 3], "two blocks for each");
    life.serve(4, "a", 95, None);
    assert_eq!(life.raised(&[1, 2, 3, 4]), [3, 4]);
    drop(life);
    let life = Life::begin(&file, Some(0.4));
    assert_eq!(life.raised(&[1, 2, 3, 4]), [3, 4], "what has ended does not come back");
    drop(life);
    assert_eq!(Life::begin(&file, None).raised(&[1, 2, 3, 4]), [0; 0]);
}

/// Two requests compute one prompt at a time. The copies of the first hit, and those of the second are used last.
#[test]
fn of_copies_the_one_that_hits_has_the_priority_and_loses_it() {
    let file = file_in_memory();
    let mut life = Life::begin(&file, Some(0.5));
    let mut second = life.cache.new_sequence(prompt(1), Scope::default(), vec![]);
    life.cache.commit_prefix_plan(&mut second, 0, 2 * SIZE).unwrap().unwrap();
    life.serve(1, "a", 95, Some(1000));
    life.cache.mark_blocks_filled(&mut [&mut second], &[2 * SIZE]).unwrap();
    life.cache.release(&mut [&mut second]).unwrap();
    while life.kv.table().complete_next() {}
    drop(life);
    for _ in 0..2 {
        let mut life = Life::begin(&file, Some(0.5));
        assert_eq!(life.raised(&[1]), [1]);
        assert_eq!(life.at(1001), 2);
        let pool = life.cache.store();
        let blocks = (1..NUM_BLOCKS as u32).map(BlockId::new);
        assert!(blocks.map(|block| pool.held_band(block)).all(|band| band == Band::DEFAULT));
        life.serve(1, "a", 95, Some(1000));
    }
}

#[test]
fn content_that_moves_to_another_block_keeps_its_hint() {
    let file = file_in_memory();
    let mut life = Life::begin(&file, Some(0.5));
    life.serve(1, "a", 35, None);
    life.serve(2, "a", 95, None);
    let mut moves = Moves::default();
    assert!(life.cache.begin_moves(3, 4, &mut moves).is_ok());
    life.cache.finish_moves(&mut moves).unwrap();
    life.cache.resize(3).unwrap();
    drop(life);
    assert_eq!(Life::begin(&file, Some(0.5)).raised(&[2]), [2]);
}

#[test]
fn a_hint_of_damaged_words_or_of_other_content_is_none() {
    for word in 0..5 {
        let file = file_in_memory();
        let mut life = Life::begin(&file, Some(0.5));
        life.serve(1, "a", 95, Some(1000));
        life.serve(2, "a", 95, Some(2000));
        let hints = [1, 3].map(|block| life.kv.table().hint_words(BlockId::new(block)));
        hints[0][word].fetch_xor(1 << 20, Relaxed);
        for (one, other) in hints[1].iter().zip(life.kv.table().hint_words(BlockId::new(2))) {
            one.store(other.load(Relaxed), Relaxed);
        }
        drop(life);
        let life = Life::begin(&file, Some(0.5));
        assert_eq!(life.bands(1), [Band::DEFAULT, HIGH]);
        assert_eq!(life.bands(2), [Band::DEFAULT, HIGH]);
    }
}

/// The file says that as much is left of a TTL of 1,000 s, in milliseconds.
#[test]
fn a_hint_that_ended_between_two_lives_is_over_and_none_lasts_beyond_its_ttl() {
    for (left, raised) in [(0, [2].as_slice()), (500_000, &[1, 2]), (u64::MAX - 1, &[1, 2])] {
        let file = file_in_memory();
        let mut life = Life::begin(&file, Some(0.5));
        life.serve(1, "a", 95, None);
        life.serve(2, "a", 95, None);
        let hint = KeptHint { owner: Some(Owner::named("a")), ttl: 1_000_000, left };
        for block in [1, 2].map(BlockId::new) {
            life.kv.store().keep_hint(block, HIGH, hint);
        }
        drop(life);
        let mut life = Life::begin(&file, Some(0.5));
        assert_eq!(life.raised(&[1, 2]), raised);
        life.at(1001);
        assert_eq!(life.raised(&[1, 2]), [2]);
    }
}

#[test]
fn a_clock_that_was_set_lengthens_no_ttl() {
    const EVER: u64 = u64::MAX;
    let owner = Some(Owner::named("a"));
    for (ttl, left, then, now, expected) in [
        (1000, 900, 5000, 5100, 800),
        (1000, 900, 5000, 5900, 0),
        (1000, 900, 5000, 9000, 0),
        (1000, 900, 5000, 0, 1000),
        (1000, 900, EVER - 10, 5000, 1000),
        (EVER, EVER, 5000, 0, EVER),
        (EVER, EVER, 5000, EVER, EVER),
    ] {
        for owner in [owner, None] {
            let hint = of_words(to_words(KeptHint { owner, ttl, left }, then), now);
            assert_eq!(hint, KeptHint { owner, ttl, left: expected });
        }
    }
}
