//! Every invariant of a pool at rest.

use super::MultiPool;
use super::block::{State, Ticket};
use crate::class::{Class, Standing};
use crate::error::Broken;
use crate::id::BlockId;

type Check = Result<(), Broken>;

macro_rules! ensure {
    ($holds:expr, $($what:tt)+) => {
        if !$holds {
            return Err(Broken(format!($($what)+)));
        }
    };
}

/// Checks the whole structure, on which no other thread may be working.
pub(super) fn validate(pool: &MultiPool) -> Check {
    let mut free = vec![false; pool.config.max_blocks];
    let mut num_free = check_blank(pool, &mut free)?;
    for class in Class::all() {
        let in_line = check_ring(pool, class, &mut free)?;
        let used = pool.classes.used().contains(class);
        ensure!(used || in_line == 0, "blocks stand in the unused line of {class:?}");
        num_free += in_line;
    }
    // No credit stands for the leaving blocks among them.
    num_free -= free[pool.size.end()..].iter().filter(|&&free| free).count();
    let credits = pool.credits.available();
    ensure!(num_free == credits, "{num_free} blocks are free, {credits} credits are left");
    ids(pool).try_for_each(|id| check_block(pool, id, free[id.index()]))?;
    check_counts(pool)?;
    check_contents(pool)
}

fn ids(pool: &MultiPool) -> impl Iterator<Item = BlockId> {
    (1..pool.config.max_blocks as u32).map(BlockId::new)
}

/// Marks a block as free; fails if it was already, or is not in the pool.
fn mark(pool: &MultiPool, free: &mut [bool], id: BlockId) -> Check {
    let is_there = !id.is_null() && !pool.records.is_retired(id);
    ensure!(is_there, "block {id} is free and not in the pool");
    let before = std::mem::replace(&mut free[id.index()], true);
    ensure!(!before, "block {id} is free twice");
    Ok(())
}

/// How many blocks are on the stack.
fn check_blank(pool: &MultiPool, free: &mut [bool]) -> Result<usize, Broken> {
    let mut count = 0;
    for id in pool.stack.walk(pool.records.blocks()) {
        mark(pool, free, id)?;
        let idle = pool.block(id).state() == State::IDLE;
        ensure!(idle, "block {id} is among the blank ones and not idle");
        count += 1;
    }
    Ok(count)
}

/// How many blocks stand in the ring.
fn check_ring(pool: &MultiPool, class: Class, free: &mut [bool]) -> Result<usize, Broken> {
    let ring = pool.ring(class);
    let span = ring.tail().since(ring.head());
    ensure!(span <= ring.capacity(), "{class:?} ring: {span} slots from head to tail");
    ring.check_vacated(pool.records.blocks()).map_err(Broken)?;
    let mut before: Option<Ticket> = None;
    let mut count = 0;
    for (ticket, id) in ring.walk(pool.records.blocks()) {
        mark(pool, free, id)?;
        let in_order = before.is_none_or(|before| before.is_before(ticket));
        ensure!(in_order, "{class:?} ring: {before:?} stands before {ticket:?}");
        before = Some(ticket);
        count += 1;
    }
    Ok(count)
}

fn check_block(pool: &MultiPool, id: BlockId, is_free: bool) -> Check {
    let block = pool.block(id);
    let state = block.state();
    let (above, retired) = (pool.is_above(id), pool.records.is_retired(id));
    let (held, hashed) = (state.is_held(), state.is_hashed());
    ensure!(!state.is_claimed(), "block {id} is claimed by nobody");
    ensure!(!(held && is_free), "block {id} is held and free");
    ensure!(held || is_free || above, "block {id} is lost");
    let is_idle = held || is_free || state == State::IDLE;
    ensure!(is_idle, "block {id} stands nowhere and is not idle");
    ensure!(!retired || !is_free, "block {id} is retired and in line");
    let agrees = hashed == (block.seq() != 0);
    ensure!(agrees, "block {id}: its state and its record differ about content");
    ensure!(!hashed || !retired, "block {id} is retired and holds content");
    let is_plain = hashed || state.standing() == Standing::default();
    ensure!(is_plain, "block {id} has a class or a pin without content");
    Ok(())
}

/// The bounds, and the counts of held and of pinned blocks.
fn check_counts(pool: &MultiPool) -> Check {
    let (end, num_blocks) = (pool.size.end(), pool.records.num_blocks());
    ensure!(end <= num_blocks, "blocks up to {end} of {num_blocks} are handed out");
    let states = || pool.records.blocks().iter().map(|block| block.state());
    let held = states().skip(end).filter(|state| state.is_held()).count();
    let counted = pool.size.held_above();
    ensure!(held == counted, "{held} blocks above the end are held, {counted} are counted");
    let pinned = states().filter(|state| state.standing().is_pinned()).count();
    let counted = pool.counters.pinned();
    ensure!(pinned == counted, "{pinned} blocks are pinned, {counted} are counted");
    Ok(())
}

/// The index and the count over all content.
fn check_contents(pool: &MultiPool) -> Check {
    let cached = pool.records.check_contents(pool.counters.surplus.get()).map_err(Broken)?;
    let counted = pool.census.cached();
    ensure!(cached == counted, "{cached} blocks are cached, {counted} are counted");
    Ok(())
}
