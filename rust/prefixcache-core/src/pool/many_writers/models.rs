//! Every interleaving of two or three threads on a pool of one or two blocks.

use loom::sync::Arc;
use loom::thread::{self, JoinHandle};

use super::MultiWriter as Pool;
use crate::class::Class;
use crate::evictions::Eviction;
use crate::id::{BlockHash, BlockId, BlockKey, GroupId};
use crate::policy::{EvictionPolicy, Queue};
use crate::records::Content;
use crate::store::{BlockStore, Lookup, Moves, PoolConfig, Registration};
use crate::sync::{AtomicU64, Ordering, model};

/// Starts a thread with a right of its own to change the pool.
fn in_parallel<T: 'static>(
    pool: &Pool,
    work: impl FnOnce(&mut Pool) -> T + 'static,
) -> JoinHandle<T> {
    let mut pool = pool.clone();
    thread::spawn(move || work(&mut pool))
}

fn pool(blocks: usize) -> Pool {
    pool_with(blocks, EvictionPolicy::Lru)
}

fn pool_with(blocks: usize, eviction_policy: EvictionPolicy) -> Pool {
    let config = PoolConfig::new(blocks + 1).with_eviction_policy(eviction_policy);
    Pool::with_ring_capacity(config, 8).unwrap()
}

fn key(number: u8) -> BlockKey {
    BlockKey::new(BlockHash::from_bytes([number; 32]), GroupId::default())
}

fn allocate(pool: &mut Pool) -> Option<BlockId> {
    let mut out = Vec::new();
    pool.allocate(1, &mut out).ok().map(|()| out[0])
}

fn touch(pool: &mut Pool, number: u8) -> Option<BlockId> {
    let mut out = Vec::new();
    let hits = pool.commit(std::iter::once(key(number)), 0, &mut out);
    (hits == Ok(1)).then(|| out[0])
}

/// Registers content in the epoch of now.
fn put(pool: &mut Pool, block: BlockId, number: u8) -> Registration {
    pool.register(block, key(number), pool.epoch()).unwrap()
}

/// A held block with content.
fn held(pool: &mut Pool, number: u8) -> BlockId {
    let block = allocate(pool).unwrap();
    assert_eq!(put(pool, block, number), Registration::New);
    block
}

/// A free block with content.
fn cached(pool: &mut Pool, number: u8) -> BlockId {
    let block = held(pool, number);
    pool.release(&[block]).unwrap();
    block
}

/// A free block with content that is pinned.
fn pinned(pool: &mut Pool, number: u8) -> BlockId {
    let block = held(pool, number);
    assert_eq!(pool.pin(&[block]), Ok(1));
    pool.release(&[block]).unwrap();
    block
}

/// Takes a block for other content.
fn recycle(pool: &mut Pool) -> Option<BlockId> {
    let block = allocate(pool)?;
    let _ = put(pool, block, 2);
    Some(block)
}

/// At rest, with `held` in somebody's hands.
fn check_rest(pool: &Pool, held: impl IntoIterator<Item = BlockId>) {
    pool.validate().expect("the pool is whole");
    let mut distinct = Vec::from_iter(held);
    distinct.sort_unstable();
    distinct.dedup();
    let free = pool.num_blocks() - 1 - distinct.len();
    assert_eq!(pool.num_free(), free, "blocks were lost or doubled");
}

/// One block is released, touched and evicted at once.
fn release_with_evict_and_touch() {
    let mut pool = pool(1);
    let block = held(&mut pool, 1);
    let releasing = in_parallel(&pool, move |pool| pool.release(&[block]).unwrap());
    let evicting = in_parallel(&pool, allocate);
    let touched = touch(&mut pool, 1);
    releasing.join().unwrap();
    let evicted = evicting.join().unwrap();
    assert!(touched.is_none() || evicted.is_none(), "a block was handed out twice");
    check_rest(&pool, touched.into_iter().chain(evicted));
}

model!(release_with_evict_and_touch, fails with EvictHashed(""));

/// A block's two holders let go at once.
fn two_releases() {
    let mut pool = pool(1);
    let block = held(&mut pool, 1);
    assert_eq!(touch(&mut pool, 1), Some(block));
    let releasing = in_parallel(&pool, move |pool| pool.release(&[block]).unwrap());
    pool.release(&[block]).unwrap();
    releasing.join().unwrap();
    check_rest(&pool, []);
    assert_eq!(touch(&mut pool, 1), Some(block), "content was lost");
}

