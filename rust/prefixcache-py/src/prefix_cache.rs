//! The Python class `PrefixCache`.

use std::sync::atomic::{AtomicBool, Ordering};

use numpy::PyArray1;
use prefixcache_core::cache;
use prefixcache_core::error::CacheError;
use prefixcache_core::groups::{GroupSpec, Groups};
use prefixcache_core::hash::{ChainConfig, Extras, Scope};
use prefixcache_core::id::{BlockId, GroupId};
use prefixcache_core::pool::{BlockPool, Shared, SingleWriter};
use prefixcache_core::sequence as core;
use prefixcache_core::store::{BlockStore, FreeOrder, PoolConfig};
use prefixcache_core::tables::TableBuffers;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyDict;

use crate::arguments::{group as as_group, ids_of, number, numbers, slice_of, writable};
use crate::block_hashes::BlockHashes;
use crate::detach;
use crate::errors::{IntoPyErr, out_of_range};
use crate::sequence::{Batch, Sequence};
use crate::tokens::as_tokens;
use crate::writer::{Threads, Writer, Writing};

/// A cache over either form of the pool.
enum Core {
    SingleWriter(cache::PrefixCache<BlockPool<SingleWriter>>),
    Shared(cache::PrefixCache<BlockPool<Shared>>),
}

/// Evaluates an expression about the cache, whichever form it has.
macro_rules! on {
    ($core:expr, |$cache:ident| $work:expr) => {
        match $core {
            Core::SingleWriter($cache) => $work,
            Core::Shared($cache) => $work,
        }
    };
}

/// A prefix cache: a pool of KV cache blocks, found again by the tokens that filled them.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct PrefixCache {
    core: Core,
    writer: Writer,
    closed: AtomicBool,
}

impl PrefixCache {
    /// The cache, to read.
    fn core(&self) -> PyResult<&Core> {
        // Relaxed: the flag orders nothing; the pool itself outlives every call.
        if self.closed.load(Ordering::Relaxed) {
            return Err(PyRuntimeError::new_err("the cache is closed"));
        }
        Ok(&self.core)
    }

    /// The cache, to change while the second value lives.
    fn core_to_write(&self) -> PyResult<(&Core, Writing<'_>)> {
        Ok((self.core()?, self.writer.write()?))
    }
}

impl Core {
    fn new(chain: ChainConfig, pool: PoolConfig, threads: Threads) -> PyResult<Self> {
        let core = match threads {
            Threads::SingleWriter => BlockPool::new(pool)
                .and_then(|pool| cache::PrefixCache::new(chain, pool))
                .map(Self::SingleWriter),
            Threads::Shared => BlockPool::new(pool)
                .and_then(|pool| cache::PrefixCache::new(chain, pool))
                .map(Self::Shared),
        };
        core.map_err(IntoPyErr::into_py_err)
    }
}

/// Tokens that are as long a call as one block is.
const TOKENS_PER_BLOCK: usize = 16;

/// Runs `work`, detached from the interpreter if it is about many tokens.
fn run<T: Send>(py: Python<'_>, num_tokens: usize, work: impl FnOnce() -> T + Send) -> T {
    detach::run(py, num_tokens / TOKENS_PER_BLOCK, work)
}

pub fn parse_free_order(name: &str) -> PyResult<FreeOrder> {
    match name {
        "unhashed_first" => Ok(FreeOrder::UnhashedFirst),
        "append" => Ok(FreeOrder::Append),
        other => {
            let reason = format!("must be \"unhashed_first\" or \"append\", not {other:?}");
            Err(out_of_range("free_order", reason))
        }
    }
}

pub fn pool_config(
    num_blocks: &Bound<'_, PyAny>,
    max_blocks: Option<&Bound<'_, PyAny>>,
    free_order: &str,
) -> PyResult<PoolConfig> {
    let num_blocks = number("num_blocks", num_blocks)?;
    let config = PoolConfig {
        num_blocks,
        max_blocks: max_blocks.map_or(Ok(num_blocks), |most| number("max_blocks", most))?,
        free_order: parse_free_order(free_order)?,
    };
    config.check().map_err(IntoPyErr::into_py_err)?;
    Ok(config)
}

