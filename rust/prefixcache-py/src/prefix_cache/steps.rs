//! The life of a request: its commit, slots and tokens of its steps, what they publish and drop, its release.

use prefixcache_core::TableBuffers;
use prefixcache_core::cache::Duplicate;
use prefixcache_core::error::CacheError;
use prefixcache_core::sequence as core;
use prefixcache_file::staging::key_to_bytes;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::PrefixCache;
use crate::arguments::{Array, Group, Number, Numbers, or};
use crate::detach::{run, run_on_tokens};
use crate::errors::Result;
use crate::names;
use crate::sequence::{Batch, Sequence};
use crate::shared_cache::Core;
use crate::tokens::Tokens;

type HitTokens = Number<names::HitTokens>;
type NumTokens = Number<names::NumTokens>;
type Chunk = Number<names::Chunk>;
type Counts = Numbers<names::Counts>;
type Starts = Numbers<names::Starts>;
type Upto = Numbers<names::Upto>;

/// Blocks, and of each its key and its place.
type Missing = (Vec<u32>, Vec<Py<PyBytes>>, Vec<usize>);

#[pymethods]
impl PrefixCache {
    /// Take the first `hit_tokens` as hits and slots for `num_tokens` more, all or none: how many hit, None for none.
    #[pyo3(signature = (sequence, hit_tokens, num_tokens, chunk=None))]
    fn commit_prefix_plan(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        hit_tokens: HitTokens,
        num_tokens: NumTokens,
        chunk: Option<Chunk>,
    ) -> Result<Option<usize>> {
        let (hit_tokens, num_tokens) = (hit_tokens.0, num_tokens.0);
        let chunk = or(chunk, num_tokens);
        self.commit(py, sequence, hit_tokens.saturating_add(num_tokens), |core, sequence| {
            core.commit_in_chunks(sequence, hit_tokens, num_tokens, chunk)
        })
    }

    /// `commit_prefix_plan` of a hit of which blocks come from a tier: blocks, keys and places of what is to be read.
    fn commit_missing(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        hit_tokens: HitTokens,
        num_tokens: NumTokens,
        chunk: Chunk,
    ) -> Result<Option<Missing>> {
        let work = hit_tokens.0.saturating_add(num_tokens.0);
        let missing = self.commit(py, sequence, work, |core, sequence| {
            core.commit_missing(sequence, hit_tokens.0, num_tokens.0, chunk.0)
        })?;
        Ok(missing.map(|all| {
            let key = |key| PyBytes::new(py, &key_to_bytes(key)).unbind();
            (
                all.iter().map(|one| one.block.get()).collect(),
                all.iter().map(|one| key(&one.key)).collect(),
                all.iter().map(|one| one.index).collect(),
            )
        }))
    }

    /// Give each sequence `counts[i]` more slots, in order; how many leading ones got all of theirs.
    fn append_slots(&self, py: Python<'_>, sequences: Batch, counts: Counts) -> Result<usize> {
        self.on_batch(&sequences, |core, batch| {
            run_on_tokens(py, saturating_sum(&counts.0), || core.append_slots(batch, &counts.0))
        })
    }

    /// Give each sequence slots in every group for its first `upto[i]` tokens; how many leading ones have theirs.
    fn ensure_slots(&self, py: Python<'_>, sequences: Batch, upto: Upto) -> Result<usize> {
        self.on_batch(&sequences, |core, batch| {
            let ready = batch.iter().map(|one| one.num_ready_slots()).sum();
            let work = saturating_sum(&upto.0).saturating_sub(ready);
            run_on_tokens(py, work, || core.ensure_slots(batch, &upto.0))
        })
    }

    /// Give blocks to the snapshots of states from `starts[i]` on that are worth keeping; how many got theirs.
    fn keep_snapshots(&self, py: Python<'_>, sequences: Batch, starts: Starts) -> Result<usize> {
        self.on_batch(&sequences, |core, batch| {
            run(py, batch.len(), || core.keep_snapshots(batch, &starts.0))
        })
    }

    /// The most blocks that a sequence of `num_tokens` holds at once, computed `chunk` tokens at a time.
    fn most_blocks(&self, num_tokens: NumTokens, chunk: Chunk) -> Result<usize> {
        Ok(self.0.reader()?.most_blocks(num_tokens.0, chunk.0))
    }

    /// Add one token to each sequence.
    fn append_tokens(&self, py: Python<'_>, sequences: Batch, tokens: Tokens) -> Result<()> {
        self.on_batch(&sequences, |core, batch| {
            run_on_tokens(py, tokens.0.len(), || core.append_tokens(batch, &tokens.0))
        })
    }

