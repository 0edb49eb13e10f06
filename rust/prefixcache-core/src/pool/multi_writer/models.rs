//! Every interleaving of two or three threads on a pool of one or two blocks.

use loom::sync::Arc;
use loom::thread;

use crate::band::Band;
use crate::block::{Class, Content};
use crate::evictions::Eviction;
use crate::id::{BlockHash, BlockId, Epoch, GroupId};
use crate::policy::{EvictionPolicy, Queue};
use crate::pool::{BlockPool, Shared};
use crate::store::{BlockKey, FreeOrder, Lookup, Moves, PoolConfig, Registration};
use crate::sync::{AtomicU64, Fault, Ordering, check, faults};

type Pool = Arc<BlockPool<Shared>>;

fn pool(blocks: usize) -> Pool {
    pool_with(blocks, EvictionPolicy::Lru)
}

fn pool_with(blocks: usize, eviction_policy: EvictionPolicy) -> Pool {
    let size = blocks + 1;
    let config = PoolConfig {
        num_blocks: size,
        max_blocks: size,
        free_order: FreeOrder::UnhashedFirst,
        eviction_policy,
    };
    Arc::new(BlockPool::with_ring_capacity(config, 8).unwrap())
}

fn key(number: u8) -> BlockKey {
    BlockKey::new(BlockHash::from_bytes([number; 32]), GroupId::default())
}

fn allocate(pool: &Pool) -> Option<BlockId> {
    let mut out = Vec::new();
    pool.allocate(1, &mut out).ok().map(|()| out[0])
}

fn touch(pool: &Pool, number: u8) -> Option<BlockId> {
    let mut out = Vec::new();
    let hits = pool.commit(std::iter::once(key(number)), 0, &mut out);
    (hits == Ok(1)).then(|| out[0])
}

/// A held block with content.
fn held(pool: &Pool, number: u8) -> BlockId {
    let block = allocate(pool).unwrap();
    assert_eq!(
        pool.register(block, key(number), Epoch::default()),
        Ok(Registration::New)
    );
    block
}

fn in_parallel<T: 'static>(
    pool: &Pool,
    work: impl FnOnce(&Pool) -> T + 'static,
) -> thread::JoinHandle<T> {
    let pool = pool.clone();
    thread::spawn(move || work(&pool))
}

/// At rest, with `held` in somebody's hands.
fn check_rest(pool: &Pool, held: &[BlockId]) {
    pool.validate().expect("the pool is whole");
    let mut distinct = held.to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    let free = pool.num_blocks() - 1 - distinct.len();
    assert_eq!(pool.num_free(), free, "blocks were lost or doubled");
}

/// One block is released, touched and evicted at once.
fn release_with_evict_and_touch() {
    let pool = pool(1);
    let block = held(&pool, 1);
    let releasing = in_parallel(&pool, move |pool| pool.release(&[block]).unwrap());
    let evicting = in_parallel(&pool, allocate);
    let touched = touch(&pool, 1);
    releasing.join().unwrap();
    let evicted = evicting.join().unwrap();
    assert!(
        touched.is_none() || evicted.is_none(),
        "a block was handed out twice"
    );
    let held: Vec<BlockId> = touched.into_iter().chain(evicted).collect();
    check_rest(&pool, &held);
}

#[test]
fn release_vs_evict_vs_touch() {
    check(release_with_evict_and_touch);
}

#[test]
#[should_panic]
fn release_vs_evict_vs_touch_fails_when_evicted_blocks_stay_hashed() {
    faults::check_with(Fault::EvictHashed, release_with_evict_and_touch);
}

/// A block's two holders let go at once.
fn two_releases() {
    let pool = pool(1);
    let block = held(&pool, 1);
    assert_eq!(touch(&pool, 1), Some(block));
    let releasing = in_parallel(&pool, move |pool| pool.release(&[block]).unwrap());
    pool.release(&[block]).unwrap();
    releasing.join().unwrap();
    check_rest(&pool, &[]);
    assert_eq!(touch(&pool, 1), Some(block), "content was lost");
}

#[test]
fn two_last_releasers() {
    check(two_releases);
}

#[test]
#[should_panic]
fn two_last_releasers_fails_when_both_only_count_down() {
    faults::check_with(Fault::ForgetLastHolder, two_releases);
}