model!(two_releases, fails with ForgetLastHolder(""));

/// A block is recycled for other content while one thread wants the old content and another looks.
fn recycle_with_touch_and_lookup() {
    let mut pool = pool(1);
    cached(&mut pool, 1);
    let recycling = in_parallel(&pool, |pool| {
        let block = recycle(pool)?;
        pool.release(&[block]).unwrap();
        Some(block)
    });
    let looking = in_parallel(&pool, |pool| (pool.lookup(&key(2)), pool.lookup(&key(1))));
    let touched = touch(&mut pool, 1);
    let is_first = |block: BlockId| pool.block(block).content() == Content::from(&key(1));
    assert!(touched.is_none_or(is_first), "a hit had other content");
    let recycled = recycling.join().unwrap();
    let (new, old) = looking.join().unwrap();
    assert!(new.is_none() || old.is_none(), "old content hit after new content did");
    assert!(new.is_none() || recycled.is_some());
    assert!(touched.is_none_or(is_first), "a held block was recycled");
    check_rest(&pool, touched);
}

model!(recycle_with_touch_and_lookup, fails with SkipRecheck("a hit had other content"), EvictHashed(""));

/// The index is cleared while a block of the epoch before is being registered.
fn clear_with_register() {
    let mut pool = pool(1);
    let epoch = pool.epoch();
    let block = allocate(&mut pool).unwrap();
    let clearing = in_parallel(&pool, |pool| pool.clear_index());
    let _ = pool.register(block, key(1), epoch);
    clearing.join().unwrap();
    assert_eq!(pool.lookup(&key(1)), None, "content outlived the clearing");
    check_rest(&pool, [block]);
}

model!(clear_with_register, fails with EpochOfNow("content outlived the clearing"));

/// A commit of one hit, misses and a new block needs two blocks, a concurrent allocation the third.
fn commit_with_allocate() {
    let mut pool = pool(3);
    cached(&mut pool, 1);
    let allocating = in_parallel(&pool, allocate);
    let mut out = Vec::new();
    let hits = pool.commit([1, 2, 3].map(key).into_iter(), 1, &mut out);
    out.extend(allocating.join().unwrap());
    assert_eq!((hits, out.len()), (Ok(1), 3), "what fits was not served");
    check_rest(&pool, out);
}

model!(commit_with_allocate, fails with CreditsForMisses("what fits was not served"));

/// A hit is held when the commit counts what it needs, and free when it takes it: it gets all or
/// nothing. Another hit comes first, which a commit that fails has to give back.
fn commit_with_release() {
    let mut pool = pool(2);
    let [kept, released] = [1, 2].map(|number| held(&mut pool, number));
    let releasing = in_parallel(&pool, move |pool| pool.release(&[released]).unwrap());
    let mut out = Vec::new();
    let outcome = pool.commit([1, 2].map(key).into_iter(), 0, &mut out);
    releasing.join().unwrap();
    assert_eq!(out.len(), outcome.unwrap_or(0));
    pool.release(&out).unwrap();
    pool.release(&[kept]).unwrap();
    check_rest(&pool, []);
}

model!(commit_with_release, fails with KeepHitsOfFailure("blocks were lost or doubled"));

/// The index is full, one of its entries is of an ended epoch, and the block of that one is recycled
/// while another block is registered, which may take the place of the entry.
fn recycle_with_register_after_a_clear() {
    let mut pool = pool(3);
    cached(&mut pool, 1);
    pool.clear_index();
    let [first, second] = [2, 3].map(|_| allocate(&mut pool).unwrap());
    assert_eq!(put(&mut pool, first, 2), Registration::New);
    let recycling = in_parallel(&pool, allocate);
    let outcome = put(&mut pool, second, 3);
    let recycled = recycling.join().unwrap();
    // One bucket is too small an index to try a place again that was emptied after the first look.
    let refused = outcome == Registration::Stale && pool.content_drops() == 1;
    let hits = pool.lookup(&key(3)) == Some(second);
    assert!(hits != refused, "content was lost");
    assert_eq!(pool.lookup(&key(2)), Some(first), "content was lost");
    check_rest(&pool, [first, second, recycled.unwrap()]);
}

