//! Where in the pool blocks are free, cached, pinned or held: for people, who look at a million at once.

use std::ops::Range;
use std::time::Duration;

use crate::error::{InvalidArgument, require};
use crate::evictions::{Evictions, check_rising};
use crate::id::BlockId;

/// The most cells of a map, and the most ages that it tells apart.
const MAX_CELLS: usize = 1 << 16;
const MAX_AGE_BOUNDS: usize = 64;

/// What a block is, of several the last that is true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BlockState {
    /// Nobody holds it, and what it has can be hit no more.
    Free,
    /// Nobody holds it, and its content can be hit.
    Cached,
    /// The same, with a pin.
    Pinned,
    /// Somebody holds it.
    Held,
}

impl BlockState {
    /// How many there are.
    pub const COUNT: usize = 4;

    /// Of a block that somebody holds or not, with content that can be hit or not, which is pinned or not.
    pub(crate) fn of(is_held: bool, is_cached: bool, is_pinned: bool) -> Self {
        match is_cached {
            _ if is_held => Self::Held,
            true if is_pinned => Self::Pinned,
            true => Self::Cached,
            false => Self::Free,
        }
    }
}

/// The blocks of a pool, but the null block, counted by cells of neighbours that are as large as each other, to
/// within a block. With `n` blocks and `c` cells, block `b` is in cell `(b - 1) * c / n`, rounded down.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockMap {
    /// The blocks of each cell in each [`BlockState`], by its number.
    pub states: Vec<[u32; BlockState::COUNT]>,
    /// By the time since its last use, the blocks of each cell with content that can be hit: those up to each
    /// bound and above the one before, then those above the last. All 0 where nobody
    /// listens to evictions: then no times are kept. One cell after the other.
    pub ages: Vec<u32>,
}

impl BlockMap {
    /// A map of a pool of `num_blocks` blocks, the null block counted, from what `look` says of each, and whether it has
    /// content that can be hit.
    pub(crate) fn of_pool(
        num_blocks: usize,
        cells: usize,
        age_bounds: &[Duration],
        evictions: &Evictions,
        look: impl Fn(BlockId) -> (BlockState, bool),
    ) -> Result<Self, InvalidArgument> {
        check_arguments(cells, age_bounds)?;
        let idle_times = evictions.idle_times();
        Ok(Self::of(num_blocks - 1, cells, age_bounds, |id| {
            let (state, is_cached) = look(id);
            (state, idle_times.as_ref().filter(|_| is_cached).map(|idle| idle(id)))
        }))
    }

    /// A map of `num_blocks` blocks, the null block left out, in up to `cells` cells, with the ages that `age_bounds`
    /// separate. `look` says what a block is, and when its content was used last, if it has any and that is known.
    pub fn of(
        num_blocks: usize,
        cells: usize,
        age_bounds: &[Duration],
        look: impl Fn(BlockId) -> (BlockState, Option<Duration>),
    ) -> Self {
        let cells = cells.min(num_blocks);
        let ages = age_bounds.len() + 1;
        let mut map = Self { states: vec![[0; _]; cells], ages: vec![0; cells * ages] };
        for (cell, states) in map.states.iter_mut().enumerate() {
            let ages = &mut map.ages[cell * ages..][..ages];
            for id in ids_of_cell(cell, cells, num_blocks).map(BlockId::new) {
                let (state, age) = look(id);
                states[state as usize] += 1;
                if let Some(age) = age {
                    ages[age_bounds.partition_point(|&bound| bound < age)] += 1;
                }
            }
        }
        map
    }
}

fn check_arguments(cells: usize, age_bounds: &[Duration]) -> Result<(), InvalidArgument> {
    require((1..=MAX_CELLS).contains(&cells), "cells", || {
        format!("must be from 1 to {MAX_CELLS}, not {cells}")
    })?;
    let ages = age_bounds.len();
    require(ages <= MAX_AGE_BOUNDS, "age_bounds", || {
        format!("must be at most {MAX_AGE_BOUNDS}, not {ages}")
    })?;
    check_rising("age_bounds", age_bounds)
}

/// The blocks of the cell: the first is the lowest whose `(b - 1) * cells / num_blocks` is the cell.
fn ids_of_cell(cell: usize, cells: usize, num_blocks: usize) -> Range<u32> {
    let first = |cell: usize| 1 + (cell * num_blocks).div_ceil(cells) as u32;
    first(cell)..first(cell + 1)
}
