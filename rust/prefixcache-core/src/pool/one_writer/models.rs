//! Every interleaving of the writer, who changes a pool of a few blocks, with one who looks.

use loom::sync::Arc;
use loom::thread;

use super::{Reader, Writer};
use crate::id::{BlockHash, BlockId, BlockKey, GroupId};
use crate::store::{BlockStore, Lookup, Moves, PoolConfig, WithReaders};
use crate::sync::{AtomicU64, Ordering::Relaxed, model};

fn key(number: u8) -> BlockKey {
    BlockKey::new(BlockHash::from_bytes([number; 32]), GroupId::default())
}

/// A pool of as many free blocks, each with the content of its number.
fn cached(num_blocks: u32) -> Writer {
    let mut pool = Writer::new(PoolConfig::new(num_blocks as usize + 1)).unwrap();
    let mut blocks = Vec::new();
    pool.allocate(num_blocks as usize, &mut blocks).unwrap();
    for &block in &blocks {
        let _ = pool.register(block, key(block.get() as u8), pool.epoch()).unwrap();
    }
    pool.release(&blocks).unwrap();
    pool
}

/// Runs `look` in parallel with `write`, which ends with a sound pool.
fn look_while<T: 'static>(
    mut pool: Writer,
    write: impl FnOnce(&mut Writer),
    look: impl FnOnce(&Reader) -> T + 'static,
) -> T {
    let reader = pool.reader();
    let looking = thread::spawn(move || look(&reader));
    write(&mut pool);
    let seen = looking.join().unwrap();
    pool.validate().expect("the pool is whole");
    seen
}

/// Takes the first block of the order for content `number`.
fn recycle(pool: &mut Writer, number: u8) {
    let mut blocks = Vec::new();
    pool.allocate(1, &mut blocks).unwrap();
    let _ = pool.register(blocks[0], key(number), pool.epoch()).unwrap();
    pool.release(&blocks).unwrap();
}

/// A block is recycled for other content: old content does not hit once new content did, and what stays is found.
fn evict_with_lookup() {
    let look = |pool: &Reader| [9, 1, 2].map(|number| pool.lookup(&key(number)));
    let [new, old, other] = look_while(cached(2), |pool| recycle(pool, 9), look);
    assert!(new.is_none() || old.is_none(), "old content hit after new content did");
    assert_eq!(other, Some(BlockId::new(2)), "content was overlooked");
}

model!(evict_with_lookup);

/// The last block's content moves to the first: a lookup finds it where it was, or, once it was copied, where it is.
fn shrink_with_lookup() {
    let copied = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&copied);
    let shrink = |pool: &mut Writer| {
        let mut moves = Moves::default();
        pool.begin_moves(2, 1, &mut moves).unwrap();
        copied.store(1, Relaxed);
        pool.finish_moves(&mut moves).unwrap();
        pool.resize(2).unwrap();
    };
    let look = move |pool: &Reader| (pool.lookup(&key(2)), seen.load(Relaxed));
    let (hit, was_copied) = look_while(cached(2), shrink, look);
    assert!(hit.is_some(), "content that moved was overlooked");
    let is_first = hit == Some(BlockId::new(1));
    assert!(!is_first || was_copied == 1, "content was found before it was copied");
}

model!(shrink_with_lookup, fails with LookOnce("overlooked"), MoveEarly("before it was copied"));

/// After a clear has been seen nothing of before hits, though the block gets the same content again.
fn clear_with_lookup() {
    let clear = |pool: &mut Writer| {
        pool.clear_index();
        recycle(pool, 9);
    };
    let look = |pool: &Reader| (pool.epoch().get(), pool.lookup(&key(1)));
    let (epoch, hit) = look_while(cached(1), clear, look);
    assert!(epoch == 0 || hit.is_none(), "content of an ended epoch hit");
}

model!(clear_with_lookup);