model!(recycle_with_register_after_a_clear, fails with BlindRemoval("content was lost"));

/// Two threads register the same content: exactly one is the first, and its block hits.
fn two_registrations() {
    let mut pool = pool(2);
    let [mine, others] = [(); 2].map(|()| allocate(&mut pool).unwrap());
    let registering = in_parallel(&pool, move |pool| put(pool, others, 1));
    let outcomes = (put(&mut pool, mine, 1), registering.join().unwrap());
    let first = match outcomes {
        (Registration::New, Registration::Duplicate(first)) if first == mine => mine,
        (Registration::Duplicate(first), Registration::New) if first == others => others,
        _ => panic!("exactly one is the first: {outcomes:?}"),
    };
    assert_eq!(pool.lookup(&key(1)), Some(first), "the first hits");
    check_rest(&pool, [mine, others]);
}

model!(
    two_registrations,
    fails with LookEarly("exactly one is the first"), NumberEarly("exactly one is the first")
);

/// There are copies enough. A further one takes the entry of a free one, which is recycled meanwhile.
fn register_copy_with_recycle() {
    let mut pool = pool(3);
    let first = held(&mut pool, 1);
    let [surplus, last] = [1, 1].map(|_| allocate(&mut pool).unwrap());
    assert_eq!(put(&mut pool, surplus, 1), Registration::Duplicate(first));
    pool.release(&[surplus]).unwrap();
    let recycling = in_parallel(&pool, allocate);
    let outcome = put(&mut pool, last, 1);
    assert_eq!(recycling.join().unwrap(), Some(surplus));
    check_rest(&pool, [first, surplus, last]);
    if outcome == Registration::Stale {
        // One bucket is too small an index to try a place again that was emptied after the first look.
        return assert_eq!(pool.content_drops(), 1);
    }
    assert_eq!(outcome, Registration::Duplicate(first));
    pool.release(&[first]).unwrap();
    assert_eq!(allocate(&mut pool), Some(first));
    assert_eq!(pool.lookup(&key(1)), Some(last), "a copy was lost");
}

model!(register_copy_with_recycle, fails with BlindRemoval(""));

/// The pool shrinks below a block that is being released, and grows again; each time, unless the
/// release is in flight.
fn resize_with_release() {
    let mut pool = pool(2);
    let (kept, block) = (allocate(&mut pool).unwrap(), held(&mut pool, 1));
    let releasing = in_parallel(&pool, move |pool| pool.release(&[block]).unwrap());
    let shrunk = pool.resize(2);
    let hit = pool.lookup(&key(1));
    let _ = pool.resize(3);
    releasing.join().unwrap();
    assert!(shrunk.is_err() || hit.is_none(), "a retired block hit");
    let _ = pool.resize(3).unwrap();
    check_rest(&pool, [kept]);
}

model!(resize_with_release, fails with EnterResize(""));

/// The pool shrinks below one of two free blocks while both are wanted.
fn resize_with_allocate() {
    let mut pool = pool(2);
    let allocating = in_parallel(&pool, |pool| {
        let mut out = Vec::new();
        let _ = pool.allocate(2, &mut out);
        out
    });
    let shrunk = pool.resize(2);
    let taken = allocating.join().unwrap();
    // Refused during the allocation, or after it, or before it.
    let is_possible = matches!((&shrunk, taken.len()), (Err(_) | Ok(1), 2) | (Ok(0), 0));
    assert!(is_possible, "{shrunk:?} with {taken:?} taken");
    pool.release(&taken).unwrap();
    check_rest(&pool, []);
}

model!(resize_with_allocate, fails with EnterResize(""));

/// The pool shrinks below a held block that is being registered.
fn resize_with_register() {
    let mut pool = pool(2);
    let [kept, block] = [(); 2].map(|()| allocate(&mut pool).unwrap());
    let registering = in_parallel(&pool, move |pool| put(pool, block, 1));
    assert_eq!(pool.resize(2), Ok(1));
    let outcome = registering.join().unwrap();
    assert!(matches!(outcome, Registration::Stale | Registration::New));
    pool.validate().expect("the pool is whole");
    assert_eq!(pool.lookup(&key(1)), None, "a retired block hit");
    pool.release(&[block]).unwrap();
    check_rest(&pool, [kept]);
}

