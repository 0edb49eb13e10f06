//! The Python class `PrefixCache`. Its methods stand in `prefix_cache/`, by what they are for.

mod arguments;
mod hits;
mod reports;
mod retention;
mod steps;

use std::ffi::CStr;
use std::sync::Arc;

use prefixcache_core::error::{CacheError, ResizeError};
use prefixcache_core::groups::{GroupSpec, Groups};
use prefixcache_core::hash::HashConfig;
use prefixcache_core::policy::EvictionPolicy;
use prefixcache_core::sequence as core;
use prefixcache_core::store::{FreeOrder, Lookup, Moves};
use prefixcache_core::weights::WeightsName;
use pyo3::exceptions::PyUserWarning;
use pyo3::prelude::*;

pub use self::arguments::pool_config;
pub use self::reports::store_stats;
use crate::arguments::{List, Number, One, OneOf, or};
use crate::detach::run;
use crate::errors::{Result, out_of_range};
use crate::exclusive::Using;
use crate::kv_file::KVFile;
use crate::names;
use crate::sequence::{Batch, Sequence};
use crate::shared_cache::{Cache, Core};
use crate::staging::BlockStaging;
use crate::writer::Threads;

/// A prefix cache: a pool of KV cache blocks, found again by the tokens that filled them.
#[pyclass(frozen, module = "prefixcache.core")]
pub struct PrefixCache(Arc<Cache>);

/// The share of the pool that each owner of hints may raise, unless another is given.
const RETENTION_BUDGET: f64 = 0.2;

const NO_MODEL: &CStr =
    c"the cache has no model: blocks of two such models look equal to routers and in kept \
files; pass model=, a name or a digest of the model's files";