/// A block is recycled for other content while one thread wants the old content and another looks.
fn recycle_with_touch_and_lookup() {
    let pool = pool(1);
    let block = held(&pool, 1);
    pool.release(&[block]).unwrap();
    let recycling = in_parallel(&pool, |pool| {
        let block = allocate(pool)?;
        let _ = pool.register(block, key(2), pool.epoch());
        pool.release(&[block]).unwrap();
        Some(block)
    });
    let looking = in_parallel(&pool, |pool| (pool.lookup(&key(2)), pool.lookup(&key(1))));
    let touched = touch(&pool, 1);
    if let Some(block) = touched {
        let content = pool.block(block).content();
        assert_eq!(content, Content::from(&key(1)), "a hit had other content");
    }
    let recycled = recycling.join().unwrap();
    let (new, old) = looking.join().unwrap();
    assert!(
        new.is_none() || old.is_none(),
        "old content hit after new content did"
    );
    assert!(new.is_none() || recycled.is_some());
    assert!(
        touched.is_none() || pool.block(block).content() == Content::from(&key(1)),
        "a held block was recycled"
    );
    check_rest(&pool, &Vec::from_iter(touched));
}

#[test]
fn evict_vs_lookup_vs_register() {
    check(recycle_with_touch_and_lookup);
}

#[test]
#[should_panic(expected = "a hit had other content")]
fn evict_vs_lookup_vs_register_fails_without_the_recheck() {
    faults::check_with(Fault::SkipRecheck, recycle_with_touch_and_lookup);
}

#[test]
#[should_panic]
fn evict_vs_lookup_vs_register_fails_when_evicted_blocks_stay_hashed() {
    faults::check_with(Fault::EvictHashed, recycle_with_touch_and_lookup);
}

/// The index is cleared while a block of the epoch before is being registered.
fn clear_with_register() {
    let pool = pool(1);
    let epoch = pool.epoch();
    let block = allocate(&pool).unwrap();
    let clearing = in_parallel(&pool, |pool| pool.clear_index());
    let _ = pool.register(block, key(1), epoch);
    clearing.join().unwrap();
    assert_eq!(pool.lookup(&key(1)), None, "content outlived the clearing");
    check_rest(&pool, &[block]);
}

#[test]
fn clear_vs_register() {
    check(clear_with_register);
}

#[test]
#[should_panic(expected = "content outlived the clearing")]
fn clear_vs_register_fails_with_the_epoch_of_now() {
    faults::check_with(Fault::EpochOfNow, clear_with_register);
}

/// A commit of one hit, misses and a new block needs two blocks, a concurrent allocation the third.
fn commit_with_allocate() {
    let pool = pool(3);
    let hit = held(&pool, 1);
    pool.release(&[hit]).unwrap();
    let allocating = in_parallel(&pool, allocate);
    let mut out = Vec::new();
    let hits = pool.commit([1, 2, 3].map(key).into_iter(), 1, &mut out);
    out.extend(allocating.join().unwrap());
    assert_eq!((hits, out.len()), (Ok(1), 3), "what fits was not served");
    check_rest(&pool, &out);
}

#[test]
fn commit_vs_allocate() {
    check(commit_with_allocate);
}

#[test]
#[should_panic(expected = "what fits was not served")]
fn commit_vs_allocate_fails_with_credits_for_misses() {
    faults::check_with(Fault::CreditsForMisses, commit_with_allocate);
}

/// A hit is held when the commit counts what it needs, and free when it takes it: it gets all or
/// nothing. Another hit comes first, which a commit that fails has to give back.
fn commit_with_release() {
    let pool = pool(2);
    let [kept, released] = [1, 2].map(|number| held(&pool, number));
    let releasing = in_parallel(&pool, move |pool| pool.release(&[released]).unwrap());
    let mut out = Vec::new();
    let outcome = pool.commit([1, 2].map(key).into_iter(), 0, &mut out);
    releasing.join().unwrap();
    assert_eq!(out.len(), outcome.unwrap_or(0));
    pool.release(&out).unwrap();
    pool.release(&[kept]).unwrap();
    check_rest(&pool, &[]);
}

#[test]
fn commit_vs_release() {
    check(commit_with_release);
}

#[test]
#[should_panic(expected = "blocks were lost or doubled")]
fn commit_vs_release_fails_when_a_failed_commit_keeps_its_hits() {
    faults::check_with(Fault::KeepHitsOfFailure, commit_with_release);
}