    /// Say that the KV of the first `upto[i]` tokens is there, and publish the full blocks: the duplicates among them.
    fn mark_blocks_filled(
        &self,
        py: Python<'_>,
        sequences: Batch,
        upto: Upto,
    ) -> Result<Vec<(usize, u16, usize, u32)>> {
        let duplicates = self.on_batch(&sequences, |core, batch| {
            let filled = batch.iter().map(|sequence| sequence.num_filled()).sum();
            let work = saturating_sum(&upto.0).saturating_sub(filled);
            run_on_tokens(py, work, || core.mark_blocks_filled(batch, &upto.0))
        })?;
        let plain = |duplicate: &Duplicate| {
            let group = duplicate.group.get();
            (duplicate.sequence, group, duplicate.index, duplicate.holder.get())
        };
        Ok(duplicates.iter().map(plain).collect())
    }

    /// Drop the blocks that no token from `upto[i]` on needs; how many.
    fn drop_unneeded(&self, py: Python<'_>, sequences: Batch, upto: Upto) -> Result<usize> {
        self.on_batch(&sequences, |core, batch| {
            run(py, batch.len(), || core.drop_unneeded(batch, &upto.0))
        })
    }

    /// Swap a published block of a sequence for the one that hits for its content, and give its own one up.
    fn replace_block(
        &self,
        sequence: &Sequence,
        group: Group,
        index: Number<names::Index>,
    ) -> Result<()> {
        let mut sequence = sequence.use_as("sequence")?;
        Ok(self.0.write()?.replace_block(&mut sequence, group.0, index.0)?)
    }

    /// Give all blocks of each sequence back, the tail first, so that it is evicted before the head.
    fn release(&self, py: Python<'_>, sequences: Batch) -> Result<()> {
        sequences.use_together(|batch| {
            let work = batch.iter().map(|sequence| sequence.num_slots()).sum();
            Ok(self.0.write_hinted(|core| run_on_tokens(py, work, || core.release(batch)))??)
        })
    }

    /// Write the block tables of a batch into the caller's arrays; how many pages.
    #[pyo3(signature = (
        sequences, starts, counts, group, indptr, indices, last_page_len, slot_mapping,
        first_pages=None,
    ))]
    fn fill_block_tables(
        &self,
        sequences: Batch,
        starts: Starts,
        counts: Counts,
        group: Group,
        indptr: Array<'_, names::Indptr, i32>,
        indices: Array<'_, names::Indices, i32>,
        last_page_len: Array<'_, names::LastPageLen, i32>,
        slot_mapping: Array<'_, names::SlotMapping, i64>,
        first_pages: Option<Array<'_, names::FirstPages, i32>>,
    ) -> Result<usize> {
        let batch = sequences.use_all()?;
        let batch: Vec<&core::Sequence> = batch.iter().map(|sequence| &**sequence).collect();
        let core = self.0.reader()?;
        // Last, and attached to the interpreter until they are written: nobody's code runs that could
        // resize the arrays.
        let (mut indptr, mut indices) = (indptr.write()?, indices.write()?);
        let (mut last_page_len, mut slot_mapping) = (last_page_len.write()?, slot_mapping.write()?);
        let mut first_pages = first_pages.as_ref().map(Array::write).transpose()?;
        let mut buffers = TableBuffers {
            indptr: indptr.slice()?,
            indices: indices.slice()?,
            last_page_len: last_page_len.slice()?,
            slot_mapping: slot_mapping.slice()?,
            first_pages: first_pages.as_mut().map(|pages| pages.slice()).transpose()?,
        };
        Ok(core.fill_block_tables(&batch, &starts.0, &counts.0, group.0, &mut buffers)?)
    }
}

impl PrefixCache {
    /// Calls `commit`, which is about `num_tokens` tokens, with a sequence.
    fn commit<T: Send>(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        num_tokens: usize,
        commit: impl FnOnce(&mut Core, &mut core::Sequence) -> Result<T, CacheError> + Send,
    ) -> Result<T> {
        let sequence = &mut *sequence.use_as("sequence")?;
        Ok(self
            .0
            .write_hinted(|core| run_on_tokens(py, num_tokens, || commit(core, sequence)))??)
    }
}

fn saturating_sum(counts: &[usize]) -> usize {
    counts.iter().copied().fold(0, usize::saturating_add)
}