#[pymethods]
impl PrefixCache {
    /// A cache of `num_blocks` blocks (block 0, the null block, counted) of `block_size` tokens.
    #[new]
    #[pyo3(
        signature = (
            num_blocks, block_size=None, *, model="", revision="", weights=None, kv_dtype="",
            arithmetic="", num_groups=None, groups=None, free_order=OneOf(FreeOrder::UnhashedFirst),
            eviction_policy=OneOf(EvictionPolicy::Lru), threads=OneOf(Threads::SingleWriter), max_blocks=None,
            retention_budget=None, max_cached_blocks=None,
        ),
        text_signature = "(num_blocks, block_size=16, *, model='', revision='', weights=None, kv_dtype='', \
arithmetic='', num_groups=None, groups=None, free_order='unhashed_first', eviction_policy='lru', threads='single_writer', max_blocks=None, \
retention_budget=0.2, max_cached_blocks=None)"
    )]
    fn new(
        py: Python<'_>,
        num_blocks: Number<names::NumBlocks>,
        block_size: Option<Number<names::BlockSize>>,
        model: &str,
        revision: &str,
        weights: Option<One<names::Weights, WeightsName>>,
        kv_dtype: &str,
        arithmetic: &str,
        num_groups: Option<Number<names::NumGroups, u16>>,
        groups: Option<List<names::Groups, GroupSpec>>,
        free_order: OneOf<FreeOrder>,
        eviction_policy: OneOf<EvictionPolicy>,
        threads: OneOf<Threads>,
        max_blocks: Option<Number<names::MaxBlocks>>,
        retention_budget: Option<One<names::RetentionBudget, f64>>,
        max_cached_blocks: Option<Number<names::MaxCachedBlocks>>,
    ) -> Result<Self> {
        let share = or(retention_budget, RETENTION_BUDGET);
        let pool = pool_config(num_blocks, max_blocks, free_order.0)
            .with_eviction_policy(eviction_policy.0);
        let groups = match (groups, num_groups) {
            (Some(_), Some(_)) => {
                let reason = "must not be given with groups, which says how many there are";
                return Err(out_of_range("num_groups", reason));
            }
            (Some(specs), None) => Groups::new(specs.0),
            (None, count) => Groups::full(or(count, 1).into()),
        };
        let hashing = HashConfig::new(or(block_size, 16), groups?)
            .with_model(model, kv_dtype, arithmetic)
            .with_revision(revision);
        let weights = weights.map(|name| name.0);
        let cache = Cache::new(hashing, weights, pool, threads.0, share)?;
        // The calling thread does not become the writer.
        cache.pause()?.set_max_cached(max_cached_blocks.map(|most| most.0));
        if model.is_empty() {
            PyErr::warn(py, &py.get_type::<PyUserWarning>(), NO_MODEL, 1)?;
        }
        Ok(Self(Arc::new(cache)))
    }

    /// Tokens in a block.
    #[getter]
    fn block_size(&self) -> Result<usize> {
        Ok(self.0.reader()?.block_size())
    }

    /// Blocks, the null block counted, as `num_blocks` is wherever it is given or returned.
    #[getter]
    fn num_blocks(&self) -> Result<usize> {
        Ok(self.0.reader()?.store().num_blocks())
    }

    /// Counts the changes of the weights; 0 at first.
    #[getter]
    fn weight_version(&self) -> Result<u64> {
        Ok(self.0.reader()?.weight_version())
    }

    /// What every hash calls the weights of now: their name, or the version's digits.
    #[getter]
    fn weights_name(&self) -> Result<String> {
        Ok(self.0.reader()?.weights_name())
    }

    /// Forget everything cached, in constant time. Sequences keep their blocks and publish no more.
    fn clear_cache_index(&self) -> Result<()> {
        self.0.write_hinted(|core| core.clear_cache_index())
    }

    /// Forget everything cached, and hash under other weights from now on, by their name if they have one.
    #[pyo3(signature = (weights=None, *, keep=false))]
    fn new_weight_version(
        &self,
        weights: Option<One<names::Weights, WeightsName>>,
        keep: bool,
    ) -> Result<u64> {
        let name = weights.map(|name| name.0);
        self.0.write_hinted(|core| match keep {
            true => core.next_weight_version(name),
            false => core.new_weight_version(name),
        })
    }

    /// Restore what `file` has kept, keep there what is published from now on, and copy what is evicted into `staging`
    /// if there is one. The writer's thread.
    #[pyo3(signature = (file, staging=None))]
    fn keep_in(
        &self,
        py: Python<'_>,
        file: &KVFile,
        staging: Option<&BlockStaging>,
    ) -> Result<(usize, u64)> {
        let core = &mut *self.0.write()?;
        run(py, core.store().num_blocks(), || {
            let num_blocks = core.store().num_blocks();
            let kept = file.0.take_kept(num_blocks, core.num_groups());
            let store = match staging {
                Some(staging) => file.0.store_with(&staging.0, &kept.blocks),
                None => file.0.store(),
            };
            let restored = core.keep_in(store, &kept.blocks)?;
            let lost = kept.blocks.len() - restored;
            Ok((restored, kept.dropped + lost as u64))
        })
    }

    /// Whether a hit needs more than `most` blocks of a file that were not compared with their checksums yet.
    fn reads_first(
        &self,
        sequence: &Sequence,
        hit_tokens: Number<names::HitTokens>,
        most: Number<names::Most>,
    ) -> Result<bool> {
        let sequence = &mut *sequence.use_as("sequence")?;
        Ok(self.0.write()?.reads_first(sequence, hit_tokens.0, most.0)?)
    }

    /// Copy what is evicted from now on into `staging`. The writer's thread, once, before the cache's first use.
    fn stage_evicted(&self, staging: &BlockStaging) -> Result<()> {
        self.0.write()?.keep_in(staging.0.store(), &[])?;
        Ok(())
    }

    /// Make the calling thread the one that may write; for a shared cache that changes nothing.
    fn adopt_writer(&self) -> Result<()> {
        self.0.writer.adopt()
    }

    /// End the cache: every later call raises RuntimeError.
    fn close(&self) {
        self.0.writer.close();
    }
}

impl PrefixCache {
    /// The slice of a shrink that is in flight.
    fn moves(&self) -> Result<Using<'_, Moves>> {
        let moves = self.0.moves.try_use();
        Ok(moves.ok_or(ResizeError::Busy)?)
    }

    /// Calls `work`, which changes the cache, with all sequences of the argument `sequences`.
    fn on_batch<T>(
        &self,
        sequences: &Batch,
        work: impl FnOnce(&mut Core, &mut [&mut core::Sequence]) -> Result<T, CacheError>,
    ) -> Result<T> {
        sequences.use_together(|batch| Ok(work(&mut *self.0.write()?, batch)?))
    }
}