model!(resize_with_register, fails with RegisterRetired("retired and holds content"));

/// A free block with content leaves the pool and comes back for other content, while a reader looks.
fn resize_with_lookup() {
    let mut pool = pool(2);
    let kept = allocate(&mut pool).unwrap();
    cached(&mut pool, 1);
    let looking = in_parallel(&pool, |pool| (pool.lookup(&key(2)), pool.lookup(&key(1))));
    assert_eq!(pool.resize(2), Ok(0));
    assert_eq!(pool.resize(3), Ok(0));
    let left = pool.lookup(&key(1));
    let again = held(&mut pool, 2);
    let (new, old) = looking.join().unwrap();
    assert_eq!(left, None, "content outlived its block");
    assert!(new.is_none() || old.is_none(), "old content hit after new content did");
    check_rest(&pool, [kept, again]);
}

model!(resize_with_lookup, fails with KeepRetired("content outlived its block"));

/// Of three free blocks one is being demoted: a concurrent allocation may count on the other two.
fn demote_with_allocate() {
    let mut pool = pool(3);
    pinned(&mut pool, 1);
    let demoting = in_parallel(&pool, |pool| pool.demote(3));
    let mut out = Vec::new();
    assert_eq!(pool.allocate(2, &mut out), Ok(()), "what fits was not served");
    demoting.join().unwrap();
    check_rest(&pool, out);
}

model!(demote_with_allocate, fails with GreedyDemotion("what fits was not served"));

/// The last block of the pinned tier is demoted, touched and evicted at once. Meanwhile a blank one is
/// free, whose credit lets two of the three begin.
fn demote_with_touch_and_evict() {
    let mut pool = pool(2);
    pinned(&mut pool, 1);
    let demoting = in_parallel(&pool, |pool| pool.demote(1));
    let evicting = in_parallel(&pool, |pool| [allocate(pool), allocate(pool)]);
    let touched = touch(&mut pool, 1);
    demoting.join().unwrap();
    let evicted = Vec::from_iter(evicting.join().unwrap().into_iter().flatten());
    let twice = touched.is_some_and(|block| evicted.contains(&block));
    assert!(!twice, "a block was handed out twice");
    check_rest(&pool, evicted.into_iter().chain(touched));
}

model!(demote_with_touch_and_evict, fails with BlindDemotion(""));

/// One holder pins a block and lets it go while the other lets it go and takes what is free.
fn pin_with_release_and_evict() {
    let mut pool = pool(1);
    let block = held(&mut pool, 1);
    assert_eq!(touch(&mut pool, 1), Some(block));
    let releasing = in_parallel(&pool, move |pool| {
        pool.release(&[block]).unwrap();
        allocate(pool)
    });
    assert_eq!(pool.pin(&[block]), Ok(1));
    pool.release(&[block]).unwrap();
    let evicted = releasing.join().unwrap();
    check_rest(&pool, evicted);
}

model!(pin_with_release_and_evict, fails with BlindClass(""));

/// A pin of a duplicate moves the free copy that hits to the pinned line while another thread evicts it, and
/// gives it other content.
fn pin_copy_with_evict() {
    let mut pool = pool(2);
    let first = held(&mut pool, 1);
    let duplicate = allocate(&mut pool).unwrap();
    assert_eq!(put(&mut pool, duplicate, 1), Registration::Duplicate(first));
    pool.release(&[first]).unwrap();
    let evicting = in_parallel(&pool, recycle);
    assert!(pool.pin(&[duplicate]).unwrap() <= 1);
    let evicted = evicting.join().unwrap();
    let class = |id| pool.block(id).state().standing().class();
    assert!(evicted.is_none_or(|id| class(id) == Class::DEFAULT), "other content was pinned");
    check_rest(&pool, evicted.into_iter().chain([duplicate]));
}

model!(pin_copy_with_evict, fails with SkipRecheck("other content was pinned"));