fn extras_of(extras: Option<Vec<PyBackedBytes>>) -> Extras {
    let extras = extras.unwrap_or_default();
    extras.iter().map(|bytes| bytes.to_vec()).collect()
}

#[pymethods]
impl PrefixCache {
    /// A cache of `num_blocks` blocks (block 0, the null block, counted) of `block_size` tokens.
    #[new]
    #[pyo3(
        signature = (
            num_blocks, block_size=None, *, model="", revision="", kv_dtype="", num_groups=None,
            free_order="unhashed_first", threads="single_writer", max_blocks=None,
        ),
        text_signature = "(num_blocks, block_size=16, *, model='', revision='', kv_dtype='', \
num_groups=1, free_order='unhashed_first', threads='single_writer', max_blocks=None)"
    )]
    #[expect(
        clippy::too_many_arguments,
        reason = "the keywords of the Python class"
    )]
    fn new(
        num_blocks: &Bound<'_, PyAny>,
        block_size: Option<&Bound<'_, PyAny>>,
        model: &str,
        revision: &str,
        kv_dtype: &str,
        num_groups: Option<&Bound<'_, PyAny>>,
        free_order: &str,
        threads: &str,
        max_blocks: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let threads = Threads::parse(threads)?;
        let pool = pool_config(num_blocks, max_blocks, free_order)?;
        let num_groups = num_groups.map_or(Ok(1), |count| number("num_groups", count))?;
        let specs = vec![GroupSpec::FullAttention; num_groups];
        let chain = ChainConfig {
            model: model.to_owned(),
            revision: revision.to_owned(),
            kv_dtype: kv_dtype.to_owned(),
            block_size: block_size.map_or(Ok(16), |size| number("block_size", size))?,
            groups: Groups::new(specs).map_err(IntoPyErr::into_py_err)?,
        };
        chain.check().map_err(IntoPyErr::into_py_err)?;
        Ok(Self {
            core: Core::new(chain, pool, threads)?,
            writer: Writer::new(threads),
            closed: AtomicBool::new(false),
        })
    }

    /// The chained hashes of the full blocks of `tokens`. Any thread.
    #[pyo3(signature = (tokens, *, cache_salt=None, lora=None, extras=None))]
    fn compute_block_hashes(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = as_tokens)] tokens: Vec<u32>,
        cache_salt: Option<String>,
        lora: Option<String>,
        extras: Option<Vec<PyBackedBytes>>,
    ) -> PyResult<BlockHashes> {
        let core = self.core()?;
        let (scope, extras) = (Scope { lora, cache_salt }, extras_of(extras));
        let hashes = run(py, tokens.len(), || {
            on!(core, |cache| cache
                .compute_block_hashes(&tokens, &scope, extras))
        });
        Ok(BlockHashes(hashes))
    }

    /// A sequence that holds nothing yet, its full blocks hashed. Any thread.
    ///
    /// `extras` are bytes that a block's KV depends on besides its tokens, one entry for each block
    /// from the first on, empty where there is none.
    #[pyo3(signature = (tokens, *, cache_salt=None, lora=None, extras=None))]
    fn new_sequence(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = as_tokens)] tokens: Vec<u32>,
        cache_salt: Option<String>,
        lora: Option<String>,
        extras: Option<Vec<PyBackedBytes>>,
    ) -> PyResult<Sequence> {
        let core = self.core()?;
        let (scope, extras) = (Scope { lora, cache_salt }, extras_of(extras));
        let count = tokens.len();
        let sequence = run(py, count, || {
            on!(core, |cache| cache.new_sequence(tokens, scope, extras))
        });
        Ok(Sequence::new(sequence))
    }

    /// How many leading tokens are cached, in full blocks. Any thread; changes nothing.
    fn probe(&self, hashes: &BlockHashes) -> PyResult<usize> {
        Ok(on!(self.core()?, |cache| cache.probe(&hashes.0)))
    }

    /// `probe` for a sequence.
    fn count_prefix_hits(&self, sequence: &Sequence) -> PyResult<usize> {
        let mut sequence = sequence.use_as("sequence")?;
        let hits = on!(self.core()?, |cache| cache.count_prefix_hits(&mut sequence));
        hits.map_err(IntoPyErr::into_py_err)
    }

    /// Take the first `hit_tokens` as hits and slots for `num_tokens` more, all or none.
    ///
    /// Returns the hit tokens really taken, fewer than asked where some are gone meanwhile; None when
    /// blocks are lacking, and then nothing has changed.
    fn commit_prefix_plan(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        hit_tokens: &Bound<'_, PyAny>,
        num_tokens: &Bound<'_, PyAny>,
    ) -> PyResult<Option<usize>> {
        let hit_tokens: usize = number("hit_tokens", hit_tokens)?;
        let num_tokens = number("num_tokens", num_tokens)?;
        let sequence = &mut *sequence.use_as("sequence")?;
        let (core, _writing) = self.core_to_write()?;
        let work = hit_tokens.saturating_add(num_tokens);
        run(py, work, || {
            on!(core, |cache| cache
                .commit_prefix_plan(sequence, hit_tokens, num_tokens))
        })
        .map_err(IntoPyErr::into_py_err)
    }

    /// Give each sequence `counts[i]` more slots, in order.
    ///
    /// Returns how many leading sequences got all of theirs; it stops at the first that could not,
    /// which is unchanged as all after it.
    fn append_slots(
        &self,
        sequences: &Bound<'_, PyAny>,
        counts: &Bound<'_, PyAny>,
    ) -> PyResult<usize> {
        let counts = numbers("counts", counts)?;
        self.on_batch(sequences, |core, batch| {
            on!(core, |cache| cache.append_slots(batch, &counts))
        })
    }

    /// Add one token to each sequence.
    fn append_tokens(
        &self,
        sequences: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = as_tokens)] tokens: Vec<u32>,
    ) -> PyResult<()> {
        self.on_batch(sequences, |core, batch| {
            on!(core, |cache| cache.append_tokens(batch, &tokens))
        })
    }

    /// Say that the KV of the first `upto[i]` tokens is there, and publish the full blocks among them.
    ///
    /// Returns the twins among them: (sequence, group, index in the block table, the block that
    /// already holds the content). A sequence committed before the last clear publishes nothing.
    fn mark_blocks_filled(
        &self,
        py: Python<'_>,
        sequences: &Bound<'_, PyAny>,
        upto: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<(usize, u16, usize, u32)>> {
        let upto: &[usize] = &numbers("upto", upto)?;
        let twins = self.on_batch(sequences, |core, batch| {
            let filled = batch.iter().map(|sequence| sequence.num_filled()).sum();
            let work = upto
                .iter()
                .fold(0, |sum: usize, &upto| sum.saturating_add(upto));
            run(py, work.saturating_sub(filled), || {
                on!(core, |cache| cache.mark_blocks_filled(batch, upto))
            })
        })?;
        let plain = |twin: &cache::Twin| {
            let group = twin.group.get();
            (twin.sequence, group, twin.index, twin.holder.get())
        };
        Ok(twins.iter().map(plain).collect())
    }

    /// Swap a published block of a sequence for `block`, the twin that hits, and release its own one.
    #[pyo3(signature = (sequence, group, index, block))]
    fn replace_block(
        &self,
        sequence: &Sequence,
        #[pyo3(from_py_with = as_group)] group: GroupId,
        index: &Bound<'_, PyAny>,
        block: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let index = number("index", index)?;
        let block = BlockId::new(number("block", block)?);
        let mut sequence = sequence.use_as("sequence")?;
        let (core, _writing) = self.core_to_write()?;
        let replaced = on!(core, |cache| {
            cache.replace_block(&mut sequence, group, index, block)
        });
        replaced.map_err(IntoPyErr::into_py_err)
    }

    /// Give all blocks of each sequence back, the tail first, so that it is evicted before the head.
    ///
    /// The sequence can be committed again.
    fn release(&self, py: Python<'_>, sequences: &Bound<'_, PyAny>) -> PyResult<()> {
        self.on_batch(sequences, |core, batch| {
            let work = batch.iter().map(|sequence| sequence.num_slots()).sum();
            run(py, work, || on!(core, |cache| cache.release(batch)))
        })
    }

    /// Forget everything cached, in constant time. Sequences keep their blocks and publish no more.
    fn clear_cache_index(&self) -> PyResult<()> {
        let (core, _writing) = self.core_to_write()?;
        on!(core, |cache| cache.clear_cache_index());
        Ok(())
    }

    /// Forget everything cached, and hash under the next version of the weights from now on.
    fn new_weight_version(&self) -> PyResult<u64> {
        let (core, _writing) = self.core_to_write()?;
        Ok(on!(core, |cache| cache.new_weight_version()))
    }

    /// The version of the weights, which stands in every hash; 0 at first.
    #[getter]
    fn weight_version(&self) -> PyResult<u64> {
        Ok(on!(self.core()?, |cache| cache.weight_version()))
    }

    /// Pin the cached full blocks among the first `num_tokens` tokens; they are evicted last.
    ///
    /// Returns how many blocks were not pinned before. The sequence need not hold anything.
    fn pin(&self, sequence: &Sequence, num_tokens: &Bound<'_, PyAny>) -> PyResult<usize> {
        let num_tokens = number("num_tokens", num_tokens)?;
        let mut sequence = sequence.use_as("sequence")?;
        let (core, _writing) = self.core_to_write()?;
        let pinned = on!(core, |cache| cache.pin(&mut sequence, num_tokens));
        pinned.map_err(IntoPyErr::into_py_err)
    }

    /// Take the pins off the sequence's cached blocks. Returns how many were pinned.
    fn unpin(&self, sequence: &Sequence) -> PyResult<usize> {
        let mut sequence = sequence.use_as("sequence")?;
        let (core, _writing) = self.core_to_write()?;
        let unpinned = on!(core, |cache| cache.unpin(&mut sequence));
        unpinned.map_err(IntoPyErr::into_py_err)
    }

    /// Move the oldest `count` free pinned blocks to the regular tier. Returns how many there were.
    fn demote(&self, count: &Bound<'_, PyAny>) -> PyResult<usize> {
        let count = number("count", count)?;
        let (core, _writing) = self.core_to_write()?;
        Ok(on!(core, |cache| cache.demote(count)))
    }

    /// Set the number of blocks, the null block counted. Returns how many above it are still held.
    fn resize(&self, num_blocks: &Bound<'_, PyAny>) -> PyResult<usize> {
        let num_blocks = number("num_blocks", num_blocks)?;
        let (core, _writing) = self.core_to_write()?;
        let busy = on!(core, |cache| cache.resize(num_blocks));
        busy.map_err(IntoPyErr::into_py_err)
    }

    /// Write the block tables of a batch into the caller's arrays.
    ///
    /// For each sequence: the pages that cover positions 0 to `starts[i] + counts[i]` (`indptr` and
    /// `indices`, and the tokens on the last page), and block * block_size + offset for each of the
    /// `counts[i]` computed tokens. Returns the number of pages written.
    #[expect(
        clippy::too_many_arguments,
        reason = "the arguments of the Python method"
    )]
    fn fill_block_tables(
        &self,
        sequences: &Bound<'_, PyAny>,
        starts: &Bound<'_, PyAny>,
        counts: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = as_group)] group: GroupId,
        indptr: &Bound<'_, PyArray1<i32>>,
        indices: &Bound<'_, PyArray1<i32>>,
        last_page_len: &Bound<'_, PyArray1<i32>>,
        slot_mapping: &Bound<'_, PyArray1<i64>>,
    ) -> PyResult<usize> {
        let starts: Vec<usize> = numbers("starts", starts)?;
        let counts: Vec<usize> = numbers("counts", counts)?;
        let batch = Batch::new(sequences)?;
        let batch = batch.use_all()?;
        let batch: Vec<&core::Sequence> = batch.iter().map(|sequence| &**sequence).collect();
        let core = self.core()?;
        // Last: code of the caller, which reading an argument can run, could resize the arrays. None
        // runs from here on.
        let mut indptr = writable("indptr", indptr)?;
        let mut indices = writable("indices", indices)?;
        let mut last_page_len = writable("last_page_len", last_page_len)?;
        let mut slot_mapping = writable("slot_mapping", slot_mapping)?;
        let mut buffers = TableBuffers {
            indptr: slice_of("indptr", &mut indptr)?,
            indices: slice_of("indices", &mut indices)?,
            last_page_len: slice_of("last_page_len", &mut last_page_len)?,
            slot_mapping: slice_of("slot_mapping", &mut slot_mapping)?,
        };
        let written = on!(core, |cache| {
            cache.fill_block_tables(&batch, &starts, &counts, group, &mut buffers)
        });
        written.map_err(IntoPyErr::into_py_err)
    }

    /// Tokens in a block.
    #[getter]
    fn block_size(&self) -> PyResult<usize> {
        Ok(on!(self.core()?, |cache| cache.block_size()))
    }

    /// Blocks that can be handed out: the null block is not counted.
    #[getter]
    fn num_blocks(&self) -> PyResult<usize> {
        Ok(on!(self.core()?, |cache| cache.store().num_blocks()) - 1)
    }

    /// Blocks that nobody holds.
    #[getter]
    fn num_free_blocks(&self) -> PyResult<usize> {
        Ok(on!(self.core()?, |cache| cache.store().num_free()))
    }

    /// The free blocks, the one to be handed out next first. For debugging.
    fn free_order(&self) -> PyResult<Vec<u32>> {
        let _paused = self.writer.pause()?;
        Ok(ids_of(&on!(self.core()?, |cache| cache
            .store()
            .free_order())))
    }

    /// The blocks that hold a hash, lowest id first. For debugging.
    fn cached_blocks(&self) -> PyResult<Vec<u32>> {
        let _paused = self.writer.pause()?;
        Ok(ids_of(&on!(self.core()?, |cache| cache
            .store()
            .cached_blocks())))
    }

    /// Lifetime counts (queries and hits in tokens), and blocks by state.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let core = self.core()?;
        let dict = on!(core, |cache| store_stats(py, cache.store()))?;
        let stats = on!(core, |cache| cache.stats());
        dict.set_item("queries", stats.queries)?;
        dict.set_item("hits", stats.hits)?;
        Ok(dict)
    }

    /// Check every invariant of the cache; raises RuntimeError that names the broken one.
    fn validate(&self) -> PyResult<()> {
        let _paused = self.writer.pause()?;
        on!(self.core()?, |cache| cache.validate()).map_err(IntoPyErr::into_py_err)
    }

    /// Make the calling thread the one that may write; for a shared cache that changes nothing.
    fn adopt_writer(&self) -> PyResult<()> {
        self.writer.adopt()
    }

    /// End the cache: every later call raises RuntimeError.
    fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }
}

