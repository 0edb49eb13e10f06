//! Every invariant of a pool at rest.

use std::collections::HashSet;

use super::MultiPool;
use super::block::{Block, State, Ticket};
use super::ring::Ring;
use crate::class::{Class, Standing};
use crate::error::Broken;
use crate::id::BlockId;

type Check = Result<(), Broken>;

/// Checks the whole structure, on which no other thread may be working.
pub(super) fn validate(pool: &MultiPool) -> Check {
    let mut free = vec![false; pool.config.max_blocks];
    let blank = check_blank(pool, &mut free)?;
    let mut found = blank;
    for (ring, class) in pool.rings.iter().zip(Class::all()) {
        let in_line = check_ring(pool, ring, class, &mut free)?;
        let used = pool.classes.used().contains(class);
        ensure(used || in_line == 0, || {
            format!("{in_line} blocks stand in the line of {class:?}, which is not marked as used")
        })?;
        found += in_line;
    }
    // No credit stands for the leaving blocks among them.
    found -= free[pool.size.end()..].iter().filter(|&&free| free).count();
    let available = pool.credits.available();
    ensure(found == available, || {
        format!("{found} blocks are free, {available} credits are left")
    })?;
    (1..pool.config.max_blocks).try_for_each(|index| check_block(pool, index, free[index]))?;
    check_size(pool)?;
    check_pins(pool)?;
    check_contents(pool)
}

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Check {
    if holds { Ok(()) } else { Err(Broken(what())) }
}

/// Marks a block as free; fails if it was already, or is not in the pool.
fn mark(pool: &MultiPool, free: &mut [bool], id: BlockId) -> Check {
    ensure(!id.is_null() && !pool.records.is_retired(id), || {
        format!("block {id} is free and not in the pool")
    })?;
    let before = std::mem::replace(&mut free[id.index()], true);
    ensure(!before, || format!("block {id} is free twice"))
}

/// The stack and the run of fresh blocks.
fn check_blank(pool: &MultiPool, free: &mut [bool]) -> Result<usize, Broken> {
    let mut count = 0;
    for id in pool.stack.walk(pool.records.blocks()) {
        mark(pool, free, id)?;
        let idle = pool.block(id).state() == State::IDLE;
        ensure(idle, || format!("block {id} is among the blank ones and not idle"))?;
        count += 1;
    }
    Ok(count)
}

fn check_ring(
    pool: &MultiPool,
    ring: &Ring,
    class: Class,
    free: &mut [bool],
) -> Result<usize, Broken> {
    let (head, tail) = (ring.head(), ring.tail());
    let span = tail.since(head);
    ensure(span <= ring.capacity(), || format!("{class:?} ring: {span} slots from head to tail"))?;
    ring.check_vacated(pool.records.blocks()).map_err(Broken)?;
    let mut before: Option<Ticket> = None;
    let mut count = 0;
    for (ticket, id) in ring.walk(pool.records.blocks()) {
        mark(pool, free, id)?;
        let in_order = before.is_none_or(|before| before.is_before(ticket));
        ensure(in_order, || format!("{class:?} ring: {before:?} stands before {ticket:?}"))?;
        before = Some(ticket);
        count += 1;
    }
    Ok(count)
}

fn check_block(pool: &MultiPool, index: usize, is_free: bool) -> Check {
    let id = BlockId::new(index as u32);
    let block = pool.block(id);
    let state = block.state();
    ensure(!state.is_claimed(), || format!("block {id} is claimed by nobody"))?;
    let (above, retired) = (pool.is_above(id), pool.records.is_retired(id));
    ensure(!(state.is_held() && is_free), || format!("block {id} is held and free"))?;
    ensure(state.is_held() || is_free || above, || format!("block {id} is lost"))?;
    let nowhere = above && !is_free;
    ensure(!nowhere || state.is_held() || state == State::IDLE, || {
        format!("block {id} stands nowhere and is not idle")
    })?;
    ensure(!retired || !is_free, || format!("block {id} is retired and in line"))?;
    check_content(pool, id, block, state)
}

fn check_content(pool: &MultiPool, id: BlockId, block: &Block, state: State) -> Check {
    ensure(state.is_hashed() == (block.seq() != 0), || {
        format!("block {id}: its state and its record differ about content")
    })?;
    ensure(!state.is_hashed() || !pool.records.is_retired(id), || {
        format!("block {id} is retired and holds content")
    })?;
    let is_plain = state.standing() == Standing::default();
    ensure(state.is_hashed() || is_plain, || {
        format!("block {id} has a class or a pin without content")
    })
}

/// The bounds, and the count of blocks that are held though they are handed out no more.
fn check_size(pool: &MultiPool) -> Check {
    let (end, num_blocks) = (pool.size.end(), pool.records.num_blocks());
    ensure(end <= num_blocks, || format!("blocks up to {end} of {num_blocks} are handed out"))?;
    let above = &pool.records.blocks()[end..];
    let held = above.iter().filter(|block| block.state().is_held()).count();
    let counted = pool.size.held_above();
    ensure(held == counted, || {
        format!("{held} blocks above the end are held, {counted} are counted")
    })
}

fn check_pins(pool: &MultiPool) -> Check {
    let is_pinned = |block: &&Block| block.state().standing().is_pinned();
    let pinned = pool.records.blocks().iter().filter(is_pinned).count();
    let counted = pool.counters.pinned();
    ensure(pinned == counted, || format!("{pinned} blocks are pinned, {counted} are counted"))
}

/// The index and the counts over all content.
fn check_contents(pool: &MultiPool) -> Check {
    let ids = || (1..pool.config.max_blocks as u32).map(BlockId::new);
    let hashed: Vec<BlockId> = ids().filter(|&id| pool.block(id).state().is_hashed()).collect();
    check_index(pool, &hashed)?;
    let seqs: HashSet<u64> = hashed.iter().map(|&id| pool.block(id).seq()).collect();
    ensure(seqs.len() == hashed.len(), || "two registrations have one number".into())?;
    let cached = hashed.iter().filter(|&&id| pool.records.is_cached(id)).count();
    let counted = pool.census.cached();
    ensure(cached == counted, || format!("{cached} blocks are cached, {counted} are counted"))
}

/// Every entry is that of a block with content, and all blocks of this epoch have one, but for copies
/// that were too many. Content of ended epochs may have lost its entry to a registration.
fn check_index(pool: &MultiPool, hashed: &[BlockId]) -> Check {
    let mut indexed: Vec<BlockId> = pool.records.index.walk().collect();
    indexed.sort_unstable();
    ensure(indexed.windows(2).all(|two| two[0] < two[1]), || {
        "a block is in the index twice".into()
    })?;
    let is_indexed = |id: &BlockId| indexed.binary_search(id).is_ok();
    let is_missing = |id: &&BlockId| pool.records.is_cached(**id) && !is_indexed(id);
    let missing = hashed.iter().filter(is_missing).count() as u64;
    let surplus = pool.counters.surplus.get();
    ensure(missing <= surplus, || {
        format!("{missing} blocks are cached and not in the index, {surplus} copies were too many")
    })?;
    let blank = indexed.iter().find(|id| !pool.block(**id).state().is_hashed());
    ensure(blank.is_none(), || format!("block {blank:?} is in the index and holds no content"))?;
    let spot_of = |id| {
        let block = pool.block(id);
        pool.records.index.spot(&block.content(), block.epoch())
    };
    pool.records.index.check(pool.records.epoch(), spot_of).map_err(Broken)
}