/// Everything is forgotten, and a block given up that another thread may have hit before.
fn stale_release_with_touch() {
    let mut pool = pool(1);
    let block = held(&mut pool, 1);
    let touching = in_parallel(&pool, |pool| touch(pool, 1));
    pool.clear_index();
    pool.release(&[block]).unwrap();
    let touched = touching.join().unwrap();
    check_rest(&pool, touched);
}

model!(stale_release_with_touch, fails with BlindBlank(""));

/// What is behind a window is hit by one thread while another takes a block, which is to be another one: the
/// hit block joins the others at its release.
fn unneeded_with_touch_and_evict() {
    let mut pool = pool(2);
    let (needed, unneeded) = (held(&mut pool, 1), held(&mut pool, 2));
    pool.release(&[needed]).unwrap();
    let evicting = in_parallel(&pool, allocate);
    pool.release_unneeded(&[unneeded]).unwrap();
    let touched = touch(&mut pool, 2);
    let evicted = evicting.join().unwrap();
    if let Some(hit) = touched {
        assert_eq!(hit, unneeded, "a hit had other content");
        assert_ne!(evicted, Some(hit), "a block was handed out twice");
    }
    check_rest(&pool, touched.into_iter().chain(evicted));
}

model!(unneeded_with_touch_and_evict, fails with EvictHashed(""));

/// The oldest block is touched and released to another queue while a thread asks for a block. Another one is
/// free, so that both may have what they want.
fn evict_with_move_between_queues() {
    let mut pool = pool_with(2, EvictionPolicy::ReuseQueue);
    pool.set_time(std::time::Duration::from_secs(1));
    let blocks = [held(&mut pool, 1), held(&mut pool, 2)];
    pool.release_to(&blocks, Queue::new(0)).unwrap();
    let evicting = in_parallel(&pool, allocate);
    if let Some(block) = touch(&mut pool, 1) {
        pool.release_to(&[block], Queue::SHARED).unwrap();
    }
    let evicted = evicting.join().unwrap();
    check_rest(&pool, evicted);
}

model!(evict_with_move_between_queues, fails with IgnoreClass("the pool is whole"));

/// Two copies of one content are evicted at the same time: whoever listens learns from at least one of them that
/// the content is gone, or it would believe for ever that it is there.
fn two_evictions_of_duplicates() {
    let mut pool = pool(2);
    pool.evictions().listen(2, &[]).unwrap();
    let copies = [(); 2].map(|()| allocate(&mut pool).unwrap());
    let _ = copies.map(|block| put(&mut pool, block, 1));
    pool.release(&copies).unwrap();
    let evicting = in_parallel(&pool, allocate);
    let held = [allocate(&mut pool), evicting.join().unwrap()];
    let mut evictions = Vec::new();
    pool.evictions().take(8, &mut evictions);
    let says_last = |loss: &Eviction| matches!(loss, Eviction::Block(block) if block.is_last);
    assert_eq!(evictions.len(), 2, "an eviction was reported twice or not at all");
    assert!(evictions.iter().any(says_last), "nobody tells of the end");
    check_rest(&pool, held.into_iter().flatten());
}

model!(two_evictions_of_duplicates, fails with LookBeforeErased("nobody tells of the end"));

/// A pool of two blocks that shrinks to one: the first holds content 2, the second content 1, which goes later.
/// Next to it, what their KV says.
fn shrinking() -> (Pool, Arc<[AtomicU64; 3]>) {
    let mut pool = pool(2);
    let blocks = [2, 1].map(|number| held(&mut pool, number));
    assert_eq!(blocks, [1, 2].map(BlockId::new));
    pool.release(&blocks).unwrap();
    (pool, Arc::new([0, 2, 1].map(AtomicU64::new)))
}

/// Moves content 1 to the first block, unless another thread is inside a call; how many moved.
fn shrink(pool: &mut Pool, memory: &[AtomicU64]) -> usize {
    let mut moves = Moves::default();
    match pool.begin_moves(2, 1, &mut moves) {
        Ok(()) => copy_and_finish(pool, memory, &mut moves),
        Err(_) => 0,
    }
}

fn copy_and_finish(pool: &mut Pool, memory: &[AtomicU64], moves: &mut Moves) -> usize {
    for step in &moves.in_flight {
        let kv = memory[step.from.index()].load(Ordering::Relaxed);
        memory[step.to.index()].store(kv, Ordering::Relaxed);
    }
    loop {
        match pool.finish_moves(moves) {
            Ok(moved) => return moved,
            Err(_) => thread::yield_now(),
        }
    }
}