/// The index is full, one of its entries is of an ended epoch, and the block of that one is recycled
/// while another block is registered, which may take the place of the entry.
fn recycle_with_register_after_a_clear() {
    let pool = pool(3);
    let old = held(&pool, 1);
    pool.release(&[old]).unwrap();
    pool.clear_index();
    let [one, two] = [2, 3].map(|_| allocate(&pool).unwrap());
    let put = |block, number| pool.register(block, key(number), pool.epoch()).unwrap();
    assert_eq!(put(one, 2), Registration::New);
    let recycling = in_parallel(&pool, allocate);
    let outcome = put(two, 3);
    let recycled = recycling.join().unwrap();
    // One bucket is too small an index to try a place again that was emptied after the first look.
    let refused = outcome == Registration::Stale && pool.content_drops() == 1;
    let found = pool.lookup(&key(3)) == Some(two);
    assert!(found != refused, "content was lost");
    assert_eq!(pool.lookup(&key(2)), Some(one), "content was lost");
    check_rest(&pool, &[one, two, recycled.unwrap()]);
}

#[test]
fn recycle_vs_register_after_a_clear() {
    check(recycle_with_register_after_a_clear);
}

#[test]
#[should_panic(expected = "content was lost")]
fn recycle_vs_register_after_a_clear_fails_with_blind_removals() {
    faults::check_with(Fault::BlindRemoval, recycle_with_register_after_a_clear);
}

/// Two threads register the same content: exactly one is the first, and its block hits.
fn two_registrations() {
    let pool = pool(2);
    let (one, two) = (allocate(&pool).unwrap(), allocate(&pool).unwrap());
    let other = in_parallel(&pool, move |pool| {
        pool.register(two, key(1), Epoch::default()).unwrap()
    });
    let outcome = pool.register(one, key(1), Epoch::default()).unwrap();
    let other = other.join().unwrap();
    let first = match (outcome, other) {
        (Registration::New, Registration::Duplicate(first)) if first == one => one,
        (Registration::Duplicate(first), Registration::New) if first == two => two,
        both => panic!("exactly one is the first: {both:?}"),
    };
    assert_eq!(pool.lookup(&key(1)), Some(first), "the first hits");
    check_rest(&pool, &[one, two]);
}

#[test]
fn register_vs_register() {
    check(two_registrations);
}

#[test]
#[should_panic(expected = "exactly one is the first")]
fn register_vs_register_fails_when_both_look_first() {
    faults::check_with(Fault::LookEarly, two_registrations);
}

#[test]
#[should_panic(expected = "exactly one is the first")]
fn register_vs_register_fails_when_numbers_are_drawn_before_entries_stand() {
    faults::check_with(Fault::NumberEarly, two_registrations);
}

/// There are copies enough. A further one takes the entry of a free one, which is recycled meanwhile.
fn register_copy_with_recycle() {
    let pool = pool(3);
    let first = held(&pool, 1);
    let [surplus, last] = [1, 1].map(|_| allocate(&pool).unwrap());
    let copy = |block| pool.register(block, key(1), Epoch::default()).unwrap();
    assert_eq!(copy(surplus), Registration::Duplicate(first));
    pool.release(&[surplus]).unwrap();
    let recycling = in_parallel(&pool, allocate);
    let outcome = copy(last);
    assert_eq!(recycling.join().unwrap(), Some(surplus));
    if outcome == Registration::Stale {
        // One bucket is too small an index to try a place again that was emptied after the first look.
        assert_eq!(pool.content_drops(), 1);
        return check_rest(&pool, &[first, surplus, last]);
    }
    assert_eq!(outcome, Registration::Duplicate(first));
    check_rest(&pool, &[first, surplus, last]);
    pool.release(&[first]).unwrap();
    assert_eq!(allocate(&pool), Some(first));
    assert_eq!(pool.lookup(&key(1)), Some(last), "a copy was lost");
}

#[test]
fn register_copy_vs_recycle() {
    check(register_copy_with_recycle);
}

#[test]
#[should_panic]
fn register_copy_vs_recycle_fails_with_blind_removals() {
    faults::check_with(Fault::BlindRemoval, register_copy_with_recycle);
}

