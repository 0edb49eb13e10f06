//! Content of older weights: who finds it, in whose chain what stands on it is published, and when it is forgotten.
//! And hints that end before their time.

use prefixcache_core::cache::{CacheBuilder, PrefixCache};
use prefixcache_core::error::CacheError;
use prefixcache_core::groups::Groups;
use prefixcache_core::hash::{HashConfig, Scope};
use prefixcache_core::hints::{Hint, Hints, Owner};
use prefixcache_core::pool::Writer;
use prefixcache_core::sequence::Sequence;
use prefixcache_core::store::PoolConfig;
use prefixcache_core::weights::WeightsName;

use crate::fill;

const SIZE: usize = 4;

fn cache() -> PrefixCache<Writer> {
    let hashing = HashConfig::new(SIZE, Groups::full(1).unwrap());
    let cache = CacheBuilder::new(hashing).weights(named("tag:a")).hints(0.5);
    cache.build(Writer::new(PoolConfig::new(33)).unwrap()).unwrap()
}

fn named(name: &str) -> WeightsName {
    WeightsName::new(name).unwrap()
}

fn prompt(cache: &PrefixCache<Writer>, blocks: usize) -> Sequence {
    let tokens = (0..(blocks * SIZE) as u32).collect();
    cache.new_sequence(tokens, Scope::default(), Vec::new())
}

/// Serves a sequence to its end; its hits, in blocks.
fn serve(cache: &mut PrefixCache<Writer>, sequence: &mut Sequence) -> usize {
    let hits = crate::serve(cache, sequence);
    cache.release(&mut [sequence]).unwrap();
    hits / SIZE
}

fn serve_new(cache: &mut PrefixCache<Writer>, blocks: usize) -> usize {
    let mut sequence = prompt(cache, blocks);
    serve(cache, &mut sequence)
}

fn serve_at(cache: &mut PrefixCache<Writer>, blocks: usize, version: u64) -> usize {
    let mut sequence = prompt(cache, blocks).at_version(version).unwrap();
    serve(cache, &mut sequence)
}

#[test]
fn older_content_is_found_by_sequences_of_its_version_alone() {
    let mut cache = cache();
    let mut old = prompt(&cache, 2);
    assert_eq!(serve(&mut cache, &mut old), 0);
    assert_eq!(cache.next_weight_version(Some(named("tag:b"))), 1);
    let new = prompt(&cache, 4);
    assert_eq!(cache.count_prefix_hits(&mut new.at_version(1).unwrap()), Ok(0));
    let mut on_old = new.at_version(0).unwrap();
    assert_eq!((on_old.weight_version(), new.weight_version()), (0, 1));
    assert_eq!(serve(&mut cache, &mut on_old), 2);
    // What it computed stands on old blocks, and is for those who allow these.
    assert_eq!(serve_new(&mut cache, 4), 0);
    assert_eq!(serve_at(&mut cache, 4, 0), 4);
    assert!(new.at_version(2).is_none());
    cache.validate().unwrap();
}

#[test]
fn who_holds_blocks_publishes_on_in_its_chain() {
    let mut cache = cache();
    let mut kept = prompt(&cache, 3);
    cache.commit_prefix_plan(&mut kept, 0, 3 * SIZE).unwrap();
    cache.next_weight_version(None);
    fill(&mut cache, &mut kept);
    cache.release(&mut [&mut kept]).unwrap();
    assert_eq!(serve_new(&mut cache, 3), 0);
    let mut old = prompt(&cache, 3).at_version(0).unwrap();
    assert_eq!(serve(&mut cache, &mut old), 3);
}

#[test]
fn a_name_that_comes_back_forgets_everything() {
    let mut cache = cache();
    serve_new(&mut cache, 3);
    cache.next_weight_version(Some(named("tag:b")));
    let on_old = prompt(&cache, 3).at_version(0).unwrap();
    assert_eq!(cache.next_weight_version(Some(named("tag:a"))), 2);
    assert_eq!(serve_new(&mut cache, 3), 0);
    assert!(on_old.at_version(0).is_none());
}

#[test]
fn a_sequence_of_forgotten_weights_is_refused_by_name() {
    /// A call that needs the sequence's hashes.
    type Call = fn(&mut PrefixCache<Writer>, &mut Sequence) -> Option<CacheError>;
    let calls: [Call; 6] = [
        |cache, sequence| cache.count_prefix_hits(sequence).err(),
        |cache, sequence| cache.count_whole_hits(sequence, SIZE).err(),
        |cache, sequence| cache.commit_prefix_plan(sequence, 0, 3 * SIZE).err(),
        |cache, sequence| cache.commit_missing(sequence, 0, 3 * SIZE, SIZE).err(),
        |cache, sequence| cache.pin(sequence, SIZE).err(),
        |cache, sequence| cache.unpin(sequence).err(),
    ];
    let mut cache = cache();
    let [mut stays, mut held] =
        [0, 0].map(|version| prompt(&cache, 3).at_version(version).unwrap());
    cache.commit_prefix_plan(&mut held, 0, 3 * SIZE).unwrap();
    let mut follows = prompt(&cache, 3);
    cache.new_weight_version(None);
    for call in calls {
        let error = call(&mut cache, &mut stays).expect("it is refused");
        assert_eq!(
            error.to_string(),
            "sequence stays with weights of a version that was forgotten: make another one"
        );
    }
    assert_eq!((stays.weight_version(), stays.is_committed()), (0, false));
    // Who holds blocks uses them to its end, and publishes nothing.
    fill(&mut cache, &mut held);
    cache.release(&mut [&mut held]).unwrap();
    assert_eq!(serve(&mut cache, &mut follows), 0);
    assert_eq!(serve_at(&mut cache, 3, 1), 3);
}

#[test]
fn hints_end_for_one_owner_from_a_block_on() {
    let mut cache = cache();
    let owners = ["one", "two"].map(Owner::named);
    for owner in owners {
        let mut sequence = prompt(&cache, 4);
        let hint = Hint { start: 0, end: None, priority: 60, ttl: None };
        sequence.set_hints(Hints::new(owner, vec![hint]).unwrap());
        serve(&mut cache, &mut sequence);
    }
    let sequence = prompt(&cache, 4);
    assert_eq!(cache.end_hints(owners[0], &sequence, 0), Ok(0));
    assert_eq!(cache.end_hints(owners[1], &sequence, 1), Ok(3));
    assert_eq!(cache.hint_stats().hinted, 1);
    assert_eq!(cache.end_hints(owners[1], &sequence, 0), Ok(1));
    assert_eq!(cache.end_hints(owners[1], &sequence, 0), Ok(0));
    assert_eq!(cache.hint_stats().hinted, 0);
    cache.validate().unwrap();
}