impl PrefixCache {
    /// Calls `work`, which changes the cache, with all sequences of the argument `sequences`.
    fn on_batch<T>(
        &self,
        sequences: &Bound<'_, PyAny>,
        work: impl FnOnce(&Core, &mut [&mut core::Sequence]) -> Result<T, CacheError>,
    ) -> PyResult<T> {
        let batch = Batch::new(sequences)?;
        let mut batch = batch.use_all()?;
        let mut batch: Vec<&mut core::Sequence> =
            batch.iter_mut().map(|sequence| &mut **sequence).collect();
        let (core, _writing) = self.core_to_write()?;
        work(core, &mut batch).map_err(IntoPyErr::into_py_err)
    }
}

/// What a pool tells of itself.
pub fn store_stats<'py>(py: Python<'py>, store: &impl BlockStore) -> PyResult<Bound<'py, PyDict>> {
    let stats = store.stats();
    let dict = PyDict::new(py);
    dict.set_item("evictions", stats.evictions)?;
    dict.set_item("allocations", stats.allocations)?;
    dict.set_item("touches", stats.touches)?;
    dict.set_item("cached_blocks", stats.cached)?;
    dict.set_item("blocks_in_use", stats.in_use)?;
    dict.set_item("free_blocks", stats.free)?;
    dict.set_item("pinned_free_blocks", stats.pinned_free)?;
    Ok(dict)
}