/// The pool shrinks below a block that is being released, and grows again; each time, unless the
/// release is in flight.
fn resize_with_release() {
    let pool = pool(2);
    let (kept, block) = (allocate(&pool).unwrap(), allocate(&pool).unwrap());
    let _ = pool.register(block, key(1), Epoch::default());
    let releasing = in_parallel(&pool, move |pool| pool.release(&[block]).unwrap());
    let shrunk = pool.resize(2);
    let hit = pool.lookup(&key(1));
    let _ = pool.resize(3);
    releasing.join().unwrap();
    assert!(shrunk.is_err() || hit.is_none(), "a retired block hit");
    let _ = pool.resize(3).unwrap();
    check_rest(&pool, &[kept]);
}

#[test]
fn resize_vs_release() {
    check(resize_with_release);
}

#[test]
#[should_panic]
fn resize_vs_release_fails_when_releases_do_not_wait() {
    faults::check_with(Fault::EnterResize, resize_with_release);
}

/// The pool shrinks below one of two free blocks while both are wanted.
fn resize_with_allocate() {
    let pool = pool(2);
    let allocating = in_parallel(&pool, |pool| {
        let mut out = Vec::new();
        let _ = pool.allocate(2, &mut out);
        out
    });
    let shrunk = pool.resize(2);
    let taken = allocating.join().unwrap();
    // Refused during the allocation, or after it, or before it.
    assert!(
        matches!((&shrunk, taken.len()), (Err(_) | Ok(1), 2) | (Ok(0), 0)),
        "{shrunk:?} with {taken:?} taken"
    );
    pool.release(&taken).unwrap();
    check_rest(&pool, &[]);
}

#[test]
fn resize_vs_allocate() {
    check(resize_with_allocate);
}

#[test]
#[should_panic]
fn resize_vs_allocate_fails_when_allocations_do_not_wait() {
    faults::check_with(Fault::EnterResize, resize_with_allocate);
}

/// The pool shrinks below a held block that is being registered.
fn resize_with_register() {
    let pool = pool(2);
    let (kept, block) = (allocate(&pool).unwrap(), allocate(&pool).unwrap());
    let registering = in_parallel(&pool, move |pool| {
        pool.register(block, key(1), Epoch::default()).unwrap()
    });
    assert_eq!(pool.resize(2), Ok(1));
    let outcome = registering.join().unwrap();
    assert!(matches!(outcome, Registration::Stale | Registration::New));
    pool.validate().expect("the pool is whole");
    assert_eq!(pool.lookup(&key(1)), None, "a retired block hit");
    pool.release(&[block]).unwrap();
    check_rest(&pool, &[kept]);
}

#[test]
fn resize_vs_register() {
    check(resize_with_register);
}

#[test]
#[should_panic(expected = "retired and holds content")]
fn resize_vs_register_fails_when_registrations_do_not_look_again() {
    faults::check_with(Fault::RegisterRetired, resize_with_register);
}

/// A free block with content leaves the pool and comes back for other content, while a reader looks.
fn resize_with_lookup() {
    let pool = pool(2);
    let (kept, block) = (allocate(&pool).unwrap(), held(&pool, 1));
    pool.release(&[block]).unwrap();
    let looking = in_parallel(&pool, |pool| (pool.lookup(&key(2)), pool.lookup(&key(1))));
    assert_eq!(pool.resize(2), Ok(0));
    assert_eq!(pool.resize(3), Ok(0));
    let left = pool.lookup(&key(1));
    let again = held(&pool, 2);
    let (new, old) = looking.join().unwrap();
    assert_eq!(left, None, "content outlived its block");
    assert!(
        new.is_none() || old.is_none(),
        "old content hit after new content did"
    );
    check_rest(&pool, &[kept, again]);
}

#[test]
fn resize_vs_lookup() {
    check(resize_with_lookup);
}

#[test]
#[should_panic(expected = "content outlived its block")]
fn resize_vs_lookup_fails_when_retired_blocks_keep_their_content() {
    faults::check_with(Fault::KeepRetired, resize_with_lookup);
}

/// Of three free blocks one is being demoted: a concurrent allocation may count on the other two.
fn demote_with_allocate() {
    let pool = pool(3);
    let block = held(&pool, 1);
    assert_eq!(pool.pin(&[block]), Ok(1));
    pool.release(&[block]).unwrap();
    let demoting = in_parallel(&pool, |pool| pool.demote(3));
    let mut out = Vec::new();
    let outcome = pool.allocate(2, &mut out);
    assert_eq!(outcome, Ok(()), "what fits was not served");
    demoting.join().unwrap();
    check_rest(&pool, &out);
}

