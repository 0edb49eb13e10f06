//! Hashes, new sequences, and what of a prompt is cached: calls that change nothing, on any thread.

use std::sync::Arc;

use prefixcache_core::error::CacheError;
use prefixcache_core::hash::Scope;
use prefixcache_core::sequence as core;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::PrefixCache;
use crate::arguments::{List, Number, or, or_empty};
use crate::block_hashes::BlockHashes;
use crate::detach::{run, run_on_tokens};
use crate::errors::Result;
use crate::names;
use crate::sequence::Sequence;
use crate::shared_cache::{Reader, blocks_looked_at};
use crate::staging::BlockStaging;
use crate::tokens::Tokens;

type Extras = List<names::Extras, Vec<u8>>;
type MaxTokens = Number<names::MaxTokens>;

#[pymethods]
impl PrefixCache {
    /// The 32 bytes before the first block's hash under the current weights.
    #[pyo3(signature = (*, cache_salt=None, lora=None))]
    fn root_hash<'py>(
        &self,
        py: Python<'py>,
        cache_salt: Option<String>,
        lora: Option<String>,
    ) -> Result<Bound<'py, PyBytes>> {
        let root = self.0.reader()?.root_hash(&Scope { lora, cache_salt });
        Ok(PyBytes::new(py, root.as_bytes()))
    }

    /// The hashes of the full blocks of `tokens`.
    #[pyo3(signature = (tokens, *, cache_salt=None, lora=None, extras=None))]
    fn compute_block_hashes(
        &self,
        py: Python<'_>,
        tokens: Tokens,
        cache_salt: Option<String>,
        lora: Option<String>,
        extras: Option<Extras>,
    ) -> Result<BlockHashes> {
        let core = self.0.reader()?;
        let (tokens, scope, extras) = (tokens.0, Scope { lora, cache_salt }, or_empty(extras));
        let hash = || core.compute_block_hashes(&tokens, &scope, extras);
        Ok(BlockHashes(run_on_tokens(py, tokens.len(), hash)))
    }

    /// A sequence that holds nothing yet, its full blocks hashed.
    #[pyo3(signature = (tokens, *, cache_salt=None, lora=None, extras=None, hashes=None))]
    fn new_sequence(
        &self,
        py: Python<'_>,
        tokens: Tokens,
        cache_salt: Option<String>,
        lora: Option<String>,
        extras: Option<Extras>,
        hashes: Option<PyRef<'_, BlockHashes>>,
    ) -> Result<Sequence> {
        let core = self.0.reader()?;
        let (tokens, scope) = (tokens.0, Scope { lora, cache_salt });
        let sequence = match (hashes, extras) {
            (Some(hashes), None) => core.new_hashed_sequence(tokens, scope, hashes.0.clone()),
            (_, extras) => run_on_tokens(py, tokens.len(), || {
                core.new_sequence(tokens, scope, or_empty(extras))
            }),
        };
        Ok(Sequence::new(sequence, Arc::downgrade(&self.0)))
    }

    /// How many leading tokens hit, in full blocks, `max_tokens` at most.
    #[pyo3(signature = (hashes, max_tokens=None))]
    fn probe(
        &self,
        py: Python<'_>,
        hashes: &BlockHashes,
        max_tokens: Option<MaxTokens>,
    ) -> Result<usize> {
        let (core, hashes) = (self.0.reader()?, &hashes.0);
        let work = blocks_looked_at(core, hashes.as_slice().len());
        Ok(run(py, work, || core.probe_within(hashes, or(max_tokens, usize::MAX))))
    }

    /// `probe` for a sequence.
    #[pyo3(signature = (sequence, max_tokens=None))]
    fn count_prefix_hits(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        max_tokens: Option<MaxTokens>,
    ) -> Result<usize> {
        self.count(py, sequence, max_tokens, Reader::count_prefix_hits_within)
    }

    /// How many leading tokens hit in all groups of full attention, whatever the others have.
    #[pyo3(signature = (sequence, max_tokens=None))]
    fn count_whole_hits(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        max_tokens: Option<MaxTokens>,
    ) -> Result<usize> {
        self.count(py, sequence, max_tokens, Reader::count_whole_hits)
    }

    /// `count_prefix_hits` where blocks that `staging`'s tier holds count too; and how many of these the hit needs.
    #[pyo3(signature = (sequence, staging, max_tokens=None))]
    fn count_tiered_hits(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        staging: &BlockStaging,
        max_tokens: Option<MaxTokens>,
    ) -> Result<(usize, usize)> {
        let most = or(max_tokens, usize::MAX);
        let sequence = &mut *sequence.use_as("sequence")?;
        let core = self.0.reader()?;
        Ok(run(py, sequence.hashes().len(), || {
            staging.0.with_stored(|stored| {
                core.count_hits_with(sequence, most, |key| stored.contains(key))
            })
        })?)
    }
}

impl PrefixCache {
    /// Calls `count` with the cache, a sequence, and the most tokens that may hit.
    fn count(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        most: Option<MaxTokens>,
        count: fn(&Reader, &mut core::Sequence, usize) -> Result<usize, CacheError>,
    ) -> Result<usize> {
        let sequence = &mut *sequence.use_as("sequence")?;
        let core = self.0.reader()?;
        // The blocks that it looks at, or hashes first.
        let work = match core.hashes_are_current(sequence) {
            true => blocks_looked_at(core, sequence.hashes().len()),
            false => sequence.hashes().len(),
        };
        Ok(run(py, work, || count(core, sequence, or(most, usize::MAX)))?)
    }
}