/// What the KV of a block says.
fn kv(memory: &[AtomicU64], block: BlockId) -> u64 {
    memory[block.index()].load(Ordering::Relaxed)
}

/// Content moves while another thread looks for it and for what made way.
fn move_with_lookup() {
    let (mut pool, memory) = shrinking();
    let seen = memory.clone();
    let looking = in_parallel(&pool, move |pool| {
        let kept = pool.lookup(&key(1)).expect("content is found all the time");
        assert_eq!(kv(&*seen, kept), 1, "a lookup found a block with other content");
        pool.lookup(&key(2))
    });
    assert_eq!(shrink(&mut pool, &*memory), 1);
    let made_way = looking.join().unwrap();
    assert!(made_way.is_none_or(|block| block == BlockId::new(1)));
    assert_eq!(pool.resize(2), Ok(0));
    assert_eq!(pool.lookup(&key(1)), Some(BlockId::new(1)), "content was lost");
    assert_eq!(pool.lookup(&key(2)), None);
    check_rest(&pool, []);
}

model!(
    move_with_lookup,
    fails with MoveEarly("a lookup found a block with other content"), LookOnce("content is found all the time")
);

/// Content moves while another thread hits it and looks at its KV.
fn move_with_touch() {
    let mut pool = pool(2);
    let memory = [0, 0, 1].map(AtomicU64::new);
    let blank = allocate(&mut pool).unwrap();
    let block = held(&mut pool, 1);
    pool.release(&[block, blank]).unwrap();
    let mut moves = Moves::default();
    assert_eq!(pool.begin_moves(2, 1, &mut moves), Ok(()));
    let touching = in_parallel(&pool, |pool| touch(pool, 1));
    let moved = copy_and_finish(&mut pool, &memory, &mut moves);
    let touched = touching.join().unwrap();
    assert!(touched.is_none_or(|block| kv(&memory, block) == 1), "a hit had other content");
    // A hit during the move may be a miss, and holds the block that it found first.
    let moved_first = touched.is_none_or(|block| block == BlockId::new(1));
    assert_eq!(moved == 1, moved_first);
    pool.release(&Vec::from_iter(touched)).unwrap();
    assert!(pool.lookup(&key(1)).is_some(), "content was lost");
    assert_eq!(pool.resize(2), Ok(0));
    check_rest(&pool, []);
}

model!(move_with_touch, fails with BlindMove(""));

/// Content moves while another thread takes a block and lets it go.
fn move_with_allocate() {
    let (mut pool, memory) = shrinking();
    let written = memory.clone();
    let allocating = in_parallel(&pool, move |pool| {
        let Some(block) = allocate(pool) else { return };
        written[block.index()].store(3, Ordering::Relaxed);
        pool.release(&[block]).unwrap();
    });
    shrink(&mut pool, &*memory);
    allocating.join().unwrap();
    let hit = pool.lookup(&key(1));
    assert!(hit.is_none_or(|block| kv(&*memory, block) == 1), "a block of the move was handed out");
    assert!(pool.resize(2).is_ok());
    check_rest(&pool, []);
}

model!(move_with_allocate);

/// Content moves while another thread registers a copy of it.
fn move_with_register() {
    let mut pool = pool(3);
    let memory = [0, 0, 1, 1].map(AtomicU64::new);
    let blank = allocate(&mut pool).unwrap();
    let block = held(&mut pool, 1);
    let copy = allocate(&mut pool).unwrap();
    pool.release(&[block, blank]).unwrap();
    let registering = in_parallel(&pool, move |pool| put(pool, copy, 1));
    assert_eq!(shrink(&mut pool, &memory), 1);
    let outcome = registering.join().unwrap();
    let is_duplicate = matches!(outcome, Registration::Duplicate(_));
    assert!(is_duplicate, "{outcome:?} though there is a copy");
    assert_eq!(pool.lookup(&key(1)), Some(blank), "the first hits");
    pool.release(&[copy]).unwrap();
    assert_eq!(pool.resize(2), Ok(0));
    check_rest(&pool, []);
}

model!(move_with_register, fails with LookOnce("though there is a copy"));