#[test]
fn demote_vs_allocate() {
    check(demote_with_allocate);
}

#[test]
#[should_panic(expected = "what fits was not served")]
fn demote_vs_allocate_fails_with_credits_for_more_than_it_moves() {
    faults::check_with(Fault::GreedyDemotion, demote_with_allocate);
}

/// The last block of the pinned tier is demoted, touched and evicted at once. Meanwhile a blank one is
/// free, whose credit lets two of the three begin.
fn demote_with_touch_and_evict() {
    let pool = pool(2);
    let block = held(&pool, 1);
    assert_eq!(pool.pin(&[block]), Ok(1));
    pool.release(&[block]).unwrap();
    let demoting = in_parallel(&pool, |pool| pool.demote(1));
    let evicting = in_parallel(&pool, |pool| [allocate(pool), allocate(pool)]);
    let touched = touch(&pool, 1);
    demoting.join().unwrap();
    let evicted = evicting.join().unwrap().into_iter().flatten();
    let held = Vec::from_iter(touched.into_iter().chain(evicted));
    let twice = touched.is_some_and(|block| held[1..].contains(&block));
    assert!(!twice, "a block was handed out twice");
    check_rest(&pool, &held);
}

#[test]
fn demote_vs_touch_vs_evict() {
    check(demote_with_touch_and_evict);
}

#[test]
#[should_panic]
fn demote_vs_touch_vs_evict_fails_with_blind_stores() {
    faults::check_with(Fault::BlindDemotion, demote_with_touch_and_evict);
}

/// One holder pins a block and lets it go while the other lets it go and takes what is free.
fn pin_with_release_and_evict() {
    let pool = pool(1);
    let block = held(&pool, 1);
    assert_eq!(touch(&pool, 1), Some(block));
    let releasing = in_parallel(&pool, move |pool| {
        pool.release(&[block]).unwrap();
        allocate(pool)
    });
    let pinned = pool.pin(&[block]);
    assert_eq!(pinned, Ok(1));
    pool.release(&[block]).unwrap();
    let evicted = releasing.join().unwrap();
    check_rest(&pool, &Vec::from_iter(evicted));
}

#[test]
fn pin_vs_release_vs_evict() {
    check(pin_with_release_and_evict);
}

#[test]
#[should_panic]
fn pin_vs_release_vs_evict_fails_with_blind_stores_of_the_class() {
    faults::check_with(Fault::BlindClass, pin_with_release_and_evict);
}

/// A pin of a duplicate moves the free copy that hits to the pinned line while another thread evicts it, and
/// gives it other content.
fn pin_copy_with_evict() {
    let pool = pool(2);
    let first = held(&pool, 1);
    let duplicate = allocate(&pool).unwrap();
    let outcome = pool.register(duplicate, key(1), Epoch::default());
    assert_eq!(outcome, Ok(Registration::Duplicate(first)));
    pool.release(&[first]).unwrap();
    let evicting = in_parallel(&pool, |pool| {
        let block = allocate(pool)?;
        let _ = pool.register(block, key(2), pool.epoch());
        Some(block)
    });
    let pinned = pool.pin(&[duplicate]).unwrap();
    let evicted = evicting.join().unwrap();
    let class = |id| pool.block(id).state().class();
    if let Some(block) = evicted {
        assert_eq!(class(block), Class::DEFAULT, "other content was pinned");
    }
    assert!(pinned <= 1);
    let held: Vec<BlockId> = evicted.into_iter().chain([duplicate]).collect();
    check_rest(&pool, &held);
}

#[test]
fn pin_copy_vs_evict() {
    check(pin_copy_with_evict);
}

#[test]
#[should_panic(expected = "other content was pinned")]
fn pin_copy_vs_evict_fails_without_the_recheck() {
    faults::check_with(Fault::SkipRecheck, pin_copy_with_evict);
}

