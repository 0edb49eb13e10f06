//! What stays cached: pins, hints, bounds, and the size of the pool.

use std::sync::Arc;
use std::time::Duration;

use numpy::PyArray1;
use prefixcache_core::error::CacheError;
use prefixcache_core::hints::Owner;
use prefixcache_core::id::BlockId;
use prefixcache_core::store::{Lookup, Move};
use prefixcache_replay::recording::Pseudonyms;
use pyo3::prelude::*;

use super::PrefixCache;
use crate::arguments::{Number, One, or};
use crate::detach::{run, run_on_tokens};
use crate::errors::Result;
use crate::names;
use crate::sequence::{Batch, Sequence};

/// Blocks whose TTL has ended that one call looks at, unless another number is given.
const EXPIRED_AT_ONCE: usize = 256;

/// Block ids, int32.
type BlockArray<'py> = Bound<'py, PyArray1<i32>>;

#[pymethods]
impl PrefixCache {
    /// Pin what the sequences' anchors need, as their retention says; how many pins are new.
    fn pin_anchors(&self, py: Python<'_>, sequences: Batch) -> Result<usize> {
        self.on_batch(&sequences, |core, batch| {
            let work = batch.iter().map(|sequence| sequence.num_slots()).sum();
            run_on_tokens(py, work, || core.pin_anchors(batch))
        })
    }

    /// Pin the blocks that the longest hit within the first `num_tokens` tokens needs.
    fn pin(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        num_tokens: Number<names::NumTokens>,
    ) -> Result<usize> {
        let sequence = &mut *sequence.use_as("sequence")?;
        let core = &mut *self.0.write()?;
        Ok(run(py, sequence.hashes().len(), || core.pin(sequence, num_tokens.0))?)
    }

    /// Take the pins off the sequence's cached blocks. Returns how many were pinned.
    fn unpin(&self, py: Python<'_>, sequence: &Sequence) -> Result<usize> {
        let sequence = &mut *sequence.use_as("sequence")?;
        let core = &mut *self.0.write()?;
        Ok(run(py, sequence.hashes().len(), || core.unpin(sequence))?)
    }

    /// Move the oldest `count` free pinned blocks to the regular tier. Returns how many there were.
    fn demote(&self, py: Python<'_>, count: Number<names::Count>) -> Result<usize> {
        let core = &mut *self.0.write()?;
        Ok(run(py, count.0, || core.demote(count.0)))
    }

    /// Give content whose TTL has ended the priority that it has without; how many blocks.
    #[pyo3(signature = (max_blocks=None), text_signature = "($self, max_blocks=256)")]
    fn demote_expired(&self, max_blocks: Option<Number<names::MaxBlocks>>) -> Result<usize> {
        self.0.write_hinted(|core| core.demote_expired(or(max_blocks, EXPIRED_AT_ONCE)))
    }

    /// End what `owner`'s hints asked for the sequence's full blocks from number `first` on.
    fn end_hints(
        &self,
        owner: &str,
        sequence: &Sequence,
        first: Number<names::FirstBlock>,
    ) -> Result<usize> {
        let sequence = &*sequence.use_as("sequence")?;
        let owner = Owner::named(owner);
        Ok(self.0.write_hinted(|core| core.end_hints(owner, sequence, first.0))??)
    }

    /// Set the time that TTLs, evictions and the eviction policy go by, in seconds, and end the use of the clock.
    fn set_time(&self, seconds: One<names::Seconds, Duration>) -> Result<()> {
        self.0.write_hinted(|core| core.set_time(seconds.0))
    }

    /// Let the eviction policy go by the names that a `BlockPseudonyms` with this key gives blocks, not by hashes.
    fn name_blocks(&self, key: One<names::Key, [u8; 32]>) -> Result<()> {
        let core = self.0.write()?;
        Ok(core.name_blocks(Arc::new(Pseudonyms::new(key.0, core.block_size())?))?)
    }

    /// Set the number of blocks, the null block counted. Returns how many above it are still held.
    fn resize(&self, py: Python<'_>, num_blocks: Number<names::NumBlocks>) -> Result<usize> {
        Ok(self.0.write_hinted(|core| {
            let work = core.store().num_blocks().max(num_blocks.0);
            run(py, work, || core.resize(num_blocks.0))
        })??)
    }

    /// Begin one slice of a shrink to `num_blocks` that keeps what is worth most.
    fn begin_moves<'py>(
        &self,
        py: Python<'py>,
        num_blocks: Number<names::NumBlocks>,
        max_moves: Number<names::MaxMoves>,
    ) -> Result<(BlockArray<'py>, BlockArray<'py>)> {
        let core = &mut *self.0.write()?;
        let moves = &mut *self.moves()?;
        let work = core.store().num_blocks();
        run(py, work, || core.begin_moves(num_blocks.0, max_moves.0, moves))?;
        let array = |side: fn(&Move) -> BlockId| {
            let ids = moves.in_flight().iter().map(|one| side(one).get() as i32);
            PyArray1::from_iter(py, ids)
        };
        Ok((array(|one| one.from), array(|one| one.to)))
    }

    /// End the slice whose KV was copied: its content is found where it was copied to. How many moved.
    fn finish_moves(&self, py: Python<'_>) -> Result<usize> {
        let core = &mut *self.0.write()?;
        let moves = &mut *self.moves()?;
        Ok(run(py, moves.in_flight().len(), || core.finish_moves(moves))?)
    }

    /// Take the slice back: content stays where it is.
    fn abort_moves(&self, py: Python<'_>) -> Result<()> {
        let core = &mut *self.0.write()?;
        let moves = &mut *self.moves()?;
        let aborted = run(py, moves.in_flight().len(), || core.abort_moves(moves));
        Ok(aborted.map_err(CacheError::from)?)
    }

    /// Give up the content of the `count` free blocks that would lose it first. How many there were.
    fn release_cached(&self, py: Python<'_>, count: Number<names::Count>) -> Result<usize> {
        self.0.write_hinted(|core| {
            let work = count.0.min(core.store().num_blocks());
            run(py, work, || core.release_cached(count.0))
        })
    }

    /// Bound the free blocks that keep their content; what is above goes now and at each release.
    #[pyo3(signature = (max_cached_blocks))]
    fn set_max_cached_blocks(
        &self,
        py: Python<'_>,
        max_cached_blocks: Option<Number<names::MaxCachedBlocks>>,
    ) -> Result<()> {
        let bound = max_cached_blocks.map(|most| most.0);
        let core = &mut *self.0.write()?;
        run(py, core.store().num_blocks(), || core.set_max_cached(bound));
        Ok(())
    }
}