/// The band of a pinned block changes where the block stands in line, while another thread evicts it and gives it
/// other content, which has neither band nor pin.
fn band_in_place_with_evict() {
    let pool = pool(1);
    let block = held(&pool, 1);
    assert_eq!(pool.pin(&[block]), Ok(1));
    pool.release(&[block]).unwrap();
    let evicting = in_parallel(&pool, |pool| {
        let block = allocate(pool)?;
        let _ = pool.register(block, key(2), pool.epoch());
        pool.release(&[block]).unwrap();
        Some(block)
    });
    pool.set_band(&key(1), BlockId::NULL, Band::of(60));
    let evicted = evicting.join().unwrap();
    assert_eq!(evicted, Some(block), "what fits was not served");
    check_rest(&pool, &[]);
    assert_eq!(
        pool.band(&key(2)),
        Some(Band::DEFAULT),
        "other content got the band"
    );
}

#[test]
fn band_in_place_vs_evict() {
    check(band_in_place_with_evict);
}

#[test]
#[should_panic]
fn band_in_place_vs_evict_fails_when_the_eviction_tries_once() {
    faults::check_with(Fault::LeaveOnce, band_in_place_with_evict);
}

#[test]
#[should_panic]
fn band_in_place_vs_evict_fails_with_blind_stores() {
    faults::check_with(Fault::BlindClass, band_in_place_with_evict);
}

/// The same of a block whose new content is pinned too, before its band is changed.
fn band_in_place_with_evict_and_pin() {
    let pool = pool(1);
    let block = held(&pool, 1);
    assert_eq!(pool.pin(&[block]), Ok(1));
    pool.release(&[block]).unwrap();
    let evicting = in_parallel(&pool, |pool| {
        let Some(block) = allocate(pool) else { return };
        let _ = pool.register(block, key(2), pool.epoch());
        pool.pin(&[block]).unwrap();
        pool.release(&[block]).unwrap();
    });
    pool.set_band(&key(1), BlockId::NULL, Band::of(60));
    evicting.join().unwrap();
    check_rest(&pool, &[]);
    assert_ne!(
        pool.band(&key(2)),
        Some(Band::of(60)),
        "other content got the band"
    );
}

#[test]
fn band_in_place_vs_evict_and_pin() {
    check(band_in_place_with_evict_and_pin);
}

#[test]
#[should_panic(expected = "other content got the band")]
fn band_in_place_vs_evict_and_pin_fails_without_the_look_at_the_content() {
    faults::check_with(Fault::SkipContentCheck, band_in_place_with_evict_and_pin);
}

/// Everything is forgotten, and a block given up that another thread may have hit before.
fn stale_release_with_touch() {
    let pool = pool(1);
    let block = held(&pool, 1);
    let touching = in_parallel(&pool, |pool| touch(pool, 1));
    pool.clear_index();
    pool.release(&[block]).unwrap();
    let held: Vec<BlockId> = touching.join().unwrap().into_iter().collect();
    check_rest(&pool, &held);
}

#[test]
fn stale_release_vs_touch() {
    check(stale_release_with_touch);
}

#[test]
#[should_panic]
fn stale_release_vs_touch_fails_with_blind_stores() {
    faults::check_with(Fault::BlindBlank, stale_release_with_touch);
}

/// What is behind a window is hit by one thread while another takes a block, which is to be another one: the
/// hit block joins the others at its release.
fn unneeded_with_touch_and_evict() {
    let pool = pool(2);
    let (needed, unneeded) = (held(&pool, 1), held(&pool, 2));
    pool.release(&[needed]).unwrap();
    let evicting = in_parallel(&pool, |pool| allocate(pool));
    pool.release_unneeded(&[unneeded]).unwrap();
    let touched = touch(&pool, 2);
    let taken = evicting.join().unwrap();
    if let Some(hit) = touched {
        assert_eq!(hit, unneeded, "a hit had other content");
        assert_ne!(taken, Some(hit), "a block was handed out twice");
    }
    let held: Vec<BlockId> = touched.into_iter().chain(taken).collect();
    check_rest(&pool, &held);
}

#[test]
fn unneeded_vs_touch_vs_evict() {
    check(unneeded_with_touch_and_evict);
}

#[test]
#[should_panic]
fn unneeded_vs_touch_vs_evict_fails_when_evicted_blocks_stay_hashed() {
    faults::check_with(Fault::EvictHashed, unneeded_with_touch_and_evict);
}

/// The oldest block is touched and released to another queue while a thread asks for a block. Another one is
/// free, so that both may have what they want.
fn evict_with_move_between_queues() {
    let pool = pool_with(2, EvictionPolicy::ReuseQueue);
    let time = std::time::Duration::from_secs(1);
    pool.reuse_queue().unwrap().set_time(time);
    let blocks = [held(&pool, 1), held(&pool, 2)];
    pool.release_to(&blocks, Queue::new(0)).unwrap();
    let evicting = in_parallel(&pool, allocate);
    if let Some(block) = touch(&pool, 1) {
        pool.release_to(&[block], Queue::SHARED).unwrap();
    }
    let held: Vec<BlockId> = evicting.join().unwrap().into_iter().collect();
    check_rest(&pool, &held);
}

#[test]
fn evict_vs_move_between_queues() {
    check(evict_with_move_between_queues);
}

#[test]
#[should_panic(expected = "the pool is whole")]
fn evict_vs_move_between_queues_fails_when_the_line_is_not_looked_at() {
    faults::check_with(Fault::IgnoreClass, evict_with_move_between_queues);
}

/// Two copies of one content are evicted at the same time: whoever listens learns from at least one of them that
/// the content is gone, or it would believe for ever that it is there.
fn two_evictions_of_duplicates() {
    let pool = pool(2);
    pool.listen(2, &[]).unwrap();
    let copies: Vec<BlockId> = (0..2)
        .map(|_| {
            let block = allocate(&pool).unwrap();
            let outcome = pool.register(block, key(1), Epoch::default());
            assert!(outcome.is_ok());
            block
        })
        .collect();
    pool.release(&copies).unwrap();
    let evicting = in_parallel(&pool, allocate);
    let held: Vec<BlockId> = allocate(&pool)
        .into_iter()
        .chain(evicting.join().unwrap())
        .collect();
    let mut evictions = Vec::new();
    pool.take_evictions(8, &mut evictions);
    let says_last = |loss: &Eviction| matches!(loss, Eviction::Block(block) if block.is_last);
    assert_eq!(
        evictions.len(),
        2,
        "an eviction was reported twice or not at all"
    );
    assert!(evictions.iter().any(says_last), "nobody tells of the end");
    check_rest(&pool, &held);
}

#[test]
fn evict_vs_evict_of_duplicates() {
    check(two_evictions_of_duplicates);
}

#[test]
#[should_panic(expected = "nobody tells of the end")]
fn evict_vs_evict_of_duplicates_fails_without_a_fence() {
    faults::check_with(Fault::LookBeforeErased, two_evictions_of_duplicates);
}

/// A pool of two blocks that shrinks to one: the first holds content 2, the second content 1, which goes later.
/// Next to it, what their KV says.
fn shrinking() -> (Pool, Arc<[AtomicU64; 3]>) {
    let pool = pool(2);
    let memory = Arc::new([0, 2, 1].map(AtomicU64::new));
    let blocks = [2, 1].map(|number| held(&pool, number));
    assert_eq!(blocks, [1, 2].map(BlockId::new));
    pool.release(&blocks).unwrap();
    (pool, memory)
}

/// Moves content 1 to the first block, unless another thread is inside a call; how many moved.
fn shrink(pool: &Pool, memory: &[AtomicU64]) -> usize {
    let mut moves = Moves::default();
    if pool.begin_moves(2, 1, &mut moves).is_err() {
        return 0;
    }
    copy_and_finish(pool, memory, &mut moves)
}

fn copy_and_finish(pool: &Pool, memory: &[AtomicU64], moves: &mut Moves) -> usize {
    for one in &moves.in_flight {
        let kv = memory[one.from.index()].load(Ordering::Relaxed);
        memory[one.to.index()].store(kv, Ordering::Relaxed);
    }
    loop {
        match pool.finish_moves(moves) {
            Ok(moved) => return moved,
            Err(_) => thread::yield_now(),
        }
    }
}

/// Content moves while another thread looks for it and for what made way.
fn move_with_lookup() {
    let (pool, memory) = shrinking();
    let looking = {
        let (pool, memory) = (pool.clone(), memory.clone());
        thread::spawn(move || {
            let kept = pool.lookup(&key(1)).expect("content is found all the time");
            let kv = memory[kept.index()].load(Ordering::Relaxed);
            assert_eq!(kv, 1, "a lookup found a block with other content");
            pool.lookup(&key(2))
        })
    };
    assert_eq!(shrink(&pool, &*memory), 1);
    let made_way = looking.join().unwrap();
    assert!(made_way.is_none_or(|block| block == BlockId::new(1)));
    assert_eq!(pool.resize(2), Ok(0));
    assert_eq!(
        pool.lookup(&key(1)),
        Some(BlockId::new(1)),
        "content was lost"
    );
    assert_eq!(pool.lookup(&key(2)), None);
    check_rest(&pool, &[]);
}

#[test]
fn move_vs_lookup() {
    check(move_with_lookup);
}

#[test]
#[should_panic(expected = "a lookup found a block with other content")]
fn move_vs_lookup_fails_when_content_is_found_before_its_copy() {
    faults::check_with(Fault::MoveEarly, move_with_lookup);
}

#[test]
#[should_panic(expected = "content is found all the time")]
fn move_vs_lookup_fails_when_entries_are_looked_at_once() {
    faults::check_with(Fault::LookOnce, move_with_lookup);
}

/// Content moves while another thread hits it and looks at its KV.
fn move_with_touch() {
    let pool = pool(2);
    let memory = [0, 0, 1].map(AtomicU64::new);
    let blank = allocate(&pool).unwrap();
    let block = held(&pool, 1);
    pool.release(&[block, blank]).unwrap();
    let mut moves = Moves::default();
    assert_eq!(pool.begin_moves(2, 1, &mut moves), Ok(()));
    let touching = in_parallel(&pool, |pool| touch(pool, 1));
    let moved = copy_and_finish(&pool, &memory, &mut moves);
    let touched = touching.join().unwrap();
    if let Some(block) = touched {
        let kv = memory[block.index()].load(Ordering::Relaxed);
        assert_eq!(kv, 1, "a hit had other content");
    }
    // A hit during the move may be a miss, and holds the block that it found first.
    let moved_first = touched.is_none_or(|block| block == BlockId::new(1));
    assert_eq!(moved == 1, moved_first);
    pool.release(&Vec::from_iter(touched)).unwrap();
    assert!(pool.lookup(&key(1)).is_some(), "content was lost");
    assert_eq!(pool.resize(2), Ok(0));
    check_rest(&pool, &[]);
}

#[test]
fn move_vs_touch() {
    check(move_with_touch);
}

#[test]
#[should_panic]
fn move_vs_touch_fails_when_the_holder_is_not_looked_for() {
    faults::check_with(Fault::BlindMove, move_with_touch);
}

/// Content moves while another thread takes a block and lets it go.
fn move_with_allocate() {
    let (pool, memory) = shrinking();
    let allocating = {
        let (pool, memory) = (pool.clone(), memory.clone());
        thread::spawn(move || {
            let Some(block) = allocate(&pool) else { return };
            memory[block.index()].store(3, Ordering::Relaxed);
            pool.release(&[block]).unwrap();
        })
    };
    shrink(&pool, &*memory);
    allocating.join().unwrap();
    if let Some(block) = pool.lookup(&key(1)) {
        let kv = memory[block.index()].load(Ordering::Relaxed);
        assert_eq!(kv, 1, "a block of the move was handed out");
    }
    assert!(pool.resize(2).is_ok());
    check_rest(&pool, &[]);
}

#[test]
fn move_vs_allocate() {
    check(move_with_allocate);
}

/// Content moves while another thread registers a copy of it.
fn move_with_register() {
    let pool = pool(3);
    let memory = [0, 0, 1, 1].map(AtomicU64::new);
    let blank = allocate(&pool).unwrap();
    let block = held(&pool, 1);
    let copy = allocate(&pool).unwrap();
    pool.release(&[block, blank]).unwrap();
    let registering = in_parallel(&pool, move |pool| {
        pool.register(copy, key(1), Epoch::default()).unwrap()
    });
    assert_eq!(shrink(&pool, &memory), 1);
    let outcome = registering.join().unwrap();
    let is_duplicate = matches!(outcome, Registration::Duplicate(_));
    assert!(is_duplicate, "{outcome:?} though there is a copy");
    assert_eq!(pool.lookup(&key(1)), Some(blank), "the first hits");
    pool.release(&[copy]).unwrap();
    assert_eq!(pool.resize(2), Ok(0));
    check_rest(&pool, &[]);
}

#[test]
fn move_vs_register() {
    check(move_with_register);
}

#[test]
#[should_panic(expected = "though there is a copy")]
fn move_vs_register_fails_when_entries_are_looked_at_once() {
    faults::check_with(Fault::LookOnce, move_with_register);
}
